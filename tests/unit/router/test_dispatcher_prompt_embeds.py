"""Rows in place of tokens between router and nodes: who gets them, what another router knows, and their bound."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import Cancelled, InvalidRequest, QueueFull, UnsupportedRequest
from baton.messages.generation import PromptEmbeds
from baton.messages.ids import AttemptKey
from baton.messages.node import NodeDescription, Outcome, Submit
from baton.messages.node_model import GENERATES, Capability
from baton.messages.sampling import SamplingParams
from router.admission.limits import DispatchLimits
from router.admission.request import ValidRequest
from tests.support.given_spans import random_rows, safetensors_of, span_of
from tests.support.router_parts import MODEL, decode, prefill
from tests.support.router_rig import RouterRig, router_rig

CAN = GENERATES | {Capability.PROMPT_EMBEDS}
ROWS = random_rows(3, 8, seed=1)
FILE = safetensors_of(ROWS)
SPAN = span_of(ROWS)
LIMITS = DispatchLimits(prompt_embeds_bytes=len(FILE), max_image_bytes=0)
ASKED: dict[str, Any] = {"prompt": [9], "prompt_embeds": (PromptEmbeds(FILE),), "max_tokens": 6, "seed": 5}


def able(node: NodeDescription) -> NodeDescription:
    return replace(node, capabilities=CAN, row_width=8)


def knows_rows(rig: RouterRig) -> RouterRig:
    rig.card = replace(rig.card, capabilities=CAN, row_width=8)
    return rig


async def test_both_nodes_of_each_attempt_get_the_rows() -> None:
    nodes = [able(prefill("p1")), able(decode("d1")), able(decode("d2"))]
    async with router_rig(*nodes, limits=LIMITS) as rig:
        reader = knows_rows(rig).ask(request_id="r", **ASKED)
        for attempt in (1, 2):
            first = await rig.next_submit("p1")
            (name,) = [name for name in ("d1", "d2") if name in rig.nodes and not rig.nodes[name].inbox.empty()]
            second = await rig.next_submit(name)
            for submit in (first, second):
                assert (submit.attempt.attempt, list(submit.spec.prompt_token_ids)) == (attempt, [0, 0, 0, 9])
                assert submit.spec.spans == (SPAN,)
            if attempt == 1:
                (kept,) = rig.store.kept.values()
                assert SPAN.digest in repr(kept)
                assert "rows" not in repr(kept).replace('"rows":""', "")
                rig.nodes.pop(name).die()
                assert (await rig.next_abort("p1")).attempt == first.attempt
        rig.report("p1", first.attempt, 0, "a", Outcome.HANDED_OFF)
        await rig.end(reader, name, first.attempt, 1, "bcdef")
        assert reader.text == "abcdef"


async def test_nodes_that_take_no_rows_are_not_chosen() -> None:
    async with router_rig(prefill("p1"), decode("d1"), able(decode("d2")), limits=LIMITS) as rig:
        reader = knows_rows(rig).ask(request_id="r", **ASKED)
        submit = await rig.next_submit("d2")
        assert submit.kv_source is None
        await rig.end(reader, "d2", submit.attempt, 0, "abcdef")
    async with router_rig(prefill("p1"), decode("d1"), limits=LIMITS) as rig:
        with pytest.raises(UnsupportedRequest, match="can't do prompt_embeds"):
            await knows_rows(rig).ask(request_id="r", **ASKED).finished()


async def test_a_request_that_comes_again_after_its_routers_death_has_the_spans_of_its_record() -> None:
    recorded = ValidRequest(
        (0, 0, 0, 9), SamplingParams(seed=5, max_tokens=6), request_id="r", model=MODEL, spans=(SPAN,)
    )
    async with router_rig(able(prefill("p2")), able(decode("d2")), limits=LIMITS) as rig:
        knows_rows(rig)
        rig.left_behind(recorded, AttemptKey("r", 2, 99), prefill("p1"), decode("d1"))
        others = {**ASKED, "prompt_embeds": (PromptEmbeds(safetensors_of(random_rows(3, 8, seed=2))),)}
        await rig.resume("r", 1, **others).raises(InvalidRequest, "prompt: has other prompt_embeds, images")
        reader = rig.resume("r", 1, **ASKED)
        submits: list[Submit] = [await rig.next_submit("p2"), await rig.next_submit("d2")]
        assert [submit.spec.spans for submit in submits] == [(SPAN,)] * 2
        rig.report("p2", submits[0].attempt, 0, "a", Outcome.HANDED_OFF)
        await rig.end(reader, "d2", submits[0].attempt, 1, "bcdef")
        assert reader.text == "bcdef"


async def test_all_rows_of_live_requests_have_a_bound_together() -> None:
    async with router_rig(able(decode("d1")), limits=LIMITS) as rig:
        knows_rows(rig)
        room = LIMITS.held_row_bytes // len(SPAN.rows)
        readers = [await rig.accepted(request_id=f"r{number}", **ASKED) for number in range(room)]
        await rig.ask(request_id="more", **ASKED).raises(QueueFull, "too many bytes of images or prompt_embeds")
        text = await rig.accepted(request_id="text")
        rig.dispatcher.cancel("r0")
        await readers[0].raises(Cancelled)
        await asyncio.sleep(0)
        again = await rig.accepted(request_id="more", **ASKED)
        for number in range(1, room):
            rig.dispatcher.cancel(f"r{number}")
        for name in ("more", "text"):
            rig.dispatcher.cancel(name)
        for reader in (*readers[1:], text, again):
            await reader.raises(Cancelled)
