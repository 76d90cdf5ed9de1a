"""Splicing changes exactly the chosen features at the chosen places, as the same edit does in plain torch."""

import numpy as np
import pytest
import torch
from planted_saes import Perfect, random_sae, random_transcoder
from watching import PADDED, SHORT, again, logits_of, short, unwatched, watch

import sinklens
from sinklens.errors import HookNameError, SettingError
from sinklens.features import RandomError, SpliceSAE, assess, assess_by_share
from sinklens.interventions import Activations, MaskedLogits

KINDS = [("llama", False), ("qwen3", False), ("dream", False), ("llama", True), ("sdar", False)]
POINT = "blocks.1.hook_resid_post"
PLACES = [
    {}, {"scope": "masked"}, {"scope": "committed", "steps": [1, 3]}, {"scope": ("prompt", "committed"), "steps": [2]},
    {"positions": [0, 5]}, {"scope": "prompt", "positions": [1, -1], "steps": [0, -1]},
]  # fmt: skip


def in_scope(run, splice, step):
    """The chosen places [batch, pos] of a step, one by one."""
    scope = [splice.scope] if isinstance(splice.scope, str) else splice.scope
    found = torch.zeros_like(run.real)
    for row, column in (run.real & (run.canvas[:, step] >= -1)).nonzero().tolist():
        start = int((~run.real[row]).sum())
        masked = bool(run.undecided[row, step, column])
        state = "prompt" if column < run.prompt_length else "masked" if masked else "committed"
        numbers = [column - start, column - run.real.shape[1]]
        at = splice.positions is None or any(number in splice.positions for number in numbers)
        when = splice.steps is None or step in splice.steps or step - run.settings.steps in splice.steps
        found[row, column] = at and when and ("all" in scope or state in scope)
    return found


def edited(splice, where):
    """The splice as an edit for plain torch, place by place."""

    def edit(value):
        value = value.clone()
        for row, column in where.nonzero().tolist():
            x = value[row, column].flatten()
            before = splice.sae.encode(x[None])[0]
            after = before.clone()
            for feature in splice.features or ():
                after[feature] = splice.features[feature] if isinstance(splice.features, dict) else 0.0
            new = splice.sae.decode(after[None])[0]
            new = new + x - splice.sae.decode(before[None])[0] if splice.error else new
            value[row, column] = new.view(value.shape[2:])
        return value

    return edit


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
@pytest.mark.parametrize("point", [POINT, "blocks.0.attn.hook_z"])
def test_a_perfect_autoencoder_changes_nothing(worded, architecture, causal, point):
    model = worded(architecture, causal)
    base, spliced = (
        watch(model, PADDED, hooks, ["hook_logits"], record_sinks=True) for hooks in ([], [SpliceSAE(Perfect(), point)])
    )
    assert torch.equal(logits_of(spliced), logits_of(base))
    assert torch.equal(spliced.run.canvas, base.run.canvas)
    assert spliced.run.sinks.data["score"].equals(base.run.sinks.data["score"])
    assert unwatched(model)


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("what", [{}, {"features": [3, 17], "error": True}, {"features": {9: 2.5, 3: 0.0}}], ids=str)
def test_a_splice_equals_the_same_edit_in_plain_torch(worded, where, what):
    splice = SpliceSAE(random_sae(d_sae=20), POINT, **what, **where)
    watched = watch(worded(), PADDED, [splice], ["hook_logits"])
    changed = 0
    for step in range(watched.run.steps_run):
        chosen = in_scope(watched.run, splice, step)
        plain = again(watched.run, step, {POINT: edited(splice, chosen)}).logits
        for row, real in enumerate(watched.run.real):
            got = watched.values[step]["denoise.hook_logits"][row, real]
            torch.testing.assert_close(got, plain[row, real], atol=2e-4, rtol=1e-4)
        changed += int(chosen.sum())
    assert changed > 0


def test_heads_are_flattened(worded):
    splice = SpliceSAE(random_sae(), "blocks.1.attn.hook_z", features=[2, 11, 30], error=True)
    watched = watch(worded(), PADDED, [splice], ["hook_logits"])
    where = in_scope(watched.run, splice, 1)
    plain = again(watched.run, 1, {"blocks.1.attn.hook_z": edited(splice, where)}).logits
    torch.testing.assert_close(watched.values[1]["denoise.hook_logits"][1], plain[1], atol=2e-4, rtol=1e-4)


def test_a_single_pass_is_spliced_at_positions(worded):
    ids, splice = torch.randint(0, 50, (2, 7)), SpliceSAE(random_sae(), POINT, positions=[2])
    _, cache = worded().run_with_cache(ids)
    seen = {}
    worded().run_with_hooks(
        ids, fwd_hooks=[*splice.hooks_for(worded()), (POINT, lambda value, hook: seen.update(post=value.clone()))]
    )
    expected = cache[POINT].clone()
    expected[:, 2] = splice.sae.decode(splice.sae.encode(expected[:, 2]))
    torch.testing.assert_close(seen["post"], expected)


