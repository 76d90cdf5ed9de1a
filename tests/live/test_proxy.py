"""The lab behind a reverse proxy, below a path of another host, as on JupyterHub."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx
import pytest
from lab_page import Page, shown_at_end
from selenium.webdriver.common.by import By

import sinklens
from sinklens.errors import SettingError
from sinklens.live.public import read_public

PREFIX = "/user/ann/proxy/lab/"
HUB = "hub.example.org"


class Hub(BaseHTTPRequestHandler):
    """Passes requests below `PREFIX` on, with the Host of the browser; events as they come, like Jupyter's proxy, only
    to those who accept nothing else. Serves a notebook with the lab in a cell beside it.
    """

    upstream, cell, complete = ("", 0), "", False

    def do_GET(self):
        if not self.path.startswith(PREFIX):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f"<!doctype html><title>Notebook</title>{self.cell}".encode())
            return
        path = self.path if self.complete else "/" + self.path.removeprefix(PREFIX)
        lab = http.client.HTTPConnection(*self.upstream)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lab.request(self.command, path, body, dict(self.headers))
        answer = lab.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.end_headers()
        progressive = self.headers.get("Accept") == "text/event-stream"
        while part := (answer.read1(65_536) if progressive else answer.read()):
            self.wfile.write(part)
            self.wfile.flush()
        lab.close()

    do_POST = do_DELETE = do_GET

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture(params=["the path below the prefix", "the complete path"])
def proxied(request, tiny_llada, monkeypatch):
    """A lab in a notebook, the hub in front of it, and the hub's port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        public = f"http://hub.localhost:{server.server_port}{PREFIX}"
        with sinklens.lab(tiny_llada, public_url=public) as lab:
            monkeypatch.setattr(Hub, "upstream", ("127.0.0.1", lab._guard.port))
            monkeypatch.setattr(Hub, "cell", lab._repr_html_())
            monkeypatch.setattr(Hub, "complete", request.param == "the complete path")
            yield lab
        server.shutdown()


@pytest.mark.browser
@pytest.mark.extended
def test_the_lab_works_behind_a_proxy_in_a_notebook_and_in_a_tab(browser, proxied, plain):
    address = urlsplit(proxied.url)
    browser.size(1440)
    browser.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    browser.driver.get_log("browser")
    browser.driver.get(f"{address.scheme}://{address.netloc}/notebook")
    browser.driver.switch_to.frame(browser.driver.find_element(By.TAG_NAME, "iframe"))
    browser.wait("return document.body.dataset.ready")
    page = Page.__new__(Page)
    page.browser, page.lab = browser, proxied
    page.run()
    assert page.tokens() == shown_at_end(plain)
    page.quiet()
    page.fresh()
    browser.driver.switch_to.default_content()

    page = Page(browser, proxied)
    assert browser.js("return location.href") == proxied.address
    (cookie,) = browser.driver.execute_cdp_cmd("Network.getAllCookies", {})["cookies"]
    assert (cookie["domain"], cookie["path"]) == ("hub.localhost", PREFIX.rstrip("/"))
    page.choose_head(1, 2, "(zero)")
    page.compared()
    browser.js("document.getElementById('circuits').scrollIntoView()")
    browser.wait("return document.getElementById('circuits').dataset.shown")
    assert browser.js("return document.getElementById('save-page').href").startswith(f"{proxied.address}api/runs/")
    page.quiet()
    page.fresh()
    browser.driver.get("about:blank")


ADMITTED = {  # headers -> whether a lab at hub.example.org below `PREFIX` accepts a run from them
    "the hub": ({"Host": HUB, "Origin": f"https://{HUB}"}, 202),
    "a hub that replaces the host": ({"Origin": f"https://{HUB}"}, 202),
    "the lab's own address": ({"Origin": "{own}"}, 202),
    "another host": ({"Host": "evil.example", "Origin": f"https://{HUB}"}, 421),
    "the hub's name and another port": ({"Host": f"{HUB}:8000", "Origin": f"https://{HUB}"}, 421),
    "another origin": ({"Host": HUB, "Origin": "https://evil.example"}, 403),
    "the hub without encryption": ({"Host": HUB, "Origin": f"http://{HUB}:80"}, 403),
    "the hub without the token": ({"Host": HUB, "Origin": f"https://{HUB}", "X-Sinklens-Token": "x"}, 403),
}


def test_the_name_of_the_proxy_is_accepted_and_no_other(tiny_llada):
    with sinklens.lab(tiny_llada, public_url=f"https://{HUB}/user/ann/proxy/{{port}}") as lab:
        port, token = lab._guard.port, lab._guard.token
        assert lab.url == f"https://{HUB}/user/ann/proxy/{port}/?token={token}"
        found = {}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for name, (headers, _) in ADMITTED.items():
                given = (
                    {"X-Sinklens-Token": token} | headers | {"Origin": headers["Origin"].format(own=client.base_url)}
                )
                given["Origin"] = given["Origin"].rstrip("/")
                body = {"prompt": "Question: 1", "settings": {"gen_length": 2}}
                found[name] = client.post("/api/runs", json=body, headers=given).status_code
            entry = client.get(f"/user/ann/proxy/{port}/?token={token}", headers={"Host": HUB})
        assert found == {name: status for name, (_, status) in ADMITTED.items()}
        assert (entry.status_code, entry.headers["location"]) == (303, "./")
        assert "secure" in entry.headers["set-cookie"].lower()
        assert f"https://{HUB}" in entry.headers["content-security-policy"].partition("frame-ancestors")[2]


def test_a_public_url_is_an_address_of_a_page():
    found = read_public("https://Hub.example.org:443/a/{port}", 81)
    assert (found.origin, found.host, found.prefix) == ("https://hub.example.org", "hub.example.org", "/a/81/")
    for url in ("hub.example.org", "ftp://h/", "https:///a", "https://u@h/", "https://h/?a=1", "https://h/a b", "//h"):
        with pytest.raises(SettingError, match="the public URL must be http:// or https://, a host"):
            read_public(url, 1)
    with pytest.raises(SettingError, match="is not an address"):
        read_public("https://h:x/", 1)
