"""Which schemas are supported, and what the matchers of real vocabularies allow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

import baton
from baton.errors import ConfigError, EngineFault, InvalidRequest
from baton.messages.sampling import ConstraintKind
from baton.text.constraints.grammar import GrammarMatcher, Grammars, num_mask_words
from baton.text.constraints.schema_compiling import JSON_OBJECT, check_constraint
from baton.text.tokenizer import TOKENIZER_FILE, Tokenizer
from tests.support.allowed_tokens import allowed_tokens
from tests.support.json_fit import SCHEMAS, check_fits, schema_text

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
VOCAB = 4096
EOS = 1


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars.load(DEMO_MODEL, VOCAB, {EOS})
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


def allowed(matcher: GrammarMatcher) -> list[int]:
    return allowed_tokens(matcher, VOCAB)


def walk(matcher: GrammarMatcher, rng: Random, tokens: list[int] | None = None) -> list[int]:
    """Append random allowed tokens to `tokens`, including the end token."""
    tokens = [] if tokens is None else tokens
    while EOS not in tokens:
        token = rng.choice(allowed(matcher))
        matcher.advance([token])
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("text", [JSON_OBJECT, "{}", '{"minLength": 3}', *map(schema_text, SCHEMAS)])
def test_supported_schemas_are_compiled(text: str) -> None:
    check_constraint(text)


def nested(levels: int) -> str:
    return '{"items":' * (levels - 1) + "{}" + "}" * (levels - 1)


MANY_PROPERTIES = {
    "type": "object",
    "properties": {f"p{number}": {"type": "string", "maxLength": number} for number in range(800)},
    "additionalProperties": False,
}
BAD_SCHEMAS = {
    "no JSON": ("{", "is not JSON"),
    "two values": ('{"type": "object"} , "lark_grammar": ""', "is not JSON"),
    "no object": ("true", "must be a JSON object"),
    "not a number": ('{"minimum": NaN}', "NaN is no JSON number"),
    "infinite": ('{"minimum": 1e999}', "1e999 is too large"),
    "one of": ('{"oneOf": [{"type": "string"}, {"maxLength": 3}]}', "use anyOf"),
    "unique": ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "format": ('{"format": 3}', "Expected string for 'format'"),
    "digits": ('{"minimum": ' + "1" * 5000 + "}", "5000 digits"),
    "twice": ('{"type": "string", "type": "object"}', "key 'type' is there twice"),
    "surrogate": ('"\ud800"', "is not valid UTF-8"),
    "size": (json.dumps({"description": "x" * 65536}), "at most 65536 are taken"),
    "depth": (nested(33), "is deeper than 32 levels"),
    "abyss": ("[" * 60_000, "is deeper than 32 levels"),
    "unknown type": ('{"type": "foo"}', "foo"),
    "unknown keyword": ('{"not": {}}', "not"),
    "regex": ('{"type": "string", "pattern": "("}', "unclosed group"),
    "remote": ('{"$ref": "http://example.com/schema"}', "example.com"),
    "missing": ('{"$ref": "#/nope"}', "/nope"),
    "nothing fits": ('{"type": "integer", "minimum": 3, "maximum": 1}', "minimum"),
    "endless": ('{"$ref": "#"}', ""),
    "too wide": (json.dumps(MANY_PROPERTIES), "items"),
    "too complex": (json.dumps({"type": "string", "pattern": "(a|b)*" * 4000}), "too many expressions"),
}


def test_a_schema_of_the_maximum_depth_is_compiled() -> None:
    check_constraint(nested(32))


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_allowed_output_fits_the_schema(name: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    rng, texts = Random(7), set()
    for _ in range(10):
        tokens = walk(grammars.matcher(schema_text(name)), rng)
        assert tokens[-1] == EOS
        texts.add(tokenizer.decode(tokens))
        check_fits(tokenizer.decode(tokens), name)
    assert len(texts) > 1 or name == "constant"


CHOICES = [
    "ja",
    "jawohl",
    "jawohl!",
    "Größe \u2028 \U0001f389",
    "a|b",
    "[x](y)*{2}",
    "back\\slash",
    "\"'/\n\t",
    " blank ",
]
ASCII = "".join(map(chr, range(1, 127)))
SUM = 'start: sum\nsum: sum "+" term | term\nterm: "(" sum ")" | /[0-9]{1,3}/'
"""Left-recursive."""
CONSTRAINTS: dict[str, tuple[ConstraintKind, str, Callable[[str], object]]] = {
    "date": ("regex", r"(19|20)[0-9]{2}-[01][0-9]", lambda text: re.fullmatch(r"(19|20)[0-9]{2}-[01][0-9]", text)),
    "anchored": ("regex", r"^[a-c]{2,4}$", lambda text: re.fullmatch("[a-c]{2,4}", text)),
    "letters": ("regex", r"\p{L}{1,3}é?", lambda text: 1 <= len(text) <= 4),
    "choice": ("choice", json.dumps(CHOICES), CHOICES.__contains__),
    "duplicates": ("choice", json.dumps(["x", "y", "x"]), ["x", "y"].__contains__),
    "every sign": ("choice", json.dumps([ASCII, ASCII[::-1]]), [ASCII, ASCII[::-1]].__contains__),
    "many": ("choice", json.dumps([f"#{n}" for n in range(10_000)]), lambda text: int(text[1:]) < 10_000),
    "list": (
        "grammar",
        'start: item ("," item)~0..2\nitem: "a" | "b"',
        lambda text: re.fullmatch("[ab](,[ab]){0,2}", text),
    ),
    "json": ("grammar", 'start: "<" %json {"type": "boolean"} ">"', ["<true>", "<false>"].__contains__),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_any_allowed_output_matches_its_constraint(name: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    kind, text, fits = CONSTRAINTS[name]
    check_constraint(text, kind)
    rng, texts = Random(7), set()
    for _ in range(20):
        tokens = walk(grammars.matcher(text, kind), rng)
        found = tokenizer.decode(tokens)
        assert fits(found), found
        texts.add(found)
        # An attempt that begins behind some of the output goes on with the same masks.
        replayed = grammars.matcher(text, kind)
        replayed.advance(tokens[: len(tokens) // 2])
        walked = grammars.matcher(text, kind)
        for token in tokens[: len(tokens) // 2]:
            allowed(walked)
            walked.advance([token])
        assert allowed(replayed) == allowed(walked)
    assert len(texts) > 1


def test_a_left_recursive_grammar_is_followed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    check_constraint(SUM, "grammar")
    grammars.matcher(SUM, "grammar").advance(body(tokenizer, "1+(22+333)+4"))
    with pytest.raises(EngineFault, match=r"grammar: .*doesn't satisfy"):
        grammars.matcher(SUM, "grammar").advance(body(tokenizer, "1+)"))


REFUSED: dict[str, tuple[ConstraintKind, str, str]] = {
    "unclosed": ("regex", "(a", "unclosed group"),
    "look-around": ("regex", "(?=a)b", "look-ahead"),
    "reference": ("regex", r"(a)\1", "backreferences are not supported"),
    "nothing": ("regex", r"a[^\s\S]", "no text that the model can write fits"),
    "deep": ("regex", "(" * 5000 + "a" + ")" * 5000, ""),
    "large": ("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}b", "too many expressions"),
    "no start": ("grammar", 'foo: "a"', "no start rule"),
    "no Lark": ("grammar", 'root = "a"', "Expected token"),
    "unknown": ("grammar", "start: nope", "nope"),
    "itself": ("grammar", "start: start", "no text that the model can write fits"),
    "circle": ("grammar", "start: x\nx: y\ny: x", "no text that the model can write fits"),
    "endless": ("grammar", 'start: "a" start', "Too many items"),
    "nested": ("grammar", "start: " + "(" * 500 + '"a"' + ")" * 500, "too deeply nested"),
    "wide": ("grammar", "start: " + " | ".join(f'"n{n}"' for n in range(6000)), "items"),
    "other tokens": ("grammar", "start: <|im_end|>", "unknown special token"),
}


REFUSED |= {f"schema: {name}": ("json_schema", text, reason) for name, (text, reason) in BAD_SCHEMAS.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_constraints_that_can_not_be_served_are_refused_by_name(name: str) -> None:
    kind, text, reason = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        check_constraint(text, kind)
    assert caught.value.field == kind
    assert reason in caught.value.reason
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_any_fitting_output_is_allowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for text in ('{"a": [1, -2.5e3, "\u00fc\\n"], "b": {}}', '{\n  "a": null,\n  "b": [\n    true\n  ]\n}', "{}"):
        grammars.matcher(JSON_OBJECT).advance(body(tokenizer, text))


def body(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text without those that the tokenizer adds around it."""
    around = len(tokenizer.encode(""))
    return [*tokenizer.encode(text)[around:], EOS]


