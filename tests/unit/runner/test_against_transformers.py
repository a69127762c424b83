"""At start a model's logits are compared with those of transformers, and one that differs is refused, saying how."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from baton.runner.against_transformers import UnverifiedModel
from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.attention import UnsupportedAttention
from baton.runner.model.stored import held
from baton.runner.model.stored.held import dequantized_on_file
from baton.runner.model.stored.layers import StoredEmbedding
from baton.runner.model.stored.quantize import quantized
from baton.runner.model.stored.weight import StoredWeight
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.support.load_with import load_tiny


def _attention_wrapped(wrap: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Alters llama's attention; `wrap` gets the original one, and all arguments."""

    def alter(monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.llama import modeling_llama

        original = modeling_llama.LlamaAttention.forward

        def forward(self: Any, **arguments: Any) -> Any:
            return wrap(original, self, **arguments)

        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)

    return alter


def _own_mask(original: Any, self: Any, **arguments: Any) -> Any:
    rows = arguments["hidden_states"].shape[1]
    return original(self, **(arguments | {"attention_mask": torch.zeros(rows, rows)}))


def _second_call(original: Any, self: Any, **arguments: Any) -> Any:
    first, scores = original(self, **arguments)
    second, _ = original(self, **(arguments | {"hidden_states": 2 * arguments["hidden_states"]}))
    return first - 0.5 * second, scores


def _unknown_keyword(original: Any, self: Any, **arguments: Any) -> Any:
    return original(self, **(arguments | {"sparsity": 0.5}))


def _scores_needed(original: Any, self: Any, **arguments: Any) -> Any:
    out, scores = original(self, **arguments)
    return out + 0 * scores.sum(), scores


def _scores_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(original: Any, self: Any, **arguments: Any) -> Any:
        out, scores = original(self, **arguments)
        return (out if scores is None else out + scores[:, 0].amax(dim=-1, keepdim=True)), scores

    _attention_wrapped(changed)(monkeypatch)


def _shared_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer adds a column of its MLP's weight, which is there only until it is packed."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaDecoderLayer.forward

    def forward(self: Any, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        down = getattr(self.mlp, "down_proj", None)
        weight = getattr(down, "weight", None)
        added = 0.0 if weight is None else weight[:, 0]
        return original(self, hidden_states + added, **arguments)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)


WRONG: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], type[ConfigError], str]] = {
    "doge": ("doge", lambda _: None, UnsupportedAttention, "a mask that the model makes itself"),
    "diffllama": ("diffllama", lambda _: None, UnsupportedAttention, "computes attention twice in a step"),
    "own mask": ("llama", _attention_wrapped(_own_mask), UnsupportedAttention, "a mask that the model makes itself"),
    "second call": ("llama", _attention_wrapped(_second_call), UnsupportedAttention, "attention twice in a step"),
    "unknown keyword": ("llama", _attention_wrapped(_unknown_keyword), UnsupportedAttention, "with sparsity,"),
    "scores used": ("llama", _scores_used, UnverifiedModel, "differ from those of transformers up to"),
    "shared parameter": ("llama", _shared_parameter, UnverifiedModel, "differ from those of transformers up to"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_would_be_computed_wrongly_is_refused_by_what_is_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, alter, kind, reason = WRONG[name]
    alter(monkeypatch)
    with pytest.raises(kind, match=re.escape(reason)):
        load_tiny(tmp_path, "llama", seed=1, config={"num_hidden_layers": 2, "model_type": model_type})


@pytest.mark.parametrize("name", ["scores used", "shared parameter"])
def test_rounding_in_a_cache_hides_no_wrong_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[name][1](monkeypatch)
    with pytest.raises(UnverifiedModel, match="differ from those of transformers typically"):
        load_tiny(tmp_path, "llama", seed=1, config={"num_hidden_layers": 2}, cache_dtype="fp8")


def test_a_mixture_in_which_rounding_chooses_other_experts_is_verified(tmp_path: Path) -> None:
    """Of this model only some copies with noise choose others for an early token."""
    assert load_tiny(tmp_path, "gpt_oss", seed=3, dtype="bfloat16").model.is_verified


def test_an_unverified_model_is_served_on_demand_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _shared_parameter(monkeypatch)
    model = load_tiny(tmp_path, "llama", seed=1, allow_unverified=True).model
    assert (model.is_verified, model.bit_exact) == (False, True)
    assert model.why_unverified == "not compared: --allow-unverified"


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_the_check_does_not_quantise_a_weight_again(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bytes] = []

    def counted(weight: torch.Tensor, bits: int) -> QuantizedWeight:
        made.append(weight.numpy().tobytes())
        return quantized(weight, bits)

    monkeypatch.setattr(held, "quantized", counted)
    tied = {"tie_word_embeddings": True}  # so that the embedding and the head are one weight
    assert load_tiny(tmp_path, architecture, seed=1, config=tied, quantization="int4").model.is_verified
    assert len(made) == len(set(made))


@pytest.mark.parametrize(
    ("architecture", "num_blocks", "why_not"),
    [("gemma2", 8, ""), ("llama", 4, ""), ("llama", 2, "not compared: the KV cache is too small")],
)
def test_as_many_tokens_are_compared_as_a_small_cache_holds(
    architecture: str, num_blocks: int, why_not: str, tmp_path: Path
) -> None:
    model = load_tiny(tmp_path, architecture, seed=1, block_size=4, num_blocks=num_blocks).model
    assert model.is_verified == (not why_not)
    assert model.why_unverified.startswith(why_not)


@pytest.mark.parametrize("divided", [{}, {"pipeline_parallel": 2}])
def test_a_step_that_fails_with_weights_that_transformers_computes_with_is_the_architectures(
    divided: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _attention_wrapped(_scores_needed)(monkeypatch)
    with pytest.raises(UnsupportedAttention, match="transformers computes with its weights, but its architecture"):
        load_tiny(tmp_path, "llama", seed=1, start_ranks=FakeRankGroup, start_stages=FakeStages.start, **divided)


def test_an_embedding_reads_a_weight_once_where_some_rows_take_as_long_as_all() -> None:
    weight, reads = torch.randn(40, 32), []

    def read() -> torch.Tensor:
        reads.append(1)
        return weight

    stored = dequantized_on_file(StoredWeight((40, 32), read, None), torch.float32, torch.device("cpu"))
    tokens = torch.tensor([[3, 39, 3], [0, 7, 39]])
    assert torch.equal(StoredEmbedding(stored, torch.float32)(tokens), weight[tokens])
    assert len(reads) == 1


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "cache_dtype": "int8"},
        {"dtype": "float32", "cache_dtype": "fp8"},
    ],
)
def test_a_model_that_is_computed_rightly_is_verified(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert load_tiny(tmp_path, architecture, seed=1, **settings).model.is_verified


@pytest.mark.parametrize("divided", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_a_divided_model_with_quantised_experts_is_verified(divided: dict[str, Any], tmp_path: Path) -> None:
    how: dict[str, Any] = {
        "quantization": "int4",
        "start_ranks": FakeRankGroup,
        "start_stages": FakeStages.start,
        **divided,
    }
    with closing(load_tiny(tmp_path, "gpt_oss", seed=1, **how)) as runner:
        assert runner.model.is_verified
