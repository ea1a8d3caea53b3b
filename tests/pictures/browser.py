"""A Chromium without a window that shows a page, and does what a person would: driven over its debugging pipe, with nothing but
the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_ANSWER_SECONDS = 60


def find_browser() -> str | None:
    """The path of a Chromium: that of FXPIPE_CHROMIUM, or the first on PATH."""
    return os.environ.get("FXPIPE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page in a browser.

    Attributes:
        complaints: What the console has as errors and warnings since the page was opened, and exceptions that nobody caught.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._received = b""
        self._num_calls = 0
        self._session: dict[str, str] = {}
        self._events: list[str] = []
        self.complaints: list[str] = []

    def open(self, path: Path, *, width: int = 1400, height: int = 1200, is_dark: bool = False) -> None:
        """Shows a file, and waits until it is drawn."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.complaints.clear()
        self._call("Page.navigate", url=path.resolve().as_uri())
        self._wait_for("Page.loadEventFired")
        self.wait_until_drawn()

    def wait_until_drawn(self) -> None:
        """Waits for the second next picture of the screen: what was asked for before is on it."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """The value of an expression, or of what it promises."""
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, *, is_shift: bool = False) -> None:
        """Presses a key, as ``KeyboardEvent.key`` calls it."""
        codes = {
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "Escape": 27,
            " ": 32,
            "Tab": 9,
            "Enter": 13,
        }
        of_text = {"text": key} if len(key) == 1 else {}
        code = codes.get(key, ord(key[0]))
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                modifiers=8 if is_shift else 0,
                **(of_text if kind == "keyDown" else {}),
            )
        self.wait_until_drawn()

    def point(self, kind: str, x: float, y: float, **details: Any) -> None:
        """A mouse event: ``mouseMoved``, ``mousePressed``, ``mouseReleased`` or ``mouseWheel``, at a place on the screen."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **details)
        self.wait_until_drawn()

    def picture(self, path: Path, *, is_whole: bool = True) -> None:
        """Saves a screenshot as PNG, of the whole page or of what is on the screen."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": parameters, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._num_calls:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _wait_for(self, event: str) -> None:
        while event not in self._events:
            self._note(self._receive())

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        if method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(parameters["entry"]["text"]))
        if method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            received = os.read(self._read, 1 << 20)
            assert received, "the browser has ended"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser(program: str, folder: Path) -> Iterator[Browser]:
    """A browser that is there for the block.

    Args:
        program: The path of a Chromium.
        folder: For its profile.
    """
    to_browser, of_us = os.pipe()
    of_browser, from_browser = os.pipe()
    ends = (str(to_browser), str(from_browser))
    command = [sys.executable, "-c", _START, *ends, program, *_OPTIONS, f"--user-data-dir={folder}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), stdout=log, stderr=log)
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(of_browser, of_us)
    finally:
        os.close(of_us)  # at the end of its pipe it ends by itself
        os.close(of_browser)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# It reads from descriptor 3 and writes to 4. Through copies, as the pipe's own may be 3 and 4 the other way round.
_START = """
import os, sys
copies = [os.dup(os.dup(os.dup(int(end)))) for end in sys.argv[1:3]]
for copy, number in zip(copies, (3, 4)):
    os.dup2(copy, number)
os.execv(sys.argv[3], sys.argv[3:])
"""

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # which containers do not allow; the only page is the test's own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
    "about:blank",
)
