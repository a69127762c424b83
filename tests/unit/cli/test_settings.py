"""A setting is written once: from it follow its flag, variable, key and documentation, and the way to its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from baton.cli.cluster.supervisor.plan import command_and_flags, flag_words, plan_nodes
from baton.cli.options import kinds
from baton.config import NodeConfig, RouterConfig, UpConfig
from baton.config.load import NOT_FROM_OUTSIDE, load, view
from baton.config.node import ClusterSettings, NodeSettings, RouterSettings
from baton.config.setting import flag_of, flag_text, flags_of, key_of, switches
from tests.support.given_flags import configured

MODELS: tuple[type[BaseModel], ...] = (UpConfig, NodeConfig, RouterConfig)
REQUIRED = {"role": "decode", "node_id": "n", "router_id": "r", "registry": "redis://r"}
PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
OTHER: dict[str, Any] = {
    "host": "::1",
    "device": "cuda:1",
    "model": Path("/models/m"),
    "preemption_mode": "auto",
    "max_num_batched_tokens": 1024,
    "watermark": 0.25,
    "advertise": "host:37",
}
"""Values for settings to which `another` finds none that all validators accept."""


def another(key: str, field: FieldInfo) -> Any:
    """A valid value that is not the default."""
    if key in OTHER:
        return OTHER[key]
    default = field.get_default(call_default_factory=True)
    if get_origin(field.annotation) is Literal:
        return next(value for value in get_args(field.annotation) if value != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, ByteSize):
        return ByteSize(default + (3 << 20))
    if isinstance(default, int | float):
        return default + 3
    found = kinds(field.annotation)
    return (
        Path("/given/path") if Path in found else 37 if int in found else "host:37" if key == "advertise" else "given"
    )


def settings(*groups: type[BaseModel]) -> list[str]:
    return [key for group in groups for key in group.model_fields]


@pytest.mark.parametrize("model", MODELS)
def test_each_setting_is_described_and_documented(model: type[BaseModel]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for key, field in model.model_fields.items():
        assert field.description, key
        if key not in NOT_FROM_OUTSIDE:
            flags = switches(key, field) if field.annotation is bool else (flag_of(key),)
            assert f"| {' '.join(f'`{flag}`' for flag in flags)} |" in page, key


@pytest.mark.parametrize("model", MODELS)
def test_each_setting_can_be_given_as_a_flag_a_variable_and_a_key(model: type[BaseModel], tmp_path: Path) -> None:
    required = {key: value for key, value in REQUIRED.items() if key in model.model_fields}
    tls = {key: Path(f"/tls/{key}") for key in ("tls_cert", "tls_key", "tls_ca") if key in model.model_fields}
    for key, field in model.model_fields.items():
        if key in NOT_FROM_OUTSIDE or key in REQUIRED:
            continue
        value = another(key, field)
        more = tls if key in tls else {}
        text = flag_text(value).lower() if isinstance(value, bool) else flag_text(value)
        given = {name: str(each) for name, each in {**required, **more}.items()} | {key: text}
        assert getattr(load(model, given, {}).config, key) == value, f"flag {key}"
        environ = {f"BATON_{name.upper()}": each for name, each in given.items()}
        assert getattr(load(model, {}, environ).config, key) == value, f"variable {key}"
        file = tmp_path / "baton.toml"
        file.write_text("".join(f'{name} = "{each}"\n' for name, each in given.items()))
        assert getattr(load(model, {}, {}, file).config, key) == value, f"key {key}"
        assert key in view(model, {})


@pytest.mark.parametrize("key", settings(ClusterSettings, NodeSettings, RouterSettings))
def test_a_setting_of_up_reaches_the_processes_that_have_it_and_no_other(key: str) -> None:
    value = another(key, UpConfig.model_fields[key])
    processes = 0
    for child in plan_nodes(UpConfig.model_validate({key: value}), "redis://r", 2, None):
        command, flags = command_and_flags(child.command)
        model: type[BaseModel] = NodeConfig if command == "node" else RouterConfig
        if key not in model.model_fields:
            assert flag_of(key) not in flags
            continue
        processes += 1
        words = ["--registry", "redis://r", *flag_words(flags)]
        if "BATON_INSECURE" in child.environment:
            words.append("--insecure")
        assert getattr(configured(model, words).config, key) == value
    assert processes == (3 if key in ClusterSettings.model_fields else 2 if key in NodeSettings.model_fields else 1)


def test_flags_carry_a_configuration_to_another_process() -> None:
    given = {key: another(key, field) for key, field in NodeSettings.model_fields.items()}
    flags = flags_of(UpConfig.model_validate(given), NodeSettings)
    words = ["--role", "decode", "--node-id", "n", "--registry", "r", *flag_words(flags)]
    parsed = configured(NodeConfig, words).config
    assert {key: getattr(parsed, key) for key in given} == given


def test_a_flag_and_its_key_name_each_other() -> None:
    for key, field in UpConfig.model_fields.items():
        assert key_of(flag_of(key)) == key
        if field.annotation is bool:
            assert {key_of(flag) for flag in switches(key, field)} == {key}


def test_inconsistent_settings_of_nodes_are_refused_before_a_process_is_started() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        UpConfig(max_num_batched_tokens=8, max_num_seqs=64)
    with pytest.raises(ValueError, match="host_cache_memory"):
        UpConfig(preemption_mode="swap")
