"""Derives the codec of a message from the fields of its dataclass and of its Protocol Buffers message.

Both have the same fields under the same names, so that a new field is written down twice and nowhere else: in the
dataclass and in the .proto file. What travels with each token (`RequestDelta`, `Chunk`) has a codec that is written by
hand, which is faster.
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
_Descriptor = Any  # protobuf's own, of whichever of its implementations runs


@dataclass(frozen=True, slots=True)
class Exceptional:
    """How one field is converted where its type does not say it. A conversion that is None is the derived one."""

    name: str
    write: Convert | None = None
    read: Convert | None = None


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
        *exceptions: Exceptional,
        parts: Collection[Codec[Any, Any]] = (),
        unread: Collection[str] = (),
    ) -> None:
        """`parts`: codecs of classes that fields are of; those that are not named are derived. `unread`: fields of the
        message that the class does not have.

        Raises TypeError if another field is in one of the two and not in the other, or has no derivable conversion.
        """
        self.kind = kind
        self.message = message
        names, descriptors = _field_names(kind), message.DESCRIPTOR.fields_by_name
        if set(names) ^ set(descriptors) != set(unread):
            raise TypeError(
                f"{kind.__name__} has the fields {sorted(set(names) - set(descriptors))} that its message lacks, and "
                f"lacks {sorted(set(descriptors) - set(names) - set(unread))}"
            )
        hints, defaults = get_type_hints(kind), _defaults(kind)
        known = {part.kind: part for part in parts}
        special = {exception.name: exception for exception in exceptions}
        self._plain: list[str] = []
        """Fields that are written as they are."""
        self._converted: list[tuple[str, Convert]] = []
        self._readers: list[tuple[str, Convert | None, bool, Any]] = []
        for name in names:
            hint, can_be_none = _without_none(hints[name])
            descriptor = descriptors[name]
            exception = special.pop(name, Exceptional(name))
            write, read = exception.write, exception.read
            if write is None or read is None:
                derived = _conversions(hint, descriptor, can_be_none, known)
                write, read = write or derived[0], read or derived[1]
            absent = None if can_be_none else defaults.get(name, _NO_DEFAULT)
            if write is None:
                self._plain.append(name)
            else:
                self._converted.append((name, write))
            self._readers.append((name, read, descriptor.has_presence and absent is not _NO_DEFAULT, absent))
        if special:
            raise TypeError(f"{kind.__name__} has no fields {sorted(special)}")
        all_plain = len(names) > 1 and all(read is None and not absent for _, read, absent, _ in self._readers)
        self._read_all = attrgetter(*names) if all_plain else None
        """Reads all fields at once, where none is converted or may be absent."""

    def to_pb(self, value: T) -> M:
        """The message with the value's fields."""
        found = {name: getattr(value, name) for name in self._plain}
        for name, write in self._converted:
            found[name] = write(getattr(value, name))
        return self.message(**found)

    def from_pb(self, pb: M) -> T:
        """The value with the message's fields. Raises InvalidRequest for an enum's number that this version lacks."""
        if self._read_all is not None:
            return self.kind(*self._read_all(pb))
        values = []
        for name, read, may_be_absent, absent in self._readers:
            if may_be_absent and not pb.HasField(name):
                values.append(absent)
            else:
                found = getattr(pb, name)
                values.append(found if read is None else read(found))
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


def numbers(members: Iterable[E], pb: _Descriptor) -> dict[E, Any]:
    """The number on the wire of each member: that of PB_NAME_MEMBER in the protobuf enum PbName.

    Raises TypeError for a member that the protobuf enum lacks.
    """
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", pb.name).upper()
    found = {member: pb.values_by_name.get(f"{prefix}_{member.name}") for member in members}
    lacking = [member.name for member, value in found.items() if value is None]
    if lacking:
        raise TypeError(f"the protobuf enum {pb.name} lacks {lacking}")
    return {member: value.number for member, value in found.items() if value is not None}


def _conversions(
    hint: Any, field: _Descriptor, can_be_none: bool, known: Mapping[type, Codec[Any, Any]]
) -> tuple[Convert | None, Convert | None]:
    """How values of this type are written to, and read from, this field. None: as they are."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is not None and issubclass(origin, Mapping):
        return dict, dict
    if origin is not None and issubclass(origin, AbstractSet):
        return sorted, frozenset
    if origin is not None and issubclass(origin, Sequence):
        write, read = _conversions(arguments[0], field, False, known)
        return (
            None if write is None else lambda values: [write(value) for value in values],
            tuple if read is None else lambda values: tuple([read(value) for value in values]),
        )
    if field.enum_type is not None:
        return _enum_conversions(hint, field, can_be_none)
    if field.message_type is not None:
        codec = known.get(hint) or Codec(hint, GetMessageClass(field.message_type), parts=known.values())
        if not can_be_none:
            return codec.to_pb, codec.from_pb
        return (lambda value: None if value is None else codec.to_pb(value)), codec.from_pb
    if hint not in (int, float, bool, str, bytes):
        raise TypeError(f"no conversion of {hint} can be derived for {field.full_name}")
    return None, None


def _enum_conversions(kind: type[enum.Enum], field: _Descriptor, can_be_none: bool) -> tuple[Convert, Convert]:
    known: dict[Any, Any] = {**numbers(kind, field.enum_type), **({None: 0} if can_be_none else {})}
    members = {number: member for member, number in known.items()}

    def read(number: int) -> Any:
        if number not in members:
            where = f"{field.containing_type.name}.{field.name}"
            raise InvalidRequest(where, f"this version knows no {kind.__name__} {number}")
        return members[number]

    return known.__getitem__, read


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
    others = [one for one in get_args(hint) if one is not types.NoneType]
    return others[0] if len(others) == 1 else None, len(others) < len(get_args(hint))


_NO_DEFAULT = object()
