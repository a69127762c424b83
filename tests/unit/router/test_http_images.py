"""Images in chats over HTTP: their parts, their bounds, and models that take none."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest, UnsupportedRequest
from baton.messages.generation import ModelCard
from baton.messages.node_model import GENERATES, Capability
from baton.messages.spans import PLACEHOLDER, EncoderContent
from baton.model_formats.images import ImageLimits
from baton.text.prompts import ImagePrompts
from router.admission.prompt_inputs import ImageRules, check_takes_images
from router.http.bodies.content_parts import ImagePart, content_of
from router.http.bodies.fields import read_as
from router.http.messages.bodies import CountBody
from tests.support.image_models import IMAGE_TOKEN_ID, random_image, write_image_model

PNG = random_image(1, 8, 8)
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
LIMITS = ImageLimits(1 << 20, 1 << 20)


def image_url(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ("hi", "hi"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": "a"}, image_url(URL)], ("a", ImagePart(PNG, "image/png"))),
        ([image_url(URL, detail="low"), image_url(URL)], (ImagePart(PNG, "image/png"), ImagePart(PNG, "image/png"))),
        ([{"type": "image_url", "image_url": URL}], (ImagePart(PNG, "image/png"),)),
    ],
)
def test_the_content_of_a_message_is_a_text_or_parts(content: Any, expected: Any) -> None:
    assert content_of(content) == expected


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (image_url("https://example.org/cat.png"), "not fetched from elsewhere"),
        (image_url("file:///etc/passwd"), "not fetched from elsewhere"),
        (image_url("data:text/plain;base64,aGk="), "not fetched from elsewhere"),
        (image_url("data:image/png,rows"), "base64"),
        (image_url("data:image/" + "x" * 99 + ";base64,aGk="), "base64"),
        (image_url("data:image/png;base64,%%%"), "not base64"),
        (image_url(URL, detail="most"), "detail"),
        (image_url(URL, width=3), "image_url must be"),
        (image_url(3), "image_url must be"),
        ({"type": "image_url"}, "part 0: image_url: is required"),
        ({"type": "image_url", "image_url": None}, "image_url must be"),
        ({"type": "input_audio", "input_audio": {}}, "part 0 must be"),
        (1, "part 0 must be"),
    ],
)
def test_other_parts_are_refused_with_their_place(part: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        content_of([part])


@pytest.fixture(params=["idefics3", "qwen2_vl"])
def prompts(request: pytest.FixtureRequest, tmp_path: Path) -> ImagePrompts:
    write_image_model(tmp_path, request.param)
    found = ImagePrompts.load(tmp_path)
    assert found is not None
    return found


def test_spans_lie_where_the_prompt_has_image_tokens(prompts: ImagePrompts) -> None:
    images = prompts.read([random_image(1, 90, 40), random_image(2, 20, 20)], LIMITS)
    ids: list[int] = [1, 2]
    for image in images:
        rows = image.layout.num_rows
        ids += [3, *[IMAGE_TOKEN_ID] * rows, 4]
    found, spans = prompts.with_spans(ids, images)
    assert [token for token in found if token in (1, 2, 3, 4)] == [1, 2, 3, 4, 3, 4]
    assert found.count(PLACEHOLDER) == sum(span.length for span in spans) == len(ids) - 6
    assert [span.digest for span in spans] == [image.content.digest for image in images]
    grids = [None if not span.columns else (span.length // span.columns, span.columns) for span in spans]
    assert grids == [image.layout.grid for image in images]


def test_prompts_with_other_image_tokens_than_their_images_are_refused(prompts: ImagePrompts) -> None:
    (image,) = images = prompts.read([random_image(1, 20, 20)], LIMITS)
    with pytest.raises(InvalidRequest, match=f"have {image.layout.num_rows} rows, and the prompt has .* 0 times"):
        prompts.with_spans([1, 2], images)
    with pytest.raises(InvalidRequest, match=r"images: are 1, and the prompt has .* 0 times"):
        prompts.expanded("no image", images)
    with pytest.raises(InvalidRequest, match="images: number 1 can't be used"):
        prompts.read([random_image(1, 20, 20), b"x"], LIMITS)


def test_bounds_of_a_request(prompts: ImagePrompts) -> None:
    rules = ImageRules(prompts, most_images=2, most_bytes=2 * len(PNG), most_pixels=64)
    assert len(rules.read([PNG, PNG])) == 2
    with pytest.raises(InvalidRequest, match="are 3; at most 2"):
        rules.read([PNG, PNG, PNG])
    with pytest.raises(InvalidRequest, match="bytes; at most"):
        rules.read([PNG, PNG + b"x"])
    with pytest.raises(InvalidRequest, match="8 x 9 pixels; at most 64"):
        rules.read([random_image(1, 8, 9)])


def test_a_model_without_images_refuses_them_by_name(prompts: ImagePrompts) -> None:
    card = ModelCard("m", 100, 256, capabilities=GENERATES)
    rules = ImageRules(prompts, 8, 1 << 20, 1 << 20)
    for found in (None, rules):
        with pytest.raises(
            UnsupportedRequest, match="can't do image; it can generate: it is served for its text alone"
        ):
            check_takes_images(card, found)
    able = ModelCard("m", 100, 256, capabilities=GENERATES | {Capability.IMAGE})
    assert check_takes_images(able, rules) is rules


def test_an_image_is_named_by_its_content() -> None:
    assert EncoderContent.of(b"a") == EncoderContent.of(b"a")
    assert EncoderContent.of(b"a").digest != EncoderContent.of(b"b").digest
    assert EncoderContent.of(b"a").without_data() == EncoderContent(EncoderContent.of(b"a").digest)


def test_images_in_messages_of_anthropic_are_parts_of_the_conversation() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "42"}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    image = {"type": "image", "source": source}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, image]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, image, {"type": "text", "text": "c"}]},
    ]
    body = read_as(CountBody, {"model": "m", "messages": turns})
    assert body.images == [PNG, PNG]
    first, _, tool, last = body.conversation()
    assert first["content"] == [{"type": "text", "text": "a\nb"}, {"type": "image"}]
    assert tool["content"] == "42"
    assert last["content"] == [{"type": "image"}, {"type": "text", "text": "c"}]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"type": "url", "url": "https://example.org/a.png"}, "source"),
        ({"type": "base64", "media_type": "image/tiff", "data": ""}, "media_type"),
        ({"type": "base64", "media_type": "image/png", "data": "%"}, "not base64"),
        ({"type": "base64", "media_type": "image/png", "data": 1}, "must be a string"),
        (None, "source"),
    ],
)
def test_other_sources_are_refused(source: Any, reason: str) -> None:
    turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(InvalidRequest, match=reason):
        read_as(CountBody, {"model": "m", "messages": turns})


def test_only_users_send_images() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    turns = [{"role": "assistant", "content": [image]}]
    with pytest.raises(InvalidRequest, match="no message of the role assistant"):
        read_as(CountBody, {"model": "m", "messages": turns})
