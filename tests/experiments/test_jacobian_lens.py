"""The Jacobian lens against the complete Jacobian of a plain pass; which lens decodes earlier, on planted readings."""

import numpy as np
import pytest
import torch
from building import plain_pass, random_model

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import compare_lenses, fit_jacobian_lens, logit_lens
from sinklens.experiments.lens import first_layers
from sinklens.tasks.word_problems import held_out, training


def complete(model, ids, layer):
    """∂ last stream [pos, d_model] / ∂ stream that leaves `layer` [pos, d_model], of one row."""
    name, last = f"blocks.{layer}.hook_resid_post", f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    start = plain_pass(model, ids).values[name].detach()
    return torch.autograd.functional.jacobian(
        lambda stream: plain_pass(model, ids, edits={name: lambda _: stream}).values[last], start
    )[0, :, :, 0]


@pytest.mark.parametrize("architecture", ["llama", pytest.param("dream", marks=pytest.mark.extended)])
def test_one_pass_gives_the_sum_over_targets_and_the_mean_over_sources_of_the_jacobian(worded, architecture):
    model, settings = worded(architecture), {"gen_length": 3, "steps": 1}
    prompt = "w5 w6"
    lens = fit_jacobian_lens(model, [prompt], buckets=1, dims=7, **settings)
    run = sinklens.generate(model, [prompt], record_sinks=False, **settings)
    shift = int(model.family_record.shift)
    places = run.undecided[0, 0].nonzero()[:, 0] - shift
    for layer in range(2):
        full = complete(model, run.canvas[:, 0], layer)
        wanted = full[places][:, :, places].sum(dim=0).mean(dim=1)  # targets summed, sources averaged
        torch.testing.assert_close(lens.maps[0, layer].T + torch.eye(24), wanted.detach(), atol=1e-4, rtol=1e-3)
    assert not lens.maps[0, 2].any()
    assert not lens.offsets.any()


def test_own_targets_take_the_derivative_of_one_position_by_itself(worded):
    model, settings = worded(), {"gen_length": 3, "steps": 1}
    lens = fit_jacobian_lens(model, ["w5 w6"], buckets=1, targets="own", seed=4, **settings)
    run = sinklens.generate(model, ["w5 w6"], record_sinks=False, seed=4, **settings)
    full = complete(model, run.canvas[:, 0], 0).detach()
    places = run.undecided[0, 0].nonzero()[:, 0].tolist()
    found = lens.maps[0, 0].T + torch.eye(24)
    assert sum(torch.allclose(found, full[place, :, place], atol=1e-4) for place in places) == 1


def test_a_planted_model_whose_later_layers_write_nothing_has_the_identity():
    model = random_model()
    for layer in model.tree.hf.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    ids = torch.tensor([[4, 5, 6]])
    lens = fit_jacobian_lens(model, ids.tolist(), buckets=1, gen_length=3, steps=2)
    assert float(lens.maps.abs().max()) < 1e-6
    run = sinklens.generate(model, ids, gen_length=3, steps=2, record_sinks=False)
    read, plain = logit_lens(model, run, lens=lens), logit_lens(model, run)
    np.testing.assert_allclose(read["probability"], plain["probability"], atol=1e-6)
    assert (
        float(fit_jacobian_lens(random_model(), ids.tolist(), buckets=1, gen_length=3, steps=2).maps.abs().max()) > 0.1
    )


def test_the_first_layer_is_that_after_which_the_token_stays_on_top():
    top = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]], dtype=bool)
    assert first_layers(top).tolist() == [1, 2, 0, 3, 3]


