"""A request inside the engine: its tokens, how far they are computed, and its status. Names follow vLLM's V1."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.engine.constraints import RepetitionDetector
from baton.engine.encoder_cache import encoder_inputs
from baton.machine import IllegalEvent
from baton.messages.ids import AttemptKey, Peer, tenant_of
from baton.messages.node import HeldPrefix, Leg, MoveOut, Outcome
from baton.messages.pooling import Pooling, PoolingParams
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.speculation import NO_DRAFTS

if TYPE_CHECKING:
    from baton.engine.batch import Failure
    from baton.engine.constraints import TokenMatcher
    from baton.engine.sequences.beams import BeamGroup
    from baton.engine.sequences.sequence_group import SequenceGroup
    from baton.engine.speculation.request_drafts import RequestDrafts
    from baton.messages.sampling import TokenLogprobs


class RequestStatus(enum.Enum):
    """Where a request is. REQUEST_TABLE says which status follows which."""

    WAITING = enum.auto()
    """The request waits for a seat, a budget or blocks; a computed beam waits for what continues it."""
    WAITING_FOR_GRAMMAR = enum.auto()
    """The request's JSON schema is being compiled."""
    WAITING_FOR_ADAPTER = enum.auto()
    """The request's adapter is being loaded."""
    WAITING_FOR_REMOTE_KVS = enum.auto()
    """Blocks for its prompt are reserved, and the connector fills them from another node."""
    RUNNING = enum.auto()
    """The request takes part in steps."""
    PREEMPTED = enum.auto()
    """The request gave way to others, and its KV will be computed again."""
    SWAPPED = enum.auto()
    """The request gave way to others, and its KV is in the host tier."""
    ENDED = enum.auto()
    """`Request.outcome` says how."""

    __hash__ = object.__hash__  # by identity: Enum's own is a call into Python, in every lookup


class RequestEvent(enum.Enum):
    """What can happen to a live request beside an outcome, and which part of the scheduler says so."""

    GRAMMAR_MISSING = enum.auto()
    """Reported by WaitingRequests: the request came with a schema that is not compiled yet."""
    GRAMMAR_COMPILED = enum.auto()
    """Reported by WaitingRequests, on the node's notice: the schema is compiled."""
    ADAPTER_MISSING = enum.auto()
    """Reported by WaitingRequests: the request came with an adapter that is not loaded yet."""
    ADAPTER_LOADED = enum.auto()
    """Reported by WaitingRequests, on the node's notice: the adapter is loaded."""
    LOAD_BEGUN = enum.auto()
    """Reported by admission: a decode leg has its blocks, and the connector was asked to fill them."""
    LOADED = enum.auto()
    """Reported by Arrivals, on the connector's notice: the prompt's KV is here."""
    LOAD_LOST = enum.auto()
    """Reported by Arrivals, on the connector's notice: KV does not arrive, and is computed here."""
    SEATED = enum.auto()
    """Reported by admission: the request takes part in the step that is being decided."""
    PREEMPTED = enum.auto()
    """Reported by preemption: the request's blocks were freed."""
    SWAPPED_OUT = enum.auto()
    """Reported by preemption: the request's blocks are copied to the host tier."""
    SWAP_LOST = enum.auto()
    """Reported by preemption: the step that was to copy them was lost."""
    BEAM_COMPUTED = enum.auto()
    """Reported by `SchedulerState.park`: a beam gave up its seat until the search has decided which beams continue."""

    __hash__ = object.__hash__


