"""Derives the codec of a message from the fields of its dataclass and of its Protocol Buffers message.

Both have the same fields under the same names, so that a new field is written in two places only: the dataclass and the
.proto file. Messages that are sent for each token (`RequestDelta`, `Chunk`) have codecs that are written by hand, which
are faster.
"""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from baton.errors import InvalidRequest

E = TypeVar("E", bound=enum.Enum)
T = TypeVar("T")
M = TypeVar("M", bound=Message)

Convert = Callable[[Any], Any]
_Descriptor = Any  # the class depends on which of protobuf's implementations runs


@dataclass(frozen=True, slots=True)
class FieldConversion:
    """The conversions of one field, in place of those that follow from its type."""

    name: str
    write: Convert | None = None
    """Converts the field's value for the message; None: the derived conversion."""
    read: Convert | None = None
    """Converts the value in the message for the field; None: the derived conversion."""


class Codec(Generic[T, M]):
    """Turns values of one dataclass (or named tuple) into one Protocol Buffers message, and back.

    Supported fields: numbers, text, bytes, enums, mappings, sets and sequences of these, and other such classes, alone
    or in sequences. Sequences are read as tuples. None is an absent field; for an absent field that can't be None the
    class's default is read.
    """

    def __init__(
        self,
        kind: type[T],
        message: type[M],
        *conversions: FieldConversion,
        nested: Collection[Codec[Any, Any]] = (),
        message_only: Collection[str] = (),
        inlined: Mapping[str, Codec[Any, M]] | None = None,
        is_inlined: bool = False,
    ) -> None:
        """`conversions`: for fields whose conversion does not follow from their type. `nested`: codecs for fields that
        are messages themselves; the codecs of other such fields are derived. `message_only`: fields of the message
        that the class does not have. `inlined`: by the name of a field of the class, the codec of its own fields, which
        are fields of this message (and which is made with `is_inlined`).

        Raises TypeError if any other field is only in the class or only in the message, or if no conversion can be
        derived for it.
        """
        self.kind = kind
        self.message = message
        self._inlined = inlined or {}
        all_names, descriptors = _field_names(kind), message.DESCRIPTOR.fields_by_name
        names = [name for name in all_names if name not in self._inlined]
        here = {*names, *(name for codec in self._inlined.values() for name in _field_names(codec.kind))}
        lacking = set() if is_inlined else set(descriptors) - here - set(message_only)
        if here - set(descriptors) or here & set(message_only) or lacking:
            raise TypeError(
                f"{kind.__name__} has the fields {sorted(here - set(descriptors))} that its message lacks, and "
                f"lacks {sorted(lacking)}"
            )
        hints, defaults = get_type_hints(kind), _defaults(kind)
        nested_codecs = {codec.kind: codec for codec in nested}
        remaining = {conversion.name: conversion for conversion in conversions}
        self._plain: list[str] = []
        """Fields that are written as they are."""
        self._converted: list[tuple[str, Convert]] = []
        """The other fields, with their conversions."""
        self._readers: list[tuple[str, Convert | None, bool, Any]] = []
        """For each field: its name, its conversion, whether it may be absent, and the value of an absent field."""
        for name in names:
            hint, can_be_none = _without_none(hints[name])
            descriptor = descriptors[name]
            conversion = remaining.pop(name, FieldConversion(name))
            write, read = conversion.write, conversion.read
            if write is None or read is None:
                derived = _derive_conversions(hint, descriptor, can_be_none, nested_codecs)
                write, read = write or derived[0], read or derived[1]
            absent = None if can_be_none else defaults.get(name, _NO_DEFAULT)
            if write is None:
                self._plain.append(name)
            else:
                self._converted.append((name, write))
            self._readers.append((name, read, descriptor.has_presence and absent is not _NO_DEFAULT, absent))
        if remaining:
            raise TypeError(f"{kind.__name__} has no fields {sorted(remaining)}")
        self._inlined_at = [(all_names.index(name), codec) for name, codec in self._inlined.items()]
        """The inlined fields, by their places among all, the first one first."""
        all_plain = all(read is None and not absent for _, read, absent, _ in self._readers)
        self._read_all = attrgetter(*names) if all_plain and len(names) > 1 and not self._inlined else None
        """Reads all fields at once; None if any field is converted or may be absent."""

    def to_pb(self, value: T) -> M:
        """The message with the value's fields."""
        return self.message(**self._written(value))

    def _written(self, value: T) -> dict[str, Any]:
        """The value's fields as the message takes them."""
        values = {name: getattr(value, name) for name in self._plain}
        for name, write in self._converted:
            values[name] = write(getattr(value, name))
        for name, codec in self._inlined.items():
            values |= codec._written(getattr(value, name))
        return values

    def from_pb(self, pb: M) -> T:
        """The value with the message's fields. Raises InvalidRequest for an enum's number that this version lacks."""
        if self._read_all is not None:
            return self.kind(*self._read_all(pb))
        values = []
        for name, read, may_be_absent, absent in self._readers:
            if may_be_absent and not pb.HasField(name):
                values.append(absent)
            else:
                field_value = getattr(pb, name)
                values.append(field_value if read is None else read(field_value))
        for index, codec in self._inlined_at:
            values.insert(index, codec.from_pb(pb))
        return self.kind(*values)


