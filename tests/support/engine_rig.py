"""An engine with a scripted runner and a connector that the test plays; all its outputs are recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.engine.batch import EngineCoreEvent, EngineCoreOutput, EngineCoreOutputs, ModelRunnerOutput, SchedulerOutput
from baton.engine.connector import ArrivedKV, KVTransferOutput
from baton.engine.core import EncodesAtOnce, EngineCore, InputEncoder
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import StepExecutor
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.sequences.sequence_group import sequence_id, sequence_seed
from baton.errors import TransferCause
from baton.messages.ids import Peer
from baton.messages.node import HeldPrefix, Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.spans import EncoderContent, Span
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_connector import FakeConnector
from tests.doubles.fake_runner import FakeRunner, expected_tokens, prompt_slots, with_spans

SOURCE = Peer("prefill-0", "prefill-0.run1", "127.0.0.1:1")


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt that shares no prefix with one of another seed."""
    return [(seed * 7919 + position) % 1000 for position in range(num_tokens)]


def name_of(of_sequence: EngineCoreOutput | EngineCoreEvent) -> str:
    """What tests call a sequence: its request's name alone, or with its index behind a tilde."""
    return sequence_id(of_sequence.attempt.request_id, of_sequence.sequence_index)


def split_name(name: str) -> tuple[str, int]:
    """Return the request and the index of a sequence with this name. All beams count to the first sequence."""
    request_id, _, index = name.partition("~")
    return request_id, int(index.partition("^")[0] or "0")


