"""Pictures of the report as a reader sees it: desktop and phone, light and dark, in headless Chromium.

Chromium is spoken to over the two pipes of ``--remote-debugging-pipe`` (messages of JSON, each ended by a zero byte),
which needs no package and opens no port.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SCREENS = {"desktop": (1280, 900, 1, False), "phone": (390, 844, 2, True)}
"""Width and height in CSS pixels, device pixels a CSS pixel, and whether it is a mobile."""
SLICE = 2400  # CSS pixels a picture: longer ones are hard to look at, and Chromium refuses them past 16384
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of a running Chromium."""

    def __init__(self, requests: int, answers: int) -> None:
        """Take the ends of the two pipes and open a page."""
        self._requests, self._answers = os.fdopen(requests, "wb"), os.fdopen(answers, "rb")
        self._number, self._session = 0, ""
        self._buffer = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send one command of the DevTools protocol and return its result."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._requests.write(json.dumps(message).encode() + b"\0")
        self._requests.flush()
        answer = self._wait(lambda got: got.get("id") == self._number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, address: str) -> None:
        """Load an address and wait until it stands."""
        failure = self.call("Page.navigate", url=address).get("errorText")
        if failure:
            raise RuntimeError(f"{address}: {failure}")
        self._wait(lambda got: got.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> int:
        """Return the number that a JavaScript expression has in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def close(self) -> None:
        """Close both pipes; Chromium may have gone before."""
        with suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()

    def _wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            while b"\0" not in self._buffer:
                chunk = self._answers.read1(1 << 16)
                if not chunk:
                    raise RuntimeError("Chromium closed the connection")
                self._buffer += chunk
            line, self._buffer = self._buffer.split(b"\0", 1)
            got = json.loads(line)
            if wanted(got):
                return got


@contextmanager
def running(program: str) -> Generator[Browser, None, None]:
    """Start Chromium with an empty profile; end it afterwards."""
    read_request, write_request = os.pipe()
    read_answer, write_answer = os.pipe()

    def take_places() -> None:
        # Chromium reads from 3 and writes to 4. Out of the way first: either may hold the other's number.
        reader, writer = os.dup(read_request), os.dup(write_answer)
        high_reader, high_writer = os.dup(reader), os.dup(writer)
        os.dup2(high_reader, 3)
        os.dup2(high_writer, 4)

    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=take_places,
        )
        os.close(read_request)
        os.close(write_answer)
        browser = None
        try:
            browser = Browser(write_request, read_answer)
            yield browser
        finally:
            process.terminate()
            process.wait()
            if browser is not None:
                browser.close()


def take(browser: Browser, page: Path, folder: Path) -> list[Path]:
    """Write every picture; a page wider than its screen is an error."""
    written = []
    for screen, (width, height, density, mobile) in SCREENS.items():
        for scheme in ("light", "dark"):
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=density,
                mobile=mobile,
            )
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.call("Emulation.setEmulatedMedia", features=[feature])
            browser.open(page.resolve().as_uri())
            total = browser.evaluate("document.documentElement.scrollHeight")
            found = browser.evaluate("document.documentElement.scrollWidth")
            if found > width:
                raise RuntimeError(f"{page} must fit {screen}'s {width} pixels; it is {found} wide")
            for number, top in enumerate(range(0, total, SLICE), start=1):
                clip = {"x": 0, "y": top, "width": width, "height": min(SLICE, total - top), "scale": 1}
                shot = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
                path = folder / f"{screen}-{scheme}-{number:02d}.png"
                path.write_bytes(base64.b64decode(shot["data"]))
                written.append(path)
    return written


def main() -> int:
    """Read the command line; 0 if every picture was written, 2 otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, help="the report's index.html")
    parser.add_argument("folder", type=Path, help="where to write the pictures")
    arguments = parser.parse_args()
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None or shutil.which(program) is None:
        print(f"screenshots: no Chromium: set CHROMIUM, or install one of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    if not arguments.page.is_file():
        print(f"screenshots: no page at {arguments.page}: run `make report` first", file=sys.stderr)
        return 2
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        with running(program) as browser:
            written = take(browser, arguments.page, arguments.folder)
    except RuntimeError as error:
        print(f"screenshots: {error}", file=sys.stderr)
        return 2
    print(f"{len(written)} pictures in {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
