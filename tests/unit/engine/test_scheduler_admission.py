"""Admission: which requests are admitted, which may pass others, and when the engine may sleep."""

from __future__ import annotations

from baton.engine.request import RequestStatus
from baton.messages.node import Leg, Outcome
from tests.support.engine_rig import EngineRig


def running(rig: EngineRig) -> list[str]:
    return [name for name, request in rig.requests.items() if request.status is RequestStatus.RUNNING]


def test_admission_allocates_the_whole_prompt_although_it_is_computed_in_chunks() -> None:
    """The pool holds one of two prompts, so the second one must not start."""
    rig = EngineRig(num_blocks=11, max_num_batched_tokens=8)
    rig.add("first", 28, max_tokens=4)
    rig.add("second", 28, max_tokens=4)
    for _ in range(4):
        rig.step()
        assert running(rig) == ["first"]
    rig.run_right("first", "second")
    assert rig.scheduler.make_stats().num_preemptions == 0


def test_smaller_requests_may_pass_a_stuck_one_a_bounded_number_of_times() -> None:
    rig = EngineRig(num_blocks=11, max_times_passed=2)
    rig.begin("holder", 16, max_tokens=12)
    rig.add("big", 32, max_tokens=1)
    for number in range(5):
        rig.add(f"small{number}", 2, max_tokens=2)
    rig.step()
    assert running(rig) == ["holder", "small0", "small1"], "two passed, the third may not"
    rig.run()
    ended = list(rig.ends)
    assert ended.index("big") < ended.index("small2")
    assert len(rig.ends) == 7


def test_the_number_of_times_passed_is_kept_over_steps() -> None:
    rig = EngineRig(num_blocks=11, max_times_passed=3)
    rig.begin("holder", 16, max_tokens=12)
    rig.add("big", 32, max_tokens=1)
    passed = []
    for number in range(6):
        rig.begin(f"small{number}", 2, max_tokens=1)
        passed += [name for name in rig.ends if name.startswith("small") and name not in passed]
        if rig.requests["holder"].is_finished:
            break
    assert passed == ["small0", "small1", "small2"]


def test_admission_looks_past_a_bounded_number_of_stuck_requests() -> None:
    rig = EngineRig(num_blocks=11, max_stuck_requests=2)
    rig.begin("holder", 16, max_tokens=12)
    for number in range(3):
        rig.add(f"big{number}", 32, max_tokens=1)
    rig.begin("small", 2, max_tokens=1)
    assert running(rig) == ["holder"]
    assert "small" not in rig.ends


def test_no_request_passes_a_preempted_one() -> None:
    rig = EngineRig(num_blocks=6)
    rig.add("old", 8, max_tokens=10)
    rig.add("new", 7, max_tokens=10)
    while rig.requests["new"].status is not RequestStatus.PREEMPTED:
        rig.step()
    rig.add("tiny", 1, max_tokens=1)
    while "old" not in rig.ends:
        assert "tiny" not in rig.ends
        rig.step()
    rig.run()
    assert list(rig.ends) == ["old", "tiny", "new"] or list(rig.ends) == ["old", "new", "tiny"]
    assert rig.tokens["new"] == rig.expected("new", 10)


def test_no_request_is_admitted_in_a_step_that_preempts() -> None:
    rig = EngineRig(num_blocks=6)
    rig.add("old", 8, max_tokens=10)
    rig.begin("new", 7, max_tokens=10)
    rig.add("tiny", 1, max_tokens=1)
    while rig.core.has_work():
        before = set(running(rig))
        output = rig.scheduler.schedule()
        if output.preempted_req_ids:
            assert set(running(rig)) <= before
        rig.commit(output)
    assert len(rig.ends) == 3


def test_new_requests_leave_the_watermark_free_while_others_run() -> None:
    rig = EngineRig(num_blocks=21, watermark=0.25)
    rig.begin("first", 40, max_tokens=4)
    rig.begin("second", 24, max_tokens=4)
    assert running(rig) == ["first"], "6 of the 9 free blocks would leave fewer than 5"
    rig.run()
    rig.complete("third", 76, max_tokens=1)
    assert rig.reason("third") is Outcome.LENGTH, "alone it may take nearly everything"


