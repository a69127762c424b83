"""The endpoints /v1/completions and /v1/chat/completions: from a client's request to its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from baton.clock import Clock
from baton.errors import InvalidRequest
from baton.messages.generation import Accepted, GenerateRequest, ModelCard
from baton.messages.request_limits import MAX_CALL_PROMPT_LOGPROB_VALUES, MAX_CALL_SEQUENCES, MAX_SEQUENCES
from router.admission.checks import check_model, check_token_ids
from router.admission.sampling import DEFAULT_MAX_TOKENS, check_output_size, check_prompt_logprobs, longest_answer
from router.handler import Handler
from router.http.answers import Collected, StreamWriter
from router.http.completions.answers import EchoedPrompt, whole_answer
from router.http.completions.bodies import ChatBody, CompletionBody, plan_chat
from router.http.completions.events import AnswerOptions, EventWriter, Label, ParsedEventWriter
from router.http.completions.generation import GenerationBody, read_generation
from router.http.completions.logprobs import CHAT, COMPLETION, AnswerFormat, TokenTexts
from router.http.endpoint import HttpCall
from router.http.generating import EndpointRequest, GeneratingEndpoint
from router.http.json_body import MAX_BODY_BYTES, base64_bytes, quote
from router.http.model import ServedModel
from router.http.parsed_text import TextParsing, as_token_id
from router.pooling import part_ids

_MAX_ECHO_BYTES = 16 << 20
"""The most that the prompts which begin the outputs of a call may come to, as JSON."""


@dataclass(frozen=True, slots=True)
class OptionsRequest(EndpointRequest):
    """The parsed request of a client that chooses what its answer has beside the text."""

    options: AnswerOptions
    echoed: Sequence[EchoedPrompt] = ()
    """The prompts with which their outputs' texts begin; empty: with none."""
    parsing: TextParsing = field(default_factory=TextParsing)
    """How the texts of the answer are parsed."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The token ids of all prompts, of a request whose prompts were tokenized here; none of prompts with rows."""
        return [
            request.prompt
            for request in self.requests
            if request.prompt and not isinstance(request.prompt, str) and not request.prompt_embeds
        ]


class _OpenAiEndpoint(GeneratingEndpoint[OptionsRequest]):
    """The common part of completions and chats."""

    answer_format: AnswerFormat
    can_resume = True

    def _writer(self, parsed: OptionsRequest, accepted: Accepted, positions: Sequence[int]) -> StreamWriter:
        label = self._label(accepted.request_id, parsed, self._model.card.fingerprint)
        is_new = not any(positions)
        num_sequences = parsed.num_sequences
        texts = [self._texts(parsed, context) for context in accepted.contexts for _ in range(num_sequences)]
        given = enumerate(parsed.prompts if parsed.options.token_ids and is_new else ())
        prompts = {number * num_sequences: token_ids for number, token_ids in given if token_ids}
        parsing = parsed.parsing
        if parsing.is_needed:
            sequences = [parsing.sequence(accepted.request_id, index) for index in range(len(positions))]
            return ParsedEventWriter(
                sequences, label, parsed.options, positions, accepted.prompt_tokens, texts, prompts
            )
        echoes = [echoed.text for echoed in parsed.echoed for _ in range(num_sequences)]
        return EventWriter(
            self.answer_format, label, parsed.options, positions, accepted.prompt_tokens, texts, prompts, echoes
        )

    async def _whole_answer(self, parsed: OptionsRequest, answers: Sequence[Collected]) -> AsyncGenerator[bytes, None]:
        prompts = parsed.prompts if parsed.options.token_ids else ()
        fingerprints = {answer.fingerprint for answer in answers}
        label = self._label(parsed.request_id, parsed, fingerprints.pop() if len(fingerprints) == 1 else "")
        parsing, texts = parsed.parsing, self._texts(parsed)
        parser = partial(parsing.sequence, parsed.request_id) if parsing.is_needed else None
        async for piece in whole_answer(
            self.answer_format, label, answers, parsed.options, texts, prompts, parsed.echoed, parser
        ):
            yield piece.encode()

    def _texts(self, parsed: OptionsRequest, context: Sequence[int] = ()) -> TokenTexts:
        model = self._model
        spelling = as_token_id if parsed.options.tokens_as_ids else model.spelling
        return TokenTexts(spelling, model.spelling, model.detokenizer, context)

    def _label(self, request_id: str, parsed: OptionsRequest, fingerprint: str) -> Label:
        card, model = self._model.card, parsed.requests[0].model
        name = self.answer_format.id_prefix + request_id
        return Label(name, model or card.name, int(self._clock.wall()), fingerprint or None)

    def _prompt_of(self, prompt: str | Sequence[int], body: GenerationBody, card: ModelCard) -> str | Sequence[int]:
        """The prompt as the core gets it: token ids where more than its text is needed here."""
        if isinstance(prompt, str):
            if isinstance(body, CompletionBody) and body.suffix:
                return self._model.encode_around(prompt, body.suffix)
            needs_ids = (
                body.return_token_ids or body.truncate_prompt_tokens is not None or body.num_prompt_logprobs is not None
            )
            if not (prompt and needs_ids):
                return prompt
            prompt = self._model.encode(prompt, special=True)
        return truncated(prompt, body.truncate_prompt_tokens, _longest(card, body.max_tokens))


