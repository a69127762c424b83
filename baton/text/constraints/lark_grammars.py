"""Grammars in Lark's notation as llguidance reads it: built part by part, and rewritten from GBNF.

llguidance splits an output into terminals (regular expressions), each as long as it can be, before it matches rules. So
`/[a-z]+/ "end"` as two terminals would never end: the first takes all letters. Here what is regular and stands side by
side becomes one terminal, which matches exactly what its parts say.

GBNF, the EBNF of llama.cpp, defines its rules by `NAME ::=`, which can stand at the beginning of a line in no grammar
of Lark, and its outputs are those of the rule `root`. Taken are literals, sets of characters, `.`, groups, `|`, and the
repetitions `*`, `+`, `?`, `{m}`, `{m,}` and `{m,n}`; https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
A rule goes on until the next one begins. Rewriting takes time in proportion to the text.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a grammar."""

    text: str
    """An expression that may stand inside any other."""
    is_regular: bool
    """Whether it may be a part of a terminal."""
    is_single: bool = True
    """Whether a rule takes it as one terminal, or it is no terminal."""


EMPTY = Part('""', is_regular=True)


def literal(text: str) -> Part:
    """Exactly this text."""
    return Part(json.dumps(text), is_regular=True)


def pattern(regex: str) -> Part:
    """What a regular expression matches."""
    escaped, chars = [], iter(regex)
    for char in chars:
        if char == "\\":
            escaped.append(char + next(chars, ""))
        else:
            escaped.append({"/": r"\/", "\n": r"\n"}.get(char, char))
    return Part(f"/{''.join(escaped)}/", is_regular=True)


def both(first: Part, second: Part) -> Part:
    """What each of two regular parts matches."""
    return Part(f"({first.text} & {second.text})", is_regular=True, is_single=False)


def all_but(part: Part) -> Part:
    """What a regular part does not match."""
    return Part(f"(~{part.text})", is_regular=True, is_single=False)


ANY_TEXT = pattern("(?s:.*)")


class LarkGrammar:
    """A grammar in the making. Its parts are for it alone."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._num_names = 0

    def text(self, start: Part) -> str:
        """The whole grammar, whose outputs are those of `start`."""
        return "\n".join([f"start: {self._in_rule(start)}", *self._lines])

    def sequence(self, parts: Sequence[Part]) -> Part:
        """One part after the other."""
        if not parts:
            return EMPTY
        if len(parts) == 1:
            return parts[0]
        if all(part.is_regular for part in parts):
            return Part(f"({' '.join(part.text for part in parts)})", is_regular=True, is_single=False)
        texts: list[str] = []
        for is_regular, neighbours in groupby(parts, lambda part: part.is_regular):
            if is_regular:
                texts.append(self._in_rule(self.sequence(list(neighbours))))
            else:
                texts += [part.text for part in neighbours]
        return Part(f"({' '.join(texts)})", is_regular=False)

    def choice(self, parts: Sequence[Part]) -> Part:
        """One of the parts."""
        if len(parts) == 1:
            return parts[0]
        if all(part.is_regular for part in parts):
            return Part(f"({' | '.join(part.text for part in parts)})", is_regular=True, is_single=False)
        return Part(f"({' | '.join(map(self._in_rule, parts))})", is_regular=False)

    def repeated(self, part: Part, least: int, most: int | None) -> Part:
        """The part several times; `most` None: without a limit."""
        often = f"{{{least},{'' if most is None else most}}}"
        if part.is_regular:
            return Part(f"({part.text}){often}", is_regular=True, is_single=False)
        return Part(f"({part.text}){often}", is_regular=False)

    def shared(self, part: Part) -> Part:
        """The same part by a name, so that the grammar does not grow with each use of it."""
        if part.is_regular:
            return Part(self._defined("TERMINAL", f": {part.text}").text, is_regular=True)
        return self._defined("rule", f": {part.text}")

    def text_until(self, end: Part) -> Part:
        """Any text up to the first place at which this regular part fits, and what fits there."""
        return self.shortest(self.sequence([ANY_TEXT, end]))

    def shortest(self, part: Part) -> Part:
        """What a regular part matches, up to the first place at which it does."""
        return self._defined("lazy", f"[lazy]: {part.text}")

    def json(self, schema: str) -> Part:
        """JSON that fits a schema."""
        return self._defined("json", f": %json {schema}")

    def named(self, name: str, part: Part) -> None:
        """Define a rule or, for a name in capital letters, a terminal."""
        self._lines.append(f"{name}: {part.text if name.isupper() else self._in_rule(part)}")

    def _defined(self, kind: str, definition: str) -> Part:
        self._num_names += 1
        name = f"{kind}_{self._num_names}"
        self._lines.append(name + definition)
        return Part(name, is_regular=False)

    def _in_rule(self, part: Part) -> str:
        if not part.is_regular or part.is_single:
            return part.text
        return self._defined("TERMINAL", f": {part.text}").text


_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\n]*)
    |(?P<rule>[A-Za-z0-9_-]+)[ \t]*::=
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<literal>(?:[^"\\\n]|\\.)*)"
    |\[(?P<not>\^?)(?P<set>(?:[^\]\\\n]|\\.)*)\]
    |\{[ \t]*(?P<least>[0-9]{1,9})[ \t]*(?P<range>,)?[ \t]*(?P<most>[0-9]{1,9})?[ \t]*\}
    |(?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {sign: sign for sign in "\"'\\[]-^/.{}()*+?|"}
_REPETITIONS: Mapping[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MAX_DEPTH = 32
_MAX_CHARS = 16 << 10
"""The longest grammar: rewriting it takes 0.1 s, during which a node's other threads take turns with it."""


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is written in GBNF, and not in Lark's notation."""
    return _RULE.search(grammar) is not None


