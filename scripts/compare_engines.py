"""Compares Baton with other engines: the same random weights, prompts and number of threads, all measured in one run.

Engines are measured in turn, in several rounds, each in a process of its own. With several formats of the weights,
every engine has a turn with each of them. An engine that can't be installed or fails is listed with the reason, and
the others are measured. Baton does not depend on them: they are installed into build/compare-engines.

FLOOR is the time in which this machine's memory reads Baton's weights in their format and the keys and values of all
contexts once; it is measured in the same process, before and after each batch size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from baton.bench.results.host import processor, usable_cores  # noqa: E402
from baton.bench.results.spread import Spread  # noqa: E402

BUILD = ROOT / "build" / "compare-engines"
THEIR_PYTHON = BUILD / "venv" / "bin" / "python"
BATCHES = (1, 8, 16)
FORMATS = ("bf16", "int8", "int4")
GGUF = "gguf"
"""What stands in the place of a format where a file is compared."""


@dataclass(frozen=True)
class Engine:
    """An engine, its own names of each format of weights that it has, and its packages.

    Each list of packages is installed by one call of pip, in this order.
    """

    name: str
    script: str
    title: str
    weights: Mapping[str, Sequence[str]]
    packages: Sequence[Sequence[str]] = ()


# optimum-intel requires a torchvision that would install another torch with CUDA, which is not needed here.
ENGINES = (
    Engine("baton", "compare_engines_baton.py", "Baton", {**{form: [form] for form in FORMATS}, GGUF: [GGUF]}),
    Engine(
        "openvino",
        "compare_engines_openvino.py",
        "OpenVINO GenAI",
        {"bf16": ["fp16"], "int8": ["int8"], "int4": ["int4"]},
        (
            ("openvino-genai", "nncf", "optimum>=2.3", "requests", "transformers>=5.5,<5.6", "safetensors"),
            ("--no-deps", "optimum-intel>=2.2"),
        ),
    ),
    Engine(
        "llama_cpp",
        "compare_engines_llama_cpp.py",
        "llama.cpp",
        {"bf16": ["BF16"], "int8": ["Q8_0"], "int4": ["Q4_K_M", "Q4_0"], GGUF: [GGUF]},
        (("llama-cpp-python", "gguf", "safetensors"),),
    ),
)


@dataclass
class Figures:
    """The measurements of one engine with weights of one format, or why there are none."""

    engine: Engine
    format: str = "bf16"
    weights: str = ""
    """The engine's own name of the weights' format."""
    failed: str = ""
    version: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefill_s: list[float] = field(default_factory=list)
    decode_s: dict[str, list[float]] = field(default_factory=dict)
    floor_s: dict[str, list[float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The engine's name and that of its weights."""
        return f"{self.engine.title} {self.weights}".strip()

    def add_round(self, figures: Mapping[str, Any]) -> None:
        """Adds the measurements of one round."""
        self.version, self.settings = figures["version"], figures["settings"]
        self.prefill_s += figures["prefill_s"]
        for batch, seconds in figures["decode_s"].items():
            self.decode_s.setdefault(batch, []).extend(seconds)
        for batch, floor in figures.get("floor_s", {}).items():
            self.floor_s.setdefault(batch, []).append(floor)


