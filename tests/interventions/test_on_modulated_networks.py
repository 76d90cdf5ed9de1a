"""Every intervention on networks conditioned on the noise level: each step equals a naive pass in plain torch."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from dit_oracle import PlainDit
from planted_saes import Perfect
from torch import Tensor

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import effect, head_outputs, sweep
from sinklens.features import SpliceSAE, collect, read_features
from sinklens.interventions import (
    AblateHeads,
    AblateMLPs,
    AblateSinkAttention,
    AblateValues,
    Accept,
    Activations,
    ClampStream,
    FixedNoise,
    ForceTokens,
    FreezePattern,
    HideKeys,
    HoldSinks,
    KeepKeys,
    MaskSinks,
    PatchHooks,
    Remask,
    Renoise,
    SinkToken,
    Steer,
    Suffix,
    Where,
    WindowAttention,
)
from sinklens.sampling import PrefixCache

PROMPTS = [[5, 9, 13], [8, 2, 4]]
SETTINGS: dict[str, dict[str, Any]] = {
    "mdlm": {"steps": 5},
    "sedd": {"steps": 5, "predictor": "analytic"},
    "duo": {"steps": 5},
    "gidd": {"steps": 6},
}
SCORES, PATTERN = "attn.hook_attn_scores", "attn.hook_pattern"


@cache
def _loaded(folder):
    family = "sedd" if folder.name == "sedd" else None
    return sinklens.load(folder, family=family), PlainDit(folder)


@pytest.fixture(params=SETTINGS)
def name(request):
    return request.param


@pytest.fixture
def network(name, conformance):
    return _loaded(conformance / name)


def generate(model, name, **more):
    settings = {"gen_length": 6, "seed": 1} | SETTINGS[name] | more
    return sinklens.generate(model, settings.pop("prompts", PROMPTS), **settings)


# Oracles: intervention, and what it changes in a step, as edits of a plain pass. `plain` passes without edits over the
# step's canvas, `before` holds the edited values of the step before (None at step 0), `first` those of step 1.


class Step:
    """What an oracle may use."""

    def __init__(self, dit, ids, time, number, before, first, mask_id):
        self.dit, self.ids, self.time, self.number = dit, ids, time, number
        self.before, self.first, self.mask_id = before, first, mask_id

    @property
    def layers(self):
        return range(self.dit.layers)

    def hidden(self, keys) -> dict:
        """Edits that hide `keys`, by layer [batch, head, query or 1, key]."""
        hide = {f"blocks.{layer}.{SCORES}": keys(layer) for layer in self.layers}
        return {name: lambda value, name=name: value.masked_fill(hide[name], -torch.inf) for name in hide}


def column_sums(values, layer):
    return values[f"blocks.{layer}.{PATTERN}"].sum(2)


def strongest(values, layer, count=1):
    """True at the keys with the largest column sums, [batch, head, 1, key]."""
    sums = column_sums(values, layer)
    return torch.zeros_like(sums).scatter(-1, sums.topk(count).indices, 1.0).bool()[:, :, None]


def masked_sinks(step):
    return {} if step.before is None else step.hidden(lambda layer: strongest(step.before, layer))


def masked_sinks_of_the_step(step):
    plain = step.dit(step.ids, step.time).values
    return step.hidden(lambda layer: strongest(plain, layer))


def kept_keys(step):
    size = step.ids.shape[1]
    near = (torch.arange(size)[:, None] - torch.arange(size)).abs() <= 1
    return {} if step.before is None else step.hidden(lambda layer: ~(strongest(step.before, layer, 2) | near))


def hidden_keys(step):
    size = step.ids.shape[1]
    return step.hidden(lambda layer: torch.isin(torch.arange(size), torch.tensor([1, size - 2])))


def window(step):
    size = step.ids.shape[1]
    far = (torch.arange(size)[:, None] - torch.arange(size)).abs() > 2
    return step.hidden(lambda layer: far)


def at_head(head, change):
    def edit(value):
        value = value.clone()
        value[:, :, head] = change(value[:, :, head])
        return value

    return edit


def zeroed_head(step):
    return {"blocks.1.attn.hook_z": at_head(0, torch.zeros_like)}


def mean_of_head(step):
    return {"blocks.1.attn.hook_z": at_head(0, lambda z: z.mean(1, keepdim=True).expand_as(z))}


def undecided_heads(step):
    """Zeros at the positions that are masked; in Duo, at all of the answer."""
    masked = step.ids == step.mask_id if step.mask_id is not None else torch.arange(step.ids.shape[1]) >= 3
    masked = masked.expand_as(step.ids)
    return {"blocks.0.attn.hook_z": lambda z: z.masked_fill(masked[:, :, None, None], 0.0)}


def zeroed_mlp(step):
    return {"blocks.0.hook_mlp_out": torch.zeros_like}


def mean_values(step):
    def replaced(value):
        value = value.clone()
        value[:, 2] = value.mean(1)
        return value

    return {f"blocks.{layer}.attn.hook_v": replaced for layer in step.layers}


def zeroed_values(step):
    def replaced(value):
        value = value.clone()
        value[:, 2] = 0
        return value

    return {"blocks.1.attn.hook_v": replaced}


def removed_attention(step):
    def spread(pattern):
        sums = pattern.sum(2)
        sink = torch.zeros_like(sums).scatter(-1, sums.argmax(-1, keepdim=True), 1.0)[:, :, None]
        left = pattern * (1 - sink)
        return left / left.sum(-1, keepdim=True)

    return {f"blocks.{layer}.{PATTERN}": spread for layer in step.layers}


def frozen(step):
    if step.first is None or step.number <= 1:
        return {}
    return {
        f"blocks.{layer}.{PATTERN}": lambda _, layer=layer: step.first[f"blocks.{layer}.{PATTERN}"]
        for layer in step.layers
    }


def held(step):
    if step.first is None or step.number <= 1:
        return {}

    def hold(layer):
        kept, sink = step.first[f"blocks.{layer}.{PATTERN}"], strongest(step.first, layer)

        def edit(pattern):
            rest = pattern.masked_fill(sink, 0.0)
            column = torch.where(sink, kept, 0.0)
            return column + rest / rest.sum(-1, keepdim=True) * (1 - column.sum(-1, keepdim=True)).clamp(min=0)

        return edit

    return {f"blocks.{layer}.{PATTERN}": hold(layer) for layer in step.layers}


def steered(step):
    along = torch.linspace(-1, 1, step.dit.weights["vocab_embed.embedding"].shape[1])
    return {"blocks.1.hook_resid_pre": lambda x: x + 2.0 * along}


def clamped(step):
    def edit(x):
        x = x.clone()
        x[..., [2, 5]] = 0.5
        return x

    return {"blocks.1.hook_resid_pre": edit}


def extra_token(step):
    """The first token sees only itself, and its value is 0."""

    def alone(scores):
        scores = scores.clone()
        scores[:, :, 0, 1:] = -torch.inf
        return scores

    def empty(value):
        value = value.clone()
        value[:, 0] = 0
        return value

    edits = {f"blocks.{layer}.{SCORES}": alone for layer in step.layers}
    return edits | {f"blocks.{layer}.attn.hook_v": empty for layer in step.layers}


def unchanged(step):
    return {}


def direction(model):
    return torch.linspace(-1, 1, model.cfg.d_model)


THIRD = (torch.arange(9) == 2).view(1, 1, 1, 1, 9)  # [batch, step, layer, head, pos]

CASES: dict[str, tuple[Any, Any]] = {
    "MaskSinks": (lambda model: MaskSinks(top_k=1), masked_sinks),
    "MaskSinks same step": (lambda model: MaskSinks(top_k=1, same_step=True), masked_sinks_of_the_step),
    "KeepKeys": (lambda model: KeepKeys(top_k=2, window=1), kept_keys),
    "HideKeys": (lambda model: HideKeys(positions=[1, -2]), hidden_keys),
    "WindowAttention": (lambda model: WindowAttention(width=2), window),
    "AblateHeads": (lambda model: AblateHeads(layers=[1], heads=[0]), zeroed_head),
    "AblateHeads mean": (lambda model: AblateHeads(layers=[1], heads=[0], by="mean"), mean_of_head),
    "AblateHeads where": (lambda model: AblateHeads(layers=[0], where="masked"), undecided_heads),
    "AblateMLPs": (lambda model: AblateMLPs(layers=[0]), zeroed_mlp),
    "AblateValues": (lambda model: AblateValues(where=THIRD), mean_values),
    "AblateValues zero": (lambda model: AblateValues(where=THIRD, by="zero", layers=[1]), zeroed_values),
    "AblateSinkAttention": (lambda model: AblateSinkAttention(top_k=1), removed_attention),
    "FreezePattern": (lambda model: FreezePattern(at=1), frozen),
    "HoldSinks": (lambda model: HoldSinks(at=1), held),
    "Steer": (lambda model: Steer(direction(model), 2.0, layers=[1]), steered),
    "ClampStream": (lambda model: ClampStream(1, dims=[2, 5], at=0.5), clamped),
    "SinkToken": (lambda model: SinkToken(token=3, value="zero"), extra_token),
    "ForceTokens": (lambda model: ForceTokens(tokens={-1: 11}, steps=[2, 3]), unchanged),
    "Suffix": (lambda model: Suffix(text=[17, 18]), unchanged),
}


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_step_of_a_changed_run_equals_a_plain_pass_with_the_change(network, name, case):
    (model, dit), (made, oracle) = network, CASES[case]
    seen: list[Tensor] = []
    keep = ("denoise.hook_logits", lambda value, hook: seen.append(value.clone()))
    run = generate(model, name, hooks=[made(model), keep])
    assert run.steps_run > 2
    before, first, changed = None, None, 0.0
    for step in range(run.steps_run):
        ids, time = run.canvas[:, step], 0.0 if run.time is None else run.time[:, step]
        edits = oracle(Step(dit, ids, time, step, before, first, model.mask_token_id))
        passed = dit(ids, time, edits)
        size = float(passed.logits.abs().max())
        torch.testing.assert_close(seen[step], passed.logits, atol=3e-5 * size, rtol=0)
        recorded = torch.from_numpy(run.sinks["score"].to_numpy()[:, step])
        for layer in range(dit.layers):
            torch.testing.assert_close(recorded[:, layer], column_sums(passed.values, layer), atol=1e-3, rtol=1e-3)
        changed = max(changed, float((dit(ids, time).logits - passed.logits).abs().max()) / size)
        before, first = passed.values, passed.values if step == 1 else first
    assert changed > 1e-4 or oracle is unchanged
    if case == "ForceTokens":
        assert (run.canvas[:, [2, 3], -1] == 11).all()
    if case == "Suffix":
        assert (run.canvas[:, :, -2:] == torch.tensor([17, 18])).all()


@torch.no_grad()
def test_patched_values_are_in_the_plain_pass(network, name):
    model, dit = network
    base, point = generate(model, name), "blocks.1.attn.hook_z"
    kept, seen = Activations(names=point), []
    generate(model, name, prompts=[[40, 9, 13], [41, 2, 4]], replay=base, hooks=kept)
    patch = PatchHooks(source=kept.caches, names=point, heads=[0], positions=[2, -1])
    hooks = [patch, ("denoise.hook_logits", lambda value, hook: seen.append(value.clone()))]
    run = generate(model, name, replay=base, hooks=hooks)
    for step in range(run.steps_run):
        other = run.canvas[:, step].clone()
        other[:, 0] = torch.tensor([40, 41])
        time = 0.0 if run.time is None else run.time[:, step]
        new = dit(other, time).values[point]

        def patched(value, new=new):
            value = value.clone()
            value[:, [2, -1], 0] = new[:, [2, -1], 0]
            return value

        passed = dit(run.canvas[:, step], time, {point: patched}).logits
        torch.testing.assert_close(seen[step], passed, atol=3e-5 * float(passed.abs().max()), rtol=0)


@torch.no_grad()
def test_places_found_by_a_rule_are_hidden(network, name):
    """The strongest key of one head of the step before, hidden from another head."""
    model, dit = network
    where = Where(top_k=1, of=(1, 0))
    run = generate(model, name, hooks=[MaskSinks(where=where, top_k=None, layers=[0], heads=[1])])
    before = None
    for step in range(run.steps_run):
        edits, ids = {}, run.canvas[:, step]
        if before is not None:
            key = column_sums(before, 1)[:, 0].argmax(-1)

            def hide(scores, key=key):
                scores = scores.clone()
                for row, one in enumerate(key.tolist()):
                    scores[row, 1, :, one] = -torch.inf
                return scores

            edits = {f"blocks.0.{SCORES}": hide}
        before = dit(ids, 0.0 if run.time is None else run.time[:, step], edits).values
        recorded = torch.from_numpy(run.sinks["score"].to_numpy()[:, step, 0])
        torch.testing.assert_close(recorded, column_sums(before, 0), atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_resampled_and_mean_outputs_come_from_a_reference(network, name):
    model, dit = network
    reference = head_outputs(model, torch.tensor([[3, 1, 2]]), seed=2, **{"gen_length": 6} | SETTINGS[name])
    run = generate(model, name, prompts=[[3, 1, 2]], seed=2)
    times = [0.0 if run.time is None else run.time[:, step] for step in range(run.steps_run)]
    passes = [dit(run.canvas[:, step], time).values for step, time in enumerate(times)]
    mean = torch.stack([values["blocks.1.attn.hook_z"].mean((0, 1)) for values in passes]).mean(0)
    torch.testing.assert_close(reference.mean[1], mean, atol=1e-4, rtol=1e-4)
    seen: list[Tensor] = []
    keep = ("blocks.1.attn.hook_z", lambda value, hook: seen.append(value[:, :, 0].clone()))
    generate(model, name, hooks=[AblateHeads(layers=[1], heads=[0], by="resample", reference=reference), keep])
    drawn = reference.pool[1][:, 0]
    assert all(float((value[..., None, :] - drawn).abs().amax(-1).amin(-1).max()) < 1e-5 for value in seen)


@pytest.mark.parametrize("masked", ["mdlm", "sedd", "gidd"])
def test_masked_again_positions_are_masks(conformance, masked):
    model, _ = _loaded(conformance / masked)
    run = generate(model, masked, hooks=[Remask(positions=[-1, -2], steps=[3])])
    assert (run.canvas[:, 3, -2:] == model.mask_token_id).all()


# Surfaces


def test_a_sweep_of_copies_equals_separate_runs(network, name):
    model, _ = network
    interventions = {"heads": AblateHeads(layers=[1], heads=[0]), "sinks": MaskSinks(top_k=1)}
    settings = {"gen_length": 6, "seed": 1} | SETTINGS[name]
    found = sweep(model, PROMPTS, interventions, replay=True, progress=False, **settings)["kl"]
    assert float(found.sel(intervention="heads").max()) > 1e-4
    for key, one in interventions.items():
        alone = sweep(model, PROMPTS, {key: one}, replay=True, progress=False, **settings)["kl"]
        np.testing.assert_allclose(found.sel(intervention=key), alone.sel(intervention=key), atol=1e-4)


def test_an_effect_under_replay_is_the_divergence_of_plain_passes(network, name):
    model, dit = network
    found = effect(model, PROMPTS, AblateHeads(layers=[1], heads=[0]), **{"gen_length": 6, "seed": 1} | SETTINGS[name])
    run, kl = generate(model, name), found.under_replay["kl"].to_numpy()
    with torch.no_grad():
        for step in (0, run.steps_run - 1):
            time = 0.0 if run.time is None else run.time[:, step]
            edits = zeroed_head(None)
            base, changed = (dit(run.canvas[:, step], time, one).logits for one in (None, edits))
            p, q = base.double().log_softmax(-1), changed.double().log_softmax(-1)
            divergence = (p.exp() * (p - q)).sum(-1)
            for row in range(2):
                undecided = run.undecided[row, step]
                if bool(undecided.any()):
                    assert kl[row, step] == pytest.approx(float(divergence[row][undecided].mean()), rel=1e-2)


def test_features_are_collected_read_and_spliced_at_the_noise_level_of_their_step(network, name, tmp_path):
    (model, dit), point = network, "blocks.1.hook_resid_post"
    settings = {"gen_length": 6, "seed": 1} | SETTINGS[name]
    store = collect(model, PROMPTS, point, tmp_path / "store", batch=2, **settings)
    run, sae = generate(model, name), Perfect()
    with torch.no_grad():
        times = [0.0 if run.time is None else run.time[:, step] for step in range(run.steps_run)]
        passes = [dit(run.canvas[:, step], time).values[point] for step, time in enumerate(times)]
    row, step, pos = (torch.from_numpy(store.column(one)).long() for one in ("prompt", "step", "pos"))
    expected = torch.stack(passes)[step, row, pos]
    torch.testing.assert_close(store.read(0, len(store)), expected, atol=1e-3, rtol=1e-3)
    assert len(store) == int(run.active.sum()) * 9
    read = torch.from_numpy(read_features(run, sae, point, steps=[1]).to_numpy())[:, 0]
    torch.testing.assert_close(read, sae.encode(passes[1]), atol=1e-3, rtol=1e-3)
    half = SpliceSAE(sae, point, features=list(range(model.cfg.d_model)))  # leaves the negative parts
    seen: list[Tensor] = []
    keep = ("denoise.hook_logits", lambda value, hook: seen.append(value.clone()))
    spliced = generate(model, name, hooks=[half, keep])
    with torch.no_grad():
        for number, found in enumerate(seen):
            time = 0.0 if spliced.time is None else spliced.time[:, number]
            passed = dit(spliced.canvas[:, number], time, {point: lambda x: -(-x).relu()}).logits
            torch.testing.assert_close(found, passed, atol=3e-5 * float(passed.abs().max()), rtol=0)


@torch.no_grad()
def test_the_confidence_is_the_models_probability_of_what_was_drawn(network, name):
    (model, dit), kept = network, {}
    points = ("denoise.hook_confidence", "denoise.hook_candidates")
    hooks = [(point, lambda value, hook: kept.update({(hook.name, hook.step): value.clone()})) for point in points]
    run = generate(model, name, hooks=hooks)
    for step in range(run.steps_run):
        shown, drawn = (kept[point, step] for point in points)
        time = 0.0 if run.time is None else run.time[:, step]
        logits = dit(run.canvas[:, step], time).logits
        if model.mask_token_id is not None:
            logits[..., model.mask_token_id] = -torch.inf
        expected = logits.softmax(-1).gather(-1, drawn[..., None])[..., 0]
        there = shown > -torch.inf
        assert bool(there.any())
        torch.testing.assert_close(shown[there].float(), expected[there], atol=1e-4, rtol=1e-3)


def test_the_page_and_the_track_show_the_run(network, name, tmp_path):
    model, _ = network
    run = generate(model, name)
    page = sinklens.views.report(run, tmp_path / "page.html")
    assert page is None or (tmp_path / "page.html").stat().st_size > 1000
    path = tmp_path / "track.zarr"
    run.sinks.save(path)
    again = sinklens.SinkTrack.open(path)
    np.testing.assert_array_equal(again["score"], run.sinks["score"])


def test_fixed_noise_takes_uniform_numbers(network, name):
    model, _ = network
    kept: list[Tensor] = []
    keep = ("denoise.hook_uniform", lambda value, hook: kept.append(value.clone()))
    seeded = {"sampler": "mdlm", "noise_removal": False} if name == "mdlm" else {}
    seeded |= {"start_canvas": [list(range(20, 26)), list(range(30, 36))]} if name == "duo" else {}
    run = generate(model, name, hooks=[keep], **seeded)
    noise = FixedNoise(uniform=torch.stack(kept))
    again = generate(model, name, hooks=[noise], seed=77, **seeded)
    assert torch.equal(again.canvas, run.canvas)
    if name == "gidd":
        flat = FixedNoise(uniform=torch.stack(kept)[..., 0])
        assert torch.equal(generate(model, name, hooks=[flat], seed=77).canvas, run.canvas)
    assert not torch.equal(generate(model, name, seed=77, **seeded).canvas, run.canvas)
    with pytest.raises(SettingError, match=f"takes uniform= for {model.family} models; got sampled="):
        generate(model, name, hooks=[FixedNoise(sampled=torch.zeros(9, 2, 6, dtype=torch.long))])


REFUSED = [
    ("all", {"cfg_scale": 1.0}, "cfg_scale is not a setting of the .* sampler"),
    ("all", {"hooks": [Accept(positions=[-1])]}, "Accept changes which tokens a step accepts on a canvas of random"),
    ("all", {"hooks": [Renoise(positions=[-1])]}, "Renoise changes which tokens a step accepts on a canvas of random"),
    ("timed", {"cache": PrefixCache()}, "PrefixCache reuses keys of earlier steps, and those of .* change with the"),
    ("timed", {"sampler": "autoregressive"}, "the autoregressive sampler fits causal or per-pass attention"),
    ("all", {"use_cache": True}, "use_cache is not a setting of the .* sampler"),
    ("duo", {"hooks": [Remask(positions=[-1])]}, "duo models have no mask token; use ForceTokens"),
]


@pytest.mark.parametrize(("which", "given", "message"), REFUSED)
def test_what_has_no_meaning_is_refused_by_name(network, name, which, given, message):
    model, _ = network
    if which not in ("all", name) and not (which == "timed" and model.config.time_conditioning):
        pytest.skip(f"this is for {which} networks")
    with pytest.raises(SettingError, match=message):
        generate(model, name, **given)
