"""The text package with the real tokenizers library: pieces add up to the whole text, wherever they are split.

`BATON_FUZZ_EXAMPLES=10000` tries that many texts.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from baton.errors import ConfigError
from baton.messages.generation import ReasoningBegin
from baton.model_formats.limits import CONTEXT_WITHOUT_POSITIONS
from baton.text.detokenizer import WindowDetokenizer
from baton.text.ends import StopStrings
from baton.text.model_files import read_model_files
from baton.text.tokenizer import Tokenizer
from router.flight.text_stream import TextStream
from router.http.completions.logprobs import CompletionLogprobs, TokenTexts, unknown
from router.http.parsed_text import as_token_id
from tests.doubles.fake_tokenizer import FakeTokenizer

EXAMPLES = int(os.environ.get("BATON_FUZZ_EXAMPLES", "120"))
CORPUS = ["def fibonacci(n): return n", "naïve café – 中文 字 😀👩‍👩‍👧 ≠", "  indented\n\ttabs", "wordpiece words"] * 4


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool 工>", normalized=False), AddedToken("plain", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    words += ["▁", "▁the", "▁a", "the", "ab", "é", "▁▁", "x", "中", "\ufffd"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace(prepend_scheme: str) -> tokenizers.Tokenizer:
    """Return a tokenizer whose decoder takes the blanks of the first token for those that its encoder prepends."""
    backend = byte_fallback()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=prepend_scheme)])
    return backend


def byte_level_in_sequence() -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer that is not recognised as one, since its decoder is a sequence."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    words = ["[UNK]", "[CLS]", "the", "##re", "a", ".", "##s", "don", "'", "t", "!"]
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]"])
    return backend


MAKERS = {
    "byte_level": byte_level,
    "byte_level_in_sequence": byte_level_in_sequence,
    "byte_fallback": byte_fallback,
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_never": lambda: metaspace("never"),
    "wordpiece": wordpiece,
}
TOKENIZERS = {name: Tokenizer(make()) for name, make in MAKERS.items()}


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_the_pieces_add_up_to_the_whole_text_and_none_is_revised(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))
    detokenizer = tokenizer.detokenizer()
    so_far = ""
    for place, token in enumerate(ids):
        so_far += detokenizer.push(token)
        for follower in (ids[-1], tokenizer.vocab_size - 1):
            assert tokenizer.decode([*ids[: place + 1], follower]).startswith(so_far)
    assert so_far + detokenizer.finish() == tokenizer.decode(ids)
    assert detokenizer.finish() == ""
    assert tokenizer.decode(ids) == library_decode(kind, ids)


CHINESE = ["<0xE4>", "<0xB8>", "<0xAD>"]


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace_always", "metaspace_first", "metaspace_never"])
@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([], ["▁a"], "a"),
        (["<s>"], ["▁a"], "a"),
        (["<s>", "▁the"], ["▁a", "▁"], " a "),
        (["x"], ["</s>", "▁a", "x"], " ax"),
        (["▁"], ["▁a"], " a"),
        (["x", "x", "x", "▁the", "▁", "▁"], ["▁", "▁a"], "  a"),
        # A text begins anew behind a special token, as that of a chat's answer does.
        (["▁the", "</s>"], ["▁a"], "a"),
        (["▁the", "</s>", "x"], ["▁a"], " a"),
        # Characters of raw bytes, of which the context has a part.
        (CHINESE * 3, ["▁a"], " a"),
        (["x", *CHINESE], [*CHINESE, "▁a"], "中 a"),
        (CHINESE * 3, [*CHINESE, "▁a"], "中 a"),
        # A character that the prompt's end cuts is none.
        (["▁the", *CHINESE[:2]], ["▁a"], " a"),
        (["▁the", *CHINESE[:2]], [CHINESE[2], "▁a"], "\ufffd a"),
        (["▁the", "\ufffd"], ["▁a"], " a"),
    ],
)
def test_the_text_behind_a_prompt_keeps_its_first_blank(
    kind: str, prompt: list[str], output: list[str], text: str
) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = {token: token_id for token_id, token in tokenizer.tokens().items()}
    for shown in ((), (ids["<unk>"],)):
        context = tokenizer.context_of([ids[token] for token in prompt])
        detokenizer = tokenizer.detokenizer(shown, context)
        found = "".join(detokenizer.push(ids[token]) for token in output) + detokenizer.finish()
        is_first = not prompt or prompt[-1] in ("<s>", "</s>")
        assert found == (" " * (is_first and kind == "metaspace_never") + text)


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_in_sequence"])
def test_a_prompt_that_cuts_a_character_holds_no_text_back(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = {tokenizer.spelling(token): token for token in tokenizer.tokens()}
    cut = [ids[bytes([value])] for value in "x中".encode()]
    detokenizer = tokenizer.detokenizer((), tokenizer.context_of(cut[:-1]))
    assert "".join(map(detokenizer.push, [cut[-1], *[ids[b"x"]] * 9])) == "\ufffd" + "x" * 9


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_the_text_behind_a_prompt_is_the_rest_of_the_whole_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size + 2).filter(lambda token: token != BYTE_BLANK), max_size=12)
    prompt, output, first = data.draw(ids), data.draw(ids), data.draw(st.integers(0, 3))
    context = tokenizer.context_of(prompt, first)
    assert len(context) <= WindowDetokenizer.CONTEXT_TOKENS
    if kind == "byte_level":
        assert not context
        return
    counting = Counting(tokenizer)
    detokenizer = WindowDetokenizer(counting, context)  # type: ignore[arg-type]
    text = "".join(map(detokenizer.push, output)) + detokenizer.finish()
    shown = [token for token in output if tokenizer.is_visible(token)]
    runs = [list(run) for is_byte, run in itertools.groupby(shown, tokenizer.is_byte_fallback) if is_byte]
    # The window may have a run of raw bytes as its context, and another one.
    longest_run = max(map(len, runs), default=0) + 1
    assert (
        counting.longest <= WindowDetokenizer.CONTEXT_TOKENS + WindowDetokenizer.MAX_UNFINISHED_TOKENS + 2 * longest_run
    )
    before = list(itertools.takewhile(tokenizer.is_visible, reversed(prompt[first:])))[::-1]
    if shown and tokenizer.is_byte_fallback(shown[0]):
        while before and tokenizer.is_byte_fallback(before[-1]):
            before.pop()
    # What the next token may still change is no context, so behind it a text may lose its blank.
    if not tokenizer.decode(before).endswith("\ufffd"):
        assert text == tokenizer.decode([*before, *output])[len(tokenizer.decode(before)) :]


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_the_text_does_not_depend_on_how_tokens_are_grouped(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[data.draw(st.sampled_from(sorted(TOKENIZERS)))]
    ids = tuple(data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24)))
    stop = data.draw(st.sampled_from([(), ("the",), ("n", "ab")]))
    single, grouped = TextStream(tokenizer, stop, 0), TextStream(tokenizer, stop, 0)
    pieces = [single.push(place, (token,)).text for place, token in enumerate(ids)]
    borders = sorted({0, len(ids), *data.draw(st.lists(st.integers(0, len(ids)), max_size=4))})
    groups = [grouped.push(first, ids[first:last]) for first, last in itertools.pairwise(borders)]
    assert "".join(pieces) == "".join(chunk.text for chunk in groups)
    assert (single.found, single.num_tokens) == (grouped.found, grouped.num_tokens)
    rest = single.finish()
    assert rest == grouped.finish()
    if not stop:
        # A stream that is searched for what never comes goes the long way.
        searched = TextStream(tokenizer, ("never to be drawn",), 0)
        text = "".join(searched.push(place, (token,)).text for place, token in enumerate(ids))
        assert "".join(pieces) + rest == text + searched.finish()


_BACKENDS = {name: make() for name, make in MAKERS.items()}


def library_decode(kind: str, ids: list[int]) -> str:
    """Decode with the library itself."""
    text: str = _BACKENDS[kind].decode(ids, skip_special_tokens=True)
    return text


def test_a_character_of_several_tokens_comes_with_the_last_one() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    detokenizer = tokenizer.detokenizer()
    ids = [3 + value for value in "😀".encode()]
    assert [detokenizer.push(token) for token in ids] == ["", "", "", ""]
    assert detokenizer.push(3 + 256 + 3) == "😀the"


class Counting:
    """A vocabulary that records how many tokens are decoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.longest = 0
        self._tokenizer = tokenizer
        for name in ("is_visible", "is_byte_fallback", "token_bytes", "whole_text"):
            setattr(self, name, getattr(tokenizer, name))

    def decode_visible(self, token_ids: list[int]) -> str:
        self.longest = max(self.longest, len(token_ids))
        return self._tokenizer.decode_visible(token_ids)


