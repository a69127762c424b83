"""Checks how a request is sampled: numbers, lengths, stops, beams and constraints. Errors name the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from random import Random
from typing import Any

from baton.engine.sequences.beams import MAX_BEAMS, MIN_BEAMS
from baton.errors import ContextLengthExceeded, InvalidRequest
from baton.messages.generation import GenerateRequest, ModelCard
from baton.messages.request_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_GRAMMAR_SEQUENCES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_OUTPUT_VALUES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from baton.messages.sampling import (
    CONSTRAINT_KINDS,
    MAX_PATTERN_SIZE,
    MAX_REPETITIONS,
    NUMBER_RANGES,
    RepetitionDetection,
    SamplingDefaults,
    SamplingParams,
)
from baton.text.constraints.json_schemas import MAX_SCHEMA_BYTES, without_extra_keys
from router.admission.checks import check_integer, check_name, check_token_ids

DEFAULT_MAX_TOKENS = 16
_WITH_BEAMS = frozenset(
    ("n", "beam_width", "length_penalty", "early_stopping", "seed", "max_tokens", "stop_token_ids", "ignore_eos")
)
_NO_DEFAULTS = SamplingDefaults()
_NOT_WITH_BEAMS = (
    "best_of",
    "stop",
    "bad_words",
    *(one.name for one in fields(SamplingParams) if one.name not in _WITH_BEAMS | {"bad_words_token_ids"}),
)
_HARMLESS_WITH_BEAMS = {"temperature": 0.0, "speculation": False}
"""Values that say what a beam search does anyway: it draws nothing, and nothing is drafted for it."""
_SEED_BITS = 53
"""The bits of a drawn seed: few enough for every JSON reader to keep them exactly."""


def longest_answer(card: ModelCard, num_prompt_tokens: int, num_sequences: int = 1, logprobs: int | None = None) -> int:
    """The `max_tokens` of a chat that sets none: as many as the model takes and `check_output_size` permits.

    That of other prompts is 16.
    """
    left = (
        card.max_model_len - num_prompt_tokens
        if card.source is None
        else card.source.num_left(num_prompt_tokens, card.max_model_len)
    )
    return max(1, min(left, MAX_OUTPUT_VALUES // (max(1, num_sequences) * _values_each(logprobs))))


def check_output_size(num_sequences: int, max_tokens: int, logprobs: int | None) -> None:
    """Raises InvalidRequest for `max_tokens` if so many sequences of that length exceed MAX_OUTPUT_VALUES.

    A router may have to keep a whole answer until its client has read it, or comes back for it.
    """
    most = max(1, MAX_OUTPUT_VALUES // (num_sequences * _values_each(logprobs)))
    if max_tokens > most:
        kind = f"{num_sequences} outputs" + ("" if logprobs is None else f" with {logprobs} logprobs")
        raise InvalidRequest("max_tokens", f"is {max_tokens}; at most {most} are generated for each of {kind}")


def check_prompt_logprobs(num_prompt_tokens: int, prompt_logprobs: int | None, most: int) -> None:
    """Raises InvalidRequest if the log-probabilities of so many tokens of prompts come to more than `most` values."""
    if prompt_logprobs is None:
        return
    values = num_prompt_tokens * _values_each(prompt_logprobs)
    if values > most:
        kind = f"{num_prompt_tokens} tokens of prompts with {prompt_logprobs} alternatives each"
        raise InvalidRequest("prompt_logprobs", f"of {kind} are {values} values; at most {most} are returned")


def _values_each(logprobs: int | None) -> int:
    """What one token counts towards MAX_OUTPUT_VALUES."""
    return 1 if logprobs is None else 2 + max(0, logprobs)


def checked_stop(stop: Sequence[str], has_text: bool) -> tuple[str, ...]:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"has {len(stop)} strings; at most {MAX_STOP_STRINGS} are taken")
    for text in stop:
        if not text:
            raise InvalidRequest("stop", "contains an empty string")
        check_name("stop", text, MAX_STOP_BYTES)
    if stop and not has_text:
        raise InvalidRequest("stop", "this model is served without a tokenizer; use stop_token_ids")
    return tuple(stop)


def sampling_params(
    raw: GenerateRequest, card: ModelCard, rng: Random, encode_part: Callable[[str], list[int]] | None
) -> SamplingParams:
    """The parameters, without lengths, beams and constraint, with the model's own values where the request sets none.

    A beam search samples nothing, and takes none of them.
    """
    defaults = card.defaults if raw.beam_width is None else _NO_DEFAULTS
    if len(raw.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"has {len(raw.stop_token_ids)}; at most {MAX_STOP_TOKEN_IDS}")
    check_token_ids("stop_token_ids", raw.stop_token_ids, card.vocab_size)
    return SamplingParams(
        **_numbers(raw, defaults),
        top_k=_top_k(raw.top_k, defaults.top_k, card.vocab_size),
        seed=_seed(raw.seed, rng),
        logit_bias=_logit_bias(raw, card.vocab_size),
        allowed_token_ids=_allowed_token_ids(raw.allowed_token_ids, card.vocab_size),
        logprobs=_num_logprobs("logprobs", raw.logprobs),
        prompt_logprobs=_num_logprobs("prompt_logprobs", raw.prompt_logprobs),
        stop_token_ids=frozenset(raw.stop_token_ids),
        ignore_eos=bool(raw.ignore_eos),
        repetition_detection=_repetition(raw.repetition_detection),
        speculation=raw.speculation is not False,
        bad_words_token_ids=_bad_words(raw.bad_words, card, encode_part),
    )


def _num_logprobs(field: str, value: int | None) -> int | None:
    return None if value is None else check_integer(field, value, 0, MAX_LOGPROBS)


def _repetition(rule: RepetitionDetection | None) -> RepetitionDetection | None:
    if rule is None or rule.is_sound:
        return rule
    bounds = f"1 <= min_pattern_size <= max_pattern_size <= {MAX_PATTERN_SIZE} and 2 <= min_count <= {MAX_REPETITIONS}"
    raise InvalidRequest(
        "repetition_detection",
        f"must have {bounds}, not {rule.min_pattern_size}, {rule.max_pattern_size} and {rule.min_count}",
    )


def with_lengths(sampling: SamplingParams, raw: GenerateRequest, left: int, length: int) -> SamplingParams:
    """The lengths, checked. `left`: how many tokens the model's `length` leaves after the prompt, at least 1."""
    max_tokens = raw.max_tokens
    if max_tokens is None:
        max_tokens = min(DEFAULT_MAX_TOKENS, left)
    elif max_tokens < 1:
        raise InvalidRequest("max_tokens", f"must be at least 1, not {max_tokens}")
    elif max_tokens > left:
        reason = f"is {max_tokens}, but the prompt leaves {left}"
        asked = length - left + max_tokens
        raise ContextLengthExceeded("max_tokens", reason, asked, length, num_output_tokens=max_tokens)
    min_tokens = 0 if raw.min_tokens is None else raw.min_tokens
    if not 0 <= min_tokens <= max_tokens:
        raise InvalidRequest("min_tokens", f"must be 0 to max_tokens ({max_tokens}), not {min_tokens}")
    return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def with_beams(sampling: SamplingParams, raw: GenerateRequest, n: int) -> SamplingParams:
    if raw.beam_width is None:
        for field in ("length_penalty", "early_stopping"):
            if getattr(raw, field) is not None:
                raise InvalidRequest(field, "needs beam_width")
        return sampling
    width = check_integer("beam_width", raw.beam_width, MIN_BEAMS, MAX_BEAMS)
    check_integer("n", n, 1, width)
    for field in _NOT_WITH_BEAMS:
        value = getattr(raw, field)
        if value not in (None, (), [], {}) and value != _HARMLESS_WITH_BEAMS.get(field):
            clients_field = raw.constraint_field if field in CONSTRAINT_KINDS else ""
            raise InvalidRequest(clients_field or field, "does not go with beam_width")
    return replace(
        sampling,
        temperature=0.0,
        beam_width=width,
        early_stopping=bool(raw.early_stopping),
    )


