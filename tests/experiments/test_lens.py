"""Lenses against explicit formulas, planted streams and the Jacobian of a plain pass; trained, they read better."""

import numpy as np
import pytest
import torch
import xarray as xr
from building import random_hf
from layouts import ARCHITECTURES, causal, public_config, public_weights, write_checkpoint, write_tokenizer
from oracles import oracle_of

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.experiments import LogitLens, TunedLens, logit_lens, train_tuned_lens
from sinklens.experiments import lens as module
from sinklens.tasks import held_out
from sinklens.tasks.word_problems import training

FAMILIES = ["llada", "dream", "llama"]
UNEQUAL = ["w5 w6 w7 w8", "w9 w10"]
MODULATED = pytest.mark.parametrize("name", ["mdlm", "duo", "gidd"])


def written(folder, family, change=None):
    """A random checkpoint of a family, with a tokenizer whose token 7 is the word w7."""
    hf = random_hf(ARCHITECTURES[family], causal(family))
    if change is not None:
        change(hf)
    write_checkpoint(folder, public_config(family, hf), public_weights(family, hf))
    write_tokenizer(folder)
    return sinklens.load(folder, check=change is None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One random model of each family."""
    return {family: written(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def generated(model, prompts=UNEQUAL, **settings):
    """A short run; settings that a sampler does not have are omitted."""
    steps = {} if model.causal else {"steps": 6}
    return sinklens.generate(model, prompts, gen_length=6, record_sinks=False, **steps, **settings)


def prediction(model, stream):
    """Probabilities of streams [*place, d_model], with explicit final norm and unembedding."""
    norm, stream = model.tree.hf.model.norm, stream.double()
    normed = stream / (stream.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight.double()
    return (normed @ model.tree.W_U.double()).softmax(-1).detach()


def streams_of_row(run, row, step):
    """Streams of a single row, without padding, from TransformerLens's cache: [layer, pos, d_model]."""
    start = int((~run.real[row]).sum())
    end = run.prompt_length + step if run.causal else run.canvas.shape[2]
    cache = run.model.run_with_cache(run.canvas[row : row + 1, step, start:end])[1]
    return torch.stack([cache["resid_post", layer][0].detach() for layer in range(run.model.cfg.n_layers)])


def check_against(data, run, row, streams):
    """Every number of `data` against the formulas, position by position."""
    model, start, seen = run.model, int((~run.real[row]).sum()), 0
    shift = int(model.family_record.shift or model.causal)
    for step in data.step.values:
        for layer, stream in enumerate(streams(step)):
            for pos in data.pos.values:
                cell, final = data.sel(step=step, layer=layer, pos=pos), int(run.tokens[row, start + pos])
                source = pos - shift if model.causal else max(0, pos - shift)
                if not 0 <= source < len(stream):
                    assert (cell.token.values == -1).all()
                    assert int(cell.final_rank) == -1
                    assert np.isnan([*cell.probability.values, cell.entropy, cell.final_probability]).all()
                    continue
                p = prediction(model, stream[source])
                ranked = sorted(range(len(p)), key=lambda token, p=p: -p[token])
                assert cell.token.values.tolist() == ranked[:3]
                np.testing.assert_allclose(cell.probability, p[ranked[:3]], rtol=1e-3)
                assert float(cell.entropy) == pytest.approx(-sum(x * x.log() for x in p).item(), rel=1e-3, abs=1e-5)
                assert int(cell.final_rank) == ranked.index(final)
                assert float(cell.final_probability) == pytest.approx(p[final].item(), rel=1e-3)
                seen += 1
    assert seen >= 3 * len(data.pos)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("row", [1, 0])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_is_the_formula_applied_to_the_cached_stream(models, family, row):
    """In a batch with padding; for shifted families at the previous position."""
    run = generated(models[family])
    data = logit_lens(run.model, run, row=row, top_k=3)
    assert dict(data.sizes) == {"step": 6, "layer": 3, "pos": [10, 8][row], "rank": 3}
    check_against(data.sel(step=[0, 3, 5]), run, row, lambda step: streams_of_row(run, row, step))


def still(hf):
    """Make blocks add nothing, and the unembedding recover the embedded token."""
    for layer in hf.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    hf.model.embed_tokens.weight.data = torch.nn.functional.pad(torch.eye(24), (0, 0, 0, 37))
    hf.model.norm.weight.data.fill_(9.0)
    hf.lm_head.weight.data = hf.model.embed_tokens.weight.data.clone()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_that_holds_a_token_names_it_at_the_position_it_predicts(tmp_path, family):
    """In a model that passes embeddings through, each layer names the token at the position, or the previous."""
    model = written(tmp_path, family, still)
    run = generated(model)
    for row, tokens in enumerate([[5, 6, 7, 8], [9, 10]]):
        read = logit_lens(model, run, row=row, steps=[0], positions=range(len(tokens)), top_k=1)
        expected = {"llada": tokens, "dream": [tokens[0], *tokens[:-1]], "llama": [-1, *tokens[:-1]]}[family]
        assert read.token.values[0, :, :, 0].tolist() == [expected] * 3


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llada", {}), ("llada", {"cfg_scale": 1.5}), ("dream", {}), ("llama", {"use_cache": True}),
        ("llama", {"use_cache": False}),
    ],
    ids=str,
)  # fmt: skip
def test_readings_collected_during_an_unchanged_run_are_the_same(models, family, settings):
    """Under guidance, of the conditional rows."""
    lens = LogitLens(top_k=4)
    run = generated(models[family], hooks=[lens], **settings)
    for row in (0, 1):
        xr.testing.assert_allclose(lens.read(run, row), logit_lens(run.model, run, row=row, top_k=4), rtol=1e-3)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_partial_reading_equals_that_part_of_the_complete_one(models, family, monkeypatch):
    """Also if positions are read in several chunks."""
    places = {"steps": [4, 1], "layers": [-1, 0], "positions": [-1, 0, 3]}
    lens = LogitLens(**places)
    run = generated(models[family], hooks=[lens])
    complete = logit_lens(run.model, run)
    part = complete.sel(step=[1, 4], layer=[0, 2], pos=[0, 3, 9])
    xr.testing.assert_allclose(logit_lens(run.model, run, **places), part)
    xr.testing.assert_allclose(lens.read(run), part, rtol=1e-3)
    assert {stream.shape[0] for stream in lens.kept.values()} <= {4, 5, 6}  # at most three of each row are kept
    monkeypatch.setattr(module, "CHUNK", 61 * 3)
    xr.testing.assert_allclose(logit_lens(run.model, run), complete)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lens_in_a_changed_run_reads_the_changed_streams(models, family):
    """Layer 1 is overwritten at two columns of step 2; later layers change, earlier ones do not."""
    model, planted, seen, lens = models[family], torch.randn(24), {}, LogitLens(top_k=3)

    def plant(value, hook):
        if hook.step == 2:
            value[:, -2:] = planted
            return value
        return None

    look = (
        lambda name: name.endswith("resid_post"),
        lambda value, hook: seen.update({(hook.step, hook.name): value + 0}),
    )
    no_cache = {"use_cache": False} if model.causal else {}
    run = generated(model, hooks=[("blocks.1.hook_resid_post", plant), lens, look], **no_cache)
    data, unchanged = lens.read(run), logit_lens(model, run, top_k=3)
    check_against(data, run, 0, lambda step: [seen[step, f"blocks.{layer}.hook_resid_post"][0] for layer in range(3)])
    apart = (abs(data.entropy - unchanged.entropy) > 1e-3).sum("pos")
    assert (apart.sel(step=2).values > 0).tolist() == [False, True, True]
    assert (apart.sel(step=1).values == 0).all()


