"""JSON schemas, regular expressions, choices and grammars as automata over a model's tokens, based on llguidance.

Needs no torch and no transformers. What a token stands for in an output:

1. A token stands for what it adds to the text of an output. So an added token that is not special, such as Qwen's
   `<tool_call>`, is text like any other. A special token adds none: a text in a constraint, also one that reads like
   its name, is written with other tokens, and only a grammar can ask for the token itself, by its name without quotes.
2. A text that must follow becomes the tokens of the model's own tokenizer, as long as they stand for exactly this text.
   Otherwise it becomes the longest tokens that fit, from its beginning on. Of a long text, only the beginning does:
   the library asks again at each token.

llguidance counts its work, and stops at limits. But a mask of 50,000 items takes half a millisecond for an object with
200 optional keys and a second for an ambiguous grammar, so that no count tells them apart. Therefore the CPU time of a
grammar's masks is measured, over all sequences that have it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from cachetools import LRUCache
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from baton.errors import ConfigError, EngineFault, InvalidRequest
from baton.messages.sampling import ConstraintKind
from baton.text.constraints.json_schemas import NOTHING_FITS, shortened
from baton.text.constraints.schema_compiling import compile_constraint
from baton.text.tokenizer import TOKENIZER_FILE, Tokenizer

_DECODERS = ("ByteLevel", "ByteFallback")
"""The decoders of tokenizers whose tokens have known bytes."""
_MAX_CHARS = 1024
"""The longest text that becomes tokens at a time, longer than any token: all of a constant of 64 KB takes 20 ms."""


class GrammarTokens:
    """The tokens of one model, as `TokenizerWrapper` takes them. Its methods may be called from any thread."""

    bos_token_id = None

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`vocab_size`: the number of the model's logits. Raises ValueError for tokens whose bytes are not known."""
        spec = json.loads(tokenizer_json)
        decoder = spec.get("decoder") or {}
        if not any(step["type"] in _DECODERS for step in (decoder, *decoder.get("decoders", ()))):
            raise ValueError(f"its decoder is none of {' and '.join(_DECODERS)}")
        parts = {name: _without_prefix(spec.get(name)) for name in ("normalizer", "pre_tokenizer")}
        if any(spec.get(name) != part for name, part in parts.items()):
            tokenizer_json = json.dumps(spec | parts)
        backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        backend.encode_special_tokens = True  # the names of special tokens are plain text
        self._tokenizer = Tokenizer(backend)
        known = self._tokenizer.tokens()
        if vocab_size <= max(known):
            raise ValueError(f"vocab size too small; {vocab_size} vs {max(known) + 1}")
        if max(eos_token_ids) >= vocab_size:
            raise ValueError(f"end-of-sequence token {max(eos_token_ids)} is out of range")
        self.eos_token_id = min(eos_token_ids)
        self.tokens = [self._tokenizer.spelling(token) if token in known else b"" for token in range(vocab_size)]
        # Some vocabularies have an end token with a text. It ends the output wherever it comes.
        self._special = {token for token in known if not self._tokenizer.is_visible(token)}.union(eos_token_ids)
        self.special_token_ids = sorted(self._special)
        self.library = LLTokenizer(
            TokenizerWrapper(self), eos_token=sorted(eos_token_ids), slices=LLTokenizer.json_slices()
        )

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text; the library calls this."""
        text = text[:_MAX_CHARS]
        content = text.encode()
        tokens = self._tokenizer.encode_rendered(text)
        if self._special.isdisjoint(tokens) and b"".join(self.tokens[token] for token in tokens) == content:
            return tokens
        fitting, offset = list[int](), 0
        for token in self.library.greedy_tokenize(text):
            if token in self._special or not content.startswith(self.tokens[token], offset):
                break  # it has left out a byte for which there is no token
            fitting.append(token)
            offset += len(self.tokens[token])
        # An end token may not come before the text, so where no token can begin it the mask is empty.
        return fitting or [self.eos_token_id]


def _without_prefix(part: Any) -> Any:
    """The normalizer or pre-tokenizer without the blank that it puts before a text; None if it does nothing else."""
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        bare = map(_without_prefix, part[name])
        return part | {name: [item for item in bare if item is not None]}
    return part | {key: value for key, value in _NO_PREFIX.items() if key in part}


_NO_PREFIX = {"prepend_scheme": "never", "add_prefix_space": False}


_WEIGHT = 1 / 16
"""The weight of a token in the mean: a single mask that takes long, as the first ones may, does not decide."""


class GrammarCost:
    """The cost of one grammar. May be used from several threads: then a token may be missing in the mean."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        """The CPU time of a token, as a fading mean, in seconds."""
        self.is_served = False
        """Whether a trial did not take too long."""
        self.refused_until = -math.inf
        """Until when trials that took too long refuse it, by the clock of who tried."""

    def add(self, seconds: float) -> None:
        """Count a token."""
        self.mean_s += (seconds - self.mean_s) * _WEIGHT


Mask = npt.NDArray[np.int32]

_MAX_FORCED_BYTES = 256
"""The most forced bytes that become tokens at a time: 64 KB, as in a constant, would take 50 ms at every token."""
_MAX_COSTS = 1024
_TRIAL_TOKENS = 16
_MAX_TRIAL_S = 0.1
"""The most CPU time for the first tokens of an output. Large schemas take 10 ms, constants of 64 KiB 46 to 65."""
_NUM_TRIALS = 2
"""How often a constraint is tried before it is refused: a machine may be slow once."""
_REFUSED_S = 60.0
"""How long a refusal is kept: the machine may be at fault, but who sends a costly constraint again and again may not
have it tried each time."""
_TOO_COSTLY = "takes too much work for each token: make it simpler, with rules that match a text in one way only"
_NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of llguidance's message for a token that is not allowed; its errors differ only in their text."""


