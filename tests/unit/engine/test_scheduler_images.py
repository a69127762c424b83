"""Prompts with images: they are computed up to an image without rows, also cached, preempted, swapped, or failing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from baton.engine.core import EncodesAtOnce, InputEncoder
from baton.engine.encoder_cache import EncoderInput
from baton.engine.request import RequestStatus
from baton.engine.runner import LazyExecutor
from baton.engine.scheduler import Scheduler
from baton.errors import InvalidRequest
from baton.messages.node import Leg, Outcome
from baton.messages.spans import Span
from tests.doubles.fake_runner import FakeRunner
from tests.support.engine_rig import EngineRig


def image(digest: str, start: int, length: int, *, first_row: int = 0) -> Span:
    return Span(start, length, digest, is_encoded=True, first_row=first_row)


class _HeldEncoder(EncodesAtOnce):
    """Leaves inputs to the rig, unless that says they are to be encoded at once."""

    def __init__(self, rig: ImageRig, scheduler: Scheduler, runner: FakeRunner) -> None:
        super().__init__(scheduler, runner)
        self._rig = rig

    def start_encoding(self, each: EncoderInput) -> None:
        if self._rig.encodes_at_once:
            super().start_encoding(each)
        else:
            self._rig.encoding.append(each)


class ImageRig(EngineRig):
    """An engine whose images are encoded when the test says so."""

    def __init__(self, num_encoder_rows: int = 16, *, at_once: bool = False, **limits: Any) -> None:
        super().__init__(make_encoder=self._make_encoder, num_encoder_rows=num_encoder_rows, **limits)
        self.encoding: list[EncoderInput] = []
        self.encodes_at_once = at_once

    def _make_encoder(self, scheduler: Scheduler, runner: FakeRunner) -> InputEncoder:
        return _HeldEncoder(self, scheduler, runner)

    def encode(self, *digests: str) -> None:
        for digest in digests:
            each = next(each for each in self.encoding if each.digest == digest)
            self.encoding.remove(each)
            try:
                self.runner.encoder.encode(each.content, each.num_rows)
            except InvalidRequest as error:
                self.scheduler.input_failed(digest, error)
            else:
                self.scheduler.input_encoded(digest)

    def waits(self) -> bool:
        """Whether the engine has nothing to do until an image is encoded; it finds out with a step that is empty."""
        if self.core.has_work():
            self.step()
        return not self.core.has_work()


def test_a_prompt_is_computed_up_to_an_image_that_is_still_to_be_encoded() -> None:
    rig = ImageRig()
    request = rig.begin("r", 20, spans=[image("a", 8, 6)], max_tokens=3)
    assert request.num_computed_tokens == 8
    assert [(each.digest, each.num_rows) for each in rig.encoding] == [("a", 6)]
    assert rig.waits()
    rig.complete("text", 5, max_tokens=2)
    assert rig.reason("text") is Outcome.LENGTH
    rig.encode("a")
    rig.run_right("r")


def test_a_prompt_that_begins_with_an_image_gets_no_seat_before_it_is_encoded() -> None:
    rig = ImageRig(max_num_seqs=1)
    request = rig.add("r", 20, spans=[image("a", 0, 6)], max_tokens=3)
    rig.begin("text", 5, max_tokens=2)
    assert request.status is RequestStatus.WAITING
    rig.run()
    assert rig.reason("text") is Outcome.LENGTH
    assert rig.waits()
    rig.encode("a")
    rig.run_right("r")


def test_an_image_of_several_parts_with_text_between_is_encoded_once() -> None:
    rig = ImageRig(max_num_batched_tokens=8)
    parts = [image("a", 3, 4), image("a", 9, 4, first_row=4), image("a", 15, 4, first_row=8)]
    rig.begin("r", 24, spans=parts, max_tokens=3)
    assert [(each.digest, each.start, each.stop, each.num_rows) for each in rig.encoding] == [("a", 3, 19, 12)]
    rig.encode("a")
    rig.run_right("r")


def test_the_same_image_is_encoded_once_and_other_text_before_it_shares_no_block() -> None:
    rig = ImageRig(at_once=True)
    rig.complete("r", 20, spans=[image("a", 4, 8)], max_tokens=2)
    rig.complete("s", 20, spans=[image("a", 4, 8)], max_tokens=2)
    assert rig.runner.encoder.num_encoded == 1
    prompt = rig.requests["r"].prompt_token_ids
    rig.add("again", prompt, spans=[image("a", 4, 8)], max_tokens=2)
    rig.complete("other image", prompt, spans=[image("b", 4, 8)], max_tokens=2)
    assert rig.requests["again"].num_cached_tokens == 16
    assert rig.requests["other image"].num_cached_tokens == 4
    assert rig.runner.encoder.num_encoded == 2
    for name in ("r", "s", "again", "other image"):
        assert rig.tokens[name] == rig.expected(name, 2)


def test_a_cached_prefix_needs_no_encoder() -> None:
    rig = ImageRig(at_once=True, num_encoder_rows=8)
    rig.complete("r", 21, spans=[image("a", 4, 8)], max_tokens=2)
    rig.complete("other", 12, spans=[image("b", 4, 8)], max_tokens=2)
    assert rig.runner.encoder.encoded.keys() == {"b"}
    rig.complete("again", rig.requests["r"].prompt_token_ids, spans=[image("a", 4, 8)], max_tokens=2)
    assert rig.runner.encoder.num_encoded == 2
    assert rig.tokens["again"] == rig.expected("again", 2)


def test_an_image_that_can_not_be_used_ends_all_that_need_it_and_nobody_else() -> None:
    rig = ImageRig()
    rig.runner.encoder.unusable["bad"] = "it can't be decoded"
    rig.add("r", 20, spans=[image("good", 0, 4), image("bad", 8, 4)], max_tokens=3)
    rig.add("s", 20, spans=[image("bad", 0, 4)], max_tokens=3)
    rig.begin("t", 20, spans=[image("good", 0, 4)], max_tokens=3, n=2)
    rig.encode("good")
    rig.step()
    rig.encode("bad")
    rig.run()
    assert rig.reason("r") is rig.reason("s") is Outcome.INVALID
    assert "can't be decoded" in str(rig.ends["r"].error)
    assert rig.tokens["t"] == rig.expected("t", 3)


def test_an_image_that_is_too_large_for_the_cache_is_refused_at_once() -> None:
    rig = ImageRig(num_encoder_rows=8)
    rig.add("r", 20, spans=[image("a", 2, 9)], max_tokens=3)
    assert rig.reason("r") is Outcome.INVALID
    assert "more rows than the 8" in str(rig.ends["r"].error)
    assert not rig.core.has_work()


def test_an_aborted_request_leaves_its_room_to_others() -> None:
    rig = ImageRig(num_encoder_rows=8)
    rig.begin("r", 20, spans=[image("a", 2, 8)], max_tokens=3)
    rig.abort("r")
    rig.begin("s", 20, spans=[image("b", 2, 8)], max_tokens=3)
    rig.encode("a")
    rig.run()
    rig.encode("b")
    rig.run_right("s")
    assert rig.runner.encoder.encoded.keys() == {"b"}


def test_prompts_are_cut_at_images_also_without_chunked_prefill() -> None:
    """Otherwise two images that don't fit together could never be computed."""
    rig = ImageRig(num_encoder_rows=6, enable_chunked_prefill=False, max_model_len=64, at_once=True)
    for name, digests in (("r", "ab"), ("s", "cd")):
        rig.add(name, 20, spans=[image(digests[0], 2, 4), image(digests[1], 10, 4)], max_tokens=3)
    rig.run_right("r", "s")
    assert rig.runner.encoder.num_encoded == 4


