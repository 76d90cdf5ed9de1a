"""Take the pictures that show pages: a report, and the lab in headless Chromium, used as a reader would use it.

    python scripts/pictures.py pages

Writes docs/report.png, docs/lab.png and docs/lab-1.png to docs/lab-4.png, and beside them docs/pages.sha256, a hash of
the files that these pages are made of. A test compares it, so a picture cannot be older than its page. Requires the
extras `lab` and `dev`, and Chromium with its driver (see tests/browser.py).
"""

import hashlib
import io
import sys
import tempfile
import threading
from pathlib import Path

from PIL import Image

import sinklens
from sinklens.live.execution import LiveRun
from sinklens.live.page import document, files
from sinklens.views import html, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser  # noqa: E402
from lab_page import PROMPT, Page  # noqa: E402

WIDTH, COLORS, EDGE = 1200, 256, 8
PAUSE_AT = 14  # the step at which the picture of a run under way is taken
BALLS = "Question: Mia has 17 balls. She finds 7 more and then drops 17. How many balls are left?\nAnswer:"
HASH = ROOT / "docs" / "pages.sha256"


def templates() -> str:
    """A hash of the documents, scripts and styles of the pages, without CircuitsVis, which comes from its package."""
    parts = [document(), *(files()[name][1] for name in ("lab.js", "lab.css"))]
    parts += [html.asset("report.html"), html.REPORT.script(), html.REPORT.style()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class Pause:
    """Holds runs before the step `PAUSE_AT` until `opened` is set."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        before = LiveRun.before

        def wait(live: LiveRun, step: int, state: object) -> None:
            if step == PAUSE_AT:
                self.reached.set()
                self.opened.wait()
            before(live, step, state)  # type: ignore[arg-type]

        LiveRun.before = wait  # type: ignore[method-assign]


def picture(browser: Browser, name: str, first: str, last: str, column: str = "body") -> None:
    """Write the part of the page from the element `first` to the element `last`, as wide as `column`."""
    browser.size(WIDTH, browser.js("return document.documentElement.scrollHeight"))
    browser.js("scrollTo(0, 0); document.activeElement.blur()")
    browser.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    find = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.left, box.top, "
    top, bottom = (browser.js(f"{find}box.right, box.bottom]", place) for place in (first, last))
    left, _, right, _ = browser.js(f"{find}box.right, box.bottom]", column)
    save(browser, name, (max(0, left - EDGE), max(0, top[1] - EDGE), min(WIDTH, right + EDGE), bottom[3] + EDGE))
    browser.size(WIDTH)


def save(browser: Browser, name: str, place: tuple[float, ...]) -> None:
    """Write what the browser shows between these sides."""
    shot = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
    file = ROOT / "docs" / f"{name}.png"
    shot.crop(tuple(int(side) for side in place)).quantize(COLORS).save(file, optimize=True)
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:.0f} kB")


def take_report(browser: Browser) -> None:
    """The first screen of a report, in the middle of its run."""
    with tempfile.TemporaryDirectory() as folder:
        browser.open(report(sinklens.generate("tiny-llada", BALLS), Path(folder) / "run.html"))
        browser.js("const s = document.getElementById('step'); s.value = 12; s.dispatchEvent(new Event('input'))")
        browser.wait("return document.getElementById('step-number').value === '12'")
        save(browser, "report", (0, 0, 1440, 1000))


def take(browser: Browser, page: Page, pause: Pause) -> None:
    """Run a prompt, ablate a head, compare, try every head."""
    page.type(PROMPT)
    page.submit()
    pause.reached.wait()
    browser.wait(f"return document.body.dataset.steps === '{PAUSE_AT}'")
    picture(browser, "lab-1", ".lab-head", ".card.grid")
    pause.opened.set()
    page.ended("A")
    page.choose_head(1, 5, "(zero)")
    page.compared()
    browser.wait("return document.getElementById('verdict').dataset.pair")
    picture(browser, "lab-2", "#changes", ".card.grid")
    page.go_to(20)
    picture(browser, "lab-3", "#compare", "#compare")
    page.go_to(23)
    browser.click("try-heads")
    browser.wait("return (document.body.dataset.tried || '').endsWith('/done')", 300)
    picture(browser, "lab-4", ".card.grid", "#trial", "#trial")
    picture(browser, "lab", ".lab-head", "#compare")


def main() -> None:
    """Take all pictures."""
    browser = Browser()
    try:
        take_report(browser)
        pause = Pause()
        with sinklens.lab("tiny-llada") as lab:
            page = Page(browser, lab, WIDTH)
            take(browser, page, pause)
            page.quiet()
        HASH.write_text(f"{templates()}\n")
    finally:
        browser.close()
