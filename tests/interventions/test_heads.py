"""Ablated heads add nothing to the stream and leave other heads unchanged; means and samples are the reference's."""

import pytest
import torch
from building import plain_pass, random_ids, shared_model
from watching import PADDED, SHORT, Z, unwatched, watch

from sinklens.errors import SettingError
from sinklens.experiments import donors
from sinklens.interventions import Ablate, AblateHeads

HEADS = [f"blocks.{layer}.attn.hook_z" for layer in range(3)]
ONE_OF_EACH = [("llama", False, {}), ("llama", True, {}), ("llama", True, {"use_cache": False})]


@pytest.fixture(scope="module")
def reference(worded):
    """Head outputs of other prompts, by kind of model."""
    prompts = ["w20 w21 w22", "w30 w31 w32 w33 w34"]
    return {causal: donors(worded("llama", causal), prompts, HEADS, gen_length=4) for causal in (False, True)}


@pytest.mark.parametrize(("architecture", "settings", "step"), [
    ("llama", {"cache": "dual", "gen_length": 8, "block_length": 4}, 1), ("sdar", {"use_cache": True}, 0),
])  # fmt: skip
def test_the_mean_without_a_reference_needs_all_positions_of_the_row(worded, reference, architecture, settings, step):
    text = rf"by='mean' without reference= is the mean .*, and step {step} computes only some of them; pass reference="
    with pytest.raises(SettingError, match=text):
        watch(worded(architecture), PADDED, [AblateHeads(by="mean")], **settings)
    ablate = AblateHeads(by="mean", layers=[1], reference=reference[False])
    replaced = watch(worded(architecture), PADDED, [ablate], ["1.attn.hook_z"], **settings).values[1][Z]
    assert replaced.shape[1] < 15
    torch.testing.assert_close(replaced, reference[False].values[Z].mean(dim=0).expand_as(replaced))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("architecture", "causal", "settings"), ONE_OF_EACH)
def test_resampled_outputs_come_from_the_same_heads_at_one_place_of_the_reference(
    worded, reference, architecture, causal, settings
):
    model, pool = worded(architecture, causal), reference[causal].values[Z]
    ablate = AblateHeads(by="resample", reference=reference[causal], layers=[1], heads=[0, 2], seed=7)
    runs = [watch(model, prompts, [ablate], ["1.attn.hook_z"], **settings) for prompts in (PADDED, [SHORT])]
    other = AblateHeads(by="resample", reference=reference[causal], layers=[1], heads=[0, 2], seed=8)
    reseeded = watch(model, PADDED, [other], ["1.attn.hook_z"], **settings)
    drawn = set()
    for step in range(runs[1].run.steps_run):
        together, alone = (run.values[step][Z] for run in runs)
        place = (together[:, :, None, [0, 2]] == pool[:, [0, 2]]).all(dim=(3, 4)).int()
        assert (place.sum(dim=2) >= 1).all()  # both heads from one place
        drawn |= set(place.argmax(dim=2)[1].tolist())
        assert torch.equal(together[:1, -alone.shape[1] :, [0, 2]], alone[:, :, [0, 2]])
        if together.shape[1] > 1:
            assert not torch.equal(together[:, :, 0], reseeded.values[step][Z][:, :, 0])
    assert len(drawn) > 5


@pytest.mark.parametrize("causal", [False, True])
def test_a_single_pass_gets_the_same_edits(causal):
    model, ids = shared_model("llama", causal), random_ids()

    found = model.run_with_hooks(ids, fwd_hooks=AblateHeads(heads=[1, -2], layers=[-1]).hooks_for(model))
    expected = plain_pass(
        model, ids, edits={"blocks.2.attn.hook_z": lambda z: z * torch.tensor([1.0, 0, 1, 1, 0, 1])[:, None]}
    ).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


REFUSED = [
    *(
        (lambda reference, hook=hook: watch(shared_model(), random_ids(1), [hook]), text)
        for hook, text in (
            (AblateHeads(heads=[6]), "head 6 does not exist; there are 6, 0 to 5"),
            (AblateHeads(heads=[0, -7]), "head -7 does not exist; there are 6"),
            (AblateHeads(layers=[3]), "layer 3 does not exist; there are 3, 0 to 2"),
            (AblateHeads(steps=[4]), "step 4 does not exist; there are 4, 0 to 3"),
            (AblateHeads(positions=[15]), "position 15 does not exist; there are 15, 0 to 14"),
        )
    ),
    (lambda reference: AblateHeads(by="noise"), "by must be one of zero, mean, resample, skip.*; got 'noise'"),
    (lambda reference: AblateHeads(reference=reference), "by='zero' does not use reference="),
    (lambda reference: AblateHeads(by="resample"), r"resampling needs reference=donors\(model, prompts, names\)"),
    (
        lambda reference: Ablate(point="hook_mlp_out", by="mean", reference=reference).hooks_for(shared_model()),
        "the donors have no 'blocks.0.hook_mlp_out'",
    ),
    *(
        (lambda reference, by=by, point=point: Ablate(point=point, by=by).hooks_for(shared_model()), f"by='{by}' needs")
        for by, point in (("mean", "attn.hook_pattern"), ("skip", "attn.hook_k"))
    ),
    (
        lambda reference: AblateHeads(heads=0.5),
        r"heads must be a list of integers, .*; got 0.5",
    ),
    (
        lambda reference: AblateHeads(steps=[0]).hooks_for(shared_model()),
        "steps= applies to a run with several steps",
    ),
    (
        lambda reference: AblateHeads(by="mean").hooks_for(shared_model("llama", True)),
        "would leak later positions in a causal model",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_places_and_settings_without_a_meaning_are_rejected(reference, call, text):
    with pytest.raises(SettingError, match=text):
        call(reference[False])
    assert unwatched(shared_model())
