"""Requests that the lab refuses, each with the reason."""

import json
import re
import socket
import sqlite3
import time
from collections import Counter
from contextlib import closing, suppress

import httpx
import pytest
from browser import Browser
from lab_client import Client
from selenium.webdriver.common.keys import Keys

from sinklens.errors import SinklensError
from sinklens.live import app, connections, security
from sinklens.live.chips import MOST_CHIPS
from sinklens.live.security import MOST_BYTES, Guard
from sinklens.live.server import bound, private_page
from sinklens.live.spec import MOST_CHARACTERS
from sinklens.live.thread import MOST_RUNS

RUN = {"prompt": "Question: 1", "settings": {"gen_length": 2}}
HOSTILE = '</script><script>alert(1)</script>" onerror=alert(1) {{7*7}} \x00\u202e\u2028 ../../etc/passwd'


@pytest.fixture
def raw(lab):
    """A client without the token; `cookies` enters as a browser does."""
    with httpx.Client(base_url=lab.address, timeout=60) as opened:
        yield opened


@pytest.fixture
def entered(raw, lab):
    """A client with the cookie, as a browser has it after the token was entered."""
    answer = raw.post("/", data={"token": f" {lab.token}\n"})
    assert (answer.status_code, 'content="0; url=./"' in answer.text) == (200, True)
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    return raw


def origin(lab) -> str:
    return lab.address.rstrip("/")


