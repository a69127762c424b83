"""`baton.LLM`: what it refuses and when, a request that fails among others, Ctrl-C, the progress bar, its imports."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save

import baton
from baton import LLM, RequestOutput, RequestsFailed, SamplingParams
from baton.config.node import NodeSettings
from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.errors import AdapterRefused, ConfigError, EngineFault, InvalidRequest, RepetitiveOutput
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import RepetitionDetection
from baton.models.resolve import find_model
from baton.offline import EngineSettings
from baton.offline.outputs import progress_bar
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from tests.support.gguf_models import random_module, write_module
from tests.support.quantized_models import PACKED_FORMATS, write_quantized_model
from tests.support.tiny_models import TINY_MODELS

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
ROOT = Path(__file__).parents[3]
SHORT = SamplingParams(temperature=0.0, max_tokens=4)


def small(model: Path, **settings: Any) -> LLM:
    """A model with a small cache, since the memory of it is written when a model is loaded."""
    return LLM(model, **{"dtype": "float32", "threads": 1, "kv_cache_memory": "16MiB", **settings})


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with small(DEMO_MODEL) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is loaded in a fifth of the time that the demo's takes."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(directory, TINY_MODELS["llama"], seed=0)
    return directory


def test_a_model_with_an_encoder_and_a_decoder_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bart", "is_encoder_decoder": true}')
    with pytest.raises(ConfigError, match=r"an encoder and a decoder .* baton up --model"):
        LLM(tmp_path)


def num_lookups(llm: LLM) -> int:
    """The number of prompt tokens that the engine has looked up in its cache: it grows when a prompt is begun."""
    return llm._engine.scheduler.make_stats().prefix_cache.num_tokens


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (["good", ""], SHORT, "prompts[1]"),
        (["good", "good"], [SHORT, SamplingParams(temperature=3.0)], "prompts[1]"),
        (["good", [5, 10**9]], SHORT, "prompts[1]"),
        (["good", 7], SHORT, "prompts[1]"),
        (["good", "word " * 100_000], SHORT, "prompts[1]"),
        (["good", "x"], SamplingParams(json_schema='{"not": {}}'), "prompts[0]"),
        (["good", "x"], [SHORT], "sampling_params"),
        (["good"], [{"temperature": 1}], "sampling_params"),
        (7, SHORT, "prompts"),
    ],
)
def test_bad_input_is_refused_before_anything_is_computed(shared: LLM, prompts: Any, params: Any, field: str) -> None:
    before = num_lookups(shared)
    with pytest.raises(InvalidRequest) as caught:
        shared.generate(prompts, params)
    assert caught.value.field == field
    assert num_lookups(shared) == before


def test_adapters_that_cannot_be_used_are_refused_before_anything_is_computed(shared: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="'one' is not served here"):
        shared.generate("good", SHORT, adapter="one")
    assert shared.generate("good", SHORT, use_tqdm=False)[0].outputs[0].token_ids
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(AdapterRefused):
        small(DEMO_MODEL, lora_modules=f"one={tmp_path}")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(temperature="hot"), "prompts[0]: temperature: must be"),  # type: ignore[arg-type]
        (SamplingParams(stop=[1]), "prompts[0]: stop"),  # type: ignore[list-item]
        (SamplingParams(max_tokens=10**6), "prompts[0]: max_tokens: is 1000000, but the prompt leaves"),
        (SamplingParams(logprobs=-1), "prompts[0]: logprobs"),
    ],
)
def test_parameters_are_checked_as_a_router_does(shared: LLM, params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        shared.generate("x", params)


@pytest.mark.parametrize("messages", [[{"role": "nobody", "content": "x"}], ["hello"], [[]], [[{"content": "x"}]]])
def test_bad_chats_are_refused(shared: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=re.escape("prompts[0]: messages")):
        shared.chat(messages)


def test_a_chat_takes_a_template_of_the_caller(shared: LLM) -> None:
    chat = [{"role": "user", "content": "def f"}]
    output = shared.chat(chat, SHORT, chat_template="{{ messages[0].content }}(n):")[0]
    assert list(output.prompt_token_ids) == shared._codec.encode_rendered("def f(n):")
    with pytest.raises(InvalidRequest, match=re.escape("prompts[0]: chat_template: is not a valid Jinja template")):
        shared.chat(chat, SHORT, chat_template="{% for %}")


def test_a_request_that_fits_the_model_but_not_the_cache_is_refused() -> None:
    with small(DEMO_MODEL, kv_cache_memory="1MiB") as llm:
        prompts: list[str | Sequence[int]] = ["a", [5] * 200]
        with pytest.raises(InvalidRequest, match=r"prompts\[1\]: has 200 tokens; demo_model takes at most \d+"):
            llm.generate(prompts, SHORT)
        assert num_lookups(llm) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seq": 3}, "unknown setting 'max_num_seq' (did you mean max_num_seqs?)"),
        ({"port": 80}, "unknown setting 'port'"),
        ({"block_size": 0}, "block_size 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens 0"),
    ],
)
def test_wrong_settings_are_named(settings: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(DEMO_MODEL, **settings)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        LLM(tmp_path / "nothing")


def test_nothing_to_do_and_a_closed_model(tiny: Path) -> None:
    llm = small(tiny)
    assert llm.generate([]) == []
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("x")


def test_a_request_that_fails_leaves_the_others_their_results(shared: LLM) -> None:
    looping = SamplingParams(
        temperature=0.0, max_tokens=50, logit_bias={40: 100.0}, repetition_detection=RepetitionDetection(1, 1, 5)
    )
    expected = shared.generate("def f(x):", SHORT)[0].outputs
    with pytest.raises(RequestsFailed, match="1 of 3 requests failed, first prompt 1") as caught:
        shared.generate(["def f(x):"] * 3, [SHORT, looping, SHORT])
    first, failed, last = caught.value.outputs
    assert isinstance(failed, RepetitiveOutput)
    assert isinstance(first, RequestOutput)
    assert isinstance(last, RequestOutput)
    assert first.outputs == last.outputs == expected


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Any) -> None:
    """Call `action` in the engine's thread before the step of this number from now on."""
    execute, steps = TorchModelRunner.execute_model, iter(range(number + 1))

    def counted(self: TorchModelRunner, decided: SchedulerOutput) -> ModelRunnerOutput:
        if next(steps, None) == number:
            action()
        return execute(self, decided)

    monkeypatch.setattr(TorchModelRunner, "execute_model", counted)


