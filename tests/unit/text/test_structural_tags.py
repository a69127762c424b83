"""Structural tags take the texts that their formats describe, and refusals name the place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

import baton
from baton.errors import InvalidRequest
from baton.text.constraints.grammar import GrammarMatcher, Grammars
from baton.text.constraints.schema_compiling import check_constraint
from baton.text.constraints.structural_tags import lark_of_structural_tag
from baton.text.tokenizer import Tokenizer
from tests.support.allowed_tokens import allowed_tokens
from tests.support.byte_matching import takes

DEMO_MODEL = Path(baton.__file__).parent / "demo_model"
VOCAB, EOS = 4096, 1
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TEXT = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def schema(value: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def tag(begin: str, content: object, end: object) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: object) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: object) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


WEATHER = tag("<f=weather>", schema(CITY), "</f>")
TIME = tag("<f=time>", regex("[A-Z]{3}"), "</f>")
SUM = tag("[[", sequence(regex("[0-9]+"), const("+"), regex("[0-9]+")), "]]")


def triggered(*tags: object, triggers: tuple[str, ...] = ("<f=",), **flags: bool) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **flags}


def separated(*tags: object, **flags: bool) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": list(tags), "separator": ", ", **flags}


CALL = '<f=weather>{"city": "Ulm"}</f>'
FORMATS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "string": (const('<é "\\\n/>'), ('<é "\\\n/>',), ("", "<é")),
    "schema": (schema(CITY), ('{"city": "Ulm"}', '{\n  "city": ""\n}'), ('{"city": "Ulm", "x": 1}', "{}")),
    "schema as text": (schema(json.dumps(CITY)), ('{"city": "Ulm"}',), ("{}",)),
    "any schema": (schema(True), ("[1, null]", '"}"'), ("", "x")),
    "signs in a schema": (schema({"const": 'a}"//#%json\n'}), (r'"a}\"//#%json\n"',), ('"a"',)),
    "regex": (regex("^[a-z/]+$"), ("a/b",), ("", "1")),
    "text": (TEXT, ("", "a\nb <x>", "äöü"), ()),
    "greedy": (sequence(regex("[a-z]+"), const("end")), ("xend", "endend"), ("end", "xend1")),
    "text behind": (sequence(const("A: "), TEXT), ("A: ", "A: b\nc"), ("A:", "b")),
    "or": (either(const("none"), schema(CITY), const("{}")), ("none", '{"city": ""}', "{}"), ("{", "non")),
    "or text": (either(const("none"), tag("<t>", TEXT, "</t>")), ("none", "<t>a</b></t>"), ("", "<t>", "<t></t>x")),
    "thought": (
        sequence(tag("<think>", TEXT, "</think>"), either(const("yes"), const("no"))),
        ("<think></think>no", "<think>a < b</ </think>yes"),
        ("<think></think>", "yes", "<think></think>no</think>no"),
    ),
    "several ends": (tag("<a>", TEXT, ["</a>", "</b>"]), ("<a>x</b>", "<a></a>"), ("<a></b></a>", "<a>")),
    "no end": (tag("Call: ", schema(CITY), ""), ('Call: {"city": ""}',), ("Call: ",)),
    "no end of text": (tag("Call: ", TEXT, ""), ("Call: ", "Call: x"), ("Cal",)),
    "optional": (sequence({"type": "optional", "content": schema(CITY)}, const("!")), ("!", '{"city": ""}!'), ("!!",)),
    "plus": ({"type": "plus", "content": TIME}, ("<f=time>ABC</f>" * 2,), ("",)),
    "star": ({"type": "star", "content": SUM}, ("", "[[1+22]][[3+4]]"), ("[[1]]",)),
    "repeat": ({"type": "repeat", "min": 1, "max": 2, "content": schema(CITY)}, ('{"city": ""}' * 2,), ("",)),
    "at least": ({"type": "repeat", "min": 2, "max": -1, "content": const("ab")}, ("abab", "ab" * 9), ("ab", "aba")),
    "triggered": (
        triggered(WEATHER, TIME),
        ("", "a <f b", CALL, f"Look: {CALL} and\n<f=time>UTC</f>.", "<f=time>UTC</f>" + CALL),
        ("<f=", "x<f=other>", "<f=time>utc</f>", '<f=weather>{"city": 1}</f>', CALL + "<f=weather>"),
    ),
    "two triggers": (
        triggered(WEATHER, SUM, triggers=("<f=", "[[")),
        ("", f"[[1+2]]{CALL}]]", "[<f=weather>" + CALL[11:]),
        ("[[x", "[[1+2]", "<f=[["),
    ),
    "required": (
        triggered(WEATHER, TIME, at_least_one=True),
        (CALL, CALL + " so <f=time>UTC</f>!"),
        ("", "x", " " + CALL),
    ),
    "once": (triggered(WEATHER, stop_after_first=True), ("", "text", "a " + CALL), (CALL + "x", CALL + CALL)),
    "exactly one": (
        triggered(WEATHER, TIME, at_least_one=True, stop_after_first=True),
        (CALL, "<f=time>UTC</f>"),
        ("", "a" + CALL, CALL + CALL),
    ),
    "triggered in a tag": (
        sequence(tag("<t>", triggered(WEATHER), "</t>"), const("!")),
        ("<t></t>!", f"<t>a{CALL}b{CALL}</t>!"),
        ("<t>a</t>", "<t><f=</t>!"),
    ),
    "text in triggered tags": (triggered(tag("<f=>", TEXT, "</f>")), ("a<f=>b<f=></f>c",), ("<f=>",)),
    "separated": (separated(WEATHER, TIME), ("", CALL, f"{CALL}, {CALL}"), ("x", CALL + ",", CALL + CALL)),
    "some": (separated(TIME, at_least_one=True), ("<f=time>UTC</f>, <f=time>CET</f>",), ("",)),
    "at most one": (separated(TIME, stop_after_first=True), ("", "<f=time>UTC</f>"), ("<f=time>UTC</f>, ",)),
}


def grammar_of(format_: object) -> str:
    return lark_of_structural_tag(json.dumps({"type": "structural_tag", "format": format_}), "tag")


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_takes_its_texts_and_no_others(name: str) -> None:
    format_, good, bad = FORMATS[name]
    grammar = grammar_of(format_)
    check_constraint(grammar, "grammar")
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


def test_the_older_form_is_that_of_triggered_tags() -> None:
    structures = [{"begin": "<f=weather>", "schema": CITY, "end": "</f>"}]
    text = json.dumps({"type": "structural_tag", "structures": structures, "triggers": ["<f="]})
    assert lark_of_structural_tag(text, "tag") == grammar_of(triggered(WEATHER))


REFUSED: dict[str, tuple[object, str, str]] = {
    "no object": (1, "", "must be an object"),
    "no type": ({}, ".type", "must be one of const_string"),
    "unknown type": ({"type": "token", "token": 1}, ".type", "must be one of const_string"),
    "unknown key": (TEXT | {"x": 1}, ".x", "is unknown"),
    "missing key": ({"type": "const_string"}, ".value", "is required"),
    "no text": (const(1), ".value", "must be a text"),  # type: ignore[arg-type]
    "no schema": (schema(False), ".json_schema", "must be a JSON object"),
    "a wrong schema": (schema('{"a":1,"a":1}'), ".json_schema", "is there twice"),
    "no Unicode": (schema({"const": "\ud800"}), ".json_schema", "is not valid UTF-8"),
    "another style": (schema(CITY) | {"style": "qwen_xml"}, ".style", 'must be "json"'),
    "excludes": (TEXT | {"excludes": ["x"]}, ".excludes", "must be []"),
    "text in between": (sequence(TEXT, const("a")), ".elements[0]", "is free text"),
    "text repeated": ({"type": "star", "content": TEXT}, ".content", "is free text"),
    "text without end": (triggered(tag("<f=", TEXT, "")), ".tags[0].content", "is free text"),
    "nothing": (sequence(), ".elements", "must be a list that is not empty"),
    "inside": (either(TEXT, tag("a", {"type": "x"}, "b")), ".elements[1].content.type", "must be one of"),
    "mixed ends": (tag("a", TEXT, ["", "b"]), ".end", "must have no empty text"),
    "a number as an end": (tag("a", TEXT, 1), ".end", "must be a text"),
    "another trigger": (triggered(SUM), ".tags[0].begin", "must begin with one of the triggers"),
    "an idle trigger": (triggered(WEATHER, triggers=("<f=", "[[")), ".triggers", "'[[', with which no tag begins"),
    "triggers that meet": (triggered(WEATHER, triggers=("<f=", "f")), ".triggers", "has 'f', which is in '<f='"),
    "twice": (triggered(WEATHER, triggers=("<f=", "<f=")), ".triggers", "where free text ends, too"),
    "a trigger in the end": (tag("<t>", triggered(WEATHER), "<f=>"), ".content.triggers", "where free text ends, too"),
    "an empty trigger": (triggered(WEATHER, triggers=("",)), ".triggers", "must have no empty text"),
    "many triggers": (triggered(WEATHER, triggers=("x",) * 129), ".triggers", "at most 128"),
    "many ends": (tag("<", TEXT, ["x"] * 65), ".end", "has 65 texts; at most 64"),
    "many comparisons": (
        tag("<", either(*[triggered(WEATHER)] * 48), [f"{number:03}{'x' * 200}" for number in range(64)]),
        ".content.elements[2].triggers",
        "too many texts to tell apart",
    ),
    "no flag": (triggered(WEATHER, at_least_one=1), ".at_least_one", "must be true or false"),  # type: ignore[arg-type]
    "no count": ({"type": "repeat", "min": True, "max": 1, "content": const("a")}, ".min", "must be a number from 0"),
    "crossed": ({"type": "repeat", "min": 2, "max": 1, "content": const("a")}, ".max", "must be at least min"),
    "no pattern": (regex(""), ".pattern", "must be a text that is not empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_place(name: str) -> None:
    format_, place, reason = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(format_)
    assert caught.value.field == f"tag.format{place}"
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("{", "tag", "is not JSON"),
        ("[]", "tag", "must be a JSON object"),
        ("[" * 10_000, "tag", "is deeper than 32 levels"),
        ('{"format": {"type": "any_text"}}', "tag.type", "must be structural_tag"),
        ('{"type": "structural_tag"}', "tag.format", "is required"),
        ('{"type": "structural_tag", "triggers": []}', "tag.structures", "is required"),
        ('{"type": "structural_tag", "structures": [1], "triggers": ["a"]}', "tag.structures[0]", "must be an object"),
        (json.dumps({"type": "structural_tag", "format": const("x" * 65536)}), "tag", "at most 65536 are taken"),
    ],
)
def test_what_is_no_structural_tag_is_refused(text: str, field: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        lark_of_structural_tag(text, "tag")
    assert caught.value.field == field


def test_a_grammar_does_not_grow_faster_than_its_tag() -> None:
    many_ends = tag("<a>", either(*[TEXT] * 1000), ["x" * 500] * 64)
    nested: dict[str, Any] = const("x" * 1000)
    for _ in range(4):
        nested = separated(tag("<", triggered(tag("(", nested, ")"), triggers=("(",), at_least_one=True), ">"))
    for format_ in (many_ends, nested):
        assert len(grammar_of(format_)) < 5 * len(json.dumps(format_)) + 1000


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with closing(Grammars.load(DEMO_MODEL, VOCAB, {EOS})) as loaded:
        yield loaded


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_of_a_vocabulary_are_masked_as_the_text_requires(grammars: Grammars, name: str) -> None:
    """Also where a token reaches over the end of a tag."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    format_, good, _ = FORMATS[name]
    grammar, rng = grammar_of(format_), Random(1)
    for text in good:
        grammars.matcher(grammar, "grammar").advance([*tokenizer.encode(text)[len(tokenizer.encode("")) :], EOS])
    for _ in range(5):
        tokens = walk(grammars.matcher(grammar, "grammar"), rng)
        if tokens[-1] == EOS:
            assert takes(grammar, tokenizer.decode(tokens[:-1]))


def walk(matcher: GrammarMatcher, rng: Random) -> list[int]:
    tokens: list[int] = []
    while EOS not in tokens and len(tokens) < 60:
        allowed = allowed_tokens(matcher, VOCAB)
        tokens.append(EOS if EOS in allowed and rng.random() < 0.2 else rng.choice(allowed))
        matcher.advance(tokens[-1:])
    return tokens
