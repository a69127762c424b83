"""Commands on a running cluster: every output format, and every way to name the cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.process.shell import Shell, refusal
from tests.support.process_cluster import ProcessCluster

GREEDY = ("--temperature", 0, "--max-tokens", 8)


def test_generate_answers_in_every_format(shell: Shell, cluster: ProcessCluster) -> None:
    ask = ("generate", "hello", *GREEDY, "--run-dir", cluster.run_dir)
    as_json = shell.baton(*ask, "-o", "json")
    assert (as_json.returncode, as_json.stderr) == (0, "")
    answer = json.loads(as_json.stdout)
    assert {key: sorted(value) if isinstance(value, dict) else None for key, value in answer.items()} == {
        "version": None,
        "text": None,
        "token_ids": None,
        "finish_reason": None,
        "usage": ["accepted_draft_tokens", "cached_tokens", "completion_tokens", "draft_tokens", "prompt_tokens"],
        "path": ["attempts", "decode_node", "prefill_node", "reason"],
        "timings": ["prefill_ms", "queue_ms", "total_ms", "transfer_ms", "ttft_ms"],
        "kv_bytes": None,
        "bit_exact": None,
    }
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 8
    assert (answer["finish_reason"], answer["usage"]["prompt_tokens"]) == ("length", 5)
    path = answer["path"]
    assert (path["prefill_node"], path["decode_node"], path["attempts"]) == ("prefill-0", "decode-0", 1)
    assert answer["kv_bytes"] > 0
    assert answer["bit_exact"] is True
    assert 0 < answer["timings"]["ttft_ms"] <= answer["timings"]["total_ms"]
    from_yaml = yaml.safe_load(shell.baton(*ask, "-o", "yaml").stdout)
    assert from_yaml["token_ids"] == answer["token_ids"]
    assert from_yaml["text"] == answer["text"]
    for how in ("--stream", "--no-stream"):
        done = shell.baton(*ask, how)
        assert (done.returncode, done.stdout, done.stderr) == (0, answer["text"] + "\n", "")


def test_generate_answers_with_several_sequences(shell: Shell, cluster: ProcessCluster) -> None:
    ask = ("generate", "hello", "--max-tokens", 8, "--seed", 5, "--run-dir", cluster.run_dir)
    answer = json.loads(shell.baton(*ask, "-n", 3, "-o", "json").stdout)
    assert sorted(answer) == ["bit_exact", "choices", "kv_bytes", "path", "timings", "usage", "version"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [sorted(choice) for choice in answer["choices"]] == [["finish_reason", "index", "text", "token_ids"]] * 3
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
    lone = json.loads(shell.baton(*ask, "-o", "json").stdout)
    assert lone["token_ids"] == answer["choices"][0]["token_ids"]
    said = shell.baton(*ask, "-n", 3)
    texts = [choice["text"] for choice in answer["choices"]]
    assert said.stdout == "".join(f"[{place}/3] {text}\n" for place, text in enumerate(texts, 1))
    assert shell.baton(*ask, "-n", 2, "--best-of", 4).returncode == 0
    beams = json.loads(
        shell.baton(
            *ask[:2],
            "--max-tokens",
            8,
            "--run-dir",
            cluster.run_dir,
            "--beam-width",
            3,
            "-n",
            2,
            "--length-penalty",
            0.5,
            "-o",
            "json",
        ).stdout
    )
    assert len(beams["choices"]) == 2
    assert refusal(shell.baton(*ask, "--beam-width", 9), 2).startswith("beam_width: must be 2 to 8")
    assert refusal(shell.baton(*ask, "-n", 129), 2).startswith("n: must be 1 to 128")
    assert refusal(shell.baton(*ask, "-n", 3, "--best-of", 2), 2).startswith("best_of: must be 3 to 128")


def test_a_schema_that_can_not_be_served_is_refused(shell: Shell, cluster: ProcessCluster, tmp_path: Path) -> None:
    ask = ("generate", "hello", "--run-dir", cluster.run_dir, "--json-schema")
    schema = tmp_path / "schema.json"
    assert refusal(shell.baton(*ask, f"@{schema}"), 2).startswith(f"--json-schema: {schema} can't be read")
    assert "no end-of-sequence token" in refusal(shell.baton(*ask, "{}"), 2)


def test_prompts_may_come_as_text_from_standard_input_or_as_ids(
    shell: Shell, cluster: ProcessCluster, model: Path
) -> None:
    where = (*GREEDY, "--run-dir", cluster.run_dir)
    said = shell.baton("generate", "hello", *where).stdout
    assert shell.baton("generate", "-", *where, input="hello").stdout == said
    ids = ",".join(str(token) for token in vocabulary_ids(model, "hello"))
    assert shell.baton("generate", "--token-ids", ids, *where).stdout == said


def vocabulary_ids(model: Path, text: str) -> list[int]:
    """Return the token ids of a text, for a tokenizer with one token for each letter."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[letter] for letter in text]


