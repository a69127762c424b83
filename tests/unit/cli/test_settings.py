"""A setting is written once: its flag, variable, key, documentation and way to the processes are derived from it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, ByteSize

from baton.cli.cluster.supervisor.plan import REGISTRY, command_and_flags, flag_words, plan_nodes
from baton.cli.main import command_tree, main
from baton.config import MODELS, NodeConfig, RouterConfig, UpConfig, load
from baton.config.cluster import ClusterSettings
from baton.config.node import NodeSettings
from baton.config.router import RouterSettings
from baton.config.setting import Setting, flag_of, flags_of, key_of, settings_for, settings_of, value_text
from baton.engine.scheduler_config import SchedulerConfig
from kv_transfer.sender.lease_values import LeaseTimes
from router.admission.limits import DispatchLimits
from router.placement.placer import PlacementSettings, Policy
from router.placement.room import DEFAULT_RULES, RoomRules
from router.process import placement_settings
from tests.support.load_script import load_script
from tests.support.parsed_flags import config_from_flags

ROOT = Path(__file__).parents[3]
configuration: Any = vars(load_script("configuration"))
REQUIRED = {"role": "decode", "node_id": "n", "router_id": "r", "registry": "redis://r"}
SCALED = ("scaler", "max_nodes", "max_encode_nodes")
TLS = ("tls_cert", "tls_key", "tls_ca")
PER_PROCESS = {"threads", "metrics_port", "grpc_port", "http_port"}
"""Settings of which `baton up` gives each process a value of its own, derived from its own one."""
SPECIAL: dict[str, Any] = {
    "advertise": "host:37",
    "cors_origins": "https://chat.example.org",
    "image_urls": "https://images.example.org/public/",
    "decode_block_size": 48,
    "first_host": "host:37",
    "prefill_block_size": 48,
    "lora_dir": "/given/adapters,/given/more",
    "lora_modules": "one=/given/one,two=/given/two",
    "max_nodes": 37,
    "preemption_mode": "auto",
    "speculative_config": '{"method": "grammar"}',
    "goal_attainment": 0.25,
    "urgent_share": 0.25,
    "watermark": 0.25,
}
"""Values for settings for which `another` finds no valid one."""
EVERY = [
    pytest.param(command, setting, id=f"{command} {setting.key}")
    for command, model in MODELS.items()
    for setting in settings_of(model).values()
    if not setting.is_internal
]


@pytest.fixture(scope="module")
def tree() -> Any:
    return command_tree()


def another(setting: Setting) -> Any:
    """A valid value that is not the default."""
    if setting.key in SPECIAL:
        return SPECIAL[setting.key]
    kind, default = setting.field.annotation, setting.default
    if get_origin(kind) is Literal:
        return next(value for value in get_args(kind) if value != default)
    if setting.is_switch:
        return not default
    if isinstance(default, ByteSize):
        return ByteSize(default + (3 << 20))
    if isinstance(default, int | float):
        return default + 3
    return {"PATH": Path("/given/path"), "N": 37}.get(setting.value_name, "given")


def public_settings(model: type[BaseModel]) -> dict[str, Setting]:
    return {key: setting for key, setting in settings_of(model).items() if not setting.is_internal}


def texts_with(model: type[BaseModel], setting: Setting) -> dict[str, str]:
    """A value of this setting, and the other settings that must be given with it, as text."""
    given = {key: text for key, text in REQUIRED.items() if key in model.model_fields}
    if setting.key in TLS:
        given |= dict.fromkeys(TLS, "/given/path")
    if setting.key in SCALED:
        given |= {"planner": "on", "scaler": "given", "max_nodes": "37"}
    return given | {setting.key: value_text(another(setting))}


@pytest.mark.parametrize(("command", "setting"), EVERY)
def test_a_setting_can_be_given_as_a_flag_a_variable_and_a_key(command: str, setting: Setting, tmp_path: Path) -> None:
    model = MODELS[command]
    value, texts = another(setting), texts_with(model, setting)
    words = flag_words({flag_of(key): text for key, text in texts.items() if key != setting.key})
    words += flag_words(setting.with_value(value))
    by_flag = config_from_flags(model, words)
    assert (getattr(by_flag.config, setting.key), by_flag.origins[setting.key]) == (value, setting.flag)
    by_variable = load(model, {}, {settings_of(model)[key].variable: text for key, text in texts.items()})
    assert (getattr(by_variable.config, setting.key), by_variable.origins[setting.key]) == (value, setting.variable)
    file = tmp_path / "baton.toml"
    file.write_text("".join(f"{key} = {json.dumps(text)}\n" for key, text in texts.items()))
    by_key = load(model, {}, {}, file)
    assert (getattr(by_key.config, setting.key), by_key.origins[setting.key]) == (value, str(file))


@pytest.mark.parametrize(("command", "setting"), EVERY)
def test_a_setting_is_described_where_users_look(tree: Any, command: str, setting: Setting) -> None:
    assert setting.description.endswith(".")
    assert setting.heading
    (parameter,) = (each for each in tree.commands[command].params if each.name == setting.key)
    assert {*parameter.opts, *parameter.secondary_opts} == set(setting.flags)
    assert parameter.help.startswith(setting.description)
    assert not parameter.hidden
    section = configuration["PAGE"].read_text("utf-8").partition(f"\n## `baton {command}`")[2].partition("\n## ")[0]
    (row,) = (line for line in section.splitlines() if line.startswith(f"| `{setting.key}` |"))
    described = setting.description.replace("|", "\\|")
    assert all(f"`{name}`" in row for name in (*setting.flags, setting.variable))
    assert row.endswith(f"| {described} |")


@pytest.mark.parametrize("command", MODELS)
def test_config_view_shows_every_setting_and_no_internal_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "view", command, "-o", "json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(public_settings(MODELS[command]))
    assert {key for key in settings_of(NodeConfig) if key not in public_settings(NodeConfig)} == {
        "gpu_sharers",
        "notify_fd",
    }


def test_flags_of_baton_up_reach_the_processes_that_have_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All settings at once, from the command line of `baton up` to the settings of each process that it starts."""
    passed_on = {**settings_of(NodeSettings), **settings_of(RouterSettings)}
    given = {key: another(setting) for key, setting in passed_on.items()}
    words = [word for key, setting in passed_on.items() for word in flag_words(setting.with_value(given[key]))]
    up = config_from_flags(UpConfig, words).config
    assert {key: getattr(up, key) for key in given} == given
    children = plan_nodes(up, "redis://r", 2, None)
    assert [child.role for child in children] == ["prefill", "decode", "router"]
    for child in children:
        command, flags = command_and_flags(child.command)
        with monkeypatch.context() as process:
            for name, text in child.environment.items():
                process.setenv(name, text)
            config = config_from_flags(MODELS[command], flag_words(flags)).config
        group = RouterSettings if command == "router" else NodeSettings
        assert {key: getattr(config, key) for key in settings_of(group) if key not in PER_PROCESS} == {
            key: given[key] for key in settings_of(group) if key not in PER_PROCESS
        }
        assert {key_of(flag) for flag in flags} <= set(type(config).model_fields)
        assert child.environment[REGISTRY] == "redis://r"


