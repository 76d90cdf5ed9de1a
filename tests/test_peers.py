# ruff: noqa: RET504 — a block of nnsight leaves its values as names
"""Code written for TransformerLens and nnsight gives the same numbers here as on their own models of these weights."""

import copy

import nnsight
import pytest
import torch
from transformers import AutoModelForCausalLM

import sinklens
from sinklens import errors
from sinklens.errors import PromptError, SettingError
from sinklens.model import files

TEXT = "Question: Mia has 20 pens. She loses 6 of them. How many pens are left?\nAnswer:"
OTHER = "Question: Tom has 9 cups.\nAnswer:"
LENGTH = {"max_new_tokens": 4, "do_sample": False}


def plain_hf():
    return AutoModelForCausalLM.from_pretrained(files.find_checkpoint("tiny-llama", None), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def lens(tiny_llama):
    """TransformerLens's model of tiny-llama's weights."""
    from transformer_lens.model_bridge import TransformerBridge

    folder = str(files.find_checkpoint("tiny-llama", None))
    return TransformerBridge.boot_transformers(folder, hf_model=plain_hf(), tokenizer=tiny_llama.tokenizer)


@pytest.fixture(scope="module")
def sight(tiny_llama):
    """nnsight's model of tiny-llama's weights."""
    return nnsight.TransformersModel(plain_hf(), tokenizer=tiny_llama.tokenizer, task="text-generation")


@pytest.fixture(autouse=True)
def _user_lines(monkeypatch):
    """Skip the frames of the run-time type checks, which are not the user's lines."""
    monkeypatch.setattr(errors, "BETWEEN", (*errors.BETWEEN, "typechecks"))


# nnsight


def last_logits(model):
    with model.trace(TEXT):
        logits = model.lm_head.output[:, -1].save()
    return logits


def a_stream(model):
    with model.trace([TEXT, OTHER]):
        stream = model.model.layers[-1].output[:, -1].save()
    return stream


def logit_lens(model):
    found = []
    with model.trace(TEXT):
        for layer in model.model.layers:
            found.append(model.lm_head(model.model.norm(layer.output))[0, -1])
        found = nnsight.save(found)
    return found


def an_ablated_head(model):
    with model.trace(TEXT):
        model.model.layers[0].self_attn.o_proj.input[:, :, :32] = 0
        logits = model.output.logits.save()
    return logits


def a_patch_between_invokes(model):
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(TEXT):
            carried = model.model.layers[1].output[:, -1]
            barrier()
        with tracer.invoke(OTHER):
            barrier()
            model.model.layers[1].output[:, -1] = carried
            logits = model.output.logits[:, -1].save()
    return logits


def a_gradient(model):
    with torch.enable_grad(), model.trace(TEXT):
        stream = model.model.layers[1].output
        loss = model.output.logits[0, -1].logsumexp(-1)
        with loss.backward():
            gradient = stream.grad.save()
    return gradient


def an_operation(model):
    with model.trace(TEXT):
        operation = model.model.layers[0].self_attn.source.attention_interface_1.output[0].save()
    return operation


def a_skipped_layer(model):
    with model.trace(TEXT):
        model.model.layers[1].skip(model.model.layers[1].input)
        logits = model.lm_head.output.save()
    return logits


def an_edited_copy(model):
    with model.edit() as (_, edited):
        edited.model.layers[1].mlp.output[:] = 0
    with edited.trace(TEXT):
        logits = edited.lm_head.output.save()
    return logits


def a_scanned_shape(model):
    with model.scan(TEXT):
        shape = nnsight.save(tuple(model.model.layers[0].output.shape))
    return torch.tensor(shape)


def a_plain_trace(model):
    return model.trace(TEXT, trace=False).logits


def written_ids(model):
    with model.generate(TEXT, **LENGTH) as tracer:
        ids = tracer.result.save()
    return ids


def states_of_steps(model):
    with model.generate(TEXT, **LENGTH) as tracer:
        states = nnsight.save([])
        for _ in tracer.iter[1:3]:
            states.append(model.model.layers[1].output[:, -1])
    return states


def a_steered_text(model):
    with model.generate(TEXT, **LENGTH) as tracer:
        for _ in tracer.iter[:4]:
            model.model.layers[0].mlp.output[:] = 0
        ids = tracer.result.save()
    return ids


BLOCKS = [
    last_logits, a_stream, logit_lens, an_ablated_head, a_patch_between_invokes,
    a_gradient, an_operation, a_skipped_layer, an_edited_copy, a_scanned_shape, a_plain_trace,
    written_ids, states_of_steps, a_steered_text,
]  # fmt: skip


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_block_written_for_nnsight_gives_nnsights_values(tiny_llama, sight, block):
    ours, theirs = block(tiny_llama), block(sight)
    for one, other in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(one + 0, other + 0, atol=1e-4, rtol=1e-4)


def test_a_module_has_one_location_under_both_names(tiny_llada):
    assert tiny_llada.model is tiny_llada.hf.model
    assert tiny_llada.lm_head is tiny_llada.hf.lm_head
    ids = tiny_llada.to_canvas(TEXT, gen_length=4)
    with tiny_llada.trace(ids):
        queries = tiny_llada.model.layers[1].self_attn.q_proj.output.save()
        heads = tiny_llada.blocks[1].attn.hook_q.output.save()
        tiny_llada.blocks[1].hook_resid_post.output[:] = 0
        stream = tiny_llada.model.layers[1].output.save()
    assert torch.equal(queries.reshape(heads.shape), heads)
    assert not stream.any()


def test_the_output_of_a_traced_pass_is_a_plain_tensor_to_all_other_code(tiny_llama, tmp_path):
    with torch.no_grad(), tiny_llama.trace(TEXT):
        kept = tiny_llama.output.save()
        tiny_llama.output.logits[:, 0] = 0  # a view: the pass returns the edit
    expected = tiny_llama(TEXT)
    assert type(expected) is type(kept + 0) is type(kept.logits) is torch.Tensor
    assert torch.equal(kept[:, 1:], expected[:, 1:])
    assert not kept[:, 0].any()
    torch.save(kept, tmp_path / "logits.pt")
    for copied in (torch.load(tmp_path / "logits.pt", weights_only=True), copy.deepcopy(kept), kept.clone().logits):
        assert torch.equal(copied, kept)


def test_a_block_of_generate_visits_the_denoising_steps(tiny_llada):
    expected = sinklens.generate(tiny_llada, TEXT, gen_length=8, steps=4)
    shapes, seen = [], []
    with tiny_llada.generate(TEXT, max_new_tokens=8, steps=4) as tracer:
        for step in tracer.iter[1:3]:
            shapes.append((step, tuple(tiny_llada.lm_head.output.shape[:2])))
            seen.append(tracer.next())
        ids = tracer.result
    assert torch.equal(ids, expected.tokens)
    assert shapes == [(step, tuple(expected.tokens.shape)) for step in (1, 2)]
    assert (seen, tracer.text) == ([2, 3], expected.text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": torch.arange(3)}, "positions are counted from the first real token"),
        ({"past_kv_cache": object()}, "runs reuse keys and values"),
        ({"remote": True}, "the model runs in this process"),
        ({"truncation": True}, r"call model\.tokenizer"),
        ({"validate": True}, r"model\.scan\(prompt\) opens a block"),
        ({"max_new_tokens": 3}, r"open a run with model\.generate or sinklens\.trace"),
    ],
)
def test_an_argument_of_another_librarys_pass_is_refused_unless_it_is_off(tiny_llama, options, message):
    off = dict.fromkeys(options)
    for call in [tiny_llama, tiny_llama.run_with_cache, tiny_llama.run_with_hooks, tiny_llama.trace]:
        with pytest.raises(SettingError, match=rf"a pass has no argument {next(iter(options))}=: .*{message}"):
            call(TEXT, **options)
    assert torch.equal(tiny_llama(TEXT, **off), tiny_llama(TEXT))