FORM = "application/x-www-form-urlencoded"
REFUSED = {  # name: (method, path, headers that differ from those of the page, status, text)
    "no token": ("GET", "/api/session", {"Cookie": ""}, 403, "the token is missing or wrong"),
    "a wrong token": ("GET", "/api/session", {"Cookie": "", "X-Sinklens-Token": "x" * 43}, 403, "missing or wrong"),
    "a token beside the cookie that is wrong": ("GET", "/api/session", {"X-Sinklens-Token": "x"}, 403, "wrong"),
    "the page without a token": ("GET", "/", {"Cookie": ""}, 403, "Paste the token"),
    "a frame with the cookie": ("GET", "/", {"Sec-Fetch-Dest": "iframe"}, 403, "Paste the token"),
    "the page with the token in its address": ("GET", "/?token={token}", {"Cookie": ""}, 403, "Paste the token"),
    "the token in an address": ("GET", "/api/session?token={token}", {"Cookie": ""}, 403, "missing or wrong"),
    "a file of another site's page": ("GET", "/static/lab.js", {"Sec-Fetch-Site": "cross-site"}, 403, "other sites"),
    "a rebound name": ("GET", "/api/session", {"Host": "evil.example:{port}"}, 421, "this address is not the lab's"),
    "another port": ("GET", "/api/session", {"Host": "127.0.0.1:1"}, 421, "this address is not the lab's"),
    "a host without a port": ("GET", "/api/session", {"Host": "127.0.0.1"}, 421, "this address is not the lab's"),
    "a name that begins alike": ("GET", "/", {"Host": "127.0.0.1.evil.example:{port}"}, 421, "not the lab's"),
    "an address of the network": ("GET", "/", {"Host": "192.168.1.2:{port}"}, 421, "not the lab's"),
    "another origin": ("POST", "/api/runs", {"Origin": "http://evil.example"}, 403, "pages of other sites"),
    "another port as origin": ("POST", "/api/runs", {"Origin": "http://127.0.0.1:1"}, 403, "pages of other sites"),
    "an opaque origin": ("POST", "/api/runs", {"Origin": "null"}, 403, "pages of other sites"),
    "another origin that reads": ("GET", "/api/session", {"Origin": "http://evil.example"}, 403, "other sites"),
    "another site": ("GET", "/api/session", {"Sec-Fetch-Site": "cross-site"}, 403, "pages of other sites"),
    "another page of this machine": ("GET", "/api/session", {"Sec-Fetch-Site": "same-site"}, 403, "other sites"),
    "a change without an origin": ("POST", "/api/runs", {"Origin": None}, 403, "needs an Origin, or the token"),
    "a removal without an origin": ("DELETE", "/api/runs/abc", {"Origin": None}, 403, "needs an Origin"),
    "a form": ("POST", "/api/runs", {"Content-Type": "text/plain"}, 415, "must be application/json"),
    "a form with a wrong token": ("POST", "/", {"Origin": "null", "Content-Type": FORM}, 403, "This token is wrong."),
    "a form of JSON": ("POST", "/", {"Origin": "null"}, 415, f"the request must be {FORM}"),
    "a form to a wrong name": ("POST", "/", {"Host": "evil.example:1", "Content-Type": FORM}, 421, "not the lab's"),
    "a path outside": ("GET", "/static/..%2f..%2fapp.py", {}, 404, ""),
    "an absolute path": ("GET", "/static/%2fetc%2fpasswd", {}, 404, ""),
    "a file of the package": ("GET", "/static/__init__.py", {}, 404, "no such file"),
    "a run outside": ("GET", "/api/runs/..%2f..%2fstates%2fx", {}, 404, ""),
    "an unknown run": ("GET", "/api/runs/0123456789abcdef", {}, 404, "no such run"),
    "an unknown task": ("GET", "/api/tasks/humaneval/0", {}, 404, "no task of the lab is called 'humaneval'"),
    "an unknown problem": ("GET", "/api/tasks/tiny-gsm/500", {}, 404, "tiny-gsm has problems 0 to 499; got 500"),
    "an event that is no number": ("GET", "/api/events?since=x", {}, 400, "an event's number must be a number"),
    "an event that is a superscript": ("GET", "/api/events?since=%C2%B2", {}, 400, "an event's number must be"),
    "an event of another script": ("GET", "/api/events?since=%D9%A1", {}, 400, "an event's number must be a number"),
    "an event of many digits": ("GET", f"/api/events?since={'9' * 5000}", {}, 400, "an event's number must be"),
    "a problem of many digits": ("GET", f"/api/tasks/tiny-gsm/{'9' * 5000}", {}, 400, "a problem's index must be"),
    "the token as a cookie": ("GET", "/api/session", {"Cookie": "{name}={token}"}, 403, "missing or wrong"),
    "the cookie as a token": ("GET", "/api/session", {"Cookie": "", "X-Sinklens-Token": "{session}"}, 403, "wrong"),
    "the cookie of another port": ("GET", "/api/session", {"Cookie": "sinklens-lab-1={session}"}, 403, "wrong"),
    "the cookie of another lab": ("GET", "/api/session", {"Cookie": f"{{name}}={'x' * 43}"}, 403, "missing or wrong"),
    "a body with two lengths": (
        "POST", "/api/runs", {"Content-Length": "1", "Transfer-Encoding": "chunked"}, 400,
        "Content-Length or Transfer-Encoding, not both",
    ),
    "a body that says it is too large": (
        "POST", "/api/runs", {"Content-Length": str(MOST_BYTES + 1)}, 413, "a request has at most 1,000,000 bytes",
    ),
}  # fmt: skip


@pytest.mark.fast_cases(15)
@pytest.mark.parametrize("name", REFUSED)
def test_a_request_is_refused(entered, lab, name):
    method, path, changed, status, text = REFUSED[name]
    given = {"Origin": origin(lab), "Content-Type": "application/json"} if method != "GET" else {}
    headers = {key: value for key, value in (given | changed).items() if value is not None}
    guard = lab._guard
    path = path.replace("{token}", guard.token)
    made = {"port": str(guard.port), "token": guard.token, "session": guard.session, "name": guard.cookie}
    for name, value in made.items():
        headers = {header: text.replace(f"{{{name}}}", value) for header, text in headers.items()}
    content = json.dumps(RUN).encode() if method == "POST" else None
    if "Content-Length" in headers:  # not the length of any body
        fields = [*headers.items(), ("Cookie", f"{guard.cookie}={guard.session}")]
        with socket.create_connection(("127.0.0.1", guard.port), timeout=30) as plain:
            plain.sendall(sent(lab, method, path, *map(": ".join, fields)))
            found, _, said = answered(plain)
        assert (found, text in said) == (status, True), said
        return
    answer = entered.request(method, path, headers=headers, content=content)
    assert answer.status_code == status, answer.text
    assert text in answer.text


