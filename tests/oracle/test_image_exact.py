"""Greedy tokens behind images equal transformers' own `generate()` in float32, and bits don't depend on mates.

Alone, batched with other images and text, cut within an image, cached, preempted, swapped, with n > 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.spans import EncoderContent, Span
from baton.model_formats.images import image_family
from baton.runner.images import ImageProcessor
from baton.runner.loading import load_runner
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_token_exact import NEW_TOKENS, run_all
from tests.support.image_models import IMAGE_MODELS, IMAGE_TOKEN_ID, random_image, write_image_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
SIZES = ((40, 40), (100, 60), (24, 73), (90, 20))


@dataclass(frozen=True)
class Prompt:
    """A prompt with images, as both sides get it."""

    token_ids: Sequence[int]
    spans: Sequence[Span]
    images: Sequence[EncoderContent]

    def request(self, name: str, params: SamplingParams = GREEDY) -> Request:
        return Request(name, RequestSpec(list(self.token_ids), params, spans=self.spans, contents=self.images))


def prompt_of(directory: Path, seed: int, num_images: int) -> Prompt:
    """Text, and between it images, whose parts are divided by other tokens as in the family's prompts."""
    family, rng = image_family(directory), Random(seed)
    assert family is not None
    token_ids = [rng.randrange(240) for _ in range(rng.randint(0, 20))]
    spans: list[Span] = []
    images: list[EncoderContent] = []
    for number in range(num_images):
        width, height = rng.choice(SIZES)
        image = EncoderContent.of(random_image(100 * seed + number, width, height))
        layout = family.layout(width, height)
        part = 4 if layout.grid is None else layout.num_rows
        for first_row in range(0, layout.num_rows, part):
            token_ids.append(252)
            columns = 0 if layout.grid is None else layout.grid[1]
            spans.append(
                Span(len(token_ids), part, image.digest, is_encoded=True, first_row=first_row, columns=columns)
            )
            token_ids += [IMAGE_TOKEN_ID] * part
        token_ids += [253, *(rng.randrange(240) for _ in range(rng.randint(1, 20)))]
        images.append(image)
    return Prompt(token_ids, spans, images)


def engine_of(runner: TorchModelRunner, **limits: Any) -> EngineCore:
    config = SchedulerConfig(
        **{
            "num_blocks": runner.memory.num_blocks,
            "block_size": runner.layout.block_size,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 8,
            "max_model_len": runner.model.max_model_len,
            "num_encoder_rows": 256,
            **limits,
        }
    )
    return EngineCore(Scheduler(config, CacheKeyFields(runner.model.fingerprint, "", "test"), FakeClock()), runner)


def cramped_engine_of(runner: TorchModelRunner, mode: str) -> EngineCore:
    """An engine that preempts as soon as blocks run out.

    With a prefix cache the blocks of a preempted request may still be there, and nothing is copied back.
    """
    return engine_of(
        runner,
        preemption_mode=mode,
        num_host_blocks=runner.num_host_blocks,
        watermark=0.0,
        enable_prefix_caching=False,
    )


