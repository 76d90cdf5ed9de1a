"""Every accepted spelling resolves to its point, and an unknown name raises an error with the nearest names."""

import pytest
import torch

from sinklens.errors import HookNameError
from sinklens.hooks import names

KNOWN = [name.format(l=layer) for name, _ in names.table() for layer in range(3 if "{l}" in name else 1)]


def resolve(name):
    return names.resolve(name, KNOWN, n_layers=3)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("embed.hook_out", "hook_embed"),
        ("blocks.1.hook_in", "blocks.1.hook_resid_pre"),
        ("blocks.1.hook_out", "blocks.1.hook_resid_post"),
        ("blocks.1.attn.q.hook_out", "blocks.1.attn.hook_q"),
        ("blocks.1.attn.o.hook_in", "blocks.1.attn.hook_z"),
        ("blocks.1.mlp.in.hook_out", "blocks.1.mlp.hook_pre_linear"),
        ("ln_final.hook_in", "blocks.2.hook_resid_post"),
        ("blocks.-1.hook_resid_post", "blocks.2.hook_resid_post"),
        ("blocks.-3.attn.hook_z", "blocks.0.attn.hook_z"),
        ("blocks.-2.attn.v.hook_out", "blocks.1.attn.hook_v"),
    ],
)
def test_transformerlens_4_spellings_and_negative_layers_resolve_to_the_same_place(spelling, name):
    assert resolve(spelling) == name


RANGE = r"does not exist; this model has 3 layers, 0 to 2 \(or -3 to -1 from the end\)"
NONE_HERE = "' here; the same value is "


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *((f"blocks.{layer}.attn.hook_z", f"layer {layer} {RANGE}") for layer in (3, 17, -4)),
        ("blocks.0.attn.hook_patern", r"Nearest: .*blocks\.0\.attn\.hook_pattern\b.*model\.hook_names\(\)"),
        ("blocks.1.hook_sink_scores", r"Nearest: .*blocks\.1\.attn\.hook_sink_scores.*model\.hook_names\(\)"),
        ("hook_embedd", r"called 'hook_embedd'\. Nearest: .*hook_embed\b.*model\.hook_names\(\)"),
        ("denoise.hook_canvass", r"Nearest: .*denoise\.hook_canvas\b.*model\.hook_names\(\)"),
        ("embed.hook_in", f"embed.hook_in{NONE_HERE}the token ids of the pass.*denoise.hook_canvas"),
        (
            "unembed.hook_in",
            rf"{NONE_HERE}ln_final\.hook_normalized times model\.ln_final\.w, or model\.lm_head\.input",
        ),
        ("unembed.hook_out", f"{NONE_HERE}the logits that the pass returns.*denoise.hook_logits"),
    ],
)
def test_a_name_of_no_point_raises_an_error_with_the_range_the_nearest_names_or_the_same_value(wrong, message):
    with pytest.raises(HookNameError, match=message):
        resolve(wrong)


def test_the_input_of_the_head_is_the_normalized_stream_times_its_weight(model, ids):
    _, cache = model.run_with_cache(ids)
    with model.trace(ids):
        entered = model.lm_head.input.save()
    torch.testing.assert_close(cache["ln_final.hook_normalized"] * model.ln_final.w, entered)