class Completions(_OpenAiEndpoint):
    """POST /v1/completions"""

    answer_format = COMPLETION
    body = CompletionBody

    def __init__(
        self, handler: Handler, model: ServedModel, clock: Clock, keep_alive_s: float, prompt_embeds_bytes: int = 0
    ) -> None:
        """`prompt_embeds_bytes`: the most bytes of rows in place of tokens; 0: none are taken."""
        super().__init__(handler, model, clock, keep_alive_s)
        self._prompt_embeds_bytes = prompt_embeds_bytes
        self.max_body_bytes = MAX_BODY_BYTES + base64_bytes(prompt_embeds_bytes)

    async def _parsed(self, call: HttpCall, timeout_s: float | None) -> OptionsRequest:
        return await call.in_thread(self._parse, call, timeout_s)

    def _parse(self, call: HttpCall, timeout_s: float | None) -> OptionsRequest:
        request_id, card = call.request_id, call.card
        body = read_generation(CompletionBody, call.found)
        call.check_request_id(body.request_id)
        body.check_suffix()
        body.check_echo()
        if body.prompt_embeds is not None:
            embeds = body.read_prompt_embeds(self._prompt_embeds_bytes)
            _check_call_size(body, 1)
            request = body.request(body.prompts[0] if body.prompts else "", request_id, body.logprobs)
            request = replace(request, prompt=request.prompt or None, prompt_embeds=(embeds,))
            return _with_options(body, request_id, [request], timeout_s, logprobs=body.logprobs is not None)
        if not body.prompts:
            raise InvalidRequest("prompt", "is required")
        ids = part_ids(request_id, len(body.prompts))
        prompts = [self._prompt_of(prompt, body, card) for prompt in body.prompts]
        requests = [body.request(prompt, name, body.logprobs) for prompt, name in zip(prompts, ids, strict=True)]
        _check_call_size(body, len(prompts))
        num_tokens = sum(map(len, prompts)) * (body.num_generated if body.echo else 1)
        check_prompt_logprobs(num_tokens, body.num_prompt_logprobs, MAX_CALL_PROMPT_LOGPROB_VALUES)
        parsed = _with_options(body, request_id, requests, timeout_s, logprobs=body.logprobs is not None)
        if not body.echo:
            return parsed
        has_output = body.max_tokens != 0
        if not has_output:
            # What the prompt's tokens are comes with the first token of an output, which is not returned.
            requests = [replace(request, max_tokens=1) for request in requests]
        for used in prompts:
            if not isinstance(used, str):
                check_token_ids("prompt", used, card.vocab_size)  # a tokenizer reads no numbers beyond its type
        echoed = [self._echoed(given, used, body) for given, used in zip(body.prompts, prompts, strict=True)]
        _check_echo_size([prompt.text for prompt in echoed], 1 if body.n is None else body.n)
        return replace(parsed, requests=requests, echoed=echoed, options=replace(parsed.options, output=has_output))

    def _echoed(self, given: str | Sequence[int], used: str | Sequence[int], body: CompletionBody) -> EchoedPrompt:
        is_whole = isinstance(given, str) and body.truncate_prompt_tokens is None
        text = given if is_whole or not used else used if isinstance(used, str) else self._model.decode(used)
        ids = used if body.logprobs is not None and not isinstance(used, str) else ()
        return EchoedPrompt(text if isinstance(text, str) else "", ids, body.logprobs or 0)


