"""The endpoints /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Scope

from baton.errors import DeadlineExceeded, InvalidRequest, QueueFull
from baton.messages.node_model import Capability
from baton.model_formats.audio import AudioLimits, Recording, UnusableAudio, decode_audio, divided
from baton.model_formats.limits import AUDIO_RATE
from baton.text.prompts import SpeechPrompts
from router.admission.checks import check_can, check_model
from router.handler import Handler
from router.http.answers import ending_with_errors, path_headers
from router.http.audio.formats import SEGMENTS, Segment, Transcript, event, token_usage, words_of, written
from router.http.audio.forms import MORE_BYTES, SpeechBody, boundary_of, check_origin, read_form
from router.http.audio.transcription import PartEnd, SpeechCall, Transcription
from router.http.bodies.fields import read_as
from router.http.client import Client
from router.http.endpoint import BodyEndpoint, HttpCall
from router.http.errors import Headers, error_event
from router.http.json_body import LargeBodies
from router.http.model import ServedModel

_MOST_HELD = 8
"""Recordings of the greatest length whose samples a router holds at once, or more that are shorter."""
_DECODED_AT_ONCE = 2
"""Recordings that are decoded at once: half of the threads for such work, since a long one takes half a minute."""
_MOST_WAITING = 64
"""Recordings that may wait for that."""


@dataclass(frozen=True, slots=True)
class SpeechRules:
    """How speech is written down by the model, and within which bounds."""

    prompts: SpeechPrompts
    limits: AudioLimits
    origins: Sequence[str] = ()
    """The origins whose pages may send forms, beside the router's own."""


class AudioBodies:
    """What the endpoints for speech hold in memory at once."""

    def __init__(self, rules: SpeechRules | None) -> None:
        self.large = LargeBodies()
        self._most_samples = 0 if rules is None else _MOST_HELD * rules.limits.most_seconds * AUDIO_RATE
        self._num_samples = 0
        self._decoding = asyncio.Semaphore(_DECODED_AT_ONCE)
        self._num_files = 0
        """Files that are decoded or wait for it."""

    async def decode(self, file: bytes, rules: SpeechRules, handler: Handler) -> Recording:
        """The recording in a file. Raises UnusableAudio, or QueueFull if too many wait."""
        if self._num_files >= _DECODED_AT_ONCE + _MOST_WAITING:
            raise QueueFull(f"{self._num_files} audio files are being decoded")
        self._num_files += 1

        async def decode_in_turn() -> Recording:
            try:
                async with self._decoding:
                    # Its libraries run beside the interpreter, so it keeps the event loop as little as waiting does.
                    return await handler.in_waiting_thread(_recording_of, file, rules)
            finally:
                self._num_files -= 1

        decoding = asyncio.create_task(decode_in_turn())
        try:
            return await asyncio.shield(decoding)
        except asyncio.CancelledError:
            # The client is gone, but not the thread, so it still counts.
            decoding.add_done_callback(lambda task: task.cancelled() or task.exception())
            raise
        finally:
            # A task has its error, which has this frame: with the variable it would be a cycle that keeps the file.
            del decoding

    @contextmanager
    def holding(self, num_samples: int) -> Iterator[None]:
        """Hold so many samples. Raises QueueFull if they are too many beside the others."""
        if self._num_samples + num_samples > self._most_samples:
            raise QueueFull(f"{self._num_samples // AUDIO_RATE} s of audio are being written down")
        self._num_samples += num_samples
        try:
            yield
        finally:
            self._num_samples -= num_samples


