"""The logit lens against explicit formulas, planted streams, and the model's logits."""

import numpy as np
import pytest
import torch
import xarray as xr
from building import random_hf
from layouts import ARCHITECTURES, causal, public_config, public_weights, write_checkpoint, write_tokenizer

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import lens as module
from sinklens.experiments.lens import LogitLens, logit_lens
from sinklens.tasks.word_problems import held_out

FAMILIES = ["llada", "dream", "llama"]
UNEQUAL = ["w5 w6 w7 w8", "w9 w10"]


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
    steps = {} if model.family_record.causal else {"steps": 6}
    return sinklens.generate(model, prompts, gen_length=6, record_sinks=False, **steps, **settings)


def prediction(model, stream):
    """Probabilities of one stream [d_model], with explicit final norm and unembedding."""
    norm = model.tree.hf.model.norm
    normed = stream.double() / (stream.double().pow(2).mean() + norm.variance_epsilon).sqrt() * norm.weight.double()
    return (model.tree.W_U.double().T @ normed).softmax(0).detach()


def streams_of_row(run, row, step):
    """Streams of a single row, without padding, from TransformerLens's cache: by layer [pos, d_model]."""
    start = int((~run.real[row]).sum())
    end = run.prompt_length + step if run.model.family_record.causal else run.canvas.shape[2]
    cache = run.model.run_with_cache(run.canvas[row : row + 1, step, start:end])[1]
    return [cache[f"blocks.{layer}.hook_resid_post"][0].detach() for layer in range(run.model.cfg.n_layers)]