class Grammars:
    """Compiles schemas for one model. Its methods may be called from any thread, and release the interpreter lock."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Prepare the tokenizer, which takes 50 ms for 4,000 tokens and 2 s for 150,000 and blocks all other threads.

        `cpu_clock`: the CPU time of the calling thread. Raises ConfigError for a tokenizer that llguidance can't use.
        """
        eos = sorted(eos_token_ids)
        if not eos:
            raise ConfigError("the model has no end-of-sequence token, so no answer could end")
        try:
            self._tokenizer = GrammarTokens(tokenizer_json, vocab_size, eos).library
        except Exception as error:  # the library's own are ValueError and whatever its Rust panics with
            raise ConfigError(f"the tokenizer can't be used for grammars: {shortened(error)}") from error
        bits = np.zeros(num_mask_words(vocab_size) * 32, dtype=np.uint8)
        bits[eos] = 1
        self._costs: LRUCache[bytes, GrammarCost] = LRUCache(_MAX_COSTS)
        """By a constraint's digest, what its tokens cost."""
        self._lock = threading.Lock()
        self._trials = ThreadPoolExecutor(1, "baton-trials", _yield_to_others)
        """Tries constraints, one at a time: each takes a core that an engine could use."""
        self._all_but_eos = ~np.packbits(bits, bitorder="little").view(np.int32)
        self._clock, self._cpu_clock = clock, cpu_clock

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> Grammars:
        """Prepare the tokenizer of a model directory; raises ConfigError when it can't be read or used."""
        path = model_dir / TOKENIZER_FILE
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from error
        return cls(text, vocab_size, eos_token_ids)

    def matcher(self, text: str, kind: ConstraintKind = "json_schema") -> GrammarMatcher:
        """A new matcher for one sequence; raises InvalidRequest.

        The schema must have passed `ConstraintChecker.check`: another one may use up this process's memory. Each
        matcher is compiled anew, since copies would share the automaton that they extend while they match, and its
        limits. A new constraint is tried first, so that one whose tokens take too long reaches no engine.
        """
        cost = self._cost(text, kind)
        if not cost.is_served and self._clock() >= cost.refused_until:
            self._trials.submit(self._try, text, kind, cost).result()
        if not cost.is_served:
            raise InvalidRequest(kind, _TOO_COSTLY)
        return self._compiled(text, kind, cost)

    def close(self) -> None:
        """End the thread that tries constraints, behind the one that it tries. No matcher can be made then that would
        have to be tried. Idempotent."""
        self._trials.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, text: str, kind: ConstraintKind, cost: GrammarCost) -> GrammarMatcher:
        library = compile_constraint(text, self._tokenizer, kind)
        return GrammarMatcher(library, self._tokenizer, self._all_but_eos, kind, cost, self._cpu_clock)

    def _cost(self, text: str, kind: ConstraintKind) -> GrammarCost:
        digest = hashlib.sha256((kind + text).encode()).digest()
        with self._lock:
            cost = self._costs.get(digest)
            if cost is None:
                cost = self._costs[digest] = GrammarCost()
            return cost

    def _try(self, text: str, kind: ConstraintKind, cost: GrammarCost) -> None:
        """Find out whether a constraint's first tokens take too much work; raises InvalidRequest.

        Has no effect if that is known.
        """
        if cost.is_served or self._clock() < cost.refused_until:
            return
        for _ in range(_NUM_TRIALS):
            tried = GrammarCost()
            if self._is_cheap(text, kind, tried):
                cost.mean_s, cost.is_served = tried.mean_s, True
                return
        cost.refused_until = self._clock() + _REFUSED_S

    def _is_cheap(self, text: str, kind: ConstraintKind, cost: GrammarCost) -> bool:
        """Generate the first tokens of some output, and tell whether that takes no more than it may."""
        matcher = self._compiled(text, kind, cost)
        mask, rng, left = np.zeros(self._all_but_eos.shape, dtype=np.int32), Random(0), _MAX_TRIAL_S
        try:
            for _ in range(_TRIAL_TOKENS):
                matcher.fill(mask)
                tokens = np.flatnonzero(np.unpackbits((mask & self._all_but_eos).view(np.uint8), bitorder="little"))
                left -= matcher.take_seconds()
                if left < 0 or not tokens.size:
                    break
                matcher.advance([int(rng.choice(tokens))])
        except InvalidRequest:
            # A limit, which other outputs need not reach.
            left -= matcher.take_seconds()
        return left >= 0


