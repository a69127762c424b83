"""The record that a process publishes about itself, and how records that others have written are checked.

A record is one JSON object. Unknown keys are ignored, so that processes of different versions share a registry. For any
other irregularity `BadRecord` is raised, and the reader skips the record."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from baton.errors import BatonError, Status

NodeRole: TypeAlias = Literal["prefill", "decode", "encode", "router"]
NodeState: TypeAlias = Literal["starting", "ready", "draining"]

MAX_RECORD_BYTES = 16 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]{1,253}):([0-9]{1,5})\Z")
_MAY_BE_ZERO = ("pid", "start_number", "link_protocol", "tp", "pp")
_REQUIRED = ("name", "role", "incarnation", "address", "pid", "version", "started_at", "lease_s")


class BadRecord(BatonError):
    """A record in the registry is not usable; the message says why."""

    status = Status.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One incarnation of one process of the cluster. The fields from `model` on are empty for routers."""

    name: str
    role: NodeRole
    incarnation: str
    address: str
    """HOST:PORT of gRPC: Node and KvLink for nodes, Generation for routers."""
    pid: int
    version: str
    started_at: float
    """Seconds since the epoch, by the clock of its host; see `start_number`."""
    lease_s: float
    """Seconds for which the record outlives its process."""
    state: NodeState = "ready"
    operator_address: str = ""
    """HOST:PORT of the Operator service, for routers."""
    http_address: str = ""
    """HOST:PORT of the OpenAI-compatible front, for routers."""
    model: str = ""
    model_fingerprint: str = ""
    dtype: str = ""
    numerics: str = ""
    bit_exact: bool = False
    vocab_size: int = 0
    max_model_len: int = 0
    block_size: int = 0
    num_blocks: int = 0
    tp: int = 0
    """Ranks that compute each layer together; 0: a version that does not say it."""
    pp: int = 0
    """Stages of consecutive layers, of `tp` ranks each; 0: a version that does not say it."""
    link_protocol: int = 0
    """Version of the protocol between nodes that hand KV over; 0: a version that does not say it."""
    kv_shape: str = ""
    """See `NodeDescription.kv_shape`."""
    is_verified: bool = False
    """Whether the model's logits were those of transformers in a check at start."""
    eos_token_ids: frozenset[int] = frozenset()
    start_number: int = 0
    """The number of this start, from a counter of all process starts in the cluster (`Membership.next_start`). Among
    records of one name the one with the largest number is valid, whatever the clocks of their hosts say. A process that
    could not reach the registry, or of an older version, has 0. Among records with 0 the latest `started_at` is
    valid."""

    def __post_init__(self) -> None:
        """Raises BadRecord when a value has the wrong type or is out of range."""
        _check(self)

    def to_json(self) -> bytes:
        """The record as the registry stores it; `from_json` reads it back."""
        return json.dumps(asdict(self) | {"eos_token_ids": sorted(self.eos_token_ids)}, allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> NodeRecord:
        """Read a stored record. Raises BadRecord, and no other exception, if anything is wrong with it."""
        if len(data) > MAX_RECORD_BYTES:
            raise BadRecord(f"{len(data)} bytes are more than {MAX_RECORD_BYTES}")
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise BadRecord("not a JSON object")
        known = {key: fields[key] for key in _TYPES if key in fields}
        missing = [key for key in _REQUIRED if key not in known]
        if missing:
            raise BadRecord(f"no {', '.join(missing)}")
        eos = known.get("eos_token_ids", [])
        if not isinstance(eos, list) or not all(type(token) is int for token in eos):
            raise BadRecord("eos_token_ids: not a list of integers")
        return cls(**(known | {"eos_token_ids": frozenset(eos)}))


Snapshot: TypeAlias = Mapping[str, NodeRecord]
"""The valid record of each name in a cluster."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The valid records of one full read, and those that were skipped."""

    snapshot: Snapshot
    bad: Mapping[str, str]
    """For each record that was skipped, the reason, by the record's key."""


def read_records(stored: Iterable[tuple[str, bytes]]) -> Reading:
    """Turn (key, value) pairs into a snapshot. Of each name the latest incarnation counts; bad records are skipped."""
    by_name: dict[str, NodeRecord] = {}
    bad: dict[str, str] = {}
    for key, value in stored:
        try:
            record = NodeRecord.from_json(value)
        except BadRecord as error:
            bad[key] = str(error)
            continue
        if record.incarnation != key:
            bad[key] = f"stored under {key!r} but names incarnation {record.incarnation!r}"
            continue
        standing = by_name.get(record.name)
        if standing is None or _order(standing) < _order(record):
            by_name[record.name] = record
    return Reading(MappingProxyType(dict(sorted(by_name.items()))), MappingProxyType(bad))


def incarnations_of(name: str, stored: Iterable[tuple[str, bytes]]) -> list[NodeRecord]:
    """All records of a name, the earliest first, without bad ones."""
    incarnations = []
    for key, value in stored:
        with suppress(BadRecord):
            record = NodeRecord.from_json(value)
            if (record.name, record.incarnation) == (name, key):
                incarnations.append(record)
    return sorted(incarnations, key=_order)


def number_of_start(counted: int, namesakes: Iterable[NodeRecord]) -> int:
    """The number of a new start: the registry's counter, or one more than the largest number among `namesakes`.

    A registry that lost its data counts from 0 again, while processes may still publish records with larger numbers.
    """
    return max([counted, *(record.start_number + 1 for record in namesakes)])


def _order(record: NodeRecord) -> tuple[int, float, str]:
    return record.start_number, record.started_at, record.incarnation


_TYPES: Mapping[str, Any] = {f.name: f.type for f in fields(NodeRecord)}


def _check(record: NodeRecord) -> None:
    for key in ("name", "incarnation"):
        value = getattr(record, key)
        if not isinstance(value, str) or not _NAME.match(value):
            raise BadRecord(f"{key}: {value!r:.80} is not a name")
    for key in ("version", "model", "model_fingerprint", "dtype", "numerics", "kv_shape"):
        if not isinstance(getattr(record, key), str):
            raise BadRecord(f"{key}: not a string")
    if record.role not in get_args(NodeRole):
        raise BadRecord(f"role: {record.role!r:.80} is none of {', '.join(get_args(NodeRole))}")
    if record.state not in get_args(NodeState):
        raise BadRecord(f"state: {record.state!r:.80} is none of {', '.join(get_args(NodeState))}")
    _check_address("address", record.address)
    for key in ("operator_address", "http_address"):
        if (address := getattr(record, key)) != "":
            _check_address(key, address)
    for key in ("bit_exact", "is_verified"):
        if type(getattr(record, key)) is not bool:
            raise BadRecord(f"{key}: neither true nor false")
    for key in ("started_at", "lease_s"):
        value = getattr(record, key)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise BadRecord(f"{key}: {value!r:.80} is not a number of seconds")
    least = 0 if record.role == "router" else 1
    for key in (*_MAY_BE_ZERO, "vocab_size", "max_model_len", "block_size", "num_blocks"):
        value = getattr(record, key)
        if type(value) is not int or not (0 if key in _MAY_BE_ZERO else least) <= value < 2**53:
            raise BadRecord(f"{key}: {value!r:.80} is not a number from {least} on")
    if not all(type(token) is int and token >= 0 for token in record.eos_token_ids):
        raise BadRecord("eos_token_ids: not token ids")


def _check_address(key: str, value: object) -> None:
    match = _ADDRESS.match(value) if isinstance(value, str) else None
    if match is None or not 0 < int(match[2]) < 65536:
        raise BadRecord(f"{key}: {value!r:.80} is not HOST:PORT")


class OutageGrace:
    """Merges each full read with the records that were known before the registry lost its data.

    When it has lost its records, their absence does not mean that the processes have ended. The *epoch*, a random word
    that the first writer stores beside the records, tells the two cases apart: after a change of the epoch a missing
    record remains valid until its process has had time to publish it again.
    """

    def __init__(self) -> None:
        self._epoch: str | None = None
        self._latest: Snapshot = MappingProxyType({})
        self._kept: dict[str, tuple[NodeRecord, float]] = {}

    def merge(self, epoch: str | None, fresh: Snapshot, now: float) -> Snapshot:
        """The records that are valid now. `epoch`: None for an empty registry; `now`: monotonic seconds."""
        if self._epoch is not None and epoch != self._epoch:
            self._kept = {name: (record, now + record.lease_s) for name, record in self._latest.items()}
        self._epoch = epoch
        self._kept = {
            name: (record, until) for name, (record, until) in self._kept.items() if name not in fresh and now < until
        }
        merged = {name: record for name, (record, _) in self._kept.items()} | dict(fresh)
        self._latest = MappingProxyType(dict(sorted(merged.items())))
        return self._latest
