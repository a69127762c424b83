"""Checks every bound of a request before anything is allocated. Errors name the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest, ModelCard
from baton.messages.ids import REQUEST_ID_PATTERN, new_request_id, scoped
from baton.messages.pooling import Pooling, PoolingRequest
from baton.messages.prompt_rows import PromptRows
from baton.messages.request_limits import (
    MAX_PRIORITY,
    MAX_PROMPT_BYTES,
    MAX_PROMPT_LOGPROB_VALUES,
    MAX_SALT_BYTES,
    MAX_SEQUENCES,
)
from baton.messages.sampling import SamplingParams
from baton.messages.spans import EncoderContent, Span
from baton.text.detokenizer import TextCodec
from baton.text.prompts import PromptImage
from router.admission.checks import (
    check_generates,
    check_integer,
    check_model,
    check_name,
    check_text,
    check_token_ids,
    pooling_params,
    too_long,
)
from router.admission.prompt_inputs import (
    ImageRules,
    read_images,
    read_prompt_embeds,
    read_source,
    read_transcript,
    refuse_audio,
    with_spans,
)
from router.admission.request import ValidRequest
from router.admission.sampling import (
    check_output_size,
    check_prompt_logprobs,
    checked_stop,
    sampling_params,
    with_beams,
    with_constraint,
    with_lengths,
)


def validate(
    raw: GenerateRequest,
    card: ModelCard,
    codec: TextCodec | None,
    rng: Random,
    max_prompt_embeds: int = 0,
    image_rules: ImageRules | None = None,
) -> ValidRequest:
    """The request within all bounds and with every default filled in; raises InvalidRequest or UnknownModel.

    Its priority is checked before (`with_allowed_priority`), since it decides whether the request may even wait.

    Without a `codec` only token ids are accepted. `max_prompt_embeds`: most bytes of rows in place of tokens; 0: none
    are taken. `image_rules`: None: the model takes no images. May be run in a thread, as tokenizing a long text takes a
    while. The JSON schema is checked elsewhere, since that takes longer (see bounded_work.py).
    """
    request_id = _request_id(raw.request_id, rng)
    check_model(raw.model, card)
    check_name("cache_salt", raw.cache_salt, MAX_SALT_BYTES)
    if raw.pooling is not None and raw.prompt_embeds:
        raise InvalidRequest("prompt_embeds", "is for generated text alone")
    if raw.pooling is not None:
        return _for_pooling(raw, raw.pooling, card, codec, request_id)
    check_generates(card)
    embeds = read_prompt_embeds(raw, card, max_prompt_embeds) if raw.prompt_embeds else ()
    images = read_images(raw, card, image_rules) if raw.images else ()
    stop = checked_stop(raw.stop, codec is not None)
    sampling = sampling_params(raw, card, rng, None if codec is None else codec.encode_rendered)
    n = check_integer("n", 1 if raw.n is None else raw.n, 1, MAX_SEQUENCES)
    ttft_slo_ms = _milliseconds("ttft_slo_ms", raw.ttft_slo_ms)
    tpot_slo_ms = _milliseconds("tpot_slo_ms", raw.tpot_slo_ms)
    best_of = check_integer("best_of", n if raw.best_of is None else raw.best_of, n, MAX_SEQUENCES)
    if best_of > n and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)  # the sequences are compared by them
    if best_of > 1:
        sampling = replace(sampling, n=best_of)
    sampling = with_beams(sampling, raw, n)
    contents: Sequence[EncoderContent]
    if card.source is None:
        refuse_audio(raw, card)
        prompt, spans = _with_given_rows(raw, card, codec, embeds, images, image_rules)
        contents, num_left = [image.content for image in images], card.max_model_len - len(prompt)
    else:
        source = read_source(raw, card, card.source, partial(_prompt, raw.prompt, card, codec))
        prompt, spans, contents, num_left = source.token_ids, source.spans, [source.content], source.num_left
    check_prompt_logprobs(len(prompt), sampling.prompt_logprobs, MAX_PROMPT_LOGPROB_VALUES)
    sampling = with_lengths(sampling, raw, num_left, card.max_model_len)
    check_output_size(sampling.n, sampling.max_tokens, raw.logprobs)
    sampling = with_constraint(sampling, raw, card, has_text=codec is not None)
    valid = ValidRequest(
        request_id=scoped(raw.tenant, request_id),
        model=card.name,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        stop=stop,
        keeps_stop=bool(raw.include_stop_str_in_output),
        shown_tokens=tuple(raw.shown_tokens),
        context_tokens=() if codec is None else codec.context_of(prompt, spans[-1].stop if spans else 0),
        is_parsed=raw.is_parsed,
        reasoning=raw.reasoning,
        priority=raw.priority,
        cache_salt=scoped(raw.tenant, raw.cache_salt),
        num_returned=n,
        wants_logprobs=raw.logprobs is not None,
        ttft_slo_ms=ttft_slo_ms,
        tpot_slo_ms=tpot_slo_ms,
        spans=spans,
        contents=tuple({content.digest: content for content in contents}.values()),
    )
    return _with_adapter(valid, raw.model, card)


def with_allowed_priority(raw: GenerateRequest, min_priority: int) -> GenerateRequest:
    """The request with the priority that it gets. Raises InvalidRequest for one that its caller may not ask for.

    Waiting makes up for priority slowly, by default 60 s for one step, so a client that could ask for any number would
    keep all others waiting for as long as it likes. So by default a client may place its requests behind those without
    a priority, and not before them.

    `min_priority`: the smallest one where the caller's key has no bound of its own. A request without a priority gets
    the smallest that is allowed if 0 is not.
    """
    least, whose = min_priority, "of this router"
    if raw.min_priority is not None:
        least, whose = raw.min_priority, "of this API key"
    if least <= raw.priority <= MAX_PRIORITY:
        return raw
    if raw.priority == 0:
        return replace(raw, priority=least)
    why = f"must be {least} to {MAX_PRIORITY}, the range {whose}, not {raw.priority}; the smallest numbers come first"
    raise InvalidRequest("priority", why)


def _with_given_rows(
    raw: GenerateRequest,
    card: ModelCard,
    codec: TextCodec | None,
    embeds: Sequence[PromptRows],
    images: Sequence[PromptImage],
    image_rules: ImageRules | None,
) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """The prompt's ids, and the spans of given rows or of images in it."""
    text_or_ids = raw.prompt
    if images and image_rules is not None and isinstance(text_or_ids, str):
        check_text("prompt", text_or_ids, MAX_PROMPT_BYTES)
        text_or_ids = image_rules.prompts.expanded(text_or_ids, images)
    prompt = _prompt(text_or_ids, card, codec, card.max_model_len - 1) if raw.prompt or not embeds else ()
    if images and image_rules is not None:
        return image_rules.prompts.with_spans(prompt, images)
    return with_spans(prompt, embeds, raw, card) if embeds else (prompt, ())


