"""Baton's own loop over the layers of a plain decoder, which computes bit for bit what transformers' loop does.

It saves transformers' work around each layer. In the last layer, of rows that don't sample it computes only keys and
values. It is used only if its logits equal those of transformers' loop (transformer.py). Where the operations have
programs, the loop runs once to record a program; a step is then a single call, of the same kernels in the same order.

The loop of a stage begins with the rows of the stage before it, and ends with the rows for the one behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from baton.runner.adapters.model_adapters import ModelAdapters
from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.model.attention import PagedAttention
from baton.runner.model.fused_layers import FusedAttention, FusedMlp, FusedNorm, whole_angles
from baton.runner.model.layers import PackedLinear
from baton.runner.model.long_angles import LongAngles
from baton.runner.model.stage import NoHead, OtherLayer

_PIECE = 1024
_Part = TypeVar("_Part", bound=nn.Module)


class RotaryTable:
    """Cosines and sines by position, computed once in pieces of _PIECE positions, so no row depends on its step."""

    def __init__(self, rotary: nn.Module, like: torch.Tensor, half_angles: bool, longest: int) -> None:
        """`longest`: the most tokens of a sequence; transformers changes some angles for good in a longer call."""
        self._rotary = rotary
        self._like = like
        self._half_angles = half_angles
        self._longest = longest
        self._pieces: list[torch.Tensor] = []
        self._table = like
        """Cosines and sines of all pieces: [2, positions, R]."""
        self._long_pieces: list[torch.Tensor] = []
        self._long_table = like
        """The same for long sequences, of a model in which they have others."""
        self._axes: torch.Tensor | None = None
        """For each angle, int64 [R], which of a position's three numbers it follows; None while nobody asked."""

    @property
    def width(self) -> int:
        """R, the number of angles for a position."""
        return self.rows(np.zeros(1, dtype=np.int64))[0].shape[1]

    def rows(self, positions: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, R] of positions [T], or of positions in three dimensions [3, T] (M-RoPE)."""
        needed = int(positions.max(initial=0)) // _PIECE + 1
        if needed > len(self._pieces):
            self._grow(needed)
        is_long = self._rotary.is_long if isinstance(self._rotary, LongAngles) else None
        at = torch.from_numpy(positions).to(self._like.device)
        if is_long is not None:
            long, short = self._long_table.index_select(1, at), self._table.index_select(1, at)
            cos, sin = torch.where(is_long[:, None], long, short).unbind()
        elif positions.ndim == 1:
            cos, sin = self._table.index_select(1, at).unbind()
        else:
            if self._axes is None:
                self._axes = self._find_axes()
            cos, sin = self._table.gather(1, at[self._axes].T.expand(2, -1, -1)).unbind()
        return cos, sin

    def _grow(self, num_pieces: int) -> None:
        """Compute further pieces, so that there are `num_pieces`."""
        rotary = self._rotary
        for piece in range(len(self._pieces), num_pieces):
            at = torch.arange(piece * _PIECE, (piece + 1) * _PIECE, device=self._like.device)[None]
            at = at.clamp(max=self._longest - 1)
            if isinstance(rotary, LongAngles):
                self._pieces.append(self._stacked(rotary.short(self._like, at)))
                self._long_pieces.append(self._stacked(rotary.long(self._like, at)))
                self._long_table = torch.cat(self._long_pieces, dim=1)
            else:
                self._pieces.append(self._stacked(rotary(self._like, at)))
        self._table = torch.cat(self._pieces, dim=1)

    def _stacked(self, angles: Sequence[torch.Tensor]) -> torch.Tensor:
        """Cosines and sines [2, T, R] of what a rotary module gives for positions [1, T]."""
        return torch.stack([whole_angles(part[0], self._half_angles) for part in angles])

    def _find_axes(self) -> torch.Tensor:
        """Find out which angles change with which of a position's three numbers."""
        at = torch.zeros(3, 1, 3, dtype=torch.int64, device=self._like.device)
        at[range(3), 0, range(3)] = 1
        _, sin = (whole_angles(angles[0], self._half_angles) for angles in self._rotary(self._like, at))
        # The sine of an angle is 0 in the rows whose position is 0 in the dimension that it follows.
        axes: torch.Tensor = (sin != 0).to(torch.int64).argmax(dim=0)
        return axes


