"""Grammars in GBNF are told from those in Lark's notation, and take the same texts as llama.cpp's."""

from __future__ import annotations

import re

import pytest

from baton.errors import InvalidRequest
from baton.text.constraints.lark_grammars import is_gbnf, lark_of_gbnf
from baton.text.constraints.schema_compiling import check_constraint
from tests.support.byte_matching import takes

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""# sums ::= of terms
root ::= (expr "=" term "\n")+
expr ::= term ([-+*/] term)*   # a loop
term ::= ident | num | "(" expr ")"
ident ::= [a-z] [a-z0-9_]*
num ::= [0-9]+
"""
GRAMMARS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "alternatives": ('root   ::= "a" |\n  "b"\n | "c" "d"', ("a", "b", "cd"), ("c", "ab", "")),
    "names": ('root ::= Foo-Bar foo_bar2\nFoo-Bar ::= "a"\nfoo_bar2 ::= "b" foo_bar2?', ("ab", "abbb"), ("a", "b")),
    "escapes": (r'root ::= "caf\u00e9\x41\\\"" [\u0041-\u0043\-\]\U0001F389]', ('caféA\\"B', 'caféA\\"🎉'), ("cafe",)),
    "sets": (r'root ::= [^"\\\x7F]{1,3} "/" [/\]^-]', ("ab\n/]", "a//", "x/^", "x/-"), ('"/]', "abcd/]")),
    "any": ("root ::= . [^\\n]{2}", ("\nab", "äöü"), ("a\nb", "ab")),
    "counted": (
        'root ::= x{2} "-" x{1,} "-" "b"{0,2}\nx ::= "(" x ")" | "1"',
        ("11-1-", "1(1)-111-bb"),
        ("1-1-", "11--"),
    ),
    "greedy": ('root ::= item "end"\nitem ::= [a-z]+', ("xend", "endend"), ("end", "xend1")),
    "shorter": ('root ::= ("a" | "ab") "bc"', ("abc", "abbc"), ("ab",)),
    "json": (JSON, ('{"a": [1, -2.5e3, "ü\\n"], "b": {}}', "{}", '{"a":\n  true}'), ('{"a":,}', "[]", "{:1}")),
    "sums": (SUMS, ("1+2=3\n", "(1+a_1)/2=b\n1=1\n"), ("1+=3\n", "1=2", "")),
    "recursive": ('root ::= "(" root ")" | ""', ("", "()", "((()))"), ("(", "())")),
    "empty": ('root ::= blank "x" blank\nblank ::= | " " blank', ("x", "  x "), (" ",)),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_takes_its_texts_and_no_others(name: str) -> None:
    grammar, good, bad = GRAMMARS[name]
    assert is_gbnf(grammar)
    check_constraint(grammar, "grammar")
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []
    assert [takes(lark_of_gbnf(grammar), text) for text in good] == [True] * len(good)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a"',
        '?start: sum\nsum: sum "+" /[0-9]+/ | /[0-9]+/',
        'start: "x ::= y"',
        "start: /::=/ // root ::= is no rule",
        'start: a\na: "root" "::="',
    ],
)
def test_other_grammars_are_in_larks_notation(grammar: str) -> None:
    assert not is_gbnf(grammar)


REFUSED = {
    'root ::= "a': "line 1: can't be read from",
    'root ::= "a"\n\nx ::= [z-a]': "line 3: [z-a]: the range z-a is empty",
    'x ::= "a"': "has no rule root",
    "root ::= y": "line 1: there is no rule y",
    'root ::= "a" root ::= "b"': "the rule root is there twice",
    '"a"\nroot ::= "b"': "line 1: expected NAME ::=",
    "root ::= *": "* is not expected here",
    'root ::= ("a"': "the group is not closed",
    'root ::= "a")': ") is not expected here",
    r'root ::= "\q"': r"unknown escape \q",
    "root ::= []": "the set is empty",
    r'root ::= "\UFFFFFFFF"': "line 1",
    r'root ::= "\ud800"': "hex escape",
    'root ::= "a"{3,2}': "the second number is the smaller one",
    'root ::= "a"{3 4}': "expected a comma",
    'root ::= (= "a") "a"': "can't be read from",
    "root ::= " + "(" * 5000: "groups are nested deeper than 32 levels",
    'root ::= "a"' + "+" * 33: "more than 32 repetitions of a repetition",
    "root ::= root": "no text that the model can write fits",
    "root ::= " + "[a]" * 6000: "at most 16384 are taken in GBNF",
    'root ::= "a"{999999999}': "too many expressions",
}


@pytest.mark.parametrize("grammar", REFUSED, ids=range(len(REFUSED)))
def test_what_can_not_be_served_is_refused_with_the_reason(grammar: str) -> None:
    assert is_gbnf(grammar)
    with pytest.raises(InvalidRequest, match=re.escape(REFUSED[grammar])) as caught:
        check_constraint(grammar, "grammar")
    assert caught.value.field == "grammar"
