"""Cross-layer transcoders: the formula of circuit-tracer in plain torch, its files, and runs that use one."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from watching import PADDED, again, logits_of, watch

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.features import SpliceCrossLayer, load_cross_layer

LAYERS, D, WIDTH = 3, 24, 10


def written(folder, threshold=True):
    """Files as circuit-tracer's `to_safetensors` writes them."""
    drawn = torch.Generator().manual_seed(8)

    def random(*shape):
        return torch.randn(*shape, generator=drawn) / 3

    for layer in range(LAYERS):
        read = {"W_enc": random(WIDTH, D), "b_enc": random(WIDTH), "b_dec": random(D)}
        read |= {"threshold": random(WIDTH).abs()} if threshold else {}
        save_file({f"{k}_{layer}": v for k, v in read.items()}, folder / f"W_enc_{layer}.safetensors")
        save_file({f"W_dec_{layer}": random(WIDTH, LAYERS - layer, D)}, folder / f"W_dec_{layer}.safetensors")
    return folder


def outputs(folder, streams):
    """What the transcoder writes to every layer, as circuit-tracer's encode and decode compute it."""
    stored = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    found = [stored[f"b_dec_{layer}"].expand(streams[0].shape).clone() for layer in range(len(streams))]
    for layer, x in enumerate(streams):
        pre = torch.einsum("...d,fd->...f", x, stored[f"W_enc_{layer}"]) + stored[f"b_enc_{layer}"]
        name = f"threshold_{layer}"
        features = pre * (pre > stored[name]) if name in stored else pre.relu()
        for later in range(layer, LAYERS):
            found[later] += features @ stored[f"W_dec_{layer}"][:, later - layer]
    return found


@pytest.mark.parametrize("threshold", [False, True])
def test_layers_sum_as_in_circuit_tracer(tmp_path, threshold):
    folder = written(tmp_path, threshold)
    read = load_cross_layer(folder, model="llama")
    streams = [torch.randn(7, D) for _ in range(LAYERS)]
    wanted, pairs = outputs(folder, streams), list(zip(read, streams, strict=True))
    parts = [one.decode(one.encode(x), x).chunk(LAYERS - n, dim=-1) for n, (one, x) in enumerate(pairs)]
    for layer in range(LAYERS):
        found = sum(parts[earlier][layer - earlier] for earlier in range(layer + 1))
        torch.testing.assert_close(found, wanted[layer], atol=1e-5, rtol=1e-4)
    assert [(one.point, one.point_out) for one in read] == [
        (f"blocks.{layer}.hook_resid_mid", f"blocks.{layer}.hook_mlp_out") for layer in range(LAYERS)
    ]


def test_a_run_with_one_equals_the_same_edit_in_plain_torch(worded, tmp_path):
    model, read = worded(), load_cross_layer(written(tmp_path))
    splice = SpliceCrossLayer(transcoders=read, scope="masked", steps=[1, 2])
    watched = watch(model, PADDED, [splice], ["hook_logits"])
    for step in (0, 1):
        where = watched.run.undecided[:, step] & watched.run.real if step else torch.zeros_like(watched.run.real)
        streams = []

        def mlp(value, where=where, streams=streams):
            made = outputs(tmp_path, [*streams, *[streams[-1]] * (LAYERS - len(streams))])[len(streams) - 1]
            return torch.where(where[..., None], made, value)

        edits = {}
        for layer in range(LAYERS):
            edits |= {f"blocks.{layer}.hook_resid_mid": lambda value, s=streams: s.append(value) or value}
            edits |= {f"blocks.{layer}.hook_mlp_out": mlp}
        plain = again(watched.run, step, edits).logits
        for row, real in enumerate(watched.run.real):
            got = watched.values[step]["denoise.hook_logits"][row, real]
            torch.testing.assert_close(got, plain[row, real], atol=5e-4, rtol=1e-3)
    assert not torch.equal(logits_of(watched), logits_of(watch(model, PADDED, [], ["hook_logits"])))


KEPT = torch.zeros(WIDTH, 2, D)
FILES = [
    ({"W_dec_1": KEPT[:, :1].contiguous()}, r"W_dec_1 in .* must be \[d_sae, 2, d_out\].*got \[10, 1, 24\]"),
    ({"W_dec_1": KEPT, "W_skip_1": torch.zeros(1)}, r"perhaps threshold_1; it holds .*W_skip_1"),
    (b"short", r"W_dec_1\.safetensors cannot be read"),
]


@pytest.mark.usefixtures("unchecked")
def test_other_files_and_models_are_refused(worded, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no W_enc_0\.safetensors"):
        load_cross_layer(tmp_path)
    read = load_cross_layer(written(tmp_path))
    narrow = [
        replace(one, W_dec=one.W_dec[:, : D * n], b_dec=one.b_dec[: D * n]) for n, one in ((2, read[0]), (1, read[1]))
    ]
    with pytest.raises(SettingError, match=r"has 2 layers, and llama has 3"):
        sinklens.generate(worded(), "w5 w6", gen_length=2, steps=1, hooks=SpliceCrossLayer(transcoders=narrow))
    with pytest.raises(SettingError, match=r"layer i of L writes L - i vectors of one size; these write 24, 48"):
        SpliceCrossLayer(transcoders=read[1:2] * 2)
    for content, match in FILES:
        made = content if isinstance(content, bytes) else save(content)
        (tmp_path / "W_dec_1.safetensors").write_bytes(made)
        with pytest.raises(CheckpointError, match=match):
            load_cross_layer(tmp_path)
