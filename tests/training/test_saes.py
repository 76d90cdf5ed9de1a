"""A planted dictionary is found again; an interrupted training takes the same steps."""

import numpy as np
import pytest
import torch

from sinklens.errors import SettingError
from sinklens.features import ActivationStore, load_sae
from sinklens.features.store import array_of
from training.saes import SAERecipe, train

POINT = "blocks.1.hook_resid_post"


def planted(folder, prompts=40, each=200, d_in=16, size=24, scale=50.0):
    """A store whose activations are sums of two directions of a dictionary, and the dictionary."""
    drawn = np.random.default_rng(3)
    directions = drawn.normal(size=(size, d_in))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    store = ActivationStore.begin(folder, {"model": "planted", "points": [POINT], "prompts": prompts})
    for prompt in range(prompts):
        which = np.stack([drawn.choice(size, 2, replace=False) for _ in range(each)])
        x = (directions[which] * drawn.uniform(1, 2, (each, 2, 1))).sum(axis=1) * scale + 3 * scale
        zeros = np.zeros(each, dtype=np.int32)
        rows = {"step": zeros, "pos": zeros, "state": zeros, "token_id": zeros, "prompt": zeros + prompt}
        store.append({**rows, array_of(POINT): x}, prompt + 1)
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


def test_recipes_and_stores_that_do_not_work_are_refused(tmp_path, unchecked):
    store, _ = planted(tmp_path / "a.zarr", prompts=3, each=10)
    unfinished, _ = planted(tmp_path / "b.zarr", prompts=3, each=10)
    unfinished.commit(len(unfinished), prompts_done=2)
    for call, match in (
        (lambda: SAERecipe(d_sae=4, k=5), "k must be at most d_sae, the number of features; got 5 of 4"),
        (lambda: SAERecipe(d_sae=4, k=2, batch=1), "batch must be an integer of at least 2; got 1"),
        (
            lambda: SAERecipe(d_sae=4, k=2, held_out=1),
            "held_out must be .* of at least 0 and below 1; got 1",
        ),
        (
            lambda: train(store, SAERecipe(d_sae=4, k=2, batch=64, held_out=0.0)),
            "has 30 places to train on, fewer than",
        ),
        (lambda: train(unfinished, SAERecipe(d_sae=4, k=2)), "is not finished; repeat the collect call"),
    ):
        with pytest.raises(SettingError, match=match):
            call()
