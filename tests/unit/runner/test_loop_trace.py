"""Baton's loop takes the steps that a module's own loop was seen to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.errors import KernelArgumentError
from baton.runner.model.loop.logits_map import LogitsMap
from baton.runner.model.loop.operations import StepRows, operations_of
from baton.runner.model.loop.steps import Call, needed_steps
from baton.runner.model.loop.trace import LoopTrace, NotAPlainDecoder
from baton.runner.model.probe_attention import EchoAttention
from baton.runner.model.random_model import write_random_model
from tests.support.listed_types import LISTED_TYPES
from tests.support.load_with import load_with
from tests.support.rotary_models import PHI3_LONGROPE, ROPE_TYPES

WIDTH, ROWS = 16, 6
NOTHING = torch.empty(ROWS, 0)


class Before(nn.Module):
    """A mixer: each row plus the row before it, times a weight."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.weight = nn.Parameter(torch.randn(WIDTH))

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return ()

    def rows(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sample_rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert cos.shape[1] == sin.shape[1] == 0
        mixed: torch.Tensor = (x + torch.roll(x, 1, dims=0)) * self.weight
        return mixed if sample_rows is None else mixed[sample_rows]

    def record(self, *_arguments: Any, **_named: Any) -> Rows:
        raise KernelArgumentError("x", "is mixed by a test")

    def forward(self, x: torch.Tensor, **_named: Any) -> torch.Tensor:
        return self.rows(x[0], NOTHING, NOTHING)[None]


class Mixing(nn.Module):
    """A part that mixes rows and is no mixer: it would mix those of different requests."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.roll(x, 1, dims=-2)


class Layer(nn.Module):
    """A layer of parts with names that no model has, which `combine` computes with."""

    def __init__(self, index: int, combine: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.shuffle = Before(index)
        self.one, self.other, self.third = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.wide, self.mixing = nn.Linear(WIDTH, WIDTH), Mixing()
        self.lost = nn.Dropout(0.5)
        self.combine = combine

    def forward(self, x: torch.Tensor) -> Any:
        return self.combine(self, x)


class Toy(nn.Module):
    """A decoder of two such layers."""

    def __init__(self, combine: Callable[[Any, torch.Tensor], Any], **numbers: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(num_hidden_layers=2, **numbers)
        self.numbers = numbers
        self.embed, self.last = nn.Embedding(32, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList([Layer(index, combine) for index in range(2)])
        self.head = nn.Linear(WIDTH, 32)
        for norm in self.modules():
            if isinstance(norm, nn.LayerNorm):
                nn.init.normal_(norm.weight)
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(token_ids)
        if "scale" in self.numbers:
            x = x * self.numbers["scale"]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.last(x))
        if "cap" in self.numbers:
            logits = torch.tanh(logits / self.numbers["cap"]) * self.numbers["cap"]
        return logits


def traced(module: Toy, token_ids: torch.Tensor) -> tuple[LoopTrace, torch.Tensor]:
    trace = LoopTrace(module, EchoAttention())
    with trace.watched(), torch.inference_mode():
        logits = module(token_ids[None])[0]
    trace.end(logits)
    return trace, logits


def recomputed(module: Toy, token_ids: torch.Tensor, sample_rows: torch.Tensor | None = None) -> torch.Tensor:
    """The logits of a trace's steps, for other tokens than those that were traced."""
    trace, _ = traced(module, (token_ids + 1) % 32)
    operations = operations_of(needed_steps(trace.steps, trace.result), trace.result, row_quantum=1)
    with torch.inference_mode():
        x = module.embed(token_ids)
        x = x if trace.embedding_factor == 1.0 else x * trace.embedding_factor
        step = StepRows({0: x}, {None: (NOTHING, NOTHING)}, sample_rows)
        for operation in operations:
            operation.run(step)
        assert [*step.rows] == [trace.result], "rows are let go of"
        return trace.logits_map(module.head(step.rows[trace.result]))


def serial(layer: Any, x: torch.Tensor) -> Any:
    x = x + layer.lost(layer.shuffle(layer.one(x)))
    return x + layer.lost(layer.wide(layer.other(x)))


def sandwiched(layer: Any, x: torch.Tensor) -> Any:
    x = x + layer.one(layer.shuffle(x))
    return layer.third(layer.wide(layer.other(x))) + x


def parallel(layer: Any, x: torch.Tensor) -> Any:
    normed = layer.one(x)
    return x + layer.shuffle(normed) + layer.wide(normed)


def parallel_summed_first(layer: Any, x: torch.Tensor) -> Any:
    normed = layer.one(x)
    return layer.wide(normed) + layer.shuffle(normed) + x


def scaled(layer: Any, x: torch.Tensor) -> Any:
    x = x + layer.shuffle(layer.one(x)) * 0.3
    normed = layer.other(x)
    return x + (layer.wide(normed) + layer.third(normed)) * 0.3


TOKENS = torch.tensor([3, 9, 1, 30, 9, 12])


@pytest.mark.parametrize("combine", [serial, sandwiched, parallel, parallel_summed_first, scaled])
def test_the_steps_of_a_layer_are_found_whatever_its_parts_are_called(combine: Any) -> None:
    module = Toy(combine, residual=0.3, others=7)
    with torch.inference_mode():
        expected = module(TOKENS[None])[0]
    assert torch.equal(recomputed(module, TOKENS), expected)
    few = torch.tensor([1, 4])
    # Not bit for bit, since torch's products depend on the number of rows.
    torch.testing.assert_close(recomputed(module, TOKENS, few), expected[few])


def test_factors_of_embeddings_and_caps_of_logits_are_numbers_of_the_configuration() -> None:
    module = Toy(serial, scale=5.5, cap=2.5)
    trace, _ = traced(module, TOKENS)
    assert (trace.embedding_factor, trace.logits_map) == (5.5, LogitsMap("capped", 2.5))
    with torch.inference_mode():
        assert torch.equal(recomputed(module, TOKENS), module(TOKENS[None])[0])


def squared(layer: Any, x: torch.Tensor) -> Any:
    return x + layer.shuffle(layer.one(x * x))


def mixing(layer: Any, x: torch.Tensor) -> Any:
    return x + layer.mixing(layer.one(x))


def with_more(layer: Any, x: torch.Tensor) -> Any:
    return x + layer.shuffle(torch.nn.functional.relu(layer.one(x)))


@pytest.mark.parametrize(
    ("combine", "why"),
    [
        (squared, "one of Layer takes rows that are no sum of those before them"),
        (mixing, "mixing of Layer gives rows that depend on each other"),
        (with_more, "shuffle of Layer takes rows that are no sum of those before them"),
        (lambda layer, x: layer.wide(layer.shuffle(x)) ** 2, "Layer gives rows that are no sum"),
    ],
)
def test_what_is_computed_between_the_parts_is_not_left_out(combine: Any, why: str) -> None:
    with pytest.raises(NotAPlainDecoder, match=why):
        traced(Toy(combine), TOKENS)


def test_logits_that_are_changed_otherwise_are_refused() -> None:
    module = Toy(serial, cap=2.5)
    trace = LoopTrace(module, EchoAttention())
    with trace.watched(), torch.inference_mode():
        logits = module(TOKENS[None])[0]
    with pytest.raises(NotAPlainDecoder, match="changes its head's output"):
        trace.end(logits + 1)


def test_torch_computes_few_rows_as_it_computes_them_among_others() -> None:
    (operation,) = operations_of([Call(nn.Sigmoid(), 0, 1)], 1, row_quantum=32)
    every = torch.randn(1024, 1, generator=torch.Generator().manual_seed(0))
    for first in range(0, 1024, 4):
        step = StepRows({0: every[first : first + 4]}, {None: (NOTHING, NOTHING)}, None)
        operation.run(step)
        assert torch.equal(step.rows[1], torch.sigmoid(every)[first : first + 4])


_LONG_BY_KIND = {
    **LISTED_TYPES["gemma3_text"],
    "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), PHI3_LONGROPE["rope_parameters"]),
}


@pytest.mark.parametrize(
    "config",
    [*ROPE_TYPES.values(), PHI3_LONGROPE, _LONG_BY_KIND],
    ids=[*ROPE_TYPES, "of phi3", "of each kind of layer"],
)
def test_angles_of_every_type_are_the_loops_own(tmp_path: Path, config: Mapping[str, Any]) -> None:
    write_random_model(tmp_path, config, seed=5)
    transformer = load_with(tmp_path, dtype="bfloat16", num_blocks=64)._transformer
    assert (transformer.why_no_own_loop, transformer.why_no_programs) == ("", "")
