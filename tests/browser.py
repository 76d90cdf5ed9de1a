"""A real browser for tests of pages: headless Chromium, driven by selenium, with all that it asked for and said kept.

Browser and driver are those of the system. In continuous integration they are installed with apt-get where they are
missing; elsewhere a test that needs them skips and says how to get them.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from waiting import awaited

INSTALL = "apt-get install --no-install-recommends chromium chromium-driver"
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


class Browser:
    """One open window.

    Attributes:
        driver: selenium's.
    """

    def __init__(self, *arguments: str) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        browser, driver = find()
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for argument in (*ARGUMENTS, *arguments):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(driver))
        self.driver.set_script_timeout(60)

    def open(self, path: Path, width: int = 1440, height: int = 1000) -> None:
        """Load a file and wait for its first view, or for heads drawn by themselves."""
        self.size(width, height)
        self.driver.get("about:blank")  # the last page writes to the logs until it is left
        self.driver.get_log("browser"), self.driver.get_log("performance")
        self.driver.get(path.as_uri())
        self.wait(
            "return performance.getEntriesByName('first-view').length > 0 || document.body.dataset.drawn === '1' || "
            "!(document.getElementById('trouble') || {hidden: true}).hidden"
        )

    def size(self, width: int, height: int = 1000) -> None:
        """Show the page at this size, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def js(self, script: str, *arguments: Any) -> Any:
        """What a script run in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, seconds: float = 30) -> Any:
        """Run a script until it returns something true."""

        def failed() -> str:
            found = self.js("return [{...document.body.dataset}, document.activeElement.id, document.body.innerText]")
            return f"still not so after {seconds} s: {script}\n{self.complaints()}\n{found}"

        return awaited(lambda: self.js(script), failed, seconds)

    def text(self, name: str) -> str:
        """Text of the element with this id, as the document holds it."""
        return str(self.js("return document.getElementById(arguments[0]).textContent", name))

    def choose(self, name: str, value: Any) -> None:
        """Choose an option of a select element."""
        from selenium.webdriver.support.ui import Select

        Select(self.driver.find_element("id", name)).select_by_value(str(value))

    def click(self, name: str) -> None:
        """Click an element, scrolled into view."""
        self._into_view(name).click()

    def keys(self, name: str, *pressed: str) -> None:
        """Give an element the focus and press keys."""
        from selenium.webdriver.common.action_chains import ActionChains

        self.js("document.getElementById(arguments[0]).focus()", name)
        ActionChains(self.driver).send_keys(*pressed).perform()

    def point(self, name: str, row: int, column: int, click: bool = False) -> None:
        """Move the pointer to a cell of a figure, and click there if asked."""
        from selenium.webdriver.common.action_chains import ActionChains

        figure = self.at_rest(name)
        left, top, cell, high = (float(part) for part in str(figure.get_attribute("data-cells")).split())
        x, y = left + (column + 0.5) * cell, top + (row + 0.5) * high
        size = figure.size
        chain = ActionChains(self.driver).move_to_element_with_offset(
            figure, round(x - size["width"] / 2), round(y - size["height"] / 2)
        )
        (chain.click() if click else chain).perform()

    def at_rest(self, name: str) -> Any:
        """An element in view whose place has been the same for two frames: what is drawn above it can shift it."""
        element = self._into_view(name)
        self.driver.execute_async_script(
            "const [node, done] = arguments, place = () => JSON.stringify(node.getBoundingClientRect()); "
            "let last = ''; const look = () => { const now = place(); if (now === last) done(); "
            "else { last = now; requestAnimationFrame(() => requestAnimationFrame(look)); } }; look()",
            element,
        )
        return element

    def new_window(self, known: Collection[str]) -> str:
        """Wait for a window besides the known ones; returns its handle."""
        return awaited(lambda: set(self.driver.window_handles) - set(known), lambda: "no window was opened").pop()

    def _into_view(self, name: str) -> Any:
        element = self.driver.find_element("id", name)
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        return element

    def complaints(self) -> list[str]:
        """What was written to the console."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]

    def complaints_until(self, text: str) -> list[str]:
        """What is written to the console, up to a line with this text; it can arrive after what the page shows."""
        found: list[str] = []
        awaited(lambda: found.extend(self.complaints()) or any(text in line for line in found), lambda: str(found))
        return found

    def requests(self) -> list[str]:
        """Addresses asked for since `open`, other than documents and data inside the page."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(unquote(message["params"]["request"]["url"]))
        return [address for address in found if not address.startswith(("data:", "blob:", "about:"))]

    def close(self) -> None:
        """Close the window and end the browser."""
        self.driver.quit()


def find() -> tuple[str, str]:
    """Paths of browser and driver; installs them in continuous integration, skips the test where they are missing."""
    found = _installed()
    may_install = os.environ.get("CI") and shutil.which("apt-get") and hasattr(os, "geteuid") and os.geteuid() == 0
    if found is None and may_install:
        subprocess.run(["apt-get", "update"], check=True, timeout=300, capture_output=True)
        subprocess.run([*INSTALL.split(), "-y"], check=True, timeout=900, capture_output=True)
        found = _installed()
    if found is None:
        pytest.skip(f"no chromium and chromedriver on the path; {INSTALL}")
    return found


def _installed() -> tuple[str, str] | None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None