def test_streams_of_a_cached_token_are_those_of_the_step_that_computed_it(models):
    """A hook at only step 1 changes the token computed there; with a cache, later steps keep the change."""
    model = models["llama"]
    double = ("blocks.0.hook_resid_post", lambda value, hook: -value if hook.step == 1 else None)
    lens = LogitLens()
    run = generated(model, ["w5 w6 w7 w8"], hooks=[double, lens], use_cache=True)
    data, plain = lens.read(run).entropy.sel(layer=0), logit_lens(model, run).entropy.sel(layer=0)
    for step in (1, 2, 5):
        assert (abs(data - plain).sel(step=step).fillna(0).values > 1e-3).nonzero()[0].tolist() == [5]
    assert not (abs(data - plain).sel(step=0) > 1e-3).any()


def test_tokens_of_the_step_and_final_tokens_are_reported_with_texts(model):
    run = generated(model)
    data, start = logit_lens(model, run, row=1, steps=[0, 3]), 2
    assert data.column.values.tolist() == list(range(start, run.canvas.shape[2]))
    np.testing.assert_array_equal(data.token_id, run.canvas[1, [0, 3], start:])
    np.testing.assert_array_equal(data.final_token, run.tokens[1, start:])
    np.testing.assert_array_equal(data.masked, run.canvas[1, [0, 3], start:] == model.mask_token_id)
    assert int(data.masked.sum()) == 6 + 3
    for token, text in zip(data.token.values.ravel()[::17], data.text.values.ravel()[::17], strict=True):
        assert text == model.tokenizer.decode([token])


