"""Rows in place of tokens at the router: every bound is refused by name, and what is sound becomes spans."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from baton.errors import InvalidRequest, NoCapacity, UnsupportedRequest
from baton.messages.generation import GenerateRequest, ModelCard, PromptEmbeds
from baton.messages.node_model import GENERATES, Capability
from baton.messages.prompt_rows import UnsoundRows, read_rows
from baton.messages.spans import Span, digest_of_rows
from baton.model_formats.encoder_decoders import EncoderDecoder
from router.admission.request import ValidRequest
from router.admission.validation import validate
from router.flight.flight_record import FlightRecord, read_record
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.given_spans import random_rows, safetensors_of, span_of

CARD = ModelCard("demo", 32, 100, row_width=8, capabilities=GENERATES | {Capability.PROMPT_EMBEDS})
ROWS = random_rows(5, 8, seed=1)
MOST = 4096


class Codec(FakeTokenizer):
    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 100 for letter in text]


def check(prompt: Any, *embeds: PromptEmbeds, card: ModelCard = CARD, most: int = MOST, **fields: Any) -> ValidRequest:
    raw = GenerateRequest(prompt, prompt_embeds=embeds, **fields)
    return validate(raw, card, Codec(), Random(3), max_prompt_embeds=most)


def embeds(rows: torch.Tensor = ROWS, start: int | None = None) -> PromptEmbeds:
    return PromptEmbeds(safetensors_of(rows), start)


def file_of(header: Any, content: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def tensor(dtype: Any = "F32", shape: Any = (1, 8), offsets: Any = (0, 32), **more: Any) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}, **more}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_alone_are_the_prompt(dtype: torch.dtype) -> None:
    rows = ROWS.to(dtype)
    valid = check(None, embeds(rows))
    assert valid.prompt_token_ids == (0,) * 5
    assert valid.spans == (span_of(rows),)
    assert valid.needs == GENERATES | {Capability.PROMPT_EMBEDS}
    assert check("", embeds(rows)).spans == check((), embeds(rows)).spans == valid.spans


def test_rows_come_before_the_prompt_or_at_places_of_token_ids() -> None:
    valid = check("ab", embeds())
    assert (valid.prompt_token_ids, valid.spans) == ((0, 0, 0, 0, 0, 97, 98), (span_of(ROWS),))
    two = random_rows(2, 8, seed=2)
    valid = check(list(range(1, 11)), embeds(two, 1), embeds(ROWS, 4))
    assert valid.prompt_token_ids == (1, 0, 0, 4, 0, 0, 0, 0, 0, 10)
    assert valid.spans == (span_of(two, 1), span_of(ROWS, 4))
    one, other = (check([7, *[stood] * 5], embeds(start=1)) for stood in (50, 60))
    assert one == other, "the ids that stood there are ignored"


def test_rows_are_no_context_of_a_text() -> None:
    tokenizer = FakeTokenizer(drops_blank=True)

    def context(raw: GenerateRequest, card: ModelCard = CARD) -> Sequence[int]:
        found = validate(raw, card, tokenizer, Random(3), MOST)
        assert found.without_prompt().context_tokens == found.context_tokens
        return found.context_tokens

    ids = list(range(1, 11))
    for start, expected in ((0, (9, 10)), (4, (10,)), (5, ())):
        assert context(GenerateRequest(ids, prompt_embeds=[embeds(start=start)])) == expected
    assert context(GenerateRequest(ids)) == (9, 10)
    # A model with an encoder continues the tokens of its decoder, and not those of its input.
    card = replace(CARD, max_model_len=200)
    text = replace(card, source=EncoderDecoder("text", 50, 100, (7,)))
    speech = replace(card, source=EncoderDecoder("speech", 50, 100, (7,)))
    assert context(GenerateRequest(ids), text) == (7,)
    assert context(GenerateRequest(None, audio=b"12"), speech) == (7,)
    assert context(GenerateRequest(ids, audio=b"12"), speech) == (9, 10)


def test_header_and_metadata_change_no_span() -> None:
    content = ROWS.numpy().tobytes()
    header = {"__metadata__": {"made by": "hand"}, "other name": tensor(shape=[5, 8], offsets=[0, len(content)])["x"]}
    assert check(None, PromptEmbeds(file_of(header, content))).spans == (span_of(ROWS),)


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no safetensors file"),
    "too short": (b"\1\0\0", "no safetensors file"),
    "a header without end": (file_of(b"{}", length=2**63), "no safetensors file"),
    "a header longer than the file": (file_of(b"{}", length=3), "no safetensors file"),
    "a header of no bytes": (file_of(b""), "no safetensors file"),
    "a long header": (file_of(tensor(__metadata__={"x": "y" * 5000}), bytes(32)), "no safetensors file"),
    "no JSON": (file_of(b"\xff{"), "not JSON"),
    "a deep header": (file_of(b"[" * 4000), "not JSON"),
    "a list": (file_of([1]), "no JSON object"),
    "no tensor": (file_of({"__metadata__": {}}), "has 0 tensors"),
    "two tensors": (file_of(tensor(y=tensor()["x"]), bytes(32)), "has 2 tensors"),
    "overlapping tensors": (file_of(tensor(y=tensor(offsets=[16, 48])["x"]), bytes(48)), "has 2 tensors"),
    "a tensor that is none": (file_of({"x": 5}), "it must have one"),
    "a pickle": (b"\x80\x04\x95" + bytes(40), "no safetensors file"),
    "integers": (file_of(tensor("I32"), bytes(32)), "dtype 'I32'"),
    "float8": (file_of(tensor("F8_E4M3"), bytes(8)), "dtype 'F8_E4M3'"),
    "a dtype that is no text": (file_of(tensor(["F32"]), bytes(32)), "dtype"),
    "one dimension": (file_of(tensor(shape=[8]), bytes(32)), "shape"),
    "three dimensions": (file_of(tensor(shape=[1, 1, 8]), bytes(32)), "shape"),
    "no rows": (file_of(tensor(shape=[0, 8], offsets=[0, 0])), "shape"),
    "negative": (file_of(tensor(shape=[-1, -8]), bytes(32)), "shape"),
    "fractions": (file_of(tensor(shape=[1.0, 8]), bytes(32)), "shape"),
    "true": (file_of(tensor(shape=[True, 8]), bytes(32)), "shape"),
    "a bomb": (file_of(tensor(shape=[2**30, 2**30], offsets=[0, 2**62]), bytes(32)), "must fill them"),
    "a number of 3,000 digits": (file_of(b'{"x":{"dtype":"F32","shape":[1%s,8]}}' % (b"0" * 3000)), "shape"),
    "truncated": (file_of(tensor(), bytes(31)), "must fill them"),
    "bytes behind": (file_of(tensor(), bytes(33)), "must fill them"),
    "offsets that leave a hole": (file_of(tensor(offsets=[4, 36]), bytes(36)), "must fill them"),
    "offsets of a part": (file_of(tensor(offsets=[0, 16]), bytes(32)), "must fill them"),
    "no offsets": (file_of({"x": {"dtype": "F32", "shape": [1, 8]}}, bytes(32)), "must fill them"),
    "NaN": (safetensors_of(torch.full((2, 8), torch.nan)), "not finite"),
    "infinity": (safetensors_of(torch.full((2, 8), -torch.inf, dtype=torch.float16)), "not finite"),
    "NaN in bfloat16": (safetensors_of(torch.full((2, 8), torch.nan, dtype=torch.bfloat16)), "not finite"),
    "one NaN at the end": (safetensors_of(torch.tensor([[*[1.0] * 7, torch.nan]])), "not finite"),
    "infinite as bfloat16": (safetensors_of(torch.full((2, 8), 3.4e38)), "not finite"),
    "another width": (safetensors_of(random_rows(2, 9, seed=0)), "rows of 9 numbers; those of demo have 8"),
    "too many rows": (safetensors_of(random_rows(32, 8, seed=0)), "has 32 rows; demo takes at most 31"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_hostile_file_is_refused_with_the_reason(name: str) -> None:
    content, reason = BAD_FILES[name]
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        check([1, 2], PromptEmbeds(content), most=1 << 20)
    assert refusal.value.field == "prompt_embeds"


def test_the_largest_numbers_that_bfloat16_has_are_taken() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        most = min(torch.finfo(torch.bfloat16).max, torch.finfo(dtype).max)
        assert read_rows(safetensors_of(torch.full((1, 8), most, dtype=dtype))).length == 1
    with pytest.raises(UnsoundRows):
        read_rows(safetensors_of(torch.full((70_000, 2), torch.nan)))


REFUSED: dict[str, tuple[Any, tuple[PromptEmbeds, ...], dict[str, Any], str, str]] = {
    "more bytes than are taken": (None, (embeds(),), {"most": 100}, "prompt_embeds", "at most 100 are taken here"),
    "many entries": ([1], (embeds(),) * 65, {"most": 1 << 20}, "prompt_embeds", "at most 64"),
    "a second without place": ([1] * 9, (embeds(start=0), embeds()), {}, "prompt_embeds.start", "is required"),
    "a place in a text": ("abcdef", (embeds(start=1),), {}, "prompt_embeds.start", "this prompt is a text"),
    "behind the end": ([1] * 9, (embeds(start=5),), {}, "prompt_embeds.start", "5 to 10"),
    "a place without prompt": (None, (embeds(start=0),), {}, "prompt_embeds.start", "0 to 5"),
    "overlapping": ([1] * 20, (embeds(start=0), embeds(start=4)), {}, "prompt_embeds[1].start", "behind 5"),
    "out of order": ([1] * 20, (embeds(start=9), embeds(start=0)), {}, "prompt_embeds[1].start", "behind 14"),
    "a bad second one": ([1] * 9, (embeds(start=0), PromptEmbeds(b"", 7)), {}, "prompt_embeds[1]", "no safetensors"),
    "too long together": ("x" * 27, (embeds(),), {}, "prompt", "has 32 tokens and rows"),
    "log-probabilities of rows": (None, (embeds(),), {"prompt_logprobs": 1}, "prompt_logprobs", "does not go with"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    prompt, given, fields, field, reason = REFUSED[name]
    with pytest.raises(InvalidRequest) as refusal:
        check(prompt, *given, **fields)
    assert refusal.value.field == field
    assert reason in refusal.value.reason


def test_rows_are_refused_unless_they_are_allowed_and_the_model_takes_them() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_embeds: is not taken here.*--allow-prompt-embeds"):
        check(None, PromptEmbeds(b"not looked at"), most=0)
    with pytest.raises(UnsupportedRequest, match="can't do prompt_embeds"):
        check(None, embeds(), card=replace(CARD, capabilities=GENERATES))
    with pytest.raises(NoCapacity, match="no node that serves demo has been seen"):
        check(None, embeds(), card=ModelCard("demo", 32, 100))
    with pytest.raises(InvalidRequest, match="prompt: is empty"):
        check(None)


def test_a_record_has_the_digest_and_no_row() -> None:
    valid = check("ab", embeds())
    record = FlightRecord(valid.without_prompt(), 1, 1, "", "d1", 0, "r1", 1.0)
    stored = record.to_json()
    assert len(stored) < 2500
    assert b"rows" not in stored.replace(b'"rows":""', b"")
    digest = digest_of_rows("float32", 5, 8, ROWS.numpy().tobytes())
    read = read_record(stored, valid.request_id, CARD)
    assert read is not None
    assert read.request.spans == (Span(0, 5, digest),)
    assert read == record
