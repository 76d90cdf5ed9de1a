"""LLaDA-MoE, RND1, Open-dCoder, DiffuLLaMA and DiffuGPT: experts, fills, endings and rules, beside the stored runs."""

import pytest
import torch
from building import plain_pass
from stored.folders import largest_difference
from stored.runs import open_folder, stored_run

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.experiments import likelihood
from sinklens.interventions import Suffix
from sinklens.sinks.kinds import Kind, PlaceState, kinds_of_tokens, states

SHORT = {"llada-moe": {"block_length": 4}, "rnd1": {"steps": 4}}
PROMPT = [[7, 30, 41, 9, 160, 22, 83, 105, 6]]


def test_path_planning_takes_decisions_back(conformance):
    reference = open_folder(conformance / "open-dcoder")
    run = reference.repeat(stored_run(reference, 4))
    again = ~run.undecided[:, :-1] & run.undecided[:, 1:]
    assert int(again.sum()) == reference.runs[4]["written_tokens_masked_again"] == 135


@pytest.mark.parametrize("name", SHORT)
def test_an_expert_is_ablated_in_every_step_of_a_run(conformance, name):
    model, chosen, logits = open_folder(conformance / name).load(), {}, {}
    base = sinklens.generate(model, PROMPT, gen_length=4, **SHORT[name])
    at = "blocks.1.mlp"
    hooks = [
        (f"{at}.hook_expert_indices", lambda value, hook: chosen.update({hook.step: value})),
        (f"{at}.hook_expert_weights", lambda value, hook: value.masked_fill(chosen[hook.step] == 3, 0.0)),
        ("denoise.hook_logits", lambda value, hook: logits.update({hook.step: value})),
    ]
    sinklens.generate(model, PROMPT, gen_length=4, hooks=hooks, replay=base, **SHORT[name])
    assert any((indices == 3).any() for indices in chosen.values())
    for step in range(base.steps_run):
        without = {f"{at}.hook_expert_weights": lambda value, step=step: value.masked_fill(chosen[step] == 3, 0.0)}
        with torch.no_grad():
            plain = plain_pass(model, base.canvas[:, step], base.real, without).logits
        if model.family_record.shift:
            plain = torch.cat([plain[:, :1], plain[:, :-1]], dim=1)
        assert largest_difference(logits[step], plain) < 1e-3


def test_rnd1_ends_its_canvas_with_the_closing_token_and_commits_within_its_bound(conformance):
    model = open_folder(conformance / "rnd1").load()
    for closing, token in (("pad", [310]), ("eos", [312]), ("none", [])):
        run = sinklens.generate(model, PROMPT, gen_length=4, closing=closing)
        assert run.tokens[0, 13:].tolist() == token
        assert (run.unmask_step[0, 13:] == -1).all()
    assert (sinklens.generate(model, PROMPT, gen_length=6, eb_gamma=0.0).undecided.sum(dim=2)[0].diff() <= -1).all()
    assert sinklens.generate(model, PROMPT, gen_length=6, eb_gamma=1e6).steps_run == 1


def test_a_suffix_is_refused_where_the_answer_does_not_see_it(tiny_llama, tiny_llada):
    with pytest.raises(SettingError, match=r"does not see text after its answer, so it cannot fill a gap"):
        sinklens.generate(tiny_llama, "Question", gen_length=2, hooks=[Suffix(text="end")])
    with pytest.raises(SettingError, match=r"the suffix contains the mask token"):
        sinklens.generate(tiny_llada, "Question", gen_length=2, hooks=[Suffix(text=[tiny_llada.mask_token_id])])
    run = sinklens.generate(tiny_llada, "Question:", gen_length=8, hooks=[Suffix(text=" left?")])
    assert tiny_llada.tokenizer.decode(run.tokens[0, -3:]).endswith("left?")


# DiffuLLaMA and DiffuGPT


