"""From samples to text: one request to the core for each part of a recording, a few at a time, in order.

Rules:

1. Text is handed on in the order of the recording, whichever part is ready first.
2. The first error ends all parts, and so does the end of the call.
3. A silent part has no text and makes no request: models write down text that nobody has spoken.
4. The times of a part's tokens are a second request, once its text is whole.
5. A part begins anew, once, if the nodes of the version that began it are gone and its client has no text of it. So the
   text of a part is handed on when it is whole, unless the client gets it as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from baton.errors import BatonError, VersionGone
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.messages.pooling import Pooling, PoolingRequest
from baton.model_formats.audio import Recording, pcm_of
from baton.model_formats.limits import AUDIO_RATE
from baton.text.prompts import SAMPLES_PER_ROW, SpeechPrompts
from router.admission.sampling import longest_answer
from router.handler import Handler
from router.pooling import numbers_of, part_ids

AT_ONCE = 4
"""Parts of one recording that are written down at once."""
NO_LANGUAGE = "und"
"""The language of silence: undetermined (ISO 639-2)."""
_NEVER = -100.0
"""The bias of tokens that are never written: with it, a logit is far below all others."""


@dataclass(frozen=True, slots=True)
class SpeechCall:
    """What a client wants of a recording."""

    request_id: str
    model: str
    language: str
    """Code of the language that is spoken; empty: it is to be found out."""
    translates: bool
    """Whether the text is to be English."""
    temperature: float
    with_logprobs: bool
    """Whether chunks have the log-probabilities of their tokens."""
    with_times: bool
    """Whether the end of a part has the times of its tokens."""
    is_stream: bool
    """Whether the client gets text as it comes."""
    before: Sequence[int]
    """Tokens of text that came before."""
    traceparent: str
    due: float | None
    """When the client wants the answer, by the loop's clock."""


@dataclass(frozen=True, slots=True)
class PartEnd:
    """A part of a recording is written down."""

    finished: Finished | None
    """None: the part is silent."""
    token_ids: Sequence[int] = ()
    """The tokens of its text, without special ones, if times were asked for."""
    times_s: Sequence[float] = ()
    """When each of these tokens begins, in seconds of the recording, and behind them when the last one ends."""


