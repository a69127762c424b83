"""Models with an encoder and a decoder through router, prefill node, NIXL and decode node, and after a lost node."""

from __future__ import annotations

import asyncio
import io
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.runner.encoder_decoder.loading import load_encoder_decoder
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from baton.text.tokenizer import Tokenizer
from tests.oracle.test_encoder_decoder_exact import NEW_TOKENS, PENALTY, Input, generate_with_transformers
from tests.support.caller import TokenCount
from tests.support.encoder_decoder_models import source, write_encoder_decoder
from tests.support.mini_cluster import BOTH_KINDS, mini_cluster

pytestmark = pytest.mark.one_transport

GREEDY = GenerateRequest(
    None, temperature=0.0, max_tokens=NEW_TOKENS, repetition_penalty=PENALTY, ignore_eos=True, min_tokens=NEW_TOKENS
)
BEGINS = {"bart": [2], "t5": [2], "whisper": [3]}


def request_for(given: Input, is_speech: bool) -> GenerateRequest:
    """The request of a client with this input."""
    if is_speech:
        return replace(GREEDY, prompt=list(given.tokens), audio=given.source)
    return replace(GREEDY, prompt=np.frombuffer(given.source, "<u4").tolist())


@pytest.mark.parametrize("name", BEGINS)
async def test_inputs_are_encoded_once_and_survive_a_lost_node(tmp_path: Path, name: str) -> None:
    write_encoder_decoder(tmp_path, name)
    is_speech = name == "whisper"
    inputs = {f"p{seed}": Input(source(tmp_path, seed, 5 + 70 * seed), BEGINS[name]) for seed in range(3)}
    if is_speech:
        inputs["p2"] = Input(inputs["p2"].source, [3, 40, 41, 42])
    expected = generate_with_transformers(tmp_path, inputs)

    def make_runner(node: str) -> TorchModelRunner:
        return load_encoder_decoder(TorchSpec(tmp_path, dtype="float32", num_blocks=96, name="tiny"))

    async with mini_cluster(
        make_runner, tmp_path, decode=2, router_settings=BOTH_KINDS, max_num_batched_tokens=48
    ) as cluster:

        def num_encoded() -> list[int]:
            return sorted(cluster.nodes[node].node.scheduler.encoder_cache.num_encoded for node in cluster.nodes)

        requests = {key: request_for(given, is_speech) for key, given in inputs.items()}
        answers = await asyncio.gather(*map(cluster.generate, requests.values()))
        assert {key: list(answer.token_ids) for key, answer in zip(requests, answers, strict=True)} == expected
        # The prefill node encoded each input; decode nodes read keys and values, and encode nothing.
        assert num_encoded() == [0, 0, 3]
        again = await cluster.generate(requests["p1"])
        assert list(again.token_ids) == expected["p1"]
        assert num_encoded() == [0, 0, 3]

        wrong = [
            (replace(requests["p0"], images=[b"x"]), "can't do image"),
            (replace(requests["p0"], max_tokens=160, min_tokens=0), "max_tokens: is 160, but the prompt leaves"),
            (replace(requests["p0"], prompt_logprobs=1), "prompt_logprobs"),
        ]
        if is_speech:
            wrong += [
                (replace(GREEDY, prompt=[3]), "audio: is missing"),
                (replace(requests["p0"], audio=b"123"), "audio: has 3 bytes: 16-bit samples"),
                (replace(requests["p0"], audio=bytes(960_002)), "audio: has 960002 bytes"),
            ]
        else:
            wrong += [
                (replace(requests["p0"], audio=b"12"), "can't do transcribe"),
                (replace(GREEDY, prompt=[5] * 161), "prompt: has 161 tokens"),
            ]
        for request, reason in wrong:
            with pytest.raises(InvalidRequest, match=reason):
                await cluster.generate(request)

        count = TokenCount()
        longer = replace(requests["p2"], request_id="lost", max_tokens=50, min_tokens=50)
        answering = asyncio.create_task(cluster.generate(longer, on_event=count))
        await count.wait_for_tokens(4)
        (used,) = [node for node in ("decode-0", "decode-1") if cluster.nodes[node].node.scheduler.requests]
        await cluster.nodes[used].end()
        answer = await answering
        assert list(answer.token_ids[:NEW_TOKENS]) == expected["p2"]
        assert answer.end.path.attempts == 2
        undisturbed = await cluster.generate(replace(longer, request_id="again"))
        assert answer.token_ids == undisturbed.token_ids
        await cluster.wait_until_idle(*(node for node in cluster.nodes if node != used))


def wav(samples: bytes) -> bytes:
    """A file of 16-bit samples at 16 kHz."""
    with io.BytesIO() as file:
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(16_000)
            writer.writeframes(samples)
        return file.getvalue()


async def test_openais_client_gets_what_transformers_writes_down(tmp_path: Path) -> None:
    write_encoder_decoder(tmp_path, "whisper")
    spoken = source(tmp_path, 3)
    begins = {"en": [240, 241, 243, 245], "translated": [240, 242, 244, 245]}
    inputs = {key: Input(spoken, begin) for key, begin in begins.items()}
    tokens = generate_with_transformers(tmp_path, inputs, new_tokens=56, penalty=1.0)
    tokenizer = Tokenizer.load(tmp_path)
    expected = {key: tokenizer.decode(ids).strip() for key, ids in tokens.items()}
    assert expected["en"] != expected["translated"]

    def make_runner(node: str) -> TorchModelRunner:
        return load_encoder_decoder(TorchSpec(tmp_path, dtype="float32", num_blocks=96, name="tiny"))

    async with (
        mini_cluster(make_runner, tmp_path, router_settings=BOTH_KINDS) as cluster,
        openai.AsyncOpenAI(base_url=f"http://{cluster.router.http}/v1", api_key="any") as client,
    ):
        (card,) = (await client.models.list()).data
        assert card.model_extra is not None
        assert card.model_extra["capabilities"] == ["transcribe", "align"]
        file = ("speech.wav", wav(spoken))
        answer = await client.audio.transcriptions.create(file=file, model="tiny", language="en", temperature=0)
        assert answer.text == expected["en"]
        translated = await client.audio.translations.create(
            file=file, model="tiny", temperature=0, extra_body={"language": "de"}
        )
        assert translated.text == expected["translated"]
        found = await client.audio.transcriptions.create(
            file=file, model="tiny", response_format="verbose_json", temperature=0
        )
        assert found.language in ("en", "de", "english", "german")
        assert [(segment.start, segment.end) for segment in found.segments or ()] == [(0, 1)]
        timed = await client.audio.transcriptions.create(
            file=file,
            model="tiny",
            language="en",
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
            temperature=0,
        )
        assert timed.text == expected["en"]
        words = timed.words or []
        assert "".join(word.word for word in words).split() == "".join(timed.text.split()).split()
        times = [time for word in words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= 1
        deltas = [
            each.delta
            async for each in await client.audio.transcriptions.create(
                file=file, model="tiny", language="en", temperature=0, stream=True
            )
            if each.type == "transcript.text.delta"
        ]
        assert "".join(deltas).strip() == expected["en"]
        with pytest.raises(openai.BadRequestError, match="can't be used"):
            await client.audio.transcriptions.create(file=("x.wav", b"no audio"), model="tiny")
        with pytest.raises(openai.BadRequestError, match="audio: is missing"):
            await client.completions.create(model="tiny", prompt="Hello")
        await cluster.wait_until_idle(*cluster.nodes)
