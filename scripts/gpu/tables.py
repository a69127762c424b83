"""Renders the results of `scripts/gpu_check` on one card as Markdown, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu.check import STAGES
from gpu.results import Line, latest

Fields = Mapping[str, Any]


def render_card(lines: Sequence[Line]) -> str:
    """All of a result file: how its stages ended, then a table for each kind of figure that it has."""
    about: Fields = next((line["fields"] for line in reversed(lines) if line["kind"] == "run"), {})
    stages = _stages(lines)
    runs = {stage: latest(lines, stage) for stage in stages}
    commit = about.get("commit") or "unknown"
    head = f"### {about.get('card')}, {about.get('date')}\n\nCommit {commit}, Python {about.get('python')}."
    engine, peer = runs.get("engine", []), runs.get("transformers", [])
    micro, pair = runs.get("micro", []), runs.get("pair", [])
    parts = [
        head,
        _machine(runs.get("environment", [])),
        _outcomes(lines, runs),
        _prompts(_reports(engine, "prompt"), _reports(peer, "prompt")),
        _decode(_reports(engine, "decode"), _reports(peer, "decode")),
        _sampled(_reports(engine, "decode")),
        _profiles(_reports(engine, "profile")),
        _products(_reports(micro, "product")),
        _attention(_reports(micro, "attention")),
        _norms(_reports(micro, "norm")),
        _sampler(_reports(micro, "sampler")),
        _digests(_reports(micro, "digests")),
        _cublas(_reports(runs.get("bits", []), "cuBLAS")),
        _hand_offs(_reports(pair, "hand-off")),
        _lanes(pair),
        _left_out(runs),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table under a title; empty without rows. Floats are shown with three digits."""
    cells = [[_cell(cell) for cell in row] for row in rows]
    if not cells:
        return ""
    lines = [f"**{title}**", "", _row(columns), _row(["---"] * len(columns)), *map(_row, cells)]
    return "\n".join(lines)


def number(figure: float) -> str:
    """A figure with three digits, whole ones with commas between thousands."""
    if abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.1f}" if abs(figure) >= 10 else f"{figure:.2f}"


