"""A client that lost its stream resumes it at a router: from the live request, from nodes, or by computing again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from baton.errors import (
    BatonError,
    Cancelled,
    ContinuedElsewhere,
    DeadlineExceeded,
    Draining,
    EngineFault,
    InvalidRequest,
    RequestNotFound,
)
from baton.messages.generation import Accepted, Chunk, GenerateRequest, ModelCard, PromptLogprobs, SequenceFinished
from baton.messages.ids import AttemptKey
from baton.messages.node import Adopt, Leg, NodeDescription, Outcome
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.registry.base import ENDED_S
from router.admission.request import ValidRequest
from router.flight.flight_record import READS_PER_TURN
from tests.doubles.fake_flight_records import LIFETIME_S
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.router_parts import MODEL, decode, prefill
from tests.support.router_rig import RouterRig, router_rig

PARAMS = SamplingParams(seed=5, max_tokens=6)
REQUEST = ValidRequest((5, 6, 7), PARAMS, request_id="r", model=MODEL)
CARD = ModelCard(MODEL, 64, 300)
THEIRS = AttemptKey("r", 2, 99)
AGAIN: dict[str, Any] = {"prompt": (5, 6, 7)}
"""What a client says that sends its request with each call, as those of HTTP do."""


def record_lost_router(
    rig: RouterRig, first: NodeDescription | None, second: NodeDescription, model: str = MODEL, takeover: int = 1
) -> None:
    """Write the record that another router left of its second attempt on these nodes."""
    rig.left_behind(replace(REQUEST, model=model), THEIRS, first, second, takeover=takeover)


# The live run.


async def test_a_second_stream_gets_the_log_probabilities_of_the_prompt_if_it_has_no_token() -> None:
    of_prompt = [TokenLogprobs(ord(letter), -1.0, 1, ()) for letter in "ello"]
    async with router_rig(prefill(), decode()) as rig:
        old, attempt = await rig.start(request_id="r", max_tokens=3, seed=5, prompt_logprobs=0)
        assert not rig.store.kept, "another router's flight would not have them"
        rig.report("d1", attempt, 0, "wo")
        rig.report("p1", attempt, 0, "w", Outcome.HANDED_OFF, prompt_logprobs=of_prompt)
        await old.wait_for_tokens(2)
        assert [type(event) for event in old.events[:3]] == [Accepted, PromptLogprobs, Chunk]
        new = rig.resume("r")
        await new.wait_for_tokens(2)
        behind = rig.resume("r", 1)
        await behind.wait_for_tokens(1)
        await rig.end(behind, "d1", attempt, 2, "r")
        assert new.events[1] == PromptLogprobs(of_prompt)
        assert [type(event) for event in behind.events[:2]] == [Accepted, Chunk]
        for reader in (old, new):
            await reader.raises(Cancelled)


async def test_a_second_stream_takes_over_a_live_request() -> None:
    async with router_rig(prefill(), decode()) as rig:
        old, attempt = await rig.streaming("wo", request_id="r", max_tokens=4, seed=5)
        new = rig.resume("r", 1)
        await old.raises(Cancelled, "continued elsewhere")
        finished = await rig.end(new, "d1", attempt, 2, "rd")
        assert new.accepted == old.accepted == Accepted("r", 5, 5)
        assert (new.chunks[0].first_index, new.text) == (1, "ord")
        assert (finished.completion_tokens, finished.path.attempts) == (4, 1)
        assert rig.nodes["d1"].inbox.empty(), "nothing was aborted, nothing asked for again"
        assert rig.requests.counters.resumed == 1


async def test_a_finished_but_unread_answer_is_replayed() -> None:
    async with router_rig(decode()) as rig:
        stream = rig.dispatcher.generate(GenerateRequest("hello", request_id="r", max_tokens=2, n=2))
        assert isinstance(await anext(stream), Accepted)
        attempt = await rig.next_attempt("d1")
        for index in range(2):
            rig.report("d1", attempt, 0, "ab", Outcome.LENGTH, sequence_index=index)
        await rig.nodes["d1"].all_read()
        new = rig.resume("r", 1, 2)
        finished = await new.finished()
        assert new.events[1:-1] == [
            Chunk(1, (98,), "b"),
            SequenceFinished(0, "length", None, 2),
            SequenceFinished(1, "length", None, 2),
        ]
        assert finished.completion_tokens == 4
        await stream.aclose()


async def test_a_failed_request_fails_again_when_it_is_resumed() -> None:
    async with router_rig(decode()) as rig:
        stream = rig.dispatcher.generate(GenerateRequest("hello", request_id="r"))
        await anext(stream)
        rig.report("d1", await rig.next_attempt("d1"), outcome=Outcome.ERROR)
        await rig.nodes["d1"].all_read()
        await rig.resume("r").raises(EngineFault)
        await stream.aclose()


async def test_a_resumed_stream_has_its_own_deadline_and_ends_the_request_when_it_leaves() -> None:
    async with router_rig(prefill(), decode()) as rig:
        old, attempt = await rig.start(request_id="r", timeout_s=1.0)
        new = rig.resume("r", timeout_s=5.0)
        await old.raises(Cancelled)
        rig.timers.advance(2.0)
        await rig.tell_all("p1", "d1")
        assert not new.task.done()
        third = rig.resume("r")
        await new.raises(Cancelled)
        rig.timers.advance(4.0)
        await rig.tell_all("p1", "d1")
        await third.wait_until_accepted()
        third.task.cancel()
        assert await rig.next_aborts("p1", "d1") == attempt


async def test_an_invalid_resume_leaves_the_old_stream_alone() -> None:
    async with router_rig(prefill(), decode()) as rig:
        old, attempt = await rig.start(request_id="r", max_tokens=2)
        await rig.resume("r", timeout_s=0.0).raises(DeadlineExceeded)
        await rig.resume("r", 4).raises(InvalidRequest, "next_token_index")
        await rig.finish(old, attempt, "ab")


async def test_log_probabilities_are_replayed() -> None:
    async with router_rig(prefill(), decode()) as rig:
        old, attempt = await rig.start(request_id="r", max_tokens=3, logprobs=0)
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF, logprob=-0.1)
        rig.report("d1", attempt, 1, "b", logprob=-0.2)
        await old.wait_for_tokens(2)
        new = rig.resume("r", 1)
        rig.report("d1", attempt, 2, "c", Outcome.LENGTH, logprob=-0.3)
        await new.finished()
        told = [position.logprob for chunk in new.chunks for position in chunk.logprobs]
        assert told == [-0.2, -0.3]
        await old.raises(Cancelled)


# What another router began.


async def test_an_attempt_of_a_lost_router_is_adopted_from_its_nodes() -> None:
    async with router_rig(prefill(), decode()) as rig:
        record_lost_router(rig, prefill(), decode())
        reader = rig.resume("r", 2)
        assert await rig.next_adopts("p1", "d1") == THEIRS
        assert rig.in_flight() == 2
        rig.report("d1", THEIRS, 0, "abc")
        rig.report("p1", THEIRS, outcome=Outcome.UNKNOWN)
        finished = await rig.end(reader, "d1", THEIRS, 3, "def")
        assert (reader.accepted, reader.text) == (Accepted("r", 5, 3), "cdef")
        assert (reader.chunks[0].first_index, finished.completion_tokens, finished.path.attempts) == (2, 6, 2)
        assert rig.requests.counters.adopted == 1
        (told,) = rig.requests.placer.explain("r", 0.0)
        assert (told.decision.attempt, told.decision.decode) == (2, "d1")
        assert told.decision.measured is not None


@pytest.mark.parametrize("way", ["whole", "another node", "taken over", "adopted", "computed again"])
@pytest.mark.parametrize(("prompt", "text"), [("hello", " wo"), ("", "wo")])
async def test_a_text_continues_its_prompt_however_its_stream_goes_on(way: str, prompt: str, text: str) -> None:
    """The tokenizer leaves out the blank with which a text begins."""
    asked: dict[str, Any] = {"prompt": [0, *map(ord, prompt)], "seed": 5, "max_tokens": 3}
    async with router_rig(prefill(), decode("d1"), decode("d2"), codec=FakeTokenizer(drops_blank=True)) as rig:
        readers = [rig.ask(request_id="r", **asked)]

        async def next_attempt() -> tuple[str, AttemptKey]:
            """Return the decode node of the next attempt, and the attempt."""
            attempt = await rig.next_attempt("p1")
            (name,) = [name for name, node in rig.nodes.items() if not node.inbox.empty()]
            assert await rig.next_attempt(name) == attempt
            return name, attempt

        name, attempt = await next_attempt()
        rig.report("p1", attempt, 0, " ")
        await readers[0].wait_for_tokens(1)
        if way == "another node":
            rig.nodes.pop(name).die()
            await rig.next_abort("p1")
            name, attempt = await next_attempt()
        elif way == "taken over":
            readers.append(rig.resume("r", 0))
            await readers[1].wait_for_tokens(1)
        rig.report(name, attempt, 1, "wo", Outcome.LENGTH)
        await readers[-1].finished()
        await rig.next_abort("p1")
        if way in ("adopted", "computed again"):
            # What the router has forgotten it finds in the record that it has written, as another router does.
            readers.append(rig.resume("r", 0, **asked))
            assert await rig.next_adopts("p1", name) == attempt
            rig.report("p1", attempt, outcome=Outcome.UNKNOWN)
            if way == "computed again":
                rig.report(name, attempt, outcome=Outcome.UNKNOWN)
                name, attempt = await next_attempt()
            rig.report(name, attempt, 0, " wo", Outcome.LENGTH)
            await readers[-1].finished()
        assert readers[-1].text == text
        assert readers[-1].accepted.contexts == (tuple(map(ord, prompt[-2:])),)
        if way == "taken over":
            await readers[0].raises(Cancelled)


@pytest.mark.parametrize("first", ["p1", "d1"])
async def test_a_prefill_node_that_forgot_the_attempt_does_not_matter_while_its_decode_leg_runs(first: str) -> None:
    async with router_rig(prefill(), decode()) as rig:
        record_lost_router(rig, prefill(), decode())
        reader = rig.resume("r")
        await rig.next_adopts("p1", "d1")
        for name in (first, "d1" if first == "p1" else "p1"):
            if name == "p1":
                rig.report("p1", THEIRS, outcome=Outcome.UNKNOWN)
            else:
                rig.report("d1", THEIRS)
                rig.report("d1", THEIRS, 0, "abc")
                rig.nodes["d1"].report()
            await rig.nodes[name].all_read()
        assert (await rig.end(reader, "d1", THEIRS, 3, "def")).path.attempts == 2


@pytest.mark.parametrize("case", ["nobody", "decode", "prefill first", "prefill last"])
async def test_an_attempt_unknown_to_its_nodes_is_generated_again_as_a_new_attempt(case: str) -> None:
    async with router_rig(prefill(), decode()) as rig:
        record_lost_router(rig, prefill(), decode())
        reader = rig.resume("r", 2, **AGAIN)
        await rig.next_adopts("p1", "d1")
        # A prefill node that never heard of it is as bad, while the decode node has nothing to tell.
        words: dict[str, list[tuple[str, Outcome | None]]] = {
            "nobody": [("p1", Outcome.UNKNOWN), ("d1", Outcome.UNKNOWN)],
            "decode": [("d1", Outcome.UNKNOWN)],
            "prefill first": [("p1", Outcome.UNKNOWN), ("d1", None)],
            "prefill last": [("d1", None), ("p1", Outcome.UNKNOWN)],
        }
        for name, outcome in words[case]:
            rig.report(name, THEIRS, outcome=outcome)
            await rig.nodes[name].all_read()
        # Whatever else it says: it has told all that it had.
        rig.nodes["d1"].report()
        for name, lost in (("p1", "UNKNOWN"), ("d1", "UNKNOWN")):
            if (name, Outcome[lost]) not in words[case]:
                assert (await rig.next_abort(name)).attempt == THEIRS
        to_prefill = await rig.next_submit("p1")
        again = to_prefill.attempt
        assert await rig.next_attempt("d1") == again
        assert (again.request_id, again.attempt) == ("r", 3)
        assert again.flight != THEIRS.flight
        assert (to_prefill.leg, to_prefill.spec.sampling_params, list(to_prefill.spec.prompt_token_ids)) == (
            Leg.PREFILL,
            PARAMS,
            [5, 6, 7],
        )
        finished = await rig.finish(reader, again, "abcdef")
        assert (reader.text, finished.path.attempts) == ("cdef", 3)


async def test_a_request_whose_nodes_are_gone_is_generated_again_at_once() -> None:
    async with router_rig(prefill("p2"), decode("d2")) as rig:
        record_lost_router(rig, prefill("p1"), decode("d1"))
        reader = rig.resume("r", 1, **AGAIN)
        again = await rig.next_attempt("p2")
        assert again.attempt == 3
        await rig.next_submit("d2")
        await rig.finish(reader, again, "abcdef", prefill="p2", decode="d2")
        assert reader.text == "bcdef"


@pytest.mark.parametrize("case", ["gone", "forgotten", "lost later"])
async def test_a_request_whose_nodes_and_prompt_are_gone_must_be_sent_again(case: str) -> None:
    """A record has no prompt: the nodes have it, and the client sends it again if the request is not found."""
    async with router_rig(prefill("p2"), decode("d2")) as rig:
        of = "1" if case == "gone" else "2"
        record_lost_router(rig, prefill(f"p{of}"), decode(f"d{of}"))
        reader = rig.resume("r", 1)
        if case != "gone":
            assert await rig.next_adopts("p2", "d2") == THEIRS
        if case == "lost later":
            rig.report("d2", THEIRS, 0, "ab")
            await reader.wait_for_tokens(1)
            rig.nodes["d2"].die()
        elif case == "forgotten":
            rig.report("d2", THEIRS, outcome=Outcome.UNKNOWN)
        await reader.raises(RequestNotFound, "ask for it again")


async def test_resuming_with_another_prompt_is_refused() -> None:
    async with router_rig(prefill(), decode()) as rig:
        record_lost_router(rig, prefill(), decode())
        await rig.resume("r", 1, prompt=(5, 6)).raises(InvalidRequest, "has 2 tokens; the request had 3")


async def test_the_nodes_of_a_dead_router_are_asked_once_for_each_of_its_requests() -> None:
    count = 50
    async with router_rig(prefill(), decode()) as rig:
        keys = [AttemptKey(f"r{number}", 1, 7) for number in range(count)]
        for key in keys:
            rig.left_behind(replace(REQUEST, request_id=key.request_id), key, prefill(), decode())
        readers = [rig.resume(key.request_id) for key in keys]
        for _ in keys:
            await rig.next_adopt("p1")
            await rig.next_adopt("d1")
        for number, key in enumerate(keys):
            rig.report("d1", key)
            # Some have no token yet.
            if number % 2:
                rig.report("d1", key, 0, "abc")
        await rig.nodes["d1"].all_read()
        assert rig.requests.counters.adoption_looks == 0, "it only told again what it had"
        await rig.tell_all("d1")
        assert rig.requests.counters.adoption_looks == count / 2
        for number, key in enumerate(keys):
            first = 3 if number % 2 else 0
            rig.report("d1", key, first, "abcdef"[first:], Outcome.LENGTH)
        for reader in readers:
            await reader.finished()
        assert rig.requests.counters.adoption_looks == count / 2


async def test_clients_of_a_dead_router_are_resumed_a_few_per_turn_of_the_loop() -> None:
    count = 5 * READS_PER_TURN
    async with router_rig(decode()) as rig:
        keys = [AttemptKey(f"r{number}", 1, 7) for number in range(count)]
        for key in keys:
            rig.left_behind(replace(REQUEST, request_id=key.request_id), key, None, decode())
        readers = [rig.resume(key.request_id) for key in keys]
        steps, counters = [0], rig.requests.counters
        while counters.adopted < count:
            await asyncio.sleep(0)
            steps.append(counters.adopted)
        assert max(after - before for before, after in pairwise(steps)) == READS_PER_TURN
        for key in keys:
            rig.report("d1", key, 0, "abcdef", Outcome.LENGTH)
        for reader in readers:
            await reader.finished()


async def test_only_the_decode_node_is_asked_for_an_attempt_on_one_node() -> None:
    async with router_rig(decode()) as rig:
        record_lost_router(rig, prefill(), decode())
        reader = rig.resume("r", 5)
        assert await rig.next_adopt("d1") == THEIRS
        await rig.end(reader, "d1", THEIRS, 0, "abcdef")
        assert reader.text == "f"


async def test_an_adopted_attempt_whose_node_dies_is_retried_like_any_other() -> None:
    async with router_rig(prefill(), decode("d1"), decode("d2")) as rig:
        record_lost_router(rig, prefill(), decode("d1"))
        reader = rig.resume("r", 1, **AGAIN)
        await rig.next_adopts("p1", "d1")
        rig.report("p1", THEIRS, 0, "a", Outcome.HANDED_OFF)
        rig.report("d1", THEIRS, 1, "b")
        await reader.wait_for_tokens(1)
        rig.nodes["d1"].die()
        assert (await rig.next_abort("p1")).attempt == THEIRS
        ours = await rig.next_attempt("p1")
        assert (ours.attempt, ours.flight == THEIRS.flight) == (3, False)
        assert await rig.next_attempt("d2") == ours
        await rig.finish(reader, ours, "abcdef", decode="d2")
        assert reader.text == "bcdef"


async def test_an_attempt_that_moved_to_another_router_ends_its_flight_without_an_error() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader, attempt = await rig.start(request_id="r")
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        rig.report("d1", attempt, outcome=Outcome.MOVED)
        await reader.raises(ContinuedElsewhere, "continued at another router")
        assert rig.nodes["p1"].inbox.empty(), "an abort could harm its new owner"
        assert rig.nodes["d1"].inbox.empty()
        assert rig.store.lifetime_s("c", "r") == LIFETIME_S, "the record is another router's by now"
        assert (rig.requests.counters.moved, rig.requests.counters.failed) == (1, 0)


async def test_a_moved_attempt_can_be_adopted_again_before_its_end_was_read() -> None:
    async with router_rig(prefill(), decode()) as rig:
        stream = rig.dispatcher.generate(GenerateRequest("hello", request_id="r", max_tokens=6, seed=5))
        assert isinstance(await anext(stream), Accepted)
        attempt = await rig.next_attempt("p1", "d1")
        rig.report("d1", attempt, outcome=Outcome.MOVED, takeover=2)
        await rig.nodes["d1"].all_read()
        back = rig.resume("r", 1, call=3)
        assert await rig.next_adopts("p1", "d1") == attempt
        await rig.end(back, "d1", attempt, 0, "abcdef")
        assert back.text == "bcdef"
        with pytest.raises(ContinuedElsewhere):
            await anext(stream)


async def test_an_attempt_adopted_for_an_earlier_call_is_taken_back() -> None:
    async with router_rig(decode()) as rig:
        record_lost_router(rig, None, decode())
        reader = rig.resume("r", call=3)
        assert await rig.next_adopt("d1") == THEIRS
        rig.report("d1", THEIRS, 0, "abc")
        rig.report("d1", THEIRS, outcome=Outcome.MOVED, takeover=2)
        again = await rig.nodes["d1"].inbox.get()
        assert again == Adopt(THEIRS, 3, (3,)), "it has three of the tokens already"
        rig.report("d1", THEIRS, 0, "abc")
        await rig.end(reader, "d1", THEIRS, 3, "def")
        assert reader.text == "abcdef"
        assert rig.requests.counters.moved == 0


async def test_a_call_older_than_the_current_one_is_refused() -> None:
    async with router_rig(decode()) as rig:
        record_lost_router(rig, None, decode(), takeover=3)
        for call in (2, 3):
            await rig.resume("r", call=call).raises(ContinuedElsewhere, "call 3")
        reader = rig.resume("r", call=5)
        assert await rig.nodes["d1"].inbox.get() == Adopt(THEIRS, 5)
        await rig.resume("r", call=4).raises(ContinuedElsewhere, "call 5")
        noted = await rig.journal("router-2.a").find("r", CARD)
        assert noted is not None
        assert (noted.takeover, noted.key, noted.router) == (5, THEIRS, "router-1.a")
        # Who does not count comes behind all that is known.
        last = rig.resume("r")
        await reader.raises(Cancelled)
        rig.report("d1", THEIRS, 0, "abcdef")
        await last.wait_for_tokens(6)
        last.task.cancel()
        assert (await rig.next_abort("d1")).takeover == 6


# Who is not known, and what is left behind.


async def test_an_unknown_request_can_not_be_resumed() -> None:
    async with router_rig(prefill(), decode()) as rig:
        for request_id in ("r", "", "no id \n at all", "x" * 65):
            await rig.resume(request_id).raises(RequestNotFound)
        record_lost_router(rig, prefill(), decode(), "another")
        await rig.resume("r").raises(RequestNotFound)
        rig.store.up = False
        record_lost_router(rig, prefill(), decode())
        await rig.resume("r").raises(RequestNotFound)


async def test_a_closing_router_resumes_nothing() -> None:
    async with router_rig(prefill(), decode()) as rig:
        record_lost_router(rig, prefill(), decode())
        rig.dispatcher.drain()
        await rig.resume("r").raises(Draining)


async def test_each_attempt_and_its_end_are_recorded() -> None:
    async with router_rig(prefill(), decode("d1"), decode("d2")) as rig:
        reader, first = await rig.start(request_id="r", seed=7)
        noted = await rig.journal("router-2.a").find("r", CARD)
        assert noted is not None
        assert (noted.key, noted.prefill, noted.decode, noted.router) == (first, "p1.1", "d1.1", "router-1.a")
        assert noted.request.sampling_params.seed == 7
        rig.nodes["d1"].die()
        await rig.next_abort("p1")
        second = await rig.next_attempt("p1")
        noted = await rig.journal("router-2.a").find("r", CARD)
        assert noted is not None
        assert (noted.key, noted.decode) == (second, "d2.1")
        assert rig.store.lifetime_s("c", "r") == LIFETIME_S
        reader.task.cancel()
        await rig.next_abort("p1")
        assert rig.store.lifetime_s("c", "r") == ENDED_S


async def test_a_request_cancelled_by_a_broken_connection_can_be_resumed() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader, attempt = await rig.start(request_id="r", seed=7, max_tokens=2)
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        await reader.wait_for_tokens(1)
        reader.task.cancel()
        await rig.next_aborts("p1", "d1")
        back = rig.resume("r", 1, prompt="hello")
        for name in ("p1", "d1"):
            assert await rig.next_adopt(name) == attempt
            rig.report(name, attempt, outcome=Outcome.UNKNOWN)
        again = await rig.next_attempt("p1", "d1")
        await rig.finish(back, again, "ab")
        assert back.text == "b"


async def test_two_simultaneous_resumes_share_one_flight() -> None:
    async with router_rig(prefill(), decode()) as rig:
        record_lost_router(rig, prefill(), decode())
        readers = [rig.resume("r", 1), rig.resume("r", 0)]
        await rig.next_adopts("p1", "d1")
        rig.report("d1", THEIRS, 0, "abcdef", Outcome.LENGTH)
        ends: list[object] = []
        for reader in readers:
            try:
                ends.append((await reader.finished()).finish_reason)
            except BatonError as error:
                ends.append(type(error))
        assert ends == [Cancelled, "length"]
        assert readers[1].text == "abcdef"
