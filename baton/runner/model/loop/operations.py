"""What the steps of a loop over layers are computed by: operations that run one by one, or are recorded in a program.

`operations_of` makes operations of steps (steps.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.nn import functional

from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.model.attention import PagedAttention
from baton.runner.model.layers import PackedLinear
from baton.runner.model.loop.steps import (
    ENDING_WITH_ROWS,
    FUSED_NORMS,
    FUSED_PARTS,
    Call,
    Columns,
    Converted,
    Joined,
    Mixer,
    Reader,
    Scaled,
    Step,
    Sum,
    SumInColumns,
    TimesInput,
)
from baton.runner.model.loop.streams import added_in

S = TypeVar("S", bound=Scaled | Converted | TimesInput | Joined | Columns | SumInColumns)


@dataclass(slots=True)
class StepRows:
    """The rows of a step that is computed one operation after the other."""

    rows: dict[int, torch.Tensor]
    angles: Mapping[int | None, tuple[torch.Tensor, torch.Tensor]]
    """The cosines and sines of each kind; by None those of parts that take none, [T, 0]."""
    sample_rows: torch.Tensor | None
    """The rows that go on behind the last mixer; None: all do."""
    inputs: torch.Tensor | None = None
    """The layers' inputs [T, L * N]; None: there are none."""
    is_empty: bool = False
    """Whether the last mixer was computed, and no rows go on."""


class RecordedRows:
    """The rows of a program that is being recorded. A scratch buffer goes to others when its rows are needed no more.

    The results of products have buffers apart from others, since ranks share them.
    """

    def __init__(
        self,
        program: Program,
        paged: PagedAttention,
        x: Rows,
        angles: Mapping[int | None, tuple[Rows, Rows]],
        inputs: Rows | None,
        *,
        sampling: bool,
    ) -> None:
        """`inputs`: of the layers. `sampling`: behind the last mixer only the rows that sample go on."""
        self.program = program
        self.paged = paged
        self.rows: dict[int, Rows] = {0: x}
        self.angles = angles
        self.inputs = inputs
        self.sampling = sampling
        self._of_product: dict[int, str] = {}
        self._last_product = ""
        self._of_norm: dict[int, str] = {}
        self._of_sum: dict[int, str] = {}
        self._of_activation: dict[int, str] = {}

    def for_product(self, number: int, *, alone: bool = False) -> str:
        """The buffer for the rows `number`, which a part gives whose last operation is a product, or which is `alone`.

        Ranks wait for each other at each product: at one before the last in a part, all have read what the parts before
        it gave. One that is alone may not write where others may still read what the product before it gave.
        """
        used = {**self._of_product, -1: self._last_product} if alone else self._of_product
        self._of_product[number] = self._last_product = name = _unused("share", used)
        return name

    def for_norm(self, number: int) -> str:
        """The buffer for the rows `number`, which a norm gives."""
        self._of_norm[number] = name = _unused("normed", self._of_norm)
        return name

    def for_activation(self, number: int) -> str:
        """The buffer for the rows `number`, which an activation gives, or a part that ends as one does."""
        self._of_activation[number] = name = _unused("activation", self._of_activation)
        return name

    def for_sum(self, number: int) -> str:
        """The buffer for the rows `number`, a sum that replaces none of its operands."""
        self._of_sum[number] = name = _unused("sum", self._of_sum)
        return name

    def replace(self, one: int, gives: int) -> None:
        """Say that the rows `gives` are where the rows `one` were."""
        self.rows[gives] = self.rows[one]
        for of in (self._of_norm, self._of_sum, self._of_activation):
            if one in of:
                of[gives] = of.pop(one)

    def is_of_product(self, number: int) -> bool:
        return number in self._of_product

    def drop(self, numbers: Sequence[int]) -> None:
        """Say that these rows are needed no more."""
        for number in numbers:
            for of in (self.rows, self._of_product, self._of_norm, self._of_sum, self._of_activation):
                of.pop(number, None)


