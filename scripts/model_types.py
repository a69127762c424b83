"""Writes the register of model types from the results of tests, and renders what the documents say of it.

Run by scripts/model_types. A way is a test function whose parameters begin with a type, or a model of it. A test that
is skipped, since the type has no such part, is not claimed, and one that fails is shown and not claimed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from xml.etree import ElementTree

from generated_parts import ROOT, keep, rendered

from baton.model_formats.gguf.architectures import ARCHITECTURES
from baton.model_formats.model_types import REGISTER, registered_types

WAYS: Mapping[str, str] = {
    "test_types::test_greedy_tokens_equal_generate": "tokens",
    "test_types::test_drawn_tokens_depend_on_the_request_alone": "bits",
    "test_types::test_divided_models_give_the_bits_of_one_process": "{}",
    "test_types::test_scaled_rotary_embeddings": "{}",
    "test_types::test_adapters_give_the_tokens_of_peft": "adapters",
    "test_types::test_a_pair_of_nodes_and_its_failover_give_the_tokens_of_one": "pair",
    "test_text_parts::test_greedy_tokens_and_logits_are_those_of_the_whole_model": "text part",
    "test_image_exact::test_tokens_behind_images_are_those_of_generate": "images",
    "test_encoder_decoder_exact::test_tokens_are_those_of_generate": "encoder",
    "test_encoders::test_an_encoder_gives_transformers_vectors_with_the_same_bits_in_any_batch": "vectors",
}
"""What a passed test shows, by file and function; {}: its last parameter says it."""
ROPE_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
COLUMNS: Mapping[str, str] = {"ranks": "ranks", "stages": "stages", "adapters": "adapters", "pair": "pair, failover"}
PAGE = ROOT / "docs/models.md"
HEAD = """\
# Models

<!-- Rendered by scripts/model_types from the register, which it writes from the results of tests. -->

A model is served if transformers computes it, Baton's attention and products can take the place of transformers', and a
check at start finds the logits of both the same
([decision 52](decisions/0052-models-are-compared-with-transformers-at-start.md)). `baton describe node` shows what it
found, and whether the model's type is one of those below.

These types were verified beyond that, with transformers {transformers}, on tiny models of which every tensor is random.
A type is what config.json calls `model_type`. All have these in common:

- Greedy tokens in float32 equal those of `generate()` with eager attention: of each request alone, in batches, in
  chunks of 16, 64, 100 and 512 tokens, behind a cached prefix, preempted, swapped, and with drafts. Prompts have up to
  150 tokens, and windows 16.
- Drawn tokens and their log-probabilities in bfloat16 are the same in all of these ways.

Further ways: *ranks* and *stages*, two of either, with the bits of one process; rotary embeddings of other types, by
the tokens of `generate()`, where a prompt exceeds the original length; *adapters*, by the tokens of PEFT for LoRA on
all linear layers; a *pair* of a prefill and a decode node, and the end of the decode node in the middle of an answer,
by the tokens of one node; and *GGUF* files, which are converted.

deepseek_v32 and glm_moe_dsa select the keys to which a token attends; they are served on CPUs alone.