@pytest.mark.parametrize("name", ["diffullama", "diffugpt"])
def test_masks_of_its_training_give_the_references_logits(conformance, name):
    reference = open_folder(conformance / name)
    model, tensors = reference.load(), reference.tensors
    masks = [key.partition(".")[0] for key in tensors if key.startswith("anneal") and key.endswith(".mask")]
    assert masks
    for key in masks:
        hidden = torch.where(tensors[f"{key}.mask"].bool(), 0.0, -torch.inf)
        hooks = [(lambda point: point.endswith("hook_attn_mask"), lambda value, hook, hidden=hidden: value + hidden)]
        with torch.no_grad():
            found = model.run_with_hooks(tensors["input_ids"][:1], fwd_hooks=hooks)
        assert largest_difference(found, tensors[f"{key}.logits"]) < 1e-4


def test_a_drawn_mask_token_is_decided(conformance):
    """With the mask token proposed everywhere, positions are decided one after another and then keep it."""
    model = open_folder(conformance / "diffullama").load()
    hooks = [("denoise.hook_candidates", lambda value, hook: torch.full_like(value, model.mask_token_id))]
    run = sinklens.generate(model, [[5, 6]], gen_length=6, steps=6, hooks=hooks, seed=1)
    assert bool((run.canvas[0, -1, 2:] == model.mask_token_id).all())
    left = run.undecided[0].sum(dim=-1).tolist()
    assert (left[0], left[-1]) == (6, 0)
    assert left == sorted(left, reverse=True)
    assert len(set(left)) > 2


@pytest.mark.parametrize("name", ["diffullama", "diffugpt"])
@pytest.mark.parametrize("order", ["random", "confidence"])
def test_the_mask_token_in_a_prompt_is_text(conformance, name, order):
    """It is given, as in the reference code; so what a run wrote can be the next prompt, be scored and be replayed."""
    model = open_folder(conformance / name).load()
    mask, settings = model.mask_token_id, {"gen_length": 5, "steps": 4, "order": order, "seed": 3}
    prompt = [5, mask, 7, mask]
    run = sinklens.generate(model, [prompt], record_sinks=True, **settings)
    assert run.canvas[0, :, :4].tolist() == [prompt] * run.canvas.shape[1]
    assert not bool(run.undecided[..., :4].any())
    assert (int(run.undecided[0, 0].sum()), int(run.undecided[0, -1].sum())) == (5, 0)
    again = sinklens.generate(model, [prompt], replay=run, **settings)
    assert torch.equal(again.canvas, run.canvas)
    assert torch.equal(again.undecided, run.undecided)
    assert bool((states(run.sinks)[0, :, :4] == PlaceState.PROMPT).all())
    found = likelihood(model, prompt, [mask, 9], exact=True).value
    with torch.no_grad():
        both, first = (model(torch.tensor([[*prompt, mask, one]]))[0].log_softmax(-1) for one in (mask, 9))
    assert found == pytest.approx(float((both[3, mask] + first[3, mask]) / 2 + both[4, 9]), abs=1e-4)
    assert kinds_of_tokens([mask], model.special_tokens | {"words": [mask]}, {mask: " a"}) == {mask: Kind.WORD}
    with pytest.raises(PromptError, match="contains the mask token"):
        sinklens.generate(model, [prompt], sampler="llada", gen_length=4, steps=4)


def test_a_suffix_is_filled_like_stored_tokens_behind_a_gap(conformance):
    reference = open_folder(conformance / "diffullama")
    stored = stored_run(reference, 2)
    run, given = reference.repeat(stored), reference.tensors["gen2.src_mask"][0].bool()
    behind = len(given) - int((~given).nonzero().max()) - 1
    uniform, _, *first = stored.settings["hooks"]  # without the hook that writes what follows the gap
    hooks = [Suffix(text=reference.tensors["gen2.input_ids"][0, -behind:].tolist()), uniform, *first]
    settings = stored.settings | {"gen_length": stored.settings["gen_length"] - behind, "hooks": hooks}
    assert torch.equal(sinklens.generate(reference.load(), stored.prompt, **settings).canvas[0, -1], run.canvas[0, -1])
