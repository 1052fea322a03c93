"""Chromium without a window, driven by its DevTools protocol."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--mute-audio", "--remote-debugging-port=0"),
)


class Tab:
    """One page of the browser.

    Attributes
    ----------
    requested : list of str
        URLs that the page asked for.
    complaints : list of str
        What it wrote to its console, and exceptions.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._number = 0
        self.requested: list[str] = []
        self.complaints: list[str] = []

    def send(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return what it gives."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=60))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def run(self, script: str) -> Any:
        """Return what a script evaluates to; promises are waited for."""
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> Any:
        """Return what a script evaluates to once that is true; fail after a minute."""
        end_s = time.monotonic() + 60
        while not (found := self.run(script)):
            assert time.monotonic() < end_s, (script, self.run("document.body.innerText"))
            time.sleep(0.02)
        return found

    def show(self, width: int, height: int, *, dark: bool = False, scale: int = 1) -> None:
        """Give the page a size, and a light or dark system."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Write what the page looks like as a PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def _note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))


@contextlib.contextmanager
def opened(directory: Path, url: str) -> Iterator[Tab]:
    """Open a page in a browser of its own, whose files are below a directory."""
    from websockets.sync.client import connect

    assert CHROMIUM is not None
    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={directory}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        address = _address(directory / "DevToolsActivePort", process)
        with connect(address, max_size=None, compression=None) as connection:
            tab = Tab(connection)
            for domain in ("Page", "Network", "Runtime", "Log"):
                tab.send(f"{domain}.enable")
            tab.send("Page.navigate", url=url)
            tab.until("document.readyState === 'complete' && location.href !== 'about:blank'")
            yield tab
    finally:
        process.terminate()
        process.wait()


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the WebSocket of the browser's page."""
    end_s = time.monotonic() + 60
    while not (file.exists() and file.read_text().count("\n")):
        assert process.poll() is None
        assert time.monotonic() < end_s
        time.sleep(0.02)
    port = file.read_text().split("\n")[0]
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=60) as listed:
            pages = [each for each in json.load(listed) if each["type"] == "page"]
        if pages:
            return str(pages[0]["webSocketDebuggerUrl"])
        assert time.monotonic() < end_s
        time.sleep(0.02)
