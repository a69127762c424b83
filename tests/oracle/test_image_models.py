"""The parts of models that take images compute what transformers computes: text, rows of images, rotary positions."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from baton.cli.cluster.supervisor.preflight import check_architecture
from baton.engine.request import Request
from baton.errors import ConfigError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.model_formats.images import UnusableImage
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.execution.request_table import Grid, GridPositions
from baton.runner.images import ImageEncoder, ImageProcessor
from baton.runner.loading import load_runner
from baton.runner.model import attention
from baton.runner.model.fused.rotation import Rotation
from baton.runner.model.loop.angles import AngleKind, RotaryTable
from baton.runner.model.mixtures import experts
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import DTYPES, load_model
from baton.runner.spec import CacheSpec, TorchSpec, WeightSpec
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_stages import FakeStages
from tests.oracle.test_token_exact import NEW_TOKENS, generate_with, make_engine, make_prompts, run_all
from tests.support.image_models import IMAGE_MODELS, IMAGE_TOKEN_ID, random_image, write_image_model

TOLERANCE = 1e-5
"""Of the largest number of an encoder's rows, in float32."""


@pytest.fixture(scope="module", params=IMAGE_MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    write_image_model(made, request.param)
    attention.register()
    experts.register()
    return made


@pytest.fixture(scope="module")
def expected_model(directory: Path) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
    ).eval()


def test_text_alone_has_the_tokens_of_generate(directory: Path, expected_model: Any) -> None:
    runner = load_runner(TorchSpec(directory, dtype="float32", num_blocks=64))
    assert runner.model.bit_exact
    assert {path.part: path.why_not_faster for path in runner.model.compute_paths}["step"] == ""
    prompts = make_prompts(IMAGE_TOKEN_ID)
    expected = generate_with(expected_model, prompts)
    assert len({token for tokens in expected.values() for token in tokens}) > 20
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    assert (
        run_all(make_engine(runner), [Request(key, RequestSpec(prompt, greedy)) for key, prompt in prompts.items()])
        == expected
    )


def test_ranks_and_stages_of_the_text_part_have_the_same_tokens(directory: Path) -> None:
    prompts = make_prompts(IMAGE_TOKEN_ID)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    tokens = []
    for ranks in (1, 2):
        with closing(
            load_runner(
                TorchSpec(directory, dtype="bfloat16", num_blocks=64, tensor_parallel=ranks, pipeline_parallel=ranks),
                start_ranks=FakeRankGroup,
                start_stages=FakeStages.start,
            )
        ) as runner:
            requests = [Request(key, RequestSpec(prompt, greedy)) for key, prompt in prompts.items()]
            tokens.append(run_all(make_engine(runner), requests))
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("text_config", {"num_key_value_heads": 0}),
        ("vision_config", {"patch_size": -8}),
        ("text_config", {"head_dim": []}),
    ],
)
def test_wrong_numbers_of_a_part_are_refused_by_name(tmp_path: Path, part: str, number: dict[str, Any]) -> None:
    write_image_model(tmp_path, "idefics3")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config[part] |= number
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=next(iter(number))):
        load_model(tmp_path, WeightSpec("float32"))


def test_an_encoder_makes_the_rows_that_transformers_makes(directory: Path, expected_model: Any) -> None:
    """And as many as the image's layout says; their bits don't depend on the number of threads."""
    processor = ImageProcessor(directory)
    encoder = ImageEncoder(load_model(directory, WeightSpec("float32")), choose_operations(1))
    with_threads = ImageEncoder(load_model(directory, WeightSpec("float32")), choose_operations(2))
    for seed, size in enumerate([(40, 40), (153, 42), (24, 73), (8, 9), (200, 31)]):
        image = processor.pixels(random_image(seed, *size))
        rows = encoder.encode(image)
        with torch.inference_mode():
            given = {name: torch.from_numpy(array) for name, array in image.items()}
            features = expected_model.get_image_features(**given, return_dict=True).pooler_output
        expected = torch.cat(list(features)).numpy()
        assert rows.shape == expected.shape == (processor.family.layout(*size).num_rows, 64)
        assert np.abs(rows - expected).max() <= TOLERANCE * np.abs(expected).max()
        torch.set_num_threads(2)
        try:
            assert np.array_equal(with_threads.encode(image), rows)
        finally:
            torch.set_num_threads(1)


