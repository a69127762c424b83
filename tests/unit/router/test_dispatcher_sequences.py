"""Several sequences through the dispatcher: streamed side by side, with their own stop strings, and best_of."""

from __future__ import annotations

from dataclasses import replace

from baton.errors import EngineFault
from baton.messages.generation import SequenceFinished
from baton.messages.ids import AttemptKey
from baton.messages.node import Abort, Leg, Outcome
from tests.support.router_parts import decode, prefill
from tests.support.router_rig import Reader, RouterRig, router_rig


async def start(rig: RouterRig, **fields: object) -> tuple[Reader, AttemptKey]:
    """Start a request on a single decode node."""
    reader = rig.ask(**fields)  # type: ignore[arg-type]
    submit = await rig.next_submit("d1")
    assert submit.leg is Leg.WHOLE
    return reader, submit.attempt


def texts(reader: Reader) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in reader.chunks:
        found[chunk.sequence_index] = found.get(chunk.sequence_index, "") + chunk.text
    return found


def ends(reader: Reader) -> list[SequenceFinished]:
    return [event for event in reader.events if isinstance(event, SequenceFinished)]


async def test_sequences_are_streamed_side_by_side() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader = rig.ask(n=2, max_tokens=3)
        to_prefill, to_decode = await rig.next_submit("p1"), await rig.next_submit("d1")
        assert to_prefill.spec.sampling_params.n == to_decode.spec.sampling_params.n == 2
        attempt = to_decode.attempt
        rig.report("p1", attempt, 0, "a", Outcome.HANDED_OFF)
        rig.report("d1", attempt, 0, "xy", sequence_index=1)
        await reader.wait_for_tokens(3)
        assert texts(reader) == {0: "a", 1: "xy"}, "each is given out as it comes"
        rig.report("d1", attempt, 1, "b!", Outcome.STOP, stop_token_id=ord("!"))
        rig.report("d1", attempt, 2, "z", Outcome.LENGTH, sequence_index=1)
        finished = await reader.finished()
        assert texts(reader) == {0: "ab", 1: "xyz"}
        assert ends(reader) == [SequenceFinished(0, "stop", 33, 3), SequenceFinished(1, "length", None, 3)]
        assert (finished.finish_reason, finished.stop_reason, finished.completion_tokens) == ("stop", 33, 6)


async def test_placement_counts_sequences_instead_of_requests() -> None:
    async with router_rig(prefill(), decode()) as rig:
        reader = rig.ask(n=3)
        attempt = await rig.next_attempt("d1", "p1")
        loads = {candidate.node.node_id: candidate.load for candidate in rig.view.candidates()}
        assert loads == {"p1": 1, "d1": 3}
        rig.report("p1", attempt, 0, "a", Outcome.ERROR)
        assert (await rig.next_abort("d1")).attempt == attempt
        await reader.raises(EngineFault)


async def test_placement_counts_the_sequences_that_a_node_runs_at_once() -> None:
    async with router_rig(replace(decode(), max_num_seqs=8)) as rig:
        readers = [rig.ask(n=128)]
        large = await rig.next_attempt("d1")
        (candidate,) = rig.view.candidates()
        assert (candidate.load, candidate.lack) == (4, None), "the others are held back on the node"
        readers.append(rig.ask())
        small = await rig.next_submit("d1")
        assert small.spec.sampling_params.n == 1
        for attempt, reader in zip((large, small.attempt), readers, strict=True):
            rig.report("d1", attempt, 0, "a", Outcome.ERROR)
            await reader.raises(EngineFault)


async def test_a_stop_string_ends_its_own_sequence() -> None:
    async with router_rig(decode()) as rig:
        reader, attempt = await start(rig, n=2, stop=("END",), max_tokens=8)
        rig.report("d1", attempt, 0, "abENDx", sequence_index=1)
        rig.report("d1", attempt, 0, "cE")
        told = await rig.next_abort("d1")
        assert told == Abort(attempt, told.reason, 1, takeover=1)
        rig.report("d1", attempt, 6, "yz", sequence_index=1)
        rig.report("d1", attempt, 8, outcome=Outcome.ABORTED, sequence_index=1)
        finished = await rig.end(reader, "d1", attempt, 2, "ND")
        assert texts(reader) == {0: "c", 1: "ab"}
        assert ends(reader) == [SequenceFinished(1, "stop", "END", 5), SequenceFinished(0, "stop", "END", 4)]
        assert finished.completion_tokens == 9