def test_a_seed_repeats_an_output_and_a_stop_string_ends_it(shell: Shell, cluster: ProcessCluster) -> None:
    ask = ("generate", "hello", "--max-tokens", 24, "--seed", 5, "--run-dir", cluster.run_dir, "-o", "json")
    first, second = (json.loads(shell.baton(*ask).stdout) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert json.loads(shell.baton(*ask, "--seed", 6).stdout)["token_ids"] != first["token_ids"]
    stop = first["text"][3:5]
    stopped = json.loads(shell.baton(*ask, "--stop", stop).stdout)
    assert stopped["text"] == first["text"][: first["text"].index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_leases_and_descriptions_are_shown_in_every_format(shell: Shell, cluster: ProcessCluster) -> None:
    assert shell.baton("generate", "hello", *GREEDY, "--run-dir", cluster.run_dir).returncode == 0
    ask = ("get", "leases", "--run-dir", cluster.run_dir)
    table = shell.baton(*ask)
    assert (table.returncode, table.stderr) == (0, "")
    assert table.stdout.split() == ["NODE", "REQUEST", "ATTEMPT", "SIDE", "STATE", "PEER", "BLOCKS", "AGE"]
    nothing = {"version": 1, "items": []}
    assert json.loads(shell.baton(*ask, "-o", "json").stdout) == nothing
    assert yaml.safe_load(shell.baton(*ask, "-o", "yaml").stdout) == nothing
    assert shell.baton(*ask, "-o", "name").stdout == ""
    assert shell.baton(*ask, "--no-headers").stdout == ""
    describe = ("describe", "node", "decode-0", "--run-dir", cluster.run_dir)
    described = json.loads(shell.baton(*describe, "-o", "json").stdout)
    assert described["status"]["name"] == described["report"]["description"]["node_id"] == "decode-0"
    assert "arrived" in {ended["outcome"] for ended in described["report"]["ended_transfers"]}
    assert yaml.safe_load(shell.baton(*describe, "-o", "yaml").stdout).keys() == described.keys()
    assert f"  Layout:               {described['report']['layout']}\n" in shell.baton(*describe).stdout
    router = shell.baton("describe", "node", "router-0", "--run-dir", cluster.run_dir)
    assert router.stdout.startswith("Name:         router-0\n")
    unknown = shell.baton("describe", "node", "decode-9", "--run-dir", cluster.run_dir)
    assert refusal(unknown, 3) == "no node is called decode-9 (did you mean decode-0?)"


def test_nodes_are_listed_in_every_format(shell: Shell, cluster: ProcessCluster) -> None:
    ask = ("get", "nodes", "--run-dir", cluster.run_dir)
    names = ["prefill-0", "decode-0", "router-0"]
    assert shell.baton(*ask, "-o", "name").stdout.split() == names
    table = shell.baton(*ask).stdout.splitlines()
    assert table[0].split() == ["NAME", "ROLE", "STATUS", "READY", "VERSION", "AGE"]
    assert [line.split()[:4] for line in table[1:]] == [[name, name[:-2], "Ready", "yes"] for name in names]
    assert shell.baton(*ask, "--no-headers", "-l", "role=router").stdout.split()[:3] == ["router-0", "router", "Ready"]
    wide = shell.baton(*ask, "-o", "wide").stdout.splitlines()
    assert wide[0].split()[:6] == table[0].split()
    assert [len(line.split()) for line in wide[:3]] == [len(wide[0].split())] * 3
    assert cluster.process("router-0").http_address in wide[3]
    found = json.loads(shell.baton(*ask, "-o", "json").stdout)["items"]
    promised = ["name", "role", "status", "incarnation", "address", "pid", "model", "running", "waiting", "kv_usage"]
    assert all(set(promised) <= set(node) for node in found)
    for node, process in zip(found, [cluster.process(name) for name in names], strict=True):
        assert (node["name"], node["role"], node["status"]) == (process.name, process.role, "Ready")
        assert (node["incarnation"], node["address"], node["pid"]) == (
            process.incarnation,
            process.address,
            process.pid,
        )
        assert (node["model"], node["running"], node["waiting"]) == ("tiny", 0, 0)
    assert [node["name"] for node in yaml.safe_load(shell.baton(*ask, "-o", "yaml").stdout)["items"]] == names


def test_status_shows_the_health_in_every_format(shell: Shell, cluster: ProcessCluster) -> None:
    ask = ("status", "--run-dir", cluster.run_dir)
    said = shell.baton(*ask)
    assert said.returncode == 0
    assert said.stdout.splitlines()[:2] == ["default: ok", "1/1 prefill ready, 1/1 decode ready, 1/1 router ready"]
    rows = [line.split() for line in said.stdout.splitlines()]
    for process in cluster.state.processes:
        assert [process.name, "Ready", "0"] in [row[:3] for row in rows]
    found = json.loads(shell.baton(*ask, "-o", "json").stdout)
    assert (found["version"], found["cluster"], found["health"], found["detail"]) == (1, "default", "ok", "")
    assert (found["degraded"], [each["open_leases"] for each in found["load"]]) == ([], [0, 0, None])
    assert found["supervisor"]["grpc_address"] == cluster.state.grpc_address
    assert yaml.safe_load(shell.baton(*ask, "-o", "yaml").stdout)["health"] == "ok"


def test_chat_and_top_work(shell: Shell, cluster: ProcessCluster) -> None:
    greedy = ("--temperature", "0", "--max-tokens", "4")
    here = shell.baton("chat", *greedy, "--run-dir", cluster.run_dir, input="hello\nmore\n")
    there = shell.baton("chat", *greedy, "--url", f"http://{cluster.state.http_address}", input="hello\nmore\n")
    assert (here.returncode, here.stderr) == (0, ""), here
    assert here.stdout == there.stdout != ""
    shown = shell.baton("top", "--run-dir", cluster.run_dir)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("default: ok   2/2 nodes ready")
    assert [line.split()[0] for line in lines[3:6]] == ["prefill-0", "decode-0", "router-0"]


def test_a_cluster_can_be_named_by_address_alone(shell: Shell, cluster: ProcessCluster) -> None:
    state = cluster.state
    by_run_dir = shell.baton("generate", "hello", *GREEDY, "--run-dir", cluster.run_dir)
    assert shell.baton("generate", "hello", *GREEDY, "--address", state.grpc_address).stdout == by_run_dir.stdout != ""
    nodes = shell.baton("get", "nodes", "-o", "name", "--address", state.operator_address)
    assert nodes.stdout.split() == ["prefill-0", "decode-0", "router-0"]
    status = json.loads(shell.baton("status", "--address", state.operator_address, "-o", "json").stdout)
    assert (status["health"], status["supervisor"]) == ("ok", None)


def test_the_address_of_another_port_is_recognised(shell: Shell, cluster: ProcessCluster) -> None:
    state = cluster.state
    said = refusal(shell.baton("generate", "x", "--address", state.operator_address), 5)
    assert said.startswith(f"{state.operator_address} is another service's address")
    assert said.endswith("is this the router's gRPC address?")
    said = refusal(shell.baton("status", "--address", state.grpc_address), 5)
    assert said.endswith("is this the router's operator address?")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["", *GREEDY], 2, "prompt: is empty"),
        (["x", "--temperature", "nan"], 2, "temperature: must be in [0, 2], not nan"),
        (["x", "--top-p", "inf"], 2, "top_p: must be in (0, 1], not inf"),
        (["x", "--max-tokens", "0"], 2, "max_tokens: must be at least 1, not 0"),
        (["x", "--max-tokens", "-1"], 2, "max_tokens: Value out of range: -1"),
        (["x", "--seed", "-1"], 2, "seed: Value out of range: -1"),
        (["x", "--max-tokens", "512"], 2, "max_tokens: is 512, but the prompt leaves 511"),
        (["x" * 600], 2, "prompt: has 600 tokens; tiny takes at most 511"),
        (["x", "--model", "other"], 2, "model: 'other' is not served here; there is 'tiny'"),
        (["--token-ids", "3,256"], 2, "prompt: token 1 is 256; ids are 0 to 255"),
        (["--token-ids", "99999999999"], 2, "prompt: Value out of range: 99999999999"),
        ([b"\xff"], 2, "prompt: is not valid UTF-8"),
        (["x", "--timeout", "0"], 6, "eadline"),
    ],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    shell: Shell, cluster: ProcessCluster, words: list[str | bytes], code: int, said: str
) -> None:
    prompt = [os.fsdecode(word) if isinstance(word, bytes) else word for word in words]
    assert said in refusal(shell.baton("generate", "--run-dir", cluster.run_dir, *prompt), code)