def test_each_process_gets_its_own_ports_and_its_share_of_the_cores() -> None:
    up = UpConfig.model_validate({"routers": 2, "grpc_port": 7000, "http_port": 0, "metrics_port": 9400})
    flags = [command_and_flags(child.command)[1] for child in plan_nodes(up, "redis://r", 6, None)]
    assert [each.get("--threads") for each in flags] == ["3", "3", None, None]
    assert [each.get("--metrics-port") for each in flags] == ["9400", "9401", None, None]
    assert [each.get("--grpc-port") for each in flags] == [None, None, "7000", "7001"]
    assert [each.get("--http-port") for each in flags] == [None, None, "0", "0"]


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({}, ["1", "1"]),
        ({"": 4}, ["4", "4"]),
        ({"prefill_": 1, "decode_": 2}, ["1", "2"]),
        ({"": 2, "decode_": 1}, ["2", "1"]),
    ],
)
@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_nodes_of_a_role_have_its_numbers_of_ranks_and_stages(
    settings: dict[str, int], numbers: list[str], kind: str
) -> None:
    config = UpConfig.model_validate({prefix + kind: number for prefix, number in settings.items()})
    children = plan_nodes(config, "redis://r", 6, None)
    assert [command_and_flags(child.command)[1].get(f"--{kind}", "1") for child in children[:2]] == numbers


@pytest.mark.parametrize(
    ("asked", "pp", "expected"), [("auto", 1, False), ("auto", 2, True), ("off", 2, False), ("on", 1, True)]
)
def test_steps_are_decided_ahead_where_stages_would_wait(asked: str, pp: int, expected: bool) -> None:
    values = {"role": "decode", "node_id": "d", "registry": "redis://r", "async_scheduling": asked, "pp": pp}
    assert NodeConfig.model_validate(values).schedules_ahead is expected


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, ["16", "16"]),
        ({"block_size": 32}, ["32", "32"]),
        ({"prefill_block_size": 64}, ["64", "16"]),
        ({"block_size": 32, "decode_block_size": 8}, ["32", "8"]),
    ],
)
def test_nodes_of_a_role_have_its_block_size(settings: dict[str, int], sizes: list[str]) -> None:
    children = plan_nodes(UpConfig.model_validate(settings), "redis://r", 6, None)
    assert [command_and_flags(child.command)[1].get("--block-size", "16") for child in children[:2]] == sizes


