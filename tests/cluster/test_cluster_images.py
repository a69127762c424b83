"""Prompts with images through router, prefill node, NIXL and decode node, over HTTP and gRPC and after a lost node."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import torch

from baton.errors import InvalidRequest
from baton.messages.generation import GenerateRequest
from baton.model_formats.images import image_family
from baton.runner.images import ImageProcessor
from baton.runner.loading import load_runner
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from baton.text.tokenizer import Tokenizer
from tests.support.caller import TokenCount
from tests.support.image_models import add_image_tokens, random_image, write_image_model
from tests.support.image_server import image_server
from tests.support.mini_cluster import BOTH_KINDS, mini_cluster

pytestmark = pytest.mark.one_transport

NUM_TOKENS = 12
PLACEHOLDERS = {"idefics3": "<image>", "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>"}
"""What stands for an image in the text of a prompt."""
SIZES = {"a": (90, 60), "b": (40, 73)}
IMAGES = {name: random_image(seed, *size) for seed, (name, size) in enumerate(SIZES.items())}


def chat(*parts: str | bytes) -> list[dict[str, Any]]:
    """Messages with these texts and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(part).decode()}"}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def generate_with_transformers(directory: Path, parts: Sequence[str | bytes]) -> list[int]:
    """The greedy tokens of transformers for a chat of these parts."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    processor, tokenizer, family = ImageProcessor(directory), Tokenizer.load(directory), image_family(directory)
    assert family is not None
    text, made = "", []
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        made.append(processor.pixels(part))
        (size,) = [size for name, size in SIZES.items() if IMAGES[name] == part]
        layout = family.layout(*size)
        text += layout.text if layout.grid is None else f"<|vision_start|>{layout.text}<|vision_end|>"
    ids = torch.tensor([tokenizer.encode_rendered(text)])
    axis = 0 if "image_grid_thw" in made[0] else 1
    given: dict[str, Any] = {
        name: torch.cat([torch.from_numpy(each[name]) for each in made], dim=axis) for name in made[0]
    }
    if axis == 0:
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **given,
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


async def check_responses(client: openai.AsyncOpenAI, model: str, image: bytes) -> None:
    """A response about an image has the text of the same chat, also when it is continued from the stored one."""

    async def text_of_chat(messages: list[dict[str, Any]]) -> str:
        answer = await client.chat.completions.create(
            model=model, messages=cast(Any, messages), temperature=0, max_tokens=4
        )
        return answer.choices[0].message.content or ""

    (asked,) = chat("What is this? ", image)
    url = asked["content"][1]["image_url"]["url"]
    parts = [{"type": "input_text", "text": "What is this? "}, {"type": "input_image", "image_url": url}]
    first = await client.responses.create(
        model=model, input=cast(Any, [{"role": "user", "content": parts}]), temperature=0, max_output_tokens=4
    )
    assert first.output_text == await text_of_chat([asked])
    more = await client.responses.create(
        model=model, input="Sure?", previous_response_id=first.id, temperature=0, max_output_tokens=4
    )
    answered = {"role": "assistant", "content": first.output_text}
    assert more.output_text == await text_of_chat([asked, answered, {"role": "user", "content": "Sure?"}])
    for include, expected in ([], None), (["message.input_image.image_url"], url):
        listed = await client.responses.input_items.list(more.id, include=cast(Any, include), order="asc")
        (_, shown), *_ = (cast(Any, item).content for item in listed.data)
        assert (shown.type, shown.image_url) == ("input_image", expected)
    pair = [*parts, *[parts[1]] * 8]
    with pytest.raises(openai.BadRequestError, match="input: are 10; at most 8"):
        await client.responses.create(
            model=model, input=cast(Any, [{"role": "user", "content": pair}]), previous_response_id=first.id
        )


async def check_urls(client: openai.AsyncOpenAI, model: str, image: bytes, url: str) -> None:
    """A chat and a response about an image that the router fetches have the texts of the same image in the request."""
    (asked,) = chat("What is this? ", image)
    text, part = asked["content"]
    by_url = {"role": "user", "content": [text, part | {"image_url": {"url": url}}]}
    texts = [
        (await client.chat.completions.create(model=model, messages=cast(Any, [message]), temperature=0, max_tokens=4))
        .choices[0]
        .message.content
        for message in (asked, by_url)
    ]
    parts = [{"type": "input_text", "text": text["text"]}, {"type": "input_image", "image_url": url}]
    response = await client.responses.create(
        model=model, input=cast(Any, [{"role": "user", "content": parts}]), temperature=0, max_output_tokens=4
    )
    assert texts == [response.output_text] * 2


@pytest.mark.parametrize("name", ["idefics3", "qwen2_vl"])
async def test_chats_with_images_have_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    write_image_model(tmp_path, name)
    add_image_tokens(tmp_path)
    template = (
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
        f"{PLACEHOLDERS[name]}{{% endif %}}{{% endfor %}}{{% endfor %}}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)

    runners: dict[str, TorchModelRunner] = {}

    def make_runner(node_id: str) -> TorchModelRunner:
        runners[node_id] = load_runner(TorchSpec(tmp_path, dtype="float32", block_size=16, num_blocks=160))
        return runners[node_id]

    a, b = IMAGES.values()
    chats: dict[str, Sequence[str | bytes]] = {
        "one": ["What is this? ", a],
        "two": [a, " and ", b, " differ in"],
        "first": [b, "!"],
    }
    expected = {each: generate_with_transformers(tmp_path, parts) for each, parts in chats.items()}
    async with (
        image_server({"/open/a": a}) as (served, base),
        mini_cluster(
            make_runner,
            tmp_path,
            decode=2,
            router_settings={**BOTH_KINDS, "image_urls": f"{base}/open/"},
            max_num_batched_tokens=24,
        ) as cluster,
        openai.AsyncOpenAI(base_url=f"http://{cluster.router.http}/v1", api_key="any") as client,
    ):
        (card,) = (await client.models.list()).data
        assert card.model_extra is not None
        assert "image" in card.model_extra["capabilities"]

        async def tokens_of(parts: Sequence[str | bytes]) -> list[int]:
            answer = await client.chat.completions.create(
                model=card.id,
                messages=cast(Any, chat(*parts)),
                temperature=0,
                max_tokens=NUM_TOKENS,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            assert answer.choices[0].model_extra is not None
            tokens: list[int] = answer.choices[0].model_extra["token_ids"]
            return tokens

        found = await asyncio.gather(*map(tokens_of, chats.values()))
        assert dict(zip(chats, found, strict=True)) == expected
        # Of three chats with two images the prefill node encoded two, and then none.
        counts = [cluster.nodes[node].node.scheduler.encoder_cache.num_encoded for node in cluster.nodes]
        assert sorted(counts) == [0, 0, 2]
        assert await tokens_of(["Other text ", a]) != expected["one"]
        assert sorted(cluster.nodes[node].node.scheduler.encoder_cache.num_encoded for node in cluster.nodes) == [
            0,
            0,
            2,
        ]

        await check_responses(client, card.id, a)
        await check_urls(client, card.id, a, f"{base}/open/a")
        assert served.requested == ["/open/a"] * 2

        for content, reason in (
            ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "not fetched"),
            ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "can't be used"),
            ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}], "not base64"),
            ([{"type": "text", "text": "<image><|image_pad|>"}, chat(a)[0]["content"][0]], "2 times"),
        ):
            with pytest.raises(openai.BadRequestError, match=reason):
                await client.chat.completions.create(
                    model=card.id, messages=cast(Any, [{"role": "user", "content": content}])
                )

        prompt = f"What is this? {PLACEHOLDERS[name]}"
        request = GenerateRequest(
            prompt, request_id="lost", images=[a], temperature=0.0, max_tokens=200, ignore_eos=True
        )
        with pytest.raises(InvalidRequest, match="images: are 2, and the prompt has"):
            await cluster.generate(GenerateRequest(prompt, images=[a, b]))
        count = TokenCount()
        answering = asyncio.create_task(cluster.generate(request, on_event=count))
        await count.wait_for_tokens(4)
        (used,) = [node for node in ("decode-0", "decode-1") if cluster.nodes[node].node.scheduler.requests]
        await cluster.nodes[used].end()
        answer = await answering
        assert answer.token_ids[:NUM_TOKENS] == expected["one"]
        assert answer.end.path.attempts == 2
        undisturbed = await cluster.generate(
            GenerateRequest(prompt, request_id="again", images=[a], temperature=0.0, max_tokens=200, ignore_eos=True)
        )
        assert answer.token_ids == undisturbed.token_ids
        await cluster.wait_until_idle(*(node for node in cluster.nodes if node != used))
