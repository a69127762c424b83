"""One rank's part of a micro-batch: from the slot to the slot, unless the model has one stage."""

from __future__ import annotations

from baton.runner.backends.ranks.ranks import Shard
from baton.runner.model.decoder import ModelOutput
from baton.runner.model.transformer import Transformer
from baton.runner.ranks.micro_batch import MicroBatch, Task
from baton.runner.ranks.micro_batch_slot import MicroBatchSlot


def compute_part(transformer: Transformer, shard: Shard, slot: MicroBatchSlot, micro: MicroBatch) -> ModelOutput:
    """Compute one rank's part of a micro-batch, and return it.

    Of several stages the first rank of each leaves in the slot what comes next: rows for the stage behind, or results.
    """
    stage, num_rows = transformer.stage, micro.batch.token_ids.size
    # Copied, since the first rank of the stage replaces them while the others may still be computing.
    received = None if stage.is_first else slot.rows(num_rows, transformer.width, transformer.dtype).clone()
    out = transformer.compute_stage(micro.batch, micro.logits_rows, received)
    if stage.count == 1 or shard.rank > 0:
        return out
    if stage.is_last:
        results = results_in(transformer, slot, micro)
        results.logits.copy_(out.logits)
        if micro.task is Task.LOGITS_AND_HIDDEN:
            results.hidden.copy_(out.hidden)
    else:
        slot.rows(num_rows, transformer.width, transformer.dtype).copy_(out.hidden)
    return out


def results_in(transformer: Transformer, slot: MicroBatchSlot, micro: MicroBatch) -> ModelOutput:
    """The results of a micro-batch in its slot; hidden states are there if its task has them."""
    return slot.results(micro.num_results, transformer.embedding_size, transformer.num_logits, transformer.dtype)