# TransformerLens


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.generate(TEXT, 4, do_sample=False, verbose=False),
        lambda model: model.generate([TEXT, OTHER], 4, do_sample=False, verbose=False),
        lambda model: model.generate([TEXT], 4, do_sample=False, verbose=False),
        lambda model: model.generate(TEXT, 4, do_sample=False, return_type="tokens", verbose=False),
        lambda model: model.generate(model.to_tokens(TEXT), 4, temperature=0.0, verbose=False),
        lambda model: model.generate(model.to_tokens(TEXT), 4, do_sample=False, return_type="str", verbose=False),
        lambda model: model.generate(TEXT, 4, do_sample=False, use_past_kv_cache=False, verbose=False),
        lambda model: model.generate(TEXT, 20, do_sample=False, verbose=False),  # ends earlier
    ],
)
def test_generate_returns_what_transformerlenss_returns(tiny_llama, lens, call):
    ours, theirs = call(tiny_llama), call(lens)
    assert type(ours) is type(theirs)
    assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_generate_returns_the_cache_and_the_input_on_request(tiny_llama, lens):
    options = {"max_new_tokens": 3, "do_sample": False, "return_cache": True, "return_input_tokens": True}
    results = [model.generate(TEXT, **options, verbose=False) for model in (tiny_llama, lens)]
    (text, cache, ids), (their_text, their_cache, their_ids) = results
    assert text == their_text
    assert torch.equal(ids, their_ids)
    torch.testing.assert_close(cache["resid_post", 1], their_cache["resid_post", 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_generate_writes_what_a_run_writes(shipped):
    run = sinklens.generate(shipped, [TEXT, OTHER], gen_length=8)
    assert shipped.generate([TEXT, OTHER], max_new_tokens=8) == [
        text + answer for text, answer in zip((TEXT, OTHER), run.text, strict=True)
    ]
    ids = shipped.generate(shipped.to_tokens([TEXT, OTHER]), max_new_tokens=8)
    assert torch.equal(ids[run.tokens >= 0], run.tokens[run.tokens >= 0])
    # the padding is carried along
    assert torch.equal(shipped.generate(ids, max_new_tokens=2, return_input_tokens=True)[1], ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "has no argument num_beams= for this model: a run follows one sequence"),
        ({"stop_at_eos": False}, "has no argument stop_at_eos= for this model: a row ends at its end token"),
        ({"repetition_penalty": 1.2}, r"change the logits at the hook point denoise\.hook_logits"),
        ({"gen_length": 3}, "max_new_tokens and gen_length are the same setting"),
        ({"remote": True}, "no argument remote=: the model runs in this process"),
        ({"penalty": 1}, "penalty is not a setting of the autoregressive sampler"),
        ({"return_type": "ids"}, "return_type='ids' is not one of 'input', 'str', 'tokens'"),
        ({"prompt": ()}, "needs a prompt. It takes no invokes"),
    ],
)
def test_generate_refuses_arguments_without_meaning(tiny_llama, options, message):
    prompt = options.pop("prompt", (TEXT,))
    with pytest.raises(SettingError if prompt else PromptError, match=message):
        tiny_llama.generate(*prompt, max_new_tokens=3, **options)


def test_blocks_in_nnsights_older_form_run_in_every_step(tiny_llada):
    with tiny_llada.generate(TEXT, max_new_tokens=8) as tracer:
        every, some = [].save(), [].save()
        for step in tracer.iter[:2]:
            every.append((step, tiny_llada.blocks[0].hook_resid_post.output.sum()))
        with tracer.iter[2:5]:
            some.append(tiny_llada.blocks[0].hook_resid_post.output.sum())
        written = tiny_llada.generator.output.save()
    with sinklens.trace(tiny_llada, TEXT, gen_length=8) as t:
        sums = []
        with t.all():
            sums.append(t["blocks.0.hook_resid_post"].sum())
    assert len(sums) == 8
    assert [value for _, value in every] + some == sums[:5]
    assert torch.equal(written, t.tokens)