def test_reading_calls_no_hook_and_leaves_no_gradient(models):
    run, called = generated(models["llada"]), []
    model, names = run.model, ("blocks.1.hook_resid_post", "ln_final.hook_scale")
    with model.tree.hooks(fwd_hooks=[(name, lambda value, hook: called.append(1)) for name in names]):
        first = logit_lens(model, run)
    assert not called
    xr.testing.assert_equal(first, logit_lens(model, run))
    assert all(weight.grad is None and weight.requires_grad for weight in model.tree.hf.parameters())


def test_a_trace_and_a_run_that_ended_early_can_be_read(tiny_llada):
    lens = LogitLens(positions=[-1])
    with sinklens.trace(tiny_llada, held_out(1)[0].prompt, hooks=[lens], threshold=0.5, record_sinks=False) as t:
        for step in t.steps:
            pass
    assert t.steps_run < 24
    xr.testing.assert_allclose(lens.read(t.generation), logit_lens(tiny_llada, t, positions=[-1]), rtol=1e-3, atol=1e-6)


@MODULATED
@torch.no_grad()
def test_the_lens_reads_with_the_final_modulation_of_the_step(conformance, name):
    """That of the run, or of a hook that edits the noise level of its pass."""
    oracle, row, step = oracle_of(name, conformance), 1, 2
    model, lens = oracle.model, LogitLens(layers=[2], steps=[1])
    edit = ("hook_time", lambda value, hook: value * 0 + 0.6)
    run = sinklens.generate(model, [[5, 9, 13], [8, 2, 4]], gen_length=6, steps=4, seed=1)
    read = logit_lens(model, run, steps=[step], row=row, top_k=model.cfg.d_vocab)
    values = oracle.dit(run.canvas[[row], step], 0.0 if run.time is None else run.time[row, step]).values
    for layer in range(3):
        stream = values[f"blocks.{layer}.hook_resid_post"]
        probs = oracle.dit.read_out(stream, values["hook_cond"], lambda _, value: value).softmax(-1)[0]
        here = read.sel(step=step, layer=layer)
        np.testing.assert_allclose(
            here["probability"], probs.gather(1, torch.from_numpy(here["token"].to_numpy())), atol=1e-5
        )
    edited = sinklens.generate(model, [[5, 9, 13]], gen_length=6, steps=4, hooks=[edit, lens])
    logits = oracle.dit(edited.canvas[:, 1], 0.0, {"hook_time": lambda value: value * 0 + 0.6}).logits
    np.testing.assert_allclose(lens.read(edited)["probability"][0, 0, :, 0], logits.softmax(-1)[0].amax(-1), atol=1e-5)


# --- fitted lenses ----------------------------------------------------------------------------------------------


def random_lens(buckets=3, layers=3, d_model=24):
    drawn = torch.Generator().manual_seed(2)
    maps = torch.randn(buckets, layers, d_model, d_model, generator=drawn) / 5
    return TunedLens("random", maps, torch.randn(buckets, layers, d_model, generator=drawn))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("architecture", ["llama", "dream"])
def test_streams_are_moved_by_the_map_of_their_layer_and_masked_share(worded, architecture):
    model, lens, row, used = worded(architecture), random_lens(), 1, set()
    collected = LogitLens(layers=[0, 1], top_k=61)
    run = generated(model, hooks=collected)
    data = logit_lens(model, run, row=row, layers=[0, 1], top_k=61, lens=lens)
    for step in range(6):
        places = run.undecided[row, step, 2:].nonzero()[:, 0]
        streams = streams_of_row(run, row, step)[:, (places - int(model.family_record.shift)).clamp(min=0)]
        bucket = {6: 2, 5: 2, 4: 1, 3: 1, 2: 0, 1: 0}[len(places)]  # undecided positions of the answer's six
        used.add(bucket)
        for layer in (0, 1):
            moved = streams[layer] + streams[layer] @ lens.maps[bucket, layer] + lens.offsets[bucket, layer]
            for place, expected in zip(places.tolist(), prediction(model, moved), strict=True):
                cell = data.sel(step=step, layer=layer, pos=place)
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


