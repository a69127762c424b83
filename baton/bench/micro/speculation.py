"""`baton bench engine --speculative`: what drafts save, on texts of four kinds, by turns with plain decoding.

One engine decodes each chat alone, once with drafts and once without them, in turns, so that drift of the machine's
speed affects both. The prompts are in the prefix cache, so the time is that of decoding. Both outputs are compared: a
difference is an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.micro.engine_drive import rates_by_turns
from baton.errors import BatonError
from baton.offline import LLM, SamplingParams
from baton.offline.outputs import RequestOutput

_CODE = """def total_price(items, tax_rate):
    subtotal = 0.0
    for item in items:
        price = item["price"]
        quantity = item["quantity"]
        subtotl += price * quantity
    tax = subtotal * tax_rate
    return subtotal + tax
"""
_TEXT = (
    "The quick brown fox jumps over the lazy dog near the river bank. On the other side of the river a small village "
    "lies between two hills, and its people grow wheat, barley and oats. Every morning the baker opens the shop at "
    "five, and every evening the smith closes the forge at eight."
)
_RECORDS: Sequence[Mapping[str, object]] = [
    {"customer_name": name, "customer_city": city, "order_total_in_euros": total, "order_status": status}
    for name, city, total, status in [
        ("Ada Lovelace", "London", 120, "shipped"),
        ("Alan Turing", "Manchester", 75, "pending"),
        ("Grace Hopper", "New York", 310, "shipped"),
        ("Edsger Dijkstra", "Rotterdam", 42, "cancelled"),
    ]
]
_KEYS = (
    "number_of_items_in_the_shopping_cart",
    "total_price_in_euros_including_taxes",
    "estimated_delivery_time_in_days",
    "customer_satisfaction_score_in_percent",
)
_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {key: {"type": "integer", "minimum": 0, "maximum": 999} for key in _KEYS},
    "required": list(_KEYS),
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class _Workload:
    name: str
    prompts: Sequence[str]
    schema: Mapping[str, Any] | None = None


_WORKLOADS = (
    _Workload(
        "code edit",
        [
            "Fix the typo in this code: subtotl should be subtotal. Write out the complete code.\n\n"
            f"```python\n{_CODE}```"
        ],
    ),
    _Workload("extraction", [f"Repeat the following text word for word, and add nothing:\n\n{_TEXT}"]),
    _Workload("records", ["Copy these records as JSON, one object a line:\n" + "\n".join(map(json.dumps, _RECORDS))]),
    _Workload(
        "chat",
        [
            "What is the capital of France, and why is it famous?",
            "Write a short story about a lighthouse keeper.",
            "Explain in a few sentences how a bicycle stays upright.",
        ],
    ),
    _Workload("schema", ["Make up the figures of an order."], _SCHEMA),
)


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """One kind of text; medians over the turns."""

    workload: str
    num_tokens: int
    """Tokens of all its outputs."""
    acceptance_length: float
    """Tokens that a step with a draft yielded on average; 0 without drafts."""
    tokens_per_s: float
    """With drafts."""
    plain_tokens_per_s: float
    ratio: float
    """How many times as fast decoding is with drafts; median over the turns."""
    ratio_p10: float
    ratio_p90: float


def measure(
    model_dir: Path, settings: Mapping[str, Any], *, max_tokens: int = 192, rounds: int = 6
) -> list[SpeculationFigures]:
    """Measure all kinds of texts; `settings` are those of `baton.LLM`. Raises ConfigError and BatonError."""
    with LLM(model_dir, **settings) as llm:
        return [_measured(llm, workload, max_tokens, rounds) for workload in _WORKLOADS]


def _measured(llm: LLM, workload: _Workload, max_tokens: int, rounds: int) -> SpeculationFigures:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    drafts = accepted = num_tokens = 0
    for turn in range(rounds + 1):
        outputs = {}
        for speculation in (True, False) if turn % 2 else (False, True):
            before = llm.spec_decoding
            started = time.perf_counter()
            outputs[speculation] = _chat(llm, workload, max_tokens, speculation=speculation)
            took = time.perf_counter() - started
            if turn:  # the first turn fills the prefix cache
                seconds[speculation].append(took)
                drafts += llm.spec_decoding.num_drafts - before.num_drafts
                accepted += llm.spec_decoding.num_accepted_tokens - before.num_accepted_tokens
        if outputs[True] != outputs[False]:
            raise BatonError(f"{workload.name}: the tokens with drafts are not those without: please report this")
        num_tokens = sum(map(len, outputs[True]))
    rates = rates_by_turns(num_tokens, seconds[True], seconds[False])
    return SpeculationFigures(workload.name, num_tokens, 1.0 + accepted / drafts if drafts else 0.0, *rates)


def _chat(llm: LLM, workload: _Workload, max_tokens: int, *, speculation: bool) -> list[Sequence[int]]:
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, speculation=speculation, json_schema=workload.schema
    )
    outputs: list[Sequence[int]] = []
    for prompt in workload.prompts:
        answers: list[RequestOutput] = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)
        outputs.append(answers[0].outputs[0].token_ids)
    return outputs
