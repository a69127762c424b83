"""Tenants of a simulated load: what each of them sends and when, and what it is to get of the service."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.bench.workloads.spec import WorkloadSpec
from baton.bench.workloads.workload import Workload, WorkloadRequest
from baton.did_you_mean import did_you_mean
from baton.errors import ConfigError, InvalidRequest
from baton.security.keys import check_tenant
from baton.security.quotas import MAX_WEIGHT, MIN_WEIGHT, KeyClass

_MOST_TENANTS = 1000
_FIELDS = {
    "name": "name",
    "rate": "rate",
    "from": "begin_s",
    "until": "end_s",
    "weight": "weight",
    "class": "service_class",
    "input-len": "input_len",
    "output-len": "output_len",
}
"""The keys of `--tenant` and the fields that they set."""


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """One tenant and its requests. `parse` checks the values."""

    name: str
    rate: float
    """Requests per second from `begin_s` until `end_s`."""
    begin_s: float = 0.0
    end_s: float = math.inf
    """Infinite: until the end of the load."""
    weight: float = 1.0
    service_class: KeyClass = KeyClass.NORMAL
    input_len: int | None = None
    """Tokens of a prompt; None: as the workload says."""
    output_len: int | None = None

    @staticmethod
    def parse(text: str) -> TenantLoad:
        """Reads a value of `--tenant`, such as `name=light,rate=1.5,weight=2,class=normal`. Raises InvalidRequest."""
        given: dict[str, Any] = {}
        for word in text.split(","):
            key, equals, value = word.strip().partition("=")
            if key not in _FIELDS:
                raise _wrong(f"{text!r} has an unknown key {key!r}{did_you_mean(key, _FIELDS)}")
            if not equals or not value.strip():
                raise _wrong(f"{key} in {text!r} has no value: write {key}=VALUE")
            if _FIELDS[key] in given:
                raise _wrong(f"{key} is given twice in {text!r}")
            given[_FIELDS[key]] = _value(key, value.strip())
        for key in ("name", "rate"):
            if key not in given:
                raise _wrong(f"{text!r} has no {key}: such as name=light,rate=1.5")
        load = TenantLoad(**given)
        if load.end_s <= load.begin_s:
            raise _wrong(f"{load.name} sends from {load.begin_s:g} s until {load.end_s:g} s: until must be later")
        return load

    def ended(self, length_s: float) -> TenantLoad:
        """The load with an end: that of a load of `length_s` unless it has an earlier one."""
        return replace(self, end_s=min(self.end_s, length_s))

    @property
    def count(self) -> int:
        """Number of its requests, which has no fraction: at least one."""
        return max(1, round(self.rate * (self.end_s - self.begin_s)))


def _value(key: str, text: str) -> Any:
    """The value of a key of `--tenant`. Raises InvalidRequest."""
    if key == "name":
        try:
            check_tenant(text)
        except ConfigError as error:
            raise _wrong(str(error)) from None
        return text
    if key == "class":
        if text not in [*KeyClass]:
            raise _wrong(f"class {text!r} is not one of {', '.join(KeyClass)}")
        return KeyClass(text)
    try:
        number = int(text) if key.endswith("-len") else float(text)
    except ValueError:
        kind = "a whole number" if key.endswith("-len") else "a number"
        raise _wrong(f"{key} {text!r} is not {kind}") from None
    lowest, highest = MIN_WEIGHT, MAX_WEIGHT
    if key == "weight" and not lowest <= number <= highest:
        raise _wrong(f"weight {text} is not from {lowest:g} to {highest:g}")
    if key in ("from", "until") and not 0.0 <= number < math.inf:
        raise _wrong(f"{key} {text} is not a number of seconds from 0 on")
    if key not in ("weight", "from") and not 0.0 < number < math.inf:
        raise _wrong(f"{key} {text} is not above 0 and finite")
    return number


def _wrong(reason: str) -> InvalidRequest:
    return InvalidRequest("--tenant", reason)


def parse_tenants(texts: Sequence[str], length_s: float) -> Sequence[TenantLoad]:
    """Reads all values of `--tenant` for a load of `length_s`. Raises InvalidRequest."""
    if not 0.0 < length_s < math.inf:
        raise InvalidRequest("--duration", f"{length_s:g} is not a number of seconds above 0")
    loads = [TenantLoad.parse(text).ended(length_s) for text in texts]
    if len(loads) > _MOST_TENANTS:
        raise _wrong(f"{len(loads)} tenants are more than {_MOST_TENANTS}")
    names = [load.name for load in loads]
    for load in loads:
        if names.count(load.name) > 1:
            raise _wrong(f"two tenants have the name {load.name}")
        if load.begin_s >= load.end_s:
            reason = f"{load.name} sends from {load.begin_s:g} s, and the load ends at {length_s:g} s: raise --duration"
            raise _wrong(reason)
    return loads


class TenantsWorkload:
    """The requests of several tenants, by arrival. Lengths and burstiness are those of the workload's specification."""

    def __init__(self, loads: Sequence[TenantLoad], spec: WorkloadSpec) -> None:
        """`loads` have ends. Raises InvalidRequest for a dataset whose requests can't be those of several tenants."""
        if spec.is_trace or spec.dataset == "multi_turn":
            raise _wrong(f"the dataset {spec.dataset} has arrivals of its own: choose another one with --dataset-name")
        self._parts = [(load, _spec_of(load, number, spec).build()) for number, load in enumerate(loads)]

    def __len__(self) -> int:
        return sum(load.count for load, _ in self._parts)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        for index, (request, _) in enumerate(self._merged()):
            yield replace(request, index=index)

    @cached_property
    def tenant_numbers(self) -> NDArray[np.int64]:
        """The number of each request's tenant, in the order of the requests."""
        return np.array([number for _, number in self._merged()], dtype=np.int64)

    @cached_property
    def arrivals_s(self) -> NDArray[np.float64]:
        """The arrival of each request, in the order of the requests."""
        return np.array([request.arrival_s for request, _ in self._merged()])

    @property
    def rate(self) -> float:
        """Requests per second while any tenant sends, on average."""
        begin, end = min(load.begin_s for load, _ in self._parts), max(load.end_s for load, _ in self._parts)
        return len(self) / (end - begin)

    def to_json(self) -> Sequence[Mapping[str, Any]]:
        """The loads as JSON objects."""
        return [asdict(load) for load, _ in self._parts]

    def _merged(self) -> Iterator[tuple[WorkloadRequest, int]]:
        """All requests by arrival, each with the number of its tenant."""
        return heapq.merge(
            *(_of_tenant(load, part, number) for number, (load, part) in enumerate(self._parts)),
            key=lambda pair: pair[0].arrival_s,
        )


def _spec_of(load: TenantLoad, number: int, spec: WorkloadSpec) -> WorkloadSpec:
    """The workload of the tenant with this number. Raises InvalidRequest for a length that its dataset has not."""
    fixed = {"random": ("input-len", "output-len"), "prefix_repetition": ("output-len",)}.get(spec.dataset, ())
    for key, length in (("input-len", load.input_len), ("output-len", load.output_len)):
        if length is not None and key not in fixed:
            raise _wrong(f"{key} of {load.name} has no meaning with the dataset {spec.dataset}")
    return replace(
        spec,
        num_prompts=load.count,
        request_rate=load.rate,
        random_input_len=load.input_len or spec.random_input_len,
        random_output_len=load.output_len or spec.random_output_len,
        seed=spec.seed * _MOST_TENANTS + number,
    )


def _of_tenant(load: TenantLoad, part: Workload, number: int) -> Iterator[tuple[WorkloadRequest, int]]:
    for request in part:
        yield replace(request, arrival_s=load.begin_s + request.arrival_s, tenant=load.name), number
