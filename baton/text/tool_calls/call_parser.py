"""The common part of the parsers: plain text, held text, and one call as a JSON object.

The rules:

1. No text is lost: the sources of all events, joined, are the text so far, but for what is held.
2. Held is only what may yet become part of a call: the beginning of a marker with white space before it, and the head
   of a call up to its arguments, at most MAX_HELD_CHARS. If it does not become a call, it is content.
3. A call begins once its head is well-formed up to the `{` of its arguments, so most malformed calls are content as a
   whole. If the arguments turn out malformed, the call is closed, and the rest of the text is content (in which further
   calls are found). A text that ends within the arguments closes the call, too.
4. The events are a function of the text: how it was cut into pieces changes no more than the cuts of their texts.
5. After `max_calls` calls all text is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable
from re import Pattern

from baton.text.tool_calls.events import Arguments, CallBegun, CallEnded, Content, Marker, ToolEvent
from baton.text.tool_calls.json_scanner import JsonScanner, Kind, NotJson

MAX_CALLS = 128
"""The most calls in one text; as many as a request may have tools."""
MAX_HELD_CHARS = 16 << 10
"""The longest head of a call: long only if the model writes the arguments before the name."""
MAX_HELD_SPACES = 64
"""The longest white space before a marker that counts as part of it."""
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
"""What a tool may be called, as in OpenAI's API."""
END = ""
"""What a parser reads behind the text's last character."""
Reading = Generator[None, str, str]
"""Reads characters that are sent to it, and returns the first one that it does not take."""


class Malformed(Exception):
    """This is no call of the format. `char`: the first character that was not taken."""

    def __init__(self, char: str) -> None:
        super().__init__(char)
        self.char = char