BYTE_BLANK = 3 + ord(" ")
LITERAL = TOKENIZERS["byte_fallback"].vocab_size - 1
BYTE_A = 3 + ord("A")


@pytest.mark.parametrize("repeated", [(LITERAL,), (LITERAL, BYTE_A), (BYTE_A, LITERAL)])
def test_a_text_that_keeps_ending_in_a_replacement_character_is_not_held_back(repeated: tuple[int, ...]) -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = [*(repeated * 250), LITERAL]
    assert tokenizer.decode(ids).endswith("\ufffd")
    counting = Counting(tokenizer)
    detokenizer = WindowDetokenizer(counting)  # type: ignore[arg-type]
    pieces = [detokenizer.push(token) for token in ids]
    assert sum(map(len, pieces)) >= len(tokenizer.decode(ids)) - WindowDetokenizer.MAX_UNFINISHED_TOKENS
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(ids)
    assert counting.longest <= WindowDetokenizer.CONTEXT_TOKENS + WindowDetokenizer.MAX_UNFINISHED_TOKENS + len(
        repeated
    )


def test_text_is_returned_with_each_token() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("def fibonacci")
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) == "def fibonacci"
    assert all(pieces[1:])


def test_encode_adds_the_tokens_of_the_post_processor() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert tokenizer.encode("a")[0] == 0
    assert tokenizer.decode(tokenizer.encode("naïve 中文 😀")) == "naïve 中文 😀"


