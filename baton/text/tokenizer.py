"""A model's tokenizer, which needs only the tokenizer.json of the model directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from baton.errors import ConfigError
from baton.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer

TOKENIZER_FILE = "tokenizer.json"

_MAX_SHOWING = 8
"""Sets of special tokens to show; a router's requests have one, unless its settings were changed."""
_BYTE_FALLBACK_TOKENS = frozenset(f"<0x{value:02X}>" for value in range(256))


@dataclass(frozen=True, slots=True)
class _Frame:
    """The special tokens around one text, or around and between two."""

    special: tuple[tuple[int, ...], ...]
    """Those before the first text, between two texts, and behind the last one."""
    second_type: int | None
    """How many tokens before the second text the tokens of the second type begin; None: there is one type."""

    @classmethod
    def of(cls, backend: Any, *, pair: bool) -> _Frame:
        """Find the frame by what the tokenizer makes of two texts. Raises ConfigError for one that does otherwise."""
        probe = ("a", "b") if pair else "a"
        encoding = backend.encode_batch([probe], add_special_tokens=True)[0]
        texts: list[list[int]] = [[] for _ in range(1 + pair)]
        special: list[list[int]] = [[]]
        for token_id, owner in zip(encoding.ids, encoding.sequence_ids, strict=True):
            if owner is None:
                special[-1].append(token_id)
                continue
            if owner == len(special) - 1:
                special.append([])
            if owner != len(special) - 2 or special[-1]:
                raise ConfigError("the tokenizer mixes the texts of a pair, which can't be told apart then")
            texts[owner].append(token_id)
        if len(special) != len(texts) + 1:
            raise ConfigError("the tokenizer makes no tokens of a letter, so what it puts around a text is not known")
        second_type = None
        if 1 in encoding.type_ids:
            second_type = (
                len(special[0]) + len(texts[0]) + len(special[1]) - encoding.type_ids.index(1) if pair else None
            )
        return cls(tuple(map(tuple, special)), second_type)


