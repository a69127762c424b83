"""Random operations on small pools: block accounts agree after each call, and each request ends once, with the right
tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.batch import EngineCoreOutput
from baton.engine.request import Request, RequestStatus
from baton.engine.runner import STATE_WINDOW
from baton.engine.sequences.beams import BeamSearch
from baton.engine.sequences.sequence_group import sequence_id
from baton.engine.waiting.request_queue import blocks_to_take, tokens_to_compute
from baton.messages.node import Leg, Outcome
from baton.messages.speculation import SpeculationConfig
from tests.doubles.fake_connector import FakeLoad
from tests.doubles.fake_grammar import FakeMatcher
from tests.doubles.fake_runner import expected_beams, expected_embedding, expected_tokens
from tests.support.engine_rig import EngineRig, name_of, prompt_of, split_name
from tests.support.executors import Ahead, executor_for

EOS = frozenset(range(25))
GARBAGE = 0xDEADBEEF
ADAPTERS = ["", "", "", "a" * 64, "b" * 64, "c" * 64, "d" * 64]


class Sketch(NamedTuple):
    """A request to submit. Requests of one family share a prefix, and those with an even `own` part share that, too."""

    leg: Leg
    family: int
    prefix: int
    own: int
    max_tokens: int
    seed: int
    n: int
    beam_width: int
    given: int
    """The number of given output tokens, if its output is longer and it has one sequence."""
    has_grammar: bool
    """Whether it has a grammar; ignored for a beam search."""
    adapter: str
    awaits_adapter: bool


def sketches_of(beam_widths: Sequence[int], most_sequences: int = 4) -> st.SearchStrategy[list[Sketch]]:
    """A few requests to submit, with beam widths from these."""
    sketch = st.builds(
        Sketch,
        leg=st.sampled_from([Leg.WHOLE, *Leg]),
        family=st.integers(0, 2),
        prefix=st.integers(0, 16),
        own=st.integers(1, 10),
        max_tokens=st.integers(1, 24),
        seed=st.integers(0, 1),
        n=st.sampled_from([n for n in (1, 1, 1, 2, 4) if n <= most_sequences]),
        beam_width=st.sampled_from(beam_widths),
        given=st.sampled_from([0, 0, 1, 3, 8]),
        has_grammar=st.sampled_from([False, False, True]),
        adapter=st.sampled_from(ADAPTERS),
        awaits_adapter=st.booleans(),
    )
    return st.lists(sketch, min_size=1, max_size=4)


class EngineMachine(RuleBasedStateMachine):
    """One engine with its clients and peers, which act at any time."""

    rig: EngineRig
    most_steps = 40_000
    """The number of steps in which all remaining requests must end. A beam search without a cache computes nearly
    everything again for each of its tokens."""

    @initialize(
        num_stripes=st.integers(4, 13),
        budget=st.integers(1, 24),
        limits=st.fixed_dictionaries(
            {
                "max_num_seqs": st.integers(1, 5),
                "long_prefill_token_threshold": st.sampled_from([0, 3]),
                "watermark": st.sampled_from([0.0, 0.2]),
                "max_times_passed": st.integers(0, 3),
                "max_loras": st.integers(1, 3),
                "enable_prefix_caching": st.booleans(),
                "enable_chunked_prefill": st.booleans(),
                "preemption_mode": st.sampled_from(["recompute", "swap", "auto"]),
                "num_host_blocks": st.sampled_from([2, 4, 9, 30]),
                "on_transfer_failure": st.sampled_from(["reroute", "recompute"]),
                "speculation": st.sampled_from(
                    [None, SpeculationConfig(prompt_lookup_min=1), SpeculationConfig("grammar")]
                ),
            }
        ),
        windows=st.sampled_from(
            [(None,), (None,), (6,), (None, 6), (2, 9, None), (3, 3), (2,), (None, 2), (None, 9, 2)]
        ),
        keeps_states=st.booleans(),
        faulty_runner=st.booleans(),
        copies_are_cheap=st.booleans(),
        ahead=st.sampled_from(["no", "late", "early"]),
        reads_at_once=st.booleans(),
    )
    def start(
        self,
        num_stripes: int,
        budget: int,
        limits: dict[str, Any],
        windows: tuple[int | None, ...],
        keeps_states: bool,
        faulty_runner: bool,
        copies_are_cheap: bool,
        ahead: Ahead,
        reads_at_once: bool,
    ) -> None:
        self.rig = EngineRig(
            1 + num_stripes * len(windows),
            windows=windows,
            keeps_states=keeps_states and windows[-1] == STATE_WINDOW,
            max_num_batched_tokens=budget if limits["enable_chunked_prefill"] else 100,
            max_model_len=64,
            executor=executor_for(ahead),
            **limits,
        )
        self.rig.runner.adapters.loaded = dict.fromkeys(filter(None, ADAPTERS), Path("/adapter"))
        self.ahead = ahead
        self.reads_at_once = reads_at_once
        self.rig.runner.seconds_per_copy, self.rig.runner.seconds_per_token = 1e-3, 1.0 if copies_are_cheap else 1e-9
        self.rig.connector.on_load = self.read_at_once if reads_at_once else self.scribble
        self.faulty_runner = faulty_runner
        self.added = 0

    @rule(sketches=sketches_of([0, 0, 0, 4]))
    def add(self, sketches: list[Sketch]) -> None:
        self.add_all(sketches)

    def add_all(self, sketches: list[Sketch]) -> None:
        for sketch in sketches:
            if sketch.leg is Leg.EMBED:
                sketch = sketch._replace(n=1, beam_width=0, has_grammar=False)
            name = f"r{self.added}"
            self.added += 1
            own = prompt_of(sketch.own, self.added if sketch.own % 2 else 2000)
            prompt = prompt_of(sketch.prefix, 1000 + sketch.family) + own
            self.rig.add(
                name,
                prompt,
                leg=sketch.leg,
                eos=EOS,
                max_tokens=sketch.max_tokens,
                seed=sketch.seed,
                n=sketch.n,
                beam_width=sketch.beam_width,
                given=self._given(sketch, prompt),
                client_index=self.added % 3,
                json_schema="{}" if sketch.has_grammar and not sketch.beam_width else "",
                adapter=sketch.adapter,
                awaits_adapter=bool(sketch.adapter) and sketch.awaits_adapter,
            )

    def _given(self, sketch: Sketch, prompt: Sequence[int]) -> int:
        if sketch.n > 1 or sketch.beam_width or sketch.leg is Leg.EMBED:
            return 0
        most = min(sketch.max_tokens, self.rig.scheduler.max_model_len - len(prompt))
        vocab = self.rig.runner.model.vocab_size
        output = expected_tokens(prompt, max(0, most), seed=sketch.seed, vocab_size=vocab, adapter=sketch.adapter)
        last = next((index for index, token_id in enumerate(output) if token_id in EOS), len(output) - 1)
        return max(0, min(sketch.given, last))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(num_steps=st.integers(1, 6), length=st.integers(1, 9), wrong_at=st.integers(0, 12))
    def steps_with_drafts(self, num_steps: int, length: int, wrong_at: int) -> None:
        """Drafts for whatever lives, right up to `wrong_at`; those of requests that can't have any are skipped."""
        for _ in range(num_steps):
            drafts = {"nobody": [1, 2, 3]}
            for name, request in self.rig.scheduler.requests.items():
                known = request.num_output_tokens
                to_come = self.rig.expected(name, known + length)[known:]
                drafts[name] = [
                    token_id + (place % 13 == wrong_at) for place, token_id in enumerate(to_come, start=known)
                ]
            self.rig.scheduler.update_draft_token_ids(drafts)
            self.rig.step()

    @precondition(lambda self: self.ahead == "no")
    @rule(data=st.data())
    def end_one_during_a_step(self, data: st.DataObject) -> None:
        output = self.rig.scheduler.schedule()
        computed = self.rig.runner.execute_model(output)
        self._abort_some(data)
        self.rig.commit(output, computed)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._abort_some(data)

    @rule(number=st.integers(0, 20))
    def a_grammar_is_compiled(self, number: int) -> None:
        """Perhaps of one that does not wait for it, or not any more."""
        self.rig.scheduler.grammar_compiled(f"r{number}", [FakeMatcher([], ())] * 4)

    @rule(number=st.integers(0, 20))
    def an_adapter_is_loaded(self, number: int) -> None:
        """Perhaps of one that does not wait for it, or not any more."""
        self.rig.scheduler.adapter_loaded(f"r{number}")

    @precondition(lambda self: self.loading())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self.deliver_to(data.draw(st.sampled_from(self.loading())))

    @precondition(lambda self: self.loading())
    @rule(data=st.data())
    def fail_a_transfer(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.loading()))
        load, size = self.rig.connector.loads[name], self.rig.config.block_size
        num_local = load.num_local_tokens // size * len(self.rig.config.windows)
        self.rig.fail_transfer(name, data.draw(st.integers(num_local, len(load.block_ids))))

    @precondition(lambda self: (self.loading() and not self.reads_at_once) or self.rig.connector.quarantined)
    @rule(data=st.data())
    def a_read_is_half_way(self, data: st.DataObject) -> None:
        """It may write to every block that it was given and that was not released, however dead its request is."""
        loads = self.rig.connector.loads | self.rig.connector.quarantined
        names = [*(() if self.reads_at_once else self.loading()), *self.rig.connector.quarantined]
        load = loads[data.draw(st.sampled_from(names))]
        self.scribble(load)

    @precondition(lambda self: self.rig.connector.quarantined)
    @rule(data=st.data())
    def a_read_is_over(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rig.connector.quarantined)))
        del self.rig.connector.quarantined[name]
        self.rig.transfer(released=[name])

    @precondition(lambda self: self.rig.connector.leased)
    @rule(data=st.data())
    def a_peer_has_read(self, data: st.DataObject) -> None:
        self._read_leased(data.draw(st.sampled_from(sorted(self.rig.connector.leased))))

    @precondition(lambda self: self.rig.connector.offers)
    @rule(data=st.data())
    def a_peer_reads_early(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rig.connector.offers)))
        self.rig.check_offered(name, *self.rig.connector.offers[name])

    @rule(names=st.lists(st.sampled_from(["r0", "r1", "r2", "stranger"]), max_size=2))
    def a_stale_report(self, names: list[str]) -> None:
        stale = [name for name in names if name not in self.loading()]
        held = self.rig.connector.leased.keys() | self.rig.connector.quarantined.keys()
        released = [name for name in names if name not in held]
        self.rig.transfer(arrived={name: [1] for name in stale}, failed=dict.fromkeys(stale, "?"), released=released)

    @precondition(lambda self: self.faulty_runner and self.rig.scheduler.requests)
    @rule(data=st.data())
    def non_finite_logits(self, data: st.DataObject) -> None:
        self.rig.runner.failures[data.draw(st.sampled_from(sorted(self.rig.scheduler.requests)))] = "non-finite logits"

    @precondition(lambda self: self.faulty_runner)
    @rule()
    def the_runner_breaks(self) -> None:
        self.rig.runner.raise_next = RuntimeError("broken")
        self.rig.step()
        self.rig.runner.raise_next = None

    @precondition(lambda self: self.faulty_runner)
    @rule()
    def the_runner_breaks_before_it_copies(self) -> None:
        self.rig.runner.raise_first = RuntimeError("broken")
        self.rig.step()
        self.rig.runner.raise_first = None

    @rule(data=st.data())
    def the_connector_is_unsure(self, data: st.DataObject) -> None:
        self.rig.connector.unknown ^= {f"r{data.draw(st.integers(0, self.added))}"}

    @rule()
    def reset_prefix_cache(self) -> None:
        stats = self.rig.scheduler.make_stats()
        idle = stats.free_blocks == stats.total_blocks and stats.free_host_blocks == stats.total_host_blocks
        assert self.rig.scheduler.kv_cache_manager.reset_prefix_cache() == idle

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        if not hasattr(self, "rig"):
            return
        alive = self.rig.scheduler.requests
        known = {split_name(name)[0] for name in alive.keys() | self.rig.ends.keys()}
        assert known == self.rig.requests.keys()
        whole = {name for name, request in self.rig.requests.items() if request.beams is None}
        assert whole <= alive.keys() | self.rig.ends.keys()
        assert not alive.keys() & self.rig.ends.keys()
        running = [name for name, request in alive.items() if request.status is RequestStatus.RUNNING]
        num_waiting = len(alive) - len(running) - len(self.held_back())
        assert self.rig.scheduler.get_request_counts() == (len(running), num_waiting)
        assert len(running) <= self.rig.config.max_num_seqs
        assert len({alive[name].adapter for name in running} - {""}) <= self.rig.config.max_loras
        by_reason = self.rig.scheduler.make_stats().num_requests_waiting_by_reason
        assert sum(by_reason.values()) == num_waiting
        assert min(by_reason.values()) >= 0
        statuses = Counter(request.status for request in alive.values())
        assert by_reason["preempted"] == statuses[RequestStatus.PREEMPTED]
        assert by_reason["grammar"] == statuses[RequestStatus.WAITING_FOR_GRAMMAR]
        assert by_reason["adapter"] == statuses[RequestStatus.WAITING_FOR_ADAPTER]
        assert by_reason["swapped"] == statuses[RequestStatus.SWAPPED]
        assert by_reason["remote_kv"] == statuses[RequestStatus.WAITING_FOR_REMOTE_KVS]

    def held_back(self) -> set[str]:
        """The sequences that are in no queue yet."""
        groups = {request.group for request in self.rig.scheduler.requests.values() if request.group is not None}
        return {name for group in groups for name in group.held}

    @invariant()
    def token_counts_equal_sums_over_requests(self) -> None:
        if not hasattr(self, "rig") or self.ahead != "no":
            return
        stats, decoding = self.rig.scheduler.make_stats(), self.rig.scheduler.decoding
        waiting = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        alive = self.rig.scheduler.requests.values()
        running = [request for request in alive if request.status is RequestStatus.RUNNING]
        filling = [request for request in running if request.request_id not in decoding]
        assert stats.num_context_tokens == sum(request.num_computed_tokens for request in running)
        assert stats.num_uncomputed_tokens == sum(
            tokens_to_compute(request)
            for request in alive
            if request.status in waiting and request.request_id not in self.held_back()
        ) + sum(request.num_tokens - request.num_computed_tokens for request in filling)
        manager = self.rig.scheduler.kv_cache_manager
        to_take = sum(
            blocks_to_take(request, self.rig.config.block_size)
            for request in alive
            if request.status in (*waiting, RequestStatus.SWAPPED) and request.request_id not in self.held_back()
            # Requests that have blocks already wait for the next step alone.
            if request.leg is not Leg.DECODE or not manager.has_table(request.request_id)
        )
        assert stats.promised_blocks == stats.total_blocks - stats.free_blocks + to_take * manager.num_groups

    @invariant()
    def leased_kv_is_intact(self) -> None:
        if hasattr(self, "rig"):
            for name, offer in self.rig.connector.leased.items():
                self.rig.check_offered(name, *offer)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.connector.unknown.clear()
        rig.runner.failures.clear()
        for number in range(self.added):
            self.a_grammar_is_compiled(number)
            self.an_adapter_is_loaded(number)
        for _ in range(4 * self.added + 4):
            for name in sorted(rig.connector.leased):
                self._read_leased(name)
            rig.transfer(released=sorted(rig.connector.quarantined))
            rig.connector.quarantined.clear()
            for name in self.loading():
                self.deliver_to(name)
            rig.run(self.most_steps)
        assert not rig.scheduler.has_requests(), list(rig.scheduler.requests.values())
        assert rig.ends.keys() == self._all_sequences()
        assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1
        assert rig.scheduler.make_stats().free_host_blocks == rig.config.num_host_blocks - 1
        for name in rig.ends:
            self._check_tokens(name)

    def _all_sequences(self) -> set[str]:
        """Every request, and the other sequences of those that came so far as to have some."""
        names = set(self.rig.requests)
        for name, request in self.rig.requests.items():
            if request.group is not None and request.group.is_forked:
                names |= {sequence_id(name, index) for index in range(request.sampling_params.n)}
            if request.beams is not None and self.rig.reason(name) in (Outcome.STOP, Outcome.LENGTH):
                names |= {sequence_id(name, index) for index in range(request.sampling_params.n)}
        return names

    def read_at_once(self, load: FakeLoad) -> None:
        """What a read that is as quick as can be leaves, steps in flight or not."""
        name = next(name for name, its in self.rig.connector.loads.items() if its is load)
        self.rig.write_kv(name)

    def deliver_to(self, name: str) -> None:
        if not self.reads_at_once:
            self.rig.write_kv(name)
        self.rig.transfer(arrived={name: self.rig.next_expected(name)})

    def scribble(self, load: FakeLoad) -> None:
        """What a read that is under way may leave, from the moment it is asked for."""
        for group in range(len(self.rig.config.windows)):
            garbage = [GARBAGE] * load.num_external_tokens
            self.rig.runner.write_slots(load.block_ids, garbage, load.num_local_tokens, group)

    def loading(self) -> list[str]:
        """Requests that wait for remote KV."""
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return sorted(name for name, request in self.rig.scheduler.requests.items() if request.status is waiting)

    def _abort_some(self, data: st.DataObject) -> None:
        names = st.sampled_from(sorted({*self.rig.requests, *self.rig.scheduler.requests}) or ["nobody"])
        outcome = data.draw(st.sampled_from([Outcome.ABORTED, Outcome.ERROR]))
        if data.draw(st.booleans()):
            self.rig.abort_sequence(*split_name(data.draw(names)), outcome)
        self.rig.abort(*data.draw(st.lists(names, max_size=2)), outcome=outcome)

    def _read_leased(self, name: str) -> None:
        del self.rig.connector.leased[name]
        self.rig.transfer(released=[name])

    def _check_tokens(self, name: str) -> None:
        request_id, index = split_name(name)
        rig, request, end = self.rig, self.rig.requests[request_id], self.rig.ends[name]
        if request.leg is Leg.EMBED:
            self._check_embedding(request, end)
            return
        undisturbed, reason = self._undisturbed(name)
        got = rig.tokens[name]
        if request.beams is not None or (request.leg is Leg.PREFILL and request.sampling_params.beam_width):
            self._check_beams(index, request, end)
            return
        assert got == undisturbed[: len(got)], f"{request!r}"
        if end.outcome is Outcome.HANDED_OFF:
            assert len(got) == request.num_given_tokens + 1
            assert len(undisturbed) > len(got) or request.sampling_params.n > 1
        elif end.outcome in (Outcome.STOP, Outcome.LENGTH):
            assert end.outcome is reason
            assert len(got) == len(undisturbed)
        elif end.outcome is Outcome.IGNORED:
            assert not undisturbed
        else:
            assert end.outcome in (Outcome.ABORTED, Outcome.ERROR, Outcome.KV_LOST)

    def _check_embedding(self, request: Request, end: EngineCoreOutput) -> None:
        assert self.rig.tokens[end.attempt.request_id] == []
        if end.outcome is Outcome.STOP:
            assert end.embedding == expected_embedding(request.prompt_token_ids, request.adapter)
            return
        assert not end.embedding
        if end.outcome is Outcome.IGNORED:
            config = self.rig.config
            assert request.num_prompt_tokens > min(config.max_model_len, config.num_slots)
        else:
            assert end.outcome in (Outcome.ABORTED, Outcome.ERROR)

    def _check_beams(self, index: int, request: Request, end: EngineCoreOutput) -> None:
        got, params = self.rig.tokens[name_of(end)], request.sampling_params
        if end.outcome not in (Outcome.STOP, Outcome.LENGTH):
            assert got == []
            return
        limit = min(params.max_tokens, self.rig.scheduler.max_num_tokens(request) - request.num_prompt_tokens)
        search = BeamSearch(params.beam_width, EOS, limit)
        vocab = self.rig.runner.model.vocab_size
        right = expected_beams(request.prompt_token_ids, search, vocab_size=vocab, adapter=request.adapter)
        assert got == right[index]
        assert end.outcome is (Outcome.STOP if got[-1] in EOS else Outcome.LENGTH)

    def _undisturbed(self, name: str) -> tuple[list[int], Outcome]:
        """A sequence's whole output on an engine of its own."""
        request = self.rig.requests[split_name(name)[0]]
        room = self.rig.scheduler.max_num_tokens(request) - request.num_prompt_tokens
        limit = max(0, min(request.sampling_params.max_tokens, room))
        tokens = self.rig.expected(name, limit)
        for index, token_id in enumerate(tokens):
            if token_id in EOS:
                return tokens[: index + 1], Outcome.STOP
        return tokens, Outcome.LENGTH


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=40, phases=set(Phase) - {Phase.explain})
