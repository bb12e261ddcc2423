"""The page of `ray-ckpt report` in a real browser: headless Chromium, driven over a pipe.

Set REPORT_PICTURES to a folder to keep the screenshots and look at them.
"""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from ray_ckpt.analysis.report import page
from tests.analysis.test_report import HOSTILE, SECTIONS, night_story

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ANSWER_S = 60.0  # of the browser, to one command
TROUBLE = (
    "Runtime.consoleAPICalled",
    "Runtime.exceptionThrown",
    "Log.entryAdded",
    "Page.javascriptDialogOpening",
    "Network.webSocketCreated",
)
LOOKS = ("rect.c-productive", "rect.c-lost_steps", "path.steps.kept", "path.cross", "rect.m-live")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
]


@dataclass
class Tab:
    """A page of the browser; `events` are those that have come so far."""

    to: int
    back: int
    session: str = ""
    number: int = 0
    rest: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the browser's answer to a command of its DevTools protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.number:
                assert "error" not in found, found
                return found["result"]  # type: ignore[no-any-return]
            self.events.append(found)

    def wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, file: Path) -> None:
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        self.wait_for("Page.loadEventFired")

    def resize(self, width: int) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def screenshot(self, name: str) -> np.ndarray[Any, Any]:
        """Return the whole page as pixels of red, green and blue."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {**size, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        data = base64.b64decode(shot["data"])
        if folder := os.environ.get("REPORT_PICTURES"):
            (Path(folder) / f"{name}.png").write_bytes(data)
        return np.asarray(image.imread(io.BytesIO(data)))[..., :3]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.back], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "The browser is silent."
            data = os.read(self.back, 2**20)
            assert data, "The browser is gone."
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Chromium reads commands from its descriptor 3 and answers on 4."""
    theirs, to = os.pipe()
    back, their_back = os.pipe()
    redirect = f'exec "$@" 3<&{theirs} 4>&{their_back}'
    command = ("bash", "-c", redirect, "chromium", str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}")
    process = subprocess.Popen(
        command,
        pass_fds=(theirs, their_back),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs)
    os.close(their_back)
    try:
        tab = Tab(to, back)
        target = tab.call("Target.createTarget", url="about:blank")
        attached = tab.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(1240)
        yield tab
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to)
        os.close(back)


def requested(tab: Tab) -> list[str]:
    return [
        event["params"]["request"]["url"]
        for event in tab.events
        if event.get("method") == "Network.requestWillBeSent"
    ]


def test_the_page_is_drawn_in_both_colour_schemes_without_requests(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(night_story().report()), encoding="utf-8")
    brightness = {}
    with browser(tmp_path / "profile") as tab:
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            tab.call("Emulation.setEmulatedMedia", features=features)
            tab.open(file)
            ids = tab.evaluate("[...document.querySelectorAll('section')].map(s => s.id)")
            assert set(SECTIONS) <= set(ids)
            assert tab.evaluate("document.querySelectorAll('svg.timeline').length") == 2
            for look in LOOKS:
                found = f"[...document.querySelectorAll('#timeline {look}')]"
                assert tab.evaluate(f"{found}.filter(e => e.getBBox().width > 0).length") > 0, look
            drawn = tab.evaluate("document.querySelector('#timeline svg').getBoundingClientRect().height")
            assert drawn > 300
            assert tab.evaluate("document.scripts.length") == 0
            assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            pixels = tab.screenshot(scheme)
            assert len(np.unique(pixels[::3, ::3].reshape(-1, 3), axis=0)) > 50
            brightness[scheme] = float(pixels.mean())
            assert set(requested(tab)) <= {file.as_uri(), "data:,"}
            assert [event for event in tab.events if event.get("method") in TROUBLE] == []
    assert brightness["light"] > 0.8 and brightness["dark"] < 0.35


def test_a_narrow_window_does_not_overflow(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(night_story().report()), encoding="utf-8")
    with browser(tmp_path / "profile") as tab:
        tab.resize(420)
        tab.open(file)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 420
        tab.screenshot("narrow")


def test_a_hostile_log_runs_nothing(tmp_path: Path) -> None:
    found = night_story().report()
    last = replace(found.checkpoints[-1], drill=HOSTILE, drilled_at_s=found.now_s, pins={HOSTILE: None})
    spoiled = replace(found, run_name=HOSTILE, checkpoints=[*found.checkpoints[:-1], last], lineage=[last])
    file = tmp_path / "report.html"
    file.write_text(page(spoiled), encoding="utf-8")
    with browser(tmp_path / "profile") as tab:
        tab.open(file)
        assert tab.evaluate("document.querySelectorAll('script, img, iframe').length") == 0
        assert "<script>alert(1)</script>" in tab.evaluate("document.querySelector('h1').textContent")
        assert [event for event in tab.events if event.get("method") in TROUBLE] == []