def main() -> int:
    """Installs the engines, measures them, and prints the figures."""
    options = _options()
    BUILD.mkdir(parents=True, exist_ok=True)
    engines = [engine for engine in ENGINES if engine.name in options.engines]
    failed = {engine.name: "" if options.no_install else _install(engine) for engine in engines}
    results = [
        Figures(engine, form, weights, failed[engine.name])
        for form in ([GGUF] if options.gguf else options.formats)
        for engine in engines
        for weights in engine.weights.get(form, ())
    ]
    plan = _plan(options)
    for result in results:
        if not result.failed:
            note(f"preparing the model for {result.title}")
            _call(result, {**plan, "prepare_only": True})
    if options.prepare_only:
        return int(any(result.failed for result in results))
    for number in range(options.rounds):
        for result in results:
            if not result.failed:
                note(f"round {number + 1} of {options.rounds}: {result.title}")
                answer = _call(result, plan)
                if answer is not None:
                    result.add_round(answer)
    report = _report(options, results)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    _print_table(report)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/compare_engines", description=__doc__)
    names = [engine.name for engine in ENGINES]
    parser.add_argument("--engines", nargs="+", choices=names, default=names, help="engines to measure; default: all")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16"], help="formats of the weights")
    parser.add_argument("--shape", default="0.5b", help="random weights of a known shape")
    parser.add_argument(
        "--gguf", metavar="FILE", type=Path, help="compare the engines that read such files on this one instead"
    )
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="threads of each engine; default: all cores"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=24, help="decode steps at each batch size in each round")
    parser.add_argument("--rounds", type=int, default=2, help="how often each engine is measured")
    parser.add_argument("--precision", choices=["bf16", "f32"], default="bf16", help="precision of computing")
    parser.add_argument("--openvino-kv", default="bf16", help="OpenVINO's KV_CACHE_PRECISION (its own default is u8)")
    parser.add_argument("--json", metavar="PATH", help="also write all figures to this file")
    parser.add_argument("--no-install", action="store_true", help="use what is installed in build/compare-engines")
    parser.add_argument("--prepare-only", action="store_true", help="install and convert, but measure nothing")
    return parser.parse_args()


def _install(engine: Engine) -> str:
    """Installs an engine's packages into the comparison's venv; returns why that failed, or an empty text."""
    try:
        if engine.packages and not THEIR_PYTHON.exists():
            note("making build/compare-engines/venv")
            subprocess.run([sys.executable, "-m", "venv", str(BUILD / "venv")], check=True, capture_output=True)
        if engine.packages:
            # torch is installed first and pinned: other versions would install gigabytes of CUDA libraries.
            torch = next(line for line in _constraints() if line.startswith("torch=="))
            pinned = BUILD / "constraints.txt"
            pinned.write_text(torch + "\n")
            _pip(torch)
        for packages in engine.packages:
            note(f"installing {' '.join(packages)} for {engine.title}")
            _pip("-c", str(pinned), *packages)
    except subprocess.CalledProcessError as error:
        output = (error.stderr or error.stdout or b"").decode(errors="replace").strip().splitlines()
        reasons = [line for line in output if "ERROR" in line or "rror:" in line] or output
        return f"could not be installed: {reasons[-1][:200] if reasons else error}"
    return ""


def _pip(*words: str) -> None:
    base = [str(THEIR_PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*base, *words], check=True, capture_output=True)


def _constraints() -> list[str]:
    return (ROOT / "constraints.txt").read_text().splitlines()


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """The input of every engine's script: the same model, prompts and number of threads."""
    model = _converted(options.gguf) if options.gguf else _random_weights(options.shape)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    rng = Random(0)
    return {
        "model": str(model),
        "made": str(BUILD / f"made-{options.shape}"),
        "gguf": str(options.gguf.resolve()) if options.gguf else "",
        "threads": options.threads,
        "context": options.context,
        "steps": options.steps,
        "batches": BATCHES,
        "precision": options.precision,
        "kv": options.openvino_kv,
        "prompts": [[rng.randrange(vocabulary) for _ in range(options.context)] for _ in range(max(BATCHES))],
    }


def _random_weights(shape: str) -> Path:
    """The model directory of a shape, written once."""
    model = BUILD / f"model-{shape}"
    if not (model / "model.safetensors").exists():
        from baton.bench.micro.shapes import write_shape

        note(f"writing random weights of the shape {shape}")
        write_shape(model, shape)
    return model


def _converted(file: Path) -> Path:
    """The model directory that Baton makes of a GGUF file, as it does for `--model FILE`."""
    from baton.models.resolve import find_model

    return find_model(file, os.environ).directory


def _call(result: Figures, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Runs the engine's script once; if it fails, sets `result.failed` and returns None."""
    engine = result.engine
    interpreter = THEIR_PYTHON if engine.packages else Path(sys.executable)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(plan["threads"]),
        "PYTHONPATH": "" if engine.packages else str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(interpreter), str(ROOT / "scripts" / engine.script)],
        input=json.dumps({**plan, "weights": result.weights}),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        result.failed = f"failed: {lines[-1][:200] if lines else f'exit code {done.returncode}'}"
        return None
    lines = done.stdout.strip().splitlines()
    return dict(json.loads(lines[-1])) if lines else None


