"""The lab in a notebook's cell."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from lab_page import Page, shown_at_end
from selenium.webdriver.common.by import By

pytestmark = pytest.mark.browser


class Notebook(BaseHTTPRequestHandler):
    """A page with a lab in a cell, at localhost, which is another site than 127.0.0.1."""

    cell = ""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<!doctype html><title>Notebook</title>{self.cell}".encode())

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture
def notebook(lab, monkeypatch):
    monkeypatch.setattr(Notebook, "cell", lab._repr_html_())
    with ThreadingHTTPServer(("127.0.0.1", 0), Notebook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


def test_the_lab_works_in_the_frame_of_a_notebook_and_in_a_tab_opened_from_it(browser, lab, notebook, plain):
    browser.size(1440)
    browser.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    browser.driver.get_log("browser")
    browser.driver.get(notebook)
    browser.driver.switch_to.frame(browser.driver.find_element(By.TAG_NAME, "iframe"))
    browser.wait("return document.body.dataset.ready")
    page = Page.__new__(Page)
    page.browser, page.lab = browser, lab
    assert browser.js("return document.getElementById('model-name').value") == "tiny-llada"
    page.run()
    assert page.tokens() == shown_at_end(plain)
    page.choose_head(1, 2, "(zero)")
    page.compared()
    browser.js("document.getElementById('circuits').scrollIntoView()")
    browser.wait("return document.getElementById('circuits').dataset.shown")
    saved = browser.driver.execute_async_script(
        "const [done] = arguments; URL.createObjectURL = (blob) => { blob.text().then(done); return 'data:,'; }; "
        "HTMLAnchorElement.prototype.click = () => {}; "
        "document.getElementById('save-page').dispatchEvent(new MouseEvent('click', {cancelable: true}))"
    )
    assert "AblateHeads(layers=[1], heads=[2]" in saved
    assert "AblateHeads(layers=[1], heads=[2]" in page.python()
    page.quiet()
    assert browser.driver.execute_cdp_cmd("Network.getAllCookies", {})["cookies"] == []
    page.fresh()

    browser.driver.switch_to.default_content()
    first = browser.driver.current_window_handle
    browser.driver.find_element(By.XPATH, "//button[contains(., 'in a tab')]").click()
    browser.driver.switch_to.window(browser.new_window([first]))
    try:
        browser.wait("return document.body && document.body.dataset.ready")
        assert browser.js("return location.href") == lab.address
        page.fresh()
    finally:
        browser.driver.close()
        browser.driver.switch_to.window(first)
