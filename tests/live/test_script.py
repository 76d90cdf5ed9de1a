"""The script of a run, executed as a file, gives its canvas."""

import runpy

import pytest
from lab_page import PROMPT

from sinklens.live.script import script
from sinklens.live.spec import RunSpec

LOADING = {"m": "sinklens.load('m')", "n": "sinklens.load('n', dtype='bfloat16')"}


def executed(source: str, names: list[str], folder) -> dict:
    """The canvases of a script's runs."""
    (folder / "script.py").write_text(source, encoding="utf-8")
    made = runpy.run_path(str(folder / "script.py"))
    return {name: made[name].canvas[0].tolist() for name in names}


@pytest.mark.fast_cases(1)
def test_the_script_of_a_run_repeats_it_with_what_it_replays(client, tmp_path, capsys):
    """Two chips, one that is off, settings, a seed, and a replay of a run with a forced token."""
    common = {"prompt": PROMPT, "settings": {"gen_length": 6, "temperature": 0.7}, "seed": 3}
    forced = client.run(**common, chips=[{"kind": "force_token", "pos": 25, "token": 500, "steps": [3, 3]}])
    chips = [
        {"kind": "mask_head_sinks", "layer": 0, "head": 1, "top_k": 2, "steps": [1, 4]},
        {"kind": "hide_key", "pos": 5},
        {"kind": "mask_sinks", "on": False},
    ]
    last = client.run(**common, chips=chips, replay=forced["summary"]["id"])
    free = client.run(**common, chips=chips)
    source = client.http.get(f"/api/runs/{last['summary']['id']}/python?other={free['summary']['id']}").text
    found = executed(source, ["first", "second", "base_of_first"], tmp_path)
    assert found == {"first": last["canvas"], "second": free["canvas"], "base_of_first": forced["canvas"]}
    assert found["second"] != found["first"]
    assert f"{last['text']}\n{free['text']}\n" in capsys.readouterr().out


def test_texts_are_literals_whatever_they_contain():
    hostile = "'); import os; os.system('x')\n\"\"\" \\ \u2028 \ud800 {} %s"
    source = script({"run": RunSpec("m", hostile, settings={"remasking": "'+exit()+'"})}, {"m": "sinklens.load('m')"})
    assert source.isascii()
    calls = []

    class Fake:
        """Takes the place of sinklens and keeps what it is called with."""

        text = ""

        @staticmethod
        def load(name):
            return name

        @classmethod
        def generate(cls, *values, **named):
            calls.append((values, named))
            return cls

    exec(source.replace("import sinklens\n", ""), {"sinklens": Fake})
    assert calls == [(("m", hostile), {"seed": 0, "remasking": "'+exit()+'"})]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (
            {"run": RunSpec("n", [1, 2])},
            "import sinklens\n\nmodel = sinklens.load('n', dtype='bfloat16')\n"
            "run = sinklens.generate(model, [1, 2], seed=0)\n\nprint(run.tokens[0].tolist())\n",
        ),
        (
            {"first": RunSpec("m", "a", chat_template=True), "second": RunSpec("n", "a", task=("tiny-gsm", 3))},
            "import sinklens\n\nmodel = sinklens.load('m')\n"
            "first = sinklens.generate(model, 'a', seed=0, chat_template=True)\n"
            "model_2 = sinklens.load('n', dtype='bfloat16')\n# problem 3 of tiny-gsm\n"
            "second = sinklens.generate(model_2, 'a', seed=0)\n\nprint(first.text)\nprint(second.text)\n",
        ),
    ],
    ids=["token ids", "two models"],
)
def test_a_script_loads_each_model_as_the_lab_did(runs, expected):
    assert script(runs, LOADING) == expected
