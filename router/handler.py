"""The router's core as its HTTP front and calls for vectors use it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, TypeVar

from baton.messages.generation import GenerateEvent, GenerateRequest
from router.admission.quotas import RateLimit

T = TypeVar("T")


class Handler(Protocol):
    """The operations of a router behind all its APIs; `router.front.GenerationHandler` is the real one."""

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, Chunks, Finished; closing the generator cancels the request."""
        ...

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        *,
        repeat: GenerateRequest | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, the events after these positions, Finished; raises RequestNotFound.

        `repeat`: the request itself, which a client of HTTP sends again with each call.
        """
        ...

    def most_at_once(self) -> int | None:
        """How many requests the caller may have running at once; None: any number."""
        ...

    def rate_limits(self) -> Sequence[RateLimit]:
        """What the caller has left of its quotas of requests and of tokens."""
        ...

    def embedding_size(self) -> int:
        """Numbers in an embedding of the model; 0: no node has reported it."""
        ...

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Do long work in a thread; raises Overloaded if too much of it waits."""
        ...

    async def in_waiting_thread(self, work: Callable[..., T], *args: object) -> T:
        """Do work that waits for a child process, in a thread; raises Overloaded if too much of it waits."""
        ...

    async def in_chat_thread(self, work: Callable[..., T], *args: object, is_long: bool) -> T:
        """Do work that renders a chat with the model's template, in a thread; raises Overloaded if too much waits."""
        ...
