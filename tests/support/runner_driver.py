"""Drives a runner without a scheduler: each request gets blocks once and is fed the chunks that a test asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.engine.batch import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from baton.engine.runner import ModelRunner
from baton.messages.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class DrivenRequest:
    """A request and how far the driver has computed it."""

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    block_ids: Sequence[int]
    num_computed: int = 0
    adapter: str = ""
    output: list[int] = field(default_factory=list)
    is_known: bool = False
    """Whether the runner has been given the request."""
    failed: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class RunnerDriver:
    """Calls a runner step by step. It hands out blocks from 1 upwards and never takes one back."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.requests: dict[str, DrivenRequest] = {}
        self.last = ModelRunnerOutput({})
        self._next_block = 1
        self._step = 0

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        output: Sequence[int] = (),
        num_computed: int = 0,
        shared: Sequence[int] = (),
        adapter: str = "",
    ) -> DrivenRequest:
        """Add a request with blocks for prompt and `max_tokens`; `shared` blocks already hold its first tokens."""
        layout = self.runner.layout
        total = -(-(len(prompt) + params.max_tokens) // layout.block_size) * len(layout.groups)
        own = total - len(shared)
        blocks = [*shared, *range(self._next_block, self._next_block + own)]
        self._next_block += own
        request = DrivenRequest(request_id, prompt, params, blocks, num_computed, adapter, list(output))
        self.requests[request_id] = request
        return request

    def step(
        self,
        counts: Mapping[str, int],
        finished: Iterable[str] = (),
        drafts: Mapping[str, Sequence[int]] | None = None,
        wanted: int = 0,
    ) -> ModelRunnerOutput:
        """Run one step with this number of tokens for each request, and drafts behind them.

        `wanted`: how many tokens the draft model is to draft of each request.
        """
        drafts = drafts or {}
        scheduled = {name: count + len(drafts.get(name, ())) for name, count in counts.items()}
        new, cached = [], []
        for name in counts:
            request = self.requests[name]
            if request.is_known:
                cached.append(CachedRequestData(name, (), request.num_computed))
            else:
                request.is_known = True
                new.append(
                    NewRequestData(
                        name,
                        request.prompt,
                        tuple(request.output),
                        request.params,
                        request.block_ids,
                        request.num_computed,
                        adapter=request.adapter,
                    )
                )
        self._step += 1
        out = self.runner.execute_model(
            SchedulerOutput(
                self._step,
                new,
                cached,
                scheduled,
                sum(scheduled.values()),
                scheduled_spec_decode_tokens=drafts,
                num_drafts_wanted=dict.fromkeys(counts, wanted) if wanted else {},
                finished_req_ids=frozenset(finished),
            )
        )
        for name, count in counts.items():
            request = self.requests[name]
            if name in out.failed:
                request.failed = str(out.failed[name])
                continue
            tokens = out.sampled_token_ids.get(name, ())
            request.num_computed += count + max(0, len(tokens) - 1)
            request.output.extend(tokens)
        self.last = out
        return out

    def finish(self, chunks: Mapping[str, Sequence[int]] | None = None, chunk: int = 1 << 30) -> None:
        """Run all requests together up to `max_tokens`, prompts in steps of `chunks[name]` (then `chunk`) tokens."""
        plan = {name: list(sizes) for name, sizes in (chunks or {}).items()}
        while True:
            counts = {}
            for name, request in self.requests.items():
                if request.failed or len(request.output) >= request.params.max_tokens:
                    continue
                size = plan[name].pop(0) if plan.get(name) else chunk
                counts[name] = min(size, request.num_tokens - request.num_computed)
            if not counts:
                return
            self.step(counts)
