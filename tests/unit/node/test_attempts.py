"""The book of attempts knows who owns which attempt, while routers come and go in any order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.sequences.sequence_group import sequence_seed
from baton.errors import TransferCause
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Adopt, Outcome, RequestDelta
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.messages.speculation import DraftCounts
from baton.node.attempts.attempt_times import AttemptClock
from baton.node.attempts.attempts import Attempt, AttemptBook, AttemptEvent, AttemptState
from baton.node.reports.reports import split_by_size
from baton.node.router_streams import Port
from tests.doubles.fake_runner import expected_tokens
from tests.support.node_rig import PROMPT, VOCAB, NodeRig, queued_reports, submit
from tests.support.virtual_time import LoopClock, VirtualTimeLoop

GRACE_S = 10.0


def attempt_of(name: str, owner: int = 1, router: str = "r.1") -> Attempt:
    return Attempt(AttemptKey(name, 1), owner, router, AttemptClock())


def test_an_attempt_runs_until_it_has_ended_or_is_aborted() -> None:
    for end in (AttemptEvent.FINISHED, AttemptEvent.ABORTED):
        attempt = attempt_of("a")
        assert attempt.runs
        attempt.feed(AttemptEvent.DETACHED)
        assert attempt.runs, "an orphan does, too"
        attempt.feed(end)
        assert not attempt.runs


def ended_attempt(book: AttemptBook, name: str, num_tokens: int, now: float, num_top: int | None = None) -> Attempt:
    attempt = attempt_of(name)
    book.add(attempt)
    top = [(1, -0.5)] * (num_top or 0)
    logprobs = [TokenLogprobs(1, -0.5, 1, top)] * num_tokens if num_top is not None else []
    attempt.note(RequestDelta(attempt.key, 0, [1] * num_tokens, logprobs, Outcome.LENGTH))
    book.ended(attempt, now)
    return attempt


def test_ended_attempts_are_kept_within_bounds_and_the_oldest_go_first() -> None:
    book = AttemptBook(GRACE_S, max_ended=3)
    kept = [ended_attempt(book, f"a{number}", 1, number) for number in range(5)]
    assert [book.get(attempt.key) is not None for attempt in kept] == [False, False, True, True, True]
    book = AttemptBook(GRACE_S, max_ended_entries=100)
    small, large = ended_attempt(book, "small", 40, 0.0), ended_attempt(book, "large", 20, 1.0, num_top=2)
    assert book.get(small.key) is None, "40 tokens and 20 with three log-probabilities each are more than 100"
    assert book.get(large.key) is large
    assert large.num_entries == 80


def test_a_report_is_divided_where_log_probabilities_of_prompts_are_many() -> None:
    def delta(number: int, count: int) -> RequestDelta:
        position = TokenLogprobs(1, -0.5, 1, [(1, -0.5)] * 20)
        return RequestDelta(AttemptKey(f"a{number}", 1), prompt_logprobs=[position] * count)

    small, large = [delta(number, 100) for number in range(50)], [delta(number, 11_000) for number in range(3)]
    assert split_by_size(small) == [small]
    assert split_by_size([*small, *large]) == [[*small, large[0]], large[1:2], large[2:]]


def test_log_probabilities_of_a_prompt_are_replayed_before_all_tokens() -> None:
    attempt = attempt_of("a")
    of_prompt = [TokenLogprobs(2, -0.5, 1, [(2, -0.5), (1, -1.5)])] * 3
    attempt.note(RequestDelta(attempt.key, 0, [7], prompt_logprobs=of_prompt))
    attempt.note(RequestDelta(attempt.key, 1, [8]))
    assert attempt.num_entries == 2 + 3 * 3
    first, *rest = attempt.replayed([1])
    assert (first.prompt_logprobs, list(first.token_ids)) == (of_prompt, [])
    assert [(delta.first_index, list(delta.token_ids), delta.prompt_logprobs) for delta in rest] == [(1, [8], ())]


def test_a_long_output_is_replayed_in_pieces_and_its_end_with_the_last() -> None:
    attempt = attempt_of("a")
    attempt.note(RequestDelta(attempt.key, 0, range(5000), outcome=Outcome.STOP, stop_token_id=7))
    _, *pieces = attempt.replayed()
    assert [(piece.first_index, len(piece.token_ids)) for piece in pieces] == [(0, 2048), (2048, 2048), (4096, 904)]
    assert [token for piece in pieces for token in piece.token_ids] == list(range(5000))
    assert [piece.outcome for piece in pieces] == [None, None, Outcome.STOP]
    assert pieces[-1].stop_token_id == 7


@pytest.mark.parametrize("num_given", [0, 2])
@pytest.mark.parametrize("num_known", range(8))
def test_tokens_that_a_router_has_are_not_replayed(num_given: int, num_known: int) -> None:
    output = [10, 11, 12, 13, 14]
    attempt = Attempt(AttemptKey("a", 1), 1, "r.1", AttemptClock(), output[:num_given])
    attempt.note(RequestDelta(attempt.key, num_given, output[num_given:4]))
    attempt.note(RequestDelta(attempt.key, 4, output[4:], outcome=Outcome.STOP, stop_token_id=14))
    first, *told = attempt.replayed([num_known])
    assert first == RequestDelta(attempt.key), "that it has the attempt"
    assert [token for delta in told for token in delta.token_ids] == output[num_known:]
    following = min(num_known, len(output))
    for delta in told:
        assert delta.first_index == following
        following += len(delta.token_ids)
    assert [delta.outcome for delta in told if delta.outcome] == [Outcome.STOP]
    assert told[-1].stop_token_id == 14
    assert told[-1].first_index + len(told[-1].token_ids) == 5


@pytest.mark.parametrize("num_known", [0, 2, 3])
def test_the_counts_of_drafts_are_replayed_as_they_were_last(num_known: int) -> None:
    attempt = attempt_of("a")
    attempt.note(RequestDelta(attempt.key, 0, [1, 2], draft_counts=DraftCounts(4, 1)))
    attempt.note(RequestDelta(attempt.key, 2, [3], draft_counts=DraftCounts(6, 1)))
    attempt.note(RequestDelta(attempt.key, 0, [5], sequence_index=1))
    attempt.note(RequestDelta(attempt.key, 3, outcome=Outcome.LENGTH))
    _, *told = attempt.replayed([num_known])
    counts = {index: [d.draft_counts for d in told if d.sequence_index == index] for index in (0, 1)}
    assert set(counts[0]) == {DraftCounts(6, 1)}
    assert counts[1] == [None]


def test_an_end_that_did_not_come_with_a_token_is_replayed_alone() -> None:
    attempt = attempt_of("a")
    attempt.note(RequestDelta(attempt.key, 0, [1, 2]))
    end = RequestDelta(attempt.key, 2, outcome=Outcome.KV_LOST, error="gone", transfer_cause=TransferCause.PEER_GONE)
    attempt.note(end)
    assert list(attempt.replayed()) == [
        RequestDelta(attempt.key),
        RequestDelta(attempt.key, 0, (1, 2)),
        end,
    ]


def test_two_attempts_with_the_same_key_never_run_at_once() -> None:
    book = AttemptBook(GRACE_S)
    first = attempt_of("a")
    book.add(first)
    with pytest.raises(ValueError, match="runs already"):
        book.add(attempt_of("a"))
    book.ended(first, 0.0)
    book.add(attempt_of("a"))
    assert first.state is AttemptState.FORGOTTEN
    assert book.next_deadline is None


@dataclass
class View:
    """What a router knows of an attempt that it submitted or adopted, and that no other router has adopted since."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Outcome] = field(default_factory=dict)
    aborted: bool = False