@pytest.mark.parametrize("async_scheduling", ["off", "on"])
def test_ctrl_c_ends_the_call_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, async_scheduling: Any
) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with small(tiny, async_scheduling=async_scheduling) as llm:
            expected = llm.generate("def f(x):", SHORT)
            at_step(monkeypatch, 5, lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["def f(x):", "class A:"], long)
            assert [one.outputs for one in llm.generate("def f(x):", SHORT)] == [one.outputs for one in expected]
            stats = llm._engine.scheduler.make_stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.free_blocks == stats.total_blocks
    finally:
        signal.signal(signal.SIGINT, before)


def test_outputs_count_the_drafts_of_their_prompt() -> None:
    loop = "one two three four one two three four one two three four one two"
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    config = '{"method": "ngram", "prompt_lookup_min": 2}'
    with small(DEMO_MODEL, speculative_config=config) as llm:
        drafted, plain = llm.generate([loop, loop], [greedy, replace(greedy, speculation=False)])
        total = llm.spec_decoding
    assert drafted.outputs == plain.outputs
    assert (plain.num_draft_tokens, plain.num_accepted_tokens) == (0, 0)
    assert (drafted.num_draft_tokens, drafted.num_accepted_tokens) == (
        total.num_draft_tokens,
        total.num_accepted_tokens,
    )
    assert drafted.num_accepted_tokens > 0


