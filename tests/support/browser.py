"""A headless Chromium, driven over its own debugging pipe: no driver, no port, no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = Path(__file__).parents[2] / "scripts" / "browser"


class NoBrowser(Exception):
    """There is no Chromium here and none can be installed; the message says why."""


class BrowserError(Exception):
    """The browser refused a command, or a script in the page failed."""


class Browser:
    """Drives one page at a time; made by `browser`.

    `complaints` has the errors and warnings of the page, `requests` the URLs that it asked the network for.
    """

    def __init__(self, commands: int, answers: int) -> None:
        """`commands`, `answers`: file descriptors. A message is JSON followed by a NUL byte."""
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb")
        self._unread = b""
        self._ids = 0
        self._session = ""
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def attach(self) -> None:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1200, height: int = 900, scheme: str = "light", media: str = "") -> None:
        """Load a file without a network, on a screen of this size in pixels."""
        self._load(path.resolve().as_uri(), width, height, scheme, media, offline=True)

    def visit(self, url: str, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Load a page from a server, on a screen of this size in pixels."""
        self._load(url, width, height, scheme, "", offline=False)

    def leave(self) -> None:
        """Show an empty page, so that the server's connections close."""
        self._call("Page.navigate", url="about:blank")

    def _load(self, url: str, width: int, height: int, scheme: str, media: str, *, offline: bool) -> None:
        nothing = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self._call("Network.emulateNetworkConditions", offline=offline, **nothing)
        self.complaints.clear()
        self.requests.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._call(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        self._events.clear()
        self._call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read()

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page. Raises BrowserError."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the mouse to these coordinates (pixels)."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        """Type a text into the element that has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release a key of this name, such as Enter or Escape."""
        code, text = {"Enter": (13, "\r"), "Escape": (27, "")}[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a screenshot as a PNG file."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def print(self, path: Path) -> None:
        """Print the page into a PDF file."""
        path.write_bytes(base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._ids += 1
        message = {"id": self._ids, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._ids:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            more = os.read(self._answers.fileno(), 1 << 16)
            if not more:
                raise BrowserError("the browser is gone")
            self._unread += more
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._note(message)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        params = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif event["method"] == "Log.entryAdded":
            self.complaints.append(str(params["entry"]))
        elif event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def browser(home: Path) -> Iterator[Browser]:
    """Yield a browser that keeps its files in `home`, and end it. Raises NoBrowser."""
    program = _find()
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()
    words = [program, "--headless", "--remote-debugging-pipe", f"--user-data-dir={home}", "--no-first-run"]
    words += ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-extensions"]
    words += ["--disable-background-networking", "--disable-component-update", "--disable-crash-reporter"]
    # Chromium runs as root only without its sandbox; it loads nothing but our own files here.
    words += ["--no-sandbox"] if os.geteuid() == 0 else []
    # The browser reads commands from descriptor 3 and writes answers to 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{command_out} 4>&{answer_in}', "bash", *words]
    process = subprocess.Popen(
        shell,
        pass_fds=(command_out, answer_in),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": str(home)},
    )
    os.close(command_out)
    os.close(answer_in)
    driven = Browser(command_in, answer_out)
    try:
        driven.attach()
        yield driven
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _find() -> str:
    """Return the path of the program; install it if it is missing. Raises NoBrowser."""
    if found := _on_path():
        return found
    done = subprocess.run([INSTALL], capture_output=True, text=True, check=False, timeout=110)
    if found := _on_path():
        return found
    said = (done.stderr or done.stdout).strip().splitlines()[-1:]
    raise NoBrowser(f"no Chromium, and {INSTALL.name} ended with {done.returncode}: {' '.join(said)}")


def _on_path() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)