class EngineRig:
    """One engine, by default with blocks of 4 tokens. The block accounts are checked after every call."""

    def __init__(
        self,
        num_blocks: int = 65,
        connector: FakeConnector | None = None,
        executor: StepExecutor | None = None,
        make_encoder: Callable[[Scheduler, FakeRunner], InputEncoder] = EncodesAtOnce,
        **limits: Any,
    ) -> None:
        limits = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "watermark": 0.0} | limits
        self.config = SchedulerConfig(num_blocks=num_blocks, **limits)
        self.runner = FakeRunner(
            num_blocks,
            self.config.block_size,
            num_host_blocks=self.config.num_host_blocks,
            windows=self.config.windows,
            keeps_states=self.config.keeps_states,
        )
        self.connector = connector if connector is not None else FakeConnector()
        self.clock = FakeClock()
        fields = CacheKeyFields.of(self.runner.model, self.runner.layout)
        self.scheduler = Scheduler(self.config, fields, self.clock, self.connector)
        self.core = EngineCore(self.scheduler, self.runner, executor, make_encoder(self.scheduler, self.runner))
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        """The tokens that a client received of each request, without gaps."""
        self.ends: dict[str, EngineCoreOutput] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int] | int,
        *,
        leg: Leg = Leg.WHOLE,
        eos: frozenset[int] = frozenset(),
        client_index: int = 0,
        priority: int = 0,
        given: int = 0,
        adapter: str = "",
        awaits_adapter: bool = False,
        spans: Sequence[Span] = (),
        turn_in_s: float = 0.0,
        held: int = 0,
        cut_by: int = 0,
        kv_bits: str = "",
        **params: Any,
    ) -> Request:
        """Queue a request; an int as `prompt` stands for a prompt of that length.

        `given`: the number of output tokens that it comes with. `awaits_adapter`: its adapter is not loaded yet.
        `held`: how many of its first tokens it may pull from another node. `cut_by`: of a stream that is moved here.
        """
        tokens = prompt_of(prompt, len(self.requests)) if isinstance(prompt, int) else prompt
        sampling = SamplingParams(**params)
        vocab = self.runner.model.vocab_size
        request = Request(
            request_id,
            RequestSpec(
                tokens,
                sampling,
                priority=priority,
                adapter=adapter,
                spans=spans,
                contents=[EncoderContent(span.digest) for span in spans],
            ),
            leg=leg,
            kv_source=SOURCE if leg is Leg.DECODE else None,
            eos_token_ids=eos,
            client_index=client_index,
            turn_in_s=turn_in_s,
            held_prefix=HeldPrefix(SOURCE, held) if held else None,
            cut_by=cut_by,
            kv_bits=kv_bits,
            output_token_ids=expected_tokens(tokens, given, seed=sampling.seed, vocab_size=vocab, adapter=adapter),
        )
        self.scheduler.add_request(request, awaits_adapter=awaits_adapter)
        self.requests[request_id] = request
        self.tokens[request_id] = list(request.output_token_ids)
        self._note(self.scheduler.take_refusals())
        return request

    def begin(self, request_id: str, prompt: Sequence[int] | int, **fields: Any) -> Request:
        """Queue a request, see `add`, and run one step."""
        request = self.add(request_id, prompt, **fields)
        self.step()
        return request

    def complete(self, request_id: str, prompt: Sequence[int] | int, **fields: Any) -> Request:
        """Queue a request, see `add`, and run steps until the engine has no work."""
        request = self.add(request_id, prompt, **fields)
        self.run()
        return request

    def step(self) -> list[EngineCoreOutput]:
        """Run one step and return its outputs."""
        return self._note(self.core.step())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def commit(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput | None = None
    ) -> list[EngineCoreOutput]:
        """Compute and commit a step that the test began with `scheduler.schedule()`."""
        computed = runner_output if runner_output is not None else self.runner.execute_model(scheduler_output)
        return self._note(self.scheduler.update_from_output(scheduler_output, computed))

    def run(self, limit: int = 500) -> None:
        """Run steps until the engine has no work."""
        for _ in range(limit):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {limit} steps: {list(self.scheduler.requests.values())}")

    def run_right(self, *names: str) -> None:
        """Run steps until the engine has no work. Then these requests or sequences have all tokens that are right."""
        self.run()
        for name in names:
            max_tokens = self.requests[split_name(name)[0]].sampling_params.max_tokens
            assert self.tokens[name] == self.expected(name, max_tokens), name

    def abort(self, *request_ids: str, outcome: Outcome = Outcome.ABORTED) -> list[EngineCoreOutput]:
        return self._note(self.scheduler.end_requests(request_ids, outcome))

    def abort_sequence(self, request_id: str, index: int, outcome: Outcome = Outcome.ABORTED) -> list[EngineCoreOutput]:
        """End one sequence of a request and return its output, as a list."""
        return self._note(self.scheduler.end_sequence(request_id, index, outcome))

    def transfer(
        self,
        arrived: Mapping[str, Sequence[int]] | None = None,
        failed: Mapping[str, str] | None = None,
        released: Sequence[str] = (),
        cause: TransferCause = TransferCause.PEER_GONE,
    ) -> list[EngineCoreOutput]:
        """Report transfers to the scheduler: `arrived` has first tokens by request id, `failed` error messages."""
        report = KVTransferOutput(
            arrived={request_id: ArrivedKV(tokens) for request_id, tokens in (arrived or {}).items()},
            failed={
                request_id: self.connector.lose(request_id, cause, why) for request_id, why in (failed or {}).items()
            },
            released=frozenset(released),
        )
        return self._note(self.scheduler.update_from_kv_transfer(report))

    def fail_transfer(
        self,
        request_id: str,
        num_valid_blocks: int,
        cause: TransferCause = TransferCause.PEER_GONE,
        why: str = "peer gone",
    ) -> list[EngineCoreOutput]:
        """Fail a transfer of which the first `num_valid_blocks` blocks are verified; the others hold garbage."""
        load, size, groups = self.connector.loads[request_id], self.config.block_size, len(self.config.windows)
        self.write_kv(request_id)
        for entry in range(num_valid_blocks, len(load.block_ids)):
            stripe, group = divmod(entry, groups)
            if stripe * size >= load.num_local_tokens:
                self.runner.write_slots(load.block_ids, [0xBAD] * size, stripe * size, group)
        lost = self.connector.lose(request_id, cause, why, num_valid_blocks)
        return self._note(self.scheduler.update_from_kv_transfer(KVTransferOutput(failed={request_id: lost})))

    def write_kv(self, request_id: str) -> None:
        """Write the right KV into the blocks that the request's load waits for, and nowhere else."""
        load = self.connector.loads[request_id]
        start, adapter = load.num_local_tokens, self.requests[request_id].adapter
        for group in range(len(self.config.windows)):
            slots = prompt_slots(self.submitted(request_id), group, adapter)[: start + load.num_external_tokens]
            self.runner.write_slots(load.block_ids, slots[start:], start, group)

    def check_offered(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> None:
        """Check that a prefill leg's blocks hold the right KV of `num_tokens` tokens, as far as a continuation sees."""
        prompt, size = self.submitted(request_id), self.config.block_size
        for group, window in enumerate(self.config.windows):
            query = self.scheduler.kv_cache_manager.next_query(self.requests[request_id])
            first_seen = max(0, query - window + 1) // size * size if window is not None else 0
            blocks = block_ids[group :: len(self.config.windows)]
            assert [block != 0 for block in blocks] == [stripe * size >= first_seen for stripe in range(len(blocks))]
            slots = self.runner.read_slots(block_ids, num_tokens, group)
            right = prompt_slots(prompt, group, self.requests[request_id].adapter)
            places = [place for place in self.runner.held_positions(num_tokens, group) if place >= first_seen]
            assert [slots[place] for place in places] == [right[place] for place in places]

    def complete_transfer(self, request_id: str) -> list[EngineCoreOutput]:
        """Complete a transfer: write the KV, and report it with the token that the prefill node sampled."""
        self.write_kv(request_id)
        return self.transfer(arrived={request_id: self.next_expected(request_id)})

    def complete_pull(self, request_id: str) -> list[EngineCoreOutput]:
        """Complete a pull: write the KV, and report it."""
        self.write_kv(request_id)
        return self.transfer(arrived={request_id: ()})

    def submitted(self, request_id: str) -> list[int]:
        """Return all tokens that a request was submitted with, as the runner computes them."""
        request = self.requests[request_id]
        return with_spans(request.token_ids(0, request.num_submitted_tokens), request.spans)

    def next_expected(self, request_id: str) -> list[int]:
        """Return the token that follows the submitted ones, as a list."""
        num_given = self.requests[request_id].num_given_tokens
        return self.expected(request_id, num_given + 1)[num_given:]

    def expected(self, request_id: str, num_tokens: int) -> list[int]:
        """Return the tokens that an undisturbed request, or sequence of one, would generate."""
        name, index = split_name(request_id)
        request = self.requests[name]
        seed, vocab = sequence_seed(request.sampling_params.seed, index), self.runner.model.vocab_size
        prompt = with_spans(request.prompt_token_ids, request.spans)
        return expected_tokens(prompt, num_tokens, seed=seed, vocab_size=vocab, adapter=request.adapter)

    def reason(self, request_id: str) -> Outcome | None:
        """Return the outcome of a request; None while it runs."""
        return self.ends[request_id].outcome if request_id in self.ends else None

    def events(self) -> list[tuple[str, str, int]]:
        """Return (type, request id, value) of the events since the last call."""
        return [(event.type.value, name_of(event), event.value) for event in self.scheduler.take_events()]

    def _note(self, by_client: EngineCoreOutputs) -> list[EngineCoreOutput]:
        outputs = [output for batch in by_client.values() for output in batch]
        for output in outputs:
            name = name_of(output)
            self.tokens.setdefault(name, [])
            assert name not in self.ends, f"{output} after the end"
            assert "ContradictoryStep" not in str(output.error), output.error
            if output.new_token_ids:
                assert output.first_index == len(self.tokens[name])
            self.tokens[name] += output.new_token_ids
            if output.outcome is not None:
                self.ends[name] = output
        self.scheduler.kv_cache_manager.check_invariant()
        return outputs