def test_the_death_of_the_engine_is_reported_each_time(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    with small(tiny) as llm:
        # The scheduler itself, since an error of the runner fails one step's requests and no more.
        monkeypatch.setattr(llm._engine.scheduler, "schedule", lambda: 1 / 0)
        for _ in range(2):
            with pytest.raises(EngineFault, match="the engine died: ZeroDivisionError"):
                llm.generate("x", SHORT)


def test_parameters_are_those_of_a_client() -> None:
    of_no_output = {
        "prompt",
        "prompt_embeds",
        "images",
        "request_id",
        "model",
        "priority",
        "min_priority",
        "cache_salt",
        "tenant",
        "traceparent",
        "call",
        "pooling",
        "shown_tokens",
        "is_parsed",
        "delivery",
        "reasoning",
        "schemas",
        "constraint_field",
        "audio",
    }
    of_no_output |= {"ttft_slo_ms", "tpot_slo_ms", "service_class", "weight", "is_further_part"}
    assert {one.name for one in fields(SamplingParams)} == {one.name for one in fields(GenerateRequest)} - of_no_output


def test_settings_are_those_of_nodes_that_concern_the_engine() -> None:
    of_clusters = {"host", "cluster", "api_keys", "allowed_hosts", "insecure", "metrics_port", "drain_s", "runner"}
    of_clusters |= {
        "pair_across_numerics",
        "kv_digests",
        "on_transfer_failure",
        "kv_stall_s",
        "kv_unclaimed_s",
        "orphan_grace_s",
    }
    of_priorities = {"scheduling_policy", "priority_ageing_s", "lora_dir"}
    of_images = {"num_encoder_rows"}  # offline prompts have none
    others = of_clusters | of_priorities | of_images | {"model"}
    assert EngineSettings.__annotations__.keys() == NodeSettings.model_fields.keys() - others


@pytest.mark.parametrize(
    ("setting", "named"),
    [({"quantization": "int8"}, "/int8"), ({"kv_cache_dtype": "int8"}, "/kv-int8")],
    ids=["weights", "cache"],
)
def test_weights_and_the_cache_can_be_quantised(tiny: Path, setting: dict[str, Any], named: str) -> None:
    with small(tiny, **setting) as llm:
        [result] = llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)
        assert result.outputs[0].token_ids
        assert named in llm._engine.description.numerics


def test_a_quantised_checkpoint_can_be_dequantised(tmp_path: Path) -> None:
    write_quantized_model(tmp_path / "gptq", "llama", PACKED_FORMATS["gptq-int4"])
    with small(tmp_path / "gptq", dequantize=True) as llm:
        assert "/dequantized" in llm._engine.description.numerics
        assert llm.generate([[1, 2, 3]], SHORT, use_tqdm=False)


def test_the_bar_is_shown_on_a_terminal_only() -> None:
    for is_wanted, is_terminal, is_shown in [(True, True, True), (True, False, False), (False, True, False)]:
        written = io.StringIO()
        with progress_bar(3, is_wanted=is_wanted, console=Console(file=written, force_terminal=is_terminal)) as move:
            move(3, 40)
        assert ("3/3" in written.getvalue() and "40 tokens" in written.getvalue()) is is_shown
        assert bool(written.getvalue()) is is_shown


