"""Calls that make vectors of several inputs: their texts become tokens at once, and each is a request to the core.

A score is of a pair of texts: by a classifier with one label, or by the cosine of the embeddings of both.

Rules:

1. All inputs are checked before the first is sent; a refusal names the field of the input.
2. The first error ends the other inputs, and so does the end of the call.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from baton.background import gather_all
from baton.errors import BatonError, InvalidRequest
from baton.messages.generation import Finished, GenerateRequest, ModelCard
from baton.messages.pooling import Pooling, PoolingRequest
from baton.messages.request_limits import MAX_INPUTS, MAX_POOLED_TOKENS, MAX_PROMPT_BYTES, MAX_VECTOR_NUMBERS
from baton.text.detokenizer import TextCodec
from router.admission.checks import check_dimensions, check_model, check_pooling, check_text, too_long
from router.handler import Handler

_LEAST_AT_ONCE, _MOST_AT_ONCE, _TOKENS_AT_ONCE = 32, 128, 4096
"""How many inputs of one call are sent to the core at once: so many that nodes have the tokens of a step, within these
bounds. The others wait here, and not in the queue of all clients."""
_SMALL_CHARS = 16 << 10
"""Texts that are together no longer than this are tokenized on the event loop."""
_INPUT_CHARS = 64
"""What an input counts beside its text: that of a thousand short ones takes as long as a long text."""
_TURN_CHARS = 1 << 20
"""The most characters that are tokenized in one turn of a thread, beside the text that exceeds them; other callers get
turns between."""
_FEW_VECTORS = 512
"""So many vectors may have any number of numbers."""
_LONGEST_PREFIX = 60
"""The most letters of a call's id in front of the numbers of its parts, whose ids have 64 at most."""
SMALL_VECTORS = 16 << 10
"""Vectors that are together no longer than so many bytes are computed with and written on the event loop."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One input of a call, unchecked."""

    first: str | Sequence[int]
    """A text, or its token ids."""
    second: str | None = None
    """The second text of a pair; None: the input is no pair."""
    field: str = "input"
    """The client's field, for refusals."""
    second_field: str = ""
    """The client's field of the second text, which is also blamed if both together are too long; empty: `field`."""
    most_tokens: int | None = None
    """The last text is cut to its first tokens, at most so many; None: it is not."""


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """A client's call for the vectors of several inputs, unchecked."""

    inputs: Sequence[PoolingInput]
    pooling: PoolingRequest
    request_id: str
    model: str = ""
    priority: int = 0
    cache_salt: str = ""
    traceparent: str = ""
    truncate: int | None = None
    """The most tokens of an input, special ones included; -1: as many as the model takes; None: longer inputs are
    refused. The first tokens of an encoder's input stay, and the last ones of others."""
    most_inputs: int = MAX_INPUTS
    """The most inputs that are taken: scores by cosine have two for each pair."""
    most_second_tokens: int | None = None
    """The most tokens of a pair's second text, which is cut behind them; None: no text is cut. For scores."""


@dataclass(frozen=True, slots=True)
class PooledInput:
    """The tokens of an input."""

    token_ids: Sequence[int]
    second_start: int = 0
    """Where the second text of a pair begins; 0: there is none, or its tokens are of no type of their own."""


