"""A headless Chromium, driven over its DevTools protocol through two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Where a Chromium is, if there is one."""

KEY_CODES = {"Tab": 9, "Enter": 13}
"""Codes of the keys for which the browser itself does something."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--window-size=1280,900",
    "--remote-debugging-pipe",
)


class Page:
    """A tab. ``complaints``: errors and warnings of its console, uncaught errors, blocked loads."""

    def __init__(self, to: int, back: int, limit_s: float) -> None:
        self._to, self._from, self._ends_at = to, back, time.monotonic() + limit_s
        self._rest, self._last, self._loaded, self._session = b"", 0, 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Performance.enable", timeDomain="threadTicks")
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        """A command's answer."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            got = self._receive()
            if got.get("id") == self._last:
                assert "error" not in got, got["error"]
                return got["result"]
            self._note(got)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript becomes."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, path: Path, ready: str) -> None:
        """Load a file and wait until an expression is true."""
        loaded = self._loaded
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while self._loaded == loaded:  # what is asked while pages change may have no answer
            self._note(self._receive())
        self.until(ready)

    def until(self, expression: str) -> None:
        while not self.value(expression):
            time.sleep(0.02)

    def prefer(self, scheme: str, media: str = "") -> None:
        """``light`` or ``dark``; ``print`` as the medium."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)

    def busy_s(self) -> float:
        """Processor time of the page's main thread, whoever else was at work."""
        found = self.ask("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "TaskDuration"))

    def press(self, key: str) -> None:
        """A key, with what the browser itself does for it: Tab moves the focus, Enter clicks."""
        known = {"windowsVirtualKeyCode": KEY_CODES[key]} if key in KEY_CODES else {}
        typed = {"text": "\r"} if key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **known, **typed)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, **known)

    def resize(self, width: int, height: int = 900) -> None:
        """Pixels of the viewport; figures that stretch follow at the next frames."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path: Path) -> None:
        """The whole page, below the viewport too, as a PNG."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def hover(self, x: float, y: float) -> None:
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _receive(self) -> Any:
        while b"\0" not in self._rest:
            left = self._ends_at - time.monotonic()
            assert left > 0 and select.select([self._from], [], [], left)[0], "the browser does not answer"
            self._rest += os.read(self._from, 1 << 20) or b"{}\0"
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: Any) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(
                params["exceptionDetails"].get("exception", {}).get("description", "error")
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one)) for one in params["args"]))
        elif method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def browser(profile: Path, *, limit_s: float = 90.0, flags: Sequence[str] = ()) -> Iterator[Page]:
    """``profile``: a folder for what it writes."""
    assert FOUND is not None
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    arguments = [FOUND, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        # Chromium reads commands from descriptor 3 and answers on 4.
        ["bash", "-c", f'exec "$@" 3<&{in_read} 4>&{out_write}', "bash", *arguments],
        pass_fds=(in_read, out_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Page(in_write, out_read, limit_s)
    finally:
        os.write(in_write, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(in_write)
        os.close(out_read)