class Transcription:
    """Writes one recording down."""

    def __init__(
        self, call: SpeechCall, recording: Recording, prompts: SpeechPrompts, handler: Handler, card: ModelCard
    ) -> None:
        self._call = call
        self._samples = recording.samples
        self._prompts = prompts
        self._handler = handler
        self._card = card
        self.parts = recording.parts
        self._silent = recording.silent
        self.language = call.language if prompts.languages else "en"
        """Code of the language; empty: it is not known yet."""
        self._now = asyncio.get_running_loop().time

    async def find_language(self) -> None:
        """Find out which language is spoken, by the first part that is not silent, unless it is known."""
        if self.language:
            return
        heard = next((part for index, part in enumerate(self.parts) if index not in self._silent), None)
        if heard is None:
            self.language = NO_LANGUAGE
            return
        code_of = {token: code for code, token in self._prompts.languages.items()}
        # The name is no part's.
        name = part_ids(self._call.request_id, len(self.parts) + 1)[-1]
        request = GenerateRequest(
            prompt=(self._prompts.start,),
            request_id=name,
            model=self._call.model,
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=tuple(code_of),
            traceparent=self._call.traceparent,
            is_further_part=True,
            audio=pcm_of(self._samples, heard),
        )
        async with aclosing(self._answer(request)) as answer:
            async for event in answer:
                if isinstance(event, Chunk) and event.token_ids:
                    self.language = code_of.get(event.token_ids[0], "")
        if not self.language:
            raise BatonError("the model named no language; name the one that is spoken (language)")

    async def events(self) -> AsyncGenerator[Chunk | PartEnd, None]:
        """The text of all parts, in order: chunks, and the end of each part. Raises BatonErrors."""
        arrived: asyncio.Queue[tuple[int, Chunk | PartEnd | Exception]] = asyncio.Queue()
        most = min(AT_ONCE, self._handler.most_at_once() or AT_ONCE)
        room = asyncio.Semaphore(most)

        async def write(index: int, name: str, times_name: str) -> None:
            if index in self._silent:
                arrived.put_nowait((index, PartEnd(None)))
                return
            try:
                async with room, aclosing(self._answer(self._request(index, name))) as answer:
                    token_ids: list[int] = []
                    async for event in answer:
                        if isinstance(event, Finished):
                            arrived.put_nowait((index, await self._end_of(index, times_name, token_ids, event)))
                        else:
                            token_ids += event.token_ids
                            arrived.put_nowait((index, event))
            except Exception as error:
                arrived.put_nowait((index, error))

        count = len(self.parts)
        names = part_ids(self._call.request_id, count)
        # One name between those of the parts and these is of the request for the language.
        names_of_times = part_ids(self._call.request_id, 2 * count + 1)[count + 1 :]
        parts = zip(range(count), names, names_of_times, strict=True)
        tasks = [asyncio.create_task(write(*part)) for part in parts]
        early: list[list[Chunk | PartEnd]] = [[] for _ in self.parts]
        try:
            index = 0
            while index < len(self.parts):
                while early[index]:
                    event = early[index].pop(0)
                    yield event
                    if isinstance(event, PartEnd):
                        index += 1
                        if index == len(self.parts):
                            return
                of, arrival = await arrived.get()
                if isinstance(arrival, Exception):
                    raise arrival
                early[of].append(arrival)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_of(self, index: int, name: str, token_ids: Sequence[int], finished: Finished) -> PartEnd:
        """The end of a part, with the times of its tokens if they are wanted. Raises BatonErrors."""
        text = tuple(token for token in token_ids if token not in self._prompts.special)
        if not self._call.with_times or not text:
            return PartEnd(finished)
        prompt, (start, stop) = self._prompt(), self.parts[index]
        text = text[: self._prompts.max_length - len(prompt)]
        request = GenerateRequest(
            prompt=(*prompt, *text),
            request_id=name,
            model=self._call.model,
            traceparent=self._call.traceparent,
            is_further_part=True,
            audio=pcm_of(self._samples, (start, stop)),
            pooling=PoolingRequest(
                Pooling.ALIGN, second_start=len(prompt), num_rows=max(1, (stop - start) // SAMPLES_PER_ROW)
            ),
        )
        async with aclosing(self._answer(request)) as answer:
            async for event in answer:
                if isinstance(event, Finished) and len(event.embedding) == 4 * (len(text) + 1):
                    rows = numbers_of(event.embedding)
                    return PartEnd(finished, text, [(start + row * SAMPLES_PER_ROW) / AUDIO_RATE for row in rows])
        raise BatonError("a request for the times of tokens ended without them")

    def _prompt(self) -> tuple[int, ...]:
        """The tokens with which the decoder begins each part."""
        return self._prompts.prompt(self.language, translates=self._call.translates, before=self._call.before)

    def _request(self, index: int, name: str) -> GenerateRequest:
        prompt = self._prompt()
        longest = min(self._prompts.max_length - len(prompt), longest_answer(self._card, len(prompt)))
        return GenerateRequest(
            prompt=prompt,
            request_id=name,
            model=self._call.model,
            temperature=self._call.temperature,
            max_tokens=max(1, longest),
            logit_bias=dict.fromkeys(self._prompts.suppressed, _NEVER),
            traceparent=self._call.traceparent,
            is_further_part=any(before not in self._silent for before in range(index)),
            audio=pcm_of(self._samples, self.parts[index]),
            logprobs=0 if self._call.with_logprobs else None,
        )

    async def _answer(self, request: GenerateRequest) -> AsyncGenerator[Chunk | Finished, None]:
        """The text of a request, and its end. Raises BatonErrors."""
        is_anew = has_text = False
        while True:
            kept: list[Chunk] = []
            try:
                async with aclosing(self._events(request)) as events:
                    async for event in events:
                        if isinstance(event, Accepted):
                            # Begun anew, it would draw the same tokens from the same logits.
                            request = replace(request, seed=event.seed)
                        elif isinstance(event, Chunk):
                            kept.append(event)
                            if self._call.is_stream:
                                yield kept.pop()
                                has_text = True
                        elif isinstance(event, Finished):
                            for chunk in kept:
                                yield chunk
                            yield event
                            return
                raise BatonError("the stream ended before its request did")
            except VersionGone:
                if is_anew or has_text:
                    raise
                is_anew = True

    def _events(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        due = self._call.due
        left_s = None if due is None else max(0.0, due - self._now())
        return self._handler.generate(request, left_s)