class OneOfCodec(Generic[T, M]):
    """Turns values of several classes into a message with one oneof, and back.

    The field of a class is the one whose type is the message of the class's codec.
    """

    def __init__(self, envelope: type[M], *codecs: Codec[Any, Any]) -> None:
        """Raises TypeError for a codec whose message is in no field of the oneof."""
        (oneof,) = envelope.DESCRIPTOR.oneofs
        names = {field.message_type: field.name for field in oneof.fields}
        self._envelope = envelope
        self._oneof = oneof.name
        self._by_kind: dict[type[Any], tuple[str, Codec[Any, Any]]] = {}
        for codec in codecs:
            name = names.get(codec.message.DESCRIPTOR)
            if name is None:
                raise TypeError(f"{envelope.DESCRIPTOR.name} has no field for {codec.kind.__name__}")
            self._by_kind[codec.kind] = name, codec
        self._by_name = dict(self._by_kind.values())

    def to_pb(self, value: T) -> M:
        """The message with the value in its field."""
        name, codec = self._by_kind[type(value)]
        return self._envelope(**{name: codec.to_pb(value)})

    def from_pb(self, pb: M) -> T | None:
        """The value in the message; None if its field is none of these classes', or not known to this version."""
        name = pb.WhichOneof(self._oneof)
        codec = self._by_name.get(name) if name is not None else None
        return None if codec is None else codec.from_pb(getattr(pb, name))


def enum_numbers(members: Iterable[E], pb: _Descriptor) -> dict[E, Any]:
    """The number of each member in a protobuf enum: for the enum PbName, the number of PB_NAME_MEMBER.

    Raises TypeError for a member that the protobuf enum lacks.
    """
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", pb.name).upper()
    numbers = {member: pb.values_by_name.get(f"{prefix}_{member.name}") for member in members}
    lacking = [member.name for member, value in numbers.items() if value is None]
    if lacking:
        raise TypeError(f"the protobuf enum {pb.name} lacks {lacking}")
    return {member: value.number for member, value in numbers.items() if value is not None}


def _derive_conversions(
    hint: Any, field: _Descriptor, can_be_none: bool, nested: Mapping[type, Codec[Any, Any]]
) -> tuple[Convert | None, Convert | None]:
    """The conversions with which values of this type are written to this field and read from it.

    None: they are not converted.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is not None and issubclass(origin, Mapping):
        return dict, dict
    if origin is not None and issubclass(origin, AbstractSet):
        return sorted, frozenset
    if origin is not None and issubclass(origin, Sequence):
        write, read = _derive_conversions(arguments[0], field, False, nested)
        return (
            None if write is None else lambda values: [write(value) for value in values],
            tuple if read is None else lambda values: tuple([read(value) for value in values]),
        )
    if field.enum_type is not None:
        return _enum_conversions(hint, field, can_be_none)
    if field.message_type is not None:
        codec = nested.get(hint) or Codec(hint, GetMessageClass(field.message_type), nested=nested.values())
        if not can_be_none:
            return codec.to_pb, codec.from_pb
        return (lambda value: None if value is None else codec.to_pb(value)), codec.from_pb
    if hint not in (int, float, bool, str, bytes):
        raise TypeError(f"no conversion of {hint} can be derived for {field.full_name}")
    return None, None


def _enum_conversions(kind: type[enum.Enum], field: _Descriptor, can_be_none: bool) -> tuple[Convert, Convert]:
    numbers: dict[Any, Any] = {**enum_numbers(kind, field.enum_type), **({None: 0} if can_be_none else {})}
    members = {number: member for member, number in numbers.items()}

    def read(number: int) -> Any:
        if number not in members:
            where = f"{field.containing_type.name}.{field.name}"
            raise InvalidRequest(where, f"this version knows no {kind.__name__} {number}")
        return members[number]

    return numbers.__getitem__, read


def _field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind._fields)


def _defaults(kind: type[Any]) -> dict[str, Any]:
    if not is_dataclass(kind):
        return dict(kind._field_defaults)
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type apart from None, and whether None is allowed."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    others = [argument for argument in get_args(hint) if argument is not types.NoneType]
    return others[0] if len(others) == 1 else None, len(others) < len(get_args(hint))


_NO_DEFAULT = object()
