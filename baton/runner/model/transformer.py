"""A loaded model with its products and attention replaced, and its KV cache: from the rows of a step to logits."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.runner import PROBE_BLOCKS
from baton.runner.adapters.model_adapters import ModelAdapters
from baton.runner.backends.attention_work.step_work import StepWork
from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.operations import Operations
from baton.runner.backends.torch_operations import TorchOperations
from baton.runner.execution.input_batch import FlatBatch
from baton.runner.model.attention import PagedAttention, bind, number_layers
from baton.runner.model.cached_model import (
    CachedModel,
    cache_memory,
    failing_as_unusable,
    layout_of,
    on_device,
    on_device_of_model,
    on_host,
    sized,
)
from baton.runner.model.decode_graphs import DecodeGraphs
from baton.runner.model.decoder import Decoder, GivenRows, HiddenAndLogits, ModelOutput, given_to
from baton.runner.model.fused.reading_attention import ReadingAttention
from baton.runner.model.latents.recognition import attend_to_latents, refuse_selections
from baton.runner.model.layers import ProductWatch, head_of, replace_products
from baton.runner.model.long_angles import LongAngles, replace_rotary
from baton.runner.model.loop.streams import sizes_of, width_between_layers
from baton.runner.model.loop.trace import LoopTrace, NotAPlainDecoder
from baton.runner.model.mixtures.recognition import fuse_mixtures
from baton.runner.model.probe_attention import EchoAttention, ProbeAttention
from baton.runner.model.probe_step import ProbeStep
from baton.runner.model.recognition import fuse
from baton.runner.model.row_positions import TokensBefore, apart, has_grids
from baton.runner.model.stage import (
    ONE_STAGE,
    Adaptable,
    LayerReport,
    OutputWidths,
    Received,
    StageModule,
    StageReport,
    Stages,
    entries_of_stages,
    first_reason,
    layers_found,
    layers_of_entries,
    needs_more_than_rows,
    require_one_dtype,
    require_width,
)
from baton.runner.model.states.layer_functions import keep_states_in_cache
from baton.runner.model.stored.mapped_files import MappedFiles
from baton.runner.model.stored.plan import CheckpointNames
from baton.runner.model.stored.weight import UnusableWeight
from baton.runner.model.weights import LoadedModel
from baton.runner.spec import CacheSpec

_PROBE_ROWS = 8


class Transformer(CachedModel):
    """A decoder and its KV cache. Called from one thread."""

    decode_graphs: DecodeGraphs | None
    """The CUDA graphs of decode steps; None where a step's kernels are started one by one."""
    _attention: PagedAttention
    _before: TokensBefore | None = None
    """For layers that count the tokens before each row; None: none does."""
    _counts_own_layers = False
    """Whether the stage has a size of the KV cache to itself."""

    @on_device_of_model
    def __init__(
        self,
        model: LoadedModel,
        operations: Operations,
        block_size: int,
        cache: CacheSpec | None,
        num_threads: int,
        stages: Stages = ONE_STAGE,
    ) -> None:
        """`cache`: None for a model that drafts, whose blocks are those of another model: `allocate_cache` says how
        many, and all layers are in one group, whatever their windows. `stages`: this one computes its own layers only.
        """
        super().__init__(model, operations, num_threads)
        self._module: Any = model.module
        self.stage = stages.stage
        self._counts_own_layers = self.stage.count > 1 and cache is not None and not cache.is_of_all_stages
        number_layers(model.module, model.config.num_hidden_layers)
        self._part = StageModule(model.module, model.config.num_hidden_layers, self.stage, self.dtype)
        # Only now, so that no GPU has to hold the layers of other stages.
        model.module.to(self.device)
        self.max_model_len = model.max_model_len
        self.long_sequences = replace_rotary(model.module, self.max_model_len)
        """Which sequences have the angles of long ones; None: those of all are the same."""
        self._long_angles = [part for part in model.module.modules() if isinstance(part, LongAngles)]
        mapped = MappedFiles(model.checkpoint.weight_files)
        with failing_as_unusable(AttributeError, TypeError, KeyError):
            self._why_not_recognised = fuse(model.module, operations, self.row_quantum, mapped.release)
            fuse_mixtures(model.module, operations, torch.empty(0, dtype=self.dtype, device=self.device))
            # GPUs, and what stands for one in tests, keep keys and values of all heads so far.
            if self.device.type == "cpu" and not isinstance(operations, CudaOperations):
                attend_to_latents(model.module, operations, mapped.release)
            else:
                refuse_selections(model.module)
        replace_products(model.module, operations, self.row_quantum, mapped.release)
        keep_states_in_cache(model.module)
        products = (model.module, operations, self.dtype, self.row_quantum, self.device)
        self.adapters = ModelAdapters(*products, CheckpointNames, is_stage=self.stage.count > 1)
        """The adapters that are loaded."""
        self._logits_rows: torch.Tensor | None = None
        """The rows for which transformers' own loop computes logits."""
        self._last_hidden: torch.Tensor | None = None
        """The latest input of the head in transformers' own loop, [1, rows, hidden size]."""
        if (head := head_of(model.module)) is not None:
            head.register_forward_pre_hook(self._keep_hidden)
        self._row_sizes = sizes_of(model.module, operations)
        self._width = width_between_layers(model.module)
        """The width of the rows between layers, all streams together."""
        own_layers, missed_products = self._probe_layers(model.architecture)
        self.sent_dtype = self._part.row_dtype
        """The dtype of the rows that go from stage to stage: some models add up theirs in float32."""
        self.why_no_own_loop = ""
        """Why transformers' loop over the layers runs; empty when Baton's loop replaces it."""
        self._decoder = self._own_loop(self.dtype)
        self._before = self._probe_tokens_before()
        why_not_fused = "transformers' loop runs" if self._decoder is None else self._decoder.why_not_fused
        reports = stages.exchange(
            StageReport(
                own_layers,
                missed_products,
                self.why_no_own_loop,
                why_not_fused,
                self._output_widths.hidden if self.stage.is_last else 0,
                self._output_widths.logits,
                self._probe_looks_at_embedding(),
                *self._probe_given_rows(),
                str(self.sent_dtype),
                self._room_for_cache(cache, self._try_step),
                self.adapters.modules,
                sorted(self.adapters.shapes),
            )
        )
        require_one_dtype(reports, model.architecture)
        self._sends_embedding = any(report.looks_at_embedding for report in reports)
        self.missed_products = frozenset(name for report in reports for name in report.missed_products)
        self.why_no_own_loop = first_reason([report.why_no_own_loop for report in reports])
        self._why_not_fused = first_reason([report.why_not_fused for report in reports])
        self.embedding_size = reports[-1].embedding_size
        """The width of the head's input; 0: it can't be observed."""
        self.adaptable, self.num_logits = Adaptable.of(reports), reports[-1].num_logits
        """What adapters may change in all stages, and the width of the head's output."""
        self.why_no_given_rows = next(filter(None, (report.why_no_given_rows for report in reports)), "")
        """Why no rows may be given in place of tokens; empty if they may."""
        self.row_width = 0 if self.why_no_given_rows else reports[0].row_width
        """The width of rows that may be given in place of tokens; 0: none may be."""
        self.layout = layout_of(reports, block_size, model.dtype, cache)
        self.entries_of_stages = entries_of_stages(reports)
        """The layers of the layout that each stage has."""
        own_entries = self.entries_of_stages[self.stage.index]
        self._layers_of_entries = layers_of_entries(reports)[own_entries.start : own_entries.stop]
        self.cache_layout = self.layout
        if self.stage.count > 1:
            self.cached_layers, self.cache_layout = own_entries, self.layout.part(own_entries)
        if cache is not None:
            cache = sized(cache, reports, self.layout, block_size)
            self.allocate_cache(cache.blocks(self.counted_block_bytes))

    def take_block_size(self, block_size: int) -> None:
        """Let blocks have as many tokens as those of the model that this one drafts for, before they are allocated."""
        self.layout = self.cache_layout = replace(self.layout, block_size=block_size)

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache; called once. Raises ConfigError when there is no memory for it."""
        memory_dtype = torch.int8 if self.layout.has_scales else self.dtype
        block_elements, ranks = self.cache_layout.block_elements, self._operations.ranks
        elements = (num_blocks + PROBE_BLOCKS) * block_elements
        self._hold(cache_memory(elements, memory_dtype, self.device, ranks))
        layers = self._layers_of_entries
        self._attention = PagedAttention(self._operations, self.kv_cache, self.cache_layout, layers)
        bind(self._module, self._attention, ranks)
        if not self._why_not_fused:
            self.row_quantum = 1
        if self._decoder is not None:
            self._decoder.record(self._operations, self._attention)
        self.decode_graphs = self._graphs_of(self.max_model_len)

    @property
    def own_layers(self) -> range:
        """The layers of this stage."""
        return self._part.own_layers

    @property
    def sent_width(self) -> int:
        """The width of the rows that go from stage to stage."""
        return self._width + (self._part.embedding_width if self._sends_embedding else 0)

    @property
    def counted_block_bytes(self) -> int:
        """Bytes by which all stages count the same blocks: of a whole block where their caches share a host's memory,
        otherwise of a block in the cache of the stage that needs the most."""
        if not self._counts_own_layers:
            return self.layout.block_bytes
        return max(self.layout.part(entries).block_bytes for entries in self.entries_of_stages)

    @property
    def why_no_programs(self) -> str:
        """Why a step's layers are not computed in one call; empty when they are."""
        return self._why_not_fused or ("" if self._decoder is None else self._decoder.why_no_programs)

    @property
    def has_own_loop(self) -> bool:
        """Whether Baton's loop over the layers replaces transformers' loop."""
        return not self.why_no_own_loop

    def compute(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """Compute a step: store its keys and values, and return float32 logits [rows, vocabulary].

        The rows are those that sample, or `logits_rows` if given.
        """
        with on_device(self.device), torch.inference_mode():
            # With graphs always a copy, even of logits on the host: the next replay, of any size, overwrites them.
            return on_host(self.compute_there(batch, logits_rows), copy=self.decode_graphs is not None)

    def compute_there(self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64] | None = None) -> torch.Tensor:
        """Begin to `compute` a step, and return its logits on the device; they are valid until the next step."""
        wanted = batch.logits_rows if logits_rows is None else logits_rows
        with on_device(self.device), torch.inference_mode():
            recorded = self._compute_recorded(batch, wanted)
            return self._compute(batch, wanted, logits_rows is None).logits if recorded is None else recorded

    def compute_with_hidden(
        self, batch: FlatBatch, rows: npt.NDArray[np.int64] | None = None, num_logits: int | None = None
    ) -> HiddenAndLogits:
        """Compute a step; returns hidden states of the wanted rows, and logits of the first `num_logits` at least."""
        wanted = batch.logits_rows if rows is None else rows
        with on_device(self.device), torch.inference_mode():
            output = self._compute(batch, wanted, rows is None, num_logits=num_logits)
            return HiddenAndLogits(on_host(output.hidden), on_host(output.logits))

    def compute_stage(
        self,
        batch: FlatBatch,
        logits_rows: npt.NDArray[np.int64] | None,
        received: torch.Tensor | None,
        wants_hidden: bool = True,
    ) -> ModelOutput:
        """Compute this stage's part of a step, from the rows [T, `sent_width`] of the stage before; so is its output.

        Without `wants_hidden` the last stage may leave hidden states out. The output is valid until the next call.
        """
        wanted = batch.logits_rows if logits_rows is None else logits_rows
        with on_device(self.device), torch.inference_mode():
            # The stage behind expects rows for padding, too, which a graph leaves out.
            leaves_out = not self.stage.is_last and batch.token_ids.size != batch.seq_lens.size
            recorded = None if wants_hidden or leaves_out else self._compute_recorded(batch, wanted, received)
            if recorded is None:
                return self._compute(batch, wanted, logits_rows is None, received)
            nothing = recorded.new_empty(recorded.shape[0], 0)
            if self.stage.is_last:
                return ModelOutput(nothing, recorded)
            return self._with_embedding(ModelOutput(recorded, nothing), batch, received)

    def _compute(
        self,
        batch: FlatBatch,
        logits_rows: npt.NDArray[np.int64],
        sampling: bool,
        received: torch.Tensor | None = None,
        num_logits: int | None = None,
    ) -> ModelOutput:
        self._attention.layout = self._step_layout(batch, self._sharing(batch))
        self.adapters.begin(batch.adapters)
        self._set_long(batch)
        step = batch.token_ids, batch.rotary_positions, self._tensor(logits_rows)
        before, given = self._of_stage_before(received), self._given(batch)
        try:
            if self._decoder is None:
                output = self._forward(*step, before, given)
            else:
                output = self._decoder.compute(*step, sampling, before, num_logits, given)
            return self._with_embedding(output, batch, received)
        finally:
            self._set_long(None)
            self._attention.layout = None
            self.adapters.begin(None)

    def _compute_recorded(
        self, batch: FlatBatch, logits_rows: npt.NDArray[np.int64], received: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """The logits of a step that a CUDA graph computes, or a stage's rows; None for any other step."""
        graphs, decoder = self.decode_graphs, self._decoder
        if graphs is None or decoder is None or batch.adapters is not None or not graphs.fits(batch, logits_rows):
            return None
        self._set_long(batch)
        before, given = self._of_stage_before(received), self._given(batch)
        step = decoder.embedded(batch.token_ids, batch.rotary_positions, before, given)
        self._set_long(None)
        work = [StepWork(batch.query_start, batch.seq_lens, self.device, places) for places in self._sharing(batch)]
        return graphs.compute(step.x, step.cos, step.sin, batch, work)

    def _of_stage_before(self, received: torch.Tensor | None) -> Received | None:
        return None if received is None else Received.of(received, self._width, self.dtype)

    def _with_embedding(self, output: ModelOutput, batch: FlatBatch, received: torch.Tensor | None) -> ModelOutput:
        """A stage's output with the rows of the embedding beside it, if stages behind this one may look at them."""
        if self.stage.is_last or not self._sends_embedding:
            return output
        if received is None:
            rows = self._module.get_input_embeddings()(self._tensor(batch.token_ids))
            given = self._given(batch)
            received = rows if given is None else given.replace_in(rows)
        return output._replace(hidden=torch.cat([output.hidden, received[:, -self._part.embedding_width :]], dim=1))

    def _set_long(self, batch: FlatBatch | None) -> None:
        """Tell the rotary modules which rows of a step have the angles of long sequences; None: no step is computed."""
        is_long = None if batch is None or batch.is_long is None else self._tensor(batch.is_long).bool()
        for angles in self._long_angles:
            angles.is_long = is_long

    def _given(self, batch: FlatBatch) -> GivenRows | None:
        """The rows of a step that replace those of the embedding, which is in the first stage."""
        if batch.given is None or batch.given_at is None or not self.stage.is_first:
            return None
        return GivenRows(self._tensor(batch.given_at), self._tensor(batch.given).view(self.dtype))

    def set_rows_per_call(self, rows: int) -> None:
        super().set_rows_per_call(rows)
        if self.decode_graphs is not None:
            self.decode_graphs.forget()

    def why_adapters_not_bit_exact(self) -> str | None:
        """None when what an adapter adds to a row depends on this row alone; otherwise where it does not.

        The C kernels sum each row in one order by construction; torch's products are tried.
        """
        operations = self._operations
        if not isinstance(operations, TorchOperations):
            return None
        with on_device(self.device), torch.inference_mode():
            return operations.why_adapters_not_bit_exact(self.adaptable.shapes, self.device)

    def _probe_layers(self, architecture: str) -> tuple[dict[int, LayerReport], list[str]]:
        """Compute a step without attention; returns what was found out of each layer, and the missed products.

        Raises UnusableWeight if it fails, and UnsupportedAttention for layers whose kind the cache has no room for.
        """
        probe, watch = ProbeAttention(), ProductWatch()
        bind(self._module, probe, self._operations.ranks)
        step = self._probe_step()
        try:
            self.adapters.rows.num_probed = step.rows.shape[0]
            with failing_as_unusable(AttributeError, TypeError, KeyError), watch, torch.inference_mode():
                output = self._forward(*step)
        except UnusableWeight as error:
            if self.stage.is_first or not isinstance(error.__cause__, KeyError):
                raise
            raise needs_more_than_rows(architecture) from error
        finally:
            self.adapters.rows.num_probed = 0
        if not self.stage.is_last:
            require_width(output.hidden, self._width, architecture)
        self._output_widths = OutputWidths(output.hidden.shape[1], output.logits.shape[1])
        readers = {part.layer_idx for part in self._module.modules() if isinstance(part, ReadingAttention)}
        found = layers_found(architecture, self._module.config, self.own_layers, probe, readers)
        return found, sorted(watch.missed)

    def _try_step(self, num_rows: int) -> None:
        """Compute a step of so many rows without attention, to see what memory it takes."""
        bind(self._module, ProbeAttention(), self._operations.ranks)
        step = self._probe_step(-(-num_rows // self.row_quantum)).with_few_logits
        with torch.inference_mode():
            decoder = self._decoder
            self._forward(*step) if decoder is None else decoder.compute(*step[:3], False, step.received)

    def _probe_step(self, quanta: int = _PROBE_ROWS) -> ProbeStep:
        num_rows = quanta * self.row_quantum
        step = ProbeStep.of(self._module.config, num_rows, self.max_model_len, self.device)
        return step if self.stage.is_first else step.behind(self._part, self._width, self.dtype)

    def _own_loop(self, dtype: torch.dtype) -> Decoder | None:
        """Baton's loop over the layers, if transformers' loop can be followed and gives the same bits."""
        echo = EchoAttention()
        bind(self._module, echo, self._operations.ranks)
        step = self._probe_step()
        places = step.positions
        try:
            with torch.inference_mode():
                trace, expected = LoopTrace.of(self._module, echo, lambda: self._forward(*step))
                decoder = Decoder(
                    self._module, trace, dtype, self.device, self.row_quantum, self.adapters, self.max_model_len
                )
                for at in (places, apart(places)) if has_grids(self._module.config) else (places,):
                    tried = step._replace(positions=at)
                    decoder.require_bits(expected if at is places else self._forward(*tried), *tried)
            return decoder
        except NotAPlainDecoder as reason:
            self.why_no_own_loop = "; ".join(filter(None, (str(reason), self._why_not_recognised)))
            return None

    def _probe_tokens_before(self) -> TokensBefore | None:
        """What tells layers the positions of their rows, if they ask for it."""
        if self._decoder is not None:
            return None
        bind(self._module, EchoAttention(), self._operations.ranks)
        self._before = before = TokensBefore()
        # Layers that ask more of a cache do without it: opt's make a mask of the number, which no attention sees.
        with suppress(AttributeError, TypeError, ValueError, RuntimeError, IndexError), torch.inference_mode():
            self._forward(*self._probe_step())
            return before if before.was_asked else None
        return None

    def _probe_looks_at_embedding(self) -> bool:
        """Whether layers behind the first stage are given rows of the embedding beside those of the stage before."""
        if self.stage.is_first:
            return False
        if self._decoder is not None:
            return self._decoder.looks_at_embedding
        bind(self._module, EchoAttention(), self._operations.ranks)
        step = self._probe_step()
        with torch.inference_mode():
            return not self._forward(*step).has_bits_of(self._forward(*step.with_other_embedding))

    def _probe_given_rows(self) -> tuple[int, str]:
        """The width of rows that may be given in place of tokens, and why none may be: 0 and a reason, or a width.

        They may be if tokens play no role behind the embedding: its own rows given for other tokens change no bit. A
        stage behind the first, which may look at tokens, too, gives no width.
        """
        bind(self._module, EchoAttention(), self._operations.ranks)
        step, given, width = self._probe_step(), None, 0
        with torch.inference_mode():
            if self.stage.is_first:
                own: torch.Tensor = self._module.get_input_embeddings()(self._tensor(step.token_ids))
                if own.dtype != self.dtype:
                    return 0, f"its embedding gives {own.dtype}, not {self.dtype}"
                given, width = GivenRows(step.rows, own), own.shape[1]
            if self._decoder is not None:
                looks_at_tokens = self._decoder.looks_at_tokens
            else:
                out = self._forward(*step.with_other_tokens, given)
                looks_at_tokens = not self._forward(*step).has_bits_of(out)
        return (0, "its layers look at token ids beside their embedding") if looks_at_tokens else (width, "")

    def _graphs_of(self, max_model_len: int) -> DecodeGraphs | None:
        operations = self._operations
        if self._decoder is None or not isinstance(operations, CudaOperations) or operations.record is None:
            return None
        if self.layout.keeps_states or self._decoder.looks_at_tokens:
            return None  # torch computes states with numbers of the step on the host, and inputs of layers by token
        return DecodeGraphs(operations, self._attention, self._decoder.forward, max_model_len, self.layout.block_size)

    def _forward(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        logits_rows: torch.Tensor,
        received: Received | None = None,
        given: GivenRows | None = None,
    ) -> ModelOutput:
        if received is not None:
            self._part.receive(received)
        replaced = nullcontext() if given is None else given_to(self._module.get_input_embeddings(), given)
        with replaced, self._row_sizes or nullcontext():
            return self._call_module(token_ids, positions, logits_rows)

    def _call_module(
        self, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], logits_rows: torch.Tensor
    ) -> ModelOutput:
        self._logits_rows = logits_rows
        at = self._tensor(positions)
        out = self._module(
            input_ids=self._tensor(token_ids).unsqueeze(0),
            position_ids=at.unsqueeze(-2),
            use_cache=False,
            logits_to_keep=logits_rows,
            **({} if self._before is None else {"past_key_values": self._before.begin(at)}),
        )
        logits: torch.Tensor = out.logits[0]
        hidden, self._last_hidden = self._last_hidden, None
        if (kept := self._part.take_kept()) is not None:
            return ModelOutput(kept, logits.new_empty(kept.shape[0], 0, dtype=torch.float32))
        return ModelOutput(logits.new_empty(logits.shape[0], 0) if hidden is None else hidden[0], logits)

    def _keep_hidden(self, _head: Any, given: Any) -> None:
        self._last_hidden = given[0]
        if self._logits_rows is not None:
            self.adapters.rows.keep(self._logits_rows)