async def test_text_held_back_comes_before_its_sequences_end() -> None:
    async with router_rig(decode()) as rig:
        reader, attempt = await start(rig, n=2, stop=("END",), max_tokens=8)
        rig.report("d1", attempt, 0, "aE", Outcome.LENGTH)
        rig.report("d1", attempt, 0, "bEN", Outcome.LENGTH, sequence_index=1)
        finished = await reader.finished()
        assert texts(reader) == {0: "aE", 1: "bEN"}
        assert [end.sequence_index for end in ends(reader)] == [0, 1]
        assert finished.completion_tokens == 5


async def test_the_best_sequences_are_returned_in_order_at_the_end() -> None:
    async with router_rig(decode()) as rig:
        reader, attempt = await start(rig, n=2, best_of=4, max_tokens=2)
        for index, logprob in enumerate((-3.0, -0.5, -9.0, -0.25)):
            rig.report("d1", attempt, 0, chr(97 + index), sequence_index=index, logprob=logprob)
        rig.report("d1", attempt, 1, "A", Outcome.LENGTH, sequence_index=0, logprob=-1.0)
        rig.report("d1", attempt, 1, "B", Outcome.LENGTH, sequence_index=1, logprob=-1.0)
        rig.report("d1", attempt, 1, "C", Outcome.LENGTH, sequence_index=2, logprob=-1.0)
        await rig.nodes["d1"].all_read()
        assert reader.chunks == []
        rig.report("d1", attempt, 1, "D", Outcome.LENGTH, sequence_index=3, logprob=-8.0)
        finished = await reader.finished()
        assert [(chunk.sequence_index, chunk.text) for chunk in reader.chunks] == [(0, "bB"), (1, "aA")]
        assert [chunk.logprobs for chunk in reader.chunks] == [(), ()], "nobody asked for them"
        assert [end.sequence_index for end in ends(reader)] == [0, 1]
        assert finished.completion_tokens == 8, "what was thrown away was generated, too"


async def test_the_best_of_several_is_returned_like_a_single_answer() -> None:
    async with router_rig(decode()) as rig:
        reader, attempt = await start(rig, best_of=2, max_tokens=2, logprobs=0)
        rig.report("d1", attempt, 0, "ab", Outcome.LENGTH, logprob=-2.0)
        rig.report("d1", attempt, 0, "c!", Outcome.STOP, stop_token_id=33, sequence_index=1, logprob=-1.0)
        finished = await reader.finished()
        assert (reader.text, ends(reader)) == ("c", [])
        assert [position.logprob for position in reader.chunks[0].logprobs] == [-1.0, -1.0]
        assert (finished.finish_reason, finished.stop_reason) == ("stop", 33)


async def test_of_equally_good_sequences_the_first_is_returned() -> None:
    async with router_rig(decode()) as rig:
        reader, attempt = await start(rig, best_of=3, max_tokens=1)
        for index in (2, 0, 1):
            rig.report("d1", attempt, 0, "abc"[index], Outcome.LENGTH, sequence_index=index, logprob=-1.0)
        await reader.finished()
        assert reader.text == "a"


async def test_all_sequences_continue_after_their_node_is_lost() -> None:
    async with router_rig(decode("d1"), decode("d2")) as rig:
        reader = rig.ask(n=2, max_tokens=3)
        submit = await rig.next_submit("d1")
        rig.report("d1", submit.attempt, 0, "a")
        rig.report("d1", submit.attempt, 0, "xyz", Outcome.LENGTH, sequence_index=1)
        await reader.wait_for_tokens(4)
        rig.nodes["d1"].die()
        again = await rig.next_submit("d2")
        assert again.spec.sampling_params == submit.spec.sampling_params
        rig.report("d2", again.attempt, 0, "xyz", Outcome.LENGTH, sequence_index=1)
        await rig.end(reader, "d2", again.attempt, 0, "abc")
        assert texts(reader) == {0: "abc", 1: "xyz"}
        assert len(ends(reader)) == 2


async def test_a_client_that_leaves_ends_all_sequences() -> None:
    async with router_rig(decode()) as rig:
        reader, attempt = await start(rig, n=3, max_tokens=3)
        rig.report("d1", attempt, 0, "a")
        await reader.wait_for_tokens(1)
        reader.task.cancel()
        told = await rig.next_abort("d1")
        assert (told.attempt, told.sequence_index) == (attempt, None)