def divergence(run, lens):
    """Mean KL of the reading from the last layer's, [layer], over the undecided positions of a run's first row."""
    read = logit_lens(run.model, run, lens=lens, top_k=run.model.cfg.d_vocab).transpose("step", "pos", "layer", "rank")
    order = np.argsort(read["token"].to_numpy(), axis=-1)
    chosen = np.take_along_axis(read["probability"].to_numpy(), order, axis=-1)[read["masked"].to_numpy()] + 1e-12
    return (chosen[:, -1:] * np.log(chosen[:, -1:] / chosen)).sum(-1).mean(0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["gidd", "tiny-llada", "tiny-dream"])
def test_a_trained_lens_is_closer_to_the_prediction_than_the_logit_lens_on_other_runs(conformance, name):
    if name == "gidd":
        model, settings = sinklens.load(conformance / name), {"gen_length": 8, "steps": 6}
        prompts, other = [[3 + n, 9, 20 + n] for n in range(6)], [[11, 9, 31]]
    else:
        model, settings = sinklens.load(name), {"steps": 8}
        prompts, other = [problem.prompt for problem in training(11, 24)], [held_out(1)[0].prompt]
    lens = train_tuned_lens(
        model, prompts, buckets=2, updates=60, update_size=128, learning_rate=3e-3, sample_size=3000, **settings
    )
    run = sinklens.generate(model, other, record_sinks=False, **settings)
    tuned, plain = divergence(run, lens), divergence(run, None)
    assert tuned[:-1].sum() < 0.8 * plain[:-1].sum()
    assert tuned[-1] == pytest.approx(0.0, abs=1e-6)
    # each bucket needs its own maps
    assert divergence(run, TunedLens(name, lens.maps.flip(0), lens.offsets.flip(0)))[:-1].sum() > tuned[:-1].sum()


def test_a_lens_is_read_as_it_was_saved(tmp_path):
    lens = random_lens()
    lens.save(tmp_path / "lens.safetensors")
    read = TunedLens.load(tmp_path / "lens.safetensors")
    assert torch.equal(read.maps, lens.maps)
    assert torch.equal(read.offsets, lens.offsets)
    assert read.model == "random"
    with pytest.raises(CheckpointError, match="holds no tuned lens"):
        TunedLens.load(tmp_path / "other.safetensors")


def test_what_a_lens_cannot_read_or_be_fitted_on_is_refused(models, worded):
    model, lens = models["llada"], LogitLens(layers=[1])
    run, written = generated(model), worded("llama", True)
    generated(model, hooks=[lens])
    sinklens.generate(model, UNEQUAL, gen_length=6, steps=3, hooks=[lens])
    assert sorted(lens.kept) == [(0, 1), (1, 1), (2, 1)]
    short, few = {"gen_length": 6, "steps": 2}, {"updates": 2, "update_size": 4}
    for call, match in [
        (lambda: logit_lens(model, run, top_k=0), r"top_k must be between 1 and 61, the vocabulary size; got 0"),
        (lambda: logit_lens(model, run, steps=[6]), r"step 6 does not exist; there are 6"),
        (lambda: logit_lens(model, run, layers=[3]), r"layer 3 does not exist"),
        (lambda: logit_lens(model, run, row=2), r"row 2 does not exist"),
        (lambda: logit_lens(model, run, row=1, positions=[8]), r"position 8 does not exist; there are 8"),
        (lambda: logit_lens(models["dream"], run), r"has another family or vocabulary"),
        (lambda: logit_lens(model, run, lens=random_lens(d_model=20)), r"d_model\] \[3, 20\], and .* \[3, 24\]"),
        (lambda: LogitLens().read(run), r"the lens holds no step"),
        (lambda: lens.hooks_for(model), r"LogitLens reads a run"),
        (lambda: LogitLens(heads=[0]), r"LogitLens does not support heads="),
        (lambda: generated(model, hooks=[LogitLens(top_k=90)]), r"top_k must be between 1 and 61"),
        (lambda: lens.read(generated(model, ["w5 w6"])), r"of another run"),
        (lambda: train_tuned_lens(written, UNEQUAL), r"llama is autoregressive, .* no masked share; pass buckets=1"),
        (lambda: train_tuned_lens(model, UNEQUAL, buckets=0), "must be at least 1"),
        (lambda: train_tuned_lens(model, UNEQUAL, **short, **few), r"no step has a masked share above 0\.00"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=match):
            call()
