"""Encode nodes in virtual time: each makes rows of one image at a time, and a prompt waits for its images' rows.

Without encode nodes the node that computes a prompt encodes, which makes the first step of the prompt that much longer.
Rows are small beside KV, so a fetch takes the network's latency alone. No image is sent twice, and encode nodes don't
fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypedDict

import xxhash

from baton.bench.simulator.events import Timeline
from baton.messages.node import LoadReport, NodeDescription
from baton.messages.spans import EncoderContent


def images_of(index: int, share: float, seed: int) -> tuple[EncoderContent, ...]:
    """The images of a request: one in this share of the requests, whatever else is simulated."""
    name = b"image %d" % index
    has_one = share > 0 and xxhash.xxh64_intdigest(name, seed) < share * 2.0**64
    return (EncoderContent.of(name),) if has_one else ()


class EncoderFigures(TypedDict):
    """What encode nodes have done."""

    num_images: int
    busy_s: float
    waited_s: float
    """The time that images waited for others, together."""


class EncodeNode:
    """Encodes images in the order in which they come."""

    def __init__(
        self, description: NodeDescription, timeline: Timeline, encode_s: float, report: Callable[[EncodeNode], None]
    ) -> None:
        """`report` is called when the number of images here has changed."""
        self.description = description
        self.incarnation = description.incarnation
        self.figures = EncoderFigures(num_images=0, busy_s=0.0, waited_s=0.0)
        self._timeline = timeline
        self._encode_s = encode_s
        self._report = report
        self._images: deque[tuple[float, Callable[[], None]]] = deque()
        """When each came, and what is called when it is encoded; the first one is being encoded."""

    def load(self) -> LoadReport:
        num_images = len(self._images)
        return LoadReport(running=min(1, num_images), waiting=max(0, num_images - 1))

    def encode(self, done: Callable[[], None]) -> None:
        """Encode an image when those before it are done."""
        self._images.append((self._timeline.now, done))
        self._report(self)
        if len(self._images) == 1:
            self._begin()

    def _begin(self) -> None:
        now = self._timeline.now
        self.figures["waited_s"] += now - self._images[0][0]
        self._timeline.call_at(now + self._encode_s, self._end)

    def _end(self) -> None:
        self.figures["num_images"] += 1
        self.figures["busy_s"] += self._encode_s
        _, done = self._images.popleft()
        self._report(self)
        if self._images:
            self._begin()
        done()


def total(nodes: Sequence[EncodeNode]) -> EncoderFigures:
    """The figures of all nodes together."""
    figures = [node.figures for node in nodes]
    return EncoderFigures(
        num_images=sum(each["num_images"] for each in figures),
        busy_s=sum(each["busy_s"] for each in figures),
        waited_s=sum(each["waited_s"] for each in figures),
    )
