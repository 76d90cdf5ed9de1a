"""Interventions on networks conditioned on the noise level: each step equals a naive pass in plain torch.

One intervention per point that it changes; the others at the same point differ in what they choose, not in the network.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from building import put
from dit_oracle import PlainDit
from planted_saes import Perfect
from torch import Tensor

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import effect
from sinklens.features import SpliceSAE, collect, read_features
from sinklens.interventions import (
    AblateHeads,
    AblateMLPs,
    AblateValues,
    ForceTokens,
    FreezePattern,
    MaskSinks,
    Remask,
    Renoise,
    SinkToken,
    Steer,
    Suffix,
)
from sinklens.sampling import PrefixCache

PROMPTS = [[5, 9, 13], [8, 2, 4]]
SETTINGS: dict[str, dict[str, Any]] = {
    "mdlm": {"steps": 5},
    "sedd": {"steps": 5, "predictor": "analytic"},
    "duo": {"steps": 5},
    "gidd": {"steps": 6},
}
SCORES, PATTERN, Z = "attn.hook_attn_scores", "attn.hook_pattern", "blocks.1.attn.hook_z"


@cache
def _loaded(folder):
    return sinklens.load(folder, family="sedd" if folder.name == "sedd" else None), PlainDit(folder)


@pytest.fixture(params=SETTINGS)
def name(request):
    return request.param


@pytest.fixture
def network(name, conformance):
    return _loaded(conformance / name)


def generate(model, name, **more):
    settings = {"gen_length": 6, "seed": 1} | SETTINGS[name] | more
    return sinklens.generate(model, settings.pop("prompts", PROMPTS), **settings)


def logits_kept():
    """A list, and the hook that fills it with the logits of every step."""
    seen: list[Tensor] = []
    return seen, ("denoise.hook_logits", lambda value, hook: seen.append(value.clone()))


@torch.no_grad()
def plain(dit, run, step, edits=None):
    """A step of a run in plain torch, at its noise level."""
    return dit(run.canvas[:, step], 0.0 if run.time is None else run.time[:, step], edits)


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, atol=3e-5 * float(expected.abs().max()), rtol=0)


class Step(NamedTuple):
    """What an oracle may use: the values of the steps before this one, under their own edits."""

    dit: PlainDit
    run: Any
    before: list[dict[str, Tensor]]


def column_sums(values, layer):
    return values[f"blocks.{layer}.{PATTERN}"].sum(2)


def hide_strongest(step, values):
    """Edits that hide the key with the largest column sum of each head."""
    edits = {}
    for layer in range(step.dit.layers):
        sums = column_sums(values, layer)
        strongest = torch.zeros_like(sums).scatter(-1, sums.topk(1).indices, 1.0).bool()[:, :, None]
        edits[f"blocks.{layer}.{SCORES}"] = lambda scores, hidden=strongest: scores.masked_fill(hidden, -torch.inf)
    return edits


def everywhere(step, point, edit):
    return {f"blocks.{layer}.{point}": edit for layer in range(step.dit.layers)}


def undecided_heads(step):
    """Zeros at the positions that are masked; in Duo, at all of the answer."""
    ids, mask = step.run.canvas[:, len(step.before)], step.run.model.mask_token_id
    masked = (torch.arange(ids.shape[1]) >= 3).expand_as(ids) if mask is None else ids == mask
    return {"blocks.0.attn.hook_z": lambda z: z.masked_fill(masked[:, :, None, None], 0.0)}


def frozen(step):
    names = [f"blocks.{layer}.{PATTERN}" for layer in range(step.dit.layers)]
    return {name: lambda _, name=name: step.before[1][name] for name in names} if len(step.before) > 1 else {}


THIRD = (torch.arange(9) == 2).view(1, 1, 1, 1, 9)  # [batch, step, layer, head, pos]
CASES: dict[str, tuple[Any, Any]] = {
    "MaskSinks": (
        lambda model: MaskSinks(top_k=1),
        lambda step: hide_strongest(step, step.before[-1]) if step.before else {},
    ),
    "MaskSinks same step": (
        lambda model: MaskSinks(top_k=1, same_step=True),
        lambda step: hide_strongest(step, plain(step.dit, step.run, len(step.before)).values),
    ),
    "AblateHeads": (
        lambda model: AblateHeads(layers=[1], heads=[0]),
        lambda step: {Z: put(np.s_[:, :, 0], lambda z: 0.0)},
    ),
    "AblateHeads where": (lambda model: AblateHeads(layers=[0], where="masked"), undecided_heads),
    "AblateMLPs": (lambda model: AblateMLPs(layers=[0]), lambda step: {"blocks.0.hook_mlp_out": torch.zeros_like}),
    "AblateValues": (
        lambda model: AblateValues(where=THIRD),
        lambda step: everywhere(step, "attn.hook_v", put(np.s_[:, 2], lambda v: v.mean(1))),
    ),
    "FreezePattern": (lambda model: FreezePattern(at=1), frozen),
    "Steer": (
        lambda model: Steer(torch.linspace(-1, 1, model.cfg.d_model), 2.0, layers=[1]),
        lambda step: {"blocks.1.hook_resid_pre": lambda x: x + 2.0 * torch.linspace(-1, 1, x.shape[-1])},
    ),
    "SinkToken": (
        lambda model: SinkToken(token=3, value="zero"),
        lambda step: (
            everywhere(step, SCORES, put(np.s_[:, :, 0, 1:], lambda scores: -torch.inf))
            | everywhere(step, "attn.hook_v", put(np.s_[:, 0], lambda v: 0.0))
        ),
    ),
    "ForceTokens": (lambda model: ForceTokens(tokens={-1: 11}, steps=[2, 3]), lambda step: {}),
    "Suffix": (lambda model: Suffix(text=[17, 18]), lambda step: {}),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("case", CASES)
def test_every_step_of_a_changed_run_equals_a_plain_pass_with_the_change(network, name, case):
    (model, dit), (made, oracle), (seen, keep) = network, CASES[case], logits_kept()
    run, before, changed = generate(model, name, hooks=[made(model), keep]), [], 0.0
    assert run.steps_run > 2
    for step in range(run.steps_run):
        passed = plain(dit, run, step, oracle(Step(dit, run, before)))
        assert_near(seen[step], passed.logits)
        recorded = torch.from_numpy(run.sinks["score"].to_numpy()[:, step])
        sums = torch.stack([column_sums(passed.values, layer) for layer in range(dit.layers)], dim=1)
        torch.testing.assert_close(recorded, sums, atol=1e-3, rtol=1e-3)
        difference = (plain(dit, run, step).logits - passed.logits).abs().max()
        changed = max(changed, float(difference / passed.logits.abs().max()))
        before.append(passed.values)
    assert changed > 1e-4 or case in ("ForceTokens", "Suffix")
    assert case != "ForceTokens" or bool((run.canvas[:, [2, 3], -1] == 11).all())
    assert case != "Suffix" or bool((run.canvas[:, :, -2:] == torch.tensor([17, 18])).all())


@pytest.mark.parametrize("masked", ["mdlm", "sedd", "gidd"])
def test_masked_again_positions_are_masks(conformance, masked):
    model, _ = _loaded(conformance / masked)
    run = generate(model, masked, hooks=[Remask(positions=[-1, -2], steps=[3])])
    assert (run.canvas[:, 3, -2:] == model.mask_token_id).all()


@pytest.mark.fast_cases(2)
def test_an_effect_under_replay_is_the_divergence_of_plain_passes(network, name):
    model, dit = network
    found = effect(model, PROMPTS, AblateHeads(layers=[1], heads=[0]), **{"gen_length": 6, "seed": 1} | SETTINGS[name])
    run, kl = generate(model, name), found.under_replay["kl"].to_numpy()
    for step in (0, run.steps_run - 1):
        edits = {Z: put(np.s_[:, :, 0], lambda z: 0.0)}
        p, q = (plain(dit, run, step, one).logits.double().log_softmax(-1) for one in (None, edits))
        divergence, undecided = (p.exp() * (p - q)).sum(-1), run.undecided[:, step]
        for row in undecided.any(dim=1).nonzero()[:, 0].tolist():
            assert kl[row, step] == pytest.approx(float(divergence[row][undecided[row]].mean()), rel=1e-2)


@pytest.mark.extended
def test_features_are_collected_read_and_spliced_at_the_noise_level_of_their_step(network, name, tmp_path):
    (model, dit), point = network, "blocks.1.hook_resid_post"
    settings = {"gen_length": 6, "seed": 1} | SETTINGS[name]
    store = collect(model, PROMPTS, point, tmp_path / "store", batch_size=2, **settings)
    run, sae = generate(model, name), Perfect()
    passes = [plain(dit, run, step).values[point] for step in range(run.steps_run)]
    row, step, pos = (torch.from_numpy(store.column(one)).long() for one in ("prompt", "step", "pos"))
    torch.testing.assert_close(store.read(0, len(store)), torch.stack(passes)[step, row, pos], atol=1e-3, rtol=1e-3)
    assert len(store) == int(run.active.sum()) * 9
    read = torch.from_numpy(read_features(run, sae, point, steps=[1]).to_numpy())[:, 0]
    torch.testing.assert_close(read, sae.encode(passes[1]), atol=1e-3, rtol=1e-3)
    half = SpliceSAE(sae, point, features=list(range(model.cfg.d_model)))  # leaves the negative parts
    seen, keep = logits_kept()
    spliced = generate(model, name, hooks=[half, keep])
    for number, found in enumerate(seen):
        assert_near(found, plain(dit, spliced, number, {point: lambda x: -(-x).relu()}).logits)


REFUSED = [
    ("all", {"cfg_scale": 1.0}, "cfg_scale is not a setting of the .* sampler"),
    ("all", {"hooks": [Renoise(positions=[-1])]}, "Renoise changes which tokens a step accepts on a canvas of random"),
    ("timed", {"cache": PrefixCache()}, "PrefixCache reuses keys of earlier steps, and those of .* change with the"),
    ("timed", {"sampler": "autoregressive"}, "the autoregressive sampler fits causal or per-pass attention"),
    ("all", {"use_cache": True}, "use_cache is not a setting of the .* sampler"),
    ("duo", {"hooks": [Remask(positions=[-1])]}, "has no mask token; use ForceTokens"),
]


@pytest.mark.parametrize(("which", "given", "message"), REFUSED)
def test_what_has_no_meaning_is_refused_by_name(network, name, which, given, message):
    model, _ = network
    if which not in ("all", name) and not (which == "timed" and model.config.time_conditioning):
        pytest.skip(f"this is for {which} networks")
    with pytest.raises(SettingError, match=message):
        generate(model, name, **given)