def with_constraint(
    sampling: SamplingParams, raw: GenerateRequest, card: ModelCard, *, has_text: bool
) -> SamplingParams:
    given = [kind for kind in CONSTRAINT_KINDS if getattr(raw, kind)]
    if not given:
        return sampling
    kind, *more = given
    field = raw.constraint_field or kind
    if more:
        raise InvalidRequest(more[0], f"does not go with {field}: one of them says what is wanted")
    if not has_text:
        raise InvalidRequest(field, "this model is served without a tokenizer")
    if not card.has_end:
        raise InvalidRequest(field, f"{card.name} has no end-of-sequence token, so its answers don't end")
    if sampling.n > MAX_GRAMMAR_SEQUENCES:
        raise InvalidRequest("n", f"must be at most {MAX_GRAMMAR_SEQUENCES} with {field}, not {sampling.n}")
    # Where the constraint allows only the end, these parameters would forbid it.
    for option in ("ignore_eos", "min_tokens"):
        if getattr(sampling, option):
            raise InvalidRequest(option, f"does not go with {field}")
    match kind:
        case "json_schema":
            return replace(sampling, json_schema=_schema(field, raw.json_schema or "", card))
        case "choice":
            return replace(sampling, choice=_choice(field, raw.choice))
        case "regex":
            return replace(sampling, regex=_checked_pattern(field, raw.regex))
        case "grammar":
            return replace(sampling, grammar=_checked_pattern(field, raw.grammar))


