"""Headless Chromium over the pipe of the DevTools protocol, without ports, drivers or access to the network."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")


class Browser:
    """Headless Chromium with one page; a context manager.

    Args:
        folder: for the browser's profile and log.
    """

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", f"--user-data-dir={folder}"]
        flags += ["--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'  # the protocol's file descriptors
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", script, CHROMIUM, *flags], pass_fds=(to_browser, from_browser), stdout=log, stderr=log
            )
        os.close(to_browser)
        os.close(from_browser)
        self._answers = os.fdopen(self._read, "rb")
        self._left = b""
        self._number = 0
        self._scripts: dict[str, bytes] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # ends the browser
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = self._send(method, parameters)
        while True:
            while b"\0" not in self._left:
                piece = os.read(self._read, 1 << 16)
                assert piece, "the browser exited"
                self._left += piece
            text, _, self._left = self._left.partition(b"\0")
            message = json.loads(text)
            if message.get("method") == "Fetch.requestPaused":
                script = self._scripts[message["params"]["request"]["url"]]
                answer = {"responseCode": 200, "body": base64.b64encode(script).decode()}
                self._send("Fetch.fulfillRequest", {"requestId": message["params"]["requestId"]} | answer)
            elif message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _send(self, method: str, parameters: dict[str, Any]) -> int:
        self._number += 1
        session = {"sessionId": self._session} if hasattr(self, "_session") else {}
        message = {"id": self._number, "method": method, "params": parameters} | session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._number

    def serve(self, url: str, script: bytes) -> None:
        """Answer requests for `url` with `script`."""
        self._scripts[url] = script
        self.call("Fetch.enable", patterns=[{"urlPattern": pattern} for pattern in self._scripts])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression or promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> Any:
        """Return the first truthy value of the JavaScript expression `script`."""
        return self.wait_until(lambda: self.evaluate(f"document.body && ({script})"), script, seconds)

    def wait_until(self, condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        """Return the first truthy value of `condition()`, described by `what`."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            text = self.evaluate("document.body?.innerText")
            assert time.monotonic() < end, f"{what}: timed out after {seconds} s; the page shows {text}"
            time.sleep(0.1)
        return value

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
