"""Splicing changes exactly the chosen features at the chosen places, as the same edit does in plain torch."""

import pytest
import torch
from planted_saes import POINT, Perfect, random_sae
from watching import PADDED, SHORT, again, same, short, watch

import sinklens
from sinklens.errors import HookNameError, SettingError
from sinklens.features import SpliceSAE

KINDS = [("llama", False), ("qwen3", False), ("dream", False), ("llama", True), ("sdar", False)]
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
            old = value[row, column].flatten()
            before = splice.sae.encode(old[None])
            after = before.clone()
            for feature in splice.features or ():
                after[0, feature] = splice.features[feature] if isinstance(splice.features, dict) else 0.0
            new = splice.sae.decode(after)[0]
            new = new + old - splice.sae.decode(before)[0] if splice.error else new
            value[row, column] = new.view(value.shape[2:])
        return value

    return edit


def check(watched, splice, step, chosen=None, tolerance=2e-4):
    """The logits of a step are those of a pass in plain torch with the same edit; returns the number of places."""
    chosen = in_scope(watched.run, splice, step) if chosen is None else chosen
    plain = again(watched.run, step, {splice.point: edited(splice, chosen)}).logits
    for row, real in enumerate(watched.run.real):
        got = watched.values[step]["denoise.hook_logits"][row, real]
        torch.testing.assert_close(got, plain[row, real], atol=tolerance, rtol=tolerance)
    return int(chosen.sum())


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
@pytest.mark.parametrize("point", [POINT, "blocks.0.attn.hook_z"])
def test_a_perfect_autoencoder_changes_nothing(model, point):
    base, spliced = (
        watch(model, PADDED, hooks, ["hook_logits"], record_sinks=True) for hooks in ([], [SpliceSAE(Perfect(), point)])
    )
    assert same(spliced, base)
    assert spliced.run.sinks.data["score"].equals(base.run.sinks.data["score"])


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("what", [{}, {"features": [3, 17], "error": True}, {"features": {9: 2.5, 3: 0.0}}], ids=str)
def test_a_splice_equals_the_same_edit_in_plain_torch(worded, where, what):
    splice = SpliceSAE(random_sae(d_sae=20), POINT, **what, **where)
    watched = watch(worded(), PADDED, [splice], ["hook_logits"])
    assert sum(check(watched, splice, step) for step in range(watched.run.steps_run)) > 0


def test_heads_are_flattened(worded):
    splice = SpliceSAE(random_sae(), "blocks.1.attn.hook_z", features=[2, 11, 30], error=True)
    watched = watch(worded(), PADDED, [splice], ["hook_logits"])
    for step in (1, watched.run.steps_run - 1):
        check(watched, splice, step, tolerance=1e-3)


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


class Narrow(Perfect):
    """Decodes to five numbers."""

    def decode(self, features):
        return features[:, :5]


BUILT = [
    ({"sae": torch.nn.Identity()}, "sae must have the methods encode and decode; Identity lacks one"),
    ({"scope": "answer"}, "scope must be one or several of 'prompt', .*'decided'; got 'answer'"),
    ({"scope": ()}, "scope must be one or several"),
    ({"features": []}, "features is empty, so SpliceSAE would change nothing"),
    ({"features": [-1]}, "features are numbers from 0; got -1"),
    ({"error": True}, "error=True without features= changes nothing"),
    ({"layers": [1]}, "SpliceSAE does not support layers="),
]
IN_A_RUN = [
    ({"point": "blocks.0.attn.hook_pattern"}, r"has the axes batch head query key; features need a vector"),
    ({"point": "blocks.1.hook_resid_pots"}, r"Nearest: blocks\.1\.hook_resid_post"),
    ({"features": [40]}, "feature 40 does not exist; the SAE has 40, 0 to 39"),
    ({"sae": Narrow()}, "the SAE returned activations of size 5, but the point has 24"),
]


@pytest.mark.parametrize(("change", "match"), BUILT + IN_A_RUN, ids=[match for _, match in BUILT + IN_A_RUN])
def test_a_splice_that_cannot_be_is_refused_at_once_or_in_the_run(worded, unchecked, change, match):
    given = {"sae": random_sae(), "point": POINT} | change
    with pytest.raises((SettingError, HookNameError), match=match):
        splice = SpliceSAE(**given)
        assert (change, match) in IN_A_RUN
        sinklens.generate(worded(), SHORT, hooks=splice, **short(worded(), {}))


def test_a_scope_of_masks_needs_a_run_of_a_model_with_masks(worded):
    splice, causal = SpliceSAE(random_sae(), POINT, scope="masked"), worded("llama", True)
    with pytest.raises(SettingError, match=r"scope='masked' selects nothing: .* has no mask token. Use 'decided'"):
        sinklens.generate(causal, SHORT, hooks=splice, **short(causal, {}))
    with pytest.raises(SettingError, match="SpliceSAE finds its places in a run, which a single pass is not"):
        splice.hooks_for(worded())


def test_a_splice_follows_where(worded):
    """An array of `where=` chooses places that differ by row and step."""
    base = watch(worded(), PADDED, [], ["hook_logits"]).run
    where = torch.rand(2, base.steps_run, 1, 1, base.real.shape[1], generator=torch.Generator().manual_seed(4)) < 0.4
    where &= base.real[:, None, None, None]
    splice = SpliceSAE(random_sae(), POINT, where=where, scope="masked")
    watched = watch(worded(), PADDED, [splice], ["hook_logits"])
    for step in range(watched.run.steps_run):
        check(watched, splice, step, where[:, step, 0, 0] & watched.run.undecided[:, step] & watched.run.real)
