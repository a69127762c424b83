"""`baton chat`: a conversation with the model in a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli.output import print_answer, print_note, print_text
from baton.cli.sampling_options import MinPOption, TemperatureOption, TopKOption, TopPOption
from baton.cli.target import RunDirOption, cluster_end_check, local_cluster, run_dir_of
from baton.cli.waiting import closing_line
from baton.errors import BatonError, InvalidRequest, PermissionDenied, Unauthenticated, Unreachable
from baton.messages.generation import Chunk, Finished
from baton.security.access import default_access
from baton.text.ends import MAX_READ_CHARS, repeated_end

if TYPE_CHECKING:
    from baton.cli.chat_stream import ChatClient, Endpoint

_PROMPT = "> "
_CLOSING = "the chat is over, and nothing of it is kept"
_LOOPS = "stopped this answer because it only repeats itself; --allow-repetition lets such answers go on"
_COMMANDS = "/exit or Ctrl-D ends the chat, /clear starts a new conversation, Ctrl-C stops an answer, /help says this"
_EXITS = frozenset({"/exit", "/quit", "/bye"})
"""What ends the chat: the documented word, and those of other chats in terminals."""


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(chat)


@dataclass(slots=True)
class Conversation:
    """The messages of a conversation, as `messages` of the HTTP API."""

    system: str | None = None
    turns: list[Mapping[str, str]] = field(default_factory=list)

    def messages_with(self, text: str) -> list[Mapping[str, str]]:
        """All messages so far, and a new one of the user."""
        first = [_message("system", self.system)] if self.system is not None else []
        return [*first, *self.turns, _message("user", text)]

    def add(self, question: str, answer: str) -> None:
        """Add one turn: the message of the user and the answer."""
        self.turns += [_message("user", question), _message("assistant", answer)]

    def clear(self) -> None:
        """Remove all messages except the system message."""
        self.turns.clear()


def chat(
    message: Annotated[
        str | None,
        typer.Argument(help="Ask this alone, and end with the answer.", metavar="MESSAGE", show_default=False),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message, which precedes the conversation.", metavar="TEXT")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.", metavar="N")] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling; equal seeds give equal answers.", metavar="N")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop an answer before this text. May be repeated.", metavar="TEXT")
    ] = None,
    allow_repetition: Annotated[
        bool,
        typer.Option(
            "--allow-repetition", help="Do not stop an answer that repeats the same text over and over, word for word."
        ),
    ] = False,
    model: Annotated[
        str, typer.Option(help="Name of the model. Default: the only model of the cluster.", metavar="NAME")
    ] = "",
    timeout: Annotated[
        float | None, typer.Option(help="Longest time for an answer, in seconds.", metavar="SECONDS", min=0)
    ] = None,
    run_dir: RunDirOption = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="http://HOST:PORT of a router, instead of a run directory. May be repeated.",
            metavar="URL",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Chat with the model, or ask it one MESSAGE. Answers are printed while they are generated.

    /exit, Ctrl-D or Ctrl-C twice ends the chat, /clear starts a new conversation, Ctrl-C stops an answer, /help lists
    the commands. Pasted lines are one message. If the input is not a terminal, each of its lines is a message.
    """
    from baton.cli.chat_stream import ChatClient

    settings = {
        "model": model or None,
        "max_completion_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
    }
    endpoints = _endpoints(url, run_dir)
    has_cluster_ended = cluster_end_check(run_dir) if not url else bool
    client = ChatClient(
        endpoints, default_access.get(), SystemRandom(), has_cluster_ended, lambda text: print_note(f"\nbaton: {text}")
    )
    session = Session(
        client,
        {name: value for name, value in settings.items() if value is not None},
        timeout,
        Conversation(system),
        allows_repetition=allow_repetition,
        hint=f"see {run_dir_of(run_dir).command('status')}" if not url else "is this the router's HTTP address?",
    )
    if sys.stdin is None:  # as `baton chat <&-` starts it
        sys.stdin = io.StringIO()
    if isinstance(sys.stdin, io.TextIOWrapper):
        # The router refuses a message that is not UTF-8.
        sys.stdin.reconfigure(errors="surrogateescape")
    with closing_line(_CLOSING):
        if message is not None:
            session.ask(message)
            return
        if sys.stdin.isatty():
            _run_in_terminal(session)
            return
        for line in sys.stdin:
            if not session.handle_line(line.rstrip("\n")):
                break


