"""Digests of blocks, which a receiver compares: each is computed once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
import xxhash

from baton.config import KVDigests
from baton.engine.request import Request
from baton.engine.runner import KVLayout, KVMemory, LayerGeometry, LayerGroup
from baton.messages.ids import AttemptKey
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.runner.backends.cpu.kernel_file import KernelsUnavailable
from baton.runner.blocks import block_digests as block_digests_module
from baton.runner.blocks import device_blocks
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.digests import AskedDigests, BlockName, LazyInbox, OfferedDigests, block_names, digest_every
from kv_transfer.link.link_messages import SAMPLE_EVERY, is_digested
from kv_transfer.piece_plan import PiecePlan, ReadRange

LAYOUT = KVLayout.uniform(4, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32")


def memory_of(content: bytes, block_bytes: int) -> KVMemory:
    owner = ctypes.create_string_buffer(content, len(content))
    return KVMemory(ctypes.addressof(owner), len(content) // block_bytes, block_bytes, "DRAM", 0, owner)


class CountingDigests:
    """Computes digests of numbers that a test can change, and notes which were asked for."""

    def __init__(self) -> None:
        self.content = dict(enumerate(range(100, 140)))
        self.asked: list[int] = []

    def __call__(self, block_ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        self.asked += block_ids
        return [self.content[block_id] for block_id in block_ids]


def request_with_keys(num_tokens: int, num_keys: int, num_cached_tokens: int = 0) -> Request:
    request = Request("r", RequestSpec(list(range(num_tokens)), SamplingParams()))
    request.block_hashes = [bytes([index]) * 32 for index in range(num_keys)]
    request.num_cached_tokens = num_cached_tokens
    return request


def expected(content: bytes, block_bytes: int) -> list[int]:
    starts = range(0, len(content), block_bytes)
    return [xxhash.xxh3_64_intdigest(content[start : start + block_bytes]) for start in starts]


SIZES = [1, 16, 64, 240, 241, 255, 256, 257, 320, 512, 1023, 1024, 1025, 1088, 1089, 2048, 2049, 8192, 100_003]


@pytest.mark.parametrize("block_bytes", SIZES)
@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "library"])
def test_a_digest_is_xxh3_of_the_blocks_bytes(
    block_bytes: int, with_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernels:
        monkeypatch.setattr(block_digests_module, "open_kernels", no_kernels)
    content = Random(block_bytes).randbytes(5 * block_bytes)
    digests = block_digests(memory_of(content, block_bytes))
    assert digests([4, 0, 3]) == [expected(content, block_bytes)[block] for block in (4, 0, 3)]
    assert digests([]) == []


def no_kernels() -> ctypes.CDLL:
    raise KernelsUnavailable("not built")


@pytest.mark.parametrize("block_bytes", [64, 1500])
def test_every_bit_counts(block_bytes: int) -> None:
    memory = memory_of(bytes(2 * block_bytes), block_bytes)
    digests = block_digests(memory)
    [clean] = digests([1])
    for bit in range(8 * block_bytes):
        memory.owner[block_bytes + bit // 8] = bytes([1 << bit % 8])
        assert digests([1]) != [clean]
        memory.owner[block_bytes + bit // 8] = b"\0"
    assert digests([1]) == [clean]


def test_blocks_of_a_device_are_copied_to_the_host_first() -> None:
    cache = torch.randn(40, 3, 100)
    memory = KVMemory(1, 40, 1200, "VRAM", 0, cache)  # nothing lies at its address
    content = cache.numpy().tobytes()
    asked = [*range(39, 4, -1), 7]
    assert block_digests(memory)(asked) == [expected(content, 1200)[block] for block in asked]
    assert block_digests(memory)([]) == []


def test_an_inbox_wakes_its_loop_only_for_items_that_are_awaited() -> None:
    woken: list[bool] = []
    collected: list[int] = []
    inbox = LazyInbox[int](lambda: woken.append(True))
    inbox.add(0)
    inbox.collect(collected.append, lambda: True)
    assert (woken, collected) == ([], [0])
    inbox.add(1)
    assert woken == [True]
    inbox.collect(collected.append, lambda: False)
    inbox.add(2)
    assert (woken, collected) == ([True], [0, 1])


def test_an_item_that_comes_just_before_it_is_awaited_is_not_missed() -> None:
    collected: list[int] = []
    inbox = LazyInbox[int](lambda: None)

    def asked_while_it_is_found() -> bool:
        inbox.add(7)
        return True

    inbox.collect(collected.append, asked_while_it_is_found)
    assert collected == [7]


@pytest.mark.parametrize(("setting", "every"), [("on", 1), ("sampled", SAMPLE_EVERY), ("off", 0)])
def test_how_many_blocks_have_a_digest(setting: KVDigests, every: int) -> None:
    assert digest_every(setting) == every


def test_a_sample_is_one_block_in_so_many_and_differs_between_flights() -> None:
    places = range(3 * SAMPLE_EVERY)
    for flight in (0, 5, 2**64 - 1):
        assert sum(is_digested(AttemptKey("r", 1, flight), place, SAMPLE_EVERY) for place in places) == 3
    flights = range(SAMPLE_EVERY)
    assert all(any(is_digested(AttemptKey("r", 1, f), place, SAMPLE_EVERY) for f in flights) for place in places)
    assert all(is_digested(AttemptKey("r", 1, 9), place, 1) for place in places)
    assert not any(is_digested(AttemptKey("r", 1, 9), place, 0) for place in places)


def offer(
    digests: OfferedDigests, request: Request, first: int, block_ids: Sequence[int], layout: KVLayout = LAYOUT
) -> Sequence[int]:
    return digests.digests_of(block_ids, block_names(request, layout, first, len(block_ids)))


def test_a_cached_block_keeps_the_digest_it_was_computed_with() -> None:
    digest = CountingDigests()
    offered = OfferedDigests(digest)
    assert offer(offered, request_with_keys(10, 2), 0, (5, 6, 7)) == [105, 106, 107]
    digest.content[5] = 0  # damaged in memory
    digest.asked.clear()
    assert offer(offered, request_with_keys(10, 2, num_cached_tokens=8), 0, (5, 6, 9)) == [105, 106, 109]
    assert digest.asked == [9]


def test_a_block_that_is_computed_again_has_a_new_digest() -> None:
    digest = CountingDigests()
    offered = OfferedDigests(digest)
    request = request_with_keys(10, 2)
    offer(offered, request, 0, (5, 6, 7))
    digest.content[5] = 55
    assert offer(offered, request, 0, (5, 6, 7))[0] == 55


def test_a_block_with_another_key_is_another_block() -> None:
    digest = CountingDigests()
    offered = OfferedDigests(digest)
    offer(offered, request_with_keys(10, 2), 0, (5, 6, 7))
    digest.content[6] = 66
    other = request_with_keys(10, 2, num_cached_tokens=8)
    other.block_hashes[1] = b"x" * 32
    assert offer(offered, other, 0, (5, 6)) == [105, 66]


def test_without_keys_every_digest_is_computed() -> None:
    digest = CountingDigests()
    offered = OfferedDigests(digest)
    for _ in range(2):
        offer(offered, request_with_keys(10, 0, num_cached_tokens=8), 0, (5, 6))
    assert digest.asked == [5, 6, 5, 6]


def test_digests_of_all_groups_are_asked_for_before_the_first_is_waited_for() -> None:
    steps: list[tuple[str, int]] = []

    def ask(ids: Sequence[int], division: Division) -> Callable[[], Sequence[int]]:
        steps.append(("asked", division.group))

        def wait() -> Sequence[int]:
            steps.append(("waited", division.group))
            return [each + 100 * division.group for each in ids]

        return wait

    digests = AskedDigests(ask)
    names = [BlockName(b"", False, group) for group in (0, 1, 0)]
    assert OfferedDigests(digests).digests_of([5, 6, 7], names) == [5, 106, 7]
    assert [step for step, _ in steps] == ["asked", "asked", "waited", "waited"]
    assert list(digests([3], Division(1, 2))) == [203]


def test_of_several_groups_each_block_has_its_own() -> None:
    layers = (LayerGeometry(1, 2, 2),) * 2
    layout = KVLayout(4, layers, "float32", (LayerGroup((0,)), LayerGroup((1,), 4)))
    digest = CountingDigests()
    offered = OfferedDigests(digest)
    assert offer(offered, request_with_keys(10, 2), 0, (5, 0, 6, 7), layout) == [105, 0, 106, 107]
    assert offer(offered, request_with_keys(10, 2, num_cached_tokens=8), 2, (6, 7), layout) == [106, 107]
    assert digest.asked == [5, 6, 7]


@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "library"])
@pytest.mark.parametrize("heads", [1, 40])
def test_a_digest_is_the_sum_over_the_layers_of_a_blocks_group(
    with_kernels: bool, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernels:
        monkeypatch.setattr(block_digests_module, "open_kernels", no_kernels)
    layers = (LayerGeometry(heads, 2, 3), LayerGeometry(heads, 4, 0), LayerGeometry(heads, 2, 3))
    layout = KVLayout(4, layers, "bfloat16", (LayerGroup((0, 2)), LayerGroup((1,), 8)))
    size = 4 * heads * 5 * 2
    assert layout.block_bytes == 2 * size
    content = Random(heads).randbytes(3 * layout.block_bytes)
    digests = block_digests(replace(memory_of(content, layout.block_bytes), layout=layout))
    blocks = [content[at : at + 2 * size] for at in range(0, len(content), 2 * size)]
    xxh3, short = xxhash.xxh3_64_intdigest, 4 * heads * 4 * 2
    assert digests([2, 0]) == [(xxh3(b[:size]) + 5 * xxh3(b[size:])) % (1 << 64) for b in (blocks[2], blocks[0])]
    # The end of a block of the smaller group is in no digest.
    assert digests([1], Division(1, 1)) == [3 * xxh3(blocks[1][:short]) % (1 << 64)]
    assert digests([1], Division(1, 0, range(1, 3))) == [5 * xxh3(blocks[1][size:]) % (1 << 64)]
    assert digests([1, 2], Division(1, 1, range(2, 3))) == [0, 0]
    exchanged = b"".join(block[size:] + block[:size] for block in blocks)
    others = block_digests(replace(memory_of(exchanged, layout.block_bytes), layout=layout))
    assert not set(others([0, 1, 2])) & set(digests([0, 1, 2]))


@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "library"])
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("heads", [1, 40])
def test_a_part_has_the_digest_of_a_whole_block_of_so_few_tokens(
    with_kernels: bool, parts: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernels:
        monkeypatch.setattr(block_digests_module, "open_kernels", no_kernels)
    groups = (LayerGroup((0, 1)), LayerGroup((2,), 4))
    large = KVLayout(8, (LayerGeometry(heads, 2, 3),) * 3, "int8", groups)
    small = replace(large, block_size=8 // parts)
    content = Random(parts).randbytes(3 * large.block_bytes)
    memory = replace(memory_of(content, large.block_bytes), layout=large)
    for group in range(2):
        # The same tokens, as a node with small blocks has them.
        pieces = PiecePlan.between(small, 8).pieces([ReadRange(0, 0, 3 * parts, group)])
        moved = bytearray(len(content))
        for to, at, length in zip(pieces.local, pieces.remote, pieces.lengths, strict=True):
            moved[to : to + length] = content[at : at + length]
        of_small = replace(memory_of(bytes(moved), small.block_bytes), layout=small)
        expected_digests = block_digests(of_small)(range(3 * parts), Division(1, group))
        asked = [2 * parts + 1, 0, *range(3 * parts)]
        found = block_digests(memory)(asked, Division(parts, group))
        assert found == [expected_digests[each] for each in asked]
    with pytest.raises(ValueError, match="layout of this memory is not known"):
        block_digests(memory_of(content, large.block_bytes))([0], Division(2))


def test_parts_are_digested_by_group_and_again_for_more_parts() -> None:
    layout = KVLayout(4, (LayerGeometry(1, 2, 2),) * 2, "float32", (LayerGroup((0,)), LayerGroup((1,), 4)))
    asked: list[tuple[tuple[int, ...], Division]] = []

    def digest(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        asked.append((tuple(ids), division))
        return [1000 * division.group + each for each in ids]

    offered, cached = OfferedDigests(digest), request_with_keys(10, 2, num_cached_tokens=8)
    names = block_names(cached, layout, 0, 4)
    assert offered.digests_of((5, 6, 0, 7), names, 2) == [10, 11, 1012, 1013, 0, 0, 1014, 1015]
    assert sorted(asked) == [((10, 11), Division(2, 0)), ((12, 13, 14, 15), Division(2, 1))]
    asked.clear()
    assert offered.digests_of((5, 6, 0, 7), names, 2) == [10, 11, 1012, 1013, 0, 0, 1014, 1015]
    assert asked == []
    assert offered.digests_of((5,), names[:1], 4) == [20, 21, 22, 23]
    assert offered.digests_of((5,), names[:1]) == [5]


def test_a_cached_block_keeps_all_its_digests_whichever_reader_comes() -> None:
    content = {Division(): 100, Division(2): 200}
    asked: list[Division] = []

    def digest(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
        asked.append(division)
        return [content[division]] * len(ids)

    offered, request = OfferedDigests(digest), request_with_keys(4, 1, num_cached_tokens=4)
    names = block_names(request, LAYOUT, 0, 1)
    assert offered.digests_of((5,), names) == [100]
    assert offered.digests_of((5,), names, 2) == [200, 200]
    asked.clear()
    content.update({Division(): 1, Division(2): 2})  # damaged in memory
    assert [offered.digests_of((5,), names), offered.digests_of((5,), names, 2)] == [[100], [200, 200]]
    assert asked == []


def test_a_cached_block_that_was_damaged_gets_no_digests_for_another_reader() -> None:
    content = [100]
    offered = OfferedDigests(lambda ids, division=WHOLE, /: content * len(ids))
    names = block_names(request_with_keys(4, 1, num_cached_tokens=4), LAYOUT, 0, 1)
    assert offered.digests_of((5,), names) == [100]
    content[0] = 1
    for _ in range(2):
        with pytest.raises(ValueError, match="block 5 does not hold any more what was computed"):
            offered.digests_of((5,), names, 2)
    assert offered.digests_of((5,), names) == [100]


def test_a_block_of_a_device_is_copied_once_for_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout(8, (LayerGeometry(5, 4, 4),) * 3, "float32")
    cache = torch.randn(40, layout.block_elements)
    memory = KVMemory(1, 40, layout.block_bytes, "VRAM", 0, cache, layout=layout)
    copied: list[int] = []
    copied_to_host = device_blocks.copied_to_host

    def noting(memory: KVMemory) -> Callable[[Sequence[int]], KVMemory]:
        copy = copied_to_host(memory)

        def noted(blocks: Sequence[int]) -> KVMemory:
            copied.extend(blocks)
            return copy(blocks)

        return noted

    monkeypatch.setattr(device_blocks, "copied_to_host", noting)
    block_digests(memory)([*range(8, 160)], Division(4))
    assert copied == [*range(2, 40)]


def test_parts_of_blocks_of_a_device_are_copied_to_the_host_first() -> None:
    layout = KVLayout(8, (LayerGeometry(5, 4, 4),) * 3, "float32")
    cache = torch.randn(40, layout.block_elements)
    content = cache.numpy().tobytes()
    memory = KVMemory(1, 40, layout.block_bytes, "VRAM", 0, cache, layout=layout)  # nothing lies at its address
    on_host = block_digests(replace(memory_of(content, layout.block_bytes), layout=layout))
    asked = [*range(79, 9, -1), 3]
    assert block_digests(memory)(asked, Division(2)) == on_host(asked, Division(2))
