"""A page in headless chromium, driven by the DevTools protocol: what it logs, asks the network for, and shows.

Source: "Chrome DevTools Protocol"; `--remote-debugging-pipe` takes JSON messages that end in a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
LONGEST_S = 120.0


class Browser:
    """One page of one chromium, ended with the `with` block.

    Attributes:
        problems: errors and warnings of the page's console and of its scripts, in words.
        requests: every address that the page asked for, its own first.

    Args:
        profile: an empty folder for the browser's files.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._number, self._left, self._seen = 0, b"", list[dict[str, Any]]()
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        launch = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write} 2>/dev/null >/dev/null'
        self._process = subprocess.Popen(
            ["bash", "-c", launch, CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        targets = self._call("Target.getTargets")["targetInfos"]
        (page,) = [target for target in targets if target["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def look(self, *, width: int, height: int = 900, is_dark: bool = False) -> None:
        """Sets the size of the window in pixels, and light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, path: Path, until: str) -> None:
        """Opens a file and waits until the expression `until` is true in it."""
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for(until)

    def wait_for(self, expression: str) -> None:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + LONGEST_S
        while self.ask(f"Boolean({expression})") is not True:
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} did not become true; the page says {self.problems}")
            time.sleep(0.1)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise ValueError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Moves the mouse to the middle of the first element that the selector finds, which is scrolled into view."""
        one = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{one}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.ask(f"{one}.getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for shift in (0, 1):  # from beside it onto it
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift / 4, y=y + shift / 4)

    def picture(self, path: Path) -> None:
        """Writes the whole page, as tall as it is, as a PNG file."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command to the page."""
        return self._call(method, self._session, **params)

    def _call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise ValueError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + LONGEST_S
        while b"\0" not in self._left:
            if not select.select([self._from], [], [], max(end - time.monotonic(), 0.0))[0]:
                raise TimeoutError("chromium does not answer")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise EOFError("chromium has ended")
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:2000])
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"])[:2000])
