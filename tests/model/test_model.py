"""`Model`: nnsight blocks, fingerprints, and the inputs of `load`."""

import re

import pytest
import torch
from building import (
    close,
    left_padding,
    plain_pass,
    random_hf,
    random_ids,
    random_model,
    shared_model,
)

from sinklens.errors import SinklensError
from sinklens.model import load

Z = "blocks.1.attn.hook_z"
SINKS, PATTERN = "blocks.1.attn.hook_sink_scores", "blocks.1.attn.hook_pattern"


def without_head_2(value, hook=None):
    value[:, :, 2] = 0
    return value


def test_an_edit_has_the_same_effect_however_it_is_made(model, ids):
    put = torch.ones(2, 7, 6, 4)
    with model.trace(ids):
        model.blocks[1].attn.hook_z.input = put
        at_input = model.output.save()
    with model.trace(ids):
        given, named = model.blocks[1].attn.hook_z.inputs
        model.blocks[1].attn.hook_z.inputs = (given[0] * 0 + 1,), named
        as_inputs = model.output.save()
    with model.trace(ids):
        model.blocks[1].attn.hook_z.skip(put)
        skipped = model.output.save()
    with model.hooks(fwd_hooks=[(Z, lambda value, hook: put)]):
        in_context = model(ids)
    expected = plain_pass(model, ids, edits={Z: torch.ones_like}).logits
    for logits in (at_input, as_inputs, skipped, in_context):
        close(logits, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_sink_scores_can_be_read_before_or_after_the_pattern(causal):
    model, ids, seen = shared_model("llama", causal), random_ids(), []
    with model.hooks(fwd_hooks=[(SINKS, lambda scores, hook: seen.append(scores))]):
        with model.trace(ids):
            scores_first = model.blocks[1].attn.hook_sink_scores.output.save()
            pattern_after = model.blocks[1].attn.hook_pattern.output.save()
            z = model.blocks[1].attn.hook_z.output.save()
    with model.trace(ids) as tracer:
        result = tracer.result.save()
    with model.trace(ids):
        pattern = model.blocks[1].attn.hook_pattern.output.save()
        scores = model.blocks[1].attn.hook_sink_scores.output.save()
    plain = plain_pass(model, ids).values
    assert torch.equal(result, model(ids))
    assert len(seen) == 1  # whatever a block also reads
    assert torch.equal(pattern, pattern_after)
    for found, name in [(scores_first, SINKS), (scores, SINKS), (pattern, PATTERN), (z, Z)]:
        close(found, plain[name])


def test_a_pattern_edited_after_its_sink_scores_were_read_still_takes_effect(model, ids):
    with model.trace(ids):
        model.blocks[1].attn.hook_sink_scores.output  # noqa: B018
        model.blocks[1].attn.hook_pattern.output[:] = 0.25
        logits = model.output.save()
    with model.trace(ids) as tracer:
        cache = tracer.cache(modules=[model.blocks[1].attn.hook_sink_scores])
        model.blocks[1].attn.hook_pattern.output[:] = 0.25
        scores = model.blocks[1].attn.hook_sink_scores.output.save()
    for found in (scores, cache[f"model.{SINKS}"].output):
        assert torch.equal(found, torch.full((2, 6, 7), 7 * 0.25))
    close(logits, plain_pass(model, ids, edits={PATTERN: lambda pattern: torch.full_like(pattern, 0.25)}).logits)


def test_an_nnsight_cache_of_everything_holds_every_point(model, ids):
    with model.trace(ids) as tracer:
        cache = tracer.cache()
    for name, value in plain_pass(model, ids).values.items():
        close(cache[f"model.{name}"].output, value)
    assert torch.equal(model(ids), shared_model()(ids))


@pytest.mark.parametrize("causal", [False, True])
def test_each_of_several_invokes_equals_its_separate_pass(causal):
    model, short, long, real = shared_model("llama", causal), random_ids(1, 5), random_ids(2, 8), left_padding()
    padded, found = random_ids(), []
    with model.trace() as tracer:
        for given in ((short,), (long,), (padded, real)):
            with tracer.invoke(input_ids=given[0], attention_mask=given[1] if given[1:] else None):
                scores = model.blocks[1].attn.hook_sink_scores.output
                found.append((model.output, scores))
    for (logits, scores), ids in zip(found, (short, long), strict=False):
        length = ids.shape[1]
        close(logits[:, -length:], model(ids))
        close(scores[..., -length:], plain_pass(model, ids).values[SINKS])
        assert (scores[..., :-length] == 0).all()
    close(found[2][0][:, -7:][real], model(padded, attention_mask=real)[real])


def skip_in(model, ids, values):
    """Logits of the invokes of `ids`, each replacing the output of layer 1's MLP by its value; None skips nothing."""
    logits = []
    with model.trace() as tracer:
        for given, value in zip(ids, values, strict=True):
            with tracer.invoke(given):
                if value is not None:
                    model.blocks[1].hook_mlp_out.skip(value)
                else:
                    model.blocks[1].hook_mlp_out.output  # noqa: B018
                logits.append(model.output)
    return logits


def test_either_every_invoke_replaces_the_value_of_a_point_or_none_does():
    model, ids = shared_model(), random_ids(2, 5)
    values = [torch.full((1, 5, 24), number) for number in (0.5, -2.0)]
    for row, logits in enumerate(skip_in(model, [ids[:1], ids[1:]], values)):
        put = {"blocks.1.hook_mlp_out": lambda _, row=row: values[row]}
        close(logits, plain_pass(model, ids[row : row + 1], edits=put).logits)
    with pytest.raises(ValueError, match="has to cover every row"):
        skip_in(model, [ids[:1], ids[1:]], [values[0], None])


def test_a_cache_in_an_invoke_keeps_its_rows():
    model, ids, other = shared_model(), random_ids(2, 5), random_ids(1, 5)
    with model.trace() as tracer:
        with tracer.invoke(ids):
            two = tracer.cache(modules=[model.blocks[1].attn.hook_z])
        with tracer.invoke(other):
            one = tracer.cache(modules=[model.blocks[1].attn.hook_z])
    for cache, given in ((two, ids), (one, other)):
        close(cache[f"model.{Z}"].output, plain_pass(model, given).values[Z])


def test_a_gradient_in_an_invoke_covers_only_its_rows():
    model, ids = shared_model(), random_ids(1, 5)
    with model.trace(ids):
        z = model.blocks[1].attn.hook_z.output
        with model.output.sum().backward():
            alone = z.grad.save()
    with model.trace() as tracer:
        with tracer.invoke(ids):
            z = model.blocks[1].attn.hook_z.output
            with model.output.sum().backward():
                batched = z.grad.save()
        with tracer.invoke(random_ids(1, 5)):
            pass
    torch.testing.assert_close(batched, alone, atol=1e-3, rtol=1e-3)


def test_values_pass_between_the_traces_of_a_session(model, ids):
    with model.session():
        with model.trace(ids):
            z = model.blocks[1].attn.hook_z.output
        with model.trace(ids):
            model.blocks[1].attn.hook_z.output = z * 2
            logits = model.output.save()
    close(logits, plain_pass(model, ids, edits={Z: lambda value: value * 2}).logits)


def test_an_edit_in_one_invoke_does_not_affect_the_others():
    model, short, long = shared_model(), random_ids(1, 5), random_ids(1, 8)
    with model.trace() as tracer:
        with tracer.invoke(short):
            model.blocks[1].attn.hook_pattern.output[:, 2] = 0
            edited = model.output.save()
        with tracer.invoke(long):
            untouched = model.output.save()

    def no_attention(pattern):
        return pattern * (torch.arange(6) != 2)[:, None, None]

    close(edited[:, -5:], plain_pass(model, short, edits={PATTERN: no_attention}).logits)
    close(untouched, model(long))


@pytest.mark.parametrize("first", [[[2, 287, 28], [5, 99]], ("Question: 2 + 3?", "Answer: 5")])
def test_rows_of_an_invoke_are_counted_in_every_form_of_prompt(tiny_llada, first):
    with tiny_llada.trace() as tracer:
        with tracer.invoke(first):
            tiny_llada.blocks[0].hook_resid_pre.output[:] = 0
            one = tiny_llada.output.save()
        with tracer.invoke(torch.tensor([[77, 8]])):
            other = tiny_llada.output.save()
    assert (len(one), len(other)) == (2, 1)
    torch.testing.assert_close(other[:, -2:], tiny_llada(torch.tensor([[77, 8]])), atol=1e-4, rtol=1e-4)


def test_an_invoke_with_an_unknown_argument_is_an_error(model):
    with pytest.raises(TypeError, match="unexpected keyword argument 'attention_maks'"):
        with model.trace() as tracer:
            with tracer.invoke(random_ids(1, 5), attention_maks=torch.ones(1, 5)):
                model.output  # noqa: B018
            with tracer.invoke(random_ids(1, 8)):
                model.output  # noqa: B018


def test_an_edit_in_place_acts_in_every_trace_until_it_is_cleared():
    model, ids = random_model(), random_ids()
    with model.edit(inplace=True):
        model.blocks[1].attn.hook_z.output[:, :, 2] = 0
    for _ in range(2):
        with model.trace(ids):
            changed = model.output.save()
        assert torch.equal(changed, shared_model().run_with_hooks(ids, fwd_hooks=[(Z, without_head_2)]))
    for run, name in ((model.run_with_cache,) * 2, (model.run_with_hooks,) * 2, (model, "a plain call")):
        name = getattr(name, "__name__", name)
        with pytest.raises(SinklensError, match=rf"edits from model.edit\(\), which {name} would ignore"):
            run(ids)
    model.clear_edits()
    with model.trace(ids):
        unchanged = model.output.save()
    assert torch.equal(unchanged, model(ids))


def test_a_fingerprint_covers_every_weight_the_config_and_the_tokenizer():
    model, other = (load("tiny-llama", check=False) for _ in range(2))
    before = model.fingerprint
    assert other.fingerprint == before == load("tiny-llama", dtype="bfloat16", check=False).fingerprint
    weight = model.tree.hf.model.layers[2].mlp.down_proj.weight.data
    weight[5, [300, 301]] = weight[5, [301, 300]]  # the same values in other places
    assert model.fingerprint != before
    weight[5, [300, 301]] = weight[5, [301, 300]]
    assert model.fingerprint == before
    model.config.rms_norm_eps *= 2
    assert model.fingerprint != before
    other.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert other.fingerprint != before


def test_the_repr_describes_the_model():
    model = shared_model("qwen2")
    size = sum(parameter.numel() for parameter in random_hf("qwen2").parameters())
    assert repr(model) == (
        f"Model('qwen2', family='a2d-qwen2', {size:,} parameters, "
        "3 layers, 6 heads, 80 hook points, torch.float32, cpu)"
    )


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-canvas", "tiny-mdlm", "tiny-llada-moe"])
def test_printing_shows_every_point_and_the_module_it_belongs_to_with_equal_layers_as_one(name):
    model = load(name)
    _, *lines = str(model).split("\n")
    assert any(line.startswith("blocks.0-3 ") and " model." in line and ".layers.0-3 " in line for line in lines)
    assert len(lines) < 35
    assert set(re.findall(r"hook_\w+", str(model))) == {point.rpartition(".")[2] for point in model.hook_names()}
    layer = model.hf.get_submodule(f"{model.tree.architecture.base}.layers.0")
    for line in lines:
        path = line[19:60].strip().replace("0-3", "0")
        if path not in ("", "the sampler"):
            (layer if line.startswith("  ") else model.hf).get_submodule(path)
