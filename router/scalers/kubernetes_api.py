"""The few calls of Kubernetes' API that scaling needs, with bounds, and with its errors as ScalerFailed."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.scalers.scaler import CALL_S, MAX_NAME, MAX_NODES, ScalerFailed, ScalerFault, first_problem

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
MOST_PODS = 500
_MAX_ANSWER_BYTES = 16 << 20
_MAX_TOKEN_BYTES = 65_536
_MERGE_PATCH = "application/merge-patch+json"
_FAULTS = {401: ScalerFault.DENIED, 403: ScalerFault.DENIED, 409: ScalerFault.CONFLICT}
_Parsed = TypeVar("_Parsed", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API is, and who asks. `authority` is the file of its certificate's authority."""

    url: str
    namespace: str
    token: Path
    authority: Path | None


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True)


class _Metadata(_Read):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    resourceVersion: Annotated[str, Field(min_length=1, max_length=100)]
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletionTimestamp: str | None = None


class _ScaleSpec(_Read):
    replicas: Annotated[int, Field(ge=0, le=MAX_NODES)] = 0  # the API leaves out a 0


class _ScaleStatus(_Read):
    selector: Annotated[str, Field(min_length=1, max_length=4096)]


class Scale(_Read):
    """What the subresource `scale` of a workload says."""

    metadata: _Metadata
    spec: _ScaleSpec = _ScaleSpec()
    status: _ScaleStatus

    @property
    def want(self) -> int:
        """The number of replicas that the workload is to have."""
        return self.spec.replicas


class _Condition(_Read):
    type: str
    status: str


class _PodStatus(_Read):
    phase: str = ""
    conditions: list[_Condition] = []


class Pod(_Read):
    """What of a pod matters here."""

    metadata: _Metadata
    status: _PodStatus = _PodStatus()

    @property
    def name(self) -> str:
        """The pod's name, which is its node's."""
        return self.metadata.name

    @property
    def is_ending(self) -> bool:
        """Whether it was told to end, or has ended."""
        return self.metadata.deletionTimestamp is not None or self.status.phase in ("Succeeded", "Failed")

    @property
    def is_ready(self) -> bool:
        """Whether its readiness probe succeeds, and it is not ending."""
        conditions = {each.type: each.status for each in self.status.conditions}
        return not self.is_ending and conditions.get("Ready") == "True"


class _Pods(_Read):
    metadata: dict[str, Any] = {}
    items: list[Pod]


class KubernetesApi:
    """Calls the API, one connection a call. Every call raises ScalerFailed about the `subject` that it is given."""

    def __init__(self, access: Access, limit_s: float = CALL_S) -> None:
        self._access = access
        self._limit_s = limit_s
        self._tls: ssl.SSLContext | bool = True
        if access.authority is not None:
            self._tls = ssl.create_default_context(cafile=str(access.authority))

    async def scale(self, path: str, subject: str) -> Scale:
        """What a workload's `scale` says."""
        return await self._parsed(Scale, "GET", f"{path}/scale", subject)

    async def set_replicas(self, path: str, seen: Scale, replicas: int, subject: str) -> None:
        """Set the number of replicas; CONFLICT if the workload is not any more as it was `seen`."""
        change = {"metadata": {"resourceVersion": seen.metadata.resourceVersion}, "spec": {"replicas": replicas}}
        await self._call("PATCH", f"{path}/scale", subject, change=change)

    async def pods(self, namespace: str, selector: str, subject: str) -> list[Pod]:
        """All pods that a label selector chooses."""
        query = {"labelSelector": selector, "limit": str(MOST_PODS)}
        found = await self._parsed(_Pods, "GET", f"/api/v1/namespaces/{namespace}/pods", subject, query)
        if found.metadata.get("continue"):
            raise ScalerFailed(ScalerFault.REFUSED, subject, f"it has more than {MOST_PODS} pods")
        return found.items

    async def set_deletion_cost(self, namespace: str, pod: str, cost: str | None, subject: str) -> None:
        """Set a pod's cost. A Deployment that gets fewer pods stops those with the lowest one first; None is 0."""
        change = {"metadata": {"annotations": {DELETION_COST: cost}}}
        await self._call("PATCH", f"/api/v1/namespaces/{namespace}/pods/{pod}", subject, change=change)

    async def _parsed(
        self, kind: type[_Parsed], method: str, path: str, subject: str, query: Mapping[str, str] | None = None
    ) -> _Parsed:
        answer = await self._call(method, path, subject, query)
        try:
            # Hundreds of pods are megabytes.
            return await asyncio.to_thread(kind.model_validate_json, answer)
        except ValidationError as error:
            detail = f"Kubernetes' answer is not what it is to be: {first_problem(error)}"
            raise ScalerFailed(ScalerFault.INVALID_ANSWER, subject, detail) from None

    async def _call(
        self,
        method: str,
        path: str,
        subject: str,
        query: Mapping[str, str] | None = None,
        *,
        change: Mapping[str, Any] | None = None,
    ) -> bytes:
        headers = {"authorization": f"Bearer {self._token(subject)}", "accept": "application/json"}
        # Compressed answers would be bounded by what they decompress to, which is not known.
        headers["accept-encoding"] = "identity"
        if change is not None:
            headers["content-type"] = _MERGE_PATCH
        content = json.dumps(change).encode() if change is not None else None
        try:
            async with (
                asyncio.timeout(self._limit_s),
                httpx2.AsyncClient(verify=self._tls, trust_env=False, timeout=self._limit_s) as client,
                client.stream(
                    method, self._access.url + path, params=query, headers=headers, content=content
                ) as answer,
            ):
                data = bytearray()
                async for piece in answer.aiter_raw():
                    data += piece
                    if len(data) > _MAX_ANSWER_BYTES:
                        detail = f"Kubernetes answered with more than {_MAX_ANSWER_BYTES} bytes"
                        raise ScalerFailed(ScalerFault.INVALID_ANSWER, subject, detail)
        except (TimeoutError, httpx2.TimeoutException):
            detail = f"Kubernetes did not answer within {self._limit_s:g} s"
            raise ScalerFailed(ScalerFault.TIMEOUT, subject, detail) from None
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            detail = f"Kubernetes at {self._access.url} can't be asked ({type(error).__name__})"
            raise ScalerFailed(ScalerFault.UNREACHABLE, subject, detail) from None
        if answer.status_code != 200:
            fault = _FAULTS.get(answer.status_code, ScalerFault.FAILED)
            if answer.status_code == 404:
                fault = ScalerFault.UNKNOWN_NODE if "/pods/" in path else ScalerFault.UNKNOWN_POOL
            raise ScalerFailed(
                fault, subject, f"{method} {path} was answered {answer.status_code}{_reason(bytes(data))}"
            )
        return bytes(data)

    def _token(self, subject: str) -> str:
        # It is read for each call, since Kubernetes replaces it.
        try:
            with self._access.token.open("rb") as file:
                return file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no token"
            detail = f"the account's token {self._access.token} can't be read: {reason}"
            raise ScalerFailed(ScalerFault.DENIED, subject, detail) from None


def _reason(data: bytes) -> str:
    """What the API says about an error, if it says anything."""
    try:
        said = json.loads(data)
    except ValueError:
        return ""
    message = said.get("message") if isinstance(said, dict) else None
    return f": {message[:200]}" if isinstance(message, str) else ""