class GivenRows(NamedTuple):
    """Rows in place of the embedding's output."""

    at: torch.Tensor
    """Their places among the step's rows, int64 [G]."""
    rows: torch.Tensor
    """[G, width] in the dtype of the embedding's output."""

    def replace_in(self, x: torch.Tensor) -> torch.Tensor:
        """The output [T, width] of the embedding with these rows, which it is changed to."""
        x[self.at] = self.rows
        return x


@contextmanager
def given_to(embedding: nn.Module, given: GivenRows) -> Iterator[None]:
    """Let an embedding give these rows in the body, as a model of transformers takes them by `inputs_embeds`."""

    def replaced(_module: nn.Module, _arguments: Any, out: torch.Tensor) -> torch.Tensor:
        given.replace_in(out[0])
        return out

    handle = embedding.register_forward_hook(replaced)
    try:
        yield
    finally:
        handle.remove()


class HiddenAndLogits(NamedTuple):
    """The result of a step for the rows that are wanted, in float32."""

    hidden: npt.NDArray[np.float32]
    """The input of the head, behind the last norm: [rows, hidden size]."""
    logits: npt.NDArray[np.float32]
    """The output of the head for all of these rows, or the first ones: [rows, vocabulary]."""
    queries: npt.NDArray[np.float32] | None = None
    """The scaled queries of the heads that align a transcript, [rows, heads, size]; None where no head does."""


class ModelOutput(NamedTuple):
    """The output of a model for some rows; that of a stage before the last one for all rows."""

    hidden: torch.Tensor
    """The input of the head, behind the last norm: [rows, hidden size]. Before the last stage: the input of the next
    stage's layers."""
    logits: torch.Tensor
    """The output of the head: float32 [rows, vocabulary], whatever the dtype of the layers; [rows, 0] without a
    head."""


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are equal, where NaN equals NaN."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


class _Wanted(NamedTuple):
    """What a program computes of a step."""

    sampling: bool
    """Whether it is of exactly the rows that sample, and not of any rows."""
    logits: bool
    """Whether it has the head."""


class NotAPlainDecoder(Exception):
    """The model has parts that Baton's loop over the layers does not know; the message names one."""


