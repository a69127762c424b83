"""Fetches the images that a request names by URL, from the servers that the operator allows and from no others.

Whoever may send requests can make the router send one of its own to these servers. So a URL is compared with the
operator's list as the HTTP client reads it, redirects are not followed, proxies of the environment are not used, and
what is fetched is bounded in number, bytes and time.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx2

from baton.background import gather_all
from baton.errors import InvalidRequest, QueueFull
from router.http.bodies.content_parts import message_parts
from router.http.json_body import LargeBodies, LargeBody

FETCH_S = 10.0
"""How long all images of a request may take to arrive."""
_MAX_URL_CHARS = 2048
_MOST_AT_ONCE = 4
"""The most images of one request that are fetched at once."""
MAX_FETCHES = 32
"""The most requests whose images are fetched at once. One whose images come slowly gives way to one more."""
_DOTS = re.compile(rb"%2e|%2f|%5c|\\|//|/\.", re.IGNORECASE)
"""What in a path some servers read as a way to another folder."""
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")


@dataclass(frozen=True, slots=True)
class _Image:
    data: bytes
    media_type: str


@dataclass(slots=True)
class _Budget:
    """The bytes that a request's images may still have."""

    most_bytes: int
    places: Sequence[LargeBody]
    """Where the request waits among others, which hear of each byte."""
    used: int = 0

    def take(self, count: int) -> None:
        self.used += count
        if self.used > self.most_bytes:
            raise InvalidRequest("images", f"have more than {self.most_bytes} bytes together")
        for slot in self.places:
            slot.came(self.used)


class ImageFetcher:
    """Fetches images from URLs that begin with one of `prefixes`, which have a scheme, a host and a path.

    `most_images` and `most_bytes` (together, as they are sent) bound one request; `fetch_s`: seconds for all of them.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        most_images: int,
        most_bytes: int,
        fetch_s: float = FETCH_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefixes = [_with_slash(httpx2.URL(prefix)) for prefix in prefixes]
        self._most_images = most_images
        self._most_bytes = most_bytes
        self._fetch_s = fetch_s
        self._fetches = LargeBodies(now, most=MAX_FETCHES, kind="requests wait for images from URLs")
        # Loading the system's authorities takes 35 ms.
        self._tls = ssl.create_default_context()

    async def with_images(self, body: dict[str, Any], large: LargeBody) -> dict[str, Any]:
        """A body with images in place of the URLs in its messages; others than those on the list are left there.

        `large`: the body's place among the large ones, which it takes by the bytes of its images, too, so that URLs
        from which nothing comes keep nobody else from sending images. Raises InvalidRequest, and QueueFull if too many
        requests fetch images, or if this one waited too long while others needed its place.
        """
        texts = [text for part in message_parts(body) if (text := _url_of(part)) is not None]
        wanted = {text: url for text in texts if (url := self._allowed(text)) is not None}
        if not wanted:
            return body
        if len(texts) > self._most_images:
            raise InvalidRequest("images", f"are {len(texts)}; at most {self._most_images} are taken")
        with self._fetches.place() as fetch:
            fetch.take()
            fetched = dict(zip(wanted, await self._fetch_all(list(wanted.values()), [fetch, large]), strict=True))
        return await asyncio.to_thread(_with_images, body, fetched)

    async def _fetch_all(self, urls: Sequence[httpx2.URL], places: Sequence[LargeBody]) -> Sequence[_Image]:
        budget, turns = _Budget(self._most_bytes, places), asyncio.Semaphore(_MOST_AT_ONCE)
        given_up: list[bool] = []
        try:
            async with (
                asyncio.timeout(self._fetch_s) as due,
                httpx2.AsyncClient(verify=self._tls, trust_env=False, timeout=self._fetch_s) as client,
            ):

                def give_up() -> None:
                    given_up.append(True)
                    if not due.expired():
                        due.reschedule(asyncio.get_running_loop().time())

                with ExitStack() as arriving:
                    for place in places:
                        arriving.enter_context(place.arriving(give_up))
                    return await gather_all([self._fetch(client, url, budget, turns) for url in urls])
        except TimeoutError:
            if given_up:
                raise QueueFull("images came from their URLs too slowly while others waited") from None
            raise InvalidRequest("images", f"did not arrive from their URLs within {self._fetch_s:g} s") from None

    def _allowed(self, text: str) -> httpx2.URL | None:
        """The URL as it is to be fetched; None: it is not to be fetched."""
        if len(text) > _MAX_URL_CHARS or not text.startswith(("http://", "https://")):
            return None
        try:
            url = httpx2.URL(text)
        except (httpx2.InvalidURL, ValueError):
            return None
        path = url.raw_path.partition(b"?")[0]
        if url.userinfo or _DOTS.search(path):
            return None
        is_allowed = any(
            (url.scheme, url.host, url.port) == (prefix.scheme, prefix.host, prefix.port)
            and path.startswith(prefix.raw_path)
            for prefix in self._prefixes
        )
        return url if is_allowed else None

    async def _fetch(
        self, client: httpx2.AsyncClient, url: httpx2.URL, budget: _Budget, turns: asyncio.Semaphore
    ) -> _Image:
        named = f"{url.scheme}://{url.netloc.decode('latin-1')}{url.path}"[:200]
        try:
            # Compressed answers would be bounded by what they decompress to, which is not known.
            async with turns, client.stream("GET", url, headers={"accept-encoding": "identity"}) as answer:
                if answer.status_code != 200:
                    raise InvalidRequest("images", f"can't be had: {named} answered {answer.status_code}")
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise InvalidRequest("images", f"can't be had: {named} answered in another encoding")
                data = bytearray()
                async for piece in answer.aiter_raw():
                    budget.take(len(piece))
                    data += piece
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise InvalidRequest("images", f"can't be had: {named} failed ({type(error).__name__})") from None
        media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        return _Image(bytes(data), media_type if media_type in _MEDIA_TYPES else _MEDIA_TYPES[0])


def _with_slash(prefix: httpx2.URL) -> httpx2.URL:
    return prefix if prefix.path.endswith("/") else prefix.copy_with(path=f"{prefix.path}/")


def _url_of(part: dict[str, Any]) -> str | None:
    """The URL that a part has, if any. The part may be anything."""
    match part:
        case {"type": "image_url", "image_url": {"url": str() as url}}:
            return url
        case {"type": "image_url" | "input_image", "image_url": str() as url}:
            return url
        case {"type": "image", "source": {"type": "url", "url": str() as url, **more}} if not more:
            return url
    return None


def _with_images(body: dict[str, Any], images: Mapping[str, _Image]) -> dict[str, Any]:
    """The body with these images in place of their URLs. It may be anything."""

    def message_with(message: Any) -> Any:
        if not (isinstance(message, dict) and isinstance(content := message.get("content"), list)):
            return message
        return {**message, "content": [_with_image(part, images) for part in content]}

    lists = {name: value for name in ("messages", "input") if isinstance(value := body.get(name), list)}
    return {**body, **{name: list(map(message_with, messages)) for name, messages in lists.items()}}


def _with_image(part: Any, images: Mapping[str, _Image]) -> Any:
    image = images.get(_url_of(part) or "") if isinstance(part, dict) else None
    if image is None:
        return part
    media_type, data = image.media_type, base64.b64encode(image.data).decode()
    if part["type"] == "image":
        return {**part, "source": {"type": "base64", "media_type": media_type, "data": data}}
    holder, as_url = part["image_url"], f"data:{media_type};base64,{data}"
    return {**part, "image_url": as_url if isinstance(holder, str) else {**holder, "url": as_url}}
