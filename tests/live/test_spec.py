"""The specification of a run, as it is written and read back: a record may be damaged or forged."""

import json

import pytest

from sinklens.live.chips import read_chips
from sinklens.live.history import LabRun
from sinklens.live.refusal import Refused
from sinklens.live.script import script
from sinklens.live.session import LabModel, Session
from sinklens.live.spec import MOST_REPLAYS, RunSpec

CODE = "1); __import__('os').system('true') #"
CHIP = {"kind": "mask_sinks", "id": "", "on": True, "top_k": 1, "steps": None}


def written(spec: RunSpec) -> dict:
    return json.loads(json.dumps(spec.to_json()))


def test_a_specification_is_read_back():
    base = RunSpec("m", [1, 2], sampler="llada", seed=3)
    settings = {"temperature": 0.5, "remasking": "random", "steps": None}
    chips = read_chips([{"kind": "ablate_head", "layer": 0, "head": 1, "steps": [1, 2]}])
    for spec in (
        base,
        RunSpec("m", "a", ("tiny-gsm", 2), settings, None, 1, True, "dual", chips, "r", base, "c"),
    ):
        assert RunSpec.from_json(written(spec)) == spec


FORGED = {  # name: (what differs in the record, text)
    "a seed that is code": ({"seed": CODE}, "seed must be an integer"),
    "a seed that is a list": ({"seed": [1]}, "seed must be an integer"),
    "a setting that is code": ({"settings": {f"seed=0, x={CODE}": 1}}, "no such setting: .seed=0, x="),
    "a setting of another sampler": (
        {"sampler": "autoregressive", "settings": {"cfg_scale": 1}},
        "no such setting: .cfg",
    ),
    "an infinite setting": ({"settings": {"temperature": float("inf")}}, "must be a finite number"),
    "a setting with a value that is a list": ({"settings": {"steps": [1]}}, "a setting must be a number, a word"),
    "a task that is code": ({"task": [f"x\n{CODE}", 0]}, "task must be .name, index. of a task"),
    "an index that is code": ({"task": ["tiny-gsm", f"0\n{CODE}"]}, "task must be .name, index. of a task"),
    "a prompt that is an object": ({"prompt": {"a": 1}}, "prompt must be text; got dict"),
    "a template that is code": ({"chat_template": CODE}, "chat_template must be true or false"),
    "a chip that is code": ({"chips": [CHIP | {"top_k": CODE}]}, "mask_sinks.top_k must be an integer"),
    "an unknown chip": ({"chips": [{"kind": "system"}]}, "no chip is of the kind 'system'"),
    "a chip with steps that are code": ({"chips": [CHIP | {"steps": [0, CODE]}]}, "mask_sinks.steps must be"),
    "a model that is a list": ({"model": ["m"]}, "model must be a short text"),
    "no model": ({"model": None}, "model must be a short text"),
    "a sampler that is a list": ({"sampler": ["llada"]}, "sampler must be a short text"),
    "a replay without its run": ({"replay": "x"}, "a replay needs the run that it replays"),
    "a forged replay": ({"replay": "x", "replayed": {"seed": CODE}}, "the record of a run lacks fields"),
    "a further field": ({"code": CODE}, "the record of a run lacks fields, or has others"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_is_refused(name):
    changed, text = FORGED[name]
    with pytest.raises(Refused, match=text):
        RunSpec.from_json(written(RunSpec("m", "a")) | changed)


def test_replays_do_not_nest_without_end(tiny_llada):
    spec = RunSpec("m", "a")
    for _ in range(MOST_REPLAYS):
        spec = RunSpec("m", "a", replay="x", replayed=spec)
    assert RunSpec.from_json(written(spec)) == spec
    deeper = RunSpec("m", "a", replay="x", replayed=spec)
    with pytest.raises(Refused, match="a record holds at most 32 replays"):
        RunSpec.from_json(written(deeper))
    opened = Session([LabModel("m", tiny_llada, "")])
    opened._runs["x"] = LabRun("x", spec)
    with pytest.raises(Refused, match="at most 32 runs replay one another"):
        opened.submit({"prompt": "a", "replay": "x"})
    opened.close()


def test_a_script_needs_the_model_of_a_replayed_run():
    spec = RunSpec("m", "a", replay="x", replayed=RunSpec("other", "a"))
    with pytest.raises(Refused, match="the script needs the model 'other', which this lab lacks"):
        script({"run": spec}, {"m": "sinklens.load('m')"})