def check_against(data, run, row, streams):
    """Every number of `data` against the formulas, position by position."""
    model, start = run.model, int((~run.real[row]).sum())
    shift, seen = model.family_record.shift or model.family_record.causal, 0
    for step in data.step.values:
        for layer, stream in enumerate(streams(step)):
            for pos in data.pos.values:
                cell, final = data.sel(step=step, layer=layer, pos=pos), int(run.tokens[row, start + pos])
                source = pos - 1 if shift else pos
                if source < 0 and not model.family_record.causal:
                    source = 0
                if source < 0 or source >= len(stream):
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
@pytest.mark.parametrize("row", [1, pytest.param(0, marks=pytest.mark.extended)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_is_the_formula_applied_to_the_cached_stream(models, family, row):
    """In a batch with padding; for shifted families at the previous position."""
    run = generated(models[family])
    data = logit_lens(run.model, run, row=row, top_k=3)
    assert dict(data.sizes) == {"step": 6, "layer": 3, "pos": [10, 8][row], "rank": 3}
    check_against(data, run, row, lambda step: streams_of_row(run, row, step))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_is_the_models_prediction_for_a_position(models, family):
    logits = []
    run = generated(models[family], hooks=[("denoise.hook_logits", lambda value, hook: logits.append(value.clone()))])
    data = logit_lens(run.model, run, layers=[-1], top_k=61)
    for step, value in enumerate(logits):
        places = range(10) if not run.model.family_record.causal else [run.prompt_length + step]
        for place, probabilities in zip(places, value[0].softmax(dim=-1), strict=True):
            cell = data.sel(step=step, layer=2, pos=place)
            np.testing.assert_allclose(cell.probability, probabilities[cell.token.values], rtol=1e-3, atol=1e-7)
            assert (np.diff(cell.probability) <= 0).all()


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
        named = logit_lens(model, run, row=row, steps=[0], positions=range(len(tokens)), top_k=1).token.values[
            0, :, :, 0
        ]
        expected = {"llada": tokens, "dream": [tokens[0], *tokens[:-1]], "llama": [-1, *tokens[:-1]]}[family]
        assert named.tolist() == [expected] * 3


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llada", {}), ("dream", {}), ("llama", {"use_cache": True}), ("llama", {"use_cache": False})],
    ids=str,
)
def test_readings_collected_during_an_unchanged_run_are_the_same(models, family, settings):
    lens = LogitLens(top_k=4)
    run = generated(models[family], hooks=[lens], **settings)
    for row in (0, 1):
        xr.testing.assert_allclose(lens.read(run, row), logit_lens(run.model, run, row=row, top_k=4), rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_partial_reading_equals_that_part_of_the_complete_one(models, family):
    places = {"steps": [4, 1], "layers": [-1, 0], "positions": [-1, 0, 3]}
    lens = LogitLens(**places)
    run = generated(models[family], hooks=[lens])
    complete = logit_lens(run.model, run)
    part = complete.sel(step=[1, 4], layer=[0, 2], pos=[0, 3, 9])
    xr.testing.assert_allclose(logit_lens(run.model, run, **places), part)
    xr.testing.assert_allclose(lens.read(run), part, rtol=1e-3)
    assert {stream.shape[0] for stream in lens.kept.values()} <= {4, 5, 6}  # at most three of each row are kept


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lens_in_a_changed_run_reads_the_changed_streams(models, family):
    """Layer 1 is overwritten at two columns of step 2; later layers change, earlier ones do not."""
    model, planted = models[family], torch.randn(24)
    seen = {}

    def plant(value, hook):
        if hook.step == 2:
            value[:, -2:] = planted
            return value
        return None

    def look(value, hook):
        seen[hook.step, hook.layer()] = value.clone()

    lens = LogitLens(top_k=3)
    no_cache = {"use_cache": False} if model.family_record.causal else {}
    hooks = [("blocks.1.hook_resid_post", plant), lens, (lambda name: name.endswith("resid_post"), look)]
    run = generated(model, hooks=hooks, **no_cache)
    data, unchanged = lens.read(run), logit_lens(model, run, top_k=3)
    check_against(data, run, 0, lambda step: [seen[step, layer][0] for layer in range(3)])
    source = (10 if not model.family_record.causal else run.prompt_length + 2) - 1
    place = source + int(model.family_record.shift or model.family_record.causal)
    if place < 10:
        p = prediction(model, planted)
        assert data.token.sel(step=2, layer=1, pos=place).values[0] == int(p.argmax())
    apart = (abs(data.entropy - unchanged.entropy) > 1e-3).sum("pos")
    assert apart.sel(step=2).values[0] == 0
    assert (apart.sel(step=2).values[1:] > 0).all()
    assert (apart.sel(step=1).values == 0).all()


def test_streams_of_a_cached_token_are_those_of_the_step_that_computed_it(models):
    """A hook at only step 1 changes the token computed there; with a cache, later steps keep the change."""
    model = models["llama"]
    double = ("blocks.0.hook_resid_post", lambda value, hook: -value if hook.step == 1 else None)
    lens = LogitLens()
    run = generated(model, ["w5 w6 w7 w8"], hooks=[double, lens], use_cache=True)
    data, plain = lens.read(run).entropy.sel(layer=0), logit_lens(model, run).entropy.sel(layer=0)
    for step in (1, 2, 5):
        changed = abs(data - plain).sel(step=step).fillna(0).values > 1e-3
        assert changed.nonzero()[0].tolist() == [5]
    assert not (abs(data - plain).sel(step=0) > 1e-3).any()


def test_tokens_of_the_step_and_final_tokens_are_reported_with_texts(tiny_llada):
    run = sinklens.generate(tiny_llada, [problem.prompt for problem in held_out(3)], record_sinks=False)
    data = logit_lens(tiny_llada, run, row=1, steps=[0, 12])
    start = int((~run.real[1]).sum())
    assert start > 0
    assert data.column.values.tolist() == list(range(start, run.canvas.shape[2]))
    np.testing.assert_array_equal(data.token_id, run.canvas[1, [0, 12], start:])
    np.testing.assert_array_equal(data.final_token, run.tokens[1, start:])
    np.testing.assert_array_equal(data.masked, run.canvas[1, [0, 12], start:] == tiny_llada.mask_token_id)
    assert int(data.masked.sum()) == 24 + 12
    for token, text in zip(data.token.values.ravel()[::97], data.text.values.ravel()[::97], strict=True):
        assert text == tiny_llada.tokenizer.decode([token])


def test_chunks_of_positions_change_nothing(models, monkeypatch):
    run = generated(models["dream"])
    complete = logit_lens(run.model, run)
    monkeypatch.setattr(module, "CHUNK", 61 * 3)
    xr.testing.assert_allclose(logit_lens(run.model, run), complete)


def test_under_guidance_the_conditional_rows_are_read(models):
    lens = LogitLens()
    run = generated(models["llada"], hooks=[lens], cfg_scale=1.5)
    xr.testing.assert_allclose(lens.read(run, 1), logit_lens(run.model, run, row=1), rtol=1e-3)


def test_reading_calls_no_hook_and_leaves_no_gradient(models):
    run, called = generated(models["llada"]), []
    model = run.model
    hooks = [
        (name, lambda value, hook: called.append(1)) for name in ("blocks.1.hook_resid_post", "ln_final.hook_scale")
    ]
    with model.tree.hooks(fwd_hooks=hooks):
        first = logit_lens(model, run)
    assert not called
    xr.testing.assert_equal(first, logit_lens(model, run))
    assert all(weight.grad is None and weight.requires_grad for weight in model.tree.hf.parameters())


def test_a_trace_and_a_run_that_ended_early_can_be_read(tiny_llada):
    lens = LogitLens(positions=[-1])
    prompt = held_out(1)[0].prompt
    with sinklens.trace(tiny_llada, prompt, hooks=[lens], threshold=0.5, record_sinks=False) as t:
        for step in t.steps:
            pass
    assert t.steps_run < 24
    xr.testing.assert_allclose(lens.read(t.generation), logit_lens(tiny_llada, t, positions=[-1]), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"top_k": 0}, r"top_k must be between 1 and 61, the vocabulary size; got 0"),
        ({"top_k": 62}, r"top_k must be between 1 and 61"),
        ({"steps": [6]}, r"step 6 does not exist; there are 6"),
        ({"layers": [3]}, r"layer 3 does not exist"),
        ({"row": 2}, r"row 2 does not exist"),
        ({"row": 1, "positions": [8]}, r"position 8 does not exist; there are 8"),
    ],
)
def test_invalid_arguments_are_rejected(models, asked, text):
    run = generated(models["llada"])
    with pytest.raises(SettingError, match=text):
        logit_lens(run.model, run, **asked)


def test_what_the_lens_cannot_read_is_rejected(models):
    model, lens = models["llada"], LogitLens(layers=[1])
    run = generated(model)
    with pytest.raises(SettingError, match=r"the lens holds no step"):
        lens.read(run)
    with pytest.raises(SettingError, match=r"LogitLens reads a run"):
        lens.hooks_for(model)
    with pytest.raises(SettingError, match=r"LogitLens does not support heads="):
        LogitLens(heads=[0])
    with pytest.raises(SettingError, match=r"top_k must be between 1 and 61"):
        generated(model, hooks=[LogitLens(top_k=90)])
    sinklens.generate(model, UNEQUAL, gen_length=6, steps=6, hooks=[lens])
    sinklens.generate(model, UNEQUAL, gen_length=6, steps=3, hooks=[lens])
    assert sorted(lens.kept) == [(0, 1), (1, 1), (2, 1)]
    with pytest.raises(SettingError, match=r"of another run"):
        lens.read(generated(model, ["w5 w6"]))
    with pytest.raises(SettingError, match=r"has another family or vocabulary"):
        logit_lens(models["dream"], run)
