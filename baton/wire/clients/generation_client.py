"""The blocking client side of the public gRPC service. Detects a router that hangs: see `liveness`."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import Cancelled, Unreachable
from baton.messages.generation import GenerateEvent, GenerateRequest, ModelCard
from baton.messages.pooling import EmbedRequest, EmbedResponse
from baton.v1 import generation_pb2 as generation
from baton.v1 import generation_pb2_grpc
from baton.wire import status
from baton.wire.clients.liveness import PROBE_TIMEOUT_S, LivenessTimer, is_answer
from baton.wire.codec.embedding import EMBED_RESPONSE, embed_request_to_pb
from baton.wire.codec.generation import (
    call_number_to_metadata,
    event_from_pb,
    finished_from_pb,
    model_from_pb,
    request_to_pb,
)
from baton.wire.credentials import PLAINTEXT_DIALER, Dialer

_CALL_TIMEOUT_S = 30.0


class GenerationStub:
    """Calls the public service with plain values, and raises BatonErrors. Thread-safe."""

    def __init__(self, address: str, silence_s: float | None = None, dialer: Dialer = PLAINTEXT_DIALER) -> None:
        """`silence_s`: seconds without a message after which the router is probed. None: it is never probed."""
        self._address = address
        self._channel = dialer.blocking_channel(address)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._watcher = None if silence_s is None else _LivenessWatcher(self._channel, address, silence_s)

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> Generator[GenerateEvent, None, None]:
        metadata = call_number_to_metadata(request.call)
        return self._events(self._stub.Generate(request_to_pb(request), timeout=timeout_s, metadata=metadata))

    def resume(
        self, request_id: str, positions: Sequence[int], timeout_s: float | None, call: int = 0
    ) -> Generator[GenerateEvent, None, None]:
        pb = generation.ResumeRequest(request_id=request_id, next_token_index=positions)
        return self._events(self._stub.Resume(pb, timeout=timeout_s, metadata=call_number_to_metadata(call)))

    def _events(self, call: Any) -> Generator[GenerateEvent, None, None]:
        watcher = self._watcher
        if watcher is not None:
            watcher.watch(call)
        try:
            with status.translated(self._address):
                for response in call:
                    if watcher is not None:
                        watcher.message_received()
                    event = event_from_pb(response)
                    if isinstance(event, generation.Finished):
                        metadata = [(key, value) for key, value in call.trailing_metadata() or ()]
                        yield finished_from_pb(event, metadata)
                    else:
                        yield event
        except Cancelled:
            if watcher is None or not watcher.has_cancelled(call):
                raise
            raise Unreachable(f"{self._address} has stopped answering") from None
        finally:
            call.cancel()
            if watcher is not None:
                watcher.forget(call)

    def cancel(self, request_id: str) -> None:
        with status.translated(self._address):
            self._stub.Cancel(generation.CancelRequest(request_id=request_id), timeout=_CALL_TIMEOUT_S)

    def tokenize(self, model: str, text: str) -> list[int]:
        with status.translated(self._address):
            request = generation.TokenizeRequest(model=model, text=text)
            return list(self._stub.Tokenize(request, timeout=_CALL_TIMEOUT_S).token_ids)

    def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        with status.translated(self._address):
            request = generation.DetokenizeRequest(model=model, token_ids=token_ids)
            return str(self._stub.Detokenize(request, timeout=_CALL_TIMEOUT_S).text)

    def embed(self, request: EmbedRequest, timeout_s: float | None) -> EmbedResponse:
        with status.translated(self._address):
            found = self._stub.Embed(embed_request_to_pb(request), timeout=timeout_s)
            return EMBED_RESPONSE.from_pb(found)

    def list_models(self) -> list[ModelCard]:
        with status.translated(self._address):
            response = self._stub.ListModels(generation.ListModelsRequest(), timeout=_CALL_TIMEOUT_S)
            return [model_from_pb(model) for model in response.models]

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        self._channel.close()
        if self._watcher is not None:
            self._watcher.join()


class _LivenessWatcher:
    """Cancels the calls to a router that has stopped answering. Its thread runs while calls are open."""

    def __init__(self, channel: grpc.Channel, address: str, silence_s: float) -> None:
        self._health = health_pb2_grpc.HealthStub(channel)
        self._name = f"liveness-{address}"
        self._liveness = LivenessTimer(silence_s)
        self._calls: set[Any] = set()
        self._lost: set[Any] = set()
        """Calls that this watcher has cancelled."""
        self._changed = threading.Condition()
        """Guards the two sets and the thread's state. Notified when a call has ended."""
        self._thread: threading.Thread | None = None
        self._is_running = False
        """Whether the thread is running."""

    def watch(self, call: Any) -> None:
        """Watch a call that has just begun."""
        with self._changed:
            self._calls.add(call)
            self.message_received()
            if not self._is_running:
                self._is_running = True
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def message_received(self) -> None:
        """Note that the router has sent a message."""
        self._liveness.restart(time.monotonic())

    def has_cancelled(self, call: Any) -> bool:
        """Whether this watcher has cancelled the call."""
        with self._changed:
            return call in self._lost

    def forget(self, call: Any) -> None:
        """Stop watching a call that has ended."""
        with self._changed:
            self._calls.discard(call)
            self._lost.discard(call)
            self._changed.notify()

    def stop(self) -> None:
        """Stop watching all calls. Idempotent."""
        with self._changed:
            self._calls.clear()
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended, which closing the channel hastens."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        while self._wait_for_probe(pause_s):
            pause_s = 0.0
            if self._answers_probe():
                self.message_received()
            elif self._liveness.is_lost(time.monotonic()):
                self._cancel_all()
            else:
                pause_s = self._liveness.silence_s

    def _wait_for_probe(self, least_s: float) -> bool:
        """Wait until the router is to be probed, for at least `least_s` seconds.

        Returns False when no call is left: the thread ends then.
        """
        until = time.monotonic() + least_s
        with self._changed:
            while self._calls:
                now = time.monotonic()
                wait_s = max(until - now, self._liveness.until_probe_s(now))
                if wait_s <= 0:
                    return True
                self._changed.wait(wait_s)
            self._is_running = False
            return False

    def _answers_probe(self) -> bool:
        try:
            self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            return is_answer(error.code())
        except ValueError:
            # The channel has just been closed, and no call is left.
            return True
        return True

    def _cancel_all(self) -> None:
        with self._changed:
            lost = list(self._calls)
            self._lost |= self._calls
            self._calls.clear()
        for call in lost:
            call.cancel()