def _for_pooling(
    raw: GenerateRequest,
    pooling: PoolingRequest,
    card: ModelCard,
    codec: TextCodec | None,
    request_id: str,
) -> ValidRequest:
    """The request for a vector. Parameters of sampling are not looked at, since nothing is sampled."""
    spans: Sequence[Span] = ()
    contents: Sequence[EncoderContent] = ()
    if pooling.kind is Pooling.ALIGN:
        transcript = read_transcript(raw, card, partial(_prompt, raw.prompt, card, codec))
        prompt, spans, contents = transcript.token_ids, transcript.spans, (transcript.content,)
        # The client's places are those of the decoder's tokens, which lie behind the input.
        pooling = replace(pooling, second_start=pooling.second_start + spans[-1].stop)
    else:
        prompt = _prompt(raw.prompt, card, codec, card.max_model_len)
    valid = ValidRequest(
        request_id=scoped(raw.tenant, request_id),
        model=card.name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
        priority=raw.priority,
        cache_salt=scoped(raw.tenant, raw.cache_salt),
        pooling=pooling_params(pooling, card, len(prompt)),
        spans=spans,
        contents=contents,
    )
    return _with_adapter(valid, raw.model, card)


def _with_adapter(request: ValidRequest, model: str, card: ModelCard) -> ValidRequest:
    """The request with the adapter that its client has named as its model, if it has.

    From here on the request has the adapter's digest: whatever happens to the name, it keeps this adapter.
    """
    source = card.adapters.get(model)
    return request if source is None else replace(request, adapter=source.digest, adapter_name=source.name)


def _request_id(request_id: str, rng: Random) -> str:
    if request_id == "":
        return new_request_id(rng)
    if not REQUEST_ID_PATTERN.match(request_id):
        raise InvalidRequest("request_id", "must be 1 to 64 letters, digits or _ . : -")
    return request_id


def _prompt(
    prompt: str | Sequence[int] | None, card: ModelCard, codec: TextCodec | None, longest: int
) -> tuple[int, ...]:
    if not prompt:
        raise InvalidRequest("prompt", "is empty")
    if isinstance(prompt, str):
        check_text("prompt", prompt, MAX_PROMPT_BYTES)
        if codec is None:
            raise InvalidRequest("prompt", "this model is served without a tokenizer; send token ids")
        token_ids: Sequence[int] = codec.encode(prompt)
        if not token_ids:
            raise InvalidRequest("prompt", "has no tokens")
    else:
        token_ids = prompt
    if len(token_ids) > longest:
        raise too_long("prompt", len(token_ids), longest, card)
    check_token_ids("prompt", token_ids, card.vocab_size)
    return tuple(token_ids)


def _milliseconds(field: str, value: float | None) -> float | None:
    # Written so that NaN fails.
    if value is not None and not 0.0 < value < math.inf:
        raise InvalidRequest(field, f"must be a number of milliseconds above 0, not {value}")
    return value