def test_importing_baton_loads_nothing_until_it_is_used() -> None:
    program = """
import sys, baton
assert not {"torch", "pydantic", "rich", "router", "baton.offline"} & sys.modules.keys()
assert baton.SamplingParams(seed=1).seed == 1 and "torch" not in sys.modules
try:
    baton.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "module 'baton' has no attribute 'nothing'\n"


def test_the_programs_of_the_page_run(capfd: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "offline.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(programs) >= 2
    for program in programs:
        exec(compile(program, "docs/offline.md", "exec"), {})  # noqa: S102
    assert capfd.readouterr().out


def test_a_gguf_file_is_taken_as_the_command_line_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_module(tmp_path / "tiny model.gguf", random_module("llama", num_hidden_layers=1), "Q8_0")
    directory = find_model(file, os.environ).directory
    params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
    answers = []
    for named in (file, directory):
        with LLM(named, threads=1, kv_cache_memory="4MiB") as llm:
            answers.append(llm.generate([1, 2, 3], params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6
    (tmp_path / "bad.gguf").write_bytes(b"other")
    with pytest.raises(ConfigError, match="does not begin with GGUF"):
        LLM(tmp_path / "bad.gguf")


@pytest.fixture(scope="module")
def fibonacci(shared: LLM) -> RequestOutput:
    return shared.generate("def fibonacci(n):", SHORT)[0]


def check_refused(llm: LLM, prompts: Mapping[str, Any]) -> None:
    """Each is refused by its place beside a good one; the names say what is wrong."""
    for name, prompt in prompts.items():
        with pytest.raises(InvalidRequest) as refusal:
            llm.generate(["good", prompt], SHORT)
        assert refusal.value.field == "prompts[1]", name


def test_prompts_may_be_dictionaries_as_of_other_engines(shared: LLM, fibonacci: RequestOutput) -> None:
    text, ids = "def fibonacci(n):", list(fibonacci.prompt_token_ids)
    given: list[Any] = [
        {"prompt": text},
        {"prompt": ids},
        {"prompt_token_ids": ids, "prompt_embeds": None},
        {"prompt_token_ids": ids, "prompt": text},
    ]
    found = [*shared.generate(given, SHORT), *shared.generate(given[2], SHORT)]
    assert [one.outputs[0].token_ids for one in found] == [fibonacci.outputs[0].token_ids] * 5
    assert [list(one.prompt_token_ids) for one in found] == [ids] * 5
    assert [one.prompt for one in found] == [text, None, None, text, None]


def test_dictionaries_that_are_no_prompts_are_refused(shared: LLM) -> None:
    wrong = {
        "nothing": {},
        "no text": {"prompt": None},
        "no tokens": {"prompt_token_ids": []},
        "words": {"prompt_token_ids": "x"},
        "more": {"prompt_token_ids": [5, 6], "x": 1},
    }
    check_refused(shared, wrong)


def test_a_text_continues_its_prompt(tmp_path: Path) -> None:
    """The model's tokenizer has a decoder that leaves out the blank with which a text begins."""
    shutil.copytree(DEMO_MODEL, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], {"type": "Fuse"}, strip]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with small(tmp_path) as llm:
        blank = llm._codec.encode_rendered(" ")
        params = SamplingParams(max_tokens=2, allowed_token_ids=blank)
        (special,) = llm._codec.special_ids([tokenizer["added_tokens"][0]["content"]])
        prompts: list[str | list[int]] = ["def", [*blank, special]]
        found = llm.generate(prompts, params)
        assert [one.outputs[0].text for one in found] == ["  ", " "]


@pytest.fixture(scope="module")
def rows(fibonacci: RequestOutput) -> np.ndarray:
    table = load_file(DEMO_MODEL / "model.safetensors")["model.embed_tokens.weight"].float().numpy()
    return np.asarray(table[list(fibonacci.prompt_token_ids)])


def test_rows_of_numbers_may_stand_in_place_of_tokens(shared: LLM, fibonacci: RequestOutput, rows: np.ndarray) -> None:
    ids = list(fibonacci.prompt_token_ids)
    file = save({"x": torch.from_numpy(rows[:3]).half()})
    given: list[Any] = [
        {"prompt_embeds": rows},
        {"prompt_embeds": rows.tolist()[:5], "prompt": ids[5:]},
        {"prompt_embeds": torch.from_numpy(rows[:1]), "prompt": ids[1:]},
        {"prompt_embeds": file, "prompt": ids[3:]},
    ]
    found = shared.generate(given, SHORT)
    assert [one.outputs[0].token_ids for one in found[:3]] == [fibonacci.outputs[0].token_ids] * 3
    assert [len(one.prompt_token_ids) for one in found] == [len(ids)] * 4


def test_rows_that_are_no_numbers_of_the_model_are_refused(shared: LLM, rows: np.ndarray) -> None:
    wrong = {
        "more": {"prompt_embeds": rows, "image": 1},
        "another width": {"prompt_embeds": rows[:, :-1]},
        "words": {"prompt_embeds": "words"},
        "bfloat16": {"prompt_embeds": torch.from_numpy(rows).bfloat16()},
        "NaN": {"prompt_embeds": rows * np.nan},
        "a number": {"prompt_embeds": rows, "prompt": 5},
    }
    check_refused(shared, wrong)
    with pytest.raises(InvalidRequest, match="prompt_embeds: is for generated text alone"):
        shared.embed({"prompt_embeds": rows})
