"""The HTTP front of a model that writes down speech, and forms with files (multipart/form-data, RFC 7578)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.messages.node_model import GENERATES, Capability
from baton.model_formats.audio import AudioLimits
from baton.text.prompts import SpeechPrompts
from router.http.audio.endpoint import SpeechRules
from tests.doubles.fake_handler import FakeCall
from tests.support.http_client import Exchange
from tests.support.http_rig import CARD, HttpRig, chunk, finished

BOUNDARY = "----limit"
FORM_TYPE = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
PROMPTS = SpeechPrompts(
    start=250,
    no_timestamps=251,
    transcribe=252,
    translate=253,
    previous=254,
    languages={"en": 255, "de": 256},
    suppressed=(1, 2),
    special=frozenset(range(250, 260)),
    max_length=48,
    aligns=True,
)
ENGLISH = replace(PROMPTS, languages={}, transcribe=None, translate=None)
LIMITS = AudioLimits(4 << 20, 100)
ABLE = replace(CARD, capabilities=GENERATES | {Capability.TRANSCRIBE, Capability.ALIGN})
TRANSCRIBE = "/v1/audio/transcriptions"


def part(name: str, value: bytes, file_name: str | None = None) -> bytes:
    """One part of a form, with the boundary before it."""
    more = "" if file_name is None else f'; filename="{file_name}"\r\ncontent-type: application/octet-stream'
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def form(file: bytes | None, fields: Mapping[str, str] | None = None, end: str = f"--{BOUNDARY}--\r\n") -> bytes:
    """A form with a file and fields."""
    parts = [part(name, value.encode()) for name, value in (fields or {}).items()]
    parts += [] if file is None else [part("file", file, "speech.wav")]
    return b"".join(parts) + end.encode()


class SpeechRig(HttpRig):
    """A front that takes audio, and answers to the requests that it makes of it."""

    def __init__(self, prompts: SpeechPrompts = PROMPTS, limits: AudioLimits = LIMITS, **more: Any) -> None:
        super().__init__(card=ABLE, speech=SpeechRules(prompts, limits, **more))

    def send(
        self, file: bytes | None, path: str = TRANSCRIBE, headers: Mapping[str, str] | None = None, **fields: str
    ) -> Exchange:
        fields = {name.replace("__", "[]"): value for name, value in fields.items()}
        return self.request("POST", path, form(file, fields), {**FORM_TYPE, **(headers or {})})

    async def transcribed(self, exchange: Exchange, *texts: str) -> Sequence[FakeCall]:
        """Answer one request for each text, and wait for the answer to the client."""
        calls = []
        for text in texts:
            calls.append(call := await self.next_call())
            call.tell(chunk(0, text), finished())
        await exchange.end()
        return calls