def test_a_layout_has_the_rows_of_the_processor_for_every_size(directory: Path) -> None:
    processor, rng = ImageProcessor(directory), Random(7)
    family = processor.family
    for seed in range(60):
        width, height = (rng.choice([rng.randint(1, 40), rng.randint(1, 300)]) for _ in range(2))
        try:
            layout = family.layout(width, height)
        except UnusableImage:
            assert max(width, height) > 200 * min(width, height)
            continue
        image = processor.pixels(random_image(seed, width, height))
        if "image_grid_thw" in image:
            (_, rows, columns), merge = image["image_grid_thw"][0].tolist(), 2
            assert layout.grid == (rows // merge, columns // merge)
        else:
            assert layout.num_rows == image["pixel_values"].shape[1] * 4
        assert layout.text.count(family.image_token) == layout.num_rows


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_the_text_of_an_image_is_that_of_the_processor(name: str, tmp_path: Path) -> None:
    """Qwen's is the image token alone, so often as there are rows."""
    from transformers import AutoImageProcessor, Idefics3Processor, PreTrainedTokenizerFast

    write_image_model(tmp_path, name)
    family = ImageProcessor(tmp_path).family
    images: Any = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs = Idefics3Processor(images, tokenizer, image_seq_len=4)
    for width, height in ((90, 60), (20, 20), (64, 200)):
        made = images([np.zeros((height, width, 3), dtype=np.uint8)], return_row_col_info=True)
        assert family.layout(width, height).text == theirs.replace_image_token(made, 0)


@pytest.fixture(params=[name for name in IMAGE_MODELS if name.startswith("qwen")])
def grid_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose positions have three dimensions."""
    write_image_model(tmp_path, request.param)
    attention.register()
    experts.register()
    return tmp_path


GRIDS = (Grid(3, 4, 2), Grid(12, 2, 4), Grid(25, 1, 1))


def test_positions_in_a_grid_are_those_of_transformers(grid_directory: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(grid_directory, local_files_only=True).model
    types = torch.zeros(1, 40, dtype=torch.int64)
    for grid in GRIDS:
        types[0, grid.start : grid.stop] = 1
    sizes = torch.tensor([[1, 2 * grid.rows, 2 * grid.columns] for grid in GRIDS])
    expected = model.get_rope_index(torch.zeros_like(types), types, image_grid_thw=sizes)[0][:, 0].numpy()
    positions = GridPositions(GRIDS)
    for start, stop in ((0, 40), (0, 5), (4, 13), (19, 26), (30, 40), (26, 27), (3, 3)):
        assert np.array_equal(positions.rows(start, stop), expected[:, start:stop])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotary_rows_of_three_dimensions_are_those_of_the_model(grid_directory: Path, dtype: str) -> None:
    loaded = load_model(grid_directory, WeightSpec(dtype))
    rotary, like = loaded.module.get_submodule("model.rotary_emb"), torch.empty(1, dtype=DTYPES[dtype])
    positions = GridPositions(GRIDS).rows(0, 40)
    expected = [angles[0] for angles in rotary(like, torch.from_numpy(positions)[:, None])]
    rows = RotaryTable(AngleKind(rotary, {}, Rotation("halves", "halves")), like, loaded.max_model_len).rows(positions)
    assert all(torch.equal(*pair) for pair in zip(rows, expected, strict=True))
    # The loops were compared with positions of three dimensions, too.
    assert Transformer(loaded, choose_operations(1), 16, CacheSpec(num_blocks=16), 1).has_own_loop


def test_a_cluster_of_an_image_model_can_start_if_it_has_an_image_processor(tmp_path: Path) -> None:
    write_image_model(tmp_path, "smolvlm")
    config = json.loads((tmp_path / "config.json").read_text())
    check_architecture(tmp_path, config)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="processor_config"):
        check_architecture(tmp_path, config)
