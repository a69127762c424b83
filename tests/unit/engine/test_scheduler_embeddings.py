"""Requests for embeddings in the engine: they are scheduled like prompts and end with their last chunk."""

from __future__ import annotations

import pytest

from baton.engine.batch import ModelRunnerOutput
from baton.engine.request import Request
from baton.messages.node import Leg, Outcome
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from tests.doubles.fake_runner import expected_embedding
from tests.support.engine_rig import EngineRig, prompt_of
from tests.support.executors import Ahead, executor_for


def embedding(rig: EngineRig, request_id: str) -> bytes:
    assert rig.reason(request_id) is Outcome.STOP, rig.ends.get(request_id)
    assert rig.tokens[request_id] == []
    return rig.ends[request_id].embedding


@pytest.mark.parametrize("ahead", ["no", "late", "early"])
def test_embeddings_are_computed_in_chunks_beside_streams(ahead: Ahead) -> None:
    rig = EngineRig(max_num_batched_tokens=8, executor=executor_for(ahead))
    rig.add("stream", 3, max_tokens=40)
    rig.add("short", 1, leg=Leg.EMBED)
    rig.complete("long", 30, leg=Leg.EMBED)
    for name in ("short", "long"):
        assert embedding(rig, name) == expected_embedding(rig.submitted(name))
    assert rig.tokens["stream"] == rig.expected("stream", 40)
    ends = [request_id for kind, request_id, _ in rig.events() if kind == "finished"]
    assert ends == ["short", "long", "stream"]
    assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1


def test_an_embedding_ends_with_its_last_chunk_and_frees_its_blocks() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.add("e", 13, leg=Leg.EMBED)
    assert rig.step() == []
    (output,) = rig.step()
    assert (output.embedding, output.new_token_ids) == (expected_embedding(prompt_of(13)), [])
    assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1
    assert [kind for kind, _, _ in rig.events()][-2:] == ["first_token", "finished"]


def test_an_embeddings_prompt_is_cached_except_for_its_last_token(rig: EngineRig) -> None:
    prompt = prompt_of(16)
    rig.complete("first", prompt, leg=Leg.EMBED)
    rig.add("again", prompt, leg=Leg.EMBED)
    rig.complete("stream", [*prompt, 7], max_tokens=5)
    assert embedding(rig, "first") == embedding(rig, "again") == expected_embedding(prompt)
    assert rig.ends["again"].num_cached_tokens == 12
    assert rig.ends["stream"].num_cached_tokens == 16


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_embedding_is_resumed(mode: str) -> None:
    rig = EngineRig(num_blocks=13, max_num_batched_tokens=8, num_host_blocks=20, preemption_mode=mode)
    rig.begin("stream", 8, max_tokens=40)
    rig.complete("e", 36, leg=Leg.EMBED)
    assert rig.scheduler.make_stats().num_preemptions_by_mode[mode] > 0
    assert embedding(rig, "e") == expected_embedding(rig.submitted("e"))
    assert rig.tokens["stream"] == rig.expected("stream", 40)


def test_an_embedding_aborted_in_mid_prompt_frees_its_blocks() -> None:
    rig = EngineRig(max_num_batched_tokens=8)
    rig.begin("e", 30, leg=Leg.EMBED)
    (output,) = rig.abort("e")
    assert (output.outcome, output.embedding) == (Outcome.ABORTED, b"")
    assert rig.scheduler.make_stats().free_blocks == rig.config.num_blocks - 1


def test_an_embeddings_prompt_may_have_the_models_maximum_length() -> None:
    rig = EngineRig(max_model_len=20)
    rig.add("whole", 20, leg=Leg.EMBED)
    rig.complete("longer", 21, leg=Leg.EMBED)
    assert embedding(rig, "whole") == expected_embedding(rig.submitted("whole"))
    assert rig.reason("longer") is Outcome.IGNORED


def test_an_embedding_that_the_runner_does_not_return_fails_alone(rig: EngineRig) -> None:
    rig.add("e", 5, leg=Leg.EMBED)
    rig.add("stream", 5, max_tokens=3)
    output = rig.scheduler.schedule()
    computed = rig.runner.execute_model(output)
    rig.commit(output, ModelRunnerOutput(computed.sampled_token_ids))
    assert rig.ends["e"].error == "the runner returned no embedding"
    rig.run_right("stream")


@pytest.mark.parametrize("changes", [{"n": 2}, {"beam_width": 2}])
def test_an_embedding_request_has_one_sequence_and_no_output_tokens(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="an embedding leg has a prompt"):
        Request("e", RequestSpec([1], SamplingParams(**changes)), leg=Leg.EMBED)  # type: ignore[arg-type]