def lark_of_gbnf(grammar: str) -> str:
    """The grammar in Lark's notation; raises ValueError for what is no GBNF."""
    if len(grammar) > _MAX_CHARS:
        raise ValueError(f"has {len(grammar)} characters; at most {_MAX_CHARS} are taken in GBNF")
    rules = dict[str, _Rule]()
    current: _Rule | None = None
    for token in _tokens(grammar):
        if token.kind == "rule":
            if token.text in rules:
                raise ValueError(f"line {token.line}: the rule {token.text[:80]} is there twice")
            current = rules[token.text] = _Rule()
        elif current is None:
            raise ValueError(f"line {token.line}: expected NAME ::=")
        else:
            current.tokens.append(token)
    if "root" not in rules:
        raise ValueError("has no rule root")
    names = _lark_names(rules)
    lark = LarkGrammar()
    for name, rule in rules.items():
        lark.named(names[name].text, _Body(lark, names, rule.tokens).part())
    return lark.text(names["root"])


class _Token(NamedTuple):
    kind: str
    """The group of _TOKEN that matched."""
    text: str
    line: int
    part: Part = EMPTY
    """What a literal or a set matches; empty for any other token."""
    often: tuple[int, int | None] = (1, 1)
    """How often a repetition has what stands before it: at least, and at most (None: without end)."""


@dataclass(slots=True)
class _Rule:
    tokens: list[_Token] = field(default_factory=list)


def _tokens(grammar: str) -> Iterator[_Token]:
    offset, line = 0, 1
    while offset < len(grammar):
        match = _TOKEN.match(grammar, offset)
        if match is None:
            raise ValueError(f"line {line}: can't be read from {grammar[offset : offset + 20]!r} on")
        groups = match.groupdict()
        text = match[0]
        try:
            if groups["rule"] is not None:
                yield _Token("rule", groups["rule"], line)
            elif groups["name"] is not None:
                yield _Token("name", text, line)
            elif groups["literal"] is not None:
                yield _Token("part", text, line, literal("".join(_characters(groups["literal"]))))
            elif groups["set"] is not None:
                yield _Token("part", text, line, _set(groups["not"], groups["set"]))
            elif groups["least"] is not None:
                yield _Token("often", text, line, often=_often(groups))
            elif text in _REPETITIONS:
                yield _Token("often", text, line, often=_REPETITIONS[text])
            elif text == ".":
                yield _Token("part", text, line, pattern("(?s:.)"))
            elif groups["sign"] is not None:
                yield _Token(text, text, line)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"line {line}: {text[:40]}: {error}") from None
        line += text.count("\n")
        offset = match.end()


