"""Logs for people and for machines, and the announcement that a process is ready."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import threading
from pathlib import Path

import pytest
import structlog

from baton.errors import UsageError
from baton.observe.logs import configure_logging, log_format, log_level, log_to_standard_loggers
from baton.observe.ready import AnnouncementReader, Failed, Ready, announce

pytestmark = pytest.mark.usefixtures("logging_as_it_was")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_logs_have_one_object_per_line() -> None:
    out = io.StringIO()
    configure_logging("info", environ={}, stream=out, process="prefill-0")
    log = structlog.get_logger("baton.node")
    log.info("ready", port=7)
    log.debug("not this")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed")
    thread = threading.Thread(target=logging.getLogger("grpc").warning, args=("a library %s", "speaks"))
    thread.start()
    thread.join()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["ready", "failed", "a library speaks"]
    assert (lines[0]["port"], lines[0]["level"], lines[0]["process"]) == (7, "info", "prefill-0")
    assert "ValueError: boom" in lines[1]["exception"]
    assert lines[2]["process"] == "prefill-0"


def test_a_program_with_its_own_loggers_gets_lines_whose_fields_have_names_of_logging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    structlog.reset_defaults()
    log_to_standard_loggers()
    try:
        raise ValueError("boom")
    except ValueError:
        structlog.get_logger("baton.node").warning("died", name="d0", port=7, exc_info=True)
    (line,) = caplog.records
    assert (line.name, line.getMessage(), line.__dict__["name_"], line.__dict__["port"]) == (
        "baton.node",
        "died",
        "d0",
        7,
    )
    assert line.exc_info is not None


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_text_logs_are_readable_lines(environ: dict[str, str], coloured: bool) -> None:
    out = Terminal()
    configure_logging("debug", environ=environ, stream=out)
    structlog.get_logger("router").debug("placed", node="d0")
    assert "placed" in out.getvalue()
    assert ("\x1b[" in out.getvalue()) is coloured


class Rude:
    def __repr__(self) -> str:
        return "rude:\x1b[2J"


def test_a_terminal_obeys_nothing_in_a_line() -> None:
    out = Terminal()
    configure_logging("info", environ={"NO_COLOR": "1"}, stream=out)
    log = structlog.get_logger("router")
    try:
        raise ValueError("bad \x1b]0;owned\x07")
    except ValueError:
        log.exception("failed \x9b2J", name="\u202etxt", of=Rude(), ids=[1, 2])
        logging.getLogger("grpc").exception("says %s", "\r\x1b[1A")
    found = out.getvalue()
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(found)
    for text in ("ids=[1, 2]", r"failed \u009b2J", r"\u202etxt", r"of=rude:\u001b[2J", r"says \u000d\u001b[1A"):
        assert text in found
    assert found.count(r"ValueError: bad \u001b]0;owned\u0007") == 2


def test_the_log_format_can_be_chosen() -> None:
    out = io.StringIO()
    configure_logging("info", environ={}, stream=out, form="text")
    structlog.get_logger("router").info("placed", node="d0")
    assert "placed" in out.getvalue()
    assert not out.getvalue().startswith("{")
    out = Terminal()
    configure_logging("info", environ={}, stream=out, form="json")
    structlog.get_logger("router").info("placed", node="d0")
    assert json.loads(out.getvalue())["event"] == "placed"
    assert log_format(None, {}) == "auto"
    assert log_format(None, {"BATON_LOG_FORMAT": "JSON"}) == "json"
    assert log_format("text", {"BATON_LOG_FORMAT": "json"}) == "text"
    with pytest.raises(UsageError, match="xml"):
        log_format("xml", {})


def test_the_log_level_can_be_chosen() -> None:
    assert log_level(0, {}, "warning") == "warning"
    assert log_level(0, {"BATON_LOG": "DEBUG"}, "warning") == "debug"
    assert log_level(1, {"BATON_LOG": "error"}, "warning") == "info"
    assert log_level(3, {}, "warning") == "debug"
    with pytest.raises(UsageError, match="loud"):
        log_level(0, {"BATON_LOG": "loud"}, "info")


@pytest.mark.parametrize("news", [Ready("n.1", "h:1", "h:2"), Failed("no model", 78)])
def test_an_announcement_may_arrive_in_pieces(news: Ready | Failed) -> None:
    read_end, write_end = os.pipe()
    announce(write_end, news)
    with os.fdopen(read_end, "rb") as pipe:
        line = pipe.read()
    reader = AnnouncementReader()
    assert list(reader.feed(b"noise\n{}\n[1]\n" + line[:5])) == []
    assert list(reader.feed(line[5:])) == [news]


@pytest.mark.parametrize("place", ["{}/notify", "@{}"])
def test_systemd_is_notified_that_a_process_serves(place: str, tmp_path: Path) -> None:
    address = place.format(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address.replace("@", "\0"))
        announce(None, Failed("no model", 78), {"NOTIFY_SOCKET": address})
        announce(None, Ready("n.1", "h:1"), {"NOTIFY_SOCKET": address})
        assert systemd.recv(100) == b"READY=1"
    announce(None, Ready("n.1", "h:1"), {"NOTIFY_SOCKET": address})


def test_an_announcement_without_a_receiver_is_no_error() -> None:
    announce(None, Ready("n", "h:1"))
    read_end, write_end = os.pipe()
    os.close(read_end)
    announce(write_end, Ready("n", "h:1"))