def _unused(kind: str, used: Mapping[int, str]) -> str:
    names = (kind if place == 0 else f"{kind} {place}" for place in range(len(used) + 1))
    return next(name for name in names if name not in used.values())


class Operation(Protocol):
    """One step, or several that are one operation."""

    def run(self, step: StepRows) -> None:
        """Compute the rows that the operation gives."""
        ...

    def record(self, recorded: RecordedRows, into: Rows | None) -> None:
        """Append it to a program. `into`: the rows for the result of a norm, its rounding, or of rows that are scaled;
        None: a scratch buffer.

        Raises KernelArgumentError for what the kernels can't compute.
        """
        ...


class _PartOperation:
    """A part computes rows from rows alone."""

    def __init__(self, call: Call, drops: Sequence[int], row_quantum: int) -> None:
        self._call = call
        self._drops = drops
        self._row_quantum = row_quantum
        part: Any = call.part
        self._rows: Callable[..., torch.Tensor] = self._by_torch
        if isinstance(part, FUSED_NORMS + FUSED_PARTS):
            self._rows = part.rows

    def run(self, step: StepRows) -> None:
        step.rows[self._call.gives] = self._rows(*(step.rows[number] for number in self._call.operands))
        _forget(step, self._drops)

    def _by_torch(self, *operands: torch.Tensor) -> torch.Tensor:
        # Behind the last mixer there may be only the rows that sample, which are not padded.
        num_rows = operands[0].shape[0]
        num_padded = num_rows + -num_rows % self._row_quantum
        padded = (functional.pad(x, (0, 0, 0, num_padded - num_rows)).unsqueeze(0) for x in operands)
        out = self._call.part(*padded)
        rows: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return rows.reshape(num_padded, -1)[:num_rows].contiguous()

    def record(self, recorded: RecordedRows, into: Rows | None) -> None:
        call, part = self._call, self._call.part
        x = recorded.rows[call.given]
        if isinstance(part, FUSED_NORMS):
            name = recorded.for_norm(call.gives)
            rows = part.record(recorded.program, x, into=into or name)
        elif isinstance(part, ENDING_WITH_ROWS):
            name = recorded.for_activation(call.gives)
            rows = part.record(recorded.program, *(recorded.rows[number] for number in call.operands), into=name)
        elif isinstance(part, FUSED_PARTS):
            name = recorded.for_product(call.gives, alone=isinstance(part, PackedLinear))
            rows = part.record(recorded.program, *(recorded.rows[number] for number in call.operands), into=name)
        else:
            raise KernelArgumentError("part", f"is a {type(part).__name__}, which torch computes")
        recorded.rows[call.gives] = rows
        recorded.drop(self._drops)


class _Later(NamedTuple):
    """What is needed behind the last mixer besides what it gives."""

    rows: Sequence[int]
    angles: frozenset[int | None]
    """Kinds of angles."""
    inputs: bool
    """Whether the layers' inputs are needed."""


