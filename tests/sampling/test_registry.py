"""The registry of samplers: a new one runs like the built-in ones, and one that does not fit is refused."""

from dataclasses import dataclass

import pytest
import torch
from timed import loader

import sinklens
from sinklens.errors import HookOrderError, SettingError
from sinklens.families import SAMPLERS, register
from sinklens.families.llada import LladaSettings
from sinklens.families.registry import find_sampler
from sinklens.families.samplers import fitting
from sinklens.sampling import Sampler


@dataclass(frozen=True)
class RightToLeft(Sampler):
    """Fills one position per step, from the right."""

    name = "from-the-right"

    def denoise(self, state):
        for _ in range(self.steps):
            yield
            canvas = state.begin_step()
            where = torch.zeros_like(canvas, dtype=torch.bool)
            where[:, -1 - state.steps_done] = True
            proposed, _ = state.propose(where, state.logits(canvas, where).argmax(-1), canvas)
            state.commit(where, proposed)


@pytest.fixture
def right_to_left():
    register(RightToLeft)
    yield RightToLeft
    del SAMPLERS["from-the-right"]


def test_a_registered_sampler_runs_with_its_settings_and_records_sinks(tiny_llada, right_to_left):
    run = sinklens.generate(tiny_llada, "2 + 3", sampler="from-the-right", gen_length=4)
    assert (run.settings, run.unmask_step[0, run.prompt_length :].tolist()) == (RightToLeft(4), [3, 2, 1, 0])
    assert (run.sinks.data.attrs["sampler"], run.sinks.data.sizes["step"]) == ("from-the-right", 4)


def test_a_point_that_the_sampler_does_not_pass_is_refused_by_name(tiny_llada, right_to_left):
    given = {"sampler": "from-the-right", "gen_length": 3, "record_sinks": False}
    sinklens.generate(tiny_llada, "2 + 3", gen_length=2, steps=2)  # passes every point
    text = (
        r"the from-the-right sampler does not pass denoise.hook_confidence, .* at\(state.tree.denoise.hook_confidence,"
    )
    with pytest.raises(HookOrderError, match=text), sinklens.trace(tiny_llada, "2 + 3", **given) as t:
        for _ in t.steps:
            print(t["denoise.hook_confidence"])
    with pytest.raises(HookOrderError, match=text):
        sinklens.generate(tiny_llada, "2 + 3", hooks=[("denoise.hook_confidence", lambda v, hook: None)], **given)
    late = r"'denoise.hook_candidates' was requested in step 0 after the step had passed it"
    with pytest.raises(HookOrderError, match=late), sinklens.trace(tiny_llada, "2 + 3", **given) as t:
        for _ in t.steps:
            print(t["denoise.hook_commit"], t["denoise.hook_candidates"])
    seen = set()
    every = (lambda name: name.startswith("denoise."), lambda v, hook: seen.add(hook.name))
    sinklens.generate(tiny_llada, "2 + 3", hooks=[every], **given)  # a predicate may select points of other samplers
    assert "denoise.hook_commit" in seen
    assert "denoise.hook_confidence" not in seen


@pytest.mark.parametrize(
    ("model", "given", "text"),
    [
        ("tiny_llada", {"sampler": "autoregressive"}, "fits causal or per-pass attention, but llada models .* choose"),
        ("tiny_llama", {"sampler": "llada"}, "llada sampler fits bidirectional attention, but llama models"),
        ("tiny_llada", {"sampler": "lada"}, r"no sampler is called 'lada'; known: llada, .* Nearest: llada"),
        ("tiny_llada", {"sampler": "d3llm"}, "the sampler 'd3llm' is not available: it works on several blocks at a"),
        ("tiny_llada", {"sampler": "d3LLM"}, "the sampler 'd3LLM' is not available: it works on several blocks at a"),
        ("tiny_llada", {"sampler": "from-the-right", "alg": "entropy"}, "alg is not a setting of the from-the-right ."),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("right_to_left")
def test_a_sampler_that_does_not_exist_or_fit_and_a_setting_of_another_are_refused(request, model, given, text):
    with pytest.raises(SettingError, match=text):
        sinklens.generate(request.getfixturevalue(model), "2 + 3", **given)


NETWORKS = ("tiny-llada", "tiny-dream", "tiny-sdar", "tiny-canvas", "tiny-llama")
REFERENCES = ("mdlm", "sedd", "duo", "gidd", "bd3lm-owt", "mdlm timed", "rnd1")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", [*NETWORKS, *REFERENCES])
def test_a_sampler_runs_a_model_or_is_refused_with_those_that_do(conformance, tmp_path_factory, name):
    model = (sinklens.load if name in NETWORKS else loader(conformance, tmp_path_factory.mktemp))(name)
    fits = fitting(model)
    assert model.family_record.sampler in fits
    for sampler in SAMPLERS:
        given = {"sampler": sampler, "record_sinks": False} | ({} if name == "tiny-canvas" else {"gen_length": 4})
        if sampler == "mdlm-windows":  # the published window is longer than these contexts
            given |= {"window_length": 8, "stride_length": 4, "window_steps": 2}
        if sampler in fits:
            assert sinklens.generate(model, [[5, 6, 7]], **given).steps_run
            continue
        with pytest.raises(SettingError, match=rf"the {sampler} sampler .*; choose one of {', '.join(fits)}\."):
            sinklens.generate(model, [[5, 6, 7]], **given)


@dataclass(frozen=True)
class Unnamed(RightToLeft):
    """Inherits the name of another sampler."""


@dataclass(frozen=True)
class Other(RightToLeft):
    """Takes the name of another sampler."""

    name = "from-the-right"


@pytest.mark.usefixtures("unchecked")
def test_a_name_belongs_to_one_class_which_has_steps(right_to_left):
    register(right_to_left)  # the same class again
    with pytest.raises(SettingError, match="a sampler called 'from-the-right' already exists"):
        register(Other)
    for incomplete in (Sampler, Unnamed, dict):
        with pytest.raises(SettingError, match=rf"{incomplete.__name__} must be a dataclass derived from Sampler with"):
            register(incomplete)
    assert [find_sampler(name) for name in ("from-the-right", "llada")] == [RightToLeft, LladaSettings]
