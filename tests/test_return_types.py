"""The return values of a single pass, as TransformerLens defines them."""

import pytest
from building import bridge_over, close, random_hf

from sinklens.model import load

TEXT, OTHER = "Tom has 3 apples and 4 pears.", "He eats 3."


@pytest.fixture(scope="module")
def bridge(tmp_path_factory):
    """TransformerLens's model."""
    return bridge_over(random_hf(causal=True, vocab_size=643), tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_of_text_equals_transformerlenss(bridge, per_token):
    model = load(bridge)
    ids = model.to_tokens(TEXT)
    expected = bridge(ids, return_type="loss", loss_per_token=per_token)
    logits, both = model(TEXT, return_type="both", loss_per_token=per_token)
    for loss in (
        model(TEXT, return_type="loss", loss_per_token=per_token),
        model.run_with_hooks(TEXT, fwd_hooks=[], return_type="loss", loss_per_token=per_token),
        model.run_with_cache(TEXT, names_filter="hook_embed", return_type="loss", loss_per_token=per_token)[0],
        both,
        model.loss_fn(bridge(ids), ids, per_token=per_token),
    ):
        close(loss, expected)
    close(logits, bridge(ids))
    assert model(TEXT, return_type=None) is None