class GrammarMatcher:
    """A `TokenMatcher` for one sequence.

    The library's calls for a token are the same whether it was sampled here or by an earlier attempt, so that its
    limits are reached at the same token.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        all_but_eos: Mask,
        kind: ConstraintKind,
        cost: GrammarCost,
        cpu_clock: Callable[[], float],
    ) -> None:
        """`all_but_eos`: a mask with the bits of all tokens that don't end the output. `kind`: what errors name.

        `cost`: the cost of the constraint, over all of its matchers. `cpu_clock`: the CPU time of the calling thread.
        """
        self.kind: ConstraintKind = kind
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._cost = cost
        self._cpu_clock = cpu_clock
        self._token_s = self._untaken_s = 0.0
        """The CPU time since the last mask, and since the last `take_seconds`."""
        self._all_but_eos = all_but_eos
        self._num_tokens = 0
        self._last_token_ids: list[int] = []
        """The last token, or none at the beginning."""
        self._is_masked = False
        """Whether the mask of the next token has been computed."""

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def mean_seconds(self) -> float:
        return self._cost.mean_s

    def take_seconds(self) -> float:
        seconds, self._untaken_s = self._untaken_s, 0.0
        return seconds

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            with self._counted():
                if not self._is_masked:
                    self._matcher.compute_bitmask()
                self._matcher.consume_token(int(token_id))
            self._check()
            self._num_tokens += 1
            self._last_token_ids = [int(token_id)]
            self._is_masked = False

    def forced_tokens(self) -> Sequence[int]:
        # Both calls walk along the forced bytes as the next mask would. If that reaches a limit, the mask reports it.
        with self._counted():
            forced = self._matcher.compute_ff_bytes()
            if len(forced) <= _MAX_FORCED_BYTES:
                return self._matcher.compute_ff_tokens() if forced else ()
            return self._tokenizer.tokenize_partial(forced[:_MAX_FORCED_BYTES], self._last_token_ids)[0]

    def fill(self, mask: Mask) -> None:
        with self._counted():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._cost.add(self._token_s)
        self._token_s = 0.0
        self._check()
        self._is_masked = True
        if not self._matcher.is_accepting():
            # A grammar may ask for an end token by its number.
            mask &= self._all_but_eos
            if not mask.any():
                raise InvalidRequest(self.kind, NOTHING_FITS)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the CPU time of the block, which is the same however many other threads and processes run."""
        began = self._cpu_clock()
        try:
            yield
        finally:
            seconds = self._cpu_clock() - began
            self._token_s += seconds
            self._untaken_s += seconds

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = shortened(self._matcher.get_error())
            # All other errors are about limits that the schema exceeds, so the request is invalid.
            raise (
                EngineFault(f"{self.kind}: {reason}") if _NOT_ALLOWED in reason else InvalidRequest(self.kind, reason)
            )


def _yield_to_others() -> None:
    """Let the calling thread run where no thread with work for an engine wants the core."""
    if sys.platform.startswith("linux"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def num_mask_words(vocab_size: int) -> int:
    """The number of 32-bit words in a mask with one bit for each token."""
    return -(-vocab_size // 32)
