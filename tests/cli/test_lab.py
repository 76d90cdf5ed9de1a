"""`sinklens lab` on the command line, and the lab of a notebook."""

import re
import stat
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import pytest
import uvicorn

import sinklens
from sinklens.cli import main
from sinklens.errors import SinklensError


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--port", "70000"], "cannot listen at 127.0.0.1, port 70000: "),
        (["--compare", "tiny-llada"], "the lab has the model tiny-llada already; give each model once."),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, text, capsys):
    assert main(["lab", "tiny-llada", "--no-browser", *options]) == 1
    assert capsys.readouterr().err.startswith(f"sinklens: {text}")


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch, capsys, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["lab", "tiny-llada"]) == 1
    assert 'install them with pip install "sinklens[lab]"' in capsys.readouterr().err
    with pytest.raises(SinklensError, match="the lab needs Starlette and uvicorn, which are not installed"):
        sinklens.lab("tiny-llada")


def test_the_lab_of_a_notebook_shows_itself_and_closes(tiny_llada):
    lab = sinklens.lab(tiny_llada)
    assert lab.token not in repr(lab)
    session = httpx.get(f"{lab.address}api/session", headers={"X-Sinklens-Token": lab.token}).json()
    assert [model["name"] for model in session["models"]] == [tiny_llada.name]
    lab.close()
    with pytest.raises(httpx.ConnectError, match="refused"):
        httpx.get(lab.address)


def test_the_browser_gets_a_private_file_that_opens_the_lab(monkeypatch, capsys):
    """It is opened when the server answers, no argument holds the token, and the file is deleted in the end."""
    seen = {}

    def opened(address):
        file = Path(unquote(urlsplit(address).path))
        action, token = re.findall(r'(?:action|value)="([^"]*)"', file.read_text())
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)]
        entry = httpx.post(action, data={"token": token}, headers={"Origin": "null", "Sec-Fetch-Site": "cross-site"})
        seen.update(address=address, file=file, action=action, token=token, modes=modes, cookies=len(entry.cookies))
        server.should_exit = True

    startup = uvicorn.Server.startup

    async def kept(self, sockets=None):
        nonlocal server
        server = self
        await startup(self, sockets)

    server = None
    monkeypatch.setattr(uvicorn.Server, "startup", kept)
    monkeypatch.setattr("webbrowser.open", opened)
    assert main(["lab", "tiny-llada"]) == 0
    assert (len(seen["token"]), seen["modes"], seen["cookies"]) == (43, [0o600, 0o700], 1)
    assert seen["token"] not in seen["address"] + seen["action"]
    assert not seen["file"].exists()
    assert f"The lab is open at {seen['action']}\nIts token is {seen['token']}\n" in capsys.readouterr().out
