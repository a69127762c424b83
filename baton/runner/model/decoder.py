"""Baton's own loop over the layers of a decoder, which computes bit for bit what transformers' loop does.

Its steps are those that transformers' loop was seen to take (loop/trace.py). It saves transformers' work around each
layer, and of rows that don't sample the last layer computes only keys and values. It is used only if its logits equal
those of transformers' loop (transformer.py). Where the operations have programs, the loop runs once to record a
program; a step is then a single call, of the same kernels in the same order.

The loop of a stage begins with the rows of the stage before it, and ends with the rows for the one behind it. They may
be as wide as all streams of a model, of which the embedding gives and the head takes one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from baton.runner.adapters.model_adapters import ModelAdapters
from baton.runner.backends.attention_call import StepLayout
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.model.attention import PagedAttention
from baton.runner.model.layers import PackedLinear, head_of
from baton.runner.model.loop.angles import AngleTables
from baton.runner.model.loop.operations import RecordedRows, StepRows, operations_of
from baton.runner.model.loop.seen import same_bits
from baton.runner.model.loop.steps import FUSED_NORMS, FUSED_PARTS, Call, IsLimited, Mixer, Reader, needed_steps
from baton.runner.model.loop.trace import LoopTrace, NotAPlainDecoder
from baton.runner.model.stage import NoHead, Received


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


NO_ROWS = np.empty((0, 0), dtype=np.float32)
"""Stands for rows that are not wanted in the host's memory."""


class HiddenAndLogits(NamedTuple):
    """The result of a step for the rows that are wanted, in float32."""

    hidden: npt.NDArray[np.float32]
    """The input of the head, behind the last norm: [rows, hidden size]."""
    logits: npt.NDArray[np.float32]
    """The output of the head for all of these rows, or the first ones: [rows, vocabulary]."""
    queries: npt.NDArray[np.float32] | None = None
    """The scaled queries of the heads that align a transcript, [rows, heads, size]; None where no head does."""
    there: torch.Tensor | None = None
    """The logits on the device, if tokens are drawn from them there and nobody else needs them; `logits` has none."""


class ModelOutput(NamedTuple):
    """The output of a model for some rows; that of a stage before the last one for all rows."""

    hidden: torch.Tensor
    """The input of the head, behind the last norm: [rows, hidden size]. Before the last stage: the input of the next
    stage's layers."""
    logits: torch.Tensor
    """The output of the head: float32 [rows, vocabulary], whatever the dtype of the layers; [rows, 0] without a
    head."""

    def has_bits_of(self, other: ModelOutput) -> bool:
        return same_bits(self.logits, other.logits) and same_bits(self.hidden, other.hidden)


class StepInput(NamedTuple):
    """What the layers of a step begin with."""

    x: torch.Tensor
    """The rows [T, hidden size] of the embedding, or of the stage before; they may be overwritten."""
    cos: torch.Tensor
    """[T, R], for all kinds of angles"""
    sin: torch.Tensor
    inputs: torch.Tensor | None = None
    """The layers' inputs [T, L * N] (loop/layer_inputs.py); None: the model has none."""
    embedding: torch.Tensor | None = None
    """The rows [T, N] of the embedding, for a stage that takes others and looks at these, too; None: x, or unused."""

    @property
    def arguments(self) -> list[torch.Tensor]:
        """The arguments of a program, in its order."""
        return [part for part in self if part is not None]


class _Wanted(NamedTuple):
    """What a program computes of a step."""

    sampling: bool
    """Whether it is of exactly the rows that sample, and not of any rows."""
    logits: bool
    """Whether it has the head."""


