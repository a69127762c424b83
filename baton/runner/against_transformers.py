"""The check at start whether the paged path computes what transformers computes with the same weights.

The few tokens of one sequence go through transformers' module with its eager attention, and three
times through the paged path: at once, in pieces, and behind a context that another sequence has left in the cache. In
float32 rounding explains next to nothing. In fewer bits, or where 8 bits hold numbers, it explains as much as noise of
the size of one rounding moves transformers' own logits, which depends on the model (docs/decisions/0052).

The self check (self_check.py) compares the paged path with itself, and by bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from baton.errors import ConfigError
from baton.runner.execution.input_batch import flatten
from baton.runner.execution.request_table import RequestState
from baton.runner.model.attention import ATTENTION_NAME, UnsupportedAttention
from baton.runner.model.mixtures.experts import EXPERTS_NAME
from baton.runner.model.model_classes import first_line
from baton.runner.model.stored.layers import StoredLinear, experts_on_file, held_experts, read_once
from baton.runner.model.stored.mapped_files import MappedFiles
from baton.runner.model.stored.plan import expert_parameters
from baton.runner.model.stored.weight import UnusableWeight
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel
from baton.runner.self_check import block_count, check_state, check_tokens

_PIECES = (7, 9, 1, 1, 1)
_CONTEXT = 8
"""The tokens that another sequence has left in the cache."""
_NUM_TOKENS = sum(_PIECES)


class UnverifiedModel(ConfigError):
    """A model whose logits on the paged path are not those of transformers."""


_FLOAT32_LIMIT = 1e-3
"""The largest difference in float32 in any row, as a share of the spread of all logits. Rounding gave up to 1e-5."""
_NOISE, _FP8_NOISE = 2.0**-8, 2.0**-5
"""The size of noise as a share of each number: a unit in the last place of bfloat16, which is about what int8 rounds;
and what rounding to the three bits of e4m3, by up to 2⁻⁴, makes typically."""
_NUM_NOISY, _NUM_NOISY_OF_MIXTURE = 1, 7
"""Copies with noise. Of a mixture they are several, since other experts are chosen in some only, and if it is for an
early token, all rows behind it move."""
_NOISE_RATIO = 4.0
"""In fewer bits, how much more than transformers' own logits move with noise those of the median row may differ.
Rounding gave up to 2.1."""
_LEAST_LIMIT, _MOST_LIMIT = 0.02, 0.5
"""The bounds of the limit that follows, as shares of the spread."""


@dataclass(frozen=True, slots=True)
class TransformersLogits:
    """What transformers computes of a few tokens with a loaded model, to be compared with the paged path."""

    tokens: tuple[int, ...]
    logits: EagerLogits | None
    """None if transformers failed, or was not asked."""
    failure: str
    """Why there are no logits; empty if there are."""
    dtype: str
    is_quantized: bool
    is_mixture: bool
    """Whether it has experts. Rounding may choose others for a row, so the median row counts in float32, too."""

    @classmethod
    def not_asked(cls) -> Self:
        """No logits, for a model that is served whatever it computes."""
        return cls((), None, "not compared: --allow-unverified", "", is_quantized=False, is_mixture=False)

    @classmethod
    def of(cls, loaded: LoadedModel, *, cache_dtype: str, keeps_weights: bool) -> Self:
        """Compute them; called before parts of the module are replaced, which is as before on return.

        `cache_dtype`: see `load_runner`. `keeps_weights`: quantised weights that were read for this stay in memory
        until they are packed.
        """
        config = loaded.config
        if keeps_weights:
            read_once(loaded.module)
        tokens = tuple(check_tokens(min(_NUM_TOKENS, loaded.max_model_len), config.vocab_size))
        is_mixture = any(expert_parameters(part) or held_experts(part) for part in loaded.module.modules())
        noise = _FP8_NOISE if cache_dtype == "fp8" else _NOISE
        failure, logits = "", None
        try:
            logits = eager_logits(loaded, tokens, noise, _NUM_NOISY_OF_MIXTURE if is_mixture else _NUM_NOISY)
        # There is no list of what transformers raises.
        except Exception as error:
            failure = f"{type(error).__name__}: {first_line(error)}"
        return cls(tokens, logits, failure, loaded.dtype, loaded.weights.is_quantized, is_mixture)

    def why_not_compared(self, transformer: Transformer) -> str:
        """Why nothing can be compared with a transformer of this cache; empty if something can."""
        if not self.tokens:
            return self.failure
        too_small = self._num_compared(transformer) == 0
        return "not compared: the KV cache is too small for the check at start" if too_small else ""

    def _num_compared(self, transformer: Transformer) -> int:
        """How many of the tokens fit twice into the cache, beside the block that padding writes to; 0: too few."""
        blocks = (transformer.num_blocks - 1) // 2 // len(transformer.layout.groups)
        count = min(len(self.tokens), blocks * transformer.layout.block_size)
        # A single token attends to nothing but itself.
        return count if count > 1 or count == len(self.tokens) else 0

    @contextmanager
    def blaming_the_architecture(self, architecture: str) -> Iterator[None]:
        """Raise UnusableWeight as UnsupportedAttention if transformers computes with these weights."""
        try:
            yield
        except UnusableWeight as error:
            if self.failure or error.__cause__ is None:
                raise
            raise UnsupportedAttention(
                f"transformers computes with its weights, but its architecture ({architecture}) does not fit Baton's "
                f"products and attention ({type(error.__cause__).__name__}: {first_line(error.__cause__)})"
            ) from error

    def why_not_those_of(self, transformer: Transformer) -> str:
        """Why a model's paged path does not compute these logits; empty if it does. Its cache is zeros again.

        Called if there is no reason not to compare.
        """
        if self.logits is None:
            return f"transformers itself fails with it ({self.failure})"
        count = self._num_compared(transformer)
        tokens, blocks = self.tokens[:count], block_count(transformer, count)
        whole, parts = (check_state(name, tokens, 1 + number * blocks, blocks) for number, name in enumerate("wp"))
        differences = {
            "at once": self._difference(transformer, whole, (count,)),
            "in pieces": self._difference(transformer, parts, _PIECES),
        }
        context, size = min(_CONTEXT, count - 1), transformer.layout.block_size
        if transformer.layout.keeps_states:
            # They are there behind whole stripes, and behind the last token.
            context = (count - 1) // size * size
        if context or not transformer.layout.keeps_states:
            behind = check_state("behind", tokens, 1, blocks)
            behind.num_computed_tokens = context
            differences["behind a context in the cache"] = self._difference(transformer, behind, (count,))
        transformer.clear_blocks(1 + 2 * blocks)
        return next((f"computed {how}, {why}" for how, why in differences.items() if why), "")

    def _difference(self, transformer: Transformer, state: RequestState, pieces: tuple[int, ...]) -> str:
        first, rows = state.num_computed_tokens, []
        for piece in pieces:
            piece = min(piece, len(state.token_ids) - state.num_computed_tokens)
            if piece:
                share = state.share(piece)
                batch = flatten([share], transformer.layout, transformer.row_quantum)
                rows.append(transformer.compute(batch, np.arange(piece)))
                state.num_computed_tokens = share.stop
        assert self.logits is not None
        expected, computed = self.logits.exact[first : len(state.token_ids)], np.concatenate(rows)
        if expected.shape != computed.shape:
            return f"its logits are {list(computed.shape)}, and those of transformers {list(expected.shape)}"
        spread = float(self.logits.exact.std()) or 1.0
        errors = row_errors(computed, expected) / spread
        if self.dtype == "float32" and not self.is_quantized and not transformer.layout.has_scales:
            limit, found, of = _FLOAT32_LIMIT, float(np.median(errors) if self.is_mixture else errors.max()), "up to"
        else:
            limit, found, of = _NOISE_RATIO * self.logits.moved / spread, float(np.median(errors)), "typically"
            limit = min(max(limit, _LEAST_LIMIT), _MOST_LIMIT)
        # Not a number is no number within the limit.
        if found <= limit:
            return ""
        return (
            f"its logits differ from those of transformers {of} by {found:.2g} of their spread, and rounding explains "
            f"{limit:.2g} at most"
        )


_EAGER = "eager"


class EagerLogits(NamedTuple):
    """What transformers computes of one sequence."""

    exact: npt.NDArray[np.float32]
    """[tokens, vocabulary], on the host."""
    moved: float
    """How far noise in the rows of the embedding moves the median row (`row_errors`): the most of all noisy copies."""


def eager_logits(loaded: LoadedModel, token_ids: Sequence[int], noise: float, num_noisy: int) -> EagerLogits:
    """The logits behind each of these tokens, and how far the model carries what is rounded once.

    `noise`: its size as a share of each number; so many copies have some of their own. The module is as it was before
    on return.
    """
    module: Any = loaded.module
    mapped = MappedFiles(loaded.checkpoint.weight_files)
    count = len(token_ids)

    def add_noise(_embedding: Any, _given: Any, rows: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        factors = 1 + noise * torch.randn((num_noisy, *rows.shape[1:]), dtype=torch.float32, generator=generator)
        return torch.cat([rows[:1], (rows[1:].float() * factors).to(rows.dtype)])

    with ExitStack() as stack:
        stack.callback(mapped.release, module)
        stack.callback(module.get_input_embeddings().register_forward_hook(add_noise).remove)
        for part in module.modules():
            for layer in part if isinstance(part, nn.ModuleList) else ():
                stack.callback(layer.register_forward_hook(lambda done, *_: mapped.release(done)).remove)
        with _as_transformers_has_it(loaded), torch.inference_mode():
            # All sequences at once, since it is the weights that take the time.
            out = module(
                input_ids=torch.tensor([list(token_ids)] * (1 + num_noisy)),
                position_ids=torch.arange(count).expand(1 + num_noisy, count),
                use_cache=False,
                logits_to_keep=torch.arange(count),
            )
        exact = _on_host(out.logits[0])
        moved = [np.median(row_errors(_on_host(noisy), exact)) for noisy in out.logits[1:]]
        return EagerLogits(exact, float(np.max(moved)))


def row_errors(computed: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The root of the mean square difference of each row."""
    # Damaged weights give infinite logits, which are refused without a warning of numpy's.
    with np.errstate(invalid="ignore", over="ignore"):
        errors: npt.NDArray[np.float32] = np.sqrt(np.square(computed - expected).mean(axis=1))
    return errors


def _on_host(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = logits.to(torch.float32).numpy()
    return array


@contextmanager
def _as_transformers_has_it(loaded: LoadedModel) -> Iterator[None]:
    """Let a model's module compute attention, experts and linear layers as transformers does without Baton."""
    module = loaded.module
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    with ExitStack() as stack:
        for config in configs.values():
            for name, ours in (("_attn_implementation", ATTENTION_NAME), ("_experts_implementation", EXPERTS_NAME)):
                # What is behind these properties: they would set the configurations of all parts.
                name = f"{name}_internal"
                if getattr(config, name, None) == ours:
                    setattr(config, name, _EAGER)
                    stack.callback(setattr, config, name, ours)
        for part in module.modules():
            if isinstance(part, StoredLinear):
                part.forgets = True
                stack.callback(setattr, part, "forgets", False)
        stack.enter_context(experts_on_file(module))
        yield
