"""SAEs, probes and tracks come back from a hub as they went there, by name and revision; the hub is a local server."""

import base64
import hashlib
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import numpy as np
import pytest
import torch
from planted_saes import random_sae
from safetensors.numpy import save_file

import sinklens
from sinklens.errors import CheckpointError, SettingError, SinklensError
from sinklens.features import Probe, load_sae, push_to_hub
from sinklens.sinks import SinkTrack


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's interface that uploading a folder and downloading a snapshot need."""

    def do_POST(self):
        content, parts = self.rfile.read(int(self.headers["Content-Length"])), self.path.strip("/").split("/")
        if parts[:2] == ["api", "repos"]:
            about = json.loads(content)
            name = f"{about['organization']}/{about['name']}"
            self.server.private.setdefault(name, about.get("private", about.get("visibility") == "private"))
            self.server.commits.setdefault(name, [])
            return self.answer({"url": f"http://{self.headers['Host']}/{name}"})
        name, kind = f"{parts[2]}/{parts[3]}", parts[4]
        if kind == "preupload":
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": one["path"], **modes} for one in json.loads(content)["files"]]})
        lines = [json.loads(line) for line in content.splitlines()]
        files = dict(self.server.commits[name][-1][1]) if self.server.commits[name] else {}
        files |= {
            one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in lines if one["key"] == "file"
        }
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.server.commits[name].append((commit, files))
        return self.answer({"commitOid": commit, "commitUrl": f"http://{self.headers['Host']}/{name}/commit/{commit}"})

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[0] == "api":
            commit, files = self.at(f"{parts[2]}/{parts[3]}", parts[5] if len(parts) > 5 else "main")
            if parts[4] == "tree":
                return self.answer(
                    [{"type": "file", "path": name, "size": len(files[name]), "oid": "0"} for name in files]
                )
            return self.answer({"sha": commit, "id": f"{parts[2]}/{parts[3]}"})
        commit, files = self.at(f"{parts[0]}/{parts[1]}", parts[3])
        name = "/".join(parts[4:])
        self.server.fetched.append(name)
        return self.answer(files[name], {"X-Repo-Commit": commit, "ETag": hashlib.sha1(files[name]).hexdigest()})

    do_HEAD = do_GET

    def at(self, name, revision):
        commits = self.server.commits[name] or [("0" * 40, {})]
        return next((one for one in commits if one[0] == revision), commits[-1])

    def answer(self, content, headers=()):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        for name, value in {**dict(headers), "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A server in place of the hub, with an empty cache."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.commits, server.private, server.fetched = {}, {}, []
        address = f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": False,
        }.items():  # fmt: skip
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def probe(seed=0, classes=("digit", "word")):
    made = np.random.default_rng(seed)
    outputs = 1 if classes is None else len(classes)
    means = made.normal(size=(0 if classes is None else outputs, 24))
    kind, labels = ("ridge", None) if classes is None else ("logistic", np.array(classes))
    return Probe(
        kind, "blocks.1.hook_resid_post", made.normal(size=(outputs, 24)), made.normal(size=outputs), labels, means
    )


def test_an_sae_a_probe_and_a_track_are_loaded_by_the_name_and_the_commit_they_were_pushed_to(hub, tiny_llada):
    run = sinklens.generate(tiny_llada, "Question: 3 + 4?\nAnswer:", steps=2, gen_length=4)
    first, second = random_sae(), random_sae(architecture="standard", point="blocks.2.hook_resid_post")
    commit = push_to_hub(first, "someone/kept/sae")
    push_to_hub(probe(), "someone/kept/probe")
    push_to_hub(run.sinks, "someone/kept/track")
    push_to_hub(second, "someone/kept/sae")
    push_to_hub(probe(1, None), "someone/alone", private=False)
    assert hub.private == {"someone/kept": True, "someone/alone": False}
    torch.testing.assert_close(load_sae("someone/kept/sae").W_enc, second.W_enc)
    assert load_sae("someone/kept/sae").point == "blocks.2.hook_resid_post"
    assert load_sae("someone/kept/sae", revision=commit).k == first.k
    for made, loaded in [(probe(), Probe.load("someone/kept/probe")), (probe(1, None), Probe.load("someone/alone"))]:
        assert (loaded.kind, loaded.point) == (made.kind, made.point)
        np.testing.assert_array_equal(loaded.classes, made.classes)
        x = np.random.default_rng(2).normal(size=(5, 24))
        np.testing.assert_array_equal(loaded.outputs(x), made.outputs(x))
        np.testing.assert_array_equal(loaded.means, made.means)
    np.testing.assert_array_equal(SinkTrack.open("someone/kept/track").scores(), run.sinks.scores())
    assert {name.rpartition(".")[2] for name in hub.fetched} == {"json", "safetensors", "nc"}


def test_what_is_not_on_the_hub_or_cannot_go_there_is_refused(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    other, short = tmp_path / "other.safetensors", tmp_path / "short.safetensors"
    save_file(tensors := {name: np.zeros((2, 3)) for name in ("weights", "bias", "means")}, other)
    save_file(tensors, short, {"probe": json.dumps({"kind": "logistic", "point": "", "classes": [0, 1]})})
    for call, error, match in [
        (lambda: push_to_hub(3, "someone/kept"), SettingError, "what must be .* or a sink track, .*; got 3"),
        (lambda: push_to_hub(probe(), "kept"), CheckpointError, "'kept' is not a name on the hub"),
        (lambda: push_to_hub(probe(), "some one/kept"), CheckpointError, "could not upload 'some one/kept'"),
        (lambda: Probe.load(other), CheckpointError, r"other\.safetensors holds no probe: 'probe'"),
        (lambda: Probe.load(short), CheckpointError, "weights, bias, means and classes disagree"),
        (lambda: Probe.load("nowhere"), CheckpointError, "nowhere holds no probe"),
        *(
            (partial(read, name), SinklensError, match)
            for read in (load_sae, Probe.load, SinkTrack.open)
            for name, match in [
                ("kept/typo", "kept/typo does not exist, and is read as a path because there is a folder kept"),
                ("./other/typo", r"neither a folder|No such file|does not exist"),
                ("other/typo.nc", r"neither a folder|No such file|does not exist"),
            ]
        ),
        (lambda: load_sae(tmp_path, revision="v1"), CheckpointError, "revision 'v1' applies to names on the hub"),
        (lambda: SinkTrack.open(tmp_path / "a.nc", revision="v1"), CheckpointError, "'v1' applies to names on the hub"),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            call()
    push_to_hub(sae := random_sae(), "kept/sae")
    torch.testing.assert_close(load_sae("kept/sae", revision="main").W_enc, sae.W_enc)