def test_lenses_are_compared_place_by_place(worded):
    model, settings = worded(), {"gen_length": 4, "steps": 4}
    lens = fit_jacobian_lens(model, ["w5 w6"], buckets=2, passes=1, **settings)
    found = compare_lenses(model, ["w7 w8 w9", "w1"], {"logit": None, "jacobian": lens}, buckets=2, **settings)
    for number, prompt in enumerate(["w7 w8 w9", "w1"]):
        run = sinklens.generate(model, [prompt], record_sinks=False, **settings)
        data, places = logit_lens(model, run, lens=lens), []
        for step in range(run.steps_run):
            if int(run.undecided[0, step].sum()) > 2:  # masked shares above a half
                places += [data.isel(step=step, pos=pos) for pos in run.undecided[0, step].nonzero()[:, 0].tolist()]
        wanted = np.mean([(place["final_rank"] == 0).to_numpy() for place in places], axis=0)
        np.testing.assert_allclose(found["decoded"].sel(lens="jacobian", bucket=1.0)[number], wanted)
    assert (found["decoded"].sel(lens="logit")[..., -1] == found["decoded"].sel(lens="jacobian")[..., -1]).all()


@pytest.mark.extended
def test_the_lens_of_a_trained_model_is_nearer_to_the_final_token_than_the_logit_lens(tiny_llada):
    prompts = [problem.prompt for problem in training(12, 6)]
    lens = fit_jacobian_lens(tiny_llada, prompts, buckets=1, passes=4, steps=8)
    found = compare_lenses(tiny_llada, [held_out(1)[0].prompt], {"logit": None, "jacobian": lens}, buckets=1, steps=8)[
        "probability"
    ].isel(bucket=0, prompt=0)
    assert float(found.sel(lens="jacobian", layer=0)) != pytest.approx(float(found.sel(lens="logit", layer=0)))
    assert float(found.sel(lens="jacobian", layer=3)) == pytest.approx(
        float(found.sel(lens="logit", layer=3)), abs=1e-5
    )


def test_an_autoregressive_lens_reads_the_answer_in_one_pass(worded):
    model, prompt, settings = worded("llama", True), "w5 w6 w7", {"gen_length": 4}
    lens = fit_jacobian_lens(model, [prompt], buckets=1, dims=7, **settings)
    run = sinklens.generate(model, [prompt], record_sinks=False, **settings)
    text = run.canvas[:, -1, : run.prompt_length + run.steps_run]
    places = torch.arange(run.prompt_length - 1, text.shape[1] - 1)  # the streams that predict the answer
    for layer in range(2):
        full = complete(model, text[:, :-1], layer)
        wanted = full[places][:, :, places].sum(dim=0).mean(dim=1)
        torch.testing.assert_close(lens.maps[0, layer].T + torch.eye(24), wanted.detach(), atol=1e-4, rtol=1e-3)
    found = compare_lenses(model, [prompt], {"jacobian": lens}, buckets=1, **settings)
    read = logit_lens(model, run, steps=[-1], lens=lens).isel(step=0, pos=slice(run.prompt_length, text.shape[1]))
    np.testing.assert_allclose(found["decoded"][0, 0, 0], (read["final_rank"] == 0).mean("pos"))
    np.testing.assert_allclose(found["probability"][0, 0, 0], read["final_probability"].mean("pos"), rtol=1e-5)
    assert found["decoded"][0, 0, 0, -1] == 1.0  # greedy: the last layer's token is the final one


def test_models_and_numbers_that_do_not_fit_are_refused(worded):
    for call in (fit_jacobian_lens, lambda *given, **more: compare_lenses(*given, {"logit": None}, **more)):
        with pytest.raises(SettingError, match=r"llama is autoregressive, .* no masked share; pass buckets=1"):
            call(worded("llama", True), ["w5"], buckets=2)
    with pytest.raises(SettingError, match="must be at least 1"):
        fit_jacobian_lens(worded(), ["w5"], passes=0)
    with pytest.raises(SettingError, match=r"no step has a masked share above 0\.00 and up to 0\.25"):
        fit_jacobian_lens(worded(), ["w5"], gen_length=2, steps=1)
    with pytest.raises(SettingError, match="at least one lens"):
        compare_lenses(worded(), ["w5"], {})