class Tokenizer:
    """One model's tokenizer. Immutable once loaded, and safe to use from several threads.

    `encode` adds the special tokens (such as BOS) that the tokenizer's post-processor defines.
    """

    def __init__(self, backend: Any) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in self._added.items() if entry.special)
        # What pickle would write of the decoder alone: the backend's own JSON has the whole vocabulary.
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._spells_bytes = any(part["type"] == "ByteLevel" for part in decoder.get("decoders", (decoder,)) if part)
        """Whether the characters of tokens stand for bytes, also where the text is decoded in further steps."""
        self._byte_tokens: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}
        self._showing: dict[tuple[int, ...], Tokenizer] = {}
        """The same tokenizer with special tokens that have a text, by those tokens."""
        self._frames: dict[bool, _Frame] = {}
        """The special tokens around a text (False) and a pair of texts (True), found at the first use."""

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """The tokenizer of a model directory; raises ConfigError when its file is missing or unreadable."""
        path = model_dir / TOKENIZER_FILE
        if not model_dir.is_dir():
            raise ConfigError(f"model directory {model_dir} does not exist; name a directory with config.json")
        if not path.is_file():
            raise ConfigError(f"{path} is missing; save the model's fast tokenizer beside its weights")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # The library raises plain Exception for a file that it can't read.
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens with a text, added tokens included; a model's output may be wider."""
        return int(self._backend.get_vocab_size())

    def tokens(self) -> dict[int, str]:
        """Every token by its id, as the vocabulary spells it, added tokens included."""
        return {token_id: token for token, token_id in self._backend.get_vocab(with_added_tokens=True).items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer puts around a text."""
        return self._ids(text, add_special_tokens=True)

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a text that has its special tokens already, as a chat template writes it."""
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Only the batch method skips the computation of token offsets, which is a quarter of the work.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without the special tokens that the tokenizer puts around a text."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def num_special_tokens(self, *, pair: bool) -> int:
        """How many special tokens the tokenizer puts around a text, or around and between a pair of texts."""
        return sum(map(len, (self._frame(pair=pair)).special))

    def with_special_tokens(self, first: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], int]:
        """The token ids of a text, or a pair of texts, with the special ones.

        Also returns where the tokens of the second type begin, which are those of the second text in models that tell
        both apart; 0 if all are of one type.
        """
        frame = self._frame(pair=second is not None)
        before, *others = frame.special
        ids = [*before, *first]
        starts = [len(ids)]
        for text, special in zip([second] if second is not None else [], others, strict=False):
            ids += special
            starts.append(len(ids))
            ids += text
        ids += others[-1]
        return ids, 0 if frame.second_type is None else starts[-1] - frame.second_type

    def _frame(self, *, pair: bool) -> _Frame:
        frame = self._frames.get(pair)
        if frame is None:
            frame = self._frames[pair] = _Frame.of(self._backend, pair=pair)
        return frame

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; special tokens and ids without a token are skipped."""
        return self.decode_visible([token for token in token_ids if self.is_visible(token)])

    def context_of(self, prompt: Sequence[int], first: int = 0) -> tuple[int, ...]:
        """The last few tokens of a prompt on which the text behind it depends; none for a byte-level vocabulary.

        `first`: the tokens before this position have no text.
        """
        return () if self._byte_level else WindowDetokenizer.context_of(self, prompt, first)

    def detokenizer(self, shown_tokens: Sequence[int] = (), context: Sequence[int] = ()) -> Detokenizer:
        """A fresh incremental detokenizer for one stream of tokens.

        `shown_tokens`: special tokens that have a text in this stream, which others have not. `context`: what
        `context_of` gives of the prompt; its text is never returned.
        """
        if shown_tokens:
            return self._that_shows(tuple(shown_tokens)).detokenizer((), context)
        return ByteLevelDetokenizer(self) if self._byte_level else WindowDetokenizer(self, context)

    def _that_shows(self, tokens: tuple[int, ...]) -> Tokenizer:
        tokenizer = self._showing.get(tokens)
        if tokenizer is None:
            tokenizer = copy(self)
            tokenizer._special = self._special - set(tokens)
            tokenizer._whole_texts, tokenizer._byte_tokens = {}, {}
            if len(self._showing) >= _MAX_SHOWING:
                self._showing.clear()
            self._showing[tokens] = tokenizer
        return tokenizer

    def special_ids(self, texts: Iterable[str]) -> list[int]:
        """The ids of those texts that are special tokens."""
        ids = (self._backend.token_to_id(text) for text in texts)
        return [token for token in ids if token in self._special]

    def added_id(self, text: str) -> int | None:
        """The id of the added token with this text, special or not; None: there is none."""
        token: int | None = self._backend.token_to_id(text)
        return token if token in self._added else None

    def is_visible(self, token_id: int) -> bool:
        """Whether the token contributes to a text: it exists and is not special."""
        return token_id not in self._special and self._backend.id_to_token(token_id) is not None

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether the token stands for one raw byte, whose meaning depends on the bytes around it."""
        return self._backend.id_to_token(token_id) in _BYTE_FALLBACK_TOKENS

    def decode_visible(self, token_ids: Iterable[int]) -> str:
        """The text of tokens that are all visible."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def spelling(self, token_id: int) -> bytes:
        """The bytes of a token as part of a text; for a special token its name; empty for an id without a token."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._special:
            return str(token).encode()
        if self._byte_level or (self._spells_bytes and _BYTE_OF_CHARACTER.keys() >= set(token)):
            return self.token_bytes(token_id)
        if token in _BYTE_FALLBACK_TOKENS:
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\u2581", " ").encode()

    def whole_text(self, token_id: int) -> str | None:
        """The text of one token of a byte-level vocabulary; empty for an invisible one, None when its bytes are not
        whole characters.
        """
        try:
            return self._whole_texts[token_id]
        except KeyError:
            text = self._whole_texts[token_id] = self._decoded_alone(token_id)
            return text

    def _decoded_alone(self, token_id: int) -> str | None:
        try:
            return self.token_bytes(token_id).decode() if self.is_visible(token_id) else ""
        except UnicodeDecodeError:
            return None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one visible token of a byte-level vocabulary."""
        known = self._byte_tokens.get(token_id)
        if known is None:
            known = _byte_level_bytes(self._backend.id_to_token(token_id))
            self._byte_tokens[token_id] = known
        return known


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others are the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in printable}
    hidden = [value for value in range(256) if value not in set(printable)]
    table.update({chr(256 + number): value for number, value in enumerate(hidden)})
    return table


_BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes of one token as the library's ByteLevel decoder gives them.

    A token with a character outside the byte alphabet is plain text.
    """
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()
