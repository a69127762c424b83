"""A GGUF file's tokenizer as the content of tokenizer.json, tokenizer_config.json and generation_config.json.

How texts are cut into words before byte-pair merging is known for some values of `tokenizer.ggml.pre`. The patterns are
those of the models' own tokenizer.json files; llama.cpp has the same ones in `llama-vocab.cpp`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import ConfigError
from baton.model_formats.gguf.facts import Facts

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way to cut a text, and what goes with it in the models that use it."""

    steps: tuple[Mapping[str, Any], ...]
    """The steps before bytes become characters, as in tokenizer.json."""
    has_own_words: bool = True
    """Whether the steps find the words; otherwise GPT-2's pattern does, after them."""
    takes_whole_words: bool = False
    """Whether a word that is a token itself is taken without merging."""
    adds_bos: bool = False
    """Whether a text begins with BOS unless the file says otherwise."""
    normalizer: str | None = None
    """The Unicode normal form of texts, such as NFC."""

    def to_json(self) -> dict[str, Any]:
        """The `pre_tokenizer` of tokenizer.json."""
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        to_bytes["use_regex"] = not self.has_own_words
        return {"type": "Sequence", "pretokenizers": [*self.steps, to_bytes]}


def _split(pattern: str) -> Mapping[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _cl100k(digits: str) -> Mapping[str, Any]:
    """The pattern of cl100k_base; `digits`: which digits stay together."""
    return _split(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    )


def _o200k(digits: str, contractions: str) -> Mapping[str, Any]:
    """The pattern of o200k_base, which knows upper and lower case."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
    return _split(rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}")


_ONE_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_GPT2 = PreTokenizer((), has_own_words=False)
_GPT2_ONE_DIGIT = PreTokenizer(({"type": "Digits", "individual_digits": True},), has_own_words=False)
_LLAMA3 = PreTokenizer((_cl100k(_THREE_DIGITS),), takes_whole_words=True, adds_bos=True)
_GPT4 = PreTokenizer((_cl100k(_THREE_DIGITS),))
_QWEN2 = PreTokenizer((_cl100k(_ONE_DIGIT),), normalizer="NFC")
_TEKKEN = PreTokenizer((_o200k(_ONE_DIGIT, ""),), takes_whole_words=True, adds_bos=True)
_GPT4O = PreTokenizer((_o200k(_THREE_DIGITS, f"{_CONTRACTIONS}?"),))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "smollm": _GPT2_ONE_DIGIT,
    "starcoder": _GPT2_ONE_DIGIT,
    "refact": _GPT2_ONE_DIGIT,
    "command-r": _GPT2_ONE_DIGIT,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _GPT4,
    "smaug-bpe": _GPT4,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
"""The known values of `tokenizer.ggml.pre`."""


_SPACE = "\u2581"
"""SentencePiece's character for a blank."""
_ENDS_OF_TURNS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<EOT>"),
)
"""Tokens that end an answer by their name alone, as in llama.cpp. They are special ones whatever the file says."""
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's special tokens that leave the blanks after them; all others take them."""
_TEMPLATE = "tokenizer.chat_template"
"""The key of the chat template; those with other names than "default" have their names behind it."""
_TEMPLATE_NAMES = "tokenizer.chat_templates"
_MAX_PIECE = 256
"""The longest token, in characters, for which pairs that make it are searched; longer ones are never merged."""