def test_a_truncation_in_the_tokenizer_file_is_ignored() -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend).encode("fibonacci fibonacci fibonacci")) not in (4, 64)


def test_a_tokenizer_is_loaded_or_a_typed_error_raised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("def") == TOKENIZERS["byte_level"].encode("def")


def test_the_facts_of_a_model_are_read_from_its_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_files(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "n_positions": 64, "eos_token_id": 2}))
    facts = read_model_files(tmp_path)
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (9, 64, {2})
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for changes, longest in (
        ({"rope_scaling": yarn}, 128),
        ({"rope_scaling": {**yarn, "factor": 1.5}}, 64),
        ({"rope_parameters": {"full_attention": yarn, "sliding_attention": {"rope_type": "default"}}}, 128),
        ({"rope_scaling": {**yarn, "type": "linear"}}, 64),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 64),
        ({"text_config": {"vocab_size": 9, "max_position_embeddings": 64, "rope_parameters": yarn}}, 128),
        ({"n_positions": None, "model_max_length": 96}, 96),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "n_positions": 64, **changes}))
        assert read_model_files(tmp_path).max_model_len == longest
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "model_type": "mamba2"}))
    assert read_model_files(tmp_path).max_model_len == CONTEXT_WITHOUT_POSITIONS
    for depth in (200, 100_000):
        (tmp_path / "config.json").write_text('{"x": ' * depth + "0" + "}" * depth)
        with pytest.raises(ConfigError, match=r"config\.json (is nested more than 100 deep|can't be read as JSON)"):
            read_model_files(tmp_path)
    for config in ({"n_positions": 64}, {"text_config": {"vocab_size": "many"}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match="has no vocab_size"):
            read_model_files(tmp_path)
    # gemma3's text part is released with neither of its numbers, which are transformers' defaults.
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 2560}}))
    facts = read_model_files(tmp_path)
    assert (facts.vocab_size, facts.max_model_len) == (1 << 27, 1 << 24)