def _request_table() -> dict[tuple[RequestStatus, RequestEvent | Outcome], RequestStatus]:
    state, event = RequestStatus, RequestEvent
    table: dict[tuple[RequestStatus, RequestEvent | Outcome], RequestStatus] = {
        (state.WAITING, event.GRAMMAR_MISSING): state.WAITING_FOR_GRAMMAR,
        (state.WAITING_FOR_GRAMMAR, event.GRAMMAR_COMPILED): state.WAITING,
        (state.WAITING, event.ADAPTER_MISSING): state.WAITING_FOR_ADAPTER,
        (state.WAITING_FOR_ADAPTER, event.ADAPTER_LOADED): state.WAITING,
        (state.WAITING_FOR_ADAPTER, Outcome.ADAPTER_UNAVAILABLE): state.ENDED,
        (state.WAITING, event.LOAD_BEGUN): state.WAITING_FOR_REMOTE_KVS,
        (state.WAITING_FOR_REMOTE_KVS, event.LOADED): state.WAITING,
        (state.WAITING_FOR_REMOTE_KVS, event.LOAD_LOST): state.WAITING,
        # The sender was lost before the request had blocks here.
        (state.WAITING, event.LOAD_LOST): state.WAITING,
        (state.WAITING_FOR_GRAMMAR, event.LOAD_LOST): state.WAITING_FOR_GRAMMAR,
        (state.WAITING_FOR_ADAPTER, event.LOAD_LOST): state.WAITING_FOR_ADAPTER,
        (state.WAITING, event.SEATED): state.RUNNING,
        (state.PREEMPTED, event.SEATED): state.RUNNING,
        (state.SWAPPED, event.SEATED): state.RUNNING,
        (state.RUNNING, event.PREEMPTED): state.PREEMPTED,
        (state.RUNNING, event.SWAPPED_OUT): state.SWAPPED,
        (state.SWAPPED, event.SWAP_LOST): state.PREEMPTED,
        (state.RUNNING, event.BEAM_COMPUTED): state.WAITING,
        # The root of a beam search whose KV came from elsewhere: others go on from it.
        (state.WAITING, event.BEAM_COMPUTED): state.WAITING,
        (state.RUNNING, Outcome.STOP): state.ENDED,
        (state.RUNNING, Outcome.LENGTH): state.ENDED,
        (state.RUNNING, Outcome.HANDED_OFF): state.ENDED,
        # The first token, which arrived with the KV, ends the request; or nothing continues a beam.
        (state.WAITING, Outcome.STOP): state.ENDED,
        (state.WAITING, Outcome.LENGTH): state.ENDED,
        (state.WAITING, Outcome.IGNORED): state.ENDED,
        (state.PREEMPTED, Outcome.IGNORED): state.ENDED,
    }
    for live in RequestStatus:
        if live is not state.ENDED:
            table |= {(live, outcome): state.ENDED for outcome in ENDS_OF_ALL}
    return table


ENDS_OF_ALL = (Outcome.ABORTED, Outcome.ERROR, Outcome.INVALID, Outcome.KV_LOST, Outcome.REPETITION)
"""Outcomes with which a request may end in every live status."""

REQUEST_TABLE = _request_table()


