"""What a model directory says of pooling, and which directories are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.cli.cluster.supervisor.preflight import check_architecture, without_decode_nodes
from baton.config import UpConfig, load
from baton.errors import ConfigError
from baton.messages.node_model import Capability
from baton.messages.pooling import ModelPooling, Pooling
from baton.runner.model.pooling_files import is_encoder_directory, pooling_fields, read_pooling

BERT = {"model_type": "bert", "architectures": ["BertModel"], "max_position_embeddings": 512, "type_vocab_size": 2}
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 512}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def directory(path: Path, config: dict[str, Any], modules: Any = None, pooling: Any = None, **files: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_decoders_give_their_last_token_and_encoders_their_first(tmp_path: Path) -> None:
    assert read_pooling(directory(tmp_path, QWEN)) == ModelPooling()
    encoder = read_pooling(directory(tmp_path, BERT))
    assert encoder == ModelPooling(Pooling.CLS, is_encoder=True, generates=False, has_token_types=True, max_length=512)
    assert encoder.capabilities == {Capability.EMBED, Capability.SCORE}
    assert is_encoder_directory(tmp_path)
    assert not is_encoder_directory(tmp_path / "none")
    assert not read_pooling(directory(tmp_path, {**BERT, "is_decoder": True})).is_encoder


def test_positions_of_some_encoders_begin_behind_the_padding_token(tmp_path: Path) -> None:
    roberta = {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1}
    pooling = read_pooling(directory(tmp_path, {**BERT, **roberta}))
    assert (pooling.first_position, pooling.max_length, pooling.has_token_types) == (2, 512, False)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, Pooling.CLS),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
    ],
)
def test_sentence_transformers_say_how_to_pool(tmp_path: Path, said: dict[str, Any], kind: Pooling) -> None:
    pooling = read_pooling(directory(tmp_path, BERT, MODULES, said, sentence_bert_config={"max_seq_length": 256}))
    assert (pooling.default, pooling.normalizes, pooling.max_length) == (kind, True, 256)
    assert len(pooling_fields(tmp_path)) == 3, "they are part of the model's fingerprint"
    (tmp_path / "modules.json").write_text(json.dumps(MODULES[:2]))
    assert not read_pooling(tmp_path).normalizes


def test_the_file_that_says_how_to_pool_is_part_of_the_fingerprint_wherever_it_is(tmp_path: Path) -> None:
    found = []
    for mode in ("mean", "cls"):
        path = tmp_path / mode
        (path / "pool").mkdir(parents=True)
        (path / "pool" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
        directory(path, BERT, [MODULES[0], {**MODULES[1], "path": "pool"}])
        found.append(pooling_fields(path))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("modules", "said", "why"),
    [
        (5, {}, "not a list of modules"),
        ([*MODULES, {"type": "sentence_transformers.models.Dense"}], {}, "a module 'Dense'"),
        ([MODULES[0], {**MODULES[1], "path": "../1_Pooling"}], {}, "not below its directory"),
        ([MODULES[0], {**MODULES[1], "path": "/etc"}], {}, "not below its directory"),
        (MODULES, {"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"),
        (MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pools by"),
        (MODULES, [], "not a JSON object"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, modules: Any, said: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_pooling(directory(tmp_path, BERT, modules, said))


def test_labels_and_what_makes_probabilities_of_their_outputs(tmp_path: Path) -> None:
    config = {**QWEN, "architectures": ["Qwen2ForSequenceClassification"]}
    two = read_pooling(directory(tmp_path, {**config, "id2label": {"0": "no", "1": "yes"}}))
    assert (two.labels, two.activation, two.generates) == (("no", "yes"), "softmax", False)
    assert two.capabilities == {Capability.EMBED, Capability.CLASSIFY}
    assert read_pooling(directory(tmp_path, config)).labels == ("LABEL_0", "LABEL_1")
    one = read_pooling(directory(tmp_path, {**config, "num_labels": 1}))
    assert (one.activation, Capability.SCORE in one.capabilities) == ("sigmoid", True)
    for named, activation in (
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid", "problem_type": "regression"}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.Softmax", "num_labels": 1}, "softmax"),
    ):
        assert read_pooling(directory(tmp_path, {**config, **named})).activation == activation
    with pytest.raises(ConfigError, match=r"names the activation 'torch\.nn\.Tanh', which is not supported"):
        read_pooling(directory(tmp_path, {**config, "sbert_ce_default_activation_function": "torch.nn.Tanh"}))
    wrongs: list[dict[str, Any]] = [{"num_labels": 0}, {"num_labels": 1 << 30}, {"id2label": {"0": "x" * 300}}]
    for wrong in (*wrongs, {"id2label": {}}):
        with pytest.raises(ConfigError, match="label"):
            read_pooling(directory(tmp_path, {**config, **wrong}))


def test_lengths_of_matryoshka_models(tmp_path: Path) -> None:
    named = read_pooling(directory(tmp_path, {**QWEN, "matryoshka_dimensions": [64, 128]}))
    assert [named.why_not_cut(size, 256) for size in (64, 128, 256)] == ["", "", ""]
    assert named.why_not_cut(65, 256) == "must be one of 64, 128"
    free = read_pooling(directory(tmp_path, {**QWEN, "is_matryoshka": True}))
    assert (free.why_not_cut(1, 256), free.why_not_cut(257, 256)) == ("", "must be 1 to 256")
    for wrong in ("64", [0], [True], list(range(1, 2000))):
        with pytest.raises(ConfigError, match="matryoshka_dimensions"):
            read_pooling(directory(tmp_path, {**QWEN, "matryoshka_dimensions": wrong}))


def test_a_cluster_of_a_model_that_generates_nothing_has_no_decode_nodes(tmp_path: Path) -> None:
    check_architecture(tmp_path, BERT)
    for config, nodes in ((BERT, (3, 0)), (QWEN, (1, 2))):
        given = {"model": str(directory(tmp_path, config)), "prefill": 1, "decode": 2}
        found = without_decode_nodes(load(UpConfig, given, {}).config)
        assert (found.prefill, found.decode) == nodes
    with pytest.raises(ConfigError, match="or an encoder"):
        check_architecture(tmp_path, {"model_type": "pegasus", "architectures": ["PegasusModel"]})
