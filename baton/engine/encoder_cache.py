"""The encoder cache: which encoded inputs (images, say) the runner holds, shared by content and bounded in rows.

An input is encoded beside the steps, on this node or another one. A prompt is computed up to an input whose rows are
not there yet (the cut rule), and goes on once they are. Rules:

  - Inputs are named by the digest of their content, so two requests with one image have one entry.
  - A request holds an entry from the step that computes its first position to the commit of its last one; held rows are
    never evicted. Other rows are kept for later requests, and go, the longest unused first, when others need the room.
  - A request never holds an entry while it waits, so two requests can't wait for each other's rows.
  - What is being encoded has its room already. It can't be evicted before it is done, and is given up if all requests
    that asked for it have ended.

Follows the idea of vLLM's EncoderCacheManager, which counts embeddings too, but encodes in the step.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from baton.messages.spans import EncoderContent, Span
from baton.values import value


@value(frozen=True, slots=True)
class EncoderInput:
    """One input at its place in a prompt."""

    content: EncoderContent
    """What is to be encoded."""
    start: int
    """The first position of the prompt that one of its rows is for."""
    stop: int
    """The position behind the last one."""
    num_rows: int
    """Rows that its encoder makes; between them a prompt may have text."""
    tenant: str = ""
    """The tenant whose request it is of; empty: there are no tenants."""

    @property
    def digest(self) -> str:
        """Names the content."""
        return self.content.digest


def encoder_inputs(
    spans: Sequence[Span], contents: Iterable[EncoderContent], tenant: str = ""
) -> tuple[EncoderInput, ...]:
    """The inputs of a tenant's prompt, in order. `contents`: their data, as far as it is here."""
    known = {content.digest: content for content in contents}
    inputs: list[EncoderInput] = []
    for span in spans:
        if not span.is_encoded:
            continue
        if span.first_row:
            # A further part of the same content.
            first = inputs.pop()
            num_rows = span.first_row + span.length
            inputs.append(EncoderInput(first.content, first.start, span.stop, num_rows, tenant))
        else:
            content = known.get(span.digest, EncoderContent(span.digest))
            inputs.append(EncoderInput(content, span.start, span.stop, span.length, tenant))
    return tuple(inputs)


@dataclass(frozen=True, slots=True)
class EncoderWork:
    """What a runner is to do for the encoder cache."""

    to_release: Sequence[str]
    """The digests of inputs whose rows no step names any more, or that need not be encoded any more."""
    to_encode: Sequence[EncoderInput]
    """Inputs of which it is to make rows, in the order of need; some may be among those to release."""


class _State(enum.Enum):
    ENCODING = enum.auto()
    READY = enum.auto()


@dataclass(slots=True)
class _Entry:
    num_rows: int
    state: _State = _State.ENCODING
    holders: dict[str, int] = field(default_factory=dict)
    """By the ids of the requests that hold it, behind which position of theirs they need it no more."""
    wanted_by: set[str] = field(default_factory=set)
    """Ids of the requests that asked for it while it was encoded, and have not ended."""
    is_used: bool = False
    """Whether a request has computed with it."""


