"""The load of a soak run: clients of several tenants, over gRPC and HTTP, some of which misbehave.

Requests are taken from a fixed set whose tokens are known from an undisturbed run, so all tokens can be checked, also
those of a stream that its client ends early. Half of the requests have a unique cache salt: their prompts are not
cached, so that all prefix caches evict blocks.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from baton.client import AsyncGenerationClient
from baton.errors import BatonError, Cancelled, InvalidRequest, QuotaExceeded, RequestNotFound, Unreachable
from baton.messages.generation import Chunk, GenerateRequest
from baton.messages.ids import new_request_id
from baton.security.access import Access

NUM_REQUESTS = 24
MAX_PROMPT = 400
OWN_SALT_SHARE = 0.5
"""Share of requests with a unique cache salt, whose prompts are in no cache."""
ANSWER_S = 60.0
"""An answer that takes longer is lost, even if router and nodes were killed meanwhile."""
RETRY_S = 20.0
"""Time for which an HTTP client tries to find a router that continues its stream."""
AT_ONCE = 4
_RETRY_PAUSE_S = 0.3
_UNREACHABLE_PAUSE_S = 2.0
_SLOW_PAUSE_S = 0.25
"""Longest pause of a slow reader after each event."""
_SMALL_BUFFER = 4096
"""Receive buffer of a slow reader; it is small, so that the rest of the stream waits at the router."""
_MAX_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. Requests of a tenant with a quota may be refused, which is not a failure."""

    name: str
    api_key: str
    has_quota: bool


@dataclass(frozen=True, slots=True)
class Routers:
    """Addresses of a cluster's routers; a restarted router keeps its ports."""

    grpc: Sequence[str]
    http: Sequence[str]


