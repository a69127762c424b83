"""The states of a join probe on its reader, and what leads from one to another."""

from __future__ import annotations

import enum


class ProbeState(enum.Enum):
    """The states of a join probe: how far the known bytes have come."""

    ASKED = enum.auto()
    """The sender was asked to fill a probe block with known bytes."""
    WAITING = enum.auto()
    """The known bytes are there. They can't be read yet: the sender's memory is not connected, no probe block is free
    here, or an earlier probe's read from this sender still runs."""
    READING = enum.auto()
    """The known bytes are being read, or their digest is being computed."""
    PASSED = enum.auto()
    """The bytes that were read are the known ones: the pair may be used."""
    FAILED = enum.auto()
    """The pair can't be used, and its link ends."""


class ProbeEvent(enum.Enum):
    """What can happen to a join probe, and who reports it."""

    READY = enum.auto()
    """Reported by the sender: the known bytes are there."""
    START = enum.auto()
    """Reported by the probes: the read was ordered."""
    NEXT_GROUP = enum.auto()
    """Reported by the mover: the bytes that were read are the known ones, and there are more groups of layers."""
    MATCH = enum.auto()
    """Reported by the mover: the bytes that were read are the known ones, of the last group of layers."""
    FAIL = enum.auto()
    """Reported by the mover or the probes: other bytes came, or none, or the read failed."""


PROBE_TABLE: dict[tuple[ProbeState, ProbeEvent], ProbeState] = {
    (ProbeState.ASKED, ProbeEvent.READY): ProbeState.WAITING,
    (ProbeState.ASKED, ProbeEvent.FAIL): ProbeState.FAILED,
    (ProbeState.WAITING, ProbeEvent.START): ProbeState.READING,
    (ProbeState.WAITING, ProbeEvent.FAIL): ProbeState.FAILED,
    (ProbeState.READING, ProbeEvent.NEXT_GROUP): ProbeState.ASKED,
    (ProbeState.READING, ProbeEvent.MATCH): ProbeState.PASSED,
    (ProbeState.READING, ProbeEvent.FAIL): ProbeState.FAILED,
}