class EncoderCache:
    """The entries of one engine's encoder cache. The engine's thread alone calls it."""

    def __init__(self, num_rows: int, note: Callable[[str, bool], None] = lambda digest, is_there: None) -> None:
        """`num_rows`: the most rows of all entries together; 0: the engine's model encodes nothing.

        `note` is told whenever rows are there (True), and when they are there no more, with the input's digest.
        """
        self.num_rows = num_rows
        self._note = note
        self.num_used_rows = 0
        """Rows of all entries, those that are being encoded included."""
        self.num_hits = 0
        """How often a request computed with an input that was encoded for another one, or for it earlier."""
        self.num_encoded = 0
        """Inputs that were encoded here."""
        self.num_fetched = 0
        """Inputs whose rows another node had made."""
        self._num_encoding = 0
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Ready entries without holders, the longest unused first."""
        self._to_encode: list[EncoderInput] = []
        self._evicted: list[str] = []

    @property
    def is_encoding(self) -> bool:
        """Whether rows are awaited."""
        return self._num_encoding > 0

    def awaits(self, digest: str) -> bool:
        """Whether the rows of this input are awaited."""
        entry = self._entries.get(digest)
        return entry is not None and entry.state is _State.ENCODING

    def can_ever_hold(self, inputs: Iterable[EncoderInput]) -> bool:
        """Whether each of these inputs fits into the cache, alone if need be."""
        return all(encoder_input.num_rows <= self.num_rows for encoder_input in inputs)

    def hold_for_chunk(self, request_id: str, inputs: Sequence[EncoderInput], start: int, num_tokens: int) -> int:
        """How many of the tokens [start, start + num_tokens) can be computed now: up to an input without rows.

        The inputs that these tokens need are held. The first one that is missing is encoded as soon as there is room
        for it, and those behind it too, if the room is free. `inputs`: those of the request's prompt, in order.
        """
        stop = start + num_tokens
        is_cut = False
        for encoder_input in inputs:
            if encoder_input.stop <= start:
                continue
            entry = self._entries.get(encoder_input.digest)
            if entry is not None and entry.state is _State.READY:
                if not is_cut and encoder_input.start < stop:
                    self._hold(request_id, encoder_input, entry)
                continue
            if entry is None:
                entry = self._begin(encoder_input, evicts=not is_cut)
            stop, is_cut = min(stop, max(start, encoder_input.start)), True
            if entry is None:
                break
            entry.wanted_by.add(request_id)
        return stop - start

    def computed(self, request_id: str, inputs: Sequence[EncoderInput], num_computed_tokens: int) -> None:
        """Let go of the inputs of which a request has computed the last position that a step was decided for.

        An input that comes again later is not kept for that: what lies between may need its room.
        """
        for encoder_input in inputs:
            entry = self._entries.get(encoder_input.digest)
            if entry is not None and entry.holders.get(request_id, num_computed_tokens + 1) <= num_computed_tokens:
                self.num_hits += entry.is_used
                entry.is_used = True
                self._release(request_id, encoder_input.digest)

    def release(self, request_id: str, inputs: Iterable[EncoderInput]) -> None:
        """Let go of all inputs of a request that has no seat, and waits for one."""
        for encoder_input in inputs:
            self._release(request_id, encoder_input.digest)

    def drop(self, request_id: str, inputs: Iterable[EncoderInput]) -> None:
        """Let go of all inputs of a request that ends. Those that nobody else asked for are not encoded any more."""
        for encoder_input in inputs:
            self._release(request_id, encoder_input.digest)
            entry = self._entries.get(encoder_input.digest)
            if entry is None or request_id not in entry.wanted_by:
                continue
            entry.wanted_by.discard(request_id)
            if entry.state is _State.ENCODING and not entry.wanted_by:
                self._forget(encoder_input.digest, entry)
                self._to_encode = [waiting for waiting in self._to_encode if waiting.digest != encoder_input.digest]
                self._evicted.append(encoder_input.digest)

    def encoded(self, digest: str, *, is_fetched: bool = False) -> None:
        """Note that an input's rows are there. Rows that nobody waits for any more are evicted.

        `is_fetched`: another node made them.
        """
        entry = self._entries.get(digest)
        if entry is None:
            self._evicted.append(digest)
        elif entry.state is _State.ENCODING:
            entry.state = _State.READY
            self._num_encoding -= 1
            self.num_encoded += not is_fetched
            self.num_fetched += is_fetched
            self._idle[digest] = None
            self._note(digest, True)

    def failed(self, digest: str) -> frozenset[str]:
        """Forget an input that could not be encoded. Returns the ids of the requests that asked for it."""
        entry = self._entries.get(digest)
        if entry is None or entry.state is not _State.ENCODING:
            return frozenset()
        self._forget(digest, entry)
        return frozenset(entry.wanted_by)

    @property
    def digests(self) -> Collection[str]:
        """The digests of all entries."""
        return self._entries.keys()

    @property
    def ready_digests(self) -> Collection[str]:
        """The digests of the entries whose rows are there."""
        return [digest for digest, entry in self._entries.items() if entry.state is _State.READY]

    def take_inputs_to_encode(self) -> Sequence[EncoderInput]:
        """The inputs that are to be encoded since the last call, in the order of need."""
        taken, self._to_encode = self._to_encode, []
        return taken

    def take_evicted(self) -> Sequence[str]:
        """The digests of the entries that were evicted since the last call, whose rows no step names any more."""
        taken, self._evicted = self._evicted, []
        return taken

    def _hold(self, request_id: str, encoder_input: EncoderInput, entry: _Entry) -> None:
        self._idle.pop(encoder_input.digest, None)
        entry.holders[request_id] = encoder_input.stop

    def _release(self, request_id: str, digest: str) -> None:
        entry = self._entries.get(digest)
        if entry is None or request_id not in entry.holders:
            return
        del entry.holders[request_id]
        if not entry.holders:
            self._idle[digest] = None

    def _begin(self, encoder_input: EncoderInput, *, evicts: bool) -> _Entry | None:
        """Give an input room and have it encoded; None if there is no room. `evicts`: idle entries may go for it."""
        if evicts:
            while self._idle and self.num_used_rows + encoder_input.num_rows > self.num_rows:
                digest, _ = self._idle.popitem(last=False)
                self._evicted.append(digest)
                self._forget(digest, self._entries[digest])
        if self.num_used_rows + encoder_input.num_rows > self.num_rows:
            return None
        entry = self._entries[encoder_input.digest] = _Entry(encoder_input.num_rows)
        self._num_encoding += 1
        self.num_used_rows += encoder_input.num_rows
        self._to_encode.append(encoder_input)
        return entry

    def _forget(self, digest: str, entry: _Entry) -> None:
        del self._entries[digest]
        self._num_encoding -= entry.state is _State.ENCODING
        self._idle.pop(digest, None)
        self.num_used_rows -= entry.num_rows
        if entry.state is _State.READY:
            self._note(digest, False)