class Session:
    """One conversation with a cluster."""

    def __init__(
        self,
        client: ChatClient,
        settings: Mapping[str, Any],
        timeout_s: float | None,
        conversation: Conversation,
        *,
        allows_repetition: bool,
        hint: str,
    ) -> None:
        self.conversation = conversation
        self._allows_repetition = allows_repetition
        self._client = client
        self._settings = settings
        self._timeout_s = timeout_s
        self._hint = hint

    def handle_line(self, line: str) -> bool:
        """Handle one input, a message or a command. Returns False after /exit. Raises BatonErrors."""
        word = line.strip()
        if word in _EXITS:
            return False
        if word == "/clear":
            self.conversation.clear()
        elif word == "/help":
            print_note(_COMMANDS)
        elif word.startswith("/") and len(word.split()) == 1:
            print_note(f"baton: there is no command {word}: {_COMMANDS}")
        elif word:
            self.ask(line)
        return True

    def ask(self, text: str) -> None:
        """Send a message and print the answer. A partial answer becomes part of the conversation, too.

        An answer in a loop is stopped, since a model does not leave it before the context is full.
        """
        pieces: list[str] = []
        tail, loops = "", False
        end: Finished | None = None
        question = {**self._settings, "messages": self.conversation.messages_with(text)}
        try:
            with closing(self._client.answer(question, self._timeout_s)) as events:
                for event in events:
                    if isinstance(event, Chunk) and event.text:
                        pieces.append(event.text)
                        print_answer(event.text, end="")
                        tail = (tail + event.text)[-MAX_READ_CHARS:]
                        if loops := not self._allows_repetition and bool(repeated_end(tail)):
                            break
                    elif isinstance(event, Finished):
                        end = event
        except Unreachable as error:
            raise Unreachable(f"{error}: {self._hint}") from None
        except KeyboardInterrupt:
            self.conversation.add(text, "".join(pieces))
            raise
        finally:
            if pieces or end is not None:
                print_text()
        self.conversation.add(text, "".join(pieces))
        if loops:
            print_note(f"baton: {_LOOPS}")
        if end is not None and sys.stderr.isatty():
            print_note(f"[{end.prompt_tokens} + {end.completion_tokens} tokens, {end.finish_reason}]")


def _run_in_terminal(session: Session) -> None:
    """Read lines from a terminal. Only errors that every further message would meet end the chat.

    So does a second Ctrl-C in a row that no answer is there to be stopped by: raises KeyboardInterrupt.
    """
    with suppress(ImportError):
        # Importing it gives `input` line editing and a history. A terminal marks what is pasted, so that its ends of
        # lines don't send what came so far; CPython turns that off.
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    print_note(_COMMANDS)
    is_open, wants_out = True, False
    while is_open:
        try:
            line = input(_PROMPT)
        except EOFError:
            print_text()
            return
        except KeyboardInterrupt:
            if wants_out:
                raise
            wants_out = True
            print_text()
            print_note("Ctrl-C again, Ctrl-D or /exit ends the chat")
            continue
        wants_out = False
        try:
            is_open = session.handle_line(line)
        except KeyboardInterrupt:
            print_note("[stopped]")
        except (Unauthenticated, PermissionDenied):
            raise
        except InvalidRequest as error:
            print_note(f"baton: {error}{' (/clear starts a new conversation)' if session.conversation.turns else ''}")
        except BatonError as error:
            print_note(f"baton: {error}")


def _endpoints(urls: Sequence[str] | None, run_dir: Path | None) -> Sequence[Endpoint]:
    """The HTTP addresses of all routers of one cluster. Raises Unreachable or UsageError."""
    from baton.cli.chat_stream import Endpoint

    if urls:
        return [Endpoint.parse(url) for url in urls]
    cluster = local_cluster(run_dir, "--url")
    scheme = "http" if default_access.get().tls_ca is None else "https"
    endpoints = [Endpoint.parse(f"{scheme}://{address}") for address in cluster.state.http_addresses]
    if not endpoints:
        raise cluster.no_router_ready()
    return endpoints


def _message(role: str, content: str) -> Mapping[str, str]:
    return {"role": role, "content": content}