def test_a_prompt_of_five_mebibytes_is_refused(shell: Shell, cluster: ProcessCluster) -> None:
    done = shell.baton("generate", "-", "--run-dir", cluster.run_dir, input="x" * (5 << 20))
    assert "at most 1048576 are taken" in refusal(done, 2)


def test_a_second_up_in_the_same_run_directory_changes_nothing(shell: Shell, cluster: ProcessCluster) -> None:
    before = cluster.state
    logs = {log.name: log.read_bytes() for log in (cluster.run_dir / "logs").iterdir()}
    for detached in ((), ("--detach",)):
        done = shell.baton("up", *detached, "--grpc-port", 0, "--run-dir", cluster.run_dir)
        said = (
            f"a cluster is already running in {cluster.run_dir}: stop it with `baton down --run-dir {cluster.run_dir}`"
        )
        assert said in refusal(done, 78)
    assert cluster.state == before
    assert logs.items() <= {log.name: log.read_bytes() for log in (cluster.run_dir / "logs").iterdir()}.items()
    assert shell.baton("generate", "hello", "--run-dir", cluster.run_dir).returncode == 0


def test_the_run_directory_is_taken_from_the_environment(shell: Shell, cluster: ProcessCluster) -> None:
    assert shell.baton("status", environment={"BATON_RUN_DIR": str(cluster.run_dir)}).returncode == 0
    assert "no cluster is running in" in refusal(shell.baton("status"), 5)


def test_a_closed_output_pipe_prints_no_error(shell: Shell, cluster: ProcessCluster) -> None:
    for words in (("generate", "hello"), ("get", "nodes", "-o", "json")):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = shell.baton(*words, "--run-dir", cluster.run_dir, stdout=write_end)
        os.close(write_end)
        assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_is_reported_in_one_line(shell: Shell, cluster: ProcessCluster) -> None:
    for words in (("generate", "hello"), ("status",)):
        with open("/dev/full", "w") as full:
            done = shell.baton(*words, "--run-dir", cluster.run_dir, stdout=full)
        assert refusal(done, 1) == "No space left on device"