@dataclass(slots=True)
class ClientResults:
    """What the clients of one cluster received."""

    ended: Counter[str] = field(default_factory=Counter)
    """Ended requests by kind of client."""
    tokens: int = 0
    retried: int = 0
    """HTTP streams that continued at another router, and requests that were sent again since no router was reached."""
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The counts as a JSON object."""
        return {
            "ended": dict(self.ended),
            "tokens": self.tokens,
            "retried": self.retried,
            "wrong": self.wrong,
            "lost": self.lost,
        }


def requests(rng: Random, vocab_size: int) -> list[GenerateRequest]:
    """Makes greedy and sampled requests; half of them have a common prefix."""
    prefix = [rng.randrange(2, vocab_size) for _ in range(MAX_PROMPT // 2)]
    made = []
    for number in range(NUM_REQUESTS):
        own = [rng.randrange(2, vocab_size) for _ in range(rng.randint(4, MAX_PROMPT // 2))]
        made.append(
            GenerateRequest(
                prefix + own if number % 2 else own,
                temperature=0.0 if number % 3 == 0 else 1.0,
                seed=rng.getrandbits(50),
                max_tokens=rng.randint(8, 80),
                ignore_eos=True,
            )
        )
    return made


class SoakLoad:
    """The clients of one cluster. `run` sends requests until `pause`; when it returns, all have ended."""

    def __init__(self, routers: Routers, tenants: Sequence[Tenant], vocab_size: int, rng: Random) -> None:
        self._routers = routers
        self._tenants = tenants
        self._rng = rng
        self._requests = requests(rng, vocab_size)
        self._expected: list[list[int]] = []
        self._over = asyncio.Event()
        self.results = ClientResults()

    async def record_expected_tokens(self) -> None:
        """Sends each request once, before anything disturbs it, and keeps its tokens."""
        async with self._client(next(tenant for tenant in self._tenants if not tenant.has_quota)) as client:
            for request in self._requests:
                self._expected.append([token async for token in _tokens(client, request)])

    def pause(self) -> None:
        """Lets open requests end and sends no new ones."""
        self._over.set()

    async def run(self, num_clients: int) -> None:
        """Sends requests until `pause`."""
        self._over.clear()
        await asyncio.gather(*(self._run_client(Random(self._rng.getrandbits(32))) for _ in range(num_clients)))

    async def _run_client(self, rng: Random) -> None:
        kinds: Sequence[tuple[str, int, Callable[..., Awaitable[None]]]] = (
            ("whole over gRPC", 4, self._whole),
            ("whole over HTTP", 4, self._whole_over_http),
            ("cancelled", 1, self._cancelled),
            ("left", 1, self._left),
            ("disconnected", 1, self._disconnected),
            ("read slowly over gRPC", 1, self._slow),
            ("read slowly over HTTP", 1, self._slow_over_http),
            ("refused", 1, self._refused),
            ("several at once", 1, self._several),
        )
        weights = [weight for _, weight, _ in kinds]
        while not self._over.is_set():
            (kind, _, send), index = rng.choices(kinds, weights)[0], rng.randrange(len(self._requests))
            tenant = rng.choice(self._tenants)
            salt = f"{rng.getrandbits(64):x}" if rng.random() < OWN_SALT_SHARE else ""
            request = replace(self._requests[index], request_id=new_request_id(rng), cache_salt=salt)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self._send_until_reached(partial(send, tenant, request, self._expected[index], rng))
                self.results.ended[kind] += 1
            except QuotaExceeded as error:
                self._count_refusal(tenant, f"{kind}, {request.request_id}: {error}")
            except (BatonError, OSError, TimeoutError, ValueError) as error:
                self.results.lost.append(f"{kind}, {request.request_id}: {type(error).__name__}: {error}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), rng.uniform(0.0, _MAX_PAUSE_S))

    async def _send_until_reached(self, send: Callable[[], Awaitable[None]]) -> None:
        """Sends a request until a router is reached; a client itself tries each router only once until then."""
        while True:
            try:
                return await send()
            except Unreachable:
                self.results.retried += 1
            await asyncio.sleep(_UNREACHABLE_PAUSE_S)

    def _count_refusal(self, tenant: Tenant, description: str) -> None:
        if tenant.has_quota:
            self.results.ended["over the tenant's quota"] += 1
        else:
            self.results.lost.append(description)

    def _client(self, tenant: Tenant) -> AsyncGenerationClient:
        return AsyncGenerationClient(
            *self._routers.grpc, rng=Random(self._rng.getrandbits(32)), access=Access(api_key=tenant.api_key)
        )

    def _check(self, request: GenerateRequest, got: Sequence[int], expected: Sequence[int], *, is_whole: bool) -> None:
        self.results.tokens += len(got)
        if list(got) != list(expected if is_whole else expected[: len(got)]):
            self.results.wrong.append(f"{request.request_id}: {list(got)} instead of {list(expected)}"[:1000])

    async def _whole(self, tenant: Tenant, request: GenerateRequest, expected: Sequence[int], rng: Random) -> None:
        async with self._client(tenant) as client:
            self._check(request, [token async for token in _tokens(client, request)], expected, is_whole=True)

    async def _several(self, tenant: Tenant, request: GenerateRequest, expected: Sequence[int], rng: Random) -> None:
        """Sends several requests at once; with a quota some of them are refused, and the others served."""
        several = [replace(request, request_id=new_request_id(rng)) for _ in range(AT_ONCE)]
        outcomes = await asyncio.gather(
            *(self._whole(tenant, request, expected, rng) for request in several), return_exceptions=True
        )
        for error in outcomes:
            if isinstance(error, BaseException):
                raise error

    async def _slow(self, tenant: Tenant, request: GenerateRequest, expected: Sequence[int], rng: Random) -> None:
        got = []
        async with self._client(tenant) as client:
            async for token in _tokens(client, request):
                got.append(token)
                await asyncio.sleep(rng.random() * _SLOW_PAUSE_S)
        self._check(request, got, expected, is_whole=True)

    async def _cancelled(self, tenant: Tenant, request: GenerateRequest, expected: Sequence[int], rng: Random) -> None:
        """Cancels the request with a separate call, while the stream is read on."""
        got, stop = [], rng.randint(1, len(expected))
        async with self._client(tenant) as client:
            with suppress(Cancelled):
                async for token in _tokens(client, request):
                    got.append(token)
                    if len(got) == stop:
                        # The request has ended meanwhile, or its router was killed.
                        with suppress(RequestNotFound, Unreachable):
                            await client.cancel(request.request_id)
        self._check(request, got, expected, is_whole=False)

    async def _left(self, tenant: Tenant, request: GenerateRequest, expected: Sequence[int], rng: Random) -> None:
        got, stop = [], rng.randint(1, len(expected))
        async with self._client(tenant) as client, aclosing(_tokens(client, request)) as tokens:
            async for token in tokens:
                got.append(token)
                if len(got) == stop:
                    break
        self._check(request, got, expected, is_whole=False)

    async def _refused(self, tenant: Tenant, request: GenerateRequest, expected: Sequence[int], rng: Random) -> None:
        bad = replace(request, temperature=-1.0)
        async with self._client(tenant) as client:
            try:
                async for _ in client.generate(bad):
                    pass
            except InvalidRequest:
                return
        self.results.wrong.append(f"{request.request_id}: temperature -1 was not refused")

    async def _whole_over_http(
        self, tenant: Tenant, request: GenerateRequest, expected: Sequence[int], rng: Random
    ) -> None:
        got = await self._over_http(tenant, request, rng, None, 0.0)
        self._check(request, got, expected, is_whole=True)

    async def _slow_over_http(
        self, tenant: Tenant, request: GenerateRequest, expected: Sequence[int], rng: Random
    ) -> None:
        got = await self._over_http(tenant, request, rng, None, rng.random() * _SLOW_PAUSE_S)
        self._check(request, got, expected, is_whole=True)

    async def _disconnected(
        self, tenant: Tenant, request: GenerateRequest, expected: Sequence[int], rng: Random
    ) -> None:
        got = await self._over_http(tenant, request, rng, rng.randint(1, len(expected)), 0.0)
        self._check(request, got, expected, is_whole=False)

    async def _over_http(
        self, tenant: Tenant, request: GenerateRequest, rng: Random, limit: int | None, pause_s: float
    ) -> list[int]:
        """Reads a stream, which continues at another router if its router dies; returns the tokens.

        `limit`: close the connection after this many events.
        """
        loop = asyncio.get_running_loop()
        router = rng.randrange(len(self._routers.http))
        stream = _HttpStream(tenant, request)
        lost_at: float | None = None
        while True:
            num_events = stream.num_events
            try:
                await stream.read(self._routers.http[router], limit, pause_s)
                return stream.token_ids
            except (OSError, asyncio.IncompleteReadError, _TryAgain) as error:
                if lost_at is None or stream.num_events > num_events:
                    lost_at = loop.time()
                if loop.time() - lost_at > RETRY_S:
                    raise BatonError(f"no router continues the stream: {type(error).__name__}: {error}") from error
            self.results.retried += 1
            router = (router + 1) % len(self._routers.http)
            await asyncio.sleep(_RETRY_PAUSE_S)


class _TryAgain(Exception):
    """The router can't continue the stream now."""


