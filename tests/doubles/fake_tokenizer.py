"""The fake of `baton.text.tokenizer.Tokenizer`, as the router's core and its HTTP front use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_CONTEXT_TOKENS = 2


class FakeTokenizer:
    """Has a token for each letter, whose id is the letter's code point: token 97 is "a"."""

    def __init__(self, *, drops_blank: bool = False) -> None:
        """`drops_blank`: a blank at the beginning of a text is left out, as SentencePiece's decoders do."""
        self._drops_blank = drops_blank

    def letter(self, token_id: int) -> str:
        return chr(token_id)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def num_special_tokens(self, *, pair: bool) -> int:
        return int(pair)

    def with_special_tokens(self, first: Sequence[int], second: Sequence[int] | None) -> tuple[list[int], int]:
        """A pair is divided by the token 0."""
        return (list(first), 0) if second is None else ([*first, 0, *second], len(first) + 1)

    def decode(self, token_ids: Sequence[int]) -> str:
        text = "".join(map(self.letter, token_ids))
        return text.removeprefix(" ") if self._drops_blank else text

    def spelling(self, token_id: int) -> bytes:
        return self.letter(token_id).encode()

    def added_id(self, text: str) -> int | None:
        return None

    def special_ids(self, texts: Iterable[str]) -> list[int]:
        return []

    def context_of(self, prompt: Sequence[int], first: int = 0) -> tuple[int, ...]:
        context = prompt[max(first, len(prompt) - _CONTEXT_TOKENS) :] if self._drops_blank else ()
        return tuple(context) if 0 not in context else ()

    def detokenizer(self, shown_tokens: Sequence[int] = (), context: Sequence[int] = ()) -> FakeDetokenizer:
        return FakeDetokenizer(self.letter, drops_blank=self._drops_blank and not context)


class FakeDetokenizer:
    """Returns each token's letter at once."""

    def __init__(self, letter: Callable[[int], str] = chr, *, drops_blank: bool = False) -> None:
        self._letter = letter
        self._drops_blank = drops_blank
        """Whether a blank as the next letter is left out."""

    def push(self, token_id: int) -> str:
        letter = self._letter(token_id)
        if self._drops_blank and letter == " ":
            letter = ""
        self._drops_blank = False
        return letter

    def finish(self) -> str:
        return ""
