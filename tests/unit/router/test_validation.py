"""The bounds of every field, and the defaults of fields that are not set."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.errors import InvalidRequest, UnknownModel
from baton.messages.generation import GenerateRequest, ModelCard
from baton.messages.node_model import Capability
from baton.messages.pooling import Pooling, PoolingParams, PoolingRequest
from baton.messages.sampling import Constraint, RepetitionDetection, SamplingDefaults, SamplingParams
from baton.model_formats.encoder_decoders import EncoderDecoder
from baton.text.detokenizer import TextCodec
from router.admission.request import ValidRequest
from router.admission.sampling import longest_answer
from router.admission.validation import validate
from tests.doubles.fake_tokenizer import FakeTokenizer

CARD = ModelCard("demo", max_model_len=32, vocab_size=100)


class Codec(FakeTokenizer):
    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 100 for letter in text.strip("-")]


CODEC = Codec()


def check(prompt: Any = (1, 2, 3), **fields: Any) -> ValidRequest:
    return check_for(CARD, CODEC, prompt, **fields)


def check_for(card: ModelCard, by: TextCodec | None = CODEC, /, prompt: Any = (1, 2, 3), **fields: Any) -> ValidRequest:
    """`by`: what tokenizes texts."""
    return validate(GenerateRequest(prompt, **fields), card, by, Random(3))


def test_fields_that_are_not_set_have_their_defaults() -> None:
    valid = check()
    sampling = valid.sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, -1, 0.0)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (16, 0, None)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert valid.model == "demo"
    assert valid.request_id.startswith("req-")
    assert 0 < sampling.seed < 2**53
    assert check() == valid, "chance comes from the rng alone"


def test_the_default_length_is_reduced_to_the_remaining_context() -> None:
    assert check(tuple(range(30))).sampling_params.max_tokens == 2
    assert check(tuple(range(31))).sampling_params.max_tokens == 1


@pytest.mark.parametrize(
    ("source", "served", "prompt", "left"),
    [
        # A text of 65 tokens takes 128 positions, and the decoder begins with 2 tokens.
        (EncoderDecoder("text", 100, 100, (2, 0)), 228, 65, 98),
        (EncoderDecoder("text", 100, 100, (2, 0)), 150, 65, 20),
        (EncoderDecoder("text", 100, 100, (2, 0)), 130, 65, 0),
        (EncoderDecoder("text", 100, 100, (2, 0)), 70, 65, 0),
        # Speech takes 64 positions, and the prompt is the decoder's.
        (EncoderDecoder("speech", 50, 100, (2,)), 164, 3, 97),
        (EncoderDecoder("speech", 50, 100, (2,)), 164, 0, 99),
        (EncoderDecoder("speech", 50, 100, (2,)), 80, 3, 13),
        (EncoderDecoder("speech", 50, 100, (2,)), 64, 3, 0),
    ],
)
def test_what_a_decoder_can_have_is_bounded_by_its_tokens_and_the_served_length(
    source: EncoderDecoder, served: int, prompt: int, left: int
) -> None:
    card = replace(CARD, max_model_len=served, source=source)
    audio = b"12" if source.source == "speech" else b""

    def checked(max_tokens: int) -> int:
        return check_for(card, prompt=[5] * prompt, max_tokens=max_tokens, audio=audio).sampling_params.max_tokens

    assert longest_answer(card, prompt) == max(1, left)
    if left:
        assert checked(left) == left
        with pytest.raises(InvalidRequest, match=f"max_tokens: is {left + 1}, but the prompt leaves {left}"):
            checked(left + 1)
        longest = source.longest_prompt(left, served)
        assert source.num_left(longest, served) >= left
        assert longest == source.most_rows or source.num_left(longest + 1, served) < left
    else:
        with pytest.raises(InvalidRequest, match=rf"prompt: takes \d+ positions .* leaves none of the {served}"):
            checked(1)


def test_every_value_at_its_bound_is_accepted() -> None:
    valid = check(
        "text",
        request_id="a" * 64,
        model="demo",
        temperature=2.0,
        top_p=1e-9,
        top_k=100,
        min_p=1.0,
        top_n_sigma=100.0,
        seed=2**64 - 1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=2.0,
        logit_bias=dict.fromkeys(range(100), -1e9),
        allowed_token_ids=[0, 99] * 2048,
        bad_words=["é" * 8] * 256,
        max_tokens=28,
        min_tokens=28,
        stop=["é" * 128] * 16,
        stop_token_ids=[0, 99],
        logprobs=20,
        prompt_logprobs=20,
        priority=-(2**31),
        cache_salt="salt",
        ttft_slo_ms=1e-3,
        tpot_slo_ms=1e9,
    )
    assert (valid.ttft_slo_ms, valid.tpot_slo_ms) == (1e-3, 1e9)
    assert valid.prompt_token_ids == (16, 1, 20, 16)
    assert valid.sampling_params.seed == 2**64 - 1
    assert valid.sampling_params.is_greedy is False
    assert check(temperature=0.0).sampling_params.is_greedy


def test_parameters_of_beam_search_are_validated() -> None:
    params = check(beam_width=8, n=3, temperature=0.0, length_penalty=-10.0, early_stopping=True).sampling_params
    assert (params.beam_width, params.n, params.length_penalty, params.early_stopping) == (8, 3, -10.0, True)
    plain = check(beam_width=2)
    assert (plain.sampling_params.length_penalty, plain.sampling_params.early_stopping) == (1.0, False)
    assert (plain.sampling_params.is_greedy, plain.num_returned) == (True, 1)


def test_a_json_schema_is_validated() -> None:
    assert check().sampling_params.json_schema == ""
    assert check(json_schema="").sampling_params.has_grammar is False
    valid = check(json_schema="{}", ignore_eos=False, min_tokens=0, n=2, stop=["}"], logit_bias={1: 1.0})
    assert (valid.sampling_params.json_schema, valid.sampling_params.has_grammar) == ("{}", True)
    endless = ModelCard("demo", 32, 100, has_end=False)
    assert check_for(endless).sampling_params.json_schema == ""
    with pytest.raises(InvalidRequest, match="json_schema: demo has no end-of-sequence token"):
        check_for(endless, json_schema="{}")


def test_keys_that_a_schema_does_not_list_are_forbidden_unless_the_operator_allows_them() -> None:
    schema = '{"properties": {"a": {}}}'
    closed = check(json_schema=schema).sampling_params.json_schema
    assert closed == '{"properties":{"a":{}},"additionalProperties":false}'
    permitting = replace(CARD, permits_extra_keys=True)
    assert check_for(permitting, json_schema=schema).sampling_params.json_schema == schema


def test_n_and_best_of_are_validated() -> None:
    assert (check().sampling_params.n, check().num_returned) == (1, 1)
    plain = check(n=8)
    assert (plain.sampling_params.n, plain.num_returned, plain.sampling_params.logprobs) == (8, 8, None)
    assert check(n=2, temperature=0.0).sampling_params.n == 2, "pointless, and allowed"
    best = check(n=2, best_of=8)
    assert (best.sampling_params.n, best.num_returned, best.wants_logprobs) == (8, 2, False)
    assert best.sampling_params.logprobs == 0, "they are compared by them"
    asked = check(n=1, best_of=2, logprobs=5)
    assert (asked.sampling_params.logprobs, asked.wants_logprobs) == (5, True)


def test_the_whole_output_of_many_sequences_is_bounded() -> None:
    card = replace(CARD, max_model_len=1 << 17)

    def checked(**fields: Any) -> SamplingParams:
        return check_for(card, prompt=[1], **fields).sampling_params

    assert checked(n=128, max_tokens=1 << 14).n == 128
    assert checked(n=128).max_tokens == 16
    for fields in (
        {"n": 128, "max_tokens": (1 << 14) + 1},
        {"n": 1, "best_of": 128, "max_tokens": (1 << 14) + 1},
        {"n": 128, "max_tokens": 1000, "logprobs": 20},
    ):
        with pytest.raises(InvalidRequest, match=r"max_tokens: is \d+; at most \d+ are generated for each of 128"):
            checked(**fields)
    for fields in ({"num_sequences": 128}, {"num_sequences": 128, "logprobs": 20}, {"num_sequences": 1}):
        longest = longest_answer(card, 1, **fields)
        params = {"n": fields["num_sequences"], "logprobs": fields.get("logprobs")}
        assert checked(max_tokens=longest, **params).max_tokens == longest, "what is chosen by itself is never refused"


def test_fewer_sequences_may_be_constrained() -> None:
    assert check(json_schema="{}", n=8).sampling_params.n == 8
    for several in ({"n": 9}, {"best_of": 9}):
        with pytest.raises(InvalidRequest, match="n: must be at most 8 with json_schema, not 9"):
            check(json_schema="{}", **several)


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({"n": 9}, "n: must be at most 8 with tool_choice, not 9"),
        ({"ignore_eos": True}, "ignore_eos: does not go with tool_choice"),
        ({"min_tokens": 1}, "min_tokens: does not go with tool_choice"),
        ({"beam_width": 2}, "tool_choice: does not go with beam_width"),
    ],
)
def test_refusals_name_the_clients_field_for_a_constraint(wrong: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{refusal}"):
        check(**{"max_tokens": 2, "grammar": 'start: "a"', "constraint_field": "tool_choice"} | wrong)


def test_other_constraints_are_validated() -> None:
    assert check(regex="a+").sampling_params.constraint == Constraint("a+", "regex")
    assert check(grammar='start: "a"').sampling_params.constraint == Constraint('start: "a"', "grammar")
    choice = check(choice=["é", "b", "é"]).sampling_params
    assert (choice.choice, choice.constraint) == (("é", "b"), Constraint('["é", "b"]', "choice"))
    assert check(regex="", choice=(), grammar="").sampling_params.constraint is None
    for kind, value in (("regex", "a+"), ("choice", ["a"]), ("grammar", 'start: "a"')):
        for wrong in ({"ignore_eos": True}, {"min_tokens": 1, "max_tokens": 2}, {"n": 9}):
            with pytest.raises(InvalidRequest, match=f"^({next(iter(wrong))}): .* {kind}"):
                check(**{kind: value}, **wrong)
        with pytest.raises(InvalidRequest, match=f"{kind}: does not go with beam_width"):
            check(**{kind: value}, beam_width=2)
        with pytest.raises(InvalidRequest, match=f"{kind}: does not go with json_schema"):
            check(**{kind: value}, json_schema="{}")
    for kind, bad in (
        ("regex", "a" * 65_537),
        ("regex", "a\0"),
        ("regex", "\ud800"),
        ("grammar", "a" * 65_537),
        ("choice", ["a" * 65_537]),
        ("choice", ["a", ""]),
        ("choice", ["a\0"]),
        ("choice", ["a"] * 10_001),
    ):
        with pytest.raises(InvalidRequest, match=f"^{kind}: "):
            check(**{kind: bad})


def test_the_output_of_a_model_can_be_sent_as_a_prompt() -> None:
    """A byte-level vocabulary has a token for NUL, which a model may sample."""
    assert len(check(prompt="a\0b").prompt_token_ids) == 3


NAN, INF = float("nan"), float("inf")
BAD: list[tuple[str, dict[str, Any]]] = [
    *[("prompt", {"prompt": p}) for p in (None, "", (), [], "--", "\ud800", [100], [-1], [1.5], [True])],
    ("prompt", {"prompt": tuple(range(32))}),
    ("prompt", {"prompt": "x" * 32}),
    ("prompt", {"prompt": "x" * (1 << 20) + "y"}),
    *[("request_id", {"request_id": i}) for i in ("a" * 65, "a b", "ä", "a#1", "a\n")],
    *[("temperature", {"temperature": t}) for t in (NAN, INF, -INF, -0.1, 2.1)],
    *[("top_p", {"top_p": p}) for p in (NAN, 0.0, -1.0, 1.01)],
    *[("top_k", {"top_k": k}) for k in (-2, 101)],
    *[("min_p", {"min_p": p}) for p in (NAN, -0.1, 1.1)],
    *[("top_n_sigma", {"top_n_sigma": n}) for n in (NAN, -0.1, 100.1)],
    *[("seed", {"seed": s}) for s in (-1, 2**64)],
    *[(f"{name}_penalty", {f"{name}_penalty": p}) for name in ("presence", "frequency") for p in (NAN, -2.1, 2.1)],
    *[("repetition_penalty", {"repetition_penalty": p}) for p in (NAN, 0.0, 2.1)],
    *[("max_tokens", {"max_tokens": n}) for n in (0, -1, 30, 2**31)],
    *[("min_tokens", {"min_tokens": n}) for n in (-1, 17)],
    *[("logprobs", {"logprobs": n}) for n in (-1, 21)],
    *[("n", {"n": n}) for n in (-1, 0, 129, 2**31)],
    *[("beam_width", {"beam_width": n}) for n in (-1, 0, 1, 9)],
    ("n", {"beam_width": 3, "n": 4}),
    *[("length_penalty", {"beam_width": 3, "length_penalty": p}) for p in (NAN, INF, -11.0, 10.1)],
    ("length_penalty", {"length_penalty": 1.0}),
    *[
        ("repetition_detection", {"repetition_detection": RepetitionDetection(*rule)})
        for rule in ((0, 1, 2), (65, 1, 2), (3, 4, 2), (3, 1, 1), (3, 1, 1025))
    ],
    ("repetition_detection", {"beam_width": 3, "repetition_detection": RepetitionDetection(3)}),
    ("early_stopping", {"early_stopping": True}),
    *[
        (field, {"beam_width": 3, field: value})
        for field, value in {
            "best_of": 1,
            "temperature": 0.5,
            "top_p": 0.5,
            "top_k": 1,
            "min_p": 0.1,
            "top_n_sigma": 1.0,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {1: 1.0},
            "allowed_token_ids": [1],
            "bad_words": ["x"],
            "prompt_logprobs": 0,
            "min_tokens": 1,
            "stop": ["x"],
            "logprobs": 0,
            "json_schema": "{}",
        }.items()
    ],
    *[("best_of", {"n": 3, "best_of": n}) for n in (-1, 0, 2, 129)],
    *[("stop", {"stop": s}) for s in (["x"] * 17, [""], ["x" * 257], ["é" * 129], ["\0"], ["\udfff"])],
    *[("stop_token_ids", {"stop_token_ids": s}) for s in ([100], [-1], [0] * 257)],
    *[("logit_bias", {"logit_bias": b}) for b in ({100: 1.0}, {1: NAN}, {1: -INF})],
    *[("allowed_token_ids", {"allowed_token_ids": a}) for a in ([100], [-1], [0] * 4097)],
    *[("bad_words", {"bad_words": w}) for w in (["x"] * 257, [""], [" "], ["x" * 4097], ["\0"], ["\udfff"])],
    *[("cache_salt", {"cache_salt": s}) for s in ("\0", "x" * 257)],
    *[(slo, {slo: ms}) for slo in ("ttft_slo_ms", "tpot_slo_ms") for ms in (NAN, INF, 0.0, -1.0)],
    *[("json_schema", {"json_schema": s}) for s in ("\0", "\ud800", "x" * (64 * 1024 + 1))],
    ("ignore_eos", {"json_schema": "{}", "ignore_eos": True}),
    ("min_tokens", {"json_schema": "{}", "min_tokens": 1}),
    *[("model", {"model": m}) for m in ("other", "Demo", "x" * 10_000)],
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=[f"{n}-{f}" for n, (f, _) in enumerate(BAD)])
def test_a_value_out_of_bounds_is_refused_with_its_field(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**fields)
    assert caught.value.field == field
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, UnknownModel) == (field == "model")


def test_bad_words_are_tokenized_with_and_without_a_space_and_without_special_tokens() -> None:
    class Words(FakeTokenizer):
        def encode_rendered(self, text: str) -> list[int]:
            return [{" ": 1, "a": 2, "b": 3}.get(letter, 100) for letter in text]

    request = GenerateRequest([1], bad_words=["ab", " ab", "b", "outside"])
    valid = validate(request, CARD, Words(), Random(1))
    assert valid.sampling_params.bad_words_token_ids == ((2, 3), (1, 2, 3), (3,), (1, 3))


def test_log_probabilities_of_a_prompt_are_bounded() -> None:
    card = ModelCard("demo", 2**20, 100)
    for count, length in ((0, 2**17), (2, 2**16)):
        prompt = [1] * length
        assert check_for(card, prompt=prompt, prompt_logprobs=count).num_prompt_tokens
        with pytest.raises(InvalidRequest, match=f"prompt_logprobs: of {length + 1} tokens .* at most 262144 are"):
            check_for(card, prompt=[*prompt, 1], prompt_logprobs=count)


def test_too_many_logit_biases_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias: has 301 entries"):
        check_for(ModelCard("demo", 32, 1000), logit_bias=dict.fromkeys(range(301), 0.0))


def test_without_a_tokenizer_only_token_ids_are_accepted() -> None:
    assert check_for(CARD, None, [1]).prompt_token_ids == (1,)
    texts: dict[str, Any] = {"prompt": "text", "stop": ["x"], "bad_words": ["x"], "json_schema": "{}"}
    for field, value in texts.items():
        with pytest.raises(InvalidRequest, match=f"{field}: this model is served without a tokenizer"):
            check_for(CARD, None, **{field: value})


def test_the_models_own_values_fill_in_what_a_request_leaves_unset() -> None:
    own = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)
    card = replace(CARD, defaults=own)
    filled = check_for(card).sampling_params
    assert (filled.temperature, filled.top_p, filled.top_k) == (0.6, 0.9, 40)
    assert (filled.min_p, filled.repetition_penalty) == (0.05, 1.1)
    said: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    explicit = check_for(card, **said).sampling_params
    assert (explicit.temperature, explicit.top_p, explicit.top_k) == (0.0, 1.0, -1)
    assert (explicit.min_p, explicit.repetition_penalty) == (0.0, 1.0)
    assert check_for(replace(card, vocab_size=30)).sampling_params.top_k == 30
    beams = check_for(card, beam_width=2).sampling_params
    assert (beams.temperature, beams.repetition_penalty) == (0.0, 1.0), "a beam search samples nothing"


def test_a_transcript_to_align_lies_behind_its_recording() -> None:
    source = EncoderDecoder("speech", 50, 100, (2,))
    can = frozenset((Capability.TRANSCRIBE, Capability.ALIGN))
    card = replace(CARD, source=source, max_model_len=164, vocab_size=200, capabilities=can)
    align = PoolingRequest(Pooling.ALIGN, second_start=2, num_rows=20)

    def read(card: ModelCard, num_tokens: int) -> ValidRequest:
        return check_for(card, None, [9] * num_tokens, audio=bytes(64), pooling=align)

    found = read(card, 100)
    assert found.prompt_token_ids == (0,) * 64 + (9,) * 100
    assert found.pooling == PoolingParams(Pooling.ALIGN, second_start=66, num_rows=20)
    assert found.needs == can
    for less, num_tokens, reason in (
        (card, 101, "101 tokens"),
        (replace(card, max_model_len=150), 100, "164 positions"),
        (replace(card, source=None), 100, "can't do align"),
        (replace(card, capabilities=can - {Capability.ALIGN}), 100, "can't do align"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            read(less, num_tokens)
