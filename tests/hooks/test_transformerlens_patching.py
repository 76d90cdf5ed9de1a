"""`transformer_lens.patching` and the input points of sublayers, compared with explicitly patched plain passes."""

import pytest
import torch
from building import plain_pass, put, random_ids, random_model, shared_model
from path_oracle import brute_force
from transformer_lens import patching

from sinklens.errors import HookNameError, SettingError

LENGTH, HEADS, LAYERS = 3, 6, 2
KINDS = [("llama", False), pytest.param(("qwen2", True), marks=pytest.mark.extended), ("qwen3", True)]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def metric(logits):
    return logits[0, -1, 5] - logits[0, 1, 9]


class Pair:
    """A clean and a corrupted prompt, and plain passes of the corrupted one with values patched from the clean one."""

    def __init__(self, model):
        self.model, self.corrupted = model, random_ids(1, LENGTH)
        self.clean_ids = random_ids(1, LENGTH)
        self.cache = model.run_with_cache(self.clean_ids)[1]
        self.corrupted_cache = model.run_with_cache(self.corrupted)[1]
        self.clean = plain_pass(model, self.clean_ids).values

    def patched(self, name, index):
        """The metric with ``value[index]`` of the point called `name` taken from the clean pass."""
        edit = put(index, lambda _: self.clean[name][index])
        return metric(plain_pass(self.model, self.corrupted, edits={name: edit}).logits)

    def path(self, sender, receiver):
        """The metric with the output of one head in the clean pass read by one later head alone."""
        return metric(brute_force(self.model, self.corrupted, self.clean_ids, sender, receiver)).detach()


EVERY = slice(None)
STREAM = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
}


@pytest.fixture(scope="module", params=KINDS, ids=str)
def pair(request):
    return Pair(random_model(*request.param, num_hidden_layers=LAYERS))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("what", STREAM)
def test_patching_of_the_stream_and_of_outputs_by_position(pair, what):
    found = getattr(patching, f"get_act_patch_{what}")(pair.model, pair.corrupted, pair.cache, metric)
    rows = [[pair.patched(f"blocks.{n}.{STREAM[what]}", (EVERY, pos)) for pos in range(LENGTH)] for n in range(LAYERS)]
    close(found, torch.tensor(rows))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("what", "heads"), [("out", HEADS), ("q", HEADS), ("k", 2), ("v", 2)])
def test_patching_of_heads_at_all_positions_and_by_position(pair, what, heads):
    name = "hook_z" if what == "out" else f"hook_{what}"
    together = getattr(patching, f"get_act_patch_attn_head_{what}_all_pos")(
        pair.model, pair.corrupted, pair.cache, metric
    )
    rows = [
        [pair.patched(f"blocks.{n}.attn.{name}", (EVERY, EVERY, head)) for head in range(heads)] for n in range(LAYERS)
    ]
    close(together, torch.tensor(rows))
    apart = getattr(patching, f"get_act_patch_attn_head_{what}_by_pos")(pair.model, pair.corrupted, pair.cache, metric)
    assert apart.shape == (LAYERS, LENGTH, heads)
    for layer, pos, head in [(0, 1, 1), (0, 2, 0), (1, 0, heads - 1)]:
        close(apart[layer, pos, head], pair.patched(f"blocks.{layer}.attn.{name}", (EVERY, pos, head)))


@pytest.mark.fast_cases(1)
def test_patching_of_patterns(pair):
    name = "blocks.{}.attn.hook_pattern"
    full = patching.get_act_patch_attn_head_pattern_all_pos(pair.model, pair.corrupted, pair.cache, metric)
    rows = patching.get_act_patch_attn_head_pattern_by_pos(pair.model, pair.corrupted, pair.cache, metric)
    cells = patching.get_act_patch_attn_head_pattern_dest_src_pos(pair.model, pair.corrupted, pair.cache, metric)
    for layer, head, query, key in [(0, 5, 2, 1), (0, 0, 2, 2), (1, 3, 1, 0)]:
        close(full[layer, head], pair.patched(name.format(layer), (EVERY, head)))
        close(rows[layer, head, query], pair.patched(name.format(layer), (EVERY, head, query)))
        close(cells[layer, head, query, key], pair.patched(name.format(layer), (EVERY, head, query, key)))