def _cell(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return number(cell)
    return f"{cell:,}" if isinstance(cell, int) else "" if cell is None else str(cell).replace("|", "/")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _stages(lines: Sequence[Line]) -> list[str]:
    """The stages of a file in the order in which they run; any others follow."""
    named = dict.fromkeys(line["stage"] for line in lines if line["kind"] != "run")
    return [*(stage for stage in STAGES if stage in named), *(stage for stage in named if stage not in STAGES)]


def _reports(lines: Sequence[Line], name: str) -> list[Fields]:
    return [line["fields"] for line in lines if line["kind"] == "report" and line["name"] == name]


def _machine(environment: Sequence[Line]) -> str:
    """The versions of the packages, and the rates that no other figure can be above."""
    versions = [
        f"CUDA {report['cuda']}, {', '.join(' '.join(named) for named in report['packages'].items() if named[1])}."
        for report in _reports(environment, "versions")
    ]
    copies = [
        f"A copy moves {number(report['gb_per_s'])} GB/s, counting bytes read and written."
        for report in _reports(environment, "copy")
    ]
    products = [
        f"A product of {report['size']:,} × {report['size']:,} runs at {number(report['tflop_per_s'])} TFLOP/s."
        for report in _reports(environment, "product")
    ]
    return " ".join([*versions, *copies, *products])


def _outcomes(lines: Sequence[Line], runs: Mapping[str, Sequence[Line]]) -> str:
    """How every stage ended, and which of its checks failed. One that was left out each time has no lines."""
    rows = []
    for stage, run in runs.items():
        end = next((line for line in reversed(run) if line["kind"] == "end"), None)
        checks = [line for line in run if line["kind"] == "check"]
        failed = [line["name"] for line in checks if not line["ok"]]
        kinds = "; ".join(dict.fromkeys(failed))
        never = any(line["kind"] == "end" and line["stage"] == stage for line in lines)
        outcome = end["outcome"] if end else "left out" if never else "cut off"
        passed = f"{len(checks) - len(failed)} of {len(checks)}"
        rows.append((stage, outcome, end["seconds"] if end else None, passed, kinds))
    return table("Stages", ("stage", "outcome", "seconds", "checks passed", "checks failed"), rows)


def _prompts(own: Sequence[Fields], peers: Sequence[Fields]) -> str:
    peer = {(report["shape"], report["tokens"]): report for report in peers}
    rows = []
    for report in own:
        other = peer.get((report["shape"], report["tokens"]))
        ms = other["ms_min"] if other else None
        rows.append(
            (
                report["shape"],
                report["tokens"],
                report["ms_min"],
                report["tokens_per_s"],
                ms,
                report["ms_min"] / ms if ms else None,
            )
        )
    columns = ("shape", "tokens", "ms at best", "tokens/s", "transformers, ms", "ratio")
    return table("A prompt in one step", columns, rows)


def _decode(own: Sequence[Fields], peers: Sequence[Fields]) -> str:
    peer = {(report["shape"], report["batch"], report["graphs"]): report["ms"] for report in peers}
    rows = []
    for report in own:
        if report["sampling"] == "greedy":
            key = report["shape"], report["batch"]
            spread = f"{number(report['ms'])} [{number(report['ms_p10'])}, {number(report['ms_p90'])}]"
            others = peer.get((*key, False)), peer.get((*key, True))
            rows.append((*key, report["context"], report["graphs"], spread, report["tokens_per_s"], *others))
    columns = ("shape", "batch", "context", "graphs", "ms a step", "tokens/s")
    return table("Greedy decode steps", (*columns, "transformers, ms", "the same as a graph, ms"), rows)


def _sampled(own: Sequence[Fields]) -> str:
    greedy = {
        (report["shape"], report["batch"]): report["ms"]
        for report in own
        if report["sampling"] == "greedy" and report["graphs"]
    }
    rows = [
        (
            report["shape"],
            report["batch"],
            report["sampling"],
            report["ms"],
            greedy.get((report["shape"], report["batch"])),
        )
        for report in own
        if report["sampling"] != "greedy"
    ]
    return table("Sampled decode steps", ("shape", "batch", "sampling", "ms a step", "greedy, ms"), rows)


def _profiles(reports: Sequence[Fields]) -> str:
    columns = ("shape", "of", "ms with the profiler", "ms in kernels", "kernels", "launches", "graphs", "copies")
    names = ("shape", "of", "wall_ms_with_profiler", "kernels_ms", "kernels", "launches", "graph_launches", "copies")
    parts = [table("Profiles", columns, [[report[name] for name in names] for report in reports])]
    for report in reports:
        rows = [(f"`{kernel['name']}`", kernel["ms"], kernel["calls"]) for kernel in report["top"]]
        parts.append(table(f"Longest kernels of {report['of']}, {report['shape']}", ("kernel", "ms", "calls"), rows))
    return "\n\n".join(part for part in parts if part)


def _products(reports: Sequence[Fields]) -> str:
    """One row a weight, one column a number of rows: Baton's time and how many times that of one `linear`."""
    counts = sorted({report["rows"] for report in reports})
    weights: dict[tuple[str, str, int, int], dict[int, str]] = {}
    for report in reports:
        key = report["shape"], report["matrix"], report["outputs"], report["inputs"]
        rate = f"{report['tflops']:.0f} TFLOP/s" if report["rows"] >= 256 else f"{report['gb_per_s']:,.0f} GB/s"
        weights.setdefault(key, {})[report["rows"]] = f"{number(report['us'])} µs, {rate}, × {report['ratio']:.2f}"
    rows = [
        (shape, f"{matrix} {outputs:,} × {inputs:,}", *(cells.get(count) for count in counts))
        for (shape, matrix, outputs, inputs), cells in weights.items()
    ]
    title = "Products by number of rows; × is the time as a multiple of one call of torch's `linear`"
    return table(title, ("shape", "weight", *(f"{count:,}" for count in counts)), rows)


def _attention(reports: Sequence[Fields]) -> str:
    names = ("shape", "case", "us", "gb_per_s", "tflops", "sdpa_us", "sdpa_tflops")
    columns = ("shape", "sequences x keys", "µs", "GB/s", "TFLOP/s", "SDPA, µs", "SDPA, TFLOP/s")
    return table("Attention of one layer", columns, [[report.get(name) for name in names] for report in reports])


def _norms(reports: Sequence[Fields]) -> str:
    names = ("rows", "width", "us", "torch_us", "gb_per_s")
    return table(
        "Norms with an addition",
        ("rows", "width", "µs", "torch, µs", "GB/s"),
        [[report[name] for name in names] for report in reports],
    )


def _sampler(reports: Sequence[Fields]) -> str:
    names = ("kind", "logits", "vocab", "rows", "ms")
    columns = ("sampling", "logits", "vocabulary", "rows", "ms a step")
    return table("The sampler", columns, [[report[name] for name in names] for report in reports])


def _digests(reports: Sequence[Fields]) -> str:
    rows = [(report["blocks"], report["bytes"], report["ms"], report["gb_per_s"]) for report in reports]
    return table("Digests of blocks in VRAM", ("blocks", "bytes", "ms", "GB/s"), rows)


def _cublas(reports: Sequence[Fields]) -> str:
    names = ("columns", "width", "rows", "differing", "bits_equal")
    columns = ("outputs", "inputs", "rows", "differing numbers", "all equal")
    return table(
        "Bits of cuBLAS beside one sum in order", columns, [[report[name] for name in names] for report in reports]
    )


def _hand_offs(reports: Sequence[Fields]) -> str:
    names = ("shape", "tokens", "digests", "ttft_ms", "ttft_alone_ms", "step_ms", "bytes", "gb_per_s")
    columns = ("shape", "tokens", "digests", "TTFT, ms", "prompt alone, ms", "a step, ms", "bytes", "GB/s of reads")
    rows = [[*(report[name] for name in names), report["after_last_chunk_ms"]] for report in reports]
    return table("A pair on the one GPU", (*columns, "arrival after the last chunk, ms"), rows)


def _lanes(pair: Sequence[Line]) -> str:
    """Which lanes UCX chose, and what could not be measured since it isn't built."""
    rows = []
    for report in _reports(pair, "lane"):
        reads = report["reads"] if isinstance(report["reads"], list) else [report["reads"]]
        rows += [(report["digests"], report["of"], text) for text in reads]
    parts = [table("Lanes of reads, as UCX says", ("digests", "of", "operation: bytes: lane"), rows)]
    parts += [
        f"Not built: {line['name']}: {line['fields']['not_built']}."
        for line in pair
        if line["kind"] == "report" and "not_built" in line["fields"]
    ]
    return "\n\n".join(part for part in parts if part)


def _left_out(runs: Mapping[str, Sequence[Line]]) -> str:
    rows = [
        (stage, line["name"], line["fields"]["left_out"])
        for stage, run in runs.items()
        for line in run
        if line["kind"] == "report" and "left_out" in line["fields"]
    ]
    return table("Left out", ("stage", "figure", "why"), rows)