class _MixerOperation:
    """A mixer computes rows from rows and angles; the last one, where only rows that sample go on, gives these."""

    def __init__(self, call: Call, mixer: Mixer, drops: Sequence[int], later: _Later | None) -> None:
        """`later`: for the last mixer; None: it is not the last one."""
        self._call = call
        self._mixer = mixer
        self._drops = drops
        self._later = later

    def run(self, step: StepRows) -> None:
        rows = step.rows
        sample_rows = None if self._later is None else step.sample_rows
        cos, sin = step.angles[self._call.angles]
        rows[self._call.gives] = self._mixer.rows(rows[self._call.given], cos, sin, sample_rows)
        _forget(step, self._drops)
        if sample_rows is not None and self._later is not None:
            step.is_empty = sample_rows.shape[0] == 0
            for number in self._later.rows:
                rows[number] = rows[number][sample_rows]
            if self._later.inputs and step.inputs is not None:
                step.inputs = step.inputs[sample_rows]
            of_kind = ((kind, step.angles[kind]) for kind in self._later.angles)
            step.angles = {kind: (cos[sample_rows], sin[sample_rows]) for kind, (cos, sin) in of_kind}

    def record(self, recorded: RecordedRows, into: Rows | None) -> None:
        call, rows, program = self._call, recorded.rows, recorded.program
        sampling = self._later is not None and recorded.sampling
        name = recorded.for_product(call.gives)
        cos, sin = recorded.angles[call.angles]
        rows[call.gives] = self._mixer.record(
            program, rows[call.given], cos, sin, recorded.paged, sampling=sampling, into=name
        )
        recorded.drop(self._drops)
        if sampling and self._later is not None:
            for number in self._later.rows:
                rows[number] = program.take_sampled(rows[number], into=f"sampled {number}")
            if self._later.inputs and recorded.inputs is not None:
                recorded.inputs = program.take_sampled(recorded.inputs, into="sampled inputs of layers")
            of_kind = ((kind, recorded.angles[kind]) for kind in self._later.angles)
            recorded.angles = {kind: _sampled_angles(program, kind, angles) for kind, angles in of_kind}


def _sampled_angles(program: Program, kind: int | None, angles: tuple[Rows, Rows]) -> tuple[Rows, Rows]:
    cos, sin = angles
    if kind is None:  # no columns
        return cos, sin
    return program.take_sampled(cos, into=f"sampled cos {kind}"), program.take_sampled(sin, into=f"sampled sin {kind}")


class _ReaderOperation:
    """A reader computes rows from rows and angles, of those that sample if it is behind the last mixer."""

    def __init__(self, call: Call, reader: Reader, drops: Sequence[int], is_behind: bool) -> None:
        self._call = call
        self._reader = reader
        self._drops = drops
        self._is_behind = is_behind

    def run(self, step: StepRows) -> None:
        sampling = self._is_behind and step.sample_rows is not None
        cos, sin = step.angles[self._call.angles]
        step.rows[self._call.gives] = self._reader.read(step.rows[self._call.given], cos, sin, sampling=sampling)
        _forget(step, self._drops)

    def record(self, recorded: RecordedRows, into: Rows | None) -> None:
        call, rows = self._call, recorded.rows
        name = recorded.for_product(call.gives)
        cos, sin = recorded.angles[call.angles]
        rows[call.gives] = self._reader.record_reading(
            recorded.program, rows[call.given], cos, sin, recorded.paged, into=name
        )
        recorded.drop(self._drops)


class _SumOperation:
    """A sum, and the norm of it if there is one."""

    def __init__(self, step: Sum, norm: Call | None, drops: Sequence[int]) -> None:
        self._sum = step
        self._norm = norm
        self._part: Any = None if norm is None else norm.part
        self._drops = drops

    def run(self, step: StepRows) -> None:
        one, other = step.rows[self._sum.one], step.rows[self._sum.other]
        if self._norm is None:
            factor = self._sum.factor
            step.rows[self._sum.gives] = one + (other if factor == 1.0 else other * factor)
        else:
            step.rows[self._sum.gives], step.rows[self._norm.gives] = self._part.add(other, one)
        _forget(step, self._drops)

    def record(self, recorded: RecordedRows, into: Rows | None) -> None:
        own, rows, program = self._sum, recorded.rows, recorded.program
        one, other = rows[own.one], rows[own.other]
        other = program.widened(other, into="widened") if own.is_wide else other
        # Rows that are still needed stay, and those of a product, which ranks share.
        replaces = own.one in self._drops and not recorded.is_of_product(own.one)
        name = None if self._norm is None else recorded.for_norm(self._norm.gives)
        if replaces and self._norm is not None:
            rows[self._norm.gives] = self._part.record_add(program, other, one, into=into or name)
            recorded.replace(own.one, own.gives)
        else:
            if replaces:
                program.add(one, other, own.factor, into=one)
                recorded.replace(own.one, own.gives)
            else:
                rows[own.gives] = program.add(one, other, own.factor, into=recorded.for_sum(own.gives))
            if self._norm is not None:
                rows[self._norm.gives] = self._part.record(program, rows[own.gives], into=into or name)
        recorded.drop(self._drops)


