"""Speech to text over HTTP: from a form to the requests for each part, and to the formats of the answer."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types.audio import TranscriptionVerbose

from baton.errors import EngineFault, VersionGone
from baton.messages.generation import Chunk
from baton.messages.node_model import Capability
from baton.messages.pooling import Pooling, PoolingRequest
from baton.messages.sampling import TokenLogprobs
from baton.model_formats.audio import AudioLimits, UnusableAudio, decode_audio, pcm_of, windows
from baton.model_formats.limits import AUDIO_RATE
from router.http.audio.endpoint import AudioBodies, SpeechRules
from router.http.audio.formats import Segment, Transcript, written
from router.http.json_body import MAX_BODY_BYTES, MAX_LARGE_BODIES
from tests.doubles.fake_handler import FakeHandler
from tests.support.audio_files import encoded, tone
from tests.support.http_rig import CARD, HttpRig, authenticator, chunk, finished, vector
from tests.support.speech_rig import (
    ABLE,
    BOUNDARY,
    ENGLISH,
    FORM_TYPE,
    LIMITS,
    PROMPTS,
    TRANSCRIBE,
    SpeechRig,
    form,
    part,
)

TRANSLATE = "/v1/audio/translations"
SPEECH = encoded(tone(1))
LONG = encoded(tone(80, 8_000), 8_000)
"""Three parts."""
WORDS: dict[str, Any] = {"language": "en", "response_format": "verbose_json", "timestamp_granularities__": "word"}


async def test_a_short_recording_is_one_request() -> None:
    rig = SpeechRig()
    exchange = rig.send(SPEECH, language="en", headers={"x-request-id": "r", "x-request-timeout-ms": "5000"})
    (call,) = await rig.transcribed(exchange, " Hello, you.")
    assert exchange.status == 200
    assert exchange.json == {"text": "Hello, you.", "usage": {"type": "duration", "seconds": 1}}
    assert exchange.headers["x-request-id"] == "r"
    assert exchange.headers["baton-decode-node"] == "d1"
    samples = decode_audio(SPEECH, LIMITS)
    request = call.request
    assert request.audio == pcm_of(samples, (0, AUDIO_RATE))
    assert request.prompt == (250, 255, 252, 251)
    assert (request.temperature, request.max_tokens) == (0.0, 44)
    assert request.logit_bias == {1: -100.0, 2: -100.0}
    assert request.request_id == "r"
    assert call.timeout_s == pytest.approx(5.0, abs=4.9)


async def test_what_a_refused_file_holds_is_freed_without_the_collector(request: pytest.FixtureRequest) -> None:
    """A file of many megabytes in a cycle would stay until the next full collection."""

    class RefusingHandler(FakeHandler):
        async def in_waiting_thread(self, work: Callable[..., Any], *args: object) -> Any:
            raise UnusableAudio("is no recording")

    async def refused() -> weakref.ref[RefusingHandler]:
        handler = RefusingHandler()
        with suppress(UnusableAudio):
            await AudioBodies(None).decode(b"", SpeechRules(PROMPTS, LIMITS), handler)
        return weakref.ref(handler)

    request.addfinalizer(gc.enable)
    gc.disable()
    gone = await refused()
    await asyncio.sleep(0)  # the loop forgets the call with which it continued this task
    assert gone() is None


async def test_the_language_is_found_out_by_the_first_part() -> None:
    rig = SpeechRig()
    exchange = rig.send(LONG, response_format="verbose_json")
    call = await rig.next_call()
    asked = call.request
    assert (asked.prompt, asked.max_tokens, asked.temperature) == ((250,), 1, 0.0)
    assert asked.allowed_token_ids == (255, 256)
    call.tell(Chunk(0, (256,), ""), finished())
    calls = await rig.transcribed(exchange, " a", " b", " c")
    samples = decode_audio(LONG, LIMITS)
    assert [call.request.audio for call in calls] == [pcm_of(samples, one) for one in windows(samples)]
    assert asked.audio == calls[0].request.audio
    assert {call.request.prompt for call in calls} == {(250, 256, 252, 251)}
    assert len({asked.request_id, *(call.request.request_id for call in calls)}) == 4
    found = exchange.json
    assert (found["task"], found["language"], found["text"]) == ("transcribe", "de", "a b c")
    assert found["duration"] == pytest.approx(80, abs=0.01)
    assert [(one["id"], one["text"]) for one in found["segments"]] == [(0, " a"), (1, " b"), (2, " c")]
    times = [(one["start"], one["end"]) for one in found["segments"]]
    assert times[0][0] == 0
    assert times[-1][1] == found["duration"]
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]]


SILENT = tone(29, 8_000) * 0
PAUSED = encoded(np.concatenate([SILENT[: 20 * 8_000], tone(0.5, 8_000), SILENT, SILENT]), 8_000)
"""Three parts: in the first one half a second is spoken."""


async def test_silent_parts_have_no_text_and_make_no_request() -> None:
    rig = SpeechRig()
    exchange = rig.send(PAUSED, response_format="verbose_json")
    (await rig.next_call()).tell(Chunk(0, (256,), ""), finished())
    (call,) = await rig.transcribed(exchange, " Hello.")
    samples = decode_audio(PAUSED, LIMITS)
    first, *others = windows(samples)
    assert call.request.audio == pcm_of(samples, first)
    found = [(one["text"], one["tokens"], one["no_speech_prob"]) for one in exchange.json["segments"]]
    assert found == [(" Hello.", [*b" Hello."], 0.0), *[("", [], 1.0) for _ in others]]
    assert exchange.json["duration"] == 78.5
    assert "baton-decode-node" in exchange.headers
    stream = rig.send(PAUSED, language="en", stream="true")
    await rig.transcribed(stream, " Hello.")
    assert stream.events[-1].json["text"] == "Hello."


def test_segments_begin_at_whole_frames() -> None:
    begins = range(0, 40 * AUDIO_RATE, 160)
    segments = [Segment((begin, begin + 160), "", (), (), is_silent=True) for begin in begins]
    _, body = written(Transcript("transcribe", "en", 0.0, segments), "verbose_json")
    assert [one["seek"] for one in json.loads(body)["segments"]] == list(range(len(begins)))


async def test_silence_has_no_language() -> None:
    exchange = SpeechRig().send(encoded(SILENT, 8_000), response_format="verbose_json")
    await exchange.end()
    assert (exchange.json["language"], exchange.json["text"]) == ("und", "")


async def test_segments_have_what_openais_have() -> None:
    rig = SpeechRig()
    exchange = rig.send(SPEECH, language="en", response_format="verbose_json")
    call = await rig.next_call()
    assert call.request.logprobs == 0
    text = " la" * 20
    logprobs = [TokenLogprobs(token, logprob, 1, ()) for token, logprob in ((5, -0.5), (6, -1.0))]
    call.tell(Chunk(0, (5, 6), text, logprobs), finished())
    await exchange.end()
    segments = TranscriptionVerbose.model_validate(exchange.json).segments
    assert segments is not None
    (segment,) = segments
    assert segment.avg_logprob == -0.75
    assert segment.compression_ratio == 60 / len(zlib.compress(text.encode()))


async def test_the_deadline_counts_the_time_until_a_file_is_decoded() -> None:
    rig = SpeechRig()

    async def in_waiting_thread(work: Callable[..., Any], *args: object) -> Any:
        await asyncio.Event().wait()

    rig.handler.in_waiting_thread = in_waiting_thread  # type: ignore[method-assign]
    refused = await rig.send(SPEECH, language="en", headers={"x-request-timeout-ms": "1"}).end()
    assert refused.status == 504
    assert "before the audio was decoded" in refused.error["message"]


async def test_parts_are_as_long_as_the_model_hears() -> None:
    rig = SpeechRig(replace(PROMPTS, most_samples=AUDIO_RATE))
    exchange = rig.send(encoded(tone(2.5)), language="en")
    calls = await rig.transcribed(exchange, " a", " b", " c")
    assert sum(len(call.request.audio) for call in calls) == 5 * AUDIO_RATE
    assert max(len(call.request.audio) for call in calls) <= 2 * AUDIO_RATE


async def test_a_model_that_names_no_language_is_an_error_of_its_own() -> None:
    rig = SpeechRig()
    exchange = rig.send(SPEECH)
    (await rig.next_call()).tell(finished())
    await exchange.end()
    assert exchange.status == 500
    assert "name the one that is spoken" in exchange.error["message"]


async def test_a_translation_has_its_own_task() -> None:
    rig = SpeechRig()
    exchange = rig.send(SPEECH, TRANSLATE, language="de", response_format="verbose_json")
    (call,) = await rig.transcribed(exchange, " Hello.")
    assert call.request.prompt == (250, 256, 253, 251)
    assert exchange.json["task"] == "translate"


async def test_models_for_english_alone_have_shorter_prompts() -> None:
    rig = SpeechRig(ENGLISH)
    exchange = rig.send(SPEECH)
    (call,) = await rig.transcribed(exchange, " Hello.")
    assert call.request.prompt == (250, 251)
    await rig.refuses(rig.send(SPEECH, TRANSLATE), "model")
    await rig.refuses(rig.send(SPEECH, language="de"), "language")


async def test_text_before_comes_before_the_prompt() -> None:
    rig = SpeechRig()
    exchange = rig.send(SPEECH, language="en", prompt="ab ", temperature="0.5")
    (call,) = await rig.transcribed(exchange, "")
    request = call.request
    assert request.prompt == (254, ord(" "), ord("a"), ord("b"), 250, 255, 252, 251)
    assert (request.temperature, request.max_tokens) == (0.5, 40)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("text", "text/plain; charset=utf-8", "a <b> --> & c\n"),
        (
            "srt",
            "text/plain; charset=utf-8",
            "1\n00:00:00,000 --> 00:00:@\na <b> -> &\n\n2\n00:00:@ --> 00:01:20,000\nc\n\n",
        ),
        (
            "vtt",
            "text/vtt; charset=utf-8",
            "WEBVTT\n\n00:00:00.000 --> 00:00:@\na &lt;b&gt; -&gt; &amp;\n\n00:00:@ --> 00:01:20.000\nc\n\n",
        ),
    ],
)
async def test_formats_of_an_answer(name: str, kind: str, expected: str) -> None:
    rig = SpeechRig()
    exchange = rig.send(LONG, language="en", response_format=name)
    await rig.transcribed(exchange, " a <b> --> &", "", " c")
    assert exchange.headers["content-type"] == kind
    first, second = (end / AUDIO_RATE for _, end in windows(decode_audio(LONG, LIMITS))[:2])
    point = "," if name == "srt" else "."
    expected = expected.replace("@", f"{first:06.3f}".replace(".", point), 1)
    expected = expected.replace("@", f"{second:06.3f}".replace(".", point), 1)
    assert exchange.body.decode() == expected


async def test_four_parts_are_written_down_at_once_and_their_text_is_in_order() -> None:
    rig = SpeechRig(limits=AudioLimits(4 << 20, 200))
    exchange = rig.send(encoded(tone(180, 8_000), 8_000), language="en")
    calls = await rig.next_calls(4)
    for _ in range(20):
        await asyncio.sleep(0)
    assert rig.handler.calls.empty()
    for place in (3, 1, 2, 0):
        calls[place].tell(chunk(0, f" {place}"), finished())
    calls += await rig.next_calls(2)
    for place in (5, 4):
        calls[place].tell(chunk(0, f" {place}"), finished())
    await rig.transcribed(exchange, *(["!"] * (len(windows(np.zeros(180 * AUDIO_RATE, np.int16))) - 6)))
    assert exchange.json["text"].startswith("0 1 2 3 4 5")


async def test_words_have_times_by_a_second_request_for_each_part() -> None:
    rig = SpeechRig()
    exchange = rig.send(LONG, **WORDS)
    calls = await rig.next_calls(3)
    calls[1].tell(finished())
    # The end of a text is no word.
    calls[2].tell(chunk(0, " C"), Chunk(2, (PROMPTS.start,), ""), finished())
    of_last = await rig.next_call()
    calls[0].tell(chunk(0, " A b"), finished())
    of_first = await rig.next_call()
    of_last.tell(vector(0, 10, 25))
    of_first.tell(vector(0, 50, 60, 80, 100))
    await exchange.end()
    begins = [begin / AUDIO_RATE for begin, _ in windows(decode_audio(LONG, LIMITS))]
    assert exchange.json["words"] == [
        {"word": "A", "start": 0.0, "end": 1.2},
        {"word": "b", "start": 1.2, "end": 2.0},
        {"word": "C", "start": round(begins[2], 2), "end": round(begins[2] + 0.5, 2)},
    ]
    assert "segments" not in exchange.json
    TranscriptionVerbose.model_validate(exchange.json)
    first, asked = calls[0].request, of_first.request
    assert first.prompt is not None
    assert (asked.audio, asked.prompt) == (first.audio, (*first.prompt, *b" A b"))
    assert asked.pooling == PoolingRequest(Pooling.ALIGN, second_start=4, num_rows=len(first.audio) // 2 // 320)
    names = [call.request.request_id for call in [*calls, of_first, of_last]]
    assert len(set(names)) == 5


async def test_words_and_segments_come_together_if_both_are_asked_for() -> None:
    both = [("timestamp_granularities[]", b"word"), ("timestamp_granularities[]", b"segment")]
    fields = [*both, ("response_format", b"verbose_json"), ("language", b"ja")]
    rig = SpeechRig(prompts=replace(PROMPTS, languages={"ja": 255}))
    body = b"".join(part(*one) for one in fields) + form(SPEECH)
    exchange = rig.request("POST", TRANSCRIBE, body, FORM_TYPE)
    (await rig.next_call()).tell(chunk(0, "abc"), finished())
    (await rig.next_call()).tell(vector(1, 2, 3, 4))
    await exchange.end()
    assert [word["word"] for word in exchange.json["words"]] == ["a", "b", "c"]
    assert [segment["text"] for segment in exchange.json["segments"]] == ["abc"]


async def test_times_that_a_node_does_not_give_end_the_call() -> None:
    for end, reason in ((vector(0, 1), "ended without them"), (EngineFault("a node is broken"), "a node is broken")):
        rig = SpeechRig()
        exchange = rig.send(SPEECH, **WORDS)
        (await rig.next_call()).tell(chunk(0, " A b"), finished())
        (await rig.next_call()).tell(end)
        await exchange.end()
        assert exchange.status == 500
        assert reason in exchange.error["message"]


async def test_a_request_for_times_begins_anew_and_ends_with_its_client() -> None:
    rig = SpeechRig()
    exchange = rig.send(SPEECH, **WORDS)
    (await rig.next_call()).tell(chunk(0, " A b"), finished())
    (gone := await rig.next_call()).tell(VersionGone("its version is gone"))
    again = await rig.next_call()
    assert (again.request.prompt, again.request.pooling) == (gone.request.prompt, gone.request.pooling)
    exchange.disconnect()
    await exchange.task
    assert again.is_closed.is_set()
    assert not exchange.status


async def test_words_are_refused_where_nothing_aligns_them() -> None:
    field = "timestamp_granularities[]"
    without = SpeechRig(prompts=replace(PROMPTS, aligns=False))
    await without.refuses(without.send(SPEECH, **WORDS), field, "alignment_heads")
    rig = SpeechRig()
    await rig.refuses(rig.send(SPEECH, TRANSLATE, **WORDS), field)
    rig.card = replace(ABLE, capabilities=ABLE.capabilities - {Capability.ALIGN})
    await rig.refuses(rig.send(SPEECH, **WORDS), "model", "can't do align")


async def test_one_part_that_fails_ends_all() -> None:
    rig = SpeechRig()
    exchange = rig.send(LONG, language="en")
    calls = await rig.next_calls(3)
    calls[2].tell(EngineFault("a node is broken"))
    await exchange.end()
    assert (exchange.status, exchange.error["code"]) == (500, "engine_fault")
    assert all(call.is_closed.is_set() for call in calls)


async def test_a_client_that_leaves_ends_all() -> None:
    rig = SpeechRig()
    exchange = rig.send(LONG, language="en")
    calls = await rig.next_calls(3)
    exchange.disconnect()
    await exchange.task
    assert not exchange.status
    assert all(call.is_closed.is_set() for call in calls)


async def test_a_stream_has_the_text_in_order() -> None:
    rig = SpeechRig()
    exchange = rig.send(LONG, language="en", stream="true")
    calls = await rig.next_calls(3)
    calls[1].tell(chunk(0, " c"), finished())
    calls[0].tell(chunk(0, " a"), chunk(1, " b"))
    assert [one.json["delta"] for one in await exchange.wait_for_events(2)] == ["a", " b"]
    calls[0].tell(finished())
    calls[2].tell(chunk(0, " d "), finished())
    await exchange.end()
    assert exchange.headers["content-type"].startswith("text/event-stream")
    *deltas, done = [one.json for one in exchange.events]
    assert [one["delta"] for one in deltas] == ["a", " b", " c", " d "]
    assert {one["type"] for one in deltas} == {"transcript.text.delta"}
    usage = {"type": "tokens", "input_tokens": 9, "output_tokens": 6, "total_tokens": 15}
    assert done == {"type": "transcript.text.done", "text": "a b c d", "usage": usage}


@pytest.mark.parametrize("error", [EngineFault("a node is broken"), RuntimeError("a fault of the router")])
async def test_an_error_in_a_stream_is_its_last_event(error: Exception) -> None:
    rig = SpeechRig()
    exchange = rig.send(SPEECH, language="en", stream="true")
    (call := await rig.next_call()).tell(chunk(0, " a"), error)
    await exchange.end()
    assert [*exchange.events[-1].json] == ["error"]
    early = rig.send(SPEECH, language="en", stream="true")
    (call := await rig.next_call()).tell(error)
    await early.end()
    assert early.status == 500
    assert call.is_closed.is_set()


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("language", {"language": "tlh"}),
        ("temperature", {"temperature": "1.5"}),
        ("temperature", {"temperature": "nan"}),
        ("temperature", {"temperature": "warm"}),
        ("stream", {"stream": "yes"}),
        ("stream", {"stream": "true", "response_format": "srt"}),
        ("response_format", {"response_format": "xml"}),
        ("timestamp_granularities[]", {"timestamp_granularities__": "word"}),
        ("timestamp_granularities[]", {"timestamp_granularities__": "word", "response_format": "srt"}),
        ("timestamp_granularities[]", {"timestamp_granularities__": "word", "stream": "true"}),
        ("stream", {"timestamp_granularities__": "word", "stream": "true", "response_format": "verbose_json"}),
        ("timestamp_granularities[]", {"timestamp_granularities__": "letter"}),
        ("include[]", {"include__": "logprobs"}),
        ("chunking_strategy", {"chunking_strategy": "none"}),
        ("best", {"best": "1"}),
        ("prompt", {"prompt": "x" * (17 << 10)}),
    ],
)
async def test_wrong_fields_are_refused_by_name(field: str, fields: Mapping[str, Any]) -> None:
    rig = SpeechRig()
    await rig.refuses(rig.send(SPEECH, **fields), field)


async def test_a_file_is_required_and_must_be_audio_of_the_permitted_length() -> None:
    rig = SpeechRig(limits=AudioLimits(1 << 20, 10))
    for file, reason in (
        (None, "is required"),
        (b"", "no audio"),
        (b"hello", "no audio in WAV"),
        (SPEECH[:-9], "truncated"),
        (encoded(tone(11, 8_000), 8_000), "11.0 s long; at most 10 s"),
        (bytes((1 << 20) + 1), "has 1048577 bytes"),
    ):
        await rig.refuses(rig.send(file), "file", reason)


async def test_other_models_refuse_audio_before_the_body_is_read() -> None:
    unable = HttpRig()
    without = HttpRig(card=ABLE)
    wrong_model = SpeechRig()
    wrong_model.card = CARD
    for rig in (unable, without, wrong_model):
        await rig.refuses(
            rig.request("POST", TRANSCRIBE, b"", FORM_TYPE, is_whole=False), "model", "can't do transcribe"
        )


async def test_keys_are_checked_before_the_body_is_read(tmp_path: Path) -> None:
    checks_keys, _ = authenticator(tmp_path, "acme")
    rig = HttpRig(card=ABLE, authenticator=checks_keys)
    headers = {**FORM_TYPE, "authorization": "Bearer wrong"}
    refused = await rig.request("POST", TRANSCRIBE, b"", headers, is_whole=False).end()
    assert refused.status == 401


async def test_an_unknown_model_is_not_found() -> None:
    assert (await SpeechRig().send(SPEECH, model="other").end()).status == 404


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://evil.example", 403), ("null", 403), ("http://localhost:8000", 200), ("https://chat.example.org", 200)],
)
async def test_pages_of_other_origins_may_send_no_forms(origin: str, status: int) -> None:
    rig = SpeechRig(origins=["https://chat.example.org"])
    exchange = rig.send(SPEECH, language="en", headers={"origin": origin, "host": "localhost:8000"})
    await rig.transcribed(exchange, *([""] if status == 200 else []))
    assert exchange.status == status


GOOD = form(SPEECH)
MULTIPART = "multipart/form-data"
TYPES = {
    "": 415,
    "application/json": 415,
    MULTIPART: 400,
    f"{MULTIPART}; boundary=": 400,
    f"{MULTIPART}; boundary={'x' * 71}": 400,
}


@pytest.mark.parametrize(("content_type", "status"), TYPES.items())
async def test_bodies_that_are_no_forms_are_refused(content_type: str, status: int) -> None:
    headers = {"content-type": content_type} if content_type else {}
    assert (await SpeechRig().request("POST", TRANSCRIBE, GOOD, headers).end()).status == status


MARK = BOUNDARY.encode()
HOSTILE: Mapping[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends before"),
    "noise": (b"\x00\xff" * 100, "is not multipart/form-data"),
    "another boundary": (GOOD.replace(BOUNDARY.encode(), b"other"), "is not multipart/form-data"),
    "never closed": (form(SPEECH, end=""), "ends before"),
    "cut in a header": (GOOD[:40], "ends before"),
    "10,000 parts": (part("a[]", b"x") * 10_000, "more than 32 parts"),
    "a long file name": (form(None, end="") + part("file", b"", "x" * (1 << 20)), "is not multipart/form-data"),
    "many headers": (b"--%b\r\n" % MARK + b"a: b\r\n" * 10_000 + b"\r\n", "is not multipart/form-data"),
    "an endless header": (f"--{BOUNDARY}\r\n".encode() + b"a: " + b"b" * (1 << 20), "is not multipart/form-data"),
    "a part without a name": (f"--{BOUNDARY}\r\ncontent-disposition: form-data\r\n\r\nx\r\n".encode(), "name"),
    "a part without headers": (f"--{BOUNDARY}\r\n\r\nx\r\n--{BOUNDARY}--".encode(), "name"),
    "two files": (part("file", SPEECH, "a") + GOOD, "is there twice"),
    "two models": (part("model", b"a") + part("model", b"b") + GOOD, "is there twice"),
    "no UTF-8": (part("model", b"\xff") + GOOD, "not valid UTF-8"),
    "a file of another name": (part("speech", b"\xff" * 100, "a") + GOOD, "not valid UTF-8"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_forms_are_refused(name: str) -> None:
    body, reason = HOSTILE[name]
    refused = await SpeechRig().request("POST", TRANSCRIBE, body, FORM_TYPE).end()
    assert refused.status == 400
    assert reason in refused.error["message"]


async def test_bodies_beyond_the_limit_are_refused_with_and_without_a_length() -> None:
    rig = SpeechRig(limits=AudioLimits(1000, 10))
    body = form(bytes(100_000))
    promised = {**FORM_TYPE, "content-length": str(len(body))}
    for headers in (promised, FORM_TYPE):
        refused = await rig.request("POST", TRANSCRIBE, body, headers, is_whole=False).end()
        assert (refused.status, refused.headers["connection"]) == (413, "close")


async def test_few_large_recordings_are_read_at_once() -> None:
    rig = SpeechRig()
    half = form(bytes(2 * MAX_BODY_BYTES))[: 2 * MAX_BODY_BYTES]
    reading = [
        rig.request("POST", path, half, FORM_TYPE, is_whole=False)
        for _ in range(MAX_LARGE_BODIES // 2)
        for path in (TRANSCRIBE, TRANSLATE)
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    assert (await rig.request("POST", TRANSCRIBE, half, FORM_TYPE, is_whole=False).end()).status == 503
    for exchange in reading:
        exchange.disconnect()
        await exchange.task


async def test_two_files_are_decoded_at_once_and_count_until_their_thread_is_done() -> None:
    rig = SpeechRig()
    turn, started = asyncio.Event(), asyncio.Queue[None]()

    async def in_waiting_thread(work: Callable[..., Any], *args: object) -> Any:
        started.put_nowait(None)
        await turn.wait()
        return work(*args)

    rig.handler.in_waiting_thread = in_waiting_thread  # type: ignore[method-assign]
    sent = [rig.send(b"hello" if place else SPEECH, language="en") for place in range(66)]
    for _ in range(2):
        await started.get()
    refused = await rig.send(SPEECH).end()
    assert refused.status == 503
    assert "66 audio files" in refused.error["message"]
    for exchange in sent[:2]:
        exchange.disconnect()
        await exchange.task
    assert (await rig.send(SPEECH).end()).status == 503
    assert started.empty()
    turn.set()
    for exchange in sent[2:]:
        assert (await exchange.end()).status == 400
    exchange = rig.send(SPEECH, language="en")
    await rig.transcribed(exchange, "")
    assert exchange.status == 200


async def test_the_samples_that_are_held_are_bounded() -> None:
    rig = SpeechRig(limits=AudioLimits(1 << 20, 2))
    running = [rig.send(encoded(tone(2)), language="en") for _ in range(8)]
    calls = [await rig.next_call() for _ in running]
    refused = await rig.send(SPEECH, language="en").end()
    assert refused.status == 503
    assert "16 s of audio" in refused.error["message"]
    for call in calls:
        call.tell(finished())
    for exchange in running:
        await exchange.end()
    again = rig.send(SPEECH, language="en")
    await rig.transcribed(again, "")
    assert again.status == 200


GONE = VersionGone("ask again")


async def test_a_part_whose_version_is_gone_begins_anew_once() -> None:
    rig = SpeechRig()
    exchange = rig.send(SPEECH)
    (await rig.next_call()).tell(GONE)
    (await rig.next_call()).tell(Chunk(0, (256,), ""), finished())
    first = await rig.next_call()
    first.tell(chunk(0, " x"), GONE)
    second = await rig.next_call()
    assert second.request == replace(first.request, seed=1), "the seed that the router drew"
    second.tell(chunk(0, " cd"), finished())
    await exchange.end()
    assert (exchange.status, exchange.json["text"]) == (200, "cd")
    again = rig.send(SPEECH, language="en")
    for _ in range(2):
        (await rig.next_call()).tell(GONE)
    await again.end()
    assert (again.status, again.error["code"]) == (503, "version_gone")


async def test_a_part_of_a_stream_begins_anew_while_it_has_no_text() -> None:
    rig = SpeechRig()
    exchange = rig.send(SPEECH, language="en", stream="true")
    (await rig.next_call()).tell(GONE)
    (await rig.next_call()).tell(chunk(0, " a"), finished())
    await exchange.end()
    assert exchange.events[-1].json["text"] == "a"
    begun = rig.send(SPEECH, language="en", stream="true")
    (await rig.next_call()).tell(chunk(0, " a"), GONE)
    await begun.end()
    assert [one.json.get("delta") for one in begun.events] == ["a", None]
    assert begun.events[-1].json["error"]["code"] == "version_gone"