def _report(options: argparse.Namespace, results: Sequence[Figures]) -> dict[str, Any]:
    return {
        "processor": processor(),
        "threads": options.threads,
        "model": options.gguf.name if options.gguf else f"{options.shape} shape",
        "precision": options.precision,
        "context_tokens": options.context,
        "rounds": options.rounds,
        "engines": [_figures(options, result) for result in results],
    }


def _figures(options: argparse.Namespace, result: Figures) -> dict[str, Any]:
    named = {"engine": result.engine.title, "format": result.format, "weights": result.weights}
    if result.failed or not result.prefill_s:
        return {**named, "failed": result.failed or "gave no figures"}
    return {
        **named,
        "version": result.version,
        "settings": result.settings,
        "prefill": _rates(options.context, Spread.of(result.prefill_s)),
        "decode": [_decode(result, batch) for batch in result.decode_s],
    }


def _decode(result: Figures, batch: str) -> dict[str, Any]:
    step = Spread.of(result.decode_s[batch])
    figures = {"batch": int(batch), **_rates(int(batch), step)}
    if result.floor_s:
        floor = median(result.floor_s[batch])
        figures |= {"floor_ms": floor * 1e3, "step_per_floor": step.median / floor}
    return figures


def _rates(tokens: int, seconds: Spread) -> dict[str, float]:
    """Rates from times: median, and percentiles in reversed order, since less time is a higher rate."""
    return {
        "tokens_per_s": tokens / seconds.median,
        "tokens_per_s_p10": tokens / seconds.p90,
        "tokens_per_s_p90": tokens / seconds.p10,
        "step_ms": seconds.median * 1e3,
    }


def _print_table(report: Mapping[str, Any]) -> None:
    print(
        f"{report['model']}, {report['precision']}, prompts of {report['context_tokens']} tokens, "
        f"{report['threads']} threads of {report['processor']}; tokens/s, medians of {report['rounds']} rounds "
        "[tenth, ninetieth percentile]\n"
    )
    rows = [["ENGINE", "WEIGHTS", "VERSION", "PREFILL", *(f"DECODE x {batch}" for batch in BATCHES)]]
    for form in dict.fromkeys(engine["format"] for engine in report["engines"]):
        engines = [engine for engine in report["engines"] if engine["format"] == form]
        for engine in engines:
            if "failed" in engine:
                rows.append([engine["engine"], engine["weights"], engine["failed"], "", "", "", ""])
            else:
                cells = [_cell(cell) for cell in (engine["prefill"], *engine["decode"])]
                rows.append([engine["engine"], engine["weights"], engine["version"][:12], *cells])
        rows += _comparisons([engine for engine in engines if "failed" not in engine])
        rows.append([""] * len(rows[0]))
    widths = [max(len(row[column]) for row in rows if row[3] or column < 2) for column in range(len(rows[0]))]
    for row in rows[:-1]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _comparisons(engines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Baton's steps against the floor, and its rates against the best of the others with the same format."""
    rows = []
    ours = next((engine for engine in engines if engine["engine"] == ENGINES[0].title), None)
    if ours is None:
        return []
    if all("step_per_floor" in batch for batch in ours["decode"]):
        rows.append(["", "", "step / floor", "-", *(f"{batch['step_per_floor']:.2f}" for batch in ours["decode"])])
    others = [engine for engine in engines if engine is not ours]
    if others:
        cells = []
        for index, own in enumerate((ours["prefill"], *ours["decode"])):
            best = max([engine["prefill"], *engine["decode"]][index]["tokens_per_s"] for engine in others)
            cells.append(f"{own['tokens_per_s'] / best:.2f}")
        rows.append(["", "", "Baton / best", *cells])
    return rows


def _cell(rates: Mapping[str, float]) -> str:
    return f"{rates['tokens_per_s']:.0f} [{rates['tokens_per_s_p10']:.0f}, {rates['tokens_per_s_p90']:.0f}]"


def note(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
