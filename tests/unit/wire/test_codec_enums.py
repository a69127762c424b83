"""Enums have the same members in Python and on the wire."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any

import pytest

from baton.errors import TransferCause
from baton.messages.node import FINISH_REASONS, Leg, Outcome, Role
from baton.v1 import generation_pb2, node_pb2
from baton.wire.codec.enums import numbers


@pytest.mark.parametrize(
    ("members", "pb"),
    [
        (Outcome, node_pb2.Outcome),
        (FINISH_REASONS, generation_pb2.FinishReason),
        (Leg, node_pb2.Leg),
        ((Role.PREFILL, Role.DECODE), node_pb2.Role),
        (TransferCause, node_pb2.TransferCause),
    ],
    ids=["Outcome", "FinishReason", "Leg", "Role", "TransferCause"],
)
def test_each_member_has_a_number_and_each_number_but_zero_a_member(members: Collection[enum.Enum], pb: Any) -> None:
    assert sorted(numbers(members, pb).values()) == sorted(pb.values())[1:]


def test_a_member_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="ROLE_ROUTER"):
        numbers(Role, node_pb2.Role)