def test_without_chunked_prefill_a_prompt_waits_for_a_step_of_its_own() -> None:
    rig = EngineRig(max_num_batched_tokens=40, max_model_len=40, max_num_seqs=4, enable_chunked_prefill=False)
    rig.add("stream0", 4, max_tokens=12)
    rig.begin("stream1", 4, max_tokens=12)
    rig.add("whole", 39, max_tokens=1)
    waiting = rig.scheduler.schedule()
    assert waiting.num_scheduled_tokens == {"stream0": 1, "stream1": 1}
    rig.commit(waiting)
    own = rig.scheduler.schedule()
    assert own.num_scheduled_tokens == {"whole": 39}
    rig.commit(own)
    rig.run()
    for name, tokens in rig.tokens.items():
        assert tokens == rig.expected(name, len(tokens))
    assert len(rig.ends) == 3


def test_without_chunked_prefill_no_step_computes_more_of_prompts_than_it_may() -> None:
    rig = EngineRig(
        num_blocks=400, max_num_batched_tokens=100, max_model_len=100, max_num_seqs=200, enable_chunked_prefill=False
    )
    for number in range(6):
        rig.add(f"r{number}", 90, max_tokens=2)
    for _ in range(6):
        output = rig.scheduler.schedule()
        assert output.num_prefill_tokens == 90
        rig.commit(output)
    rig.run_right(*rig.requests)


def test_without_chunked_prefill_a_prompt_that_lacks_blocks_does_not_stop_others() -> None:
    rig = EngineRig(
        num_blocks=11, max_num_batched_tokens=41, max_model_len=64, max_num_seqs=4, enable_chunked_prefill=False
    )
    rig.begin("stream", 12, max_tokens=12)
    rig.add("whole", 40, max_tokens=1)
    for _ in range(11):
        assert "stream" in rig.scheduler.requests
        rig.step()
    assert rig.tokens["stream"] == rig.expected("stream", 12), "not one step was lost"
    rig.run()
    assert rig.reason("whole") is Outcome.LENGTH


def test_an_idle_engine_sleeps_and_a_request_wakes_it(rig: EngineRig) -> None:
    assert not rig.core.has_work()
    rig.add("r", 4, max_tokens=1)
    assert rig.core.has_work()
    rig.run()
    assert not rig.core.has_work()


def test_an_engine_whose_requests_all_wait_for_remote_kv_sleeps(rig: EngineRig) -> None:
    rig.add("r", 8, leg=Leg.DECODE, max_tokens=3)
    assert rig.core.has_work()
    rig.step()
    assert rig.scheduler.has_requests()
    assert not rig.core.has_work()
    rig.complete_transfer("r")
    assert rig.core.has_work()


def test_an_engine_whose_next_request_lacks_blocks_sleeps_until_some_are_released() -> None:
    rig = EngineRig(num_blocks=6)
    rig.begin("offered", 16, leg=Leg.PREFILL)
    assert rig.reason("offered") is Outcome.HANDED_OFF
    rig.begin("next", 16, max_tokens=1)
    assert running(rig) == []
    assert not rig.core.has_work()
    rig.transfer(released=["offered"])
    assert rig.core.has_work()
    rig.run_right("next")


def test_an_abort_of_the_first_waiting_request_wakes_the_engine() -> None:
    rig = EngineRig(num_blocks=6, max_times_passed=0)
    rig.begin("offered", 12, leg=Leg.PREFILL)
    rig.add("big", 16, max_tokens=1)
    rig.begin("small", 2, max_tokens=1)
    assert not rig.core.has_work()
    rig.abort("big")
    assert rig.core.has_work()
    rig.run()
    assert rig.reason("small") is Outcome.LENGTH


def test_a_prompt_whose_log_probabilities_are_wanted_is_always_cut() -> None:
    """The logits of a whole prompt would take too much memory, also where other prompts are not cut."""
    rig = EngineRig(num_blocks=200, enable_chunked_prefill=False, max_num_batched_tokens=600, max_model_len=600)
    rig.add("r", 500, max_tokens=3, prompt_logprobs=0)
    most = 0
    while rig.core.has_work():
        decided = rig.scheduler.schedule()
        most = max(most, decided.total_num_scheduled_tokens)
        rig.commit(decided)
    assert most == 128
    assert rig.tokens["r"] == rig.expected("r", 3)
