"""What a simulated node knows of one attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.bench.simulator.prompt import TOKEN, SimulatedPrompt
from baton.engine.request import Request
from baton.messages.ids import AttemptKey
from baton.messages.node import Leg, StageTimings, Submit
from baton.messages.request_spec import RequestSpec

_ONE_TOKEN = (TOKEN,)


@dataclass(slots=True)
class Attempt:
    """A node's state of one attempt."""

    key: AttemptKey
    request: Request
    leg: Leg
    submitted_at: float
    num_reported: int
    """Output tokens that the router knows."""
    scheduled_at: float | None = None
    first_unreported_step: int | None = None
    """While it draws a token in each step: the number of the node's step that drew the first unreported one."""
    times: list[float] = field(default_factory=list)
    """When earlier unreported tokens were drawn."""
    first_token_at: float | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_images: int = 0
    """Images of its prompt that are encoded here."""

    @classmethod
    def of(cls, submit: Submit, now: float) -> Attempt:
        """The attempt of a leg that has come to a node."""
        prompt = submit.spec.prompt_token_ids
        assert isinstance(prompt, SimulatedPrompt)
        request = Request(
            str(submit.attempt),
            RequestSpec(_ONE_TOKEN, submit.spec.sampling_params, submit.spec.priority),
            attempt=submit.attempt,
            leg=submit.leg,
            kv_source=submit.kv_source,
            output_token_ids=submit.output_token_ids,
        )
        # A prompt is not written to, and the keys of all its blocks are known.
        request.take_prompt(prompt)
        request.num_submitted_tokens += len(prompt) - len(_ONE_TOKEN)
        request.block_hashes = prompt.block_keys
        request.cut_by = submit.cut_by
        attempt = cls(submit.attempt, request, submit.leg, now, len(submit.output_token_ids))
        if submit.leg is not Leg.DECODE:
            attempt.num_images = sum(content.encoded_by is None for content in submit.spec.contents)
        return attempt

    def timings(self, transfers: dict[str, tuple[float, float]]) -> StageTimings:
        """Its stages. `transfers`: see `HandOffs.transfers`; its own one is removed."""
        is_read = self.leg is Leg.DECODE
        transfer_s, num_bytes = transfers.pop(str(self.key), (0.0, 0.0)) if is_read else (0.0, 0.0)
        started = self.submitted_at if self.scheduled_at is None else self.scheduled_at
        first = started if self.first_token_at is None else self.first_token_at
        return StageTimings(
            queue_ms=(started - self.submitted_at) * 1e3,
            prefill_ms=(first - started) * 1e3 if not is_read else 0.0,
            transfer_ms=transfer_s * 1e3,
            cached_tokens=self.num_cached_tokens,
            external_tokens=self.num_external_tokens,
            kv_bytes=int(num_bytes),
        )
