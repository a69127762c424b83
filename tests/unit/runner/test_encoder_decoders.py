"""Models with an encoder and a decoder: what their files may say, and inputs and requests that can't be computed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM

from baton.config import NodeConfig
from baton.engine.batch import EngineCoreOutput
from baton.engine.core import EngineCore
from baton.engine.request import Request
from baton.errors import AdapterRefused, ConfigError, InvalidRequest
from baton.messages.node import Outcome
from baton.messages.node_model import Capability
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.spans import ContentKind, EncoderContent, Span, source_spans
from baton.model_formats.encoder_decoders import EncoderDecoder, aligned, read_encoder_decoder
from baton.node.runner_spec import scheduler_config
from baton.runner import load
from baton.runner.encoder_decoder.alignment import alignment_heads
from baton.runner.encoder_decoder.attention import distance_bias_of
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.oracle.test_image_exact import engine_of
from tests.support.encoder_decoder_models import request_for, source, write_encoder_decoder

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def read(**config: Any) -> EncoderDecoder | None:
    return read_encoder_decoder(Path("model"), config)


def test_configurations_say_what_goes_in_and_how_the_decoder_begins() -> None:
    assert read(model_type="llama") is None
    assert read(model_type="bart", is_encoder_decoder=False) is None
    assert read(model_type="bart") == EncoderDecoder("text", 1024, 1024, (2,))
    assert read(model_type="bart", max_position_embeddings=99, decoder_start_token_id=5, forced_bos_token_id=0) == (
        EncoderDecoder("text", 99, 99, (5, 0))
    )
    # Which bart's table of positions does not have.
    assert read(model_type="bart", n_positions=4000) == EncoderDecoder("text", 1024, 1024, (2,))
    assert read(model_type=["bart"]) is None
    assert read(model_type="t5", n_positions=64) == EncoderDecoder("text", 64, 64, (0,))
    whisper = read(model_type="whisper", max_source_positions=1500, max_target_positions=448)
    assert whisper == EncoderDecoder("speech", 1500, 448, (50257,))
    assert whisper.max_model_len == 1536 + 448


def test_the_decoder_begins_as_generation_config_json_says(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    config = {"model_type": "bart", "decoder_start_token_id": 5}
    for generation, start in (
        ({"forced_bos_token_id": 0}, (5, 0)),
        ({"decoder_start_token_id": 7, "forced_bos_token_id": None}, (7,)),
        ([], (5,)),
    ):
        path.write_text(json.dumps(generation))
        found = read_encoder_decoder(tmp_path, config)
        assert found is not None
        assert found.start == start
    path.write_text(json.dumps({"forced_bos_token_id": "en"}))
    with pytest.raises(ConfigError, match="begins its decoder with 'en'"):
        read_encoder_decoder(tmp_path, config)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"generation_config.json can't be read"):
        read_encoder_decoder(tmp_path, config)


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 0},
        {"max_position_embeddings": "many"},
        {"max_position_embeddings": 1 << 40},
        {"max_position_embeddings": True},
        {"decoder_start_token_id": -1},
        {"decoder_start_token_id": "start"},
        {"forced_bos_token_id": 1.5},
        {"max_position_embeddings": 7},
        {"decoder_start_token_id": 99, "vocab_size": 99},
    ],
)
def test_wrong_numbers_are_refused(config: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="copy it again"):
        read(model_type="bart", **config)


def test_spans_end_where_a_block_begins() -> None:
    assert [aligned(rows) for rows in (1, 64, 65, 1500)] == [64, 64, 128, 1536]
    assert source_spans("d", 64) == (Span(0, 64, "d", is_encoded=True),)
    rows, rest = source_spans("d", 50)
    assert (rows.length, rest.start, rest.stop, rest.first_row) == (50, 50, 64, 50)


def loaded(directory: Path, name: str, **settings: Any) -> TorchModelRunner:
    write_encoder_decoder(directory, name)
    runner = load(TorchSpec(directory, **{"dtype": "float32", "num_blocks": 64, **settings}))
    assert isinstance(runner, TorchModelRunner)
    return runner


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"block_size": 48}, "--block-size"),
        ({"tensor_parallel": 2}, "--tp"),
        ({"quantization": "int8"}, "--quantization"),
        ({"cache_dtype": "int8"}, "--kv-cache-dtype"),
    ],
)
def test_settings_that_do_not_go_with_an_encoder_are_refused(
    tmp_path: Path, settings: Mapping[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        loaded(tmp_path, "bart", **settings)


@pytest.mark.parametrize("longest", [1, 4])
def test_buckets_that_reach_beyond_the_longest_distance_are_refused(tmp_path: Path, longest: int) -> None:
    write_encoder_decoder(tmp_path, "t5")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"relative_attention_max_distance": longest}))
    with pytest.raises(ConfigError, match=f"relative_attention_max_distance is {longest} "):
        load(TorchSpec(tmp_path, dtype="float32", num_blocks=64))


def test_a_bias_has_no_more_distances_than_the_decoder_has_tokens(tmp_path: Path) -> None:
    write_encoder_decoder(tmp_path, "t5")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"relative_attention_max_distance": 1 << 27}))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    bias = distance_bias_of(model.get_decoder(), 160)
    assert bias is not None
    assert bias.shape == (4, 161)


def test_speech_needs_more_positions_than_it_takes(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "whisper")
    fields = {"role": "prefill", "node_id": "a", "registry": "http://127.0.0.1:1", "model": tmp_path}
    config = NodeConfig.model_validate(fields | {"max_model_len": 64})
    with pytest.raises(ConfigError, match="speech alone takes 64 positions: give it up to 124"):
        scheduler_config(config, runner)
    assert scheduler_config(config.model_copy(update={"max_model_len": 65}), runner).num_encoder_rows >= 64


def test_speech_needs_a_configuration_of_its_features(tmp_path: Path) -> None:
    loaded(tmp_path, "whisper")
    path = tmp_path / "preprocessor_config.json"
    sound = json.loads(path.read_text())
    year = 365 * 24 * 3600
    for name, wrong in (
        ("feature_size", {"feature_size": 80}),
        ("sampling_rate", {"sampling_rate": 8000}),
        ("hop_length", {"hop_length": 0}),
        ("hop_length", {"hop_length": 160.0}),
        ("chunk_length", {"chunk_length": 2}),
        ("hop_length", {"chunk_length": year, "hop_length": 160 * year}),
        ("n_fft", {"n_fft": 1 << 40}),
        ("n_fft", {"n_fft": "400"}),
    ):
        path.write_text(json.dumps(sound | wrong))
        with pytest.raises(ConfigError, match=f"features of speech in .* can.t be made .{name} is "):
            load(TorchSpec(tmp_path, dtype="float32", num_blocks=64))
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"features of speech in .* can.t be made"):
        load(TorchSpec(tmp_path, dtype="float32", num_blocks=64))


def test_heads_that_align_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert alignment_heads(tmp_path, 3, 4) == {}
    for found, expected in ((None, {}), ([[2, 1], [0, 3], [2, 0]], {2: [1, 0], 0: [3]})):
        path.write_text(json.dumps({"alignment_heads": found}))
        assert alignment_heads(tmp_path, 3, 4) == expected
    for wrong in ([], "all", [[3, 0]], [[0, 4]], [[0]], [[True, 0]], [[0, 0]] * 65):
        path.write_text(json.dumps({"alignment_heads": wrong}))
        with pytest.raises(ConfigError, match="alignment_heads must be"):
            alignment_heads(tmp_path, 3, 4)


def test_texts_that_can_not_be_encoded_are_refused(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "bart")
    assert (runner.model.capabilities, runner.model.most_source_rows) == ({Capability.GENERATE}, 192)
    for tokens, num_rows, reason in (
        ([], 64, "1 to 160 tokens"),
        ([5] * 161, 192, "1 to 160 tokens"),
        ([256], 64, "outside of"),
        ([1 << 31], 64, "outside of"),
        ([5], 128, "has 1 rows"),
    ):
        data = b"".join(token.to_bytes(4, "little") for token in tokens)
        with pytest.raises(InvalidRequest, match=reason):
            runner.encoder.encode(EncoderContent.of(data, ContentKind.TEXT), num_rows)
    with pytest.raises(InvalidRequest, match="1 to 160 tokens"):
        runner.encoder.encode(EncoderContent.of(b"123", ContentKind.TEXT), 64)
    with pytest.raises(AdapterRefused, match="computes no adapters"):
        runner.adapters.check(tmp_path)


def test_speech_that_can_not_be_encoded_is_refused(tmp_path: Path) -> None:
    runner = loaded(tmp_path, "whisper")
    assert runner.model.capabilities == {Capability.TRANSCRIBE, Capability.ALIGN}
    assert runner.model.most_source_rows == 64
    for data, reason in (
        (b"", "no samples of 16 bits"),
        (b"123", "no samples of 16 bits"),
        (bytes(48_000), r"audio: has 1\.50 s, and the model takes 1 s at once"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            runner.encoder.encode(EncoderContent.of(data, ContentKind.SPEECH), 64)


def test_features_of_speech_have_no_noise(tmp_path: Path) -> None:
    write_encoder_decoder(tmp_path, "whisper")
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dither": 0.5}))
    runner = load(TorchSpec(tmp_path, dtype="float32", num_blocks=64))
    assert isinstance(runner, TorchModelRunner)
    content, found = EncoderContent.of(source(tmp_path, 1), ContentKind.SPEECH), []
    span, _ = source_spans(content.digest, 50)
    for _ in range(2):
        runner.encoder.encode(content, 64)
        found.append(runner.encoder.rows(span, 0, 50).copy())
    assert (found[0] == found[1]).all()


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_encoder_decoder(tmp_path, "bart")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.encoder.layers.0.fc1.weight"
    weights[name] = torch.full_like(weights[name], torch.nan)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    runner = load(TorchSpec(tmp_path, dtype="float32", num_blocks=64))
    with pytest.raises(InvalidRequest, match="not finite"):
        runner.encoder.encode(EncoderContent.of(source(tmp_path, 1, 5), ContentKind.TEXT), 64)


def ends_of(
    engine: EngineCore, requests: Sequence[Request]
) -> tuple[dict[str, list[int]], dict[str, EngineCoreOutput]]:
    """The tokens of each request, and how it ended."""
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    ends = {}
    for request in requests:
        engine.scheduler.add_request(request)
    while engine.has_work():
        for output in (one for outputs in engine.step().values() for one in outputs):
            tokens[output.attempt.request_id] += output.new_token_ids
            if output.outcome is not None:
                ends[output.attempt.request_id] = output
    return tokens, ends


def test_a_request_that_can_not_be_computed_fails_alone(tmp_path: Path) -> None:
    engine = engine_of(loaded(tmp_path, "bart"))
    text = source(tmp_path, 1, 9)
    alone, _ = ends_of(engine, [request_for(tmp_path, "alone", text, [3], GREEDY)])
    content = EncoderContent.of(text, ContentKind.TEXT)
    later = [Span(1, 63, content.digest, is_encoded=True)]
    bad = [
        request_for(tmp_path, "long", source(tmp_path, 2, 9), [5] * 161, GREEDY),
        Request("bare", RequestSpec([5] * 3, GREEDY)),
        Request("wrong", RequestSpec([5] + [0] * 63 + [3], GREEDY, spans=later, contents=[content])),
        request_for(tmp_path, "empty", text, [], GREEDY),
    ]
    tokens, ends = ends_of(engine, [*bad, request_for(tmp_path, "sound", text, [3], GREEDY)])
    assert ends["sound"].outcome is Outcome.LENGTH
    assert tokens["sound"] == alone["alone"]
    assert "beyond the decoder's 160 tokens" in str(ends["long"].error)
    assert "does not begin with an input" in str(ends["bare"].error)
    assert "does not begin with an input" in str(ends["wrong"].error)
    assert "no token for the decoder" in str(ends["empty"].error)


def test_the_kind_of_a_content_is_part_of_its_name() -> None:
    digests = {EncoderContent.of(b"1234", kind).digest for kind in ContentKind}
    assert len(digests) == len(ContentKind)
    speech = EncoderContent.of(b"1234", ContentKind.SPEECH)
    assert speech.without_data() == replace(speech, data=b"")