def test_the_page_has_a_strict_policy_and_nothing_is_cached(entered):
    headers = entered.get("/").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    strict = dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'")
    strict |= dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert policy.items() >= strict.items()
    expected = {"cache-control": "no-store", "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}
    assert headers.items() >= expected.items()
    assert "server" not in headers
    assert entered.get("/api/session").headers["content-security-policy"] == headers["content-security-policy"]


def test_a_token_opens_the_lab_for_many(lab):
    for _ in range(200):
        with httpx.Client(base_url=lab.address) as client:
            assert client.post("/", data={"token": lab.token}).status_code == client.get("/").status_code == 200


@pytest.mark.browser
@pytest.mark.extended
@pytest.mark.parametrize("way", ["token", "file", "notebook"])
def test_no_address_in_the_history_of_a_browser_opens_the_lab(lab, tmp_path, way):
    with private_page(lab) as file, closing(Browser(f"--user-data-dir={tmp_path / 'profile'}")) as opened:
        (tmp_path / "notebook.html").write_text(lab._repr_html_())
        notebook = (tmp_path / "notebook.html").as_uri()
        opened.driver.get({"token": lab.address, "file": file.as_uri(), "notebook": notebook}[way])
        if way == "token":
            for typed, said in (("abc", ""), (lab.token, "This token is wrong.")):
                assert opened.driver.find_element("css selector", "[role=alert]").text == said
                opened.driver.find_element("id", "token").send_keys(typed, Keys.ENTER)
        if way == "notebook":
            opened.driver.find_element("tag name", "button").click()
            opened.driver.switch_to.window(opened.driver.window_handles[-1])
        opened.wait("return document.body && document.body.dataset.ready")
        assert opened.driver.current_url == lab.address
        time.sleep(11)  # the history is written every ten seconds
    with closing(sqlite3.connect(tmp_path / "profile/Default/History")) as database:
        kept = [address for (address,) in database.execute("SELECT url FROM urls")]
    assert lab.address in kept
    assert [address for address in kept if lab.token in address] == []
    assert [address for address in kept if "http" in address and httpx.get(address).status_code < 400] == []


def test_a_frame_is_served_for_the_token_alone_and_gets_no_cookie(raw, lab):
    frame = {"Sec-Fetch-Dest": "iframe", "Sec-Fetch-Site": "cross-site", "Origin": "null"}
    answer = raw.post("/", data={"token": lab.token}, headers=frame)
    assert (answer.status_code, "set-cookie" in answer.headers) == (200, False)
    files = re.findall(r'(?:src|href)="(static/[^"]+)"', answer.text)
    assert files == ["static/lab.css", "static/lab.js"]
    assert {raw.get(file).status_code for file in [*files, "/frame"]} == {200}


def test_only_a_notebooks_lab_may_be_framed():
    alone, framed = (Guard("t", 1, framed).headers() for framed in (False, True))
    assert alone["X-Frame-Options"] == "DENY"
    assert "frame-ancestors 'none'" in alone["Content-Security-Policy"]
    assert "frame-ancestors http://localhost:*" in framed["Content-Security-Policy"]


BODIES = {  # name: (body, status, text)
    "not JSON": (b"{", 400, "not valid JSON"),
    "deep JSON": (b"[" * 100_000, 400, "not valid JSON"),
    "a list": (b"[]", 400, "must be a JSON object; got list"),
    "half a surrogate pair": (b'{"prompt": "a\\ud800"}', 400, "surrogates not allowed"),
    "half a surrogate pair as a name": (b'{"prompt": "a", "settings": {"\\udc00": 1}}', 400, "surrogates not allowed"),
    "NaN": (b'{"prompt": "a", "settings": {"temperature": NaN}}', 400, "NaN is not finite"),
    "an infinite number": (b'{"prompt": "a", "settings": {"temperature": 1e999}}', 400, "is not finite"),
    "many digits": (f'{{"prompt": "a", "seed": {"9" * 5000}}}'.encode(), 400, "does not fit into 64 bits"),
    "a sampler among the settings": (
        RUN | {"settings": {"sampler": "llada"}},
        400,
        "sampler is a field of the run, not a setting",
    ),
    "an unknown field": ({"prompt": "a", "code": "1"}, 400, "unknown field 'code'"),
    "no prompt": ({}, 400, "exactly one of prompt, ids and problem; got 0"),
    "two prompts": ({"prompt": "a", "ids": [1]}, 400, "exactly one of prompt, ids and problem; got 2"),
    "a long prompt": ({"prompt": "a" * (MOST_CHARACTERS + 1)}, 413, "at most 20,000 characters; got 20,001"),
    "many ids": ({"ids": [1] * (MOST_CHARACTERS + 1)}, 413, "at most 20,000 ids"),
    "ids that are no numbers": ({"ids": ["1"]}, 400, "ids must be a list of token ids"),
    "a prompt that is no text": ({"prompt": 3}, 400, "prompt must be text; got int"),
    "an unknown model": (RUN | {"model": "../../etc"}, 404, "this lab has no model '../../etc'"),
    "a negative seed": (RUN | {"seed": -1}, 400, "seed must be an integer from 0 to 2**63 - 1; got -1"),
    "a template": (RUN | {"chat_template": "{{ messages }}"}, 400, "a template is code"),
    "a setting that is a list": (RUN | {"settings": {"steps": [1]}}, 400, "a setting must be a number"),
    "a huge setting": (RUN | {"settings": {"gen_length": 10**9}}, 400, "a setting is at most 1,000,000"),
    "chips that are not a list": (RUN | {"chips": {"a": 1}}, 400, "chips must be a list; got dict"),
    "many chips": (RUN | {"chips": [{"kind": "mask_sinks"}] * (MOST_CHIPS + 1)}, 413, "at most 64 chips; got 65"),
    "an unknown chip": (RUN | {"chips": [{"kind": "__import__"}]}, 400, "no chip is of the kind '__import__'"),
    "a chip with code": (
        RUN | {"chips": [{"kind": "remask", "pos": "print(1)", "step": 0}]}, 422,
        "remask.pos must be an integer from 0 to 10,000,000; got 'print(1)'",
    ),
    "a chip without a layer": (RUN | {"chips": [{"kind": "ablate_head", "head": 1}]}, 422, "needs layer: the layer"),
    "a chip with a surplus field": (
        RUN | {"chips": [{"kind": "mask_sinks", "layer": 1}]}, 400, "the chip mask_sinks has no field 'layer'",
    ),
    "steps backwards": (
        RUN | {"chips": [{"kind": "mask_sinks", "steps": [3, 1]}]}, 422, "must be [first, last] with first ≤ last",
    ),
    "an unknown replacement": (
        RUN | {"chips": [{"kind": "ablate_head", "layer": 0, "head": 0, "by": "eval"}]}, 422,
        "ablate_head.by must be one of zero, mean; got 'eval'",
    ),
    "an unknown setting": (RUN | {"settings": {"stpes": 3}}, 422, "stpes is not a setting of the llada sampler"),
    "no room": (RUN | {"settings": {"gen_length": 10_000}}, 422, "and gen_length is 10000"),
    "another sampler": (RUN | {"sampler": "autoregressive"}, 422, "the autoregressive sampler fits causal or per-pass"),
    "a missing template": (RUN | {"chat_template": True}, 422, "the tokenizer of tiny-llada has no chat template"),
    "an unknown policy": (RUN | {"cache": "duel"}, 400, "no cache policy is called 'duel'"),
    "a policy that is a number": (RUN | {"cache": 3}, 400, "cache must be a short text or null"),
    "hooks": (RUN | {"settings": {"hooks": 1}}, 400, "hooks is a field of the run, not a setting"),
    "a policy among the settings": (RUN | {"settings": {"cache": "dual"}}, 400, "cache is a field of the run, not a"),
    "an unknown replay": (RUN | {"replay": "../x"}, 404, "no such run"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_refused(client, name):
    body, status, text = BODIES[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.http.post("/api/runs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert text in answer.json()["error"]
    assert ("chip" in answer.json()) == (status == 422 and "chips" in body)


def test_a_body_that_does_not_say_its_size_is_counted(client):
    parts = (b" " * 100_000 for _ in range(MOST_BYTES // 100_000 + 1))
    answer = client.http.post("/api/runs", content=parts, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]) == (413, "a request has at most 1,000,000 bytes.")


def test_a_full_queue_is_refused_and_drains(client, gate):
    first = client.submit(**RUN | {"settings": {"gen_length": 8}})
    assert gate.reached.wait(60)
    waiting = [client.submit(**RUN) for _ in range(MOST_RUNS)]
    answer = client.http.post("/api/runs", json=RUN)
    assert (answer.status_code, answer.json()["error"][:35]) == (429, "8 runs are waiting, which is the mo")
    assert len([run for run in client.get("/api/session")["runs"] if run["status"] == "queued"]) == MOST_RUNS
    gate.opened.set()
    assert {client.ended(run)["summary"]["status"] for run in [first, *waiting]} == {"done"}


def test_hostile_texts_survive_as_data(client, lab):
    ids = client.run(prompt=HOSTILE, settings={"gen_length": 4})
    assert ids["spec"]["prompt"] == HOSTILE
    run = ids["summary"]["id"]
    assert next(one for one in client.get("/api/session")["runs"] if one["id"] == run)["prompt"] == HOSTILE[:200]
    assert client.http.get(f"/api/runs/{run}").headers["content-type"] == "application/json"
    compile(client.http.get(f"/api/runs/{run}/python").text, "script", "exec")
    page = client.http.get(f"/api/runs/{run}/page")
    assert "<script>alert(1)" not in page.text
    assert page.headers["content-disposition"] == f'attachment; filename="sinklens-{run}.html"'


def test_the_cookie_is_not_the_token(entered, lab):
    (cookie,) = entered.cookies.jar
    assert cookie.name == f"sinklens-lab-{lab._guard.port}"
    assert cookie.value not in (lab._guard.token, "")
    assert entered.get("/api/session").status_code == 200
    assert Guard("t", 1).session != Guard("t", 1).session


def test_silent_connections_shut_nobody_out_and_are_closed(client, lab, monkeypatch):
    """Twice as many as the lab takes: some send nothing, some a byte of a head at a time."""
    monkeypatch.setattr(connections, "PATIENCE", 1.0)
    monkeypatch.setattr(connections, "MOST", 128)
    silent = [socket.create_connection(("127.0.0.1", lab._guard.port), timeout=30) for _ in range(2 * connections.MOST)]
    for one in silent[::2]:
        with suppress(OSError):  # displaced by a later one
            one.sendall(b"G")
    assert Client(lab.address, lab.token).get("/api/session")["models"]
    for byte in b"ET / HTTP/1.1\r\nHost: 127.0.0.1":
        time.sleep(0.1)
        try:
            silent[-2].sendall(bytes([byte]))
        except OSError:
            break
    else:
        pytest.fail("a connection that sends its head slowly stays open")
    assert silent[-1].recv(1) == b""
    for one in silent:
        one.close()


def answered(plain: socket.socket) -> tuple[int, dict[str, str], str]:
    """The answer on a connection that is then closed: status, headers, body."""
    answer = b""
    while part := plain.recv(65_536):
        answer += part
    head, _, body = answer.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def sent(lab, method: str, path: str, *headers: str) -> bytes:
    """The head of a request."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{lab._guard.port}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_of_many_clients_at_once_each_gets_an_answer(lab, monkeypatch):
    """More connections than the lab keeps, and more requests than it serves at once; each body comes after its head."""
    monkeypatch.setattr(connections, "MOST", 40)
    monkeypatch.setattr(security, "MOST_REQUESTS", 150)
    clients = [socket.create_connection(("127.0.0.1", lab._guard.port), timeout=60) for _ in range(200)]
    fields = ("Content-Type: application/json", "Content-Length: 100000", f"X-Sinklens-Token: {lab.token}")
    head, body = sent(lab, "POST", "/api/runs", *fields), b'{"prompt": 3}' + b" " * 99_987
    for one in clients:
        one.sendall(head)
    time.sleep(0.5)
    for one in clients:
        one.sendall(body)
    found = [answered(one) for one in clients]
    for one in clients:
        one.close()
    counts = Counter((status, headers.get("retry-after")) for status, headers, _ in found)
    assert set(counts) == {(400, None), (503, "1")}
    assert 50 <= counts[503, "1"] < 90  # tabs of other tests may still follow the events
    texts = {json.loads(text)["error"] for _, _, text in found}
    assert texts == {"prompt must be text; got int.", "150 requests are under way; try again."}


OVERSIZED = {"without a token": ("", 900_000, 403), "too large": ("X-Sinklens-Token: {token}", 2_000_000, 413)}


@pytest.mark.parametrize("name", OVERSIZED)
def test_a_refused_request_that_is_sent_completely_gets_its_answer(lab, name):
    header, size, status = OVERSIZED[name]
    fields = (header.replace("{token}", lab.token) or "A: b", f"Content-Length: {size}", f"Origin: {origin(lab)}")
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", lab._guard.port), timeout=30) as plain:
            plain.sendall(sent(lab, "POST", "/api/runs", *fields) + b" " * size)
            assert answered(plain)[0] == status


COOKIES = (
    'prefs={"a": 1}; ', "x=a b; ", 'x="a; ', "=; ", "; ;; ", "x; ", "a=\xff\xfe; ", "a=\x7f\t; ", 'x="\\0; ',
    "$Version=1; ", "{name}; ", "{name}=; ", "{name}=other; ", "{name}2=other; ", f"x={'a' * 100_000}; ", "a=1, ",
    "x[y]=(z)<w>@?/; ",
)  # fmt: skip


@pytest.mark.parametrize("others", COOKIES, ids=range(len(COOKIES)))
def test_cookies_of_other_programs_are_ignored(lab, others):
    guard, fields = lab._guard, []
    own, others = f"{guard.cookie}={guard.session}", others.replace("{name}", guard.cookie)
    if not others.endswith(", "):
        fields.append(f"Cookie: {others}{own}")
    fields += [f"Cookie: {own}; {others.rstrip('; ')}", f"Cookie: {others.rstrip('; ')}\r\nCookie: {own}"]
    for field in fields:
        with socket.create_connection(("127.0.0.1", guard.port), timeout=30) as plain:
            plain.sendall(sent(lab, "GET", "/api/session", field))
            assert answered(plain)[0] == 200, field


def test_a_refused_request_closes_its_connection_without_its_body(lab):
    with socket.create_connection(("127.0.0.1", lab._guard.port), timeout=30) as plain:
        plain.sendall(sent(lab, "POST", "/api/runs", "Content-Length: 900000"))
        assert answered(plain)[0] == 403


def test_a_slow_body_is_refused(client, lab, monkeypatch):
    monkeypatch.setattr(app, "PATIENCE", 0.2)

    def parts():
        yield b'{"prompt":'
        time.sleep(1)
        yield b'"a"}'

    answer = client.http.post("/api/runs", content=parts(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]) == (408, "the request was not complete after 0.2 s.")


def test_a_port_in_use_is_refused(lab):
    port = int(lab.address.rpartition(":")[2][:-1])
    with pytest.raises(SinklensError, match=rf"cannot listen at 127\.0\.0\.1, port {port}: .* Choose another --port"):
        bound(port)


def test_a_websocket_is_refused(entered, lab):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x"}
    assert entered.get("/api/events", headers=upgrade | {"Origin": "http://evil.example"}).status_code == 403
