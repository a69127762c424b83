"""A view and a placer over nodes whose speed is known, for tests of what the cost model chooses."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from baton.messages.ids import AttemptKey
from baton.messages.kv_cache import BlockStored, KVCacheUpdate
from baton.messages.node import (
    LoadReport,
    NodeDescription,
    Outcome,
    RequestDelta,
    StageTimings,
    StepFigures,
    StepReport,
)
from baton.messages.sampling import SamplingParams
from baton.observe.metrics import Figure
from router.admission.request import ValidRequest
from router.placement.decisions import Choice
from router.placement.placement import Origin
from router.placement.placer import PlacementSettings, Placer
from router.placement.rates import StepRates
from router.placement.view import ClusterView
from tests.support.router_parts import MODEL, block_keys, decode, prefill, record_of

SIZE = 16
RATES = StepRates(step_ms=4.0, token_ms=0.2, sequence_ms=0.5, context_ms=1e-4)


def big(node: NodeDescription, **changes: object) -> NodeDescription:
    same = {"max_model_len": 8192, "block_size": SIZE, "num_blocks": 4096, "kv_layout": "layout"}
    more = {"block_bytes": 100_000, "max_num_batched_tokens": 512, "max_num_seqs": 64}
    return replace(node, **same, **more, **changes)  # type: ignore[arg-type]


def prefills(*names: str) -> list[NodeDescription]:
    return [big(prefill(name)) for name in names]


def decodes(*names: str) -> list[NodeDescription]:
    return [big(decode(name)) for name in names]


class Fleet:
    """A view and a placer over nodes that have been up for a while and are equally fast."""

    def __init__(self, *nodes: NodeDescription, settings: PlacementSettings | None = None) -> None:
        self.now = 1000.0
        self.view = ClusterView()
        self.placer = Placer(settings)
        self.view.registered([record_of(node) for node in nodes])
        self._number = 0
        self.attach(nodes, 0.0)
        self.now = 1000.0
        for node in nodes:
            for tokens, sequences in ((0, 4), (0, 16), (256, 8), (512, 0), (64, 0)) * 20:
                self.step(node.node_id, tokens, sequences)
                self.now += 0.1
            self.load(node.node_id)

    def attach(self, nodes: Sequence[NodeDescription], now: float) -> None:
        for node in nodes:
            self.view.attached(node, now)
            self.placer.on_attached(node)

    def report(self, name: str, report: StepReport) -> bool:
        incarnation = f"{name}.1"
        wants_everything = self.placer.on_report(incarnation, report, self.now)
        self.view.reported(incarnation, report.load)
        return wants_everything

    def step(self, name: str, tokens: int, sequences: int) -> None:
        time_ms = RATES.overhead_ms(sequences, sequences * 100) + RATES.token_ms * tokens
        self.report(name, StepReport((), LoadReport(), step=StepFigures(time_ms, tokens, sequences, sequences * 100)))

    def load(self, name: str, running: int = 0, uncomputed: int = 0, context: int = 0) -> None:
        load = LoadReport(running=running, uncomputed_tokens=uncomputed, context_tokens=context)
        self.report(name, StepReport((), load))

    def has_cached(self, name: str, prompt: Sequence[int]) -> None:
        update = KVCacheUpdate(0, 0, [BlockStored(block_keys(prompt, SIZE))], restart=True)
        self.report(name, StepReport((), LoadReport(), update))

    def ended(self, name: str, choice: Choice, outcome: Outcome, timings: StageTimings | None = None) -> None:
        key = AttemptKey(choice.request.request_id, choice.attempt)
        self.report(name, StepReport([RequestDelta(key, outcome=outcome, timings=timings)], LoadReport()))

    def fails(self, name: str, outcome: Outcome, times: int) -> None:
        """Place so many requests on p1 and d1, of which the named one fails."""
        for _ in range(times):
            choice = self.place()
            assert names(choice) == ("p1", "d1")
            self.ended(name, choice, outcome)
            self.placer.end(choice.request.request_id)

    def open_breakers(self) -> dict[str, float]:
        """The number of open breakers of nodes and of pairs."""
        figures = (figure for figure in self.placer.figures(self.now) if isinstance(figure, Figure))
        return {figure.labels["of"]: figure.value for figure in figures if "breakers_open" in figure.name}

    def has_moved(self, timings: StageTimings) -> None:
        """Report the transfer time of one request, the only known one."""
        choice = self.place(1024)
        self.ended(choice.placement.decode.node_id, choice, Outcome.LENGTH, timings)
        self.placer.end(choice.request.request_id)
        self.view.released(choice.placement.decode.incarnation, AttemptKey(choice.request.request_id, 1))

    def choose(
        self,
        tokens: int | Sequence[int] = 1024,
        attempt: int = 1,
        origin: Origin | None = None,
        exclude: Set[str] = frozenset(),
        **fields: Any,
    ) -> Choice:
        """Choose nodes for a new prompt of this length, or for this prompt."""
        self._number += 1
        prompt = tuple(tokens) if not isinstance(tokens, int) else tuple(range(self._number, self._number + tokens))
        base = ValidRequest(prompt, SamplingParams(max_tokens=64), request_id=f"r{self._number}", model=MODEL)
        request = replace(base, **fields)
        nodes = self.view.candidates()
        return self.placer.choose(
            nodes, request, exclude, attempt, 0.0, self.now, origin=origin, encoders=self.view.encoders()
        )

    def place(self, tokens: int | Sequence[int] = 1024, **fields: Any) -> Choice:
        """Choose nodes and place the request on them."""
        choice = self.choose(tokens, **fields)
        self.placer.placed(choice, self.now)
        for node in (choice.placement.prefill, choice.placement.decode):
            if node is not None:
                self.view.dispatched(node.incarnation, AttemptKey(choice.request.request_id, choice.attempt))
        return choice


def pairs_of(prefill_names: str, decode_names: str) -> Fleet:
    """A fleet of these nodes, whose decode nodes leave every prompt to prefill nodes."""
    nodes = *prefills(*prefill_names.split()), *decodes(*decode_names.split())
    return Fleet(*nodes, settings=PlacementSettings(alone_tokens=0))


def names(choice: Choice) -> tuple[str | None, str]:
    placement = choice.placement
    return (placement.prefill.node_id if placement.prefill else None, placement.decode.node_id)
