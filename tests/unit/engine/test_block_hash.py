"""Equal keys must mean equal KV: every field is part of a key, and the encoding is frozen."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.engine.request import Request
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.messages.spans import Span
from tests.doubles.fake_runner import FakeRunner

FIELDS = CacheKeyFields("model", "float32", "layout")
TOKENS = (1, 2, 3, 4)


def key(
    fields: CacheKeyFields = FIELDS,
    block_size: int = 4,
    tokens: tuple[int, ...] = TOKENS,
    salt: str = "",
    lora: str = "",
    images: tuple[str, ...] = (),
    kv_bits: str = "",
) -> bytes:
    hasher = BlockHasher(fields, block_size)
    return hasher.block_key(hasher.root(cache_salt=salt, lora_id=lora, kv_bits=kv_bits), tokens, images)


CHANGES: dict[str, Callable[[], bytes]] = {
    "model": lambda: key(CacheKeyFields("model2", "float32", "layout")),
    "dtype": lambda: key(CacheKeyFields("model", "bfloat16", "layout")),
    "layout": lambda: key(CacheKeyFields("model", "float32", "layout2")),
    "text moved between fields": lambda: key(CacheKeyFields("modelf", "loat32", "layout")),
    "block size": lambda: key(block_size=2, tokens=(1, 2)),
    "a token": lambda: key(tokens=(1, 2, 3, 5)),
    "order of tokens": lambda: key(tokens=(2, 1, 3, 4)),
    "salt": lambda: key(salt="tenant"),
    "lora": lambda: key(lora="tenant"),
    "other numerics": lambda: key(kv_bits="tenant"),
    "image": lambda: key(images=("a",)),
    "two images": lambda: key(images=("a", "b")),
    "images joined": lambda: key(images=("ab",)),
    "order of images": lambda: key(images=("b", "a")),
}


def test_the_same_fields_give_the_same_key() -> None:
    assert key() == key()
    assert len(key()) == 32


def test_every_changed_field_changes_the_key() -> None:
    keys = {name: change() for name, change in CHANGES.items()} | {"unchanged": key()}
    assert len(set(keys.values())) == len(keys), keys


def test_the_parent_changes_the_key() -> None:
    hasher = BlockHasher(FIELDS, 4)
    first = hasher.block_key(hasher.root(), TOKENS)
    assert hasher.block_key(first, TOKENS) != first


def test_the_encoding_of_keys_is_frozen() -> None:
    """Without a new FORMAT_VERSION, a changed encoding would let old and new processes confuse each other's keys."""

    def spelled(tag: bytes, payload: bytes) -> bytes:
        return tag + struct.pack("<I", len(payload)) + payload

    root = hashlib.sha256(
        spelled(b"V", struct.pack("<I", 1))
        + spelled(b"M", b"model")
        + spelled(b"D", b"float32")
        + spelled(b"L", b"layout")
        + spelled(b"B", struct.pack("<I", 4))
        + spelled(b"A", b"")
        + spelled(b"S", b"t")
    ).digest()
    block = spelled(b"P", root) + spelled(b"I", b"img") + spelled(b"T", struct.pack("<4I", *TOKENS))
    assert key(salt="t", images=("img",)) == hashlib.sha256(block).digest()


def test_a_partial_block_has_no_key() -> None:
    with pytest.raises(ValueError, match="full block of 4"):
        key(tokens=(1, 2, 3))


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), cut=st.integers(0, 40))
def test_a_chain_can_be_extended_in_any_pieces(tokens: list[int], cut: int) -> None:
    hasher = BlockHasher(FIELDS, 4)
    parent, one_by_one = hasher.root(cache_salt="s"), []
    for start in range(0, len(tokens) // 4 * 4, 4):
        parent = hasher.block_key(parent, tokens[start : start + 4])
        one_by_one.append(parent)

    request = Request("r", RequestSpec(tokens, SamplingParams(), cache_salt="s"))
    hasher.extend_request(request, min(cut, len(tokens)))
    assert request.block_hashes == one_by_one[: min(cut, len(tokens)) // 4]
    hasher.extend_request(request, len(tokens))
    assert request.block_hashes == one_by_one


def test_keys_cover_prompt_and_output() -> None:
    hasher = BlockHasher(FIELDS, 4)
    whole = Request("whole", RequestSpec(list(range(12)), SamplingParams()))
    split = Request("split", RequestSpec(list(range(6)), SamplingParams()))
    split.output_token_ids += range(6, 12)
    hasher.extend_request(whole, 12)
    hasher.extend_request(split, 7)
    hasher.extend_request(split, 12)
    assert split.block_hashes == whole.block_hashes
    assert len(whole.block_hashes) == 3


SPANS = (Span(1, 6, "a" * 64), Span(9, 2, "b" * 64))
TEXT = [5, *[0] * 6, 6, 7, *[0] * 2, 8, 9, 10, 11, 12, 13]


def keys_with(spans: tuple[Span, ...], cut: int = 16) -> list[bytes]:
    request = Request("r", RequestSpec(TEXT, SamplingParams(), spans=spans))
    hasher = BlockHasher(FIELDS, 4)
    hasher.extend_request(request, cut)
    hasher.extend_request(request, 16)
    return request.block_hashes


def test_a_key_covers_the_spans_that_overlap_its_block_and_where_they_begin() -> None:
    keys = keys_with(SPANS)
    assert all(keys_with(SPANS, cut) == keys for cut in range(17))
    hasher, parent, one_by_one = BlockHasher(FIELDS, 4), BlockHasher(FIELDS, 4).root(), []
    first, second = "a" * 64 + "@1", "b" * 64 + "@9"
    for start, items in enumerate([[first], [first], [second], []]):
        parent = hasher.block_key(parent, TEXT[4 * start : 4 * start + 4], items)
        one_by_one.append(parent)
    assert keys == one_by_one
    # The placeholders alone would be equal in all of these.
    others = [
        (),
        (SPANS[0], Span(9, 2, "c" * 64)),
        (Span(2, 5, "a" * 64), SPANS[1]),
        (Span(1, 6, "c" * 64), SPANS[1]),
    ]
    num_common = [sum(one == other for one, other in zip(keys, keys_with(spans), strict=True)) for spans in others]
    assert num_common == [0, 2, 0, 0]


def test_keys_of_different_block_sizes_differ() -> None:
    small, large = FakeRunner(4, 4), FakeRunner(4, 8)
    assert CacheKeyFields.of(small.model, small.layout) != CacheKeyFields.of(large.model, large.layout)


def test_sequences_of_one_prompt_with_kv_of_other_numerics_have_its_keys() -> None:
    hasher = BlockHasher(FIELDS, 4)
    request = Request("r", RequestSpec(TOKENS, SamplingParams(n=2)), kv_bits="theirs")
    sibling = request.sibling("r~1", SamplingParams())
    for one in (request, sibling):
        hasher.extend_request(one, 4)
        assert one.block_hashes == [key(kv_bits="theirs")]
