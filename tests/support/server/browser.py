"""A headless Chromium, driven by the DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60.0
ENTER, ESCAPE, TAB, SPACE = ("Enter", 13, "\r"), ("Escape", 27), ("Tab", 9), (" ", 32, " ")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)

_BEGIN = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Become the browser, with the pipes where it looks for them."""


class Browser:
    """One tab, and what has happened in it."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._from = os.fdopen(to, "wb", 0), os.fdopen(answers, "rb", 0)
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self._unread = b""
        self.requests: list[str] = []  # the addresses that it has asked for
        self.complaints: list[str] = []  # what its console has said: errors, and what the policy of the page forbids
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        while (received := self._next()).get("id") != number:
            self._note(received.get("method"), received.get("params", {}))
        assert "error" not in received, f"{method}: {received['error']}"
        return received["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            read = self._from.read(2**16)
            assert read, "the browser has ended"
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && document.body.childElementCount > 0")

    def open_anew(self, url: str) -> None:
        """Open a page on a desktop, with nothing kept of earlier visits."""
        self.resize(1200, 800)
        self.open(url)
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.requests.clear()
        self.open(url)
        self.complaints.clear()

    def run(self, script: str) -> Any:
        """What an expression comes to, in the page; policies for its scripts do not hold here."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"{script}\n{self.text('body')}\n{self.complaints}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def texts(self, selector: str) -> list[str]:
        found = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((found) => found.innerText)")
        assert isinstance(found, list)
        return found

    def count(self, selector: str) -> int:
        return int(self.run(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def ask(self, question: str) -> None:
        """Send a message on the page to chat."""
        self.type("#question", question)
        self.press(*ENTER)

    def sent(self, question: str) -> dict[str, Any]:
        """Send a message, and return the body of that request."""
        hook = "fetch = (...given) => { sent.push(given[1]?.body); return asks(...given); }"
        self.run(f"globalThis.asks ??= fetch; globalThis.sent = []; {hook}; 0")
        self.ask(question)
        self.until("sent.some(Boolean)")
        return json.loads(self.run("sent.find(Boolean)"))

    def press_button(self, name: str, number: int = -1) -> None:
        """Press a button of the chat by its name; the last one, unless a number is given."""
        buttons = "[...document.querySelectorAll('#log button')]"
        self.run(f"{buttons}.filter((found) => found.textContent === {json.dumps(name)}).at({number}).click()")

    def kept_chats(self) -> list[dict[str, Any]]:
        """The chats that this browser keeps."""
        found = json.loads(self.run("import('/page/chats.js').then(({ kept }) => JSON.stringify(kept()))"))
        assert isinstance(found, list)
        return found

    def until_answered(self, answers: int = 1) -> None:
        self.until(f"document.querySelectorAll('article .note').length === {answers}")

    def until_state(self, state: str) -> None:
        self.until(f"document.querySelector('#state').textContent === {json.dumps(state)}")

    def type(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def look(self, file: Path, width: int = 1200, height: int = 800, scheme: str = "light") -> None:
        """Save a picture of what is seen on a screen of that size."""
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.run("new Promise((resolve) => setTimeout(resolve, 600))")
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser with nothing in it, which is ended afterwards."""
    assert CHROMIUM is not None
    there, to = os.pipe()
    answers, back = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        begin = [sys.executable, "-S", "-c", _BEGIN, str(there), str(back), *command]
        with subprocess.Popen(begin, pass_fds=(there, back), stderr=subprocess.DEVNULL) as process:
            os.close(there)
            os.close(back)
            try:
                yield Browser(to, answers)
            finally:
                process.kill()
