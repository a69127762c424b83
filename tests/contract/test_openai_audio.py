"""OpenAI's Python client sends recordings, and reads what is written down of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.audio import TranscriptionTextDoneEvent

from tests.support.audio_files import encoded, tone
from tests.support.http_rig import chunk, finished
from tests.support.served_http import served
from tests.support.speech_rig import SpeechRig

FILE = ("speech.flac", encoded(tone(2), kind="FLAC PCM_16"))


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_the_client_gets_texts_segments_and_streams() -> None:
    async with served(rig=SpeechRig()) as one, one.client() as client:

        async def sends(call: Any) -> Any:
            """The result of the client's call, which is answered."""
            sending = asyncio.create_task(call)
            (await one.rig.next_call()).tell(chunk(0, " Hello,"), chunk(7, " you."), finished())
            return await sending

        transcriptions = client.audio.transcriptions
        settings: dict[str, Any] = {"model": one.rig.card.name, "file": FILE, "language": "en"}
        plain = await sends(transcriptions.create(**settings, prompt="ab", temperature=0.5))
        assert plain.text == "Hello, you."
        verbose = await sends(
            transcriptions.create(
                **settings, response_format="verbose_json", timestamp_granularities=["segment"], stream=False
            )
        )
        assert (verbose.duration, verbose.language, verbose.usage.seconds) == (2.0, "en", 2)
        assert [(one.start, one.end, one.text) for one in verbose.segments] == [(0.0, 2.0, " Hello, you.")]
        srt = await sends(transcriptions.create(**settings, response_format="srt"))
        assert srt == "1\n00:00:00,000 --> 00:00:02,000\nHello, you.\n\n"
        events = [event async for event in await sends(transcriptions.create(**settings, stream=True))]
        assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
        done = TranscriptionTextDoneEvent.model_validate(events[-1].to_dict())
        assert done.text == "Hello, you."
        del settings["language"]
        translation = asyncio.create_task(client.audio.translations.create(**settings))
        (await one.rig.next_call()).tell(chunk(0, "\u0100"), finished())
        (await one.rig.next_call()).tell(chunk(0, " Hello."), finished())
        assert (await translation).text == "Hello."