# Direct paths: the output of one head reaches the queries, keys or values of only one later head


def norm(module, x):
    return x / ((x * x).mean(-1, keepdim=True) + module.variance_epsilon).sqrt() * module.weight


def test_direct_paths_to_queries(pair):
    found = patching.get_act_patch_direct_path(
        pair.model, pair.corrupted, pair.cache, pair.corrupted_cache, metric, src_layer=0, src_head=4, verbose=False
    )
    assert (found[0] == 0).all()
    for head in range(HEADS):
        close(found[1, head], pair.path("L0H4", f"L1H{head}.q"))
    assert pair.model.cfg.use_split_qkv_input is False


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("letter", ["k", "v"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_direct_paths_to_keys_and_values(architecture, letter):
    pair = Pair(random_model(architecture, causal=True, num_key_value_heads=HEADS))
    found = patching.get_act_patch_direct_path(
        pair.model, pair.corrupted, pair.cache, pair.corrupted_cache, metric, 1, 2, component=letter, verbose=False
    )
    for head in range(HEADS):
        close(found[2, head], pair.path("L1H2", f"L2H{head}.{letter}"))


# The input points of sublayers


@pytest.fixture
def switched():
    """A model whose switches are all turned off after the test."""
    model = shared_model("qwen2", True)
    yield model
    for switch in ("use_split_qkv_input", "use_attn_in", "use_hook_mlp_in"):
        getattr(model, f"set_{switch}")(False)
    assert len(model.hook_names()) == 80


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("blocks.0.attn.hook_q_input", "use_split_qkv_input"),
        ("blocks.-1.hook_v_input", "use_split_qkv_input"),
        ("blocks.1.hook_attn_in", "use_attn_in"),
        ("blocks.1.hook_mlp_in", "use_hook_mlp_in"),
    ],
)
def test_a_point_that_is_off_raises_an_error_that_names_its_setter(switched, name, switch):
    message = rf"is off because {switch} is False; call model\.set_{switch}\(True\) first"
    with pytest.raises(SettingError, match=message):
        switched.run_with_cache(random_ids(), names_filter=name)
    with pytest.raises(SettingError, match=message):
        switched.add_hook(name, lambda value, hook: None)
    with pytest.raises(HookNameError, match="matches none of the 80"):
        switched.run_with_hooks(random_ids(), fwd_hooks=[(lambda point: point == switched.tree.spelled(name), print)])
    getattr(switched, f"set_{switch}")(True)
    assert getattr(switched.cfg, switch) is True
    assert switched.tree.resolve(name) in switched.hook_names()
    assert name in switched.run_with_cache(random_ids(), names_filter=name)[1]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_inputs_are_copies_of_the_stream_and_reading_them_does_not_change_the_logits(architecture):
    model, ids = random_model(architecture), random_ids()
    plain, names = plain_pass(model, ids), []
    for switches in (["use_split_qkv_input", "use_hook_mlp_in"], ["use_attn_in"]):
        for switch in switches:
            getattr(model, f"set_{switch}")(True)
        logits, cache = model.run_with_cache(ids)
        close(logits, plain.logits)
        names += [name for name in cache if name not in plain.values]
        for name in plain.values:
            close(cache[name], plain.values[name])
        for name in names:
            stream = plain.values[f"blocks.{name[7]}.hook_resid_{'mid' if 'mlp' in name else 'pre'}"]
            if name in cache and "mlp" not in name:
                heads = 2 if name.endswith(("k_input", "v_input")) else HEADS
                stream = stream[:, :, None].expand(-1, -1, heads, -1)
            if name in cache:
                close(cache[name], stream)
        assert list(cache.keys()) == [name for name in model.hook_names() if not name.startswith("denoise.")]
        for switch in switches:
            getattr(model, f"set_{switch}")(False)
    assert len(names) == 3 * 3 + 3 + 3


