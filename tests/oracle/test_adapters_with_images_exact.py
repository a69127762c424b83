"""Tokens behind images equal those of PEFT with adapters, too: alone, beside others, cached, preempted, swapped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.engine.request import Request
from baton.errors import AdapterRefused
from baton.messages.request_spec import RequestSpec
from baton.model_formats.adapters import open_adapter
from baton.runner.images import ImageProcessor
from baton.runner.loading import load_runner
from baton.runner.spec import TorchSpec
from tests.oracle.test_image_exact import GREEDY, Prompt, engine_of, generate_from_images, prompt_of
from tests.oracle.test_token_exact import run_all
from tests.support.image_models import write_image_model
from tests.support.peft_adapters import load_with_adapter, write_peft_adapter

KIND = "AutoModelForImageTextToText"
TEXT = r".*(text_model|language_model).*"


def write(base: Path, directory: Path, seed: int, targets: str) -> None:
    """Write an adapter for the whole model, as PEFT names its modules."""
    patterns = {"layers.1.mlp.down_proj": 2}
    settings = {"r": 4, "lora_alpha": 8, "target_modules": targets, "rank_pattern": patterns}
    write_peft_adapter(base, directory, seed, KIND, **settings)


def generate(base: Path, adapter: Path | None, prompts: Mapping[str, Prompt]) -> dict[str, list[int]]:
    model, processor = load_with_adapter(base, adapter, KIND), ImageProcessor(base)
    return {name: list(generate_from_images(model, processor, prompt)) for name, prompt in prompts.items()}


@pytest.mark.parametrize("name", ["idefics3", "qwen2_vl"])
def test_tokens_behind_images_are_those_of_peft(tmp_path: Path, name: str) -> None:
    base, (first, second) = tmp_path / "base", (tmp_path / "first", tmp_path / "second")
    base.mkdir()
    write_image_model(base, name)
    write(base, first, 1, rf"{TEXT}\.(q_proj|v_proj|down_proj)|lm_head")
    write(base, second, 2, rf"{TEXT}\.(embed_tokens|k_proj|gate_proj|up_proj)")
    prompts = {f"p{seed}": prompt_of(base, seed, num_images) for seed, num_images in enumerate((1, 2, 0, 3))}
    blocks = max(len(prompt.token_ids) for prompt in prompts.values()) // 16 + 6
    runner = load_runner(TorchSpec(base, dtype="float32", num_blocks=blocks, host_cache_bytes=1 << 20))
    digests = {"": None} | {open_adapter(each).digest(): each for each in (first, second)}
    expected: dict[str, list[int]] = {}
    requests: list[tuple[str, Prompt, str]] = []
    for digest, adapter in digests.items():
        if adapter is not None:
            runner.adapters.load(adapter, digest)
        expected |= {f"{key}-{digest}": tokens for key, tokens in generate(base, adapter, prompts).items()}
        requests += [(f"{key}-{digest}", prompt, digest) for key, prompt in prompts.items()]
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)

    def made(suffix: str) -> list[Request]:
        return [
            Request(
                key + suffix,
                RequestSpec(list(each.token_ids), GREEDY, spans=each.spans, contents=each.images, adapter=digest),
            )
            for key, each, digest in requests
        ]

    for one in made(""):
        assert run_all(engine_of(runner), [one]) == {one.request_id: expected[one.request_id]}
    for mode in ("recompute", "swap"):
        engine = engine_of(runner, preemption_mode=mode, num_host_blocks=runner.num_host_blocks, watermark=0.0)
        for turn in ("", "-again"):
            found = run_all(engine, made(turn))
            assert {key.removesuffix("-again"): tokens for key, tokens in found.items()} == expected
        assert engine.scheduler.make_stats().num_preemptions_by_mode[mode] > 0


def test_what_changes_the_images_is_refused(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    write_image_model(base, "idefics3")
    write(base, adapter, 1, r".*vision_model.*\.q_proj")
    runner = load_runner(TorchSpec(base, dtype="float32", num_blocks=8))
    with pytest.raises(AdapterRefused, match=r"changes model\.vision_model.*, which is no product of this model"):
        runner.adapters.load(adapter, open_adapter(adapter).digest())