class Decoder:
    """An embedding, layers that add attention and then an MLP to the residual stream, a norm, and the head.

    A stage has some of the layers, and only the last one has a head.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        row_quantum: int,
        adapters: ModelAdapters,
        longest: int,
    ) -> None:
        """`row_quantum`: torch computes with multiples of this many rows. `longest`: the most tokens of a sequence.

        Raises NotAPlainDecoder for other parts.
        """
        self._adapters = adapters
        base = _part(module, "model")
        self._dtype = dtype
        self._device = device
        self._embed = _part(base, "embed_tokens")
        has_head = not isinstance(_part(module, "lm_head"), NoHead)
        self._head = _part_as(PackedLinear, module, "lm_head") if has_head else None
        layers = [layer for layer in _part(base, "layers").children() if not isinstance(layer, OtherLayer)]
        self._layers = [_Layer(layer, row_quantum) for layer in layers]
        # The norm that follows each MLP: the next layer's first norm, and behind the last layer the model's own.
        next_norms = [_part_as(FusedNorm, layer, "input_layernorm") for layer in layers[1:]]
        self._next_norms = [*next_norms, _part_as(FusedNorm, base, "norm")]
        self._width: int = self._next_norms[-1].rms_weight.shape[0]
        """The hidden size."""
        self._rotary = RotaryTable(
            _part(base, "rotary_emb"),
            torch.empty(1, dtype=dtype, device=device),
            all(layer.attention.half_angles for layer in self._layers),
            longest,
        )
        self._programs: dict[_Wanted, Program] = {}
        self._paged: PagedAttention | None = None
        self.why_no_programs = "no program was recorded"
        """Why a step's layers are not computed in one call; empty when they are."""

    @property
    def why_not_fused(self) -> str:
        """Why torch computes more than copies; empty when all computation is in Baton's operations."""
        fused = all(isinstance(layer.mlp, FusedMlp) for layer in self._layers)
        return "" if fused else "an MLP is of a kind that Baton's kernels don't fuse"

    def compute(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        logits_rows: torch.Tensor,
        sampling: bool,
        received: torch.Tensor | None = None,
        num_logits: int | None = None,
        given: GivenRows | None = None,
    ) -> ModelOutput:
        """Compute a step for the rows `logits_rows`. `sampling`: these are exactly the layout's rows that sample.

        `received`: the rows [T, hidden size] of the stage before; None in the first one. `num_logits`: how many of the
        rows have logits, the first ones; the others have hidden states alone. None: all have both. `given`: for the
        first stage, rows that replace those of the embedding.
        """
        angles = self._rotary.rows(positions)
        # A program computes in place.
        x = self._embedded(token_ids, given) if received is None else received.clone()
        if self._head is None:
            return ModelOutput(self._run_stage(x, angles), x.new_empty(x.shape[0], 0, dtype=torch.float32))
        needs_head_apart = num_logits is not None and num_logits < logits_rows.shape[0]
        if self._programs and not needs_head_apart:
            return self._run(self._programs[_Wanted(sampling, True)], self._head, x, angles, logits_rows)
        if self._programs:
            hidden = self._run(self._programs[_Wanted(sampling, False)], None, x, angles, logits_rows).hidden
            self._adapters.rows.keep(logits_rows)
        else:
            hidden = self._hidden(x, *angles, logits_rows, sampling=sampling)
        if num_logits is not None:
            self._adapters.rows.keep_first(num_logits)
        return ModelOutput(hidden, self._head.rows(hidden[:num_logits]))

    def embedded(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        received: torch.Tensor | None = None,
        given: GivenRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The input of the layers: rows [T, hidden], cosines and sines [T, R]. `received`, `given`: as in `compute`."""
        x = self._embedded(token_ids, given) if received is None else received
        return x, *self._rotary.rows(positions)

    def _embedded(self, token_ids: npt.NDArray[np.int64], given: GivenRows | None) -> torch.Tensor:
        rows: torch.Tensor = self._embed(torch.from_numpy(token_ids).to(self._device))
        return rows if given is None else given.replace_in(rows)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """The logits of the rows that sample, from the output of `embedded`, one call for each operation.

        In a stage without a head: all rows behind its last layer. x may be overwritten.
        """
        if self._head is None:
            return self._loop(x, cos, sin, None)[0]
        return self._head.rows(self._hidden(x, cos, sin, logits_rows, sampling=True))

    def _hidden(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, logits_rows: torch.Tensor, *, sampling: bool
    ) -> torch.Tensor:
        _, normed = self._loop(x, cos, sin, logits_rows if sampling else None)
        if sampling:
            return normed
        self._adapters.rows.keep(logits_rows)
        return normed[logits_rows]

    def _loop(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sampling_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream behind the last layer, and its norm: of all rows, or of `sampling_rows`."""
        normed: torch.Tensor = self._layers[0].attention_norm(x)
        last = self._layers[-1]
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            sample_rows = sampling_rows if layer is last else None
            attended = layer.attention.rows(normed, cos, sin, sample_rows)
            if attended.shape[0] == 0:
                return attended, attended
            x, normed = layer.mlp_norm.add(attended, x if sample_rows is None else x[sample_rows])
            x, normed = next_norm.add(layer.mlp_rows(normed), x)
        return x, normed

    def record(self, operations: Operations, paged: PagedAttention) -> None:
        """Record the programs with which `compute` computes a step in one call, if operations and layers allow it."""
        self.why_no_programs = self.why_not_fused
        if self.why_no_programs:
            return
        programs: dict[_Wanted, Program] = {}
        both = (False, True)
        of_model = [_Wanted(sampling, logits) for sampling in both for logits in both]
        for wanted in [_Wanted(False, False)] if self._head is None else of_model:
            program = operations.program(self._dtype)
            if program is None:
                self.why_no_programs = "these operations have no programs"
                return
            try:
                self._record(program, paged, *wanted)
            except KernelArgumentError as error:
                self.why_no_programs = f"the kernels can't take it without padding, which only single calls do: {error}"
                return
            programs[wanted] = program
        self._programs, self._paged, self.why_no_programs = programs, paged, ""

    def _record(self, program: Program, paged: PagedAttention, sampling: bool, logits: bool) -> None:
        """Record what `compute` does after the embedding; `x` stays in one buffer from the first layer to the last.

        Without `logits` it ends before the head.
        """
        x = program.argument(self._width)
        cos, sin = (program.argument(self._rotary.width) for _ in range(2))
        hidden: str | Rows = "normed"
        if self._head is not None:
            hidden = program.argument(self._width, sampled=True)
            # Declared before all scratch, which ranks share, so that they count the same buffers.
            if logits:
                into_logits = program.argument(self._head.out_features, sampled=True, dtype=torch.float32)
        normed = self._layers[0].attention_norm.record(program, x, into="normed")
        last = self._layers[-1]
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            only_samples = sampling and layer is last
            attended = layer.attention.record(program, normed, cos, sin, paged, sampling=only_samples, into="share")
            if only_samples:
                x = program.take_sampled(x, into="sampled x")
            normed = layer.mlp_norm.record_add(program, attended, x, into="normed")
            into = hidden if only_samples else "normed"
            normed = next_norm.record_add(program, layer.mlp.record(program, normed, into="share"), x, into=into)
        if self._head is not None:
            if not sampling:
                normed = program.take_sampled(normed, into=hidden)
            if logits:
                self._head.record(program, normed, into=into_logits)

    def _run(
        self,
        program: Program,
        head: PackedLinear | None,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        logits_rows: torch.Tensor,
    ) -> ModelOutput:
        """The rows' hidden states, and their logits if the program has the head."""
        hidden = x.new_empty(logits_rows.shape[0], self._width)
        width = 0 if head is None else head.out_features
        logits = x.new_empty(logits_rows.shape[0], width, dtype=torch.float32)
        arguments = [x, *angles, hidden] + ([] if head is None else [logits])
        program.run(arguments, self._layout, logits_rows, self._adapters.of_step())
        return ModelOutput(hidden, logits)

    def _run_stage(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The residual stream behind the last layer of this stage; x may be overwritten."""
        if not self._programs:
            return self._loop(x, *angles, None)[0]
        nothing = torch.empty(0, dtype=torch.int64)
        self._programs[_Wanted(False, False)].run([x, *angles], self._layout, nothing, self._adapters.of_step())
        return x

    @property
    def _layout(self) -> StepLayout:
        if self._paged is None or self._paged.layout is None:
            raise RuntimeError("attention was called outside of a step")
        return self._paged.layout


class _Layer:
    """The parts of one layer: it computes x + attention(norm(x)), and of that x the sum x + mlp(norm(x))."""

    def __init__(self, layer: nn.Module, row_quantum: int) -> None:
        names = {name for name, part in layer.named_children() if not isinstance(part, nn.Dropout)}
        if names != {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
            raise NotAPlainDecoder(f"{type(layer).__name__} has the parts {', '.join(sorted(names))}")
        self.attention = _part_as(FusedAttention, layer, "self_attn")
        self.mlp: Any = _part(layer, "mlp")
        self.attention_norm = _part_as(FusedNorm, layer, "input_layernorm")
        self.mlp_norm = _part_as(FusedNorm, layer, "post_attention_layernorm")
        self._row_quantum = row_quantum
        self.mlp_rows = self.mlp.rows if isinstance(self.mlp, FusedMlp) else self._any_mlp

    def _any_mlp(self, x: torch.Tensor) -> torch.Tensor:
        # The last layer gets only the rows that sample, which are not padded.
        padded = functional.pad(x, (0, 0, 0, -x.shape[0] % self._row_quantum))
        out = self.mlp(padded.unsqueeze(0))
        rows: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return rows.view(padded.shape)[: x.shape[0]]


def _part(module: nn.Module, name: str) -> nn.Module:
    part = getattr(module, name, None)
    if not isinstance(part, nn.Module):
        raise NotAPlainDecoder(f"{type(module).__name__} has no part {name}")
    return part


def _part_as(kind: type[_Part], module: nn.Module, name: str) -> _Part:
    part = _part(module, name)
    if not isinstance(part, kind):
        raise NotAPlainDecoder(f"{name} of {type(module).__name__} is a {type(part).__name__}, no {kind.__name__}")
    return part