class Decoder:
    """An embedding, the steps of the layers and of the norm behind them, and the head.

    A stage has some of the layers, and only the last one has a head.
    """

    def __init__(
        self,
        module: Any,
        trace: LoopTrace,
        dtype: torch.dtype,
        device: torch.device,
        row_quantum: int,
        adapters: ModelAdapters,
        longest: int,
    ) -> None:
        """`trace`: of the module's own loop. `row_quantum`: torch computes with multiples of this many rows. `longest`:
        the most tokens of a sequence.

        Raises NotAPlainDecoder for a head that is no product, and for rows of another dtype.
        """
        is_behind_others = bool(trace.embedding)
        if trace.dtype != dtype and not is_behind_others:
            raise NotAPlainDecoder(f"its embedding gives {trace.dtype}, not {dtype}")
        self._adapters = adapters
        self._dtype = dtype
        self._device = device
        self._embed = module.get_input_embeddings()
        self._embedding_factor = trace.embedding_factor
        self._position_rows = trace.position_rows
        self._layer_inputs = trace.layer_inputs
        head = head_of(module)
        if not isinstance(head, PackedLinear | NoHead):
            raise NotAPlainDecoder(f"its head is a {type(head).__name__}, no PackedLinear")
        self._head = head if isinstance(head, PackedLinear) else None
        self._map_logits = trace.logits_map
        self._steps = needed_steps(trace.steps, trace.result)
        parts = [step.part for step in self._steps if isinstance(step, Call)]
        self._limited = [part for part in parts if isinstance(part, IsLimited)]
        self._most_rows = min((part.most_recorded_rows for part in self._limited), default=sys.maxsize)
        self._result = trace.result
        self._width, self._result_width = trace.width, trace.result_width
        """The widths of the rows that the first layer takes, and of those that the head or the next stage takes."""
        self._row_dtype, self._result_dtype = trace.dtype, trace.result_dtype
        """Their dtypes; between stages some models have float32."""
        operands = {number for step in self._steps for number in step.operands}
        self._embedding = trace.embedding if trace.embedding and trace.embedding in operands else None
        """The number of the embedding's rows, in a stage that takes others and looks at these, too."""
        self._operations = operations_of(self._steps, trace.result, row_quantum)
        self._angles = AngleTables(trace.angles, torch.empty(1, dtype=dtype, device=device), longest)
        self._programs: dict[_Wanted, Program] = {}
        self._paged: PagedAttention | None = None
        self.why_no_programs = "no program was recorded"
        """Why a step's layers are not computed in one call; empty when they are."""

    @property
    def why_not_fused(self) -> str:
        """Why torch computes more than copies; empty when all computation is in Baton's operations."""
        parts = (step.part for step in self._steps if isinstance(step, Call))
        fused = (*FUSED_NORMS, *FUSED_PARTS, Mixer, Reader)
        by_torch = next((part for part in parts if not isinstance(part, fused)), None)
        return "" if by_torch is None else f"{type(by_torch).__name__} is of a kind that Baton's kernels don't fuse"

    def _has_program(self, num_rows: int) -> bool:
        """Whether a program computes a step: its rows may be too many, or have adapters that programs don't know."""
        if not self._programs or num_rows > self._most_rows:
            return False
        return self._adapters.rows.slots is None or not any(part.is_adapted for part in self._limited)

    def compute(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        logits_rows: torch.Tensor,
        sampling: bool,
        received: Received | None = None,
        num_logits: int | None = None,
        given: GivenRows | None = None,
    ) -> ModelOutput:
        """Compute a step for the rows `logits_rows`. `sampling`: these are exactly the layout's rows that sample.

        `received`: what the stage before has sent; None in the first one. `num_logits`: how many of the rows have
        logits, the first ones; the others have hidden states alone. None: all have both. `given`: for the first stage,
        rows that replace those of the embedding.
        """
        # A program computes in place.
        step = self.embedded(token_ids, positions, None if received is None else received.copy(), given)
        num_rows = step.x.shape[0]
        if self._head is None:
            return ModelOutput(self._run_stage(step), step.x.new_empty(num_rows, 0, dtype=torch.float32))
        needs_head_apart = num_logits is not None and num_logits < logits_rows.shape[0]
        if self._has_program(num_rows) and not needs_head_apart:
            return self._run(self._programs[_Wanted(sampling, True)], self._head, step, logits_rows)
        if self._has_program(num_rows):
            hidden = self._run(self._programs[_Wanted(sampling, False)], None, step, logits_rows).hidden
            self._adapters.rows.keep(logits_rows)
        else:
            hidden = self._hidden(step, logits_rows, sampling=sampling)
        if num_logits is not None:
            self._adapters.rows.keep_first(num_logits)
        return ModelOutput(hidden, self._map_logits(self._head.rows(hidden[:num_logits])))

    def require_bits(
        self,
        expected: ModelOutput,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        logits_rows: torch.Tensor,
        received: Received | None,
    ) -> None:
        """Raise NotAPlainDecoder if a step, as in `compute`, has other bits than transformers' loop gave."""
        output = self.compute(token_ids, positions, logits_rows, False, received)
        is_hidden_same = self._head is not None or same_bits(expected.hidden, output.hidden)
        if not is_hidden_same or not same_bits(expected.logits, output.logits):
            raise NotAPlainDecoder("its logits are not those of transformers' loop, bit for bit")

    def embedded(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        received: Received | None = None,
        given: GivenRows | None = None,
    ) -> StepInput:
        """The input of the layers. `received`, `given`: as in `compute`."""
        cos, sin = self._angles.rows(positions)
        ids = torch.from_numpy(token_ids).to(self._device)
        if received is not None:
            x, embedding = received
            inputs = None
            if self._layer_inputs is not None and embedding is not None:
                inputs = self._layer_inputs.rows(ids, embedding)
            return StepInput(x, cos, sin, inputs, None if self._embedding is None else embedding)
        rows: torch.Tensor = self._embed(ids)
        if given is not None:
            rows = given.replace_in(rows)
        inputs = None if self._layer_inputs is None else self._layer_inputs.rows(ids, rows)
        rows = rows if self._embedding_factor == 1.0 else rows * self._embedding_factor
        if self._position_rows is not None:
            rows = rows + self._position_rows.rows(torch.from_numpy(positions).to(self._device))
        return StepInput(rows, cos, sin, inputs)

    @property
    def looks_at_tokens(self) -> bool:
        """Whether the layers are given more of a token than its embedding."""
        return self._layer_inputs is not None

    @property
    def looks_at_embedding(self) -> bool:
        """Whether layers behind the first stage are given rows of the embedding, or what follows from them."""
        return self._embedding is not None or self._layer_inputs is not None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """The logits of the rows that sample, from the output of `embedded`, one call for each operation.

        In a stage without a head: all rows behind its last layer. x may be overwritten. For models without inputs of
        layers.
        """
        step = StepInput(x, cos, sin)
        if self._head is None:
            return self._loop(step, None)
        return self._map_logits(self._head.rows(self._hidden(step, logits_rows, sampling=True)))

    def _hidden(self, step: StepInput, logits_rows: torch.Tensor, *, sampling: bool) -> torch.Tensor:
        hidden = self._loop(step, logits_rows if sampling else None)
        if sampling:
            return hidden
        self._adapters.rows.keep(logits_rows)
        return hidden[logits_rows]

    def _loop(self, given: StepInput, sampling_rows: torch.Tensor | None) -> torch.Tensor:
        """The rows that the head takes, or the stage behind: all of them, or `sampling_rows`."""
        rows = {0: given.x}
        if self._embedding is not None and given.embedding is not None:
            rows[self._embedding] = given.embedding
        step = StepRows(rows, self._angles.split(given.cos, given.sin), sampling_rows, given.inputs)
        for operation in self._operations:
            operation.run(step)
            if step.is_empty:
                return given.x.new_empty(0, self._result_width, dtype=self._result_dtype)
        return step.rows[self._result]

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
                self.why_no_programs = f"a program can't compute it: {error}"
                return
            programs[wanted] = program
        self._programs, self._paged, self.why_no_programs = programs, paged, ""

    def _record(self, program: Program, paged: PagedAttention, sampling: bool, logits: bool) -> None:
        """Record what `compute` does after the embedding; `x` stays in one buffer from the first layer to the last.

        Without `logits` it ends before the head.
        """
        x = program.argument(self._width, dtype=self._row_dtype)
        cos, sin = (program.argument(self._angles.width, dtype=self._angles.dtype) for _ in range(2))
        inputs = None if self._layer_inputs is None else program.argument(self._layer_inputs.width)
        embedding = None if self._embedding is None else program.argument(self._embed.weight.shape[1])
        hidden: Rows | None = None
        out = x
        if self._head is not None:
            hidden = program.argument(self._result_width, sampled=True)
            # Declared before all scratch, which ranks share, so that they count the same buffers.
            if logits:
                into_logits = program.argument(self._head.out_features, sampled=True, dtype=torch.float32)
        elif not self._is_in_place:
            out = program.argument(self._result_width, dtype=self._result_dtype)
        angles = self._angles.split_recorded(cos, sin)
        recorded = RecordedRows(program, paged, x, angles, inputs, sampling=sampling)
        if embedding is not None and self._embedding is not None:
            recorded.rows[self._embedding] = embedding
        for operation in self._operations:
            is_last = operation is self._operations[-1]
            operation.record(recorded, hidden if sampling and is_last else None)
        rows = recorded.rows[self._result]
        if hidden is None:
            if rows != out:
                program.copy_columns(rows, out, width=rows.width)
        elif not sampling:
            rows = program.take_sampled(rows, into=hidden)
        elif rows != hidden:
            raise KernelArgumentError("hidden", "is neither a norm nor scaled")
        if self._head is not None and logits:
            self._head.record(program, rows, into=into_logits)

    def _run(
        self,
        program: Program,
        head: PackedLinear | None,
        step: StepInput,
        logits_rows: torch.Tensor,
    ) -> ModelOutput:
        """The rows' hidden states, and their logits if the program has the head."""
        hidden = step.x.new_empty(logits_rows.shape[0], self._result_width, dtype=self._result_dtype)
        width = 0 if head is None else head.out_features
        logits = step.x.new_empty(logits_rows.shape[0], width, dtype=torch.float32)
        arguments = [*step.arguments, hidden] + ([] if head is None else [logits])
        program.run(arguments, self._layout, logits_rows, self._adapters.of_step())
        return ModelOutput(hidden, self._map_logits(logits))

    def _run_stage(self, step: StepInput) -> torch.Tensor:
        """The residual stream behind the last layer of this stage."""
        if not self._has_program(step.x.shape[0]):
            return self._loop(step, None)
        nothing, arguments, out = torch.empty(0, dtype=torch.int64), step.arguments, step.x
        if not self._is_in_place:
            out = out.new_empty(out.shape[0], self._result_width, dtype=self._result_dtype)
            arguments.append(out)
        self._programs[_Wanted(False, False)].run(arguments, self._layout, nothing, self._adapters.of_step())
        return out

    @property
    def _is_in_place(self) -> bool:
        """Whether a stage's rows may be where those were that it was given."""
        return (self._result_width, self._result_dtype) == (self._width, self._row_dtype)

    @property
    def _layout(self) -> StepLayout:
        if self._paged is None or self._paged.layout is None:
            raise RuntimeError("attention was called outside of a step")
        return self._paged.layout