def test_the_number_of_consecutive_blanks_is_limited(grammars: Grammars, tokenizer: Tokenizer) -> None:
    blank = body(tokenizer, " ")[0]
    matcher = grammars.matcher(JSON_OBJECT)
    matcher.advance(body(tokenizer, "{")[:1])
    matcher.advance([blank])
    with pytest.raises(EngineFault):
        matcher.advance([blank] * 40)


def test_the_mask_of_a_matcher_depends_only_on_the_tokens_it_was_given(grammars: Grammars) -> None:
    """Whether they came one at a time or all at once, with or without masks in between."""
    text = schema_text("object")
    tokens = walk(grammars.matcher(text), Random(3))
    for split in (0, 1, len(tokens) // 2, len(tokens) - 1):
        one_by_one, at_once = grammars.matcher(text), grammars.matcher(text)
        for token in tokens[:split]:
            allowed(one_by_one)
            one_by_one.advance([token])
        at_once.advance(np.array(tokens[:split], dtype=np.int64))  # type: ignore[arg-type]
        assert at_once.num_tokens == one_by_one.num_tokens == split
        assert allowed(at_once) == allowed(one_by_one) == allowed(at_once)


LONG = "Lorem ipsum dolor sit amet, consetetur sadipscing elitr. " * 20
GUESSED: dict[str, tuple[ConstraintKind, str]] = {
    **{name: ("json_schema", schema_text(name)) for name in SCHEMAS},
    **{name: (kind, text) for name, (kind, text, _) in CONSTRAINTS.items()},
    "long": ("json_schema", json.dumps({"const": LONG})),
    "recursive": ("grammar", SUM),
}


@pytest.mark.parametrize("name", GUESSED)
def test_guessing_the_forced_tokens_does_not_change_the_masks(name: str, grammars: Grammars) -> None:
    kind, text = GUESSED[name]
    for seed in range(3):
        rng = Random(seed)
        plain, guessing, again = (grammars.matcher(text, kind) for _ in range(3))
        tokens: list[int] = []
        while EOS not in tokens:
            guess = guessing.forced_tokens()
            permitted = allowed(plain)
            assert allowed(guessing) == permitted
            assert list(guessing.forced_tokens()) == list(guess)
            assert set(guess[:1]) <= set(permitted)
            # Another tokenisation than the guessed one is often permitted, too.
            tokens.append(guess[0] if guess and rng.random() < 0.7 else rng.choice(permitted))
            plain.advance(tokens[-1:])
            guessing.advance(tokens[-1:])
        assert not guessing.forced_tokens()
        again.advance(tokens)
        assert again.num_tokens == len(tokens)


def test_forced_tokens_are_those_of_the_text_that_must_follow(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"properties": {"first_name": {"type": "integer"}}, "required": ["first_name"], "type": "object"}
    matcher = grammars.matcher(json.dumps(schema | {"additionalProperties": False}))
    matcher.advance(body(tokenizer, '{"')[:-1])
    guess = matcher.forced_tokens()
    assert tokenizer.decode(guess) == "first_name"
    matcher.advance(guess)
    assert not matcher.forced_tokens()  # a token may end behind the quotation mark, or further on
    matcher.advance(body(tokenizer, '":')[:-1])
    assert not matcher.forced_tokens()


def test_a_long_forced_text_is_guessed_in_pieces(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher, tokens = grammars.matcher(*GUESSED["long"][::-1]), list[int]()
    while guess := matcher.forced_tokens():
        assert len(tokenizer.decode(guess).encode()) <= 256
        matcher.advance(guess)
        tokens += guess
    assert tokenizer.decode(tokens) == json.dumps(LONG)


def test_guessing_reaches_limits_at_the_same_token(grammars: Grammars) -> None:
    costly = json.dumps({"type": "string", "pattern": "^(.*a){12}.{300}b$"})
    behind = json.dumps({"type": "string", "pattern": "^" + "(forced)" * 20 + "(.*a){12}.{300}b$"})
    for schema in (costly, behind):
        plain, guessing = grammars.matcher(schema), grammars.matcher(schema)
        rng, tokens = Random(1), list[int]()
        with pytest.raises(InvalidRequest, match="lexer error"):
            walk(plain, rng, tokens)
        for token in tokens:
            guessing.forced_tokens()
            allowed(guessing)
            guessing.advance([token])
        guessing.forced_tokens()
        with pytest.raises(InvalidRequest, match="lexer error"):
            allowed(guessing)
        assert not guessing.forced_tokens()


def test_the_budget_of_one_request_does_not_depend_on_another(grammars: Grammars) -> None:
    """The library shares what it builds while matching between copies, and with it the limits."""
    costly = json.dumps({"type": "string", "pattern": "^(.*a){12}.{300}b$"})
    first, second, third = (grammars.matcher(costly) for _ in range(3))
    tokens: list[int] = []
    with pytest.raises(InvalidRequest, match="json_schema: lexer error"):
        walk(first, Random(1), tokens)
    # A matcher that continues from the same tokens fails at the same place.
    second.advance(tokens)
    with pytest.raises(InvalidRequest, match="json_schema: lexer error"):
        allowed(second)
    assert allowed(third)


AMBIGUOUS: dict[str, str] = {
    "Lark": "start: s\ns: s s s s s | s s s s | s s s | s s | /[ -~\\n]/",
    "GBNF": "root ::= s\ns ::= s s s | s s | [ -~\\n]",
    "letters": 'start: s\ns: s s | "a" | "b" | " "',
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_grammar_whose_masks_take_seconds_is_refused_before_it_reaches_an_engine(
    name: str, grammars: Grammars
) -> None:
    check_constraint(AMBIGUOUS[name], "grammar")
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="grammar: takes too much work for each token"):
            grammars.matcher(AMBIGUOUS[name], "grammar")


@pytest.mark.parametrize("num_slow", [1, 2])
def test_a_machine_that_is_slow_refuses_nothing_at_once_and_nothing_for_long(num_slow: int) -> None:
    now, ticks = 0.0, iter([time for n in range(num_slow) for time in (n, n + 1.0)])
    text = (DEMO_MODEL / TOKENIZER_FILE).read_text()
    grammars = Grammars(text, VOCAB, {EOS}, clock=lambda: now, cpu_clock=lambda: next(ticks, float(num_slow)))
    if num_slow > 1:
        with pytest.raises(InvalidRequest, match="takes too much work"):
            grammars.matcher(JSON_OBJECT)
        now = 59.0
        with pytest.raises(InvalidRequest, match="takes too much work"):
            grammars.matcher(JSON_OBJECT)
        now = 60.0
    assert grammars.matcher(JSON_OBJECT).mean_seconds == 0.0, "the trial that was slow is not part of the mean"
    grammars.close()


def test_a_matcher_counts_its_work_and_that_of_its_grammar(grammars: Grammars) -> None:
    late = "start: /a{40}/ s\n" + AMBIGUOUS["Lark"].partition("\n")[2]
    matcher, other = grammars.matcher(late, "grammar"), grammars.matcher(late, "grammar")
    cheap = matcher.mean_seconds
    rng, least = Random(0), 0.002
    assert cheap < least / 4
    while matcher.mean_seconds < least:
        matcher.advance([rng.choice(allowed(matcher))])
    assert other.mean_seconds == matcher.mean_seconds
    assert matcher.take_seconds() > least
    assert (matcher.take_seconds(), other.take_seconds()) == (0.0, 0.0)


def test_a_token_that_is_not_allowed_is_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(JSON_OBJECT)
    with pytest.raises(EngineFault, match="json_schema"):
        matcher.advance(body(tokenizer, "x"))
    with pytest.raises(EngineFault, match="json_schema"):
        matcher.fill(np.zeros(num_mask_words(VOCAB), dtype=np.int32))


def test_all_end_tokens_are_allowed_at_the_end_even_one_with_text(tokenizer: Tokenizer) -> None:
    letter = body(tokenizer, "b")[0]
    grammars = Grammars((DEMO_MODEL / TOKENIZER_FILE).read_text(), VOCAB, {EOS, letter})
    matcher = grammars.matcher('{"enum": ["abba"]}')
    matcher.advance(body(tokenizer, '"a')[:-1])
    with pytest.raises(InvalidRequest, match="no text that the model can write fits"):
        allowed(matcher)  # no other token begins with the letter that follows
    end = Grammars((DEMO_MODEL / TOKENIZER_FILE).read_text(), VOCAB, {EOS, letter}).matcher('{"const": 1}')
    end.advance(body(tokenizer, "1")[:1])
    assert allowed(end) == sorted({EOS, letter})


def test_a_model_may_have_more_logits_than_its_tokenizer_has_tokens(tokenizer: Tokenizer) -> None:
    wide = Grammars.load(DEMO_MODEL, VOCAB + 100, {EOS}).matcher(JSON_OBJECT)
    assert max(allowed_tokens(wide, VOCAB + 100)) < VOCAB


@pytest.mark.parametrize(
    ("vocab_size", "eos", "reason"),
    [(VOCAB, set(), "no end-of-sequence token"), (10, {EOS}, "vocab size too small"), (VOCAB, {VOCAB}, "out of range")],
)
def test_models_with_an_unusable_vocabulary_have_no_grammars(
    vocab_size: int, eos: set[int], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Grammars.load(DEMO_MODEL, vocab_size, eos)
    with pytest.raises(ConfigError, match="can't be read"):
        Grammars.load(tmp_path, vocab_size, eos)
