"""Parts of a recording begin anew when the version of the model that began them is gone."""

from __future__ import annotations

from dataclasses import replace

from baton.errors import VersionGone
from baton.messages.generation import Chunk
from tests.support.audio_files import encoded, tone
from tests.support.http_rig import chunk, finished
from tests.support.speech_rig import SpeechRig

SPEECH = encoded(tone(1))
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