def test_what_only_ended_requests_asked_for_is_not_encoded_and_leaves_its_room() -> None:
    rig = ImageRig(num_encoder_rows=16)
    rig.add("gone", 40, spans=[image(digest, 10 * place, 8) for place, digest in enumerate("abc")])
    shared = rig.begin("shared", 20, spans=[image("a", 0, 8)], max_tokens=3)
    assert [each.digest for each in rig.encoding] == ["a", "b"]
    rig.abort("gone")
    rig.begin("next", 20, spans=[image("d", 0, 8)], max_tokens=3)
    assert [each.digest for each in rig.encoding] == ["a", "b", "d"]
    assert shared.status is RequestStatus.WAITING
    # Its encoding had begun: the rows that it makes are forgotten.
    rig.encode("b", "a", "d")
    rig.run_right("next", "shared")
    assert rig.runner.encoder.encoded.keys() == {"a", "d"}


def test_a_failed_encoding_ends_no_request_that_did_not_ask_for_it() -> None:
    rig = ImageRig(at_once=True)
    rig.complete("first", 20, spans=[image("a", 0, 4)], max_tokens=2)
    rig.encodes_at_once = False
    rig.add("remote", 20, leg=Leg.DECODE, spans=[image("b", 0, 4)], max_tokens=3)
    rig.begin("here", 20, spans=[image("b", 0, 4)], max_tokens=3)
    rig.runner.encoder.unusable["b"] = "no memory"
    rig.encode("b")
    rig.run()
    assert rig.reason("here") is Outcome.INVALID
    assert rig.reason("remote") is None


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_has_its_images_encoded_again_if_they_are_gone(mode: str) -> None:
    rig = ImageRig(
        num_blocks=13, num_encoder_rows=8, at_once=True, preemption_mode=mode, num_host_blocks=24, max_num_seqs=3
    )
    for name in "abc":
        rig.add(name, 14, spans=[image(name, 2, 8)], max_tokens=14)
    rig.run()
    assert rig.scheduler.make_stats().num_preemptions > 0
    for name in "abc":
        assert rig.tokens[name] == rig.expected(name, 14)