class Request:
    """One request inside one engine. Only the scheduler writes to it."""

    # A step with a thousand running requests waits for memory: slots take a quarter of what a dictionary takes.
    __slots__ = (
        "adapter", "append_only_until", "arrival_time", "attempt", "beams", "block_hashes", "client_index",
        "cut_by", "draft_counts", "drafts", "encoder_inputs", "eos_token_ids", "error", "group", "has_new_draft_counts",
        "held_prefix",
        "is_known", "is_long", "kv_bits", "kv_source", "last_logprobs", "leg", "matchers", "move", "num_cached_tokens",
        "num_computed_tokens", "num_external_tokens", "num_found_tokens", "num_preemptions", "num_prompt_tokens",
        "num_submitted_tokens", "num_unreported", "outcome", "output_token_ids", "parent_id", "pooling",
        "prompt_logprobs", "prompt_token_ids", "pulled_end", "queue_position", "reader_block_size", "repetition",
        "request_id", "root_id", "sampling_params", "seen_from", "sequence_index", "spans", "spec", "spec_token_ids",
        "status", "stop_ids", "stop_reason", "turn_in_s",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        spec: RequestSpec,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        client_index: int = 0,
        arrival_time: float | None = None,
        leg: Leg = Leg.WHOLE,
        kv_source: Peer | None = None,
        output_token_ids: Sequence[int] = (),
        reader_block_size: int = 0,
        attempt: AttemptKey | None = None,
        turn_in_s: float = 0.0,
        held_prefix: HeldPrefix | None = None,
        cut_by: int = 0,
        kv_bits: str = "",
    ) -> None:
        """`spec`: what is computed; the runner has its adapter loaded, or loads it before the request is scheduled.
        `output_token_ids`: tokens that an earlier attempt generated, which generation continues; one sequence only.
        `reader_block_size`: of a prefill leg, tokens in a block of the node that is to read its KV; 0: as many as here.
        `attempt`: its name towards routers and other nodes, where there are any.
        `held_prefix`: where the KV of its first tokens may be pulled from.
        `cut_by`: of a decode leg to which a stream is moved, see `Submit.cut_by`.
        `kv_bits`: see `Submit.kv_bits`.
        `turn_in_s`: how many seconds after its arrival it is its turn, where requests are served in turn.

        Raises ValueError for arguments that contradict each other.
        """
        sampling_params = spec.sampling_params
        if not spec.prompt_token_ids:
            raise ValueError("a request needs at least one prompt token")
        if output_token_ids and (sampling_params.n > 1 or sampling_params.beam_width):
            raise ValueError("only a request of one sequence may begin with output tokens")
        if leg is Leg.EMBED and (output_token_ids or sampling_params.n > 1 or sampling_params.beam_width):
            raise ValueError("an embedding leg has a prompt and one sequence, and no output tokens")
        if spec.pooling is not None and leg is not Leg.EMBED:
            raise ValueError("only an embedding leg has pooling parameters")
        if (leg is Leg.DECODE) != (kv_source is not None):
            raise ValueError("a decode leg needs a KV source, and no other leg may have one")
        num_tokens = len(spec.prompt_token_ids) + len(output_token_ids)
        most = len(spec.prompt_token_ids) + sampling_params.max_tokens
        if cut_by and not (leg is Leg.DECODE and output_token_ids and num_tokens < cut_by <= most):
            raise ValueError(f"cut_by must be {num_tokens + 1} to {most}, for a decode leg with output tokens, or 0")
        # What was submitted. `Arrivals` changes `leg` and `kv_source` alone, when a load is lost and is computed here.
        self.request_id = request_id
        """Its name inside the engine and its runner. A further sequence or beam has one of its own."""
        self.root_id = request_id
        self.sequence_index = 0
        """The request that was submitted, and which of its sequences this is; all beams count to the first one."""
        self.attempt = attempt if attempt is not None else AttemptKey(request_id, 0)
        self.spec = spec
        prompt = spec.prompt_token_ids
        self.take_prompt(prompt if isinstance(prompt, list) else list(prompt))
        self.sampling_params = sampling_params
        self.eos_token_ids = eos_token_ids
        self.client_index = client_index
        self.arrival_time = arrival_time if arrival_time is not None else math.inf
        """Seconds on the scheduler's clock; the scheduler sets it when the request is added, unless it is given."""
        self.turn_in_s = turn_in_s
        self.leg = leg
        self.kv_source = kv_source
        self.held_prefix = held_prefix
        """Where the KV of more of its first tokens may be pulled from than are cached here; None: nowhere, or it was
        tried."""
        self.pulled_end = 0
        """While that is pulled: how many of its first tokens have KV afterwards; 0: nothing is pulled."""
        self.cut_by = cut_by
        """Until the KV of a stream that is moved here has arrived: how many tokens it may have by then, for which
        blocks are reserved; 0: none is moved here."""
        self.kv_bits = kv_bits
        self.move: MoveOut | None = None
        """While it is moved to another node: where to."""
        self.seen_from = 0
        """While it is moved, on both nodes: how many of its tokens had KV when that began. Blocks of windows that no
        query from there on sees are not moved, and all others are kept until that is over. 0: it is not moved."""
        self.pooling = (spec.pooling or PoolingParams()) if leg is Leg.EMBED else None
        """The vector that an embedding leg makes of the prompt; None for all others."""
        self.reader_block_size = reader_block_size
        self.adapter = spec.adapter
        self.spans = tuple(spec.spans)
        """The spans of the prompt, in order."""
        self.encoder_inputs = encoder_inputs(self.spans, spec.contents, tenant_of(request_id)) if self.spans else ()
        """What is to be encoded of the prompt, in order."""
        self.num_submitted_tokens = self.num_prompt_tokens + len(output_token_ids)
        """Tokens that were submitted: the prompt, and what an earlier attempt generated. A prefill leg computes their
        KV, a decode leg reads it from the prefill node."""
        self.stop_ids = sampling_params.stops(eos_token_ids)
        """Tokens at which the output may stop."""

        # `transition` and `end` alone write the status; `SchedulerState.end` writes why it ended.
        self.status = RequestStatus.WAITING
        self.outcome: Outcome | None = None
        """How it ended; None while it lives."""
        self.stop_reason: int | None = None
        self.error: Failure | None = None

        # Admission and its queues.
        self.queue_position = 0
        """Number in the order of arrival, smaller first; 0: not numbered yet (see request_queue.QueuePositions)."""
        self.is_known = False
        """Whether the runner has the request's tokens."""
        self.matchers: Sequence[TokenMatcher] = ()
        """A request with a grammar has a matcher of its own, followed by those of the sequences to come."""
        self.num_cached_tokens = 0
        """Submitted tokens that were found in the local prefix cache at the first admission."""
        self.num_external_tokens = 0
        """Submitted tokens whose KV came from another node."""
        self.num_found_tokens = 0
        """Tokens that were in blocks of other requests when it was tried last while it waited."""

        # Preemption.
        self.num_preemptions = 0
        self.is_long = False
        """Whether all its positions have the rotary angles of long sequences, of a model in which these have others."""

        # The KV cache manager.
        self.block_hashes: list[bytes] = []
        """Keys of the request's full blocks so far (prompt and output), in order."""

        # Steps: what is planned counts as computed, preemption and a lost load take it back, commit appends tokens. The
        # first token of a decode leg arrives with its KV, and `Arrivals` appends it.
        self.num_computed_tokens = 0
        self.output_token_ids = list(output_token_ids)
        self.num_unreported = 0
        """How many of the last output tokens are in no `EngineCoreOutput` yet, because another node sampled them."""
        self.last_logprobs: Sequence[TokenLogprobs] = ()
        """Log-probabilities of the output tokens that the prefill leg hands to the decode leg, until they are sent."""
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        """Log-probabilities of the prompt that are in no `EngineCoreOutput` yet."""
        self.append_only_until = 0
        """While the output of a decoding request is shorter than this, a commit only appends the token, unless it is a
        stop token."""

        # Speculation.
        self.spec_token_ids: list[int] = []
        """Drafts of the tokens behind the last one, for the next step."""
        self.drafts: RequestDrafts | None = None
        """What drafts the request's tokens; None: nothing does."""
        self.draft_counts = NO_DRAFTS
        """What became of its drafts here."""
        self.has_new_draft_counts = False
        """Whether they have changed since the last `EngineCoreOutput`."""

        # Stopping.
        rule = sampling_params.repetition_detection
        self.repetition = RepetitionDetector(rule) if rule is not None else None

        # Several sequences, and beams.
        self.group: SequenceGroup | None = None
        """The group that this sequence belongs to, for a request of several sequences."""
        self.beams: BeamGroup | None = None
        """The beam search that this beam belongs to."""
        self.parent_id = ""
        """Id of the beam from which this one was forked, until this one runs; otherwise empty."""

    def transition(self, event: RequestEvent) -> None:
        """Change the status as REQUEST_TABLE says.

        Raises IllegalEvent, and changes nothing, for an event that the present status does not accept.
        """
        self.status = self._status_after(event)

    def end(self, outcome: Outcome) -> None:
        """End so. Raises IllegalEvent, and changes nothing, if the request can't end so from its present status."""
        self.status = self._status_after(outcome)
        self.outcome = outcome

    def _status_after(self, event: RequestEvent | Outcome) -> RequestStatus:
        after = REQUEST_TABLE.get((self.status, event))
        if after is None:
            raise IllegalEvent(self.request_id, self.status, event, repr(self))
        return after

    def take_prompt(self, prompt_token_ids: list[int]) -> None:
        """Set the prompt. The list is never changed, so several requests may share it."""
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)

    @property
    def computes_prompt_logprobs(self) -> bool:
        """Whether log-probabilities are wanted of its prompt, and this engine is to compute them.

        Whoever has a token of the output has them already: they come with the first one.
        """
        return self.sampling_params.prompt_logprobs is not None and not self.output_token_ids and self.kv_source is None

    @property
    def computes_every_token(self) -> bool:
        """Whether the prompt is computed as a whole: a cache has neither its logits nor its hidden states."""
        return self.computes_prompt_logprobs or (self.pooling is not None and self.pooling.takes_all_rows)

    @property
    def most_cached_tokens(self) -> int:
        """How many of its first tokens may come out of a cache: the last one is always computed, and of an alignment
        all tokens of the transcript, whose queries no cache has."""
        most = self.num_tokens - 1
        if self.pooling is not None and self.pooling.kind is Pooling.ALIGN:
            most = min(most, self.pooling.first_row)
        return most

    @property
    def num_exchanged_tokens(self) -> int:
        """How many of its first tokens have KV that another node reads, or that is read from one.

        Those that were submitted; of a stream that is moved all with KV, and where it is moved to as many as it may
        have by then.
        """
        if self.move is not None:
            return min(self.num_computed_tokens, self.num_tokens - 1)
        return self.cut_by or self.num_submitted_tokens

    @property
    def num_given_tokens(self) -> int:
        """Output tokens that were submitted with the prompt: an earlier attempt generated them."""
        return self.num_submitted_tokens - self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.ENDED

    @property
    def least_length(self) -> int:
        """The least number of tokens that the request will have: one is generated at least, except for an embedding."""
        return self.num_tokens + (self.leg is not Leg.EMBED)

    @property
    def has_several(self) -> bool:
        """Whether it asks for several sequences, or for beams."""
        return self.sampling_params.n > 1 or self.sampling_params.beam_width > 0

    @property
    def is_root(self) -> bool:
        """Whether this request was submitted as such, and is not a further sequence or beam of another one."""
        group = self.group if self.group is not None else self.beams
        return group is None or group.root is self

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        prompt = self.num_prompt_tokens
        if stop <= prompt:
            return self.prompt_token_ids[start:stop]
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt]

    def sibling(self, request_id: str, sampling_params: SamplingParams, *, sequence_index: int = 0) -> Request:
        """A new request for another sequence of the same prompt, of which nothing is computed yet."""
        # The sibling shares the lists of the prompt and of what is encoded of it; its own `spec` lacks both.
        prompt = self.prompt_token_ids[:1]
        sibling = Request(
            request_id,
            replace(self.spec, prompt_token_ids=prompt, sampling_params=sampling_params, spans=(), contents=()),
            eos_token_ids=self.eos_token_ids,
            client_index=self.client_index,
            arrival_time=self.arrival_time,
            attempt=self.attempt,
            turn_in_s=self.turn_in_s,
            kv_bits=self.kv_bits,
        )
        sibling.root_id, sibling.sequence_index = self.root_id, sequence_index
        sibling.take_prompt(self.prompt_token_ids)
        sibling.spans, sibling.encoder_inputs = self.spans, self.encoder_inputs
        return sibling

    def __repr__(self) -> str:
        state = (self.outcome or self.status).name
        return (
            f"<Request {self.request_id} {self.leg.value} {state} prompt={self.num_prompt_tokens} "
            f"output={self.num_output_tokens} computed={self.num_computed_tokens}>"
        )