async def pool_all(
    call: PoolingCall,
    handler: Handler,
    vocabulary: TextCodec | None,
    card: ModelCard,
    timeout_s: float | None,
) -> list[Finished]:
    """The end of the request for each input, with its vector. Raises InvalidRequest, and what the core raises."""
    check_call(call, card)
    _check_numbers(call, card, handler.embedding_size())
    tokenized = await _tokenized(call, handler, vocabulary, card)
    longest = max(len(item.token_ids) for item in tokenized)
    at_once = min(_MOST_AT_ONCE, max(_LEAST_AT_ONCE, _TOKENS_AT_ONCE // longest))
    room = asyncio.Semaphore(min(at_once, handler.most_at_once() or at_once))
    loop = asyncio.get_running_loop()
    due = None if timeout_s is None else loop.time() + timeout_s

    async def embed(index: int, name: str) -> Finished:
        item = tokenized[index]
        request = GenerateRequest(
            prompt=item.token_ids,
            request_id=name,
            model=call.model,
            priority=call.priority,
            cache_salt=call.cache_salt,
            traceparent=call.traceparent,
            is_further_part=index > 0,
            pooling=replace(call.pooling, second_start=item.second_start) if item.second_start else call.pooling,
        )
        async with room:
            left_s = None if due is None else max(0.0, due - loop.time())
            try:
                finished = await _vector(handler, request, left_s)
            except InvalidRequest as error:
                if error.field != "prompt":
                    raise
                blamed = call.inputs[index]
                raise error.renamed(blamed.second_field or blamed.field) from error
        if call.pooling.kind is not Pooling.CLASSIFY:
            # Before a node had reported its size it was not known whether the vector can be cut. Now one has.
            size = handler.embedding_size() or len(finished.embedding) // 4
            check_dimensions(call.pooling.dimensions, card, size)
            _check_numbers(call, card, size)
        return finished

    return await gather_all([embed(*part) for part in enumerate(part_ids(call.request_id, len(call.inputs)))])


def check_call(call: PoolingCall, card: ModelCard) -> None:
    """Raises InvalidRequest for a call that asks this model for what it can't make."""
    check_model(call.model, card)
    check_pooling(call.pooling, card)
    if len(call.inputs) > call.most_inputs:
        count = f"has {len(call.inputs)} inputs; at most {call.most_inputs} are taken"
        raise InvalidRequest(call.inputs[0].field, count)


async def _vector(handler: Handler, request: GenerateRequest, timeout_s: float | None) -> Finished:
    async with aclosing(handler.generate(request, timeout_s)) as events:
        async for event in events:
            if isinstance(event, Finished) and event.embedding:
                return event
    raise BatonError("a request for a vector ended without one")


def part_ids(request_id: str, count: int) -> Sequence[str]:
    """The ids of the requests to the core that one call makes."""
    if count == 1:
        return [request_id]
    if len(request_id) > _LONGEST_PREFIX:
        # Cut alone, two long ids with the same beginning would have the same parts.
        digest = hashlib.sha256(request_id.encode()).hexdigest()[:16]
        request_id = f"{request_id[: _LONGEST_PREFIX - 17]}.{digest}"
    return [f"{request_id}-{index}" for index in range(count)]


def _check_numbers(call: PoolingCall, card: ModelCard, size: int) -> None:
    """Raises InvalidRequest for a call whose vectors have too many numbers. `size`: of an embedding; 0: not known."""
    of_each = len(card.pooling.labels) if call.pooling.kind is Pooling.CLASSIFY else call.pooling.dimensions or size
    count = len(call.inputs)
    if count > _FEW_VECTORS and count * of_each > MAX_VECTOR_NUMBERS:
        most = max(_FEW_VECTORS, MAX_VECTOR_NUMBERS // of_each)
        reason = f"has {count} inputs with {of_each} numbers each; at most {most} such inputs are taken at once"
        raise InvalidRequest(call.inputs[0].field.partition("[")[0], reason)


async def _tokenized(
    call: PoolingCall, handler: Handler, vocabulary: TextCodec | None, card: ModelCard
) -> Sequence[PooledInput]:
    """The tokens of all inputs, on the event loop if they are few; raises InvalidRequest."""
    num_chars = sum(len(item.first) + len(item.second or "") for item in call.inputs if isinstance(item.first, str))
    arguments = call.inputs, vocabulary, card, call.truncate
    if num_chars + _INPUT_CHARS * len(call.inputs) <= _SMALL_CHARS:
        texts = distinct_texts(call.inputs, vocabulary)
        return tokenize(*arguments, encoded(texts, vocabulary))
    ids_of: dict[str, Sequence[int]] = {}
    for texts in _turns(await handler.in_thread(distinct_texts, call.inputs, vocabulary)):
        ids_of |= await handler.in_thread(encoded, texts, vocabulary)
    return await handler.in_thread(tokenize, *arguments, ids_of)


def _turns(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts, divided into what is tokenized at once."""
    turn: list[str] = []
    num_chars = 0
    for text in texts:
        turn.append(text)
        num_chars += len(text)
        if num_chars >= _TURN_CHARS:
            yield turn
            turn, num_chars = [], 0
    if turn:
        yield turn


def tokenize(
    inputs: Sequence[PoolingInput],
    vocabulary: TextCodec | None,
    card: ModelCard,
    truncate: int | None,
    ids_of: Mapping[str, Sequence[int]],
) -> list[PooledInput]:
    """The tokens of all inputs. `ids_of`: of their texts, from `encoded`. May be called in a thread.

    Raises InvalidRequest for an input that is empty or too long, and for a call with too many tokens.
    """
    longest = card.max_model_len
    most = longest if truncate == -1 else truncate
    tokenized, total = [], 0
    for item in inputs:
        if isinstance(item.first, str):
            assert vocabulary is not None
            texts = [ids_of[item.first]] + ([] if item.second is None else [ids_of[item.second]])
            texts[-1] = texts[-1][: item.most_tokens]
            num_special = vocabulary.num_special_tokens(pair=item.second is not None)
            if most is not None and most <= num_special:
                reason = f"is {most}, and {num_special} tokens are put around the text: there is no room for it"
                raise InvalidRequest("truncate_prompt_tokens", reason)
            texts = _within(texts, most if most is None else most - num_special, is_first=card.pooling.is_encoder)
            num_tokens = sum(map(len, texts)) + num_special
        else:
            texts = _within([item.first], most, is_first=card.pooling.is_encoder)
            num_tokens = len(texts[0])
        field = item.second_field or item.field
        if not num_tokens:
            raise InvalidRequest(item.field, "has no tokens")
        if num_tokens > longest:
            # The first text alone may be too long for any second one.
            faulty = item.field if num_tokens - len(texts[-1]) > longest else field
            raise too_long(faulty, num_tokens, longest, card)
        total += num_tokens
        if total > MAX_POOLED_TOKENS:
            raise InvalidRequest(field, f"makes the call longer than {MAX_POOLED_TOKENS} tokens; divide it")
        if not isinstance(item.first, str):
            tokenized.append(PooledInput(texts[0]))
            continue
        assert vocabulary is not None
        ids, second_start = vocabulary.with_special_tokens(texts[0], texts[1] if len(texts) > 1 else None)
        tokenized.append(PooledInput(ids, second_start if card.pooling.has_token_types else 0))
    return tokenized


def distinct_texts(inputs: Sequence[PoolingInput], vocabulary: TextCodec | None) -> Sequence[str]:
    """The texts of inputs, each once; raises InvalidRequest. May be called in a thread."""
    texts: dict[str, None] = {}
    for item in inputs:
        for text, field in ((item.first, item.field), (item.second, item.second_field or item.field)):
            if not isinstance(text, str):
                continue
            if vocabulary is None:
                raise InvalidRequest(field, "is text, but this model is served without a tokenizer; send token ids")
            check_text(field, text, MAX_PROMPT_BYTES)
            texts[text] = None
    return list(texts)


def encoded(texts: Sequence[str], vocabulary: TextCodec | None) -> Mapping[str, Sequence[int]]:
    """The tokens of each text, without special ones. May be called in a thread."""
    return dict(zip(texts, vocabulary.encode_all(texts), strict=True)) if vocabulary and texts else {}


def _within(texts: Sequence[Sequence[int]], most: int | None, *, is_first: bool) -> list[Sequence[int]]:
    """The texts cut to `most` tokens together, the longer one of a pair first, as tokenizers' "longest first" does.

    `is_first`: their first tokens stay; otherwise the last ones.
    """
    if most is None or sum(map(len, texts)) <= most:
        return list(texts)
    if len(texts) == 1:
        rooms = [most]
    else:
        shorter = min(map(len, texts))
        rooms = [most - shorter if len(text) > shorter else shorter for text in texts]
        if most < 2 * shorter:
            rooms = [most // 2, most - most // 2]
            if len(texts[0]) > len(texts[1]):
                rooms.reverse()
    return [text[:room] if is_first else text[len(text) - room :] for text, room in zip(texts, rooms, strict=True)]


def numbers_of(vector: bytes) -> Sequence[float]:
    """The numbers of a vector; written as JSON and read again, each is the same float32."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


class TextPair(NamedTuple):
    """Two texts, each with the client's field for refusals."""

    first: str
    second: str
    first_field: str
    second_field: str


class Scores(NamedTuple):
    """The scores of a call's pairs, in their order."""

    scores: Sequence[float]
    results: Sequence[Finished]
    """The end of each request to the core; of an embedding model one for each distinct text."""


async def score_pairs(
    pairs: Sequence[TextPair],
    call: PoolingCall,
    handler: Handler,
    vocabulary: TextCodec | None,
    card: ModelCard,
    timeout_s: float | None,
) -> Scores:
    """The scores of pairs. `call`: what all requests have in common; its inputs are ignored.

    Of a classifier a score is what its only label gets for the pair, after its activation unless `call.pooling` says
    otherwise. Raises InvalidRequest, and what the core raises.
    """
    if len(pairs) > MAX_INPUTS:
        raise InvalidRequest(pairs[0].second_field, f"makes {len(pairs)} pairs; at most {MAX_INPUTS} are scored")
    if card.pooling.labels:
        if len(card.pooling.labels) > 1:
            message = f"{card.name} gives {len(card.pooling.labels)} labels, and a score is one number: use /classify"
            raise InvalidRequest("model", message)
        inputs = [
            PoolingInput(pair.first, pair.second, pair.first_field, pair.second_field, call.most_second_tokens)
            for pair in pairs
        ]
        pooling = PoolingRequest(Pooling.CLASSIFY, activate=call.pooling.activate)
        results = await pool_all(replace(call, inputs=inputs, pooling=pooling), handler, vocabulary, card, timeout_s)
        return Scores([numbers_of(result.embedding)[0] for result in results], results)
    if not call.pooling.activate:
        raise InvalidRequest("activate", f"is for classifiers alone: of {card.name} a score is a cosine")
    if call.pooling.normalize is False:
        raise InvalidRequest("normalize", "must not be false: a score is the cosine of the embeddings")
    places: dict[tuple[str, int | None], int] = {}
    inputs, most = [], call.most_second_tokens
    for pair in pairs:
        for text, field, cut in ((pair.first, pair.first_field, None), (pair.second, pair.second_field, most)):
            if places.setdefault((text, cut), len(places)) == len(inputs):
                inputs.append(PoolingInput(text, field=field, most_tokens=cut))
    pooling = replace(call.pooling, normalize=True)
    # A call of so many pairs has up to twice as many texts.
    call = replace(call, inputs=inputs, pooling=pooling, most_inputs=2 * MAX_INPUTS)
    results = await pool_all(call, handler, vocabulary, card, timeout_s)
    vectors = [result.embedding for result in results]
    compared = [(places[pair.first, None], places[pair.second, most]) for pair in pairs]
    num_bytes = sum(map(len, vectors)) + len(pairs) * len(vectors[0])
    if num_bytes <= SMALL_VECTORS:
        return Scores(cosines(vectors, compared), results)
    return Scores(await handler.in_thread(cosines, vectors, compared), results)


def cosines(vectors: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> list[float]:
    """The cosines of pairs of vectors of length 1, by their places. May be called in a thread.

    A product of two float32 is exact in float64, and the sum is rounded once: it depends on no order.
    """
    numbers = [np.frombuffer(vector, dtype="<f4").astype(np.float64) for vector in vectors]
    return [math.fsum((numbers[first] * numbers[second]).tolist()) for first, second in pairs]
