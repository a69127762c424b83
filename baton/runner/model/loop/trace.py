"""Watches one call of transformers' loop over the layers, and says of which steps it consists.

Nothing is known of layers but what they do: which of their parts they call, in which order, and with what. What a part
is given is compared, bit for bit, with what the parts before it have given, with sums of these, and with their products
with the layers' inputs. Factors are numbers of the model's configuration, or of the layer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, reduce
from itertools import permutations, product
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from baton.runner.model.fused.attention import CalledAsAttention
from baton.runner.model.fused.low_rank import TermedMlp
from baton.runner.model.fused.rotation import Rotation
from baton.runner.model.fused.streams import StreamCorrection
from baton.runner.model.layers import head_of
from baton.runner.model.long_angles import LongAngles, is_rotary
from baton.runner.model.loop.angles import AngleKind
from baton.runner.model.loop.factors import factors_of, numbers_of, own_factor
from baton.runner.model.loop.layer_inputs import LayerInputs, has_layer_inputs
from baton.runner.model.loop.logits_map import LogitsKind, LogitsMap
from baton.runner.model.loop.positions import PositionRows, positions_of
from baton.runner.model.loop.seen import Choice, are_angles, are_same, equal, flat, rows_of, takes_choice, tensors
from baton.runner.model.loop.steps import (
    FUSED_NORMS,
    FUSED_PARTS,
    Call,
    Converted,
    Joined,
    Mixer,
    Reader,
    Scaled,
    Step,
    Sum,
    TimesInput,
    parts_of,
)
from baton.runner.model.loop.streams import PartAround, parts_around, step_in_streams
from baton.runner.model.mixtures.router import FusedRouter, RoutedExperts
from baton.runner.model.probe_attention import EchoAttention
from baton.runner.model.stage import OtherLayer, ReceivedRows, looped_parts_of
from baton.runner.model.stored.plan import is_experts

_FEW = 2
"""So many rows of a sum are compared before all are."""
_ROTATED = 3
"""The first arguments of a rotary module: itself, rows, and positions."""


_LIKE_ONE_OF_TWO = Scaled(0, 0, math.sqrt(2), divides=True)
"""What makes the sum of two residuals as large as one of them; no configuration has its number."""


class NotAPlainDecoder(Exception):
    """The model computes something that Baton's loop over the layers does not know; the message says what."""


class _HasLogits(Protocol):
    @property
    def logits(self) -> torch.Tensor: ...


_Output = TypeVar("_Output", bound=_HasLogits)


class _Rotation(NamedTuple):
    """What a call of a rotary module gave."""

    rotary: nn.Module
    arguments: Mapping[str, Any]
    """What it was told besides rows and positions."""
    given: Any