class CallParser:
    """A parser whose calls begin with a marker; subclasses say which, and read what follows it."""

    marker = ""
    """The text with which calls begin."""
    plain: Pattern[str]
    """Matches text that is content as a whole: without the marker's first character, and no white space at its ends."""
    argument_keys: tuple[str, ...] = ("arguments",)
    """The keys under which the object of a call has its arguments."""

    def __init_subclass__(cls) -> None:
        first = re.escape(cls.marker[:1])
        cls.plain = re.compile(rf"[^\s{first}](?:[^{first}]*[^\s{first}])?")

    def __init__(self, names: Iterable[str] = (), max_calls: int = MAX_CALLS) -> None:
        """`names`: the tools of the request."""
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._num_calls = 0
        self._held = ""
        """Text that no event has yet, in front of the arguments that are pending."""
        self._arguments: list[str] = []
        self._source: list[str] = []
        """Characters of arguments that are in no event yet, and their sources; a source may be empty."""
        self._contents: list[str] = []
        """Content that is in no event yet."""
        self._is_open = False
        """Whether a call has begun and not ended."""
        self._is_empty = True
        """Whether there was nothing but white space so far."""
        self._events: list[ToolEvent] = []
        self._is_after_call = False
        """Whether there was nothing but white space since the last call."""
        self._is_plain = True
        """Whether the text is content here, with at most white space held."""
        self._machine = self._run()
        next(self._machine)
        self._is_over = False

    def push(self, text: str) -> list[ToolEvent]:
        """Take the next piece of the text; returns what is certain by now."""
        offset, send = 0, self._machine.send
        while offset < len(text):
            if self._is_plain and not self._is_empty and (run := self.plain.match(text, offset)):
                self._plain_text(run[0])
                offset = run.end()
                continue
            send(text[offset])
            offset += 1
        return self._take()

    def finish(self) -> list[ToolEvent]:
        """Return the rest, when no text follows. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._machine.send(END)
        return self._take()

    def _calls(self, char: str) -> Reading:
        """Read the calls that begin with `char`; raises Malformed."""
        raise NotImplementedError

    def _may_begin(self, char: str) -> bool:
        """Whether a call may begin with this character."""
        return char == self.marker[0]

    def _is_name(self, name: str) -> bool:
        """Whether this may be the name of a tool."""
        return TOOL_NAME.match(name) is not None

    def _run(self) -> Generator[None, str, None]:
        char = yield
        while char != END:
            if self._num_calls < self._max_calls and self._may_begin(char):
                self._is_plain = False
                try:
                    char = yield from self._calls(char)
                except Malformed as error:
                    char = error.char
                    self._abandon()
                self._is_plain, self._is_empty = True, False
                continue
            if not char.isspace():
                self._is_empty = False
                self._plain_text(char)
            else:
                self._held += char
                if len(self._held) > MAX_HELD_SPACES:
                    self._abandon()
            char = yield
        if self._held and self._is_after_call:
            self._end_marker()
        self._abandon()
        yield

    def _abandon(self) -> None:
        """Give up what was read since the last event: an open call is closed, and the rest is content."""
        if self._is_open:
            self._end_call(is_complete=False)
        if self._held:
            held, self._held = self._held, ""
            self._content(held)

    def _plain_text(self, text: str) -> None:
        """Take text that is content. White space before it is, too, but not behind a call."""
        if self._held and self._is_after_call:
            self._end_marker()
        held, self._held = self._held, ""
        self._content(held + text)

    def _content(self, text: str) -> None:
        self._is_after_call = False
        self._contents.append(text)

    def _take(self) -> list[ToolEvent]:
        self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        """Make events of all content and arguments so far; there are never both."""
        if self._contents:
            self._events.append(Content("".join(self._contents)))
            self._contents.clear()
        if self._source:
            self._events.append(Arguments("".join(self._arguments), "".join(self._source)))
            self._arguments.clear()
            self._source.clear()

    def _hold(self, char: str) -> None:
        if len(self._held) >= MAX_HELD_CHARS:
            raise Malformed(char)
        self._held += char

    def _end_marker(self) -> None:
        """What is held belongs to the format alone."""
        self._flush()
        held, self._held = self._held, ""
        self._events.append(Marker(held))

    def _begin_call(self, name: str) -> None:
        self._num_calls += 1
        self._is_open = True
        held, self._held = self._held, ""
        self._flush()
        self._events.append(CallBegun(name, held))

    def _end_call(self, *, is_complete: bool) -> None:
        self._flush()
        self._is_open, self._is_after_call = False, True
        self._events.append(CallEnded(is_complete))

    def _literal(self, char: str, literal: str) -> Reading:
        """Read a literal whose first character may be `char`."""
        for wanted in literal:
            if char != wanted:
                raise Malformed(char)
            self._hold(char)
            char = yield
        return char

    def _closing(self, char: str, literal: str) -> Reading:
        """Read the literal behind calls; where the text ends within it, it is no content."""
        try:
            char = yield from self._literal(char, literal)
        except Malformed as error:
            if error.char != END:
                raise
            char = END
        if self._held:
            self._end_marker()
        return char

    def _spaces(self, char: str) -> Reading:
        while char != END and char in " \t\r\n":
            self._hold(char)
            char = yield
        return char

    def _objects(self, char: str) -> Reading:
        """Read a list of calls."""
        char = yield from self._literal(char, "[")
        while True:
            char = yield from self._spaces(char)
            char = yield from self._object(char)
            char = yield from self._spaces(char)
            if char != ",":
                return (yield from self._closing(char, "]"))
            self._hold(char)
            char = yield

    def _object(self, char: str) -> Reading:
        """Read one call: an object with a name and with arguments, in any order; further keys mean nothing.

        A call without arguments has the name alone: further keys may be arguments in another form, so with them the
        object is no call.
        """
        if char != "{" or self._num_calls == self._max_calls:
            raise Malformed(char)
        scanner = JsonScanner()
        key = name = ""
        early: tuple[int, int, str] | None = None
        """Arguments that stand before the name: where their source begins and ends in the held text, and their text."""
        is_called = has_further_keys = False
        while not scanner.is_done:
            kind = push(scanner, char)
            self._hold(char)
            is_argument = key in self.argument_keys
            if scanner.depth == 1 and kind is Kind.KEY:
                key, char = yield from self._string(scanner)
                if (key == "name" and name) or (key in self.argument_keys and (is_called or early)):
                    raise Malformed(char)
                has_further_keys |= key not in ("name", *self.argument_keys)
            elif scanner.depth == 1 and kind is Kind.STRING and key == "name":
                name, char = yield from self._string(scanner)
                if not self._is_name(name):
                    raise Malformed(char)
                if early is not None:
                    self._call_at_once(name, early)
                    is_called = True
            elif scanner.depth == 2 and kind is Kind.OPEN and is_argument and char == "{" and name:
                self._held = self._held[:-1]
                self._begin_call(name)
                is_called = True
                char = yield from self._streamed(scanner)
            elif scanner.depth == 2 and kind is Kind.OPEN and is_argument and char == "{":
                begin = len(self._held) - 1
                text, char = yield from self._early(scanner)
                early = begin, len(self._held), text
            elif (
                kind in (Kind.OPEN, Kind.STRING, Kind.SCALAR) and scanner.depth <= 2 and (is_argument or key == "name")
            ):
                raise Malformed((yield))
            else:
                char = yield
        if not name or (has_further_keys and not is_called):
            raise Malformed(char)
        if not is_called:
            self._call_at_once(name, (len(self._held), len(self._held), "{}"))
        if self._held:
            self._end_marker()
        return char

    def _call_at_once(self, name: str, arguments: tuple[int, int, str]) -> None:
        """Give a whole call, of which the text is held."""
        begin, end, text = arguments
        held, self._held = self._held, self._held[:begin]
        self._begin_call(name)
        self._arguments.append(text)
        self._source.append(held[begin:end])
        self._end_call(is_complete=True)
        self._held = held[end:]

    def _string(self, scanner: JsonScanner) -> Generator[None, str, tuple[str, str]]:
        """Read a string behind its first quote; returns what it says, and the character behind it."""
        begin = len(self._held) - 1
        while scanner.is_in_string:
            char = yield
            push(scanner, char)
            self._hold(char)
        return json.loads(self._held[begin:], strict=False), (yield)

    def _early(self, scanner: JsonScanner) -> Generator[None, str, tuple[str, str]]:
        """Hold arguments behind their first brace; returns them, and the character behind them."""
        pieces, outside = ["{"], scanner.depth - 1
        while scanner.depth > outside:
            char = yield
            pieces.append(_escaped(char, push(scanner, char)))
            self._hold(char)
        return "".join(pieces), (yield)

    def _streamed(self, scanner: JsonScanner) -> Reading:
        """Give out arguments as they come; their first brace was read. Returns the character behind them."""
        outside = scanner.depth - 1
        self._arguments.append("{")
        self._source.append("{")
        while scanner.depth > outside:
            char = yield
            self._arguments.append(_escaped(char, push(scanner, char)))
            self._source.append(char)
        self._end_call(is_complete=True)
        return (yield)


def push(scanner: JsonScanner, char: str) -> Kind:
    """`JsonScanner.push`; raises Malformed in place of NotJson."""
    if char == END:
        raise Malformed(char)
    try:
        return scanner.push(char)
    except NotJson:
        raise Malformed(char) from None


def _escaped(char: str, kind: Kind) -> str:
    return json.dumps(char)[1:-1] if kind is Kind.CONTROL else char
