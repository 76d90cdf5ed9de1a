"""The token methods, compared with those of TransformerLens."""

import pytest
import torch
from building import bridge_over, random_hf, random_ids, random_model, shared_model

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.model import load

TEXT, OTHER = "Tom has 3 apples and 4 pears.", "He eats 3."


@pytest.fixture(scope="module")
def bridge(tmp_path_factory):
    """TransformerLens's model; its tokenizer adds a start token, as TransformerLens detects."""
    from transformer_lens.model_bridge.sources import detect_tokenizer_bos_eos

    found = bridge_over(random_hf(causal=True, vocab_size=643), tmp_path_factory.mktemp("tokenizer"))
    found.cfg.tokenizer_prepends_bos, _ = detect_tokenizer_bos_eos(found.tokenizer)
    return found


@pytest.fixture(scope="module")
def model(bridge):
    """The same weights and tokenizer in sinklens."""
    return load(bridge)


@pytest.mark.parametrize("prepend_bos", [None, True, False])
def test_text_has_transformerlenss_tokens(model, bridge, prepend_bos):
    assert torch.equal(model.to_tokens(TEXT, prepend_bos), bridge.to_tokens(TEXT, prepend_bos=prepend_bos))
    assert model.to_str_tokens(TEXT, prepend_bos) == bridge.to_str_tokens(TEXT, prepend_bos=prepend_bos)
    several = [TEXT, OTHER]
    assert model.to_str_tokens(several, prepend_bos) == bridge.to_str_tokens(several, prepend_bos=prepend_bos)
    for side in ("left", "right"):
        both = bridge.to_tokens(several, prepend_bos=prepend_bos, padding_side=side)
        assert torch.equal(model.to_tokens(several, prepend_bos, padding_side=side), both)


def test_tokens_have_transformerlenss_text(model, bridge):
    ids = model.to_tokens(TEXT)
    for given in (ids, ids[0], ids.tolist(), ids[0].tolist(), ids.numpy(), ids[0].numpy()):
        assert model.to_string(given) == bridge.to_string(given)
    assert model.to_string(ids[0, 3]) == model.to_string(int(ids[0, 3])) == bridge.to_string(ids[0, 3])
    for call in (
        lambda of: of.to_str_tokens(ids),
        lambda of: of.to_str_tokens(torch.tensor(5)),
        lambda of: of.to_single_str_token(int(ids[0, 3])),
        lambda of: of.to_single_token(" 3"),
    ):
        assert call(model) == call(bridge)
    assert model.to_string([*ids[0].tolist(), -1, -1]) == model.to_string(ids[0])  # positions that do not exist yet
    assert model.to_str_tokens([-1, int(ids[0, 3])]) == ["", model.to_single_str_token(int(ids[0, 3]))]
    assert model.cfg.tokenizer_prepends_bos is bridge.cfg.tokenizer_prepends_bos is True
    assert not shared_model().cfg.tokenizer_prepends_bos


@pytest.mark.parametrize("mode", ["first", "last"])
def test_the_position_of_a_token_is_transformerlenss(model, bridge, mode):
    text = f"{TEXT} {OTHER}"
    ids = model.to_tokens(text)
    for given in (text, ids, ids[0]):
        for token in (" 3", model.to_single_token(" 3")):
            assert model.get_token_position(token, given, mode) == bridge.get_token_position(token, given, mode=mode)
    assert model.get_token_position(" 3", text, "first") < model.get_token_position(" 3", text, "last")
    assert model.get_token_position(" 3", text, mode, False) == model.get_token_position(" 3", text, mode) - 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.get_token_position(" 9", TEXT), r"token \d+ \(' 9'\) is not among the \d+ tokens"),
        (lambda model: model.get_token_position(" 3", TEXT, "middle"), "mode must be 'first' or 'last'; got 'middle'"),
        (lambda model: model.get_token_position(5, [[5], [5]]), "one row of ids; got 2 rows"),
        (lambda model: model.to_str_tokens([[5], [6]]), "one row of ids; got 2 rows"),
        (lambda model: model.to_string([-2, 5]), "token ids range from -2"),
        (lambda model: model.to_tokens(TEXT, padding_side="top"), "padding_side must be 'left', 'right'.*; got 'top'"),
        (lambda model: model.to_str_tokens(TEXT, padding_side="top"), "padding_side must be 'left'.*; got 'top'"),
        (lambda model: model(TEXT, padding_side="top"), "padding_side must be 'left', 'right'.*; got 'top'"),
        (lambda model: shared_model().to_string([5, 6]), "to_string needs a tokenizer, but llama has none"),
        (lambda model: model.to_single_token("Tom has"), r"'Tom has' is \d+ tokens, \['.*pass text that is a single"),
        (lambda model: model.to_canvas(TEXT), r"is autoregressive and has no mask token; .*to_tokens"),
        (lambda model: model(TEXT * 20), r"has 64 positions, and a pass would need \d+"),
        (lambda model: shared_model().to_canvas([5], 125), "has 64 positions, and a pass would need"),
    ],
)
def test_invalid_calls_are_rejected(model, call, message, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(PromptError, match=message):
        call(model)


def test_a_long_text_is_truncated_only_on_request(model):
    longer = TEXT * 20
    complete = model.to_tokens(longer)
    assert complete.shape[1] > model.cfg.n_ctx == 64
    assert torch.equal(model.to_tokens(longer, truncate=True), complete[:, :64])


# The canvas of a first step


@pytest.mark.parametrize("chosen", [{}, {"gen_length": 8}])
def test_a_canvas_is_the_input_of_the_first_step_of_a_run(tiny_llada, chosen):
    texts = ["Question: 1", "Question: 2 and 3"]
    run = sinklens.generate(tiny_llada, texts, **chosen)
    assert torch.equal(tiny_llada.to_canvas(texts, **chosen), run.canvas[:, 0])
    encoded = tiny_llada.encode(texts, gen_length=chosen.get("gen_length", 24))
    assert torch.equal(encoded.ids, run.canvas[:, 0])
    assert torch.equal(encoded.real, run.real)


@pytest.mark.parametrize("gen_length", [0, -3, 2.5, True, "8"])
@pytest.mark.usefixtures("unchecked")
def test_a_canvas_needs_a_positive_number_of_answer_positions(gen_length):
    with pytest.raises(SettingError, match="gen_length must be a number of positions, at least 1; got"):
        shared_model().to_canvas([5], gen_length)


# As a PyTorch module


def test_module_methods_that_return_the_module_return_the_model(ids):
    model = random_model()
    for name in ("train", "eval", "half", "double", "bfloat16", "float", "cpu"):
        assert getattr(model, name)() is model
    assert model.requires_grad_(False) is model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.to(torch.float64) is model
    assert model(ids).dtype is torch.float64


def test_cfg_has_the_current_device_and_dtype_of_the_weights():
    model = random_model()
    model.to("cpu", torch.float16)
    assert model.cfg.dtype is model.tree.cfg.dtype is torch.float16
    model.tree.hf.float()  # bypassing the model
    assert model.cfg.dtype is torch.float32
    assert sinklens.generate(model, random_ids(), gen_length=2, steps=2).sinks.data.attrs["dtype"] == "torch.float32"