class ChatCompletions(_OpenAiEndpoint):
    """POST /v1/chat/completions"""

    answer_format = CHAT
    takes_images = True
    body = ChatBody

    def _parse(self, call: HttpCall, timeout_s: float | None) -> OptionsRequest:
        card = call.card
        body = read_generation(ChatBody, call.found)
        call.check_request_id(body.request_id)
        if call.last_event_id is None:
            # A stream that goes on keeps its adapter, whose name may be unloaded by now.
            check_model(body.model or "", card)
        body.check_prompt_logprobs()
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        plan = plan_chat(body, self._model, card)
        prompt = truncated(plan.prompt, body.truncate_prompt_tokens, _longest(card, max_tokens))
        if max_tokens is None:
            max_tokens = longest_answer(card, len(prompt), body.num_generated, body.num_logprobs)
        request = body.request(prompt, call.request_id, body.num_logprobs)
        request = plan.applied(replace(request, max_tokens=max_tokens, images=body.images))
        parsed = _with_options(body, call.request_id, [request], timeout_s, logprobs=bool(body.logprobs))
        return replace(parsed, parsing=plan.parsing)


def _check_call_size(body: CompletionBody, num_prompts: int) -> None:
    """Raises InvalidRequest if all prompts of a call have more sequences, or more output, than a call may have."""
    if num_prompts == 1 or not 1 <= body.num_generated <= MAX_SEQUENCES:
        return  # one prompt is checked by the core, and so is the number
    count = num_prompts * body.num_generated
    if count > MAX_CALL_SEQUENCES:
        message = f"is {body.num_generated} for each of {num_prompts} prompts; a call has at most {MAX_CALL_SEQUENCES}"
        raise InvalidRequest("n" if body.best_of is None else "best_of", message)
    check_output_size(count, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens, body.logprobs)


def _check_echo_size(texts: Sequence[str], num_outputs: int) -> None:
    """Raises InvalidRequest if the prompts at the beginning of all outputs would be too large an answer."""
    num_bytes = sum(len(quote(text).encode(errors="surrogatepass")) for text in texts) * num_outputs
    if num_bytes > _MAX_ECHO_BYTES:
        message = f"would repeat {num_bytes} bytes of prompts; at most {_MAX_ECHO_BYTES} are repeated"
        raise InvalidRequest("echo", message)


def _longest(card: ModelCard, max_tokens: int | None) -> int:
    """The longest prompt beside an output of so many tokens; without a number, of as many as completions have.

    A prompt that is echoed alone needs one token of output, too.
    """
    num_output_tokens = DEFAULT_MAX_TOKENS if max_tokens is None else max(1, max_tokens)
    if card.source is not None:
        return card.source.longest_prompt(num_output_tokens, card.max_model_len)
    return card.max_model_len - num_output_tokens


def truncated(prompt: Sequence[int], most: int | None, longest: int) -> Sequence[int]:
    """The last `most` tokens of a prompt. -1: as many as the model takes, `longest`; None: all."""
    if most is None or not prompt:
        return prompt
    return prompt[-(max(1, longest) if most == -1 else most) :]


def _with_options(
    body: GenerationBody,
    request_id: str,
    requests: Sequence[GenerateRequest],
    timeout_s: float | None,
    *,
    logprobs: bool,
) -> OptionsRequest:
    options = AnswerOptions(
        usage=body.includes_usage,
        usage_in_all=body.usage_in_all,
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
    )
    return OptionsRequest(request_id, requests, bool(body.stream), 1 if body.n is None else body.n, timeout_s, options)