class TokenKind(enum.IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file, by their ids."""

    texts: Sequence[str]
    kinds: Sequence[float]
    ids: Mapping[str, int]

    @classmethod
    def of(cls, facts: Facts) -> Vocabulary:
        """The vocabulary; raises ConfigError if tokens are missing, there twice, or more than the model has."""
        texts = facts.texts("tokenizer.ggml.tokens")
        kinds: Sequence[float] = [TokenKind.NORMAL] * len(texts)
        if facts.has("tokenizer.ggml.token_type"):
            kinds = facts.numbers("tokenizer.ggml.token_type", len(texts))
        ids = {text: token_id for token_id, text in enumerate(texts)}
        ends = {ids[text] for text in _ENDS_OF_TURNS if text in ids}
        kinds = [TokenKind.CONTROL if token_id in ends else kind for token_id, kind in enumerate(kinds)]
        if not texts or len(ids) != len(texts) or len(texts) > facts.vocab_size:
            raise ConfigError(
                f"{facts.file.path} has {len(texts)} tokens, of which {len(ids)} differ, for {facts.vocab_size} rows"
            )
        return cls(texts, kinds, ids)

    def of_kind(self, *kinds: TokenKind) -> Iterable[int]:
        """The ids of the tokens of these kinds."""
        return (token_id for token_id, kind in enumerate(self.kinds) if kind in kinds)


def tokenizer_json(facts: Facts) -> dict[str, Any]:
    """The content of tokenizer.json; raises ConfigError for a kind of tokenizer that is not known."""
    vocabulary = Vocabulary.of(facts)
    kind = facts.text("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level_parts(facts, vocabulary)
    elif kind == "llama":
        parts = _sentencepiece_parts(facts, vocabulary)
    else:
        raise ConfigError(f"{facts.file.path} has a tokenizer of kind {kind[:40]!r}; gpt2 and llama are read")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(facts, vocabulary, kind),
        "post_processor": _post_processor(facts, vocabulary, kind),
        **parts,
    }


def tokenizer_config_json(facts: Facts) -> dict[str, Any]:
    """The content of tokenizer_config.json: the special tokens by name, and the chat templates if there are any."""
    texts = Vocabulary.of(facts).texts
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
    tokens = {name: facts.token(key) for name, key in names.items()}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {
        f"{name}_token": texts[token] for name, token in tokens.items() if token is not None and token < len(texts)
    }
    config["model_max_length"] = facts.whole(".context_length")
    named = facts.texts(_TEMPLATE_NAMES) if facts.has(_TEMPLATE_NAMES) else ()
    templates = {name: facts.text(f"{_TEMPLATE}.{name}") for name in named}
    if facts.has(_TEMPLATE):
        templates["default"] = facts.text(_TEMPLATE)
    if templates:
        config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    return config


def generation_config_json(facts: Facts) -> dict[str, Any]:
    """The content of generation_config.json: the ids of the first token, and of all tokens that end an answer."""
    vocabulary = Vocabulary.of(facts)
    named = [facts.token(key) for key in ("eos", "eot", "eom")]
    listed = [vocabulary.ids.get(text) for text in _ENDS_OF_TURNS]
    ends = [token for token in (*named, *listed) if token is not None]
    config = {"bos_token_id": facts.token("bos"), "eos_token_id": list(dict.fromkeys(ends)) or None}
    return {key: value for key, value in config.items() if value is not None}


def _byte_level_parts(facts: Facts, vocabulary: Vocabulary) -> dict[str, Any]:
    how = _pre_tokenizer(facts)
    merges = [merge.split(" ") for merge in facts.texts("tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ConfigError(f"{facts.file.path}: tokenizer.ggml.merges has an entry that is not two tokens")
    return {
        "normalizer": None if how.normalizer is None else {"type": how.normalizer},
        "pre_tokenizer": how.to_json(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=how.takes_whole_words),
    }


def _pre_tokenizer(facts: Facts) -> PreTokenizer:
    name = facts.text("tokenizer.ggml.pre", "without a name")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ConfigError(f"{facts.file.path} has the pre-tokenizer {name[:40]!r}; known ones are {known}")
    return PRE_TOKENIZERS[name]


def _sentencepiece_parts(facts: Facts, vocabulary: Vocabulary) -> dict[str, Any]:
    has_prefix = facts.switch("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    unreplace = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    scores = facts.numbers("tokenizer.ggml.scores", len(vocabulary.texts))
    unknown = next(iter(vocabulary.of_kind(TokenKind.UNKNOWN)), facts.token("unknown"))
    has_bytes = next(iter(vocabulary.of_kind(TokenKind.BYTE)), None) is not None
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [unreplace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(
            vocabulary,
            _merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None or unknown >= len(vocabulary.texts) else vocabulary.texts[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        ),
    }


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[list[str]]:
    """All pairs of tokens that make a token, those of the token with the highest score first.

    SentencePiece merges the pair whose result has the highest score; merges of the same token are equally good.
    """
    ids, merges = vocabulary.ids, list[list[str]]()
    normal = vocabulary.of_kind(TokenKind.NORMAL)
    for token in sorted(normal, key=lambda token: -scores[token]):
        text = vocabulary.texts[token]
        if len(text) <= _MAX_PIECE:
            pairs = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
            merges += [[first, second] for first, second in pairs if first in ids and second in ids]
    return merges


def _bpe(vocabulary: Vocabulary, merges: Sequence[Sequence[str]], **differences: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        "merges": merges,
        **differences,
    }


def _added_tokens(facts: Facts, vocabulary: Vocabulary, kind: str) -> list[dict[str, Any]]:
    """The tokens that are found in a text before anything else. Special ones are not part of an answer's text."""
    strips = facts.architecture == "phi3" and kind == "llama"
    special = set(vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN))
    return [
        {
            "id": token,
            "content": vocabulary.texts[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and token in special and vocabulary.texts[token] not in _NOT_STRIPPED,
            "normalized": False,
            "special": token in special,
        }
        for token in vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
    ]


def _post_processor(facts: Facts, vocabulary: Vocabulary, kind: str) -> dict[str, Any] | None:
    """What is put around a text: BOS and EOS, if the file says so."""
    bos_by_default = kind == "llama" or _pre_tokenizer(facts).adds_bos
    before = _token_if(facts, vocabulary, "bos", facts.switch("tokenizer.ggml.add_bos_token", bos_by_default))
    after = _token_if(facts, vocabulary, "eos", facts.switch("tokenizer.ggml.add_eos_token", False))
    if before is None and after is None:
        return None
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [*single, {"Sequence": {"id": "B", "type_id": 0}}]
    specials = {}
    for text, token in filter(None, (before, after)):
        specials[text] = {"id": text, "ids": [token], "tokens": [text]}
    first = [{"SpecialToken": {"id": before[0], "type_id": 0}}] if before else []
    last = [{"SpecialToken": {"id": after[0], "type_id": 0}}] if after else []
    return {
        "type": "TemplateProcessing",
        "single": [*first, *single, *last],
        "pair": [*first, *pair, *last],
        "special_tokens": specials,
    }


def _token_if(facts: Facts, vocabulary: Vocabulary, key: str, wanted: bool) -> tuple[str, int] | None:
    """A special token's text and id, if it is wanted and exists."""
    token = facts.token(key)
    if not wanted or token is None or token >= len(vocabulary.texts):
        return None
    return vocabulary.texts[token], token