class _RowsOperation(ABC, Generic[S]):
    """A step that gives rows made of others, without a part."""

    def __init__(self, step: S, drops: Sequence[int]) -> None:
        self._step = step
        self._drops = drops

    def run(self, step: StepRows) -> None:
        step.rows[self._step.gives] = self._computed(step)
        _forget(step, self._drops)

    def record(self, recorded: RecordedRows, into: Rows | None) -> None:
        recorded.rows[self._step.gives] = self._recorded(recorded, into)
        recorded.drop(self._drops)

    @abstractmethod
    def _computed(self, step: StepRows) -> torch.Tensor:
        """The rows that the step gives."""

    @abstractmethod
    def _recorded(self, recorded: RecordedRows, into: Rows | None) -> Rows:
        """The same in a program. Raises KernelArgumentError for what programs don't compute."""


class _ScaledOperation(_RowsOperation[Scaled]):
    """Rows times a number."""

    def _computed(self, step: StepRows) -> torch.Tensor:
        return self._step.of(step.rows[self._step.one])

    def _recorded(self, recorded: RecordedRows, into: Rows | None) -> Rows:
        own, scale = self._step, partial(recorded.program.scale, factor=self._step.factor, divides=self._step.divides)
        one = recorded.rows[own.one]
        if into is None and own.one in self._drops and not recorded.is_of_product(own.one):
            recorded.replace(own.one, own.gives)
            return scale(one, into=one)
        return scale(one, into=into or recorded.for_sum(own.gives))


class _ConvertedOperation(_RowsOperation[Converted]):
    """Rows in another dtype."""

    def _computed(self, step: StepRows) -> torch.Tensor:
        return step.rows[self._step.one].to(self._step.dtype)

    def _recorded(self, recorded: RecordedRows, into: Rows | None) -> Rows:
        own, program, one = self._step, recorded.program, recorded.rows[self._step.one]
        if own.dtype == torch.float32:
            return program.widened(one, into=recorded.for_sum(own.gives))
        return program.narrowed(one, into=into or recorded.for_norm(own.gives))


class _TimesInputOperation(_RowsOperation[TimesInput]):
    """Rows times those of a layer's input."""

    def _computed(self, step: StepRows) -> torch.Tensor:
        assert step.inputs is not None
        columns = self._step.columns
        return step.rows[self._step.one] * step.inputs[:, columns.start : columns.stop]

    def _recorded(self, recorded: RecordedRows, into: Rows | None) -> Rows:
        assert recorded.inputs is not None
        own = self._step
        by = recorded.inputs.columns(own.columns.start, own.columns.stop)
        return recorded.program.multiply(recorded.rows[own.one], by, None, into=recorded.for_activation(own.gives))


class _JoinedOperation(_RowsOperation[Joined]):
    """Rows side by side."""

    def _computed(self, step: StepRows) -> torch.Tensor:
        return torch.cat([step.rows[number] for number in self._step.operands], dim=1)

    def _recorded(self, recorded: RecordedRows, into: Rows | None) -> Rows:
        program = recorded.program
        one, other = (recorded.rows[number] for number in self._step.operands)
        name = recorded.for_sum(self._step.gives)
        both = program.scratch(name, one.width + other.width, sampled=one.sampled)
        program.copy_columns(one, both, width=one.width)
        program.copy_columns(other, both, width=other.width, to=one.width)
        return both