READS, WRITES = "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"


def transcribed(splice, x, where):
    """A transcoder's splice as an edit for plain torch, place by place; `x` is what it reads."""

    def edit(value):
        value = value.clone()
        for row, column in where.nonzero().tolist():
            read = x[row, column][None]
            before = splice.sae.encode(read)
            after = before.clone()
            for feature in splice.features or ():
                after[0, feature] = 0.0
            new = splice.sae.decode(after, read)[0]
            if splice.error:
                new = value[row, column] + new - splice.sae.decode(before, read)[0]
            value[row, column] = new
        return value

    return edit


@pytest.mark.parametrize("what", [{}, {"features": [3, 11], "error": True}, {"scope": "masked"}], ids=str)
def test_a_transcoder_writes_at_one_point_what_it_read_at_another(worded, what):
    splice = SpliceSAE(random_transcoder(), READS, to=WRITES, **what)
    watched = watch(worded(), PADDED, [splice], ["hook_logits"])
    for step in range(watched.run.steps_run):
        chosen = in_scope(watched.run, splice, step)
        x = again(watched.run, step, {}).values[READS]
        plain = again(watched.run, step, {WRITES: transcribed(splice, x, chosen)}).logits
        for row, real in enumerate(watched.run.real):
            got = watched.values[step]["denoise.hook_logits"][row, real]
            torch.testing.assert_close(got, plain[row, real], atol=5e-4, rtol=1e-3)


class Mlp:
    """A transcoder that is the MLP of layer 1 itself: features are what it reads."""

    def __init__(self, model):
        layer = model.tree.hf.model.layers[1]
        self.weight, self.mlp = layer.post_attention_layernorm.weight.detach(), layer.mlp

    def encode(self, x):
        return x

    @torch.no_grad()
    def decode(self, features, x=None):
        assert torch.equal(features, x)
        return self.mlp(x * self.weight)  # the point lies before the norm's weight


def test_a_planted_transcoder_that_is_the_mlp_changes_nothing_and_recovers_the_loss(worded):
    model = worded()
    base, spliced = (
        watch(model, PADDED, hooks, ["hook_logits"]) for hooks in ([], [SpliceSAE(Mlp(model), READS, to=WRITES)])
    )
    torch.testing.assert_close(logits_of(spliced), logits_of(base), atol=1e-4, rtol=1e-4)
    found = assess(model, Mlp(model), READS, PADDED, ("masked",), to=WRITES, gen_length=8, steps=4)
    assert float(found["explained_variance"][0]) == pytest.approx(1.0, abs=1e-5)
    assert float(found["recovered"][0]) == pytest.approx(1.0, abs=1e-3)
    by_share = assess_by_share(model, Mlp(model), READS, PADDED, to=WRITES, buckets=2, gen_length=8, steps=4)
    np.testing.assert_allclose(by_share["recovered"], 1.0, atol=1e-3)


def test_a_transcoder_is_assessed_where_it_writes(worded):
    model, sae = worded(), random_transcoder()
    found = assess(model, sae, READS, PADDED, ("all",), to=WRITES, gen_length=8, steps=4)
    kept = Activations(names=[READS, WRITES])
    run = sinklens.generate(model, PADDED, hooks=kept, gen_length=8, steps=4, record_sinks=False)
    x, y = (torch.cat([kept.caches[step][name][run.real] for step in range(4)]) for name in (READS, WRITES))
    missed, spread = (y - sae.decode(sae.encode(x), x)).pow(2).sum(), (y - y.mean(dim=0)).pow(2).sum()
    assert float(found["explained_variance"][0]) == pytest.approx(float(1 - missed / spread), rel=1e-3)
    mean = sinklens.generate(
        model, PADDED, gen_length=8, steps=4, record_sinks=False, replay=run,
        hooks=[SpliceSAE(sae, READS, to=WRITES), logits := MaskedLogits()],
    )  # fmt: skip
    losses = [
        torch.nn.functional.cross_entropy(logits.kept[step][number], run.tokens[row, column])
        for step in range(mean.steps_run)
        for number, (row, column) in enumerate((run.undecided[:, step] & run.real).nonzero().tolist())
    ]
    assert float(found["loss_spliced"][0]) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