def _checked_pattern(field: str, text: str | None) -> str:
    check_name(field, text or "", MAX_SCHEMA_BYTES)
    return text or ""


def _schema(field: str, json_schema: str, card: ModelCard) -> str:
    check_name(field, json_schema, MAX_SCHEMA_BYTES)
    if card.permits_extra_keys:
        return json_schema
    json_schema = without_extra_keys(json_schema)
    check_name(field, json_schema, MAX_SCHEMA_BYTES)
    return json_schema


def _choice(field: str, texts: Sequence[str]) -> tuple[str, ...]:
    """The texts of a choice, without duplicates."""
    if len(texts) > MAX_CHOICES:
        raise InvalidRequest(field, f"has {len(texts)} texts; at most {MAX_CHOICES} are taken")
    check_name(field, "".join(texts), MAX_SCHEMA_BYTES)
    if "" in texts:
        raise InvalidRequest(field, "contains an empty text")
    return tuple(dict.fromkeys(texts))


def _numbers(raw: GenerateRequest, defaults: SamplingDefaults) -> dict[str, Any]:
    """The parameters of the request for which only their range is checked."""
    given: dict[str, Any] = {}
    for name, allowed in NUMBER_RANGES.items():
        value: float | None = getattr(raw, name)
        if value is None:
            value = getattr(defaults, name, None)
        if value is not None:
            if value not in allowed:
                raise InvalidRequest(name, f"must be in {allowed}, not {value}")
            given[name] = float(value)
    return given


def _top_k(top_k: int | None, default: int | None, vocab_size: int) -> int:
    if top_k is None and default is not None:
        top_k = min(default, vocab_size)
    # 0 is what other servers' clients send for all.
    if top_k in (None, -1, 0):
        return -1
    if not 1 <= top_k <= vocab_size:
        raise InvalidRequest("top_k", f"must be -1 or 0 for all, or 1 to {vocab_size}, not {top_k}")
    return top_k


def _seed(seed: int | None, rng: Random) -> int:
    if seed is None:
        return rng.getrandbits(_SEED_BITS)
    return check_integer("seed", seed, 0, 2**64 - 1)


def _logit_bias(raw: GenerateRequest, vocab_size: int) -> dict[int, float]:
    if len(raw.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest("logit_bias", f"has {len(raw.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are taken")
    check_token_ids("logit_bias", list(raw.logit_bias), vocab_size)
    for token, bias in raw.logit_bias.items():
        if not math.isfinite(bias):
            raise InvalidRequest("logit_bias", f"of token {token} is {bias}")
    return dict(raw.logit_bias)


def _allowed_token_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if len(token_ids) > MAX_ALLOWED_TOKEN_IDS:
        raise InvalidRequest("allowed_token_ids", f"has {len(token_ids)}; at most {MAX_ALLOWED_TOKEN_IDS} are taken")
    check_token_ids("allowed_token_ids", token_ids, vocab_size)
    return tuple(dict.fromkeys(token_ids))


def _bad_words(
    words: Sequence[str], card: ModelCard, encode: Callable[[str], list[int]] | None
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, spelled at the beginning of a text and behind a space.

    Unlike vLLM it also keeps a spelling behind a space that has another number of tokens.
    """
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest("bad_words", f"has {len(words)} texts; at most {MAX_BAD_WORDS} are taken")
    check_name("bad_words", "".join(words), MAX_BAD_WORD_BYTES)
    if not all(word.strip() for word in words):
        raise InvalidRequest("bad_words", "contains an empty text")
    if not words:
        return ()
    if encode is None:
        raise InvalidRequest("bad_words", "this model is served without a tokenizer; use logit_bias")
    spellings = [tuple(encode(before + word.lstrip())) for word in words for before in ("", " ")]
    # A token beyond the model's vocabulary is never sampled.
    return tuple(dict.fromkeys(spelling for spelling in spellings if spelling and max(spelling) < card.vocab_size))
