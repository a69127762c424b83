"""Fuzzed HTTP bodies, sent to a whole cluster in virtual time.

A valid body is served, one with a single wrong field is refused with that field's name, and any other gets an answer
that is no server error. It leaves no state, and a request beside it gets its own tokens. `BATON_FUZZ_EXAMPLES=100000`
runs that many.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from tests.support.fuzzed_cluster import SPEC, LetterTokenizer, Run, fuzzed_cluster
from tests.support.fuzzed_http import NO_NUMBERS, NO_TEXTS, fuzzed, mutations, post, wild_bodies
from tests.support.http_client import Exchange
from tests.support.simulated_oracle import expected_embedding

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with fuzzed_cluster() as made:
        yield made


# For each field valid values, then invalid ones.

NO_TAGS: list[Any] = [
    {"type": "structural_tag"},
    {"type": "structural_tag", "format": {"type": "sequence", "elements": []}},
    {"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "json_schema", "json_schema": "["}]}},
    {"type": "structural_tag", "structures": [{"begin": 1, "schema": {}, "end": ""}], "triggers": ["x"]},
    {"type": "structural_tag", "format": {"type": "repeat", "min": 10**400, "max": 1, "content": {}}},
]
TRUNCATIONS: list[Any] = [*NO_NUMBERS, 0, -2, 1.5, 2**18 + 1]
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.5, 2, None], [*NO_NUMBERS, -0.1, 2.1, 1e308]),
    "top_p": ([1, 0.5, 1e-300], [*NO_NUMBERS, 0, -1, 1.1]),
    "top_k": ([-1, 0, 1, SPEC.vocab_size], [*NO_NUMBERS, -2, SPEC.vocab_size + 1, 1.5, 2**64]),
    "min_p": ([0, 0.1, 1], [*NO_NUMBERS, -0.1, 1.1]),
    "top_n_sigma": ([0, 0.5, 100], [*NO_NUMBERS, -0.1, 100.1]),
    "seed": ([0, 7, 2**64 - 1], [*NO_NUMBERS, -1, 2**64, 0.5]),
    "presence_penalty": ([-2, 0, 2], [*NO_NUMBERS, -2.1, 2.1]),
    "frequency_penalty": ([-2, 0, 2], [*NO_NUMBERS, -2.1, 2.1]),
    "repetition_penalty": ([0.1, 1, 2], [*NO_NUMBERS, 0, 2.1]),
    "logit_bias": (
        [{}, {"1": 5, "96": -100.0}],
        ["1", [1], {"x": 1}, {"97": 1}, {"-1": 1}, {"1": "1"}, {"1": 10**400}],
    ),
    "allowed_token_ids": ([[0, 96], [5]], [1, "1", [], [97], [-1], ["1"], [True], [1] * 4097, [10**400]]),
    "prompt_logprobs": ([0, 20], [*NO_NUMBERS, -1, 21]),
    "bad_words": ([[], ["ab", "é"]], ["x", 1, [1], ["x"] * 257, [""], ["a\0"], ["\udc80"]]),
    "max_tokens": ([1, 5, 24], [*NO_NUMBERS, 0, -1, 128, 2**31, 1.5]),
    "min_tokens": ([0, 1], [*NO_NUMBERS, -1, 128, 2**63]),
    "stop": (["x", [], ["ab", "é"], ["x"] * 16], [1, [1], ["x"] * 17, [""], "", "x" * 257, "a\0", "\udc80", {"a": 1}]),
    "stop_token_ids": ([[], [0, 96]], [1, "1", [97], [-1], ["1"], [True], [1] * 257, [10**400]]),
    "ignore_eos": ([True, False], [0, 1, "true", []]),
    "include_stop_str_in_output": ([True, False], [0, 1, "true", []]),
    "n": ([1, 2, 3], [*NO_NUMBERS, 0, -1, 129, 1.5]),
    "priority": ([0, 5, 2**31 - 1], [*NO_NUMBERS, 2**31, -1]),
    "cache_salt": (["", "salt"], [*NO_TEXTS, "a\0", "x" * 257, "\ud800"]),
    "ttft_slo_ms": ([1e6], [*NO_NUMBERS, 0, -1]),
    "tpot_slo_ms": ([1e6], [*NO_NUMBERS, 0, -1]),
    "stream": ([True, False], [1, "true", {}]),
    "user": (["somebody", *NO_TEXTS], []),
    "model": (["", SPEC.name, None], [*NO_TEXTS, "another", "\0", "x" * 100_000]),
    "response_format": ([None, {"type": "text"}], [1, {}, {"type": "grammar"}, {"type": "text", "x": 1}, [], *NO_TAGS]),
    "structured_outputs": (
        [None],
        [1, {}, [], {"regex": "a"}, {"json": {}, "json_object": True}, {"json": 1}, {"x": 1}]
        + [{"structural_tag": tag} for tag in NO_TAGS],
    ),
    "guided_json": ([None], [1, True, []]),
    "truncate_prompt_tokens": ([None, 1, 7, -1, 2**18], TRUNCATIONS),
    "return_token_ids": ([True, False], [1, "true"]),
    "return_tokens_as_token_ids": ([True, False], [1, "true"]),
    "skip_special_tokens": ([True], [False, "x"]),
    "metadata": ([{}, {"a": {"b": 1}}, 1, "x"], []),
    "no_such_field": ([], [None, 1, {"a": 1}]),
    "tool_calls\0": ([], [1]),
}
ALONE: dict[str, tuple[str, list[Any], list[Any]]] = {
    "prompt": (
        COMPLETIONS,
        ["hello", [1, 2, 96], ["hello"], [[1, 2]], "é\U0001f600", "a\0"],
        [
            None,
            1,
            "",
            [],
            [[]],
            [97],
            [-1],
            [True],
            [1.5],
            "x" * 128,
            [1] * 128,
            "\ud800",
            {},
            ["a"] * 33,
            [10**400],
        ],
    ),
    "logprobs": (COMPLETIONS, [None, 0, 20], [*NO_NUMBERS, -1, 21]),
    "suffix": (COMPLETIONS, [None, ""], ["x", 1]),
    "echo": (COMPLETIONS, [False, True], [1, "true"]),
    "messages": (
        CHAT,
        [[{"role": "user", "content": "hi"}], [{"role": "system", "content": "s"}, {"role": "user", "content": []}]],
        [
            *(None, [], "x", [1], [{}], [{"role": "user", "content": 1}], [{"role": "x", "content": "x"}]),
            *([{"role": "user", "content": "x" * 200}], [{"role": "user", "content": "\ud800"}]),
            *([{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": "\udfff"}]),
            [{"role": "user", "content": "x", "y": 1}],
        ],
    ),
    "top_logprobs": (CHAT, [], [*NO_NUMBERS, -1, 1, 21]),
    "tools": (CHAT, [None, []], [[{"type": "function"}], 1]),
}
OF_EMBEDDINGS: dict[str, tuple[list[Any], list[Any]]] = {
    "input": (
        ["hello", [1, 2, 96], ["hello", "é"], [[1, 2], [3]], "x" * 128, [1] * 128, ["a"] * 257],
        [
            *(None, 1, "", [], [[]], ["a", ""], ["a", [1]], [1, "a"], {}, [[1], []]),
            *([97], [-1], [[1], [97]], [True], [1.5], [10**400], "x" * 129, [1] * 129, "\ud800", ["a", "\ud800"]),
            ["a"] * 2049,
        ],
    ),
    "encoding_format": ([None, "float"], ["", "hex", 1, []]),
    "dimensions": ([None], [*NO_NUMBERS[:-1], 0, -1, 7, 1.5, 2**64]),
    **{name: FIELDS[name] for name in ("priority", "cache_salt", "user", "model")},
    "truncate_prompt_tokens": ([None, 2, -1, 2**18], TRUNCATIONS),
    "no_such_field": FIELDS["no_such_field"],
}
HEADERS: dict[str, tuple[list[str], list[str]]] = {
    "x-request-id": (["mine", "a" * 64], ["", "a b", "a" * 65, "\xff"]),
    "x-request-timeout-ms": (["100000", "86400000"], ["", "0", "-1", "x", "1" * 30, "0" * 11 + "1" + "9" * 5000]),
    "last-event-id": ([], ["", "x", "1", "9" * 5000, "0:0", "-1"]),
}


def fields_of(path: str) -> dict[str, tuple[list[Any], list[Any]]]:
    alone = {name: (good, bad) for name, (only, good, bad) in ALONE.items() if only == path}
    return {**FIELDS, **alone}


@st.composite
def valid_bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    fields = {name: good for name, (good, _) in fields_of(path).items() if good}
    names = draw(st.sets(st.sampled_from(sorted(fields)), max_size=6)) | {
        "prompt" if path == COMPLETIONS else "messages"
    }
    body = {name: draw(st.sampled_from(fields[name])) for name in sorted(names)}
    if body.get("stream"):
        body.pop("echo", None)
        body.pop("prompt_logprobs", None)
    # A chat's prompt is long.
    return {"max_tokens": 5, **body}


PATHS = st.sampled_from([COMPLETIONS, CHAT])


def assert_is_error(exchange: Exchange) -> None:
    assert set(exchange.error) == {"message", "type", "param", "code"}
    assert len(exchange.error["message"]) < 20_000


@fuzzed
@given(data=st.data())
def test_good_bodies_are_served_and_one_wrong_field_is_named(run: Run, data: st.DataObject) -> None:
    path = data.draw(PATHS)
    body = data.draw(valid_bodies(path))
    headers = {
        name: data.draw(st.sampled_from(HEADERS[name][0]))
        for name in data.draw(st.sets(st.sampled_from(["x-request-id"])))
    }
    can_be_wrong = [name for name, (_, bad) in sorted(fields_of(path).items()) if bad]
    spoilt = data.draw(st.sampled_from([None, *can_be_wrong, *HEADERS]))
    if spoilt in HEADERS:
        headers[spoilt] = data.draw(st.sampled_from(HEADERS[spoilt][1]))
    elif spoilt is not None:
        body[spoilt] = data.draw(st.sampled_from(fields_of(path)[spoilt][1]))
    if spoilt in ("prompt", "messages"):
        body.pop("truncate_prompt_tokens", None)  # it would make a prompt valid that is too long
    exchange = run(lambda cluster: post(cluster, path, json.dumps(body).encode(), headers))
    event(str(exchange.status))
    if spoilt is None:
        assert exchange.status == 200, exchange.body
        if body.get("stream"):
            assert exchange.events[-1].is_done
            assert not any("error" in one.json for one in exchange.events[:-1])
        else:
            assert len(exchange.json["choices"]) == (body.get("n") or 1)
        return
    assert_is_error(exchange)
    if comes_back(spoilt, body, headers):
        assert (exchange.status, exchange.error["code"]) == (404, "not_found")
        return
    assert exchange.status == (404 if spoilt == "model" and isinstance(body["model"], str) else 400), exchange.body
    named = str(exchange.error["param"])
    related = {
        "last-event-id": {"x-request-id", "stream"},
        "n": {"best_of"},
        "structured_outputs": {"ignore_eos", "min_tokens"},
        "suffix": {"prompt", "prompt_embeds", "echo", "truncate_prompt_tokens"},
    }.get(spoilt, set())
    assert named.partition(".")[0].partition("[")[0] in {spoilt, *related}, (spoilt, exchange.error)


def test_a_call_for_embeddings_is_served_or_its_one_wrong_field_named(run: Run) -> None:
    def ask(body: Mapping[str, Any]) -> Exchange:
        exchange = run(lambda cluster: post(cluster, EMBEDDINGS, json.dumps(body).encode(), {}))
        assert isinstance(exchange, Exchange)
        return exchange

    for name, (good, bad) in OF_EMBEDDINGS.items():
        for value in good:
            body = {"input": [5, 6], name: value}
            exchange = ask(body)
            assert exchange.status == 200, (body, exchange.body)
            for one, prompt in zip(exchange.json["data"], prompts_of(body["input"]), strict=True):
                assert struct.pack(f"<{len(one['embedding'])}f", *one["embedding"]) == expected_embedding(prompt, SPEC)
        for value in bad:
            exchange = ask({"input": "ab", name: value})
            assert_is_error(exchange)
            assert exchange.status == (404 if name == "model" and isinstance(value, str) else 400), (name, value)
            assert str(exchange.error["param"]).partition("[")[0] == name, exchange.error


def prompts_of(inputs: Any) -> list[list[int]]:
    """The token ids of the value that was sent as `input`."""
    is_one = isinstance(inputs, str) or isinstance(inputs[0], int)
    return [LetterTokenizer().encode(one) if isinstance(one, str) else one for one in ([inputs] if is_one else inputs)]


def comes_back(spoilt: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Whether the only error is that the stream to continue is unknown."""
    is_position = spoilt == "last-event-id" and headers[spoilt] == "1"
    return is_position and "x-request-id" in headers and bool(body.get("stream")) and body.get("n", 1) == 1


@fuzzed
@given(data=st.data(), leaves=st.sampled_from([False, False, False, True]))
def test_every_body_gets_an_answer(run: Run, data: st.DataObject, leaves: bool) -> None:
    path = data.draw(PATHS)
    valid = valid_bodies(path)
    body = data.draw(mutations(valid) | wild_bodies(valid, fields_of(path)) | st.binary(max_size=40))
    headers = {
        name: data.draw(st.text(st.characters(max_codepoint=255), max_size=20))
        for name in data.draw(st.sets(st.sampled_from(sorted(HEADERS)), max_size=1))
    }
    exchange = run(lambda cluster: post(cluster, path, body, headers, leaves))
    event(str(exchange.status))
    if leaves:
        return
    assert exchange.status in (200, 400, 404, 409, 503, 504), exchange.body
    if exchange.status != 200:
        assert_is_error(exchange)
    if exchange.status in (503, 504):
        assert b"slo" in body or "x-request-timeout-ms" in headers, exchange.body