@pytest.fixture(scope="module", params=IMAGE_MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    write_image_model(made, request.param)
    return made


@pytest.fixture(scope="module")
def prompts(directory: Path) -> Mapping[str, Prompt]:
    return {f"p{seed}": prompt_of(directory, seed, num_images) for seed, num_images in enumerate((1, 2, 0, 3, 1))}


@pytest.fixture(scope="module")
def expected(directory: Path, prompts: Mapping[str, Prompt]) -> Mapping[str, Sequence[int]]:
    """What transformers generates."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()
    processor = ImageProcessor(directory)
    return {name: generate_from_images(model, processor, prompt) for name, prompt in prompts.items()}


def generate_from_images(model: Any, processor: ImageProcessor, prompt: Prompt) -> Sequence[int]:
    """The greedy tokens of a model of transformers for one prompt."""
    ids = torch.tensor([prompt.token_ids])
    given: dict[str, torch.Tensor] = {}
    if prompt.images:
        made = [processor.pixels(image.data) for image in prompt.images]
        for name in made[0]:
            # Tiles of one request are in the second dimension, patches and grids in the first.
            axis = 1 if "image_grid_thw" not in made[0] else 0
            given[name] = torch.cat([torch.from_numpy(each[name]) for each in made], dim=axis)
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = (ids == IMAGE_TOKEN_ID).int()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **given,
    )
    tokens: list[int] = out[0, len(prompt.token_ids) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def runner(directory: Path) -> TorchModelRunner:
    return load_runner(TorchSpec(directory, dtype="float32", num_blocks=64))


def test_tokens_behind_images_are_those_of_generate(
    runner: TorchModelRunner, prompts: Mapping[str, Prompt], expected: Mapping[str, Sequence[int]]
) -> None:
    assert len({token for tokens in expected.values() for token in tokens}) > 15
    engine = engine_of(runner)
    for name, prompt in prompts.items():
        assert run_all(engine, [prompt.request(name)]) == {name: expected[name]}
    together = engine_of(runner)
    assert run_all(together, [prompt.request(name) for name, prompt in prompts.items()]) == expected
    again = run_all(together, [prompt.request(f"{name}-again") for name, prompt in prompts.items()])
    assert {name.removesuffix("-again"): tokens for name, tokens in again.items()} == expected
    assert together.scheduler.make_stats().prefix_cache.num_hit_tokens["device"] > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_go_on_with_the_same_tokens(
    directory: Path, prompts: Mapping[str, Prompt], expected: Mapping[str, Sequence[int]], mode: str
) -> None:
    blocks = max(len(prompt.token_ids) for prompt in prompts.values()) // 16 + 4
    cramped = load_runner(TorchSpec(directory, dtype="float32", num_blocks=blocks, host_cache_bytes=1 << 20))
    engine = cramped_engine_of(cramped, mode)
    assert run_all(engine, [prompt.request(name) for name, prompt in prompts.items()]) == expected
    assert engine.scheduler.make_stats().num_preemptions_by_mode[mode] > 0


def test_several_sequences_of_a_prompt_with_images(
    runner: TorchModelRunner, prompts: Mapping[str, Prompt], expected: Mapping[str, Sequence[int]]
) -> None:
    engine = engine_of(runner)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, n=2)
    engine.scheduler.add_request(prompts["p1"].request("p1", greedy))
    tokens: dict[int, list[int]] = {}
    while engine.has_work():
        for outputs in engine.step().values():
            for output in outputs:
                tokens.setdefault(output.sequence_index, []).extend(output.new_token_ids)
    assert list(tokens.values()) == [expected["p1"]] * 2


def test_bits_in_bfloat16_depend_on_the_request_alone(directory: Path, prompts: Mapping[str, Prompt]) -> None:
    """Whatever is beside it, however it is cut, and in however many processes the text part is computed."""
    drawn = SamplingParams(temperature=0.7, seed=7, max_tokens=NEW_TOKENS, logprobs=2)
    alone = load_runner(TorchSpec(directory, dtype="bfloat16", num_blocks=64))
    expected = {name: _outputs(engine_of(alone), [prompt.request(name, drawn)]) for name, prompt in prompts.items()}
    divided = load_runner(
        TorchSpec(directory, dtype="bfloat16", num_blocks=64, tensor_parallel=2, pipeline_parallel=2),
        start_ranks=FakeRankGroup,
        start_stages=FakeStages.start,
    )
    for runner, budget in ((alone, 24), (alone, 200), (divided, 40)):
        engine = engine_of(runner, max_num_batched_tokens=budget, enable_prefix_caching=False)
        together = _outputs(engine, [prompt.request(name, drawn) for name, prompt in prompts.items()])
        for name in prompts:
            assert {name: together[name]} == expected[name]
    divided.close()


def _outputs(engine: EngineCore, requests: Sequence[Request]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.scheduler.add_request(request)
    while engine.has_work():
        for outputs in engine.step().values():
            for output in outputs:
                found[output.attempt.request_id] += [*output.new_token_ids, *output.new_logprobs]
    return found
