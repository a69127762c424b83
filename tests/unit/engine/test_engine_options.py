"""The scheduler's options reach it from the flags of nodes and of `baton up`, and change no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cli.cluster.emit.helm import helm_files
from baton.cli.cluster.emit.processes import emitted_processes
from baton.cli.cluster.emit.slurm import slurm_files
from baton.cli.cluster.emit.systemd import systemd_files
from baton.cli.cluster.supervisor.plan import command_and_flags, flag_words, plan_nodes
from baton.config import NodeConfig, UpConfig
from baton.config.load import view
from baton.engine.core import EngineCore
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.errors import ConfigError, UsageError
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.node.runner_spec import scheduler_config
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from tests.doubles.fake_clock import FakeClock
from tests.doubles.fake_runner import FakeRunner
from tests.support.engine_rig import EngineRig, prompt_of
from tests.support.parsed_flags import config_from_flags
from tests.support.tiny_models import TINY_MODELS

NODE = ("--role", "prefill", "--node-id", "n", "--registry", "r")
OPTIONS: Mapping[str, tuple[Sequence[str], Any]] = {
    "long_prefill_token_threshold": (("--long-prefill-token-threshold", "128"), 128),
    "enable_chunked_prefill": (("--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"), False),
    "enable_prefix_caching": (("--no-enable-prefix-caching",), False),
    "watermark": (("--watermark", "0.25"), 0.25),
}


def limits_of(config: NodeConfig) -> SchedulerConfig:
    return scheduler_config(config, FakeRunner(65, 16))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_nodes_flag_reaches_its_scheduler(option: str) -> None:
    flags, value = OPTIONS[option]
    default, changed = (limits_of(config_from_flags(NodeConfig, [*NODE, *more]).config) for more in ((), flags))
    assert getattr(changed, option) == value != getattr(default, option)
    assert getattr(default, option) == getattr(SchedulerConfig(65), option), "a node's default is the engine's"


@pytest.mark.parametrize("option", OPTIONS)
def test_a_flag_of_up_reaches_every_nodes_scheduler(option: str) -> None:
    flags, value = OPTIONS[option]
    config = config_from_flags(UpConfig, flags).config
    nodes = [child for child in plan_nodes(config, "redis://r", 2, None) if child.role != "router"]
    assert len(nodes) == 2
    for child in nodes:
        # The registry's URL may have a password, so it is not passed to a child as a flag.
        own = ["--registry", "r", *flag_words(command_and_flags(child.command)[1])]
        node = config_from_flags(NodeConfig, own).config
        assert getattr(limits_of(node), option) == value


@pytest.mark.parametrize("option", OPTIONS)
def test_emitted_files_contain_the_flag(option: str) -> None:
    flags, value = OPTIONS[option]
    config = config_from_flags(UpConfig, [*flags, "--insecure"]).config
    processes = emitted_processes(config, None)
    for process in processes:
        if process.command == "node":
            own = ["--registry", "r", *flag_words(process.flags)]
            assert getattr(config_from_flags(NodeConfig, own).config, option) == value
    flag = flags[0].removeprefix("--")
    assert yaml.safe_load(helm_files(config, processes, "")["values.yaml"])["decode"]["flags"][flag] in (
        True,
        f"{value:g}",
    )
    assert f"{flags[0]}" in slurm_files(config, processes, "/baton")["baton.sbatch"]
    assert any(flags[0] in text for text in systemd_files(config, processes, "/baton", "me", ()).values())


def test_a_flag_overrides_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("enable_prefix_caching = false\nwatermark = 0.5\n[node]\nlong_prefill_token_threshold = 64\n")
    monkeypatch.setenv("BATON_WATERMARK", "0.3")
    loaded = config_from_flags(NodeConfig, [*NODE, "--config", str(file), "--enable-prefix-caching"])
    limits = limits_of(loaded.config)
    assert (limits.enable_prefix_caching, limits.watermark, limits.long_prefill_token_threshold) == (True, 0.3, 64)
    found = view(NodeConfig, {"BATON_ENABLE_CHUNKED_PREFILL": "false"}, file)
    assert found["enable_chunked_prefill"] == ("false", "BATON_ENABLE_CHUNKED_PREFILL")
    assert found["enable_prefix_caching"] == (False, str(file))


@pytest.mark.parametrize(
    "flags", [("--watermark", "1"), ("--long-prefill-token-threshold", "-1"), ("--watermark", "nan")]
)
def test_contradictory_flags_are_refused_with_their_names(flags: Sequence[str]) -> None:
    with pytest.raises(UsageError, match=flags[0].removeprefix("--").replace("-", "_")):
        config_from_flags(NodeConfig, [*NODE, *flags])


def test_without_chunked_prefill_a_step_must_fit_the_longest_prompt() -> None:
    config = config_from_flags(NodeConfig, [*NODE, "--no-enable-chunked-prefill"]).config
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(512\) must be at least max_model_len"):
        limits_of(config)


# --- the options have their effect and change no tokens ---

WAYS: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "no chunks": {"enable_chunked_prefill": False},
    "no cache": {"enable_prefix_caching": False},
    "short chunks": {"long_prefill_token_threshold": 7},
    "watermark": {"watermark": 0.4},
}


def outputs_of(directory: Path, limits: Mapping[str, Any]) -> tuple[list[list[int]], int]:
    """The tokens of four requests, three of which share a prefix and come in turns, and the longest chunk."""
    runner = load_runner(TorchSpec(directory, dtype="float32", block_size=4, num_blocks=80))
    config = SchedulerConfig(80, block_size=4, max_num_batched_tokens=160, max_num_seqs=4, max_model_len=160, **limits)
    scheduler = Scheduler(config, CacheKeyFields.of(runner.model, runner.layout), FakeClock())
    core = EngineCore(scheduler, runner)
    requests: list[Request] = []
    longest = 0
    for number in range(4):
        prompt = [(31 * min(number, 1) + 7 * place) % 250 for place in range(40 + number)]
        params = SamplingParams(temperature=0.7 * (number % 2), seed=number, max_tokens=8, ignore_eos=True)
        requests.append(Request(f"r{number}", RequestSpec(prompt, params)))
        core.scheduler.add_request(requests[-1])
        for _ in range(5):
            decided = scheduler.schedule()
            longest = max([longest, *decided.num_scheduled_tokens.values()])
            scheduler.update_from_output(decided, runner.execute_model(decided))
    while core.has_work():
        core.step()
        scheduler.kv_cache_manager.check_invariant()
    assert all(request.num_cached_tokens == 0 for request in requests) or config.enable_prefix_caching
    return [request.output_token_ids for request in requests], longest


def test_tokens_do_not_depend_on_the_schedulers_options(tmp_path: Path) -> None:
    write_random_model(tmp_path, TINY_MODELS["llama"], 0)
    found = {name: outputs_of(tmp_path, limits) for name, limits in WAYS.items()}
    assert {name: tokens for name, (tokens, _) in found.items()} == dict.fromkeys(WAYS, found["as it is"][0])
    assert found["no chunks"][1] >= 40
    assert found["short chunks"][1] == 7


def test_the_prefix_cache_finds_nothing_when_it_is_off() -> None:
    cached = []
    for on in (True, False):
        rig = EngineRig(enable_prefix_caching=on)
        for name in ("one", "two"):
            rig.complete(name, prompt_of(20), max_tokens=2)
        assert rig.tokens["two"] == rig.expected("two", 2)
        cached.append(rig.ends["two"].num_cached_tokens)
    assert cached == [16, 0]


# --- no fields are declared that nothing reads ---


def test_drafts_that_are_not_verified_change_no_step() -> None:
    """Drafts are given to the scheduler: whoever sets them on a request gets the step that it would have got anyway."""
    rig = EngineRig(max_num_batched_tokens=8)
    request = rig.add("r", 20, max_tokens=4)
    request.spec_token_ids = [1, 2, 3]
    rig.run_right("r")
