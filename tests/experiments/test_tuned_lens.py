"""The tuned lens: its maps by hand, in buckets of the masked share; trained, it beats the logit lens."""

import numpy as np
import pytest
import torch

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.experiments import LogitLens, TunedLens, lens_fits, logit_lens, train_tuned_lens
from sinklens.tasks.word_problems import held_out, training

UNEQUAL = ["w5 w6 w7 w8", "w9 w10"]


def random_lens(buckets=3, layers=3, d_model=24):
    drawn = torch.Generator().manual_seed(2)
    maps = torch.randn(buckets, layers, d_model, d_model, generator=drawn) / 5
    return TunedLens("random", maps, torch.randn(buckets, layers, d_model, generator=drawn))


def prediction(model, stream):
    """Probabilities of one stream [d_model], with explicit final norm and unembedding."""
    norm = model.tree.hf.model.norm
    normed = stream.double() / (stream.double().pow(2).mean() + norm.variance_epsilon).sqrt() * norm.weight.double()
    return (model.tree.W_U.double().T @ normed).softmax(0).detach()


def undecided_streams(run, row, step):
    """Streams [layer, place, d_model] that predict a row's undecided positions, from TransformerLens's cache."""
    model, start = run.model, int((~run.real[row]).sum())
    cache = model.run_with_cache(run.canvas[row : row + 1, step, start:])[1]
    places = run.undecided[row, step, start:].nonzero()[:, 0]
    sources = (places - int(model.family_record.shift)).clamp(min=0)
    layers = range(model.cfg.n_layers)
    return torch.stack([cache[f"blocks.{layer}.hook_resid_post"][0, sources].detach() for layer in layers]), places


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("architecture", ["llama", "dream"])
def test_streams_are_moved_by_the_map_of_their_layer_and_masked_share(worded, architecture):
    model, lens, row = worded(architecture), random_lens(), 1
    collected = LogitLens(layers=[0, 1], top_k=61)
    run = sinklens.generate(model, UNEQUAL, gen_length=6, steps=6, record_sinks=False, hooks=collected)
    data = logit_lens(model, run, row=row, layers=[0, 1], top_k=61, lens=lens)
    used = set()
    for step in range(6):
        streams, places = undecided_streams(run, row, step)
        bucket = {6: 2, 5: 2, 4: 1, 3: 1, 2: 0, 1: 0}[len(places)]  # undecided positions of the answer's six
        used.add(bucket)
        for layer in (0, 1):
            for stream, place in zip(streams[layer], places.tolist(), strict=True):
                moved = stream + torch.tensor(
                    [float(stream @ lens.maps[bucket, layer, :, j] + lens.offsets[bucket, layer, j]) for j in range(24)]
                )
                expected, cell = prediction(model, moved), data.sel(step=step, layer=layer, pos=place)
                np.testing.assert_allclose(cell.probability, expected[cell.token.values], rtol=2e-3, atol=1e-6)
    assert used == {0, 1, 2}
    read = collected.read(run, row, lens)
    np.testing.assert_allclose(read["probability"], data["probability"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("share", "bucket"), [(1.0, 3), (0.76, 3), (0.75, 2), (0.5, 1), (0.26, 1), (0.25, 0), (0.0, 0)]
)
def test_a_bucket_ends_at_its_upper_bound(share, bucket):
    lens = random_lens(buckets=4)
    stream = torch.randn(3, lens.maps.shape[2])
    moved = stream + stream @ lens.maps[bucket, 1] + lens.offsets[bucket, 1]
    torch.testing.assert_close(lens.translate(stream, 1, share), moved)


def divergences(run, lens):
    """Mean KL of the reading from the last layer's, [layer], over the undecided positions of a run."""
    total, count = torch.zeros(run.model.cfg.n_layers), 0
    for row in range(len(run.canvas)):
        for step in range(run.steps_run):
            streams, places = undecided_streams(run, row, step)
            share = len(places) / int(run.undecided[row, 0].sum())
            final = torch.stack([prediction(run.model, stream) for stream in streams[-1]])
            for layer, stream in enumerate(streams):
                moved = stream if lens is None else lens.translate(stream, layer, share)
                read = torch.stack([prediction(run.model, one) for one in moved])
                total[layer] += float((final * (final / read).log()).sum())
            count += len(places)
    return total / count


@pytest.mark.extended
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_a_trained_lens_is_closer_to_the_prediction_than_the_logit_lens_on_other_runs(name):
    model = sinklens.load(name)
    prompts = [problem.prompt for problem in training(11, 24)]
    lens = train_tuned_lens(model, prompts, buckets=2, updates=60, batch=128, learning_rate=3e-3, places=3000)
    run = sinklens.generate(model, [held_out(1)[0].prompt], record_sinks=False, steps=8, progress=False)
    tuned, plain = divergences(run, lens), divergences(run, None)
    assert (tuned[:-1] < 0.8 * plain[:-1]).all(), (tuned, plain)
    assert float(tuned[-1]) == pytest.approx(0.0, abs=1e-6)
    swapped = TunedLens(name, lens.maps.flip(0), lens.offsets.flip(0))
    assert divergences(run, swapped)[:-1].sum() > tuned[:-1].sum()  # each bucket needs its own maps


def test_an_autoregressive_lens_is_trained_on_the_streams_that_predict_the_answer(worded, monkeypatch):
    model = worded("llama", True)
    run = sinklens.generate(model, UNEQUAL, gen_length=5, record_sinks=False)
    wanted = []
    for row in range(2):
        start, end = int((~run.real[row]).sum()), run.prompt_length + run.steps_run - 1
        cache = model.run_with_cache(run.canvas[row : row + 1, -1, start:end])[1]
        answer = slice(run.prompt_length - 1 - start, None)
        wanted.append(cache["blocks.2.hook_resid_post"][0, answer].detach())
    seen, read = [], lens_fits.log_probabilities
    monkeypatch.setattr(lens_fits, "log_probabilities", lambda *given: (seen.append(given[1]), read(*given))[1])
    lens = train_tuned_lens(model, UNEQUAL, buckets=1, updates=20, batch=8, gen_length=5)
    targets = torch.cat([part for part in seen if not part.requires_grad])
    distances = (targets.detach()[:, None] - torch.cat(wanted)).norm(dim=-1)
    assert len(targets) == 20 * 8
    assert float(distances.min(dim=1).values.max()) < 1e-3
    assert len(distances.argmin(dim=1).unique()) == 10  # all of them are drawn
    assert lens.maps[0, :2].abs().sum() > 0
    assert not lens.maps[0, 2].any()


def test_a_lens_is_read_as_it_was_saved(tmp_path):
    lens = random_lens()
    lens.save(tmp_path / "lens.safetensors")
    read = TunedLens.load(tmp_path / "lens.safetensors")
    assert torch.equal(read.maps, lens.maps)
    assert torch.equal(read.offsets, lens.offsets)
    assert read.model == "random"
    with pytest.raises(CheckpointError, match="holds no tuned lens"):
        TunedLens.load(tmp_path / "other.safetensors")


def test_models_and_settings_that_do_not_fit_are_refused(worded):
    run = sinklens.generate(worded(), UNEQUAL, gen_length=6, steps=2, record_sinks=False)
    with pytest.raises(SettingError, match=r"\[layers, d_model\] \[3, 20\], and llama has \[3, 24\]"):
        logit_lens(worded(), run, lens=random_lens(d_model=20))
    with pytest.raises(SettingError, match=r"llama is autoregressive, .* pass buckets=1"):
        train_tuned_lens(worded("llama", True), UNEQUAL)
    with pytest.raises(SettingError, match="must be at least 1"):
        train_tuned_lens(worded(), UNEQUAL, buckets=0)
    with pytest.raises(
        SettingError, match=r"no step has a masked share above 0\.00 and up to 0\.25; pass fewer buckets"
    ):
        train_tuned_lens(worded(), UNEQUAL, gen_length=6, steps=2, updates=2, batch=4)