class SpeechEndpoint(BodyEndpoint):
    """POST /v1/audio/transcriptions and /v1/audio/translations"""

    body = SpeechBody
    takes_json = False

    def __init__(
        self,
        handler: Handler,
        model: ServedModel,
        keep_alive_s: float,
        rules: SpeechRules | None,
        bodies: AudioBodies,
        *,
        translates: bool,
    ) -> None:
        """`rules`: None: no audio is taken. `bodies`: of all these endpoints. `translates`: the text is English."""
        super().__init__(handler, model, keep_alive_s)
        self._rules = rules
        self._bodies = bodies
        self._translates = translates
        self._large_bodies = bodies.large
        if rules is not None:
            self.max_body_bytes = rules.limits.most_bytes + MORE_BYTES

    def _parser_for(self, scope: Scope) -> Callable[[bytes], dict[str, Any]]:
        check_origin(scope, self._rules_of_model().origins)
        return partial(read_form, boundary_of(dict(scope["headers"]).get(b"content-type", b"")))

    async def _answer(self, client: Client, call: HttpCall) -> None:
        rules = self._rules_of_model()
        body = read_as(SpeechBody, call.found)
        wanted = self._call_of(body, rules, call)
        file, response_format, is_stream = body.file, body.response_format, body.stream
        granularities = body.timestamp_granularities or SEGMENTS
        del body
        # The file waits for its decoding, and would be in memory twice meanwhile.
        call.drop_body()
        recording = await self._decoded(file, rules, wanted.due)
        del file
        call.release()
        with self._bodies.holding(len(recording.samples)):
            transcription = Transcription(wanted, recording, rules.prompts, self._handler, self._model.card)
            await transcription.find_language()
            id_headers = self.error_form.id_headers(call.request_id)
            if is_stream:
                client.will_stream(id_headers)
                await _stream(client, transcription)
                return
            segments, answer_headers = await _segments_of(transcription, self._model)
            task = "translate" if self._translates else "transcribe"
            transcript = Transcript(task, transcription.language, wanted.temperature, segments, granularities)
            kind, answer = written(transcript, response_format)
            await client.answer(200, [(b"content-type", kind), *id_headers, *answer_headers], answer)

    def _rules_of_model(self) -> SpeechRules:
        """The rules of a model for speech. Raises UnsupportedRequest for another, before anything is read."""
        check_can(self._model.card, Capability.TRANSCRIBE, is_taken=self._rules is not None)
        assert self._rules is not None
        return self._rules

    def _call_of(self, body: SpeechBody, rules: SpeechRules, call: HttpCall) -> SpeechCall:
        timeout_s = call.timeout_s
        check_model(body.model or "", call.card)
        if body.stream and body.response_format not in ("json", "text"):
            raise InvalidRequest("stream", f"does not go with response_format {body.response_format}")
        prompts, language = rules.prompts, (body.language or "").lower()
        known = prompts.languages or {"en": 0}
        if language and language not in known:
            raise InvalidRequest("language", f"{language[:16]!r} is none of the model's: {', '.join(known)}")
        if "word" in body.timestamp_granularities:
            self._check_words(body, prompts)
        if self._translates and prompts.translate is None:
            raise InvalidRequest("model", f"{self._model.card.name} does not translate: it writes down English alone")
        before: Sequence[int] = ()
        if body.prompt and body.prompt.strip():
            before = self._model.encode(" " + body.prompt.strip(), special=False)
        return SpeechCall(
            request_id=call.request_id,
            model=body.model or "",
            language=language,
            translates=self._translates,
            temperature=body.temperature,
            with_logprobs=body.response_format == "verbose_json",
            with_times="word" in body.timestamp_granularities,
            is_stream=body.stream,
            before=before,
            traceparent=call.traceparent,
            due=None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s,
        )

    def _check_words(self, body: SpeechBody, prompts: SpeechPrompts) -> None:
        """Raises InvalidRequest for a call that can't have the times of words."""
        field = "timestamp_granularities[]"
        if body.response_format != "verbose_json":
            raise InvalidRequest(field, f"word needs response_format verbose_json, not {body.response_format}")
        if self._translates:
            raise InvalidRequest(field, "word is of transcriptions: the words of a translation are not spoken")
        if not prompts.aligns:
            raise InvalidRequest(
                field,
                "word is not served: generation_config.json of the model has no alignment_heads; those of the model "
                "that it was made of can be added",
            )
        check_can(self._model.card, Capability.ALIGN)

    async def _decoded(self, file: bytes, rules: SpeechRules, due: float | None) -> Recording:
        try:
            async with asyncio.timeout_at(due):
                return await self._bodies.decode(file, rules, self._handler)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the audio was decoded") from None
        except UnusableAudio as error:
            raise InvalidRequest("file", f"can't be used: {error}") from None


def _recording_of(file: bytes, rules: SpeechRules) -> Recording:
    return divided(decode_audio(file, rules.limits), rules.prompts.most_samples)


async def _segments_of(transcription: Transcription, model: ServedModel) -> tuple[Sequence[Segment], Headers]:
    """The text of each part, and the headers that say where the first one was served."""
    segments: list[Segment] = []
    headers: Headers = []
    text, token_ids, logprobs = "", list[int](), list[float]()
    async with aclosing(transcription.events()) as events:
        async for event in events:
            if isinstance(event, PartEnd):
                is_silent = event.finished is None
                if event.finished is not None:
                    headers = headers or path_headers(event.finished)
                spellings = [model.spelling(token_id) for token_id in event.token_ids]
                words = words_of(spellings, event.times_s, transcription.language)
                part = transcription.parts[len(segments)]
                segments.append(Segment(part, text, token_ids, logprobs, is_silent, words))
                text, token_ids, logprobs = "", [], []
            else:
                text += event.text
                token_ids += event.token_ids
                logprobs += [logprob.logprob for logprob in event.logprobs]
    return segments, headers


async def _stream(client: Client, transcription: Transcription) -> None:
    """Send the text as it comes."""
    text = ""
    num_prompt = num_written = 0
    async with ending_with_errors(client, error_event), aclosing(transcription.events()) as events:
        async for segment_event in events:
            if isinstance(segment_event, PartEnd):
                if segment_event.finished is not None:
                    num_prompt += segment_event.finished.prompt_tokens
                    num_written += segment_event.finished.completion_tokens
                continue
            # The text of an answer begins without a space.
            delta = segment_event.text if text else segment_event.text.lstrip()
            text += delta
            if delta:
                await client.write(event({"type": "transcript.text.delta", "delta": delta}))
        done = {"type": "transcript.text.done", "text": text.rstrip(), "usage": token_usage(num_prompt, num_written)}
        await client.write(event(done), more=False)
