"""Derives the numbers of an enum on the wire from the names of its members."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

E = TypeVar("E", bound=enum.Enum)


def numbers(members: Iterable[E], pb: EnumTypeWrapper) -> dict[E, Any]:
    """The number of each member: that of `PB_NAME_MEMBER` in the protobuf enum `PbName`.

    Raises ValueError for a member that the protobuf enum lacks.
    """
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", pb.DESCRIPTOR.name).upper()
    return {member: pb.Value(f"{prefix}_{member.name}") for member in members}