def _often(groups: Mapping[str, str | None]) -> tuple[int, int | None]:
    least = int(groups["least"] or 0)
    if groups["range"] is None:
        if groups["most"] is not None:
            raise ValueError("expected a comma")
        return least, least
    most = None if groups["most"] is None else int(groups["most"])
    if most is not None and most < least:
        raise ValueError("the second number is the smaller one")
    return least, most


def _characters(escaped: str) -> Iterator[str]:
    for match in _CHARACTER.finditer(escaped):
        code = match[1] or match[2] or match[3]
        if code:
            yield chr(int(code, 16))
        elif match[4]:
            if match[4] not in _ESCAPES:
                raise ValueError(f"unknown escape \\{match[4]}")
            yield _ESCAPES[match[4]]
        else:
            yield match[5]


def _set(negation: str, inside: str) -> Part:
    """A set of characters; a hyphen between two of them makes a range."""
    members = [(char, match[0] == "-") for match in _CHARACTER.finditer(inside) for char in _characters(match[0])]
    if not members:
        raise ValueError("the set is empty")
    text, offset = "", 0
    while offset < len(members):
        first = last = members[offset][0]
        if offset + 2 < len(members) and members[offset + 1][1]:
            last = members[offset + 2][0]
            offset += 2
        if last < first:
            raise ValueError(f"the range {first}-{last} is empty")
        text += f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}"
        offset += 1
    return pattern(f"[{negation}{text}]")


def _lark_names(rules: Mapping[str, _Rule]) -> Mapping[str, Part]:
    """By GBNF's names, the rules' names in Lark's notation: those that refer to no rule but such are terminals."""
    users = defaultdict[str, list[str]](list)
    missing = dict[str, int]()
    for name, rule in rules.items():
        used = {token.text: token.line for token in rule.tokens if token.kind == "name"}
        missing[name] = len(used)
        for used_name, line in used.items():
            if used_name not in rules:
                raise ValueError(f"line {line}: there is no rule {used_name[:80]}")
            users[used_name].append(name)
    ready = [name for name, count in missing.items() if not count]
    for name in ready:
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return {
        name: Part(f"rule_{number}", is_regular=False) if missing[name] else Part(f"RULE_{number}", is_regular=True)
        for number, name in enumerate(rules)
    }


class _Body:
    """What stands behind a rule's `::=`."""

    def __init__(self, lark: LarkGrammar, names: Mapping[str, Part], tokens: list[_Token]) -> None:
        self._lark = lark
        self._names = names
        self._tokens = tokens
        self._place = 0

    def part(self) -> Part:
        """The whole body; raises ValueError."""
        choice = self._choice(0)
        if self._place < len(self._tokens):
            raise self._unexpected()
        return choice

    def _choice(self, depth: int) -> Part:
        alternatives = [self._sequence(depth)]
        while self._is_at("|"):
            self._place += 1
            alternatives.append(self._sequence(depth))
        return self._lark.choice(alternatives)

    def _sequence(self, depth: int) -> Part:
        parts: list[Part] = []
        num_often = 0
        while self._place < len(self._tokens) and not (self._is_at("|") or self._is_at(")")):
            token = self._tokens[self._place]
            num_often = num_often + 1 if token.kind == "often" else 0
            if num_often > _MAX_DEPTH:
                raise ValueError(f"line {token.line}: more than {_MAX_DEPTH} repetitions of a repetition")
            if token.kind == "part":
                parts.append(token.part)
            elif token.kind == "name":
                parts.append(self._names[token.text])
            elif token.kind == "often" and parts:
                parts.append(self._lark.repeated(parts.pop(), *token.often))
            elif token.kind == "(" and depth < _MAX_DEPTH:
                self._place += 1
                parts.append(self._choice(depth + 1))
                if not self._is_at(")"):
                    raise ValueError(f"line {token.line}: the group is not closed")
            else:
                raise self._unexpected()
            self._place += 1
        return self._lark.sequence(parts)

    def _is_at(self, kind: str) -> bool:
        return self._place < len(self._tokens) and self._tokens[self._place].kind == kind

    def _unexpected(self) -> ValueError:
        token = self._tokens[self._place]
        if token.kind == "(":
            return ValueError(f"line {token.line}: groups are nested deeper than {_MAX_DEPTH} levels")
        return ValueError(f"line {token.line}: {token.text[:40]} is not expected here")
