"""Readers of a message: all of them together are the ablated value, each alone is a path patch."""

import pytest
import torch

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import effect, read_attribution
from sinklens.interventions import AblateValues, PathPatch
from sinklens.tasks.word_problems import held_out

PROMPT = held_out(1)[0].prompt
STEP, LAYER, HEAD, KEY = 8, 1, 0, 18
SHORT = {"gen_length": 12, "steps": 12}


@pytest.fixture(scope="module")
def run(tiny_llada):
    return sinklens.generate(tiny_llada, PROMPT, **SHORT)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("head", [HEAD, None])
def test_all_readers_together_have_the_effect_of_the_ablated_value(tiny_llada, run, head):
    where = torch.zeros(1, 1, 1, 1, run.canvas.shape[2], dtype=torch.bool)
    where[..., KEY] = True
    heads = None if head is None else [head]
    ablate = AblateValues(where=where, steps=[STEP], layers=[LAYER], heads=heads)
    expected = effect(tiny_llada, PROMPT, ablate, **SHORT).under_replay["kl"][0, STEP].item()
    table = read_attribution(run, STEP, LAYER, head, KEY)
    assert table["kl"].sel(reader="all").item() == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert expected > 1e-7
    assert table.attrs["key"] == KEY


def test_a_reader_alone_is_a_path_patch_of_the_head_without_its_message(tiny_llada, run):
    ids, left = run.canvas[:, STEP], run.undecided[0, STEP]
    names = [f"blocks.{LAYER}.attn.hook_{name}" for name in ("pattern", "v", "z")]
    base, cache = tiny_llada.run_with_cache(ids, names_filter=names)
    pattern, value, z = (cache[name].detach() for name in names)
    z = z.clone()
    z[0, :, HEAD] += pattern[0, HEAD, :, KEY, None] * (value[0].mean(dim=0) - value[0, KEY])[HEAD]
    table = read_attribution(run, STEP, LAYER, HEAD, KEY, readers={"mlp": ["2_mlp_in"], "two": ["L2H3.q", "L3H1.v"]})
    for name, receivers in (("mlp", ["2_mlp_in"]), ("two", ["L2H3.q", "L3H1.v"])):
        patch = PathPatch(sender=f"L{LAYER}H{HEAD}", receiver=receivers, source={0: {names[2]: z}})
        changed = tiny_llada.run_with_hooks(ids, patch.hooks_for(tiny_llada))
        p, q = (logits[0, left].double().log_softmax(-1) for logits in (base, changed))
        expected = (p.exp() * (p - q)).sum(-1).mean().item()
        assert table["kl"].sel(reader=name).item() == pytest.approx(expected, rel=1e-2, abs=1e-9)
        assert expected > 0


def test_the_strongest_key_is_the_default_and_padding_does_not_matter(tiny_llada, run):
    both = sinklens.generate(tiny_llada, [PROMPT, held_out(2)[1].prompt + " More words to pad the other."], **SHORT)
    pads = int((~both.real[0]).sum())
    strongest = int(run.sinks.trajectory(LAYER, HEAD)[2])
    tables = [read_attribution(one, 2, LAYER, HEAD) for one in (run, both)]
    assert [table.attrs["key"] for table in tables] == [strongest, strongest + pads]
    assert pads > 0
    assert tables[1]["kl"].values == pytest.approx(tables[0]["kl"].values, rel=0.02, abs=1e-9)
    assert tables[0]["reader"].values.tolist()[:2] == ["1_mlp_in", "L2H0.q"]


def test_readers_that_do_not_read_the_head_and_keys_that_do_not_exist_are_refused(run):
    with pytest.raises(SettingError, match=r"L1H2\.q does not read what heads of layer 1 write"):
        read_attribution(run, STEP, LAYER, HEAD, KEY, readers={"own": ["L1H2.q"]})
    with pytest.raises(SettingError, match="position 99 does not exist at this step"):
        read_attribution(run, STEP, LAYER, HEAD, 99)