@dataclass
class Router:
    """One process of a router, and its stream while it has one."""

    name: str
    run: int
    port: Port
    is_attached: bool = True
    views: dict[AttemptKey, View] = field(default_factory=dict)


class AdoptionMachine(RuleBasedStateMachine):
    """A node and three routers that submit, adopt, abort, die and come back, and check what they are told."""

    @initialize()
    def start(self) -> None:
        self.loop = VirtualTimeLoop()
        self.routers: list[Router] = []
        self.params: dict[AttemptKey, SamplingParams] = {}
        self.runs = itertools.count(1)
        self.do(self._start())

    async def _start(self) -> None:
        self.rig = NodeRig(clock=LoopClock(), orphan_grace_s=GRACE_S)
        for index in range(2):
            self._attach(f"router-{index}", next(self.runs))

    def do(self, action: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(action)

    def _attach(self, name: str, run: int, keeps: Sequence[AttemptKey] = ()) -> Router:
        for router in self.routers:
            if (router.name, router.run) == (name, run):
                router.is_attached = False
        router = Router(name, run, self.rig.service.open_port(name, f"{name}.{run}", keeps))
        self.routers.append(router)
        return router

    @property
    def attached(self) -> list[Router]:
        return [router for router in self.routers if router.is_attached]

    @rule(name=st.sampled_from(["router-0", "router-1", "router-2"]), again=st.booleans())
    def attach(self, name: str, again: bool) -> None:
        """Attach a new process of a router, or the latest one once more."""
        runs = [router.run for router in self.routers if router.name == name]
        run = runs[-1] if again and runs else next(self.runs)

        async def action() -> None:
            self._attach(name, run)
            await self._hear()

        self.do(action())

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), has_noticed=st.booleans())
    def cut(self, data: st.DataObject, has_noticed: bool) -> None:
        """Cut the link of a router, with all that is on its way: it attaches again and keeps what it has."""
        router = data.draw(st.sampled_from(self.attached))
        wanted = {
            key: view for key, view in router.views.items() if not view.aborted and len(view.ends) < self.params[key].n
        }

        async def action() -> None:
            if has_noticed:
                router.port.close()
            again = self._attach(router.name, router.run, list(wanted))
            for key, view in wanted.items():
                again.views[key] = View(view.tokens)
                known = [len(view.tokens.get(index, ())) for index in range(self.params[key].n)]
                again.port.receive(Adopt(key, 0, known))
            await self._hear()

        self.do(action())

    @precondition(lambda self: self.attached)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        router = data.draw(st.sampled_from(self.attached))

        async def action() -> None:
            await self._hear()
            router.is_attached = False
            router.port.close()

        self.do(action())

    @precondition(lambda self: self.attached)
    @rule(data=st.data(), n=st.sampled_from([1, 1, 3]), max_tokens=st.integers(1, 9), given=st.integers(0, 3))
    def submit(self, data: st.DataObject, n: int, max_tokens: int, given: int) -> None:
        router = data.draw(st.sampled_from(self.attached))
        key = AttemptKey(f"r{len(self.params)}", 1, 5)
        params = self.params[key] = SamplingParams(temperature=0.0, seed=3, max_tokens=max_tokens, n=n)
        begun = self._expected(key, 0, min(given, max_tokens - 1)) if n == 1 else []
        router.views[key] = View({0: list(begun)})

        async def action() -> None:
            router.port.receive(submit(key, sampling_params=params, output_token_ids=begun))

        self.do(action())

    @precondition(lambda self: self.attached and self.params)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        router = data.draw(st.sampled_from(self.attached))
        key = data.draw(st.sampled_from(sorted(self.params)))

        async def action() -> None:
            await self._hear()
            router.views[key] = View()
            router.port.receive(Adopt(key))
            await self._hear()

        self.do(action())

    @precondition(lambda self: self.attached and self.params)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort an attempt from any router: only its owner's abort counts, or any router's while nobody owns it."""
        router = data.draw(st.sampled_from(self.attached))
        key = data.draw(st.sampled_from(sorted(self.params)))
        owners = [other for other in self.attached if key in other.views]

        async def action() -> None:
            await self._hear()
            router.port.receive(Abort(key, "enough"))

        if not owners or router in owners:
            for owner in owners:
                owner.views[key].aborted = True
        self.do(action())

    @rule(times=st.integers(1, 4))
    def turn(self, times: int) -> None:
        async def action() -> None:
            for _ in range(times):
                self.rig.driver.turn()

        self.do(action())

    @rule(seconds=st.sampled_from([1.0, GRACE_S - 0.5, GRACE_S + 0.5]))
    def wait(self, seconds: float) -> None:
        async def action() -> None:
            await asyncio.sleep(seconds)

        self.do(action())

    @invariant()
    def what_routers_hear_is_right(self) -> None:
        if hasattr(self, "rig"):
            self.do(self._hear())

    async def _hear(self) -> None:
        for router in self.attached:
            for report in await queued_reports(router.port):
                for delta in report.deltas:
                    self._take(router, delta)

    def _take(self, router: Router, delta: RequestDelta) -> None:
        view = router.views.get(delta.attempt)
        if delta.outcome in (Outcome.MOVED, Outcome.UNKNOWN):
            del router.views[delta.attempt]
            return
        if view is None or view.aborted:
            assert view is not None or delta.outcome is Outcome.ABORTED, f"{delta} is nothing of {router.name}'s"
            return
        got = view.tokens.setdefault(delta.sequence_index, [])
        if delta.token_ids:
            assert delta.first_index == len(got), f"{router.name} missed something before {delta}"
            got += delta.token_ids
        whole = self._expected(delta.attempt, delta.sequence_index, self.params[delta.attempt].max_tokens)
        assert got == whole[: len(got)]
        if delta.outcome is not None:
            assert delta.sequence_index not in view.ends, f"{delta} is a second end"
            view.ends[delta.sequence_index] = delta.outcome
            assert delta.outcome is Outcome.LENGTH
            assert got == whole

    def _expected(self, key: AttemptKey, index: int, count: int) -> list[int]:
        return expected_tokens(PROMPT, count, seed=sequence_seed(3, index), vocab_size=VOCAB)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.do(self._settle())
        pending = asyncio.all_tasks(self.loop)
        self.loop.close()
        assert not pending

    async def _settle(self) -> None:
        rig = self.rig
        rig.driver.run(limit=1000)
        await self._hear()
        for router in self.attached:
            for key, view in router.views.items():
                if not view.aborted:
                    assert len(view.ends) == self.params[key].n, f"{key} has not ended for {router.name}"
        await asyncio.sleep(GRACE_S + 1)
        rig.driver.run(limit=1000)
        await rig.service.draining.wait_idle()
        assert not rig.scheduler.requests
        late = self._attach("late", next(self.runs))
        for key in self.params:
            late.port.receive(Adopt(key))
        answers = [delta.outcome for report in await queued_reports(late.port) for delta in report.deltas]
        assert answers == [Outcome.UNKNOWN] * len(self.params), "something is kept for ever"
        rig.service.close()


TestAdoptionMachine = AdoptionMachine.TestCase
TestAdoptionMachine.settings = settings(max_examples=60, stateful_step_count=30, phases=set(Phase) - {Phase.explain})
