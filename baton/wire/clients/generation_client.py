"""The client's side of the public service, blocking. Notices a router that says nothing: see `silence`."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import Cancelled, Unreachable
from baton.messages.generation import GenerateEvent, GenerateRequest, ModelCard
from baton.v1 import generation_pb2 as generation
from baton.v1 import generation_pb2_grpc
from baton.wire import status
from baton.wire.clients.silence import PROBE_TIMEOUT_S, Silence, is_answer
from baton.wire.codec.generation import event_from_pb, finished_from_pb, number_to_metadata, request_to_pb
from baton.wire.credentials import PLAIN, Dialer

_CALL_TIMEOUT_S = 30.0


class GenerationStub:
    """Messages in and out, BatonErrors raised. May be used by several threads."""

    def __init__(self, address: str, silence_s: float | None = None, dialer: Dialer = PLAIN) -> None:
        """`silence_s`: after so long without a word the router is asked whether it is there. None: never."""
        self._address = address
        self._channel = dialer.blocking_channel(address)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._vigil = None if silence_s is None else _Vigil(self._channel, address, silence_s)

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> Generator[GenerateEvent, None, None]:
        call = self._stub.Generate(request_to_pb(request), timeout=timeout_s, metadata=number_to_metadata(request.call))
        return self._events(call)

    def resume(
        self, request_id: str, positions: Sequence[int], timeout_s: float | None, call: int = 0
    ) -> Generator[GenerateEvent, None, None]:
        pb = generation.ResumeRequest(request_id=request_id, next_token_index=positions)
        return self._events(self._stub.Resume(pb, timeout=timeout_s, metadata=number_to_metadata(call)))

    def _events(self, call: Any) -> Generator[GenerateEvent, None, None]:
        vigil = self._vigil
        if vigil is not None:
            vigil.watch(call)
        try:
            with status.translated(self._address):
                for response in call:
                    if vigil is not None:
                        vigil.heard()
                    event = event_from_pb(response)
                    if isinstance(event, generation.Finished):
                        metadata = [(key, value) for key, value in call.trailing_metadata() or ()]
                        yield finished_from_pb(event, metadata)
                    else:
                        yield event
        except Cancelled:
            if vigil is None or not vigil.has_ended(call):
                raise
            raise Unreachable(f"{self._address} says nothing any more") from None
        finally:
            call.cancel()
            if vigil is not None:
                vigil.forget(call)

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

    def list_models(self) -> list[ModelCard]:
        with status.translated(self._address):
            response = self._stub.ListModels(generation.ListModelsRequest(), timeout=_CALL_TIMEOUT_S)
            return [ModelCard(model.name, model.max_model_len, model.vocab_size) for model in response.models]

    def close(self) -> None:
        if self._vigil is not None:
            self._vigil.stop()
        self._channel.close()
        if self._vigil is not None:
            self._vigil.join()


class _Vigil:
    """Ends the calls of a router that says nothing any more. Its thread lives while there are some."""

    def __init__(self, channel: grpc.Channel, address: str, silence_s: float) -> None:
        self._health = health_pb2_grpc.HealthStub(channel)
        self._name = f"vigil-{address}"
        self._silence = Silence(silence_s)
        self._calls: set[Any] = set()
        self._lost: set[Any] = set()
        self._changed = threading.Condition()
        """Guards what follows and the two sets; told when a call is over."""
        self._thread: threading.Thread | None = None
        self._is_kept = False
        """The thread runs."""

    def watch(self, call: Any) -> None:
        """Something is expected of the router."""
        with self._changed:
            self._calls.add(call)
            self.heard()
            if not self._is_kept:
                self._is_kept = True
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def heard(self) -> None:
        self._silence.heard(time.monotonic())

    def has_ended(self, call: Any) -> bool:
        """Whether it was this that cancelled the call."""
        with self._changed:
            return call in self._lost

    def forget(self, call: Any) -> None:
        """The call is over."""
        with self._changed:
            self._calls.discard(call)
            self._lost.discard(call)
            self._changed.notify()

    def stop(self) -> None:
        """Watch over nothing any more. Idempotent."""
        with self._changed:
            self._calls.clear()
            self._changed.notify()

    def join(self) -> None:
        """Return when its thread is over, which the channel's end hastens."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pause_s = 0.0
        while self._rest(pause_s):
            pause_s = 0.0
            if self._is_there():
                self.heard()
            elif self._silence.is_lost(time.monotonic()):
                self._end_all()
            else:
                pause_s = self._silence.patience_s

    def _rest(self, least_s: float) -> bool:
        """Wait until the router is to be asked. False: nobody expects anything of it, and the thread is over."""
        until = time.monotonic() + least_s
        with self._changed:
            while self._calls:
                now = time.monotonic()
                left_s = max(until - now, self._silence.left_s(now))
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
            self._is_kept = False
            return False

    def _is_there(self) -> bool:
        try:
            self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            return is_answer(error.code())
        except ValueError:
            # The channel was closed a moment ago: nobody waits for an answer any more.
            return True
        return True

    def _end_all(self) -> None:
        with self._changed:
            lost = list(self._calls)
            self._lost |= self._calls
            self._calls.clear()
        for call in lost:
            call.cancel()