@pytest.mark.parametrize("letter", ["q", "k", "v"])
def test_changing_the_input_of_one_head_changes_only_that_head(switched, ids, letter):
    switched.set_use_split_qkv_input(True)
    added = torch.randn(24)

    def add(value, hook):
        value[:, :, 1] += added

    plain = plain_pass(switched, ids).values
    layer = switched.tree.hf.model.layers[1]
    changed = norm(layer.input_layernorm, plain["blocks.1.hook_resid_pre"] + added)
    expected = plain[f"blocks.1.attn.hook_{letter}"].clone()
    expected[:, :, 1] = getattr(layer.self_attn, f"{letter}_proj")(changed).unflatten(-1, (-1, 4))[:, :, 1]
    cache, fwd, _ = switched.get_caching_hooks(lambda name: name.startswith("blocks.1.attn.hook_"))
    found = switched.run_with_hooks(ids, fwd_hooks=[(f"blocks.1.attn.hook_{letter}_input", add), *fwd])
    close(found, plain_pass(switched, ids, edits={f"blocks.1.attn.hook_{letter}": lambda _: expected}).logits)
    close(cache[f"blocks.1.attn.hook_{letter}"], expected)
    for other in {"q", "k", "v"} - {letter}:
        close(cache[f"blocks.1.attn.hook_{other}"], plain[f"blocks.1.attn.hook_{other}"])


def test_changing_the_shared_copies_changes_queries_keys_and_values(switched, ids):
    """In grouped-query attention, keys and values read the first copies, as in TransformerLens."""
    switched.set_use_attn_in(True)
    added = torch.randn(HEADS, 24)
    plain = plain_pass(switched, ids).values
    layer = switched.tree.hf.model.layers[1]
    copies = norm(layer.input_layernorm, plain["blocks.1.hook_resid_pre"][:, :, None] + added)
    edits = {}
    for letter, heads in (("q", HEADS), ("k", 2), ("v", 2)):
        every = getattr(layer.self_attn, f"{letter}_proj")(copies[:, :, :heads]).unflatten(-1, (-1, 4))
        projected = torch.stack([every[:, :, head, head] for head in range(heads)], dim=2)
        edits[f"blocks.1.attn.hook_{letter}"] = lambda _, projected=projected: projected
    found = switched.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_attn_in", lambda value, hook: value + added)])
    close(found, plain_pass(switched, ids, edits=edits).logits)


def test_changing_the_input_of_the_mlp_does_not_change_the_stream(switched, ids):
    switched.set_use_hook_mlp_in(True)
    layer = switched.tree.hf.model.layers[1]
    stream = plain_pass(switched, ids).values["blocks.1.hook_resid_mid"]
    mlp_out = layer.mlp(norm(layer.post_attention_layernorm, stream * 2 + 1))
    found = switched.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_mlp_in", lambda value, hook: value * 2 + 1)])
    close(found, plain_pass(switched, ids, edits={"blocks.1.hook_mlp_out": lambda _: mlp_out}).logits)


@pytest.mark.parametrize(
    ("on", "other"), [("use_attn_in", "use_split_qkv_input"), ("use_split_qkv_input", "use_attn_in")]
)
def test_the_two_kinds_of_copies_are_mutually_exclusive(switched, on, other):
    getattr(switched, f"set_{on}")(True)
    with pytest.raises(SettingError, match=rf"mutually exclusive; call model\.set_{on}\(False\) first"):
        getattr(switched, f"set_{other}")(True)


def test_head_results_do_not_need_a_setter(switched):
    for flag in (False, True):
        switched.set_use_attn_result(flag)
        assert switched.cfg.use_attn_result is flag
        assert "blocks.1.attn.hook_result" in switched.run_with_cache(random_ids())[1]
