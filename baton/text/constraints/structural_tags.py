"""Structural tags as grammars: text in which only certain parts, such as calls of tools, have a prescribed form.

The formats are those of XGrammar and vLLM (https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html): an output
is a tree of `const_string`, `json_schema`, `regex`, `any_text`, `sequence`, `or`, `optional`, `plus`, `star`, `repeat`,
`tag`, `triggered_tags` and `tags_with_separator`. The older form, with `structures` and `triggers`, is taken, too.

Free text (`any_text`, and what is between triggered tags) goes on until the first end of the tag around it, or until
the output ends. So it has to be the last of its tag or of the output. Tags are matched as text: a model's special
tokens, which have none, can't be generated as a part of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Any

from baton.errors import InvalidRequest
from baton.text.constraints.json_schemas import parse_schema, without_descriptions, without_extra_keys
from baton.text.constraints.lark_grammars import ANY_TEXT, EMPTY, LarkGrammar, Part, literal, pattern
from baton.text.constraints.schema_compiling import JSON_OPTIONS

_MAX_REPETITIONS = 1_000_000
_MAX_TRIGGERS = 128
_MAX_ENDS = 64
_MAX_COMPARED_CHARS = 2_000_000
"""The most characters in which the texts at which free text ends are looked for, in all of a tag: some tens of ms."""

Node = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where a format ends: before one of these texts, or, if there are none, at the end of the output."""

    texts: tuple[str, ...] = ()
    part: Part = EMPTY


_OUTPUT_END = _Ends()


@lru_cache(maxsize=64)
def lark_of_structural_tag(text: str, field: str) -> str:
    """The grammar, in Lark's notation, of a structural tag in JSON.

    As in OpenAI's structured outputs, objects of its schemas have the listed keys alone, unless a schema says something
    about others. Raises InvalidRequest that names the place below `field` where something is wrong or not served.
    """
    tag = parse_schema(text, field)
    if tag.get("type") != "structural_tag":
        raise InvalidRequest(f"{field}.type", "must be structural_tag")
    compiler = _Compiler()
    if "structures" in tag or "triggers" in tag:
        _check_keys(tag, field, ("type", "structures", "triggers"), ())
        format_, path = _from_older_form(tag, field), field
    else:
        _check_keys(tag, field, ("type", "format"), ())
        format_, path = tag["format"], f"{field}.format"
    return compiler.grammar.text(compiler.part(format_, path, _OUTPUT_END))


