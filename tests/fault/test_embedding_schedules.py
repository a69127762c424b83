"""The fault schedules of test_fault_schedules.py with as many requests for embeddings as for text.

`BATON_EMBEDDING_SCHEDULES=1000` runs that many.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

from baton.errors import BatonError
from baton.messages.generation import GenerateRequest
from baton.messages.pooling import EMBEDDING_KINDS, Pooling, PoolingParams, PoolingRequest
from tests.fault.test_fault_schedules import HAPPENING_S, Schedule
from tests.support.simulated_oracle import expected_embedding
from tests.support.virtual_time import run_virtually

NUM_SCHEDULES = int(os.environ.get("BATON_EMBEDDING_SCHEDULES", "30"))


class EmbeddingSchedule(Schedule):
    """A schedule in which every other request is for several embeddings."""

    async def _ask(self, number: int) -> None:
        if number % 2:
            await super()._ask(number)
            return
        await asyncio.sleep(self.rng.uniform(0, HAPPENING_S))
        await asyncio.gather(*(self._embed(f"e{number}-{part}") for part in range(4)))

    async def _embed(self, name: str) -> None:
        rng = self.rng
        prompt = rng.choice([[], *self.prefixes]) + self._tokens(rng.randint(1, 30))
        timeout_s = rng.choice([None, None, None, rng.uniform(0.01, 4.0)])
        kinds = [None, *sorted(EMBEDDING_KINDS, key=lambda kind: kind.value)]
        pooling = PoolingRequest(rng.choice(kinds), rng.choice([None, False]))
        answering = asyncio.create_task(
            self.cluster.generate(GenerateRequest(prompt, name, pooling=pooling), timeout_s)
        )
        if rng.random() < 0.2:
            await asyncio.sleep(rng.expovariate(5.0))
            if not answering.done():
                self._leave(name)
        answer = await answering
        assert (answer.finished is None) != (answer.error is None), "it ends once"
        assert answer.sequences == {0: []}
        if answer.finished is not None:
            params = PoolingParams(pooling.kind or Pooling.LAST, pooling.normalize is not False)
            assert answer.finished.embedding == expected_embedding(prompt, self.limits.spec, params)
            self.struck[params.kind.value] += 1
            self.struck["embedded"] += 1
            self.struck["embedded after a failover"] += answer.finished.path.attempts > 1
            self.struck["embedded by a decode node"] += answer.finished.path.decode_node.startswith("decode")
        else:
            assert type(answer.error) is not BatonError, f"not a fault that anybody foresaw: {answer.error}"


def test_embeddings_are_right_and_every_block_comes_back() -> None:
    struck: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        try:
            run_virtually(EmbeddingSchedule(seed, struck).run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert struck["embedded"] > NUM_SCHEDULES
    assert struck["embedded after a failover"]
    assert struck["embedded by a decode node"]
    assert all(struck[kind.value] for kind in EMBEDDING_KINDS)
