"""`suffix` of /v1/completions: the model writes what is between two texts."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel

from baton.text.prompts import GapTokens, find_gap_tokens
from baton.text.tokenizer import Tokenizer
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.http_rig import HttpRig, finished

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "ab", "suffix": "cd"}


class CodeTokenizer(FakeTokenizer):
    """Has StarCoder's tokens, and a token 7 that begins each text."""

    def added_id(self, text: str) -> int | None:
        return {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}.get(text)

    def with_special_tokens(self, first: Any, second: Any) -> tuple[list[int], int]:
        assert second is None
        return [7, *first], 0


async def test_the_prompt_has_both_texts_and_the_models_tokens_around_them() -> None:
    rig = HttpRig(vocabulary=CodeTokenizer())
    for prompt, before in (("ab", [97, 98]), ("", [])):
        exchange = rig.post(PATH, BODY | {"prompt": prompt})
        call = await rig.next_call()
        assert call.request.prompt == [7, 1, *before, 2, 99, 100, 3]
        call.tell(finished())
        assert (await exchange.end()).status == 200


@pytest.mark.parametrize(
    ("param", "more", "why"),
    [
        ("prompt", {"prompt": [1, 2]}, "must be a text where there is a suffix"),
        ("prompt_embeds", {"prompt_embeds": "AAAA"}, "does not go with suffix"),
        ("echo", {"echo": True}, "does not go with suffix"),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 3}, "does not go with suffix"),
        ("suffix", {"suffix": 1}, "must be a valid string"),
        ("suffix", {"prompt": ["a"] * 32, "suffix": "b" * 40_000}, "send fewer prompts in a request"),
    ],
)
async def test_what_does_not_go_with_a_suffix_is_refused_by_name(param: str, more: dict[str, Any], why: str) -> None:
    await HttpRig(vocabulary=CodeTokenizer()).refused(PATH, BODY | more, param, why)


async def test_a_model_without_the_tokens_refuses_a_suffix_but_no_empty_one() -> None:
    rig = HttpRig()
    await rig.refused(PATH, BODY, "suffix", "fill-in-the-middle")
    rig.post(PATH, BODY | {"suffix": ""})
    call = await rig.next_call()
    assert call.request.prompt == "ab"


@pytest.mark.parametrize("is_special", [True, False])
def test_tokens_are_found_whether_they_are_special_or_not(is_special: bool) -> None:
    backend = tokenizers.Tokenizer(WordLevel({"a": 0, "<fim_prefix>": 1}, unk_token="a"))
    names = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    assert find_gap_tokens(Tokenizer(backend)) is None
    backend.add_tokens([tokenizers.AddedToken(name, special=is_special) for name in names[:2]])
    assert find_gap_tokens(Tokenizer(backend)) is None
    backend.add_tokens([tokenizers.AddedToken(names[2], special=is_special)])
    assert find_gap_tokens(Tokenizer(backend)) == GapTokens(2, 4, 3)
