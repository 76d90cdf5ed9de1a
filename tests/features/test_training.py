"""A planted dictionary is found again; an interrupted training takes the same steps; assessments are recomputed."""

import numpy as np
import pytest
import torch
from planted_saes import Perfect, random_sae
from watching import PADDED, entered

import sinklens
from sinklens.errors import SettingError
from sinklens.features import ActivationStore, SAERecipe, assess, load_sae, train
from sinklens.features.assessing import Mean

POINT = "blocks.1.hook_resid_post"


def planted(folder, prompts=40, each=200, d_in=16, size=24, scale=50.0):
    """A store whose activations are sums of two directions of a dictionary, and the dictionary."""
    drawn = np.random.default_rng(3)
    directions = drawn.normal(size=(size, d_in))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    about = {"model": "planted", "point": POINT, "prompts": prompts}
    store = ActivationStore.begin(folder, about, d_in)
    for prompt in range(prompts):
        which = np.stack([drawn.choice(size, 2, replace=False) for _ in range(each)])
        x = (directions[which] * drawn.uniform(1, 2, (each, 2, 1))).sum(axis=1) * scale + 3 * scale
        zeros = np.zeros(each, dtype=np.int32)
        rows = {"step": zeros, "pos": zeros, "state": zeros, "token_id": zeros, "prompt": zeros + prompt}
        store.append({**rows, "activation": x}, prompt + 1)
    return store, torch.from_numpy(directions).float()


@pytest.mark.extended
def test_a_planted_dictionary_is_found_again(tmp_path):
    store, directions = planted(tmp_path / "a.zarr")
    trained = train(store, SAERecipe(d_sae=64, k=2, steps=1200, batch=256, learning_rate=3e-3, dead_after=5000))
    likeness = torch.nn.functional.normalize(trained.sae.W_dec, dim=1) @ directions.T
    assert float((likeness.max(dim=0).values > 0.95).float().mean()) > 0.9
    assert trained.explained_variance > 0.9
    assert trained.explained_variance == pytest.approx(by_hand(store, trained.sae, 36 * 200), abs=1e-4)
    assert trained.unexplained[:20].mean() > 5 * trained.unexplained[-20:].mean()


def by_hand(store, sae, first):
    """Explained variance of the rows from `first`, with numpy."""
    x = store.read(first, len(store)).double()
    rebuilt = sae.decode(sae.encode(x.float())).double()
    return 1 - float(((x - rebuilt) ** 2).sum() / ((x - x.mean(0)) ** 2).sum())


def test_an_interrupted_training_takes_the_same_steps(tmp_path):
    store, _ = planted(tmp_path / "a.zarr", prompts=10, each=60)
    recipe = SAERecipe(d_sae=20, k=2, steps=30, batch=64, dead_after=300)
    complete = train(store, recipe, tmp_path / "complete")

    def stop(done, total):
        if done == 17:
            raise KeyboardInterrupt("stopped")

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        train(store, recipe, tmp_path / "out", save_every=5, report=stop)
    steps = []
    again = train(store, recipe, tmp_path / "out", save_every=5, report=lambda done, total: steps.append(done))
    assert steps == list(range(16, 31))
    np.testing.assert_allclose(again.unexplained, complete.unexplained, rtol=1e-4)
    torch.testing.assert_close(again.sae.W_dec, complete.sae.W_dec, atol=1e-5, rtol=1e-4)
    read = load_sae(tmp_path / "out")
    assert torch.equal(read.W_enc, again.sae.W_enc)
    assert (read.k, read.point, read.model) == (2, POINT, "planted")
    with pytest.raises(SettingError, match="training with another recipe or other activations"):
        train(store, SAERecipe(d_sae=20, k=3, steps=30, batch=64), tmp_path / "out")


def test_recipes_and_stores_that_do_not_work_are_refused(tmp_path):
    store, _ = planted(tmp_path / "a.zarr", prompts=3, each=10)
    with pytest.raises(SettingError, match="k must be at most d_sae, the number of features; got 5 of 4"):
        SAERecipe(d_sae=4, k=5)
    with pytest.raises(SettingError, match="batch must be an integer of at least 2; got 1"):
        SAERecipe(d_sae=4, k=2, batch=1)
    with pytest.raises(SettingError, match=r"held_out must be a number in \[0, 1\); got 1"):
        SAERecipe(d_sae=4, k=2, held_out=1)
    with pytest.raises(SettingError, match="has 30 places to train on, fewer than a batch of 64"):
        train(store, SAERecipe(d_sae=4, k=2, batch=64, held_out=0.0))
    store.commit(len(store), prompts_done=2)
    with pytest.raises(SettingError, match="is not finished; repeat the collect call"):
        train(ActivationStore(store.path), SAERecipe(d_sae=4, k=2))


def losses(run, sae, masked):
    """The mean loss of a run with `sae` spliced in at masked, or at all other, positions; and the activations there."""
    total, kept = [], []
    for step in range(run.steps_run):
        ids, real = entered(run, step)
        where = real & (run.undecided[:, step] if masked else ~run.undecided[:, step])

        def edit(value, hook, where=where):
            kept.append(value[where].clone())
            value[where] = sae.decode(sae.encode(value[where]))
            return value

        logits = run.model.run_with_hooks(ids, attention_mask=real, fwd_hooks=[(POINT, edit)])
        for row, column in (run.undecided[:, step] & real).nonzero().tolist():
            total.append(-float(logits[row, column].log_softmax(-1)[run.tokens[row, column]]))
    return np.mean(total), torch.cat(kept)


@pytest.mark.parametrize("masked", [True, False])
def test_an_assessment_equals_one_by_hand(worded, masked):
    model, sae = worded(), random_sae()
    scope = "masked" if masked else ("prompt", "committed")
    found = assess(model, sae, POINT, PADDED, [scope], gen_length=8).isel(scope=0)
    run = sinklens.generate(model, PADDED, gen_length=8, record_sinks=False, progress=False)
    base, x = losses(run, Perfect(), masked)
    spliced, mean = losses(run, sae, masked)[0], losses(run, Mean(x.mean(0)), masked)[0]
    features = sae.encode(x)
    rebuilt = ((x - sae.decode(features)) ** 2).sum() / ((x - x.mean(0)) ** 2).sum()
    expected = {
        "explained_variance": 1 - rebuilt, "dead": (~(features > 0).any(0)).float().mean(), "places": len(x),
        "firing": (features > 0).float().sum(1).mean(), "loss": base, "loss_spliced": spliced, "loss_mean": mean,
        "recovered": (mean - spliced) / (mean - base),
    }  # fmt: skip
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-4), name
    assert abs(spliced - base) > 0.01


def test_a_perfect_autoencoder_recovers_all_of_the_loss(worded):
    found = assess(worded(), Perfect(), POINT, PADDED, gen_length=8)
    np.testing.assert_allclose(found["explained_variance"], 1.0, atol=1e-6)
    np.testing.assert_allclose(found["recovered"], 1.0, atol=1e-5)
    assert found["scope"].values.tolist() == ["masked", "decided"]


def test_an_autoregressive_model_is_not_assessed(worded):
    with pytest.raises(SettingError, match="assess compares losses at undecided positions"):
        assess(worded("llama", True), Perfect(), POINT, PADDED)
