"""The precedence of flag, environment, file and default, and unknown keys that are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from baton.config import NodeConfig, RouterConfig, UpConfig, bundled_model_dir, config_file, load
from baton.config.node import NodeSettings
from baton.config.setting import flags_of
from baton.errors import ConfigError, UsageError

NODE = {"role": "prefill", "node_id": "p0", "registry": "redis://r"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "baton.toml"
    path.write_text(
        'cluster = "from-file"\nblock_size = 32\n'
        "[node]\nmax_num_seqs = 3\nblock_size = 8\n"
        "[router]\noperator_port = 5\n"
    )
    return path


def test_settings_without_a_source_have_their_defaults() -> None:
    config = load(NodeConfig, NODE, {}).config
    assert (config.block_size, config.kv_cache_memory, config.max_num_batched_tokens) == (16, 256 << 20, 512)
    assert (config.host, config.port, config.dtype, config.runner) == ("127.0.0.1", 0, "auto", "torch")
    assert config.model == bundled_model_dir()
    assert config.served_model_name == "demo_model"
    assert load(NodeConfig, NODE | {"runner": "simulated"}, {}).config.served_model_name == "simulated"
    assert config.num_threads >= 1
    assert load(UpConfig, {}, {}).config.grpc_port == 50051


def test_a_node_on_a_gpu_has_the_defaults_of_a_gpu_where_nobody_gave_a_value() -> None:
    config = load(NodeConfig, NODE | {"max_num_seqs": 64}, {"BATON_BLOCK_SIZE": "16"}).config
    on_gpu = config.on_gpu()
    sizes = (on_gpu.block_size, on_gpu.kv_cache_memory, on_gpu.max_num_batched_tokens, on_gpu.max_num_seqs)
    assert sizes == (16, 0, 8192, 64)
    assert load(NodeConfig, NODE, {}).config.on_gpu().block_size == 64
    assert on_gpu.orphan_grace_s == config.orphan_grace_s


def test_what_depends_on_a_nodes_device_is_passed_on_only_if_it_was_given() -> None:
    given = flags_of(load(UpConfig, {"block_size": "16"}, {}).config, NodeSettings)
    assert given["--block-size"] == "16"
    assert not given.keys() & {"--kv-cache-memory", "--max-num-batched-tokens", "--max-num-seqs"}


def test_flags_override_the_environment_which_overrides_the_file_and_the_defaults(file: Path) -> None:
    environ = {"BATON_CLUSTER": "from-env", "BATON_MAX_NUM_SEQS": "4", "HOME": "/x"}
    loaded = load(NodeConfig, NODE | {"max_num_seqs": 9, "threads": None}, environ, file)
    assert loaded.config.max_num_seqs == 9
    assert loaded.config.cluster == "from-env"
    assert loaded.config.block_size == 8
    assert loaded.config.max_num_batched_tokens == 512
    assert {key: loaded.origins[key] for key in ("max_num_seqs", "cluster", "block_size", "dtype")} == {
        "max_num_seqs": "--max-num-seqs",
        "cluster": "BATON_CLUSTER",
        "block_size": f"{file} [node]",
        "dtype": "default",
    }


def test_a_table_applies_to_its_command_and_top_level_keys_to_all(file: Path) -> None:
    router = load(RouterConfig, {"router_id": "r", "registry": "redis://r"}, {}, file).config
    assert (router.operator_port, router.cluster) == (5, "from-file")
    assert load(UpConfig, {}, {}, file).config.block_size == 32


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("max_num_seq = 3", "unknown key 'max_num_seq' (did you mean max_num_seqs?)"),
        ("[node]\nmax_num_seq = 3", "unknown key 'max_num_seq' in [node] (did you mean max_num_seqs?)"),
        ("[router]\nblock_size = 3", "unknown key 'block_size' in [router]"),
        ("[nodes]\nx = 1", "unknown table [nodes] (did you mean node?)"),
        ("[node]\nnotify_fd = 5", "unknown key 'notify_fd'"),
        ("node = [", "baton.toml"),
    ],
)
def test_errors_in_a_file_are_named(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "baton.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load(NodeConfig, NODE, {}, path)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"block_size": 0}, "block_size 0 from --block-size"),
        ({"dtype": "float16"}, "dtype 'float16' from --dtype"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory 'much'"),
        ({"advertise": "nowhere"}, "advertise 'nowhere' from --advertise: must be HOST:PORT"),
        ({"node_id": "a b"}, "node_id 'a b'"),
        ({"max_loras": 64}, "max_cpu_loras (32) must be at least max_loras (64)"),
        ({"async_scheduling": "yes"}, "async_scheduling 'yes' from --async-scheduling"),
        ({"preemption_mode": "swap"}, "preemption_mode swap needs a host tier"),
        ({"bloc_size": 1}, "unknown key 'bloc_size' (did you mean block_size?)"),
        ({"node_id": None}, "--node-id is required"),
        ({"registry": None}, "--registry is required"),
    ],
)
def test_an_invalid_value_is_named_with_its_origin(flags: dict[str, object], complaint: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=re.escape(complaint)):
        load(NodeConfig, NODE | flags, {})


def test_an_invalid_flag_is_a_usage_error_and_an_invalid_variable_a_configuration_error() -> None:
    with pytest.raises(UsageError):
        load(NodeConfig, NODE | {"block_size": "x"}, {})
    with pytest.raises(ConfigError):
        load(NodeConfig, NODE | {"block_size": "x"}, {"BATON_DTYPE": "int4"})


def test_a_misspelt_variable_is_an_error_and_an_unrelated_one_is_not() -> None:
    with pytest.raises(ConfigError, match=r"BATON_BLOCKSIZE \(did you mean BATON_BLOCK_SIZE\?\)"):
        load(NodeConfig, NODE, {"BATON_BLOCKSIZE": "8"})
    environ = {"BATON_SERVICE_HOST": "10.0.0.1", "BATON_PORT": "tcp://10.0.0.1:50051", "BATON_RUN_DIR": "/x"}
    assert load(NodeConfig, NODE, environ).config.port == 0


def test_the_configuration_file_is_found_in_its_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_file(None, {}) == Path("baton.toml")
    assert config_file(None, {"BATON_CONFIG": str(file)}) == file
    with pytest.raises(ConfigError, match=r"nothing\.toml does not exist"):
        config_file(tmp_path / "nothing.toml", {})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert config_file(None, {}) is None


def test_sizes_have_units_and_threads_are_shared_out() -> None:
    assert load(NodeConfig, NODE | {"kv_cache_memory": "1GiB"}, {}).config.kv_cache_memory == 1 << 30
    up = load(UpConfig, {"prefill": 2, "decode": 2}, {}).config
    assert [up.threads_per_node(cores) for cores in (1, 4, 9)] == [1, 1, 2]
    assert load(UpConfig, {"threads": 3}, {}).config.threads_per_node(1) == 3


def test_a_configuration_can_not_be_changed() -> None:
    config = load(NodeConfig, NODE, {}).config
    with pytest.raises(ValidationError):
        config.block_size = 3
