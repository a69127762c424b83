"""The encoder cache: prompts are cut before inputs without rows, held rows stay, and room is never exceeded."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from baton.engine.encoder_cache import EncoderCache, EncoderInput
from baton.messages.spans import EncoderContent


def of(name: str, start: int, stop: int, num_rows: int) -> EncoderInput:
    return EncoderInput(EncoderContent(name), start, stop, num_rows)


def to_encode(cache: EncoderCache) -> list[str]:
    return [each.digest for each in cache.take_inputs_to_encode()]


A = of("a", 10, 14, 4)
B = of("b", 20, 26, 4)
"""Two positions between its rows are text."""


def test_a_prompt_is_computed_up_to_an_input_until_its_rows_are_there() -> None:
    cache = EncoderCache(8)
    assert cache.hold_for_chunk("r", [A, B], 0, 30) == 10
    assert to_encode(cache) == ["a", "b"]
    assert cache.hold_for_chunk("r", [A, B], 10, 20) == 0
    cache.encoded("a")
    assert cache.hold_for_chunk("r", [A, B], 10, 20) == 10
    cache.encoded("b")
    assert cache.hold_for_chunk("r", [A, B], 20, 10) == 10
    assert to_encode(cache) == []
    assert (cache.num_encoded, cache.num_hits) == (2, 0)


def test_whoever_follows_the_cache_knows_which_rows_are_there() -> None:
    there: list[str] = []
    cache = EncoderCache(8, lambda digest, is_there: there.append(digest) if is_there else there.remove(digest))
    cache.hold_for_chunk("r", [A, B], 0, 30)
    assert there == []
    cache.encoded("a")
    cache.encoded("b", is_fetched=True)
    assert there == cache.ready_digests == ["a", "b"]
    assert (cache.num_encoded, cache.num_fetched) == (1, 1)
    cache.hold_for_chunk("s", [of("c", 0, 4, 4)], 0, 4)
    assert there == ["b"]
    cache.failed("c")
    cache.drop("s", [of("c", 0, 4, 4)])
    assert there == cache.ready_digests == ["b"]


def test_tokens_behind_all_inputs_need_none() -> None:
    cache = EncoderCache(8)
    assert cache.hold_for_chunk("r", [A, B], 26, 4) == 4
    assert to_encode(cache) == []


def test_a_chunk_may_end_within_an_input() -> None:
    cache = EncoderCache(4)
    cache.hold_for_chunk("r", [A], 10, 4)
    cache.encoded("a")
    assert cache.hold_for_chunk("r", [A], 10, 2) == 2
    cache.computed("r", [A], 12)
    other = of("b", 0, 4, 4)
    assert cache.hold_for_chunk("s", [other], 0, 4) == 0
    assert cache.take_evicted() == []
    cache.computed("r", [A], 14)
    assert cache.hold_for_chunk("s", [other], 0, 4) == 0
    assert cache.take_evicted() == ["a"]
    assert to_encode(cache) == ["a", "b"]


def test_a_second_request_with_the_same_content_needs_no_encoder() -> None:
    cache = EncoderCache(4)
    cache.hold_for_chunk("r", [A], 0, 20)
    cache.encoded("a")
    assert cache.hold_for_chunk("r", [A], 0, 20) == 20
    assert cache.hold_for_chunk("s", [of("a", 0, 4, 4)], 0, 20) == 20
    cache.computed("r", [A], 20)
    cache.computed("s", [of("a", 0, 4, 4)], 20)
    assert cache.hold_for_chunk("t", [A], 0, 20) == 20
    cache.drop("t", [A])
    assert cache.hold_for_chunk("t", [A], 0, 20) == 20
    cache.computed("t", [A], 20)
    assert to_encode(cache) == ["a"]
    assert (cache.num_encoded, cache.num_hits) == (1, 2)


def test_a_content_that_a_prompt_has_twice_leaves_its_room_to_what_lies_between() -> None:
    cache = EncoderCache(4)
    inputs = [A, B, of("a", 30, 34, 4)]
    encoded = []
    computed = 0
    while computed < 40:
        computed += cache.hold_for_chunk("r", inputs, computed, 40 - computed)
        cache.computed("r", inputs, computed)
        for digest in to_encode(cache):
            cache.encoded(digest)
            encoded.append(digest)
    assert encoded == ["a", "b", "a"]


def test_a_step_that_is_decided_ahead_keeps_what_it_needs() -> None:
    cache = EncoderCache(4)
    twice = [A, of("a", 14, 18, 4)]
    cache.hold_for_chunk("r", twice, 0, 30)
    cache.encoded("a")
    assert cache.hold_for_chunk("r", twice, 0, 14) == 14
    assert cache.hold_for_chunk("r", twice, 14, 10) == 10
    cache.computed("r", twice, 14)
    assert cache.hold_for_chunk("s", [B], 20, 6) == 0
    assert cache.take_evicted() == []
    cache.computed("r", twice, 24)
    assert cache.hold_for_chunk("s", [B], 20, 6) == 0
    assert cache.take_evicted() == ["a"]


def test_an_input_that_failed_leaves_its_room() -> None:
    cache = EncoderCache(4)
    cache.hold_for_chunk("r", [A], 0, 20)
    cache.failed("a")
    assert cache.num_used_rows == 0
    cache.encoded("a")
    assert cache.hold_for_chunk("s", [B], 20, 6) == 0
    assert to_encode(cache) == ["a", "b"]


def test_what_nobody_asks_for_any_more_is_not_encoded() -> None:
    cache = EncoderCache(8)
    cache.hold_for_chunk("r", [A, B], 0, 30)
    cache.hold_for_chunk("s", [B], 0, 30)
    cache.drop("r", [A, B])
    assert (to_encode(cache), cache.take_evicted(), cache.num_used_rows) == (["b"], ["a"], 4)
    cache.drop("s", [B])
    assert (cache.take_evicted(), cache.num_used_rows) == (["b"], 0)
    # Its encoding had begun.
    cache.encoded("b")
    assert (cache.take_evicted(), cache.num_used_rows) == (["b"], 0)


def test_a_request_that_gives_way_still_wants_its_inputs() -> None:
    cache = EncoderCache(8)
    cache.hold_for_chunk("r", [A], 0, 20)
    cache.release("r", [A])
    assert to_encode(cache) == ["a"]
    assert cache.failed("a") == {"r"}


def test_what_is_too_large_for_the_cache_is_known_before() -> None:
    assert EncoderCache(4).can_ever_hold([A, B])
    assert not EncoderCache(3).can_ever_hold([A])
    assert not EncoderCache(0).can_ever_hold([A])
    assert EncoderCache(0).can_ever_hold([])


class _Prompt:
    def __init__(self, name: str, inputs: Sequence[EncoderInput], length: int) -> None:
        self.name, self.inputs, self.length, self.computed = name, inputs, length, 0
        self.in_flight: list[int] = []


@pytest.mark.parametrize("seed", range(60))
def test_all_prompts_are_computed_whatever_comes_first(seed: int) -> None:
    """With steps that overlap, preemptions and failures. Room is never exceeded, and no step lacks rows."""
    rng = Random(seed)
    cache = EncoderCache(rng.choice([4, 6, 12]))
    sizes = {name: rng.randint(1, 4) for name in "abcdef"}
    prompts = []
    for number in range(5):
        inputs, place = [], rng.randint(0, 3)
        for name in rng.choices("abcdef", k=rng.randint(1, 4)):
            length = sizes[name] + rng.randint(0, 2)
            inputs.append(of(name, place, place + length, sizes[name]))
            place += length + rng.randint(0, 3)
        prompts.append(_Prompt(f"r{number}", inputs, place + rng.randint(1, 4)))
    held: dict[str, None] = {}
    encoding: list[str] = []
    for _ in range(4000):
        for digest in cache.take_evicted():
            held.pop(digest, None)
        for digest in to_encode(cache):
            assert digest not in held
            encoding.append(digest)
        assert sum(sizes[name] for name in cache.digests) == cache.num_used_rows <= cache.num_rows
        assert set(held) <= set(cache.digests)
        waiting = [prompt for prompt in prompts if prompt.computed < prompt.length]
        if not waiting:
            break
        if encoding and rng.random() < 0.4:
            digest = encoding.pop(rng.randrange(len(encoding)))
            if rng.random() < 0.1:
                cache.failed(digest)
            else:
                held[digest] = None
                cache.encoded(digest)
            continue
        prompt = rng.choice(waiting[:3])
        begun = prompt.computed + sum(prompt.in_flight)
        if rng.random() < 0.05:
            prompt.computed, prompt.in_flight = 0, []
            cache.release(prompt.name, prompt.inputs)
        elif rng.random() < 0.02:
            cache.drop(prompt.name, prompt.inputs)
            prompt.computed = prompt.length
        elif prompt.in_flight and rng.random() < 0.6:
            prompt.computed += prompt.in_flight.pop(0)
            cache.computed(prompt.name, prompt.inputs, prompt.computed)
        elif begun < prompt.length:
            count = cache.hold_for_chunk(
                prompt.name, prompt.inputs, begun, min(rng.randint(1, 9), prompt.length - begun)
            )
            needed = {each.digest for each in prompt.inputs if each.start < begun + count and each.stop > begun}
            for digest in cache.take_evicted():
                held.pop(digest, None)
            assert count == 0 or needed <= held.keys()
            if count:
                prompt.in_flight.append(count)
    else:
        pytest.fail("the prompts were not computed")
