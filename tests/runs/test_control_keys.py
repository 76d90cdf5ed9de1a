"""Control keys against the keys that a run hides: none is refused, few are reported; rules without keys are, too."""

import re
import warnings

import pytest
import torch
from asked import TWO as PROMPTS
from watching import masked_keys, watch

import sinklens
from sinklens.errors import ControlWarning, InterventionWarning, SettingError
from sinklens.experiments import compare, sweep
from sinklens.interventions import AblateHeads, HideKeys, MaskKeys, MaskSinks, Where
from sinklens.sinks import EpsilonOverMean, StrongestKeys

FEW = {"gen_length": 8, "steps": 4, "record_sinks": False}
EVERY_DIGIT = StrongestKeys(k=99, only="digit")  # no digit is weaker than all of them


def hidden(watched, heads):
    """Number of keys that some heads ignore, by row, over all layers and the steps after the first."""
    counts = torch.zeros(2, dtype=torch.long)
    for step in range(1, watched.run.steps_run):
        for layer in masked_keys(watched, step):
            for row, row_heads in enumerate(layer):
                counts[row] += sum(len(row_heads[head]) for head in heads)
    return counts


@pytest.mark.parametrize("heads", [range(6), [1, 4]])
def test_a_run_counts_the_keys_that_its_control_hides_in_the_heads_that_it_changes(tiny_llada, heads):
    control = MaskSinks(top_k=3, pick="same_kind", heads=list(heads))
    with pytest.warns(ControlWarning, match=r"MaskKeys\(pick='same_kind'\) picks fewer keys than it controls for"):
        watched = watch(tiny_llada, PROMPTS, [control], **FEW)
    found = watched.run.control_keys
    assert found.picked.tolist() == hidden(watched, heads).tolist()
    assert found.requested.tolist() == [3 * len(heads) * tiny_llada.cfg.n_layers * 3] * 2  # not at the first step
    assert (found.picked < found.requested).all()


def test_a_control_without_any_key_is_refused(tiny_llada):
    where = Where(detector=EVERY_DIGIT, pick="same_kind")
    for hooks in (MaskSinks(top_k=None, where=where), MaskSinks(top_k=None, detector=EVERY_DIGIT, pick="same_kind")):
        with pytest.raises(SettingError, match=r"MaskKeys\(pick='same_kind'\) found \d+ keys to control for and no"):
            sinklens.generate(tiny_llada, PROMPTS, hooks=hooks, **FEW)


def test_complete_controls_and_runs_without_one_do_not_warn(tiny_llada):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ControlWarning)
        full = sinklens.generate(tiny_llada, PROMPTS, hooks=MaskSinks(top_k=2, pick="nearest", same_step=True), **FEW)
        plain = sinklens.generate(tiny_llada, PROMPTS, hooks=MaskSinks(top_k=2), **FEW)
    assert full.control_keys.picked.tolist() == full.control_keys.requested.tolist() == [2 * 6 * 4 * 4] * 2
    assert (plain.control_keys, compare(plain, full)["control_picked"].values.tolist()) == (None, [192, 192])
    assert "control_picked" not in compare(full, plain)


def test_a_sweep_counts_the_control_keys_of_each_intervention_on_its_own_rows(tiny_llada):
    listed = {
        "strongest": MaskSinks(),
        "one": MaskSinks(pick="random"),
        "none": MaskSinks(top_k=None, detector=EVERY_DIGIT, pick="same_kind"),
    }
    with pytest.warns(ControlWarning, match="picks fewer keys"):
        found = sweep(tiny_llada, PROMPTS, listed, gen_length=8, steps=4, progress=False)
    alone = sinklens.generate(tiny_llada, PROMPTS, hooks=listed["one"], **FEW).control_keys
    assert found["control_picked"].sel(intervention="one").values.tolist() == alone.picked.tolist()
    assert found["control_picked"].sel(intervention="none").values.tolist() == [0, 0]
    assert (found["control_requested"].sel(intervention="none") > 0).all()
    assert found["control_picked"].sel(intervention="strongest").isnull().all()


HIGH = Where(detector=EpsilonOverMean(20))
NOTHING = r"MaskKeys with detector=EpsilonOverMean\(epsilon=20, unit='sum'\) found nothing in any step to act on"


@pytest.mark.parametrize(
    ("hooks", "settings", "warns"),
    [
        (MaskSinks(detector=HIGH.detector), {}, NOTHING),
        (MaskKeys(where=HIGH), {"steps": 1}, NOTHING),
        (MaskSinks(), {"steps": 1}, "MaskKeys with top_k=1 found nothing .* same_step=True"),
        (AblateHeads(where=~HIGH & HIGH), {}, "^Ablate with detector=.* and detector=.* found nothing"),
        ([MaskKeys(where=HIGH), MaskSinks(top_k=2)], {}, NOTHING),
        (MaskKeys(where=~HIGH), {}, None),
        (MaskSinks(), {"steps": 2}, None),
        (MaskSinks(detector=EpsilonOverMean(1)), {}, None),
        ([MaskSinks(top_k=0), HideKeys(positions=[0]), MaskKeys(where="digit")], {}, None),
        (MaskSinks(where=Where(detector=HIGH.detector, pick="random")), {}, "detector=.*, pick='random' found nothing"),
    ],
)
def test_a_rule_that_finds_nothing_warns_at_the_end_of_the_run(tiny_llada, hooks, settings, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", InterventionWarning)
        sinklens.generate(tiny_llada, PROMPTS, hooks=hooks, **FEW | settings)
    assert [bool(re.search(warns or "", str(one.message))) for one in caught] == [True] * (warns is not None)


@pytest.mark.parametrize("metric", [None, lambda step: step.logits.mean(dim=(1, 2))])
def test_a_sweep_warns_once_of_all_that_found_nothing_for_any_prompt(tiny_llada, metric):
    listed = {f"{head}": MaskSinks(detector=HIGH.detector, heads=[head]) for head in range(6)} | {"top": MaskSinks()}
    with pytest.warns(InterventionWarning, match=NOTHING) as caught:
        warnings.simplefilter("always")
        sweep(tiny_llada, PROMPTS, listed, gen_length=8, steps=4, batch_size=2, metric=metric, progress=False)
    assert len(caught) == 1