def test_block_sizes_with_which_nothing_could_be_handed_over_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill_block_size 16 and decode_block_size 24: one must divide the other"):
        UpConfig.model_validate({"decode_block_size": 24})


@pytest.mark.parametrize("value", [0.1, 1 / 3, 3600.0, 1234567.5, 1e-9, 1e17])
def test_a_number_is_the_same_after_its_way_to_another_process(value: float) -> None:
    words = [f"--{key.replace('_', '-')}={text}" for key, text in REQUIRED.items() if key != "router_id"]
    flags = flags_of(UpConfig.model_validate({"drain_s": value}), ClusterSettings)
    assert config_from_flags(NodeConfig, [*words, *flag_words(flags)]).config.drain_s == value


def test_inconsistent_settings_are_refused_before_a_process_is_started() -> None:
    for settings, complaint in (
        ({"preemption_mode": "swap"}, "host_cache_memory"),
        ({"metrics_port": 65535}, "metrics_port 65535 leaves no ports for 2 nodes"),
    ):
        with pytest.raises(ValueError, match=complaint):
            UpConfig.model_validate(settings)


def test_a_routers_settings_are_the_limits_of_its_dispatcher_and_its_placement() -> None:
    def parts(**settings: object) -> tuple[DispatchLimits, PlacementSettings]:
        config = RouterConfig.model_validate({"router_id": "r", "registry": "redis://r", **settings})
        return DispatchLimits(**settings_for(DispatchLimits, config)), placement_settings(config)

    assert parts() == (DispatchLimits(), PlacementSettings()), "the defaults are the same"
    config = RouterConfig.model_validate({"router_id": "r", "registry": "redis://r"})
    assert RoomRules(**settings_for(RoomRules, config)) == DEFAULT_RULES
    limits, placement = parts(
        max_queue=1,
        max_running=2,
        min_priority=3,
        priority_ageing_s=4,
        placement="round-robin",
        require_disaggregation="on",
    )
    assert limits == DispatchLimits(max_queue=1, max_running=2, min_priority=3, priority_ageing_s=4.0)
    assert placement == PlacementSettings(Policy.ROUND_ROBIN, require_disaggregation=True)
    assert parts(max_local_prefill_tokens=5)[1] == PlacementSettings(alone_tokens=5)


def test_a_nodes_scheduler_has_the_defaults_of_the_settings() -> None:
    """A scheduler that is made without settings, as in tests and benchmarks, has larger steps than that of a node, and
    keeps no rows of images.
    """
    node = NodeConfig.model_validate({"role": "decode", "node_id": "n", "registry": "r"})
    alone, settings = SchedulerConfig(65), settings_for(SchedulerConfig, node)
    assert {key for key, value in settings.items() if getattr(alone, key) != value} == {
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_model_len",
        "num_encoder_rows",
    }
    assert alone.policy == node.scheduling_policy
    assert node.kv_unclaimed_s == LeaseTimes().unclaimed_s


def test_the_example_of_the_page_is_a_file_that_all_commands_read(tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(configuration["EXAMPLE"])
    content = tomllib.loads(configuration["EXAMPLE"])
    required = {key: value for key, value in REQUIRED.items() if key != "router_id"}
    assert load(NodeConfig, required, {}, file).config.kv_cache_memory == 40 << 30
    assert load(UpConfig, {}, {}, file).config.decode == content["up"]["decode"]
    router = load(RouterConfig, {"router_id": "r", "registry": "redis://r"}, {}, file).config
    assert router.flight_record_s == content["router"]["flight_record_s"]


def test_the_chart_has_the_defaults_of_the_settings() -> None:
    values = yaml.safe_load((ROOT / "deploy/helm/baton/values.yaml").read_text("utf-8"))
    up = UpConfig.model_validate({})
    assert (values["cluster"], values["drainSeconds"], values["insecure"]) == (up.cluster, up.drain_s, up.insecure)
    assert values["model"]["name"] == up.model_name


def test_help_lists_flags_under_the_headings_of_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["The cluster", "Every process", "Every node", "Every router", "Options"]
