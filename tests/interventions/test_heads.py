"""Ablated heads add nothing to the stream and leave other heads unchanged; means and samples against loops."""

import pytest
import torch
from building import plain_pass, random_ids, shared_model
from watching import PADDED, SHORT, unwatched, watch

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import head_outputs
from sinklens.interventions import AblateHeads
from sinklens.interventions.ablation import HeadOutputs
from sinklens.tasks import held_out

ONE_OF_EACH = [("llama", False, {}), ("llama", True, {}), ("llama", True, {"use_cache": False})]
Z = "blocks.1.attn.hook_z"


@pytest.fixture(scope="module")
def reference(worded):
    """Head outputs of other prompts, by kind of model."""
    return {causal: head_outputs(worded("llama", causal), ["w20 w21 w22", "w30 w31 w32 w33 w34"], gen_length=4)
            for causal in (False, True)}  # fmt: skip


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
    torch.testing.assert_close(replaced, reference[False].mean[1].expand_as(replaced))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("architecture", "causal", "settings"), ONE_OF_EACH)
def test_resampled_outputs_come_from_the_same_heads_at_one_place_of_the_pool(
    worded, reference, architecture, causal, settings
):
    model, pool = worded(architecture, causal), reference[causal].pool[1]
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


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("architecture", "causal", "settings"), [*ONE_OF_EACH, ("dream", False, {})])
def test_a_reference_is_the_mean_over_prompts_steps_and_real_positions(worded, architecture, causal, settings):
    model = worded(architecture, causal)
    found = head_outputs(model, PADDED, gen_length=4, **settings)
    watched = watch(model, PADDED, points=["hook_z"], gen_length=4, **settings)
    for layer in range(3):
        outputs = []
        for values in watched.values.values():
            z = values[f"blocks.{layer}.attn.hook_z"]
            prefill = z.shape[1] > 1
            outputs += [z[0, position] for position in range(3 if prefill else 0, z.shape[1])]
            outputs += list(z[1])
        torch.testing.assert_close(found.mean[layer], torch.stack(outputs).mean(dim=0), atol=1e-5, rtol=1e-5)
        outputs = torch.stack(outputs)
        distance = (found.pool[layer][:, None] - outputs).abs().amax(dim=(2, 3))
        assert (distance.amin(dim=1) == 0).all()
        assert len(found.pool[layer]) == min(len(outputs), 64 * len(watched.values))


@pytest.mark.parametrize("causal", [False, True])
def test_a_single_pass_gets_the_same_edits(causal):
    model, ids = shared_model("llama", causal), random_ids()

    def drop(z):
        return z * torch.tensor([1.0, 0, 1, 1, 0, 1])[:, None]

    found = model.run_with_hooks(ids, fwd_hooks=AblateHeads(heads=[1, -2], layers=[-1]).hooks_for(model))
    expected = plain_pass(model, ids, edits={"blocks.2.attn.hook_z": drop}).logits
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
    (
        lambda reference: AblateHeads(reference=HeadOutputs(torch.zeros(1), torch.zeros(1))),
        "by='zero' at attn.hook_z does not use reference=",
    ),
    (lambda reference: AblateHeads(by="resample"), r"resampling needs reference=head_outputs\(model, prompts\)"),
    (
        lambda reference: AblateHeads(heads=3).hooks_for(shared_model()),
        r"heads must be a list of integers, .*; got 3",
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


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tiny_llama", {}),
        ("tiny_llama", {"use_cache": False}),
        ("tiny_llada", {"threshold": 0.9, "block_length": 12}),  # rows end their blocks at different steps
    ],
)
def test_a_reference_excludes_steps_in_which_a_row_waits_for_its_batch(name, settings, request):
    model = request.getfixturevalue(name)
    prompts = [problem.prompt for problem in held_out(3)]
    together = head_outputs(model, prompts, **settings)
    alone = [head_outputs(model, [prompt], **settings) for prompt in prompts]
    runs = [sinklens.generate(model, prompt, record_sinks=False, **settings) for prompt in prompts]
    counts = [positions(run, settings) for run in runs]
    assert len({run.steps_run for run in runs}) > 1
    mean = sum(count * part.mean for count, part in zip(counts, alone, strict=True)) / sum(counts)
    torch.testing.assert_close(together.mean, mean, atol=1e-4, rtol=1e-4)


def positions(run, settings):
    """Total number of positions in the passes of a run of one prompt."""
    if not run.model.config.is_causal:
        return run.steps_run * run.canvas.shape[2]
    if settings.get("use_cache", True):
        return run.prompt_length + run.steps_run - 1
    return sum(run.prompt_length + step for step in range(run.steps_run))