class _ColumnsOperation(_RowsOperation[Columns]):
    """Some columns of rows."""

    def _computed(self, step: StepRows) -> torch.Tensor:
        columns = self._step.columns
        return step.rows[self._step.one][:, columns.start : columns.stop].contiguous()

    def _recorded(self, recorded: RecordedRows, into: Rows | None) -> Rows:
        own, program, one = self._step, recorded.program, recorded.rows[self._step.one]
        rows = program.scratch(recorded.for_sum(own.gives), len(own.columns), sampled=one.sampled)
        # A copy, since a sum may take the place of the columns while the rows are still needed.
        program.copy_columns(one, rows, first=own.columns.start, width=rows.width)
        return rows


class _SumInColumnsOperation(_RowsOperation[SumInColumns]):
    """Rows that are added to some columns of others."""

    def _computed(self, step: StepRows) -> torch.Tensor:
        one, other = (step.rows[number] for number in self._step.operands)
        return added_in(one, other, self._step.columns)

    def _recorded(self, recorded: RecordedRows, into: Rows | None) -> Rows:
        own, program = self._step, recorded.program
        rows, other = (recorded.rows[number] for number in own.operands)
        if own.one in self._drops and not recorded.is_of_product(own.one):
            recorded.replace(own.one, own.gives)
        else:
            one, rows = rows, program.scratch(recorded.for_sum(own.gives), rows.width, sampled=rows.sampled)
            program.copy_columns(one, rows, width=one.width)
        program.add_to_columns(rows, other, own.columns)
        return rows


_OF_ROWS: Mapping[type[Step], Any] = {
    Scaled: _ScaledOperation,
    Converted: _ConvertedOperation,
    TimesInput: _TimesInputOperation,
    Joined: _JoinedOperation,
    Columns: _ColumnsOperation,
    SumInColumns: _SumInColumnsOperation,
}
"""The operation of each step that gives rows made of others."""


def _forget(step: StepRows, numbers: Sequence[int]) -> None:
    for number in numbers:
        del step.rows[number]


def operations_of(steps: Sequence[Step], result: int, row_quantum: int) -> list[Operation]:
    """The operations of steps that are all needed. `row_quantum`: torch computes multiples of this many rows."""
    last_use = {number: place for place, step in enumerate(steps) for number in step.operands}
    last_use[result] = len(steps)
    last_mixer = max((place for place, step in enumerate(steps) if _is_mixer(step)), default=-1)
    operations: list[Operation] = []
    place = 0
    while place < len(steps):
        step, first = steps[place], place
        norm = _norm_of(step, steps[place + 1]) if place + 1 < len(steps) else None
        place += 1 if norm is None else 2
        drops = [number for number, last in last_use.items() if first <= last < place]
        if isinstance(step, Sum):
            operations.append(_SumOperation(step, norm, drops))
        elif not isinstance(step, Call):
            operations.append(_OF_ROWS[type(step)](step, drops))
        elif isinstance(step.part, Mixer):
            later = _later(steps, first, last_use) if first == last_mixer else None
            operations.append(_MixerOperation(step, step.part, drops, later))
        elif isinstance(step.part, Reader):
            operations.append(_ReaderOperation(step, step.part, drops, first > last_mixer))
        else:
            operations.append(_PartOperation(step, drops, row_quantum))
    return operations


def _later(steps: Sequence[Step], place: int, last_use: Mapping[int, int]) -> _Later:
    """What is needed behind the step at a place, besides the rows that it gives."""
    given, behind = {step.gives for step in steps[place:]}, steps[place + 1 :]
    return _Later(
        sorted(number for number, last in last_use.items() if last > place and number not in given),
        frozenset(step.angles for step in behind if isinstance(step, Call) and isinstance(step.part, Reader)),
        any(isinstance(step, TimesInput) for step in behind),
    )


def _is_mixer(step: Step) -> bool:
    return isinstance(step, Call) and isinstance(step.part, Mixer)


def _norm_of(step: Step, following: Step) -> Call | None:
    """The step behind a sum, if both are one operation: the norm of the sum."""
    if not isinstance(step, Sum) or step.factor != 1.0 or step.is_wide or not isinstance(following, Call):
        return None
    return following if isinstance(following.part, FUSED_NORMS) and following.given == step.gives else None
