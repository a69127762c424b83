"""Images that a request names by URL: which are fetched, what is bounded, and what stays as it was."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from baton.config.router import RouterSettings
from baton.errors import InvalidRequest, QueueFull
from router.http.bodies.content_parts import content_of
from router.http.bodies.fields import read_as
from router.http.image_urls import MAX_FETCHES, ImageFetcher
from router.http.json_body import MAX_BODY_BYTES, LargeBodies, LargeBody
from router.http.messages.bodies import CountBody
from tests.support.image_server import ImageServer, image_server

IMAGES = {"/open/a.png": b"a" * 100, "/open/b": b"b" * 200_000, "/open/b?size=1": b"c"}


@pytest.fixture
async def server() -> AsyncIterator[tuple[ImageServer, str]]:
    async with image_server(IMAGES) as found:
        yield found


def place() -> LargeBody:
    """The place of a body that is alone."""
    return LargeBody(LargeBodies())


def chat(*urls: str) -> dict[str, Any]:
    """A body with these images."""
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, *parts]}]}


def images_in_chat(found: Mapping[str, Any]) -> list[bytes]:
    """The images that a chat has, once all of them are there."""
    content = content_of(found["messages"][0]["content"])
    return [part.data for part in content if not isinstance(part, str)]


async def test_images_of_allowed_servers_take_the_places_of_their_urls(server: tuple[ImageServer, str]) -> None:
    served, base = server
    found = chat(f"{base}/open/a.png", f"{base}/open/b?size=1", f"{base}/open/a.png")
    sent = repr(found)
    made = await ImageFetcher([f"{base}/open"], 3, 1 << 20).with_images(found, place())
    assert repr(found) == sent
    assert images_in_chat(made) == [IMAGES["/open/a.png"], b"c", IMAGES["/open/a.png"]]
    assert sorted(served.requested) == ["/open/a.png", "/open/b?size=1"], "a URL is fetched once"
    assert all(b"accept-encoding: identity" in head.lower() for head in served.heads)


async def test_images_of_all_apis_are_fetched(server: tuple[ImageServer, str]) -> None:
    _, base = server
    fetcher = ImageFetcher([f"{base}/"], 3, 1 << 20)
    url = f"{base}/open/a.png"
    source: dict[str, Any] = {"type": "url", "url": f"{base}/open/b"}
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    made = await fetcher.with_images(body, place())
    assert made["messages"][0]["content"][0]["source"]["media_type"] == "image/gif"
    assert read_as(CountBody, made).images == [IMAGES["/open/b"]]
    expected = f"data:image/png;base64,{base64.b64encode(IMAGES['/open/a.png']).decode()}"
    for kind in ("image_url", "input_image"):
        part = {"type": kind, "image_url": url}
        made = await fetcher.with_images({"input": [{"role": "user", "content": [part]}]}, place())
        assert made["input"][0]["content"][0] == {"type": kind, "image_url": expected}


async def test_no_other_server_and_no_other_folder_is_asked(server: tuple[ImageServer, str]) -> None:
    served, base = server
    port = base.rpartition(":")[2]
    urls = [
        f"{base}/other/a.png",
        f"{base}/openly/a.png",
        f"{base}/open",
        f"{base}/open/../other/a.png",
        f"{base}/open/%2e%2e/other/a.png",
        f"{base}/open/..%2fother/a.png",
        f"{base}/open/.hidden",
        f"{base}/open//a.png",
        f"{base}/open/..\\other",
        f"http://user@127.0.0.1:{port}/open/a.png",
        f"http://127.0.0.1:{port}@localhost/open/a.png",
        f"http://localhost:{port}/open/a.png",
        f"https://127.0.0.1:{port}/open/a.png",
        "http://127.0.0.1:1/open/a.png",
        f"HTTP://127.0.0.1:{port}/open/a.png",
        f"{base}/open/{'a' * 2048}",
        "http://[::1/open/a.png",
        "http://\ud800/",
        "file:///etc/passwd",
        "",
    ]
    before = chat(*urls)
    found = chat(*urls)
    found = await ImageFetcher([f"{base}/open"], 99, 1 << 20).with_images(found, place())
    assert (found, served.requested) == (before, [])
    for url in urls:
        with pytest.raises(ValueError, match="not fetched from elsewhere"):
            content_of(chat(url)["messages"][0]["content"])


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("missing", "/open/missing answered 404"),
        ("moved", "answered 302"),
        ("zipped", "another encoding"),
        ("cut", "failed"),
        ("endless", "have more than 300000 bytes together"),
        ("hang", "did not arrive from their URLs within 0.2 s"),
    ],
)
async def test_what_servers_do_wrong_is_told(server: tuple[ImageServer, str], path: str, reason: str) -> None:
    _, base = server
    found = chat(f"{base}/open/a.png", f"{base}/open/{path}")
    with pytest.raises(InvalidRequest, match=reason):
        await ImageFetcher([f"{base}/open"], 8, 300_000, fetch_s=0.2).with_images(found, place())


async def test_images_are_bounded_in_number_and_together(server: tuple[ImageServer, str]) -> None:
    served, base = server
    urls = [f"{base}/open/a.png?{n}" for n in range(3)]
    with pytest.raises(InvalidRequest, match="images: are 3; at most 2 are taken"):
        await ImageFetcher([base], 2, 1 << 20).with_images(chat(*urls), place())
    assert served.requested == []
    with pytest.raises(InvalidRequest, match="more than 200050 bytes together"):
        await ImageFetcher([base], 8, 200_050).with_images(chat(f"{base}/open/a.png", f"{base}/open/b"), place())


async def test_urls_from_which_nothing_comes_keep_no_place_from_others(server: tuple[ImageServer, str]) -> None:
    served, base = server
    now = [0.0]
    bodies = LargeBodies(lambda: now[0])
    fetcher = ImageFetcher([base], 2, 1 << 20, now=lambda: now[0])

    async def fetch(path: str) -> None:
        with bodies.place() as own:
            await fetcher.with_images(chat(f"{base}/open/{path}"), own)

    slow = [asyncio.create_task(fetch(f"hang?{number}")) for number in range(MAX_FETCHES)]
    await served.wait_until_requested(MAX_FETCHES)
    assert bodies.num_open == 0, "bytes take a place, URLs don't"
    with pytest.raises(QueueFull, match=f"{MAX_FETCHES} requests wait for images from URLs"):
        await fetch("a.png")
    now[0] = 5.1
    await fetch("a.png")
    with pytest.raises(QueueFull, match="too slowly while others waited"):
        await slow[0]
    for task in slow[1:]:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await asyncio.gather(*(fetch("a.png") for _ in range(MAX_FETCHES)))


async def test_large_images_take_a_place_among_large_bodies(server: tuple[ImageServer, str]) -> None:
    served, base = server
    served.images["/open/large"] = bytes(MAX_BODY_BYTES + 1)
    bodies = LargeBodies(most=1)
    fetcher = ImageFetcher([base], 2, 2 << 20)
    with bodies.place() as first:
        await fetcher.with_images(chat(f"{base}/open/large"), first)
        with bodies.place() as second, pytest.raises(QueueFull, match="1 bodies above"):
            await fetcher.with_images(chat(f"{base}/open/large"), second)


async def test_a_server_that_is_not_there_is_told() -> None:
    listener = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    base = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    listener.close()
    await listener.wait_closed()
    with pytest.raises(InvalidRequest, match=r"failed \(ConnectError\)"):
        await ImageFetcher([base], 8, 1 << 20).with_images(chat(f"{base}/a"), place())


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"messages": 1, "input": "x"},
        {"messages": [1, {}, {"content": 1}, {"content": [1, {"type": "image_url"}]}]},
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": 1}}, {"type": "image", "source": 1}]}]},
    ],
)
async def test_bodies_of_any_shape_are_left_alone(found: dict[str, Any]) -> None:
    before = repr(found)
    assert repr(await ImageFetcher(["http://127.0.0.1:1"], 8, 1).with_images(found, place())) == before
    assert repr(found) == before


@pytest.mark.parametrize("prefix", ["images.example.org", "ftp://x/", "https://x/?a", "https://u@x/", "https://X/"])
def test_prefixes_are_checked(prefix: str) -> None:
    with pytest.raises(ValueError, match="must be a URL such as"):
        RouterSettings.model_validate({"image_urls": f"https://ok.example.org/,{prefix}"})
