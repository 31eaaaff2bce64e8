"""TensorBoard on a run directory, as `make board` starts it, shows the loss curve and the traces in a browser."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from lm.launch.spawn import free_port
from tests import support
from tests.browser import CHROMIUM, Browser
from tests.support import ROOT

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing (Debian's package of that name)"),
    pytest.mark.skipif(importlib.util.find_spec("torch_tb_profiler") is None, reason="torch-tb-profiler is missing"),
]

CHARTS = "https://www.gstatic.com/charts/loader.js"
"""A script that the profiler's page loads from the internet."""

NO_CHARTS = b"""
const nothing = new Proxy(function () {}, {
    get: (_, key) => key === Symbol.toPrimitive ? () => "" : key === "then" ? undefined : nothing,
    apply: () => nothing,
    construct: () => nothing,
})
window.google = {charts: {load() {}}, visualization: nothing}
"""
"""Replaces the charts, which no test needs."""

CHOOSE = """(async () => {
    const boxes = document.querySelectorAll('[aria-haspopup=listbox]')
    boxes[%d].dispatchEvent(new MouseEvent('mousedown', {bubbles: true}))
    let options = []
    while (!options.length) {
        await new Promise(done => setTimeout(done, 50))
        options = [...document.querySelectorAll('[role=option]')]
    }
    const names = options.map(option => option.innerText)
    options[names.indexOf('%s')].click()
    return names
})()"""
"""Opens a select box of the profiler's page, chooses an option and returns all options."""

VIEW, WORKER = 1, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two ranks with traces."""
    folder = tmp_path_factory.mktemp("board")
    done = support.run(folder, "max_steps=20", "report_rate=2", "torch_profiler=true", ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        browser.call("Page.enable")
        browser.serve(CHARTS, NO_CHARTS)
        yield browser


@pytest.fixture(scope="module")
def url(folder: Path, browser: Browser) -> Iterator[str]:
    """The address of a TensorBoard of `folder/runs`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).parent / "tensorboard"), "--logdir", "runs", "--host", "127.0.0.1"]
    with (folder / "tensorboard.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], cwd=folder, stdout=log, stderr=log, env=os.environ | {"NO_PROXY": "*"}
        )
    try:
        browser.wait_until(lambda: is_up(url), "TensorBoard")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except urllib.error.URLError:
        return False


@pytest.mark.slow
def test_a_browser_shows_the_loss_curve_and_the_traces_of_both_ranks(folder: Path, url: str, browser: Browser) -> None:
    assert "--logdir runs --host 127.0.0.1" in (ROOT / "Makefile").read_text()
    last = support.reports(folder)[20]["loss"]
    browser.open(f"{url}/?tagFilter=loss#timeseries")
    browser.wait_for("document.querySelectorAll('line-chart canvas').length == 2")
    browser.wait_for(f"document.body.innerText.includes('{last:.5g}')")
    text = browser.evaluate("document.body.innerText")
    assert "PYTORCH_PROFILER" in text
    assert "test/tensorboard" in text
    browser.screenshot(ROOT / "artefacts" / "loss.png")

    browser.open(f"{url}/data/plugin_entry.html?name=pytorch_profiler")  # the tab without its frame
    browser.wait_for("/Number of Worker\\(s\\)\\s+2/.test(document.body?.innerText)")
    assert browser.evaluate(CHOOSE % (WORKER, "rank1")) == ["rank0", "rank1"]
    assert {"Overview", "Operator", "Trace"} <= set(browser.evaluate(CHOOSE % (VIEW, "Operator")))
    browser.wait_for("document.body.innerText.includes('aten::mm')")
    browser.screenshot(ROOT / "artefacts" / "profiler.png")
    browser.evaluate(CHOOSE % (VIEW, "Trace"))
    seen = "performance.getEntriesByType('resource').map(e => e.name).find(name => name.includes('/trace?'))"
    address = browser.wait_for(seen)
    trace = browser.evaluate(f"fetch('{address}').then(answer => answer.text())")
    assert "FSDP::pre_forward (blocks.1)" in trace