def test_a_transcoder_is_refused_where_it_cannot_write(worded):
    def run(splice):
        sinklens.generate(worded(), SHORT, hooks=splice, **short(worded(), {}))

    with pytest.raises(SettingError, match=r"hook_resid_pre is computed before blocks\.1\.ln2\.hook_normalized"):
        run(SpliceSAE(random_transcoder(), READS, to="blocks.1.hook_resid_pre"))
    with pytest.raises(SettingError, match="a transcoder writes to another point than it reads: pass to="):
        run(SpliceSAE(random_transcoder(), READS))
    with pytest.raises(SettingError, match="an autoencoder writes where it reads: leave out to="):
        run(SpliceSAE(random_sae(), READS, to=WRITES))
    with pytest.raises(SettingError, match="activations of size 9, but the point has 24"):
        run(SpliceSAE(random_transcoder(d_out=9), READS, to=WRITES))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("change", "match"), [
    ({"sae": torch.nn.Identity()}, "sae must have the methods encode and decode; Identity lacks one"),
    ({"scope": "answer"}, "scope must be one or several of 'prompt', .*'decided'; got 'answer'"),
    ({"scope": ()}, "scope must be one or several"),
    ({"features": []}, "features is empty, so SpliceSAE would change nothing"),
    ({"features": [-1]}, "features are numbers from 0; got -1"),
    ({"error": True}, "error=True without features= changes nothing"),
    ({"layers": [1]}, "SpliceSAE does not support layers="),
])  # fmt: skip
def test_a_splice_that_cannot_be_is_refused(change, match):
    with pytest.raises(SettingError, match=match):
        SpliceSAE(**{"sae": random_sae(), "point": POINT} | change)


def test_what_the_model_or_the_sae_lacks_is_refused_in_the_run(worded):
    def run(splice, causal=False):
        sinklens.generate(worded("llama", causal), SHORT, hooks=splice, **short(worded("llama", causal), {}))

    with pytest.raises(SettingError, match=r"hook_pattern has the axes batch head query key; features need a vector"):
        run(SpliceSAE(random_sae(), "blocks.0.attn.hook_pattern"))
    with pytest.raises(HookNameError, match=r"Nearest: blocks\.1\.hook_resid_post"):
        run(SpliceSAE(random_sae(), "blocks.1.hook_resid_pots"))
    with pytest.raises(SettingError, match="feature 40 does not exist; the SAE has 40, 0 to 39"):
        run(SpliceSAE(random_sae(), POINT, features=[40]))
    with pytest.raises(SettingError, match=r"scope='masked' selects nothing: .* has no mask token. Use 'decided'"):
        run(SpliceSAE(random_sae(), POINT, scope="masked"), causal=True)
    with pytest.raises(SettingError, match="scope='masked' needs a run, which knows the state"):
        SpliceSAE(random_sae(), POINT, scope="masked").hooks_for(worded())

    class Narrow(Perfect):
        def decode(self, features):
            return features[:, :5]

    with pytest.raises(SettingError, match="the SAE returned activations of size 5, but the point has 24"):
        run(SpliceSAE(Narrow(), POINT))


def test_a_splice_follows_where(worded):
    """An array of `where=` chooses places that differ by row and step."""
    base = watch(worded(), PADDED, [], ["hook_logits"]).run
    where = torch.rand(2, base.steps_run, 1, 1, base.real.shape[1], generator=torch.Generator().manual_seed(4)) < 0.4
    where &= base.real[:, None, None, None]
    splice = SpliceSAE(random_sae(), POINT, where=where, scope="masked")
    watched = watch(worded(), PADDED, [splice], ["hook_logits"])
    for step in range(watched.run.steps_run):
        chosen = where[:, step, 0, 0] & watched.run.undecided[:, step] & watched.run.real
        plain = again(watched.run, step, {POINT: edited(splice, chosen)}).logits
        got = watched.values[step]["denoise.hook_logits"][1]
        torch.testing.assert_close(got, plain[1], atol=2e-4, rtol=1e-4)


def test_the_error_is_as_long_as_the_sae_s_at_every_place():
    sae, x = random_sae(16), torch.randn(5, 16)
    made = RandomError(sae)
    new = made.decode(made.encode(x))
    for place in range(5):
        wanted = float((x[place] - sae.decode(sae.encode(x[place : place + 1]))[0]).pow(2).sum()) ** 0.5
        assert float((new[place] - x[place]).pow(2).sum()) ** 0.5 == pytest.approx(wanted, rel=1e-4)


def test_directions_are_random_and_repeat_with_the_seed():
    sae, x = random_sae(400), torch.randn(30, 400)
    first, again, other = (RandomError(sae, seed).encode(x) - x for seed in (0, 0, 1))
    torch.testing.assert_close(first, again)
    unit = torch.nn.functional.normalize(first, dim=-1)
    own = torch.nn.functional.normalize(sae.decode(sae.encode(x)) - x, dim=-1)
    assert (unit * torch.nn.functional.normalize(other, dim=-1)).sum(dim=-1).abs().max() < 0.3
    assert (unit * own).sum(dim=-1).abs().max() < 0.3
    assert (unit @ unit.T).fill_diagonal_(0).abs().max() < 0.3


def test_a_perfect_sae_leaves_no_error():
    x = torch.randn(4, 8)
    torch.testing.assert_close(RandomError(Perfect()).encode(x), x)