def reference_cut(text: str, stops: list[str], keeps_found: bool) -> tuple[str, str | None]:
    """Cut a text by the definition, character by character."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - (0 if keeps_found else len(longest))], longest
    return text, None


@settings(max_examples=EXAMPLES)
@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    keeps_found=st.booleans(),
)
def test_stop_strings_are_found_however_the_text_is_split(
    text: str, stops: list[str], cuts: list[int], keeps_found: bool
) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    search = StopStrings(stops, keeps_found=keeps_found)
    given_out = "".join(search.push(text[a:b]) for a, b in itertools.pairwise(borders))
    given_out += search.finish()
    assert (given_out, search.found) == reference_cut(text, stops, keeps_found)


def test_the_text_of_a_stop_token_is_kept_if_that_is_wanted() -> None:
    tokenizer = FakeTokenizer()
    for keeps_stop, text in ((True, "abc"), (False, "ab")):
        stream = TextStream(tokenizer, (), 0, keeps_stop=keeps_stop)
        assert stream.push(0, (97, 98, 99), ends_with_stop_token=True).text + stream.finish() == text
        assert stream.num_tokens == 3


@pytest.mark.parametrize(
    ("reasoning", "given", "text"),
    [
        ("none", "<think>a.</think>\nb.c", "<think>a"),
        ("closed", "<think>a.</think>\nb.c", "<think>a.</think>\nb"),
        ("closed", "a.</think>b", "a"),
        ("closed", "<think>a.", "<think>a."),
        ("closed", " <t", " <t"),
        ("open", "a.</think>\n\nb.c", "a.</think>\n\nb"),
    ],
)
def test_stop_strings_end_the_answer_and_not_the_reasoning(reasoning: ReasoningBegin, given: str, text: str) -> None:
    stream = TextStream(FakeTokenizer(), (".", "\n\n", "</"), 0, reasoning=reasoning)
    pieces = [stream.push(place, (ord(letter),)).text for place, letter in enumerate(given)]
    assert "".join(pieces) + stream.finish() == text


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_special_tokens_have_a_text_where_they_are_asked_for(make: Callable[[], tokenizers.Tokenizer]) -> None:
    tokenizer = Tokenizer(make())
    (shown,) = tokenizer.special_ids(["</s>", "no token"])
    words = tokenizer.encode_rendered("é 中")
    tokens = [*words, shown, *tokenizer.special_ids(["<s>"]), *words]
    for asked, text in (((shown,), "</s>"), ((), "")):
        stream = TextStream(tokenizer, (), 0, shown_tokens=asked)
        pieces = [stream.push(place, (token,)).text for place, token in enumerate(tokens)]
        whole = "".join(pieces) + stream.finish()
        assert ("</s>" in whole) == bool(text)
        assert whole.count("中") == 2
        assert whole.replace("</s>", "").replace(" ", "") == "é中é中"
        assert "<s>" not in whole


def encoded(kind: str, text: str) -> list[int]:
    return TOKENIZERS[kind].encode_rendered(text if kind.startswith("byte_level") else text.replace(" ", "▁"))


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_in_sequence", "byte_fallback"])
def test_the_spellings_of_tokens_are_the_bytes_of_their_text(kind: str) -> None:
    tokenizer, text = TOKENIZERS[kind], "é 中😀 the"
    spelled = b"".join(map(tokenizer.spelling, encoded(kind, text)))
    assert spelled.decode() == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_in_sequence", "byte_fallback", "metaspace_always"])
@pytest.mark.parametrize("as_ids", [True, False])
def test_offsets_are_the_places_of_tokens_in_the_text(kind: str, as_ids: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    special = tokenizer.special_ids(["<s>"])
    prompt = [*special, *encoded(kind, "é 😀中x 字")]
    output = [*encoded(kind, " a😀 the"), *special]
    spelling = as_token_id if as_ids else tokenizer.spelling
    context = tokenizer.context_of(prompt)
    texts = TokenTexts(spelling, tokenizer.spelling, partial(tokenizer.detokenizer, ()), context)
    echoed = tokenizer.decode(prompt)
    text = tokenizer.decode([*prompt, *output])
    writer = CompletionLogprobs(texts, len(prompt), len(echoed))
    found = [writer.take([unknown(token)])["text_offset"][0] for token in (*prompt, *output)]
    assert found == writer_of_all(CompletionLogprobs(texts, len(prompt), len(echoed)), [*prompt, *output])
    for token, at in zip((*prompt, *output), found, strict=True):
        spelled = b"" if token in special else tokenizer.spelling(token)
        assert text[at:].encode().startswith(spelled) or "\ufffd" in spelled.decode(errors="replace")
    assert found[:2] == [0, 0]
    assert found[len(prompt)] == len(echoed)
    assert found[-1] == len(text)


def writer_of_all(writer: CompletionLogprobs, tokens: list[int]) -> list[int]:
    offsets: list[int] = writer.take(list(map(unknown, tokens)))["text_offset"]
    return offsets


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    search = StopStrings(["END"])
    assert search.push("a E") == "a "
    assert search.push("N") == ""
    assert search.push("x") == "ENx"
    assert search.push("yEND more") == "y"
    assert (search.found, search.push("later"), search.finish()) == ("END", "", "")