def test_a_prefill_leg_with_images_offers_its_blocks() -> None:
    rig = ImageRig(max_num_batched_tokens=8)
    rig.begin("p", 20, leg=Leg.PREFILL, spans=[image("a", 6, 7)], max_tokens=3)
    rig.encode("a")
    rig.run()
    assert rig.reason("p") is Outcome.HANDED_OFF


def _random_spans(rng: Random, length: int) -> Sequence[Span]:
    spans, place = [], rng.randint(0, 6)
    while place + 6 < length:
        digest = rng.choice("abcdef")
        spans.append(image(digest, place, "abcdef".index(digest) + 1))
        place = spans[-1].stop + rng.randint(0, 6)
    return spans


@pytest.mark.parametrize("seed", range(40))
def test_tokens_are_right_whatever_is_encoded_when(seed: int) -> None:
    """Small caches, few blocks, steps ahead, preemptions, aborts."""
    rng = Random(seed)
    rig = ImageRig(
        num_encoder_rows=rng.choice([6, 8, 20]),
        num_blocks=rng.choice([17, 40]),
        num_host_blocks=rng.choice([0, 30]),
        preemption_mode="auto" if rng.random() < 0.5 else "recompute",
        max_num_batched_tokens=rng.choice([8, 64]),
        max_num_seqs=rng.choice([2, 5]),
        executor=LazyExecutor() if rng.random() < 0.5 else None,
    )
    to_come = [(f"r{number}", rng.randint(5, 40)) for number in range(12)]
    aborted = set()
    for _ in range(3000):
        draw = rng.random()
        if to_come and draw < 0.1:
            name, length = to_come.pop()
            rig.add(
                name, length, spans=_random_spans(rng, length), max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 2])
            )
        elif rig.encoding and draw < 0.4:
            rig.encode(rng.choice(rig.encoding).digest)
        elif draw < 0.42 and rig.scheduler.requests:
            name = rng.choice(list(rig.scheduler.requests)).split("/")[0]
            aborted.add(name)
            rig.abort(name)
        elif rig.core.has_work():
            rig.step()
        elif not to_come and not rig.encoding:
            break
    assert not rig.scheduler.requests
    for name, request in rig.requests.items():
        if name not in aborted:
            assert rig.reason(name) is Outcome.LENGTH
            assert rig.tokens[name] == rig.expected(name, request.sampling_params.max_tokens)
