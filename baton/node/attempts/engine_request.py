"""Makes the engine's request of a leg that was submitted."""

from __future__ import annotations

from baton.engine.request import Request
from baton.messages.node import Submit


def engine_request(submit: Submit, eos_token_ids: frozenset[int], client_index: int = 0) -> Request:
    """The leg as a request to the engine. `client_index`: whose outputs its outputs are among."""
    return Request(
        str(submit.attempt),
        submit.prompt_token_ids,
        submit.sampling_params,
        eos_token_ids=eos_token_ids,
        client_index=client_index,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        leg=submit.leg,
        kv_source=submit.kv_source,
        output_token_ids=submit.output_token_ids,
        reader_block_size=submit.reader_block_size,
        pooling=submit.pooling,
        spans=submit.spans,
        adapter=submit.adapter,
        contents=submit.contents,
    )