def _from_older_form(tag: Node, field: str) -> Node:
    tags = []
    for number, structure in enumerate(_list(tag, "structures", field)):
        _check_keys(structure, f"{field}.structures[{number}]", ("begin", "schema", "end"), ())
        content = {"type": "json_schema", "json_schema": structure["schema"]}
        tags.append({"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Compiler:
    """Compiles formats. Each method gets a format, its place for errors, and where it ends; None: where another begins.

    What it returns includes the text at which the format ends.
    """

    def __init__(self) -> None:
        self.grammar = LarkGrammar()
        self._num_compared = 0

    def part(self, node: Any, path: str, ends: _Ends | None) -> Part:
        """The part of any format."""
        if not isinstance(node, dict):
            raise InvalidRequest(path, "must be an object with the key type")
        kind = node.get("type")
        kinds: Mapping[str, Callable[[Node, str, _Ends | None], Part]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "plus": self._plus,
            "star": self._star,
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }
        if not isinstance(kind, str) or kind not in kinds:
            raise InvalidRequest(f"{path}.type", f"must be one of {', '.join(kinds)}")
        return kinds[kind](node, path, ends)

    def _const_string(self, node: Node, path: str, ends: _Ends | None) -> Part:
        _check_keys(node, path, ("type", "value"), ())
        return self._closed(literal(_string(node["value"], f"{path}.value")), ends)

    def _json_schema(self, node: Node, path: str, ends: _Ends | None) -> Part:
        _check_keys(node, path, ("type", "json_schema"), ("style", "any_order"))
        _check_only(node, path, style="json", any_order=False)
        schema = _closed_schema(node["json_schema"], f"{path}.json_schema")
        return self._closed(self.grammar.json(schema), ends)

    def _regex(self, node: Node, path: str, ends: _Ends | None) -> Part:
        _check_keys(node, path, ("type", "pattern"), ())
        regex = _string(node["pattern"], f"{path}.pattern")
        if not regex:
            raise InvalidRequest(f"{path}.pattern", "must be a text that is not empty")
        return self._closed(pattern(regex), ends)

    def _any_text(self, node: Node, path: str, ends: _Ends | None) -> Part:
        _check_keys(node, path, ("type",), ("excludes", "max_tokens", "max_chars"))
        _check_only(node, path, excludes=[], max_tokens=None, max_chars=None)
        return self._free_text(path, ends)

    def _sequence(self, node: Node, path: str, ends: _Ends | None) -> Part:
        _check_keys(node, path, ("type", "elements"), ())
        elements = _list(node, "elements", path)
        last = len(elements) - 1
        return self.grammar.sequence(
            [
                self.part(element, f"{path}.elements[{number}]", ends if number == last else None)
                for number, element in enumerate(elements)
            ]
        )

    def _or(self, node: Node, path: str, ends: _Ends | None) -> Part:
        _check_keys(node, path, ("type", "elements"), ())
        elements = enumerate(_list(node, "elements", path))
        return self.grammar.choice(
            [self.part(element, f"{path}.elements[{number}]", ends) for number, element in elements]
        )

    def _optional(self, node: Node, path: str, ends: _Ends | None) -> Part:
        return self._repeated(node, path, ends, 0, 1)

    def _plus(self, node: Node, path: str, ends: _Ends | None) -> Part:
        return self._repeated(node, path, ends, 1, None)

    def _star(self, node: Node, path: str, ends: _Ends | None) -> Part:
        return self._repeated(node, path, ends, 0, None)

    def _repeat(self, node: Node, path: str, ends: _Ends | None) -> Part:
        least, most = _count(node, "min", path, 0), _count(node, "max", path, -1)
        if -1 < most < least:
            raise InvalidRequest(f"{path}.max", "must be at least min, or -1 for any number")
        return self._repeated(node, path, ends, least, None if most == -1 else most, ("min", "max"))

    def _repeated(
        self, node: Node, path: str, ends: _Ends | None, least: int, most: int | None, keys: Sequence[str] = ()
    ) -> Part:
        _check_keys(node, path, ("type", "content", *keys), ())
        content = self.part(node["content"], f"{path}.content", None)
        return self._closed(self.grammar.repeated(content, least, most), ends)

    def _tag(self, node: Node, path: str, ends: _Ends | None) -> Part:
        begin, rest = self._opened_tag(node, path, ends)
        return self.grammar.sequence([literal(begin), rest])

    def _opened_tag(self, node: Any, path: str, ends: _Ends | None) -> tuple[str, Part]:
        """The beginning of a tag, and what comes behind it."""
        _check_keys(node, path, ("begin", "content", "end"), ("type",))
        _check_only(node, path, type="tag")
        begin, end = _string(node["begin"], f"{path}.begin"), node["end"]
        texts = [_string(end_text, f"{path}.end") for end_text in (end if isinstance(end, list) and end else [end])]
        if len(texts) > _MAX_ENDS:
            raise InvalidRequest(f"{path}.end", f"has {len(texts)} texts; at most {_MAX_ENDS} are taken")
        if texts == [""]:
            return begin, self.part(node["content"], f"{path}.content", ends)
        if "" in texts:
            raise InvalidRequest(f"{path}.end", "must have no empty text beside others")
        own_ends = _Ends(tuple(texts), self.grammar.shared(self.grammar.choice([literal(text) for text in texts])))
        return begin, self._closed(self.part(node["content"], f"{path}.content", own_ends), ends)

    def _triggered_tags(self, node: Node, path: str, ends: _Ends | None) -> Part:
        _check_keys(node, path, ("type", "triggers", "tags"), ("at_least_one", "stop_after_first", "excludes"))
        _check_only(node, path, excludes=[])
        tags = _list(node, "tags", path)
        triggers = [_string(candidate, f"{path}.triggers") for candidate in _list(node, "triggers", path)]
        self._check_told_apart(triggers, f"{path}.triggers", ends)
        begun: dict[str, list[Part]] = {trigger: [] for trigger in triggers}
        alternatives: list[Part] = []
        must, once = _flag(node, "at_least_one", path), _flag(node, "stop_after_first", path)
        for number, tag in enumerate(tags):
            at = f"{path}.tags[{number}]"
            begin = tag.get("begin") if isinstance(tag, dict) else None
            trigger = next(
                (candidate for candidate in triggers if isinstance(begin, str) and begin.startswith(candidate)), None
            )
            if trigger is None:
                raise InvalidRequest(f"{at}.begin", "must begin with one of the triggers")
            begin, rest = self._opened_tag(tag, at, None)
            rest = self.grammar.shared(rest)
            begun[trigger].append(self.grammar.sequence([literal(begin[len(trigger) :]), rest]))
            alternatives.append(self.grammar.sequence([literal(begin), rest]))
        if idle := [trigger for trigger, parts in begun.items() if not parts]:
            raise InvalidRequest(f"{path}.triggers", f"has {idle[0][:40]!r}, with which no tag begins")
        if must and once:
            return self._closed(self.grammar.choice(alternatives), ends)
        later = self.grammar.choice(
            [
                self.grammar.sequence([self.grammar.text_until(literal(trigger)), self.grammar.choice(parts)])
                for trigger, parts in begun.items()
            ]
        )
        text = self._free_text(path, ends)
        if once:
            return self.grammar.choice([self._closed(later, ends), text])
        first = [self.grammar.choice(alternatives)] if must else []
        return self.grammar.sequence([*first, self.grammar.repeated(later, 0, None), text])

    def _tags_with_separator(self, node: Node, path: str, ends: _Ends | None) -> Part:
        _check_keys(node, path, ("type", "tags", "separator"), ("at_least_one", "stop_after_first"))
        tags = enumerate(_list(node, "tags", path))
        any_tag = self.grammar.shared(
            self.grammar.choice([self._tag(tag, f"{path}.tags[{number}]", None) for number, tag in tags])
        )
        separator = literal(_string(node["separator"], f"{path}.separator"))
        all_tags = any_tag
        if not _flag(node, "stop_after_first", path):
            all_tags = self.grammar.sequence(
                [any_tag, self.grammar.repeated(self.grammar.sequence([separator, any_tag]), 0, None)]
            )
        if not _flag(node, "at_least_one", path):
            all_tags = self.grammar.repeated(all_tags, 0, 1)
        return self._closed(all_tags, ends)

    def _closed(self, part: Part, ends: _Ends | None) -> Part:
        if ends is None or not ends.texts:
            return part
        return self.grammar.sequence([part, ends.part])

    def _free_text(self, path: str, ends: _Ends | None) -> Part:
        if ends is None:
            raise InvalidRequest(path, "is free text, so it must be the last of its tag or of the output")
        return self.grammar.text_until(ends.part) if ends.texts else ANY_TEXT

    def _check_told_apart(self, triggers: Sequence[str], path: str, ends: _Ends | None) -> None:
        if "" in triggers:
            raise InvalidRequest(path, "must have no empty text")
        if len(triggers) > _MAX_TRIGGERS:
            raise InvalidRequest(path, f"has {len(triggers)} texts; at most {_MAX_TRIGGERS} are taken")
        texts = [*triggers, *(ends.texts if ends is not None else ())]
        self._num_compared += (len(texts) - 1) * (len(texts) + sum(map(len, texts)))
        if self._num_compared > _MAX_COMPARED_CHARS:
            raise InvalidRequest(path, "has, with all others and the ends around them, too many texts to tell apart")
        for first, second in permutations(texts, 2):
            if first in second:
                raise InvalidRequest(
                    path, f"has {first[:40]!r}, which is in {second[:40]!r}, where free text ends, too"
                )


def _check_keys(node: Any, path: str, required: Sequence[str], optional: Sequence[str]) -> None:
    if not isinstance(node, dict):
        raise InvalidRequest(path, "must be an object")
    for key in required:
        if key not in node:
            raise InvalidRequest(f"{path}.{key}", "is required")
    for key in node:
        if key not in required and key not in optional:
            raise InvalidRequest(f"{path}.{key[:40]}", "is unknown, or not served here")


def _check_only(node: Node, path: str, **served: Any) -> None:
    """Refuse any other value of these keys."""
    for key, value in served.items():
        if node.get(key) not in (None, value):
            raise InvalidRequest(f"{path}.{key}", f"must be {json.dumps(value)}: others are not served here")


def _closed_schema(schema: Any, path: str) -> str:
    """The schema with the options of all schemas, and objects that are closed."""
    text = schema if isinstance(schema, str) else json.dumps({} if schema is True else schema)
    compact = json.dumps(parse_schema(text, path), ensure_ascii=False, separators=(",", ":"))
    try:
        closed = without_descriptions(json.loads(without_extra_keys(compact)))
    except InvalidRequest as error:
        raise InvalidRequest(path, error.reason) from None
    own = closed.get("x-guidance")
    closed["x-guidance"] = {**JSON_OPTIONS, **(own if isinstance(own, dict) else {})}
    return json.dumps(closed)


def _count(node: Node, key: str, path: str, least: int) -> int:
    value = node.get(key)
    if type(value) is not int or not least <= value <= _MAX_REPETITIONS:
        raise InvalidRequest(f"{path}.{key}", f"must be a number from {least} to {_MAX_REPETITIONS}")
    return value


def _list(node: Node, key: str, path: str) -> list[Any]:
    value = node[key]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{path}.{key}", "must be a list that is not empty")
    return value


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(path, "must be a text")
    return value


def _flag(node: Node, key: str, path: str) -> bool:
    value = node.get(key)
    if not (value is None or isinstance(value, bool)):
        raise InvalidRequest(f"{path}.{key}", "must be true or false")
    return bool(value)