class LoopTrace:
    """The steps of a module's loop over its layers, once it has been called while it is `watched`."""

    def __init__(self, module: Any, echo: EchoAttention) -> None:
        """`echo`: the attention of the call that is watched. Raises NotAPlainDecoder for a module without layers."""
        self.steps: list[Step] = []
        self.angles: list[AngleKind] = []
        self.embedding_factor = 1.0
        """What the embedding's rows are multiplied with to be the first layer's input."""
        self.position_rows: PositionRows | None = None
        """Rows by position that are added to them; None: none are."""
        self.layer_inputs: LayerInputs | None = None
        """What the layers are given of each token besides; None: nothing."""
        self.result = 0
        """The number of the rows that the head takes, or the stage behind."""
        self.width = 0
        """The width of the rows that the first layer takes."""
        self.result_width = 0
        """The width of the rows `result`."""
        self.result_dtype = torch.float32
        """Their dtype."""
        self.dtype = torch.float32
        """The dtype of rows, of which those that are only added to may be float32."""
        self.logits_map = LogitsMap()
        """How the logits follow from the head's output."""
        self._module = module
        self._echo = echo
        self._numbers = numbers_of(module.config)
        self._factors = [1.0]
        """The factors of sums so far, which are tried before all numbers."""
        self._of_layers: list[float] = []
        """The numbers that layers have, and may multiply each of their parts' rows with."""
        self._rows: dict[int, torch.Tensor] = {}
        """The rows that steps may be given, each [T, N]: those since the last layer's end."""
        self.embedding = 0
        """The number of the embedding's rows: those that the first layer takes, or others that a stage receives."""
        self._token_ids, self._embedded = torch.empty(0), torch.empty(0)
        """The token ids of the call that is watched, and their rows, which any layer may ask for as the number
        `embedding`."""
        self._oldest: dict[int, int] = {}
        """The number of the oldest rows in a sum; of other rows their own."""
        self._count = 0
        self._rotations: list[_Rotation] = []
        self._by_position: list[tuple[PositionRows, torch.Tensor]] = []
        """Parts that give rows of positions, and what they gave."""
        self._choice: Choice | None = None
        """What the last router gave that is a part of its own."""
        self._inputs: torch.Tensor | None = None
        """The layers' inputs [T, L * N] of the call that is watched."""
        self._around: Sequence[PartAround] = ()
        """What may make streams of rows before the layers, and rows of these behind them."""
        self._num_mixed = 0
        self._is_done = False
        self._is_asking = False
        """Whether the call that is seen is one that this has made."""
        self._head_rows: torch.Tensor | None = None

    @classmethod
    def of(cls, module: Any, echo: EchoAttention, call: Callable[[], _Output]) -> tuple[LoopTrace, _Output]:
        """What a call of the module showed, and what it gave, whose logits are [T, vocabulary]. `echo`: its attention.

        Raises NotAPlainDecoder.
        """
        trace = cls(module, echo)
        with trace.watched():
            output = call()
        trace.end(output.logits)
        return trace, output

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calls in the body, in which the module is called once. Raises NotAPlainDecoder there."""
        module = self._module
        layers = looped_parts_of(module, module.config.num_hidden_layers)
        if layers is None:
            raise NotAPlainDecoder(f"{type(module).__name__} has no list of layers with attention each")
        embedding, head = module.get_input_embeddings(), head_of(module)
        if head is None:
            raise NotAPlainDecoder(f"{type(module).__name__} has no head")
        base = next(part for part in module.modules() if any(child is layers for child in part.children()))
        own = [layer for layer in layers if not isinstance(layer, OtherLayer)]
        self._of_layers = sorted({number for layer in own for number in factors_of(layer)})
        self._numbers = sorted({*self._numbers, *self._of_layers})
        received = next((layer for layer in layers if isinstance(layer, ReceivedRows)), None)
        with ExitStack() as hooks:

            def before(part: nn.Module, hook: Callable[..., None]) -> None:
                hooks.callback(part.register_forward_pre_hook(hook, with_kwargs=True).remove)

            def behind(part: nn.Module, hook: Callable[..., None]) -> None:
                hooks.callback(part.register_forward_hook(hook, with_kwargs=True).remove)

            behind(embedding, self._left_embedding)
            behind(embedding if received is None else received, partial(self._begin, base))
            inner = [part.rotary for part in module.modules() if isinstance(part, LongAngles)]
            for part in module.modules():
                if is_rotary(part) and all(part is not other for other in inner):
                    behind(part, self._left_rotary)
            for name, part in base.named_children():
                if not is_rotary(part) and all(part is not other for other in (layers, embedding, head)):
                    before(part, self._entered)
                    behind(part, partial(self._left_part_of_base, f"{name} of {type(base).__name__}"))
            for layer in own:
                kind = type(layer).__name__
                for name, part in parts_of(layer):
                    before(part, self._entered)
                    behind(part, partial(self._left, f"{name} of {kind}"))
                is_end = layer is own[-1] and layer is not layers[-1]
                behind(layer, partial(self._left_layer, kind, is_end, own_factor(layer)))
            before(head, self._entered_head)
            behind(head, self._left_head)
            yield
        if self._rows:
            result = self._rows[self.result]
            self.result_width, self.result_dtype = result.shape[1], result.dtype
        self._rows, self._embedded = {}, torch.empty(0)

    def end(self, logits: torch.Tensor) -> None:
        """Find out how the model's logits follow from its head's output. Raises NotAPlainDecoder."""
        if self._head_rows is None:
            return
        kinds: tuple[LogitsKind, ...] = ("times", "over", "capped")
        maps = [LogitsMap(), *(LogitsMap(kind, number) for kind in kinds for number in self._numbers)]
        found = next((fitting for fitting in maps if equal(fitting(self._head_rows), logits)), None)
        if found is None:
            raise NotAPlainDecoder(f"{type(self._module).__name__} changes its head's output")
        self.logits_map, self._head_rows = found, None

    def _left_embedding(self, _embedding: nn.Module, args: Any, _kwargs: Any, out: torch.Tensor) -> None:
        if not self._count and not self._is_asking:
            self._token_ids, self._embedded = args[0][0], flat(out).clone()

    def _begin(self, base: Any, part: nn.Module, _args: Any, _kwargs: Any, out: torch.Tensor) -> None:
        if self._count or self._is_asking:
            return
        token_ids, embedded = self._token_ids, self._embedded
        self.width, self.dtype = flat(out).shape[-1], out.dtype
        self._add(out)
        if isinstance(part, ReceivedRows):
            self.embedding = self._add(embedded)
        self._around = parts_around(base)
        if has_layer_inputs(base):
            self.layer_inputs = inputs = self._asking(lambda: LayerInputs.of(base, token_ids, embedded))
            self._inputs = self._asking(lambda: inputs.rows(token_ids, embedded))

    def _add(self, rows: torch.Tensor) -> int:
        """The number of rows that are new."""
        number, self._count = self._count, self._count + 1
        self._rows[number] = flat(rows).clone()
        self._oldest[number] = number
        return number

    @property
    def _num_seen(self) -> int:
        """How many times layers have asked for attention or a state."""
        return len(self._echo.seen) + len(self._echo.states.seen)

    def _entered(self, _part: nn.Module, _args: Any, _kwargs: Any) -> None:
        self._num_mixed = self._num_seen

    def _left_rotary(self, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        rotary = part.rotary if isinstance(part, LongAngles) else part
        told = [*inspect.signature(type(rotary).forward).bind(rotary, *args, **kwargs).arguments.items()]
        self._rotations.append(_Rotation(part, dict(told[_ROTATED:]), out))

    def _left_part_of_base(self, name: str, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self._is_asking or self._is_done or (self.layer_inputs is not None and part in self.layer_inputs.parts):
            return
        if (found := self._asking(lambda: positions_of(part, args, kwargs, out))) is not None:
            self._by_position.append((found, flat(out)))
        elif self._count:
            self._left(name, part, args, kwargs, out)

    def _left(self, name: str, part: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self._is_asking:
            return
        given, gives = tensors(args, kwargs), rows_of(out)
        if isinstance(part, FusedRouter):
            self._choice = Choice(part, self._explained(given[0], f"{name} takes"), out)
            return
        num_given = sum(value is not None for value in (*args, *kwargs.values()))
        if not given or gives is None:
            raise NotAPlainDecoder(f"{name} takes or gives no rows")
        if self._number_of(flat(gives)) is not None or equal(flat(given[0]), flat(gives)):
            return  # dropout, which leaves rows as they are
        if gives.dtype != given[0].dtype:
            raise NotAPlainDecoder(f"{name} gives {gives.dtype} and takes {given[0].dtype}")
        if is_experts(part) and self._choice is not None and takes_choice(given, self._choice):
            source = self._explained(given[0], f"{name} takes")
            routed = RoutedExperts(self._choice.router, part)
            self.steps.append(Call(routed, source, self._add(gives), beside=self._choice.source))
            return
        is_mixer = isinstance(part, Mixer | Reader)
        if not is_mixer and self._num_seen > self._num_mixed:
            raise NotAPlainDecoder(f"{name} is a {type(part).__name__}, no FusedAttention")
        if not is_mixer and num_given > 1 and not isinstance(part, TermedMlp | StreamCorrection):
            raise NotAPlainDecoder(f"{name} takes more than rows")
        is_known = is_mixer or isinstance(part, FUSED_NORMS + FUSED_PARTS)
        if not is_known and not self._computes_rows_alone(part, given, gives):
            raise NotAPlainDecoder(f"{name} gives rows that depend on each other")
        source = self._explained(given[0], f"{name} takes")
        beside = self._explained(given[1], f"{name} takes") if isinstance(part, StreamCorrection) else None
        angles = self._kind_of_angles(name, part, args, kwargs) if is_mixer else None
        self.steps.append(Call(part, source, self._add(gives), angles, beside))

    def _computes_rows_alone(self, part: nn.Module, given: Sequence[torch.Tensor], gives: torch.Tensor) -> bool:
        """Whether a part gives the same rows if it is given them in another order. A row's tokens may be anyone's."""
        try:
            other = rows_of(self._asking(lambda: part(*(rows.flip(-2) for rows in given))))
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError):
            return False  # what it computes of these rows is decided by more than them
        return other is not None and equal(other.flip(-2), gives)

    def _asking(self, call: Callable[[], Any]) -> Any:
        """What a call gives in which parts of the model are called that are not watched."""
        self._is_asking = True
        try:
            return call()
        finally:
            self._is_asking = False

    def _kind_of_angles(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> int | None:
        told = next((value for value in (*args, *kwargs.values()) if are_angles(value)), None)
        if told is None:
            return None
        found = next((rotation for rotation in self._rotations if are_same(rotation.given, told)), None)
        if found is None:
            raise NotAPlainDecoder(f"{name} takes angles of no rotary module")
        rotation = part.rotation if isinstance(part, CalledAsAttention) else Rotation("halves", "halves")
        kind = AngleKind(found.rotary, found.arguments, rotation.of_angles)
        if kind not in self.angles:
            self.angles.append(kind)
        return self.angles.index(kind)

    def _left_layer(
        self, name: str, is_end: bool, factor: float, _layer: nn.Module, _args: Any, _kwargs: Any, out: Any
    ) -> None:
        """`factor`: what the layer may multiply its rows with at its end."""
        rows = rows_of(out)
        if rows is None:
            raise NotAPlainDecoder(f"{name} gives no rows")
        scaled = None if factor == 1.0 else self._explained_as_scaled(flat(rows), Scaled(0, 0, factor))
        self.result = self._explained(rows, f"{name} gives") if scaled is None else scaled
        self._rows = {self.result: self._rows[self.result]}
        self._is_done = is_end

    def _entered_head(self, _head: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_done:
            given = tensors(args, kwargs)[0]
            found = self._number_of(flat(given))
            if found is None:
                scalings = (Scaled(0, 0, *both) for both in product(self._numbers, (False, True)))
                scaled = (self._explained_as_scaled(flat(given), scaling) for scaling in scalings)
                found = next((number for number in scaled if number is not None), None)
            self.result = self._explained(given, "the head takes") if found is None else found

    def _left_head(self, _head: nn.Module, _args: Any, _kwargs: Any, out: torch.Tensor) -> None:
        if not self._is_done:
            self._head_rows = flat(out)

    def _number_of(self, rows: torch.Tensor) -> int | None:
        return next((number for number, known in self._rows.items() if equal(known, rows)), None)

    def _explained(self, given: torch.Tensor, what: str) -> int:
        """The number of rows [..., N], which are known or become so by a sum or a product of known ones."""
        rows = flat(given)
        number = self._number_of(rows)
        if number is None and self._count == 1:
            number = self._explained_as_embedding(rows)
        if number is None and self.layer_inputs is not None and rows.shape[1] == self.layer_inputs.layer_width:
            number = self._explained_by_inputs(rows)
        if number is None and rows.shape[1] > self.width:
            number = self._explained_as_joined(rows)
        if number is None:
            number = self._explained_in_streams(rows)
        if number is None:
            number = self._explained_as_converted(rows)
        if number is None:
            number = self._explained_as_sum(rows)
        if number is None:
            scalings = (*(Scaled(0, 0, factor) for factor in self._of_layers), _LIKE_ONE_OF_TWO)
            scaled = (self._explained_as_scaled(rows, scaling) for scaling in scalings)
            number = next((found for found in scaled if found is not None), None)
        if number is None:
            number = self._explained_as_sum_of_scaled(rows)
        if number is None:
            raise NotAPlainDecoder(f"{what} rows that are no sum of those before them")
        return number

    def _explained_as_embedding(self, rows: torch.Tensor) -> int | None:
        """0 if the rows are those of the embedding, times a factor, plus rows of positions."""
        factors = (1.0, *self._numbers, *(number**0.5 for number in self._numbers if number > 0))
        for (part, added), factor in product(((None, None), *self._by_position), factors):
            scaled = self._rows[0] if factor == 1.0 else self._rows[0] * factor
            if equal(scaled if added is None else scaled + added, rows):
                self.embedding_factor, self.position_rows = factor, part
                self._rows[0] = self._embedded = rows.clone()
                return 0
        return None

    def _explained_as_joined(self, rows: torch.Tensor) -> int | None:
        """The number of rows that are known ones and, beside them, others, or those of the embedding."""
        known = {self.embedding: self._embedded, **self._rows}
        for one, other in permutations(known, 2):
            parts = known[one], known[other]
            is_alike = parts[0].dtype == parts[1].dtype and sum(part.shape[1] for part in parts) == rows.shape[1]
            if is_alike and equal(torch.cat(parts, dim=1), rows):
                number = self._add(rows)
                self.steps.append(Joined(one, other, number))
                return number
        return None

    def _explained_in_streams(self, rows: torch.Tensor) -> int | None:
        """The number of rows that are some columns of known ones, or have others added there."""
        step = self._asking(lambda: step_in_streams(rows, self._rows, self._around, gives=self._count))
        if step is None:
            return None
        self.steps.append(step)
        return self._add(rows)

    def _explained_as_converted(self, rows: torch.Tensor) -> int | None:
        """The number of rows that are known ones in another dtype."""
        others = (number for number, known in self._rows.items() if known.dtype != rows.dtype)
        found = next((number for number in others if equal(self._rows[number].to(rows.dtype), rows)), None)
        return None if found is None else self._add_converted(found, rows.dtype)

    def _add_converted(self, one: int, dtype: torch.dtype) -> int:
        number = self._add(self._rows[one].to(dtype))
        self._oldest[number] = self._oldest[one]
        self.steps.append(Converted(one, number, dtype))
        return number

    def _explained_by_inputs(self, rows: torch.Tensor) -> int | None:
        """The number of rows [T, N] that are known ones times the columns of a layer's input."""
        width, inputs = rows.shape[1], self._inputs
        assert inputs is not None
        alike = [number for number, known in self._rows.items() if known.shape == rows.shape]
        for first, one in product(range(0, inputs.shape[1], width), alike):
            columns = range(first, first + width)
            if equal(self._rows[one] * inputs[:, first : columns.stop], rows):
                number = self._add(rows)
                self.steps.append(TimesInput(one, columns, number))
                return number
        return None

    def _explained_as_scaled(self, rows: torch.Tensor, scaled: Scaled) -> int | None:
        """The number of rows that are known ones, or the sum of two or three, and `scaled`, whose numbers of rows are
        none."""
        alike = [number for number, known in self._rows.items() if known.shape == rows.shape]
        found = next((one for one in alike if equal(scaled.of(self._rows[one]), rows)), None)
        if found is None:
            for one, *others in (*permutations(alike, 2), *permutations(alike, 3)):
                sums = (scaled.of(self._sum(one, others, 1.0, count)) for count in (_FEW, len(rows)))
                if all(equal(total, rows[: len(total)]) for total in sums):
                    other = others[0] if len(others) == 1 else self._add_sum(*others, factor=1.0)
                    found = self._add_sum(one, other, factor=1.0)
                    break
            else:
                return None
        return self._add_scaled(found, scaled)

    def _add_scaled(self, one: int, scaled: Scaled) -> int:
        number = self._add(scaled.of(self._rows[one]))
        self._oldest[number] = self._oldest[one]
        self.steps.append(replace(scaled, one=one, gives=number))
        return number

    def _explained_as_sum_of_scaled(self, rows: torch.Tensor) -> int | None:
        """The number of rows that are known ones plus the sum of two others, each or one of them times a number."""
        alike = [number for number, known in self._rows.items() if known.shape == rows.shape]
        pairs = product((1.0, *self._of_layers), self._of_layers)
        for factors, (one, *others) in product(pairs, permutations(alike, 3)):
            sums = (self._sum_of_scaled(one, others, factors, count) for count in (_FEW, len(rows)))
            if all(equal(total, rows[: len(total)]) for total in sums):
                first = others[0] if factors[0] == 1.0 else self._add_scaled(others[0], Scaled(0, 0, factors[0]))
                return self._add_sum(one, self._add_sum(first, others[1], factor=factors[1]), factor=1.0)
        return None

    def _sum_of_scaled(self, one: int, others: Sequence[int], factors: Sequence[float], count: int) -> torch.Tensor:
        """The first rows of one + (the sum of the others, each times its factor)."""
        parts = (self._rows[number][:count] * factor for number, factor in zip(others, factors, strict=True))
        return self._rows[one][:count] + reduce(torch.add, parts)

    def _explained_as_sum(self, rows: torch.Tensor) -> int | None:
        alike = [number for number, known in self._rows.items() if known.shape == rows.shape]
        # Factors that were found once first, and all numbers only if that isn't enough.
        for factors in ([*self._factors], self._numbers):
            for factor, (one, *others) in product(factors, (*permutations(alike, 2), *permutations(alike, 3))):
                if all(equal(self._sum(one, others, factor, count), rows[:count]) for count in (_FEW, len(rows))):
                    if factor not in self._factors:
                        self._factors.append(factor)
                    other = others[0] if len(others) == 1 else self._add_sum(*others, factor=1.0)
                    return self._add_sum(one, other, factor=factor)
        if rows.dtype == torch.float32:
            for one, other in permutations(alike, 2):
                if self._rows[one].dtype != rows.dtype and equal(self._rows[one].float() + self._rows[other], rows):
                    return self._add_sum(self._add_converted(one, rows.dtype), other, factor=1.0)
        return None

    def _sum(self, one: int, others: Sequence[int], factor: float, count: int) -> torch.Tensor:
        """The first rows of one + (the sum of the others) * factor."""
        total = reduce(torch.add, (self._rows[number][:count] for number in others))
        return self._rows[one][:count] + (total if factor == 1.0 else total * factor)

    def _add_sum(self, one: int, other: int, *, factor: float) -> int:
        if factor == 1.0:  # the older rows are those that a program replaces by the sum
            one, other = sorted((one, other), key=lambda number: self._oldest[number])
        number = self._add(self._sum(one, (other,), factor, len(self._rows[one])))
        self._oldest[number] = min(self._oldest[one], self._oldest[other])
        is_wide = self._rows[one].dtype != self._rows[other].dtype
        if is_wide and (factor != 1.0 or self._rows[one].dtype != torch.float32):
            raise NotAPlainDecoder("rows in float32 are added to others, and these or their factor are no residual")
        self.steps.append(Sum(one, other, number, factor, is_wide))
        return number