class _HttpStream:
    """One completion over HTTP/1.1, over as many connections as needed."""

    def __init__(self, tenant: Tenant, request: GenerateRequest) -> None:
        self._tenant = tenant
        self._request_id = request.request_id
        self._body = {
            "prompt": request.prompt,
            "temperature": request.temperature,
            "seed": request.seed,
            "max_tokens": request.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **({"cache_salt": request.cache_salt} if request.cache_salt else {}),
        }
        self._last_id = ""
        self.token_ids: list[int] = []
        self.num_events = 0

    async def read(self, address: str, limit: int | None, pause_s: float) -> None:
        """Reads to the end or for `limit` events. Raises OSError, IncompleteReadError or _TryAgain."""
        host, _, port = address.rpartition(":")
        connection = socket.socket()
        connection.setblocking(False)
        if pause_s:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        except BaseException:
            connection.close()
            raise
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
        try:
            writer.write(self._request(address))
            status = int((await _line(reader)).split()[1])
            while await _line(reader) != b"":
                pass
            if status != 200:
                self._raise_for(status, await _body(reader))
                return
            while self._parse_events(await _body_piece(reader)):
                if limit is not None and self.num_events >= limit:
                    return
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            writer.transport.abort()

    def _request(self, address: str) -> bytes:
        body = json.dumps(self._body).encode()
        headers = {
            "host": address,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": self._request_id,
            "authorization": f"Bearer {self._tenant.api_key}",
            **({"last-event-id": self._last_id} if self._last_id else {}),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST /v1/completions HTTP/1.1\r\n{lines}\r\n".encode() + body

    def _raise_for(self, status: int, body: bytes) -> None:
        if status == 429 and self._tenant.has_quota and not self._last_id:
            raise QuotaExceeded(body.decode())
        if status == 404 and self._last_id:
            # No router knows the request any more: it is sent again, and has the same tokens.
            self._last_id, self.token_ids, self.num_events = "", [], 0
            raise _TryAgain(body.decode())
        if status in (409, 429, 502, 503):
            raise _TryAgain(f"{status}: {body.decode()}")
        raise ValueError(f"{status}: {body.decode()}")

    def _parse_events(self, piece: bytes) -> bool:
        """Handles the events of a piece of the stream; returns False at its end. The server never splits an event."""
        for block in piece.decode().split("\n\n"):
            fields = dict(line.partition(": ")[::2] for line in block.split("\n") if line and not line.startswith(":"))
            if "data" not in fields:
                continue
            if fields["data"] == "[DONE]":
                return False
            event: dict[str, Any] = json.loads(fields["data"])
            if "error" in event:
                raise _TryAgain(str(event["error"]))
            self._last_id = fields.get("id", self._last_id)
            self.num_events += 1
            for choice in event["choices"]:
                self.token_ids += choice.get("token_ids") or ()
        return True


async def _tokens(client: AsyncGenerationClient, request: GenerateRequest) -> Any:
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, Chunk):
                for token in event.token_ids:
                    yield token


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise asyncio.IncompleteReadError(line, None)
    return line.rstrip()


async def _body_piece(reader: asyncio.StreamReader) -> bytes:
    """Reads the next chunk (RFC 9112, section 7.1)."""
    size = int(await _line(reader), 16)
    piece = await reader.readexactly(size + 2)
    if not size:
        raise asyncio.IncompleteReadError(b"", None)
    return piece[:-2]


async def _body(reader: asyncio.StreamReader) -> bytes:
    """Reads an answer that is not a stream, up to the end of the connection."""
    return await reader.read()


def summary(results: Mapping[str, ClientResults]) -> list[str]:
    """One printed line for each cluster."""
    lines = []
    for name, result in results.items():
        kinds = ", ".join(f"{number} {kind}" for kind, number in result.ended.most_common())
        lines.append(
            f"{name}: {result.ended.total()} requests ({kinds}), {result.tokens} tokens, {result.retried} retries, "
            f"{len(result.lost)} lost, {len(result.wrong)} wrong"
        )
    return lines