"""


def results(report: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Ways by type of the tests that have passed, and what has failed, from pytest's JUnit file."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    unclaimed: defaultdict[str, set[str]] = defaultdict(set)
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314 pytest wrote it
        name, _, parameters = case.attrib["name"].partition("[")
        of = WAYS.get(f"{case.attrib['classname'].rpartition('.')[2]}::{name}")
        if of is None:
            continue
        row, way, skipped = parameters.removesuffix("]"), of, case.find("skipped")
        if way == "{}":
            row, _, way = row.rpartition("-")
        of_type = row.partition("+")[0]
        if any(case.find(kind) is not None for kind in ("failure", "error")):
            failed.append(case.attrib["name"])
            unclaimed[of_type].add(way)
        elif skipped is None and way not in found[of_type]:
            found[of_type].append(way)
        elif skipped is not None and skipped.attrib["message"].startswith("it is refused"):
            unclaimed[of_type].add(way)
    # A way counts only if all models of a type go it.
    return {name: sorted({*ways} - unclaimed[name]) for name, ways in found.items()}, failed


def test() -> int:
    """Run the tests and write the register."""
    files = sorted({f"tests/oracle/{name.partition('::')[0]}.py" for name in WAYS})
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}", *files]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "BATON_TYPES": "all"}, check=False)
        if done.returncode not in (0, 1):
            print(f"the register stays as it was: pytest exits with {done.returncode}", file=sys.stderr)
            return 1
        found, failed = results(report)
    kinds = {"tokens", "text part", "images", "encoder", "vectors"}
    types = {name: ways for name, ways in sorted(found.items()) if kinds & {*ways}}
    register = {"transformers": version("transformers"), "types": types}
    lines = json.dumps(register, indent=1).replace("\n   ", " ").replace("\n  ]", "]")
    REGISTER.write_text(f"{lines}\n", encoding="utf-8")
    for name in failed:
        print(f"not claimed, since it failed: {name}", file=sys.stderr)
    return min(len(failed), 1)


def of_kind(way: str) -> list[str]:
    return [name for name, ways in registered_types().items() if way in ways]


def listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def wrapped(text: str, bullet: str = "") -> str:
    """Text in lines of the documents' width."""
    return fill(bullet + text, 120, subsequent_indent=" " * len(bullet), break_long_words=False, break_on_hyphens=False)


def table() -> str:
    """One row for each decoder."""
    gguf = {architecture.model_type for architecture in ARCHITECTURES.values()}
    lines = [f"| type | {' | '.join(COLUMNS.values())} | rotary embeddings | GGUF |", "|---" * (len(COLUMNS) + 3) + "|"]
    for name in of_kind("tokens"):
        ways = registered_types()[name]
        ropes = [rope for rope in ROPE_TYPES if rope in ways]
        shown = "all" if len(ropes) == len(ROPE_TYPES) else ", ".join(ropes) or "-"
        marks = ["yes" if way in ways else "-" for way in COLUMNS]
        lines.append(f"| {name} | {' | '.join(marks)} | {shown} | {'yes' if name in gguf else '-'} |")
    return "\n".join(lines)


def main() -> int:
    failed = test() if "--test" in sys.argv else 0
    transformers = json.loads(REGISTER.read_text(encoding="utf-8"))["transformers"]
    kinds = (
        "with images or speech, of which the text alone is served "
        f"([which parts](weights.md#models-with-other-parts-than-text)): {listed(of_kind('text part'))};",
        f"with images: {listed(of_kind('images'))};",
        f"with an encoder and a decoder: {listed(of_kind('encoder'))};",
        f"encoders that give vectors: {listed(of_kind('vectors'))}.",
    )
    lines = "\n".join(wrapped(kind, "- ") for kind in kinds)
    others = f"\n\nOther kinds, with tests of their own against transformers:\n\n{lines}\n"
    only_compare = "--check" in sys.argv
    failed |= keep(PAGE, HEAD.format(transformers=transformers) + table() + others, only_compare=only_compare)
    text = (
        f"Of these types it gives exactly the tokens of transformers' `generate()` (tested in float32): "
        f"{listed(of_kind('tokens'))}; with images {listed(of_kind('images'))}; with an encoder "
        f"{listed(of_kind('encoder'))}; and for text alone {listed(of_kind('text part'))} "
        "([how each was verified](docs/models.md))."
    )
    readme = ROOT / "README.md"
    page = readme.read_text(encoding="utf-8")
    failed |= keep(readme, rendered(page, "models", {"types": f"{wrapped(text)}\n"}), only_compare=only_compare)
    return failed


if __name__ == "__main__":
    sys.exit(main())
