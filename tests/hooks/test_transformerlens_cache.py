"""Caches, hooks and partial passes behave as in TransformerLens 4.3, under every spelling of a name."""

import pytest
import torch
from building import close, plain_pass, random_ids, random_model, shared_model
from torch.nn.functional import cross_entropy

from sinklens.errors import HookFunctionError, HookNameError, PromptError, SettingError
from sinklens.interventions import HideKeys

SPELLED = [
    ("blocks.0.attn.q.hook_out", "blocks.0.attn.hook_q"),
    ("blocks.-1.hook_out", "blocks.2.hook_resid_post"),
    ("blocks.-3.attn.hook_pattern", "blocks.0.attn.hook_pattern"),
    ("embed.hook_out", "hook_embed"),
    ("ln_final.hook_in", "blocks.2.hook_resid_post"),
]
TYPO = "blocks.0.attn.q.hook_outt"
NEAREST = r"'blocks\.0\.attn\.q\.hook_outt'\. Nearest: blocks\.0\.attn\.q\.hook_out"


@pytest.fixture
def model():
    """A model whose hooks are all removed after the test."""
    model = shared_model()
    yield model
    model.tree.reset_hooks(including_permanent=True)
    assert model.tree.context_level == 0


def test_blocks_of_hooks_that_end_in_another_order_leave_no_level(model):
    first, second = (model.hooks(fwd_hooks=[(f"blocks.{layer}.hook_resid_pre", print)]) for layer in (0, 1))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)  # the fixture asks for the level


# Names


@pytest.mark.parametrize(("spelling", "name"), SPELLED)
def test_caching_hooks_are_set_for_any_spelling_until_hooks_are_reset(model, spelling, name):
    cache, store = model.add_caching_hooks(names_filter=[spelling]), {}
    model.add_caching_hooks(names_filter=[spelling], cache=store)
    for ids in (random_ids(), random_ids()):
        model(ids)
        close(cache[spelling], plain_pass(model, ids).values[name])
    model.reset_hooks()
    kept = cache[name]
    assert set(store) == {name, spelling}
    assert torch.equal(store[spelling], kept)
    model(random_ids())
    assert cache[name] is kept


@pytest.mark.parametrize("chosen", [TYPO, ["hook_embed", TYPO], (TYPO,)])
@pytest.mark.parametrize("front", ["get_caching_hooks", "add_caching_hooks", "list_hooks", "run_with_cache"])
def test_a_name_of_no_point_is_refused_with_the_nearest_names(model, front, chosen):
    with pytest.raises(HookNameError, match=NEAREST):
        getattr(model, front)(random_ids(), names_filter=chosen) if front == "run_with_cache" else getattr(
            model, front
        )(chosen)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_a_predicate_also_matches_transformerlens_4_spellings(model, ids):
    plain = plain_pass(model, ids).values
    expected = [f"blocks.{layer}.attn.hook_{letter}" for layer in range(3) for letter in "qkv"]

    def projected(name):
        return name.endswith(("q.hook_out", "k.hook_out", "v.hook_out"))

    cache = model.run_with_cache(ids, names_filter=projected)[1]
    assert list(cache.keys()) == expected
    for name in expected:
        close(cache[name], plain[name])
    assert list(dict(model.get_caching_hooks(projected)[1])) == expected


@pytest.mark.parametrize(("spelling", "name"), SPELLED)
def test_a_cache_accepts_any_spelling(model, spelling, name):
    cache = model.run_with_cache(random_ids())[1]
    for kept in (cache, cache.cache_dict, cache.apply_slice_to_batch_dim([0, 1]), cache.to("cpu")):
        assert torch.equal(kept[spelling], cache[name])
        assert spelling in kept
        assert TYPO not in kept
    assert cache["resid_post", -1] is cache["blocks.2.hook_resid_post"]
    assert cache.cache_dict.get(spelling) is cache[name]
    assert cache.cache_dict.get(TYPO) is None


def test_hooks_are_listed_and_looked_up_in_any_spelling(model):
    model.add_hook("blocks.-1.attn.o.hook_in", lambda value, hook: None)
    assert list(model.list_hooks("blocks.2.attn.o.hook_in")) == ["blocks.2.attn.hook_z"]
    assert list(model.list_hooks("blocks.-2.attn.o.hook_in")) == []
    assert model.hook_dict["blocks.-1.attn.o.hook_in"] is model.tree.blocks[2].attn.hook_z


# Contents of a cache


@pytest.mark.parametrize("as_object", [True, False])
def test_a_cache_without_a_batch_axis_records_that(model, as_object):
    ids = random_ids(1)
    logits, cache = model.run_with_cache(ids, remove_batch_dim=True, return_cache_object=as_object)
    plain = plain_pass(model, ids)
    close(logits, plain.logits)
    for name, value in plain.values.items():
        close(cache[name], value[0])
    if as_object:
        assert not cache.has_batch_dim
        with pytest.raises(AssertionError, match="Cannot index into a cache without a batch dim"):
            cache.apply_slice_to_batch_dim(0)
        close(
            cache.stack_head_results(layer=3).sum(0),
            sum(plain.values[f"blocks.{n}.hook_attn_out"][0] for n in range(3)),
        )


def test_values_are_stored_on_the_requested_device(model):
    cache = model.run_with_cache(random_ids(), names_filter="hook_embed", device="meta")[1]
    assert cache["hook_embed"].device.type == "meta"


# Lifetime of hooks


def test_a_cache_whose_hooks_stay_is_updated_by_later_passes(model):
    first, second = random_ids(), random_ids(1, 5)
    cache = model.run_with_cache(first, names_filter="blocks.1.hook_out", reset_hooks_end=False)[1]
    close(cache["blocks.1.hook_out"], plain_pass(model, first).values["blocks.1.hook_resid_post"])
    model(second)
    close(cache["blocks.1.hook_out"], plain_pass(model, second).values["blocks.1.hook_resid_post"])
    model.run_with_cache(first)  # removes the hooks of this call, not those that stayed
    close(cache["blocks.1.hook_out"], plain_pass(model, first).values["blocks.1.hook_resid_post"])
    model.reset_hooks()
    model(second)
    close(cache["blocks.1.hook_out"], plain_pass(model, first).values["blocks.1.hook_resid_post"])


def test_a_call_removes_only_the_hooks_it_set(model):
    ids, seen = random_ids(), []
    name = "blocks.0.hook_resid_post"
    model.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: seen.append("stays"))], reset_hooks_end=False)
    model.add_hook(name, lambda value, hook: seen.append("added"))
    model.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: seen.append("once"))])
    with model.hooks(fwd_hooks=[(name, lambda value, hook: None)]):
        pass
    seen.clear()
    model(ids)
    assert seen == ["stays", "added"]


def test_contexts_of_the_points_touched_are_cleared_on_request(model):
    touched, other = model.hook_dict["blocks.0.hook_mlp_out"], model.hook_dict["blocks.1.hook_mlp_out"]
    touched.ctx["kept"] = other.ctx["kept"] = 1
    model.run_with_cache(random_ids(), names_filter="blocks.0.mlp.hook_out")
    assert touched.ctx == {"kept": 1}
    model.run_with_cache(random_ids(), names_filter="blocks.0.mlp.hook_out", clear_contexts=True, reset_hooks_end=False)
    assert (touched.ctx, other.ctx) == ({}, {"kept": 1})
    model.run_with_hooks(random_ids(), fwd_hooks=[("blocks.1.mlp.hook_out", lambda v, hook: None)], clear_contexts=True)
    assert other.ctx == {}


def test_backward_hooks_of_a_single_pass_raise_a_warning(model):
    with pytest.warns(UserWarning, match="backward hooks are removed after this pass"):
        model.run_with_hooks(random_ids(), bwd_hooks=[("hook_embed", lambda value, hook: None)])


def test_hook_functions_receive_values_without_the_batch_axis_on_request(model):
    ids, shapes = random_ids(1), []

    def halve(value, hook):
        shapes.append(list(value.shape))
        return value / 2

    found = model.run_with_hooks(ids, fwd_hooks=[("blocks.1.hook_mlp_out", halve)], remove_batch_dim=True)
    close(found, plain_pass(model, ids, edits={"blocks.1.hook_mlp_out": lambda value: value / 2}).logits)
    assert shapes == [[7, 24]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda value: value.double(), "is float64 on cpu, but the value at this point is float32 on cpu; convert it"),
        (lambda value: value.to("meta"), "is float32 on meta, but"),
        (lambda value: value[..., :1], r"is \[1, 7, 1\], but the value at this point has shape \[1, 7, 24\]"),
        (lambda value: 3, "is int, but the value at this point has shape .*; return the same shape, or None"),
    ],
)
@pytest.mark.parametrize("remove_batch_dim", [False, True])
def test_a_hook_function_that_returns_another_kind_of_value_is_named(change, text, remove_batch_dim):
    def other_kind(value, hook):
        return change(value)

    model, ids, pairs = shared_model(), random_ids(1), [("blocks.1.hook_mlp_out", other_kind)]
    text = f"what hook function other_kind returned at blocks.1.hook_mlp_out {text}"
    with pytest.raises(HookFunctionError, match=text):
        model.run_with_hooks(ids, fwd_hooks=pairs, remove_batch_dim=remove_batch_dim)
    close(model(ids), plain_pass(model, ids).logits)


# Gradients


def test_gradients_are_cached_with_the_values():
    model, ids = random_model("qwen2", causal=True), random_ids()
    names = ["blocks.0.attn.hook_pattern", "blocks.-2.attn.hook_z", "blocks.1.hook_out", "blocks.2.mlp.hook_post"]
    loss, cache = model.run_with_cache(ids, names_filter=names, return_type="loss", incl_bwd=True)
    plain = plain_pass(model, ids)
    expected = cross_entropy(plain.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    close(loss, expected)
    points = [model.tree.resolve(name) for name in names]
    for name, gradient in zip(names, torch.autograd.grad(expected, [plain.values[one] for one in points]), strict=True):
        close(cache[f"{name}_grad"], gradient, atol=1e-5)
    assert set(cache.keys()) == {*points, *(f"{name}_grad" for name in points)}
    assert not any(point.fwd_hooks or point.bwd_hooks for point in model.tree.hook_dict.values())


def test_gradients_are_cut_and_unbatched_like_the_values():
    model, ids = random_model(causal=True), random_ids(1)
    wanted = {"names_filter": ["blocks.1.attn.hook_q", "blocks.1.attn.hook_pattern"], "return_type": "loss"}
    full = model.run_with_cache(ids, incl_bwd=True, **wanted)[1]
    cut = model.run_with_cache(ids, incl_bwd=True, pos_slice=(1, 4), remove_batch_dim=True, **wanted)[1]
    close(cut["blocks.1.attn.hook_q_grad"], full["blocks.1.attn.hook_q_grad"][0, 1:4])
    close(cut["blocks.1.attn.hook_pattern_grad"], full["blocks.1.attn.hook_pattern_grad"][0, :, 1:4])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.run_with_cache(random_ids(), names_filter=3), SettingError, "a predicate or a list of them; got"),
        (lambda m: m.run_with_cache(random_ids(), names_filter=["hook_embed", "denoise.hook_logits"]), HookNameError,
         r"'denoise\.hook_logits' belongs to the sampler; a single pass"),
        (lambda m: m.run_with_cache(random_ids(), names_filter="denoise.hook_logits"), HookNameError, "to the sampler"),
        (lambda m: m.run_with_hooks(random_ids(), fwd_hooks=[("denoise.hook_canvas", print)]), HookNameError,
         r"'denoise\.hook_canvas' belongs to the sampler"),
        *(
            (lambda m, given=given: m.run_with_hooks(random_ids(), fwd_hooks=given), HookNameError, text)
            for given, text in (
                (("hook_embed", print), r"bwd_hooks= must be lists of .* pairs, .*; got \('hook_embed'"),
                ([HideKeys(positions=[1])], r"The pairs of an intervention are intervention\.hooks_for\(model\)"),
                (print, "must be lists of"),
            )
        ),
        (lambda m: m.run_with_cache(random_ids(), names_filter="hook_embed")[1]["blocks.-1.hook_out"], HookNameError,
         r"'blocks\.-1\.hook_out' is not in the cache of 1 values: hook_embed"),
        (lambda m: m.run_with_cache(random_ids(), names_filter="hook_embed")[1][TYPO], HookNameError, NEAREST),
        (lambda m: m.run_with_cache(random_ids(2), remove_batch_dim=True), SettingError, "batch of one row; got 2 row"),
        (lambda m: m.tree.run_with_cache(random_ids(2), torch.ones(2, 7)), SettingError,
         "second argument of run_with_cache is return_cache_object"),
        (lambda m: m.tree(random_ids(), return_type="probs"), SettingError,
         "return_type='probs' is not one of 'logits', 'loss', 'both', None"),
        (lambda m: m.tree(random_ids(), return_type="loss"), SettingError, "is that of the tokens behind the masks"),
        (lambda m: m.run_with_cache(random_ids(), stop_at_layer=4), SettingError,
         "stop_at_layer=4 is out of range; 0 to 3, or -3 to -1"),
        (lambda m: m.tree(torch.randn(1, 4, 24), start_at_layer=3), SettingError, "=3 is out of range; 0 to 2"),
        (lambda m: m.tree(random_ids(), start_at_layer=1), PromptError, "takes the residual-stream tensor"),
        (lambda m: m.tree("a text"), PromptError, r"a pass of the tree takes token ids \[batch, pos\]; got str"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_what_a_pass_cannot_do_is_refused(model, call, error, text):
    with pytest.raises(error, match=text):
        call(model)


# Return types and partial passes


@pytest.mark.parametrize(
    ("stop", "name"),
    [
        (0, "hook_embed"),
        (1, "blocks.0.hook_resid_post"),
        (-1, "blocks.1.hook_resid_post"),
        (3, "blocks.2.hook_resid_post"),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_pass_stops_before_a_layer_and_returns_the_stream(architecture, stop, name):
    model, ids = shared_model(architecture), random_ids()
    plain = plain_pass(model, ids).values
    stream, cache = model.run_with_cache(ids, stop_at_layer=stop)
    close(stream, plain[name])
    assert list(cache.keys()) == list(plain)[: list(plain).index(name) + 1]
    assert "logits" not in cache
    close(model.tree(ids), plain_pass(model, ids).logits)


@pytest.mark.parametrize("start", [0, 1, -1])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_pass_starts_at_a_layer_from_the_stream_that_enters_it(architecture, start):
    model, ids = shared_model(architecture, causal=True), random_ids()
    plain, layer = plain_pass(model, ids), start % 3
    stream = torch.randn_like(plain.values["hook_embed"])
    expected = plain_pass(model, ids, edits={f"blocks.{layer}.hook_resid_pre": lambda _: stream})
    logits, cache = model.run_with_cache(stream, start_at_layer=start)
    close(logits, expected.logits)
    names = list(expected.values)
    assert list(cache.keys()) == names[names.index(f"blocks.{layer}.hook_resid_pre") :]
    for name in cache:
        close(cache[name], expected.values[name])
    close(model.tree(ids), plain.logits)


def test_hooks_outside_a_partial_pass_are_not_called_and_raise_a_warning(model):
    seen = []
    hooks = [(name, lambda value, hook: seen.append(hook.name)) for name in ("embed.hook_out", "blocks.-1.hook_out")]
    with pytest.warns(UserWarning, match=r"'blocks\.2\.hook_resid_post' is outside layers 0 to 0"):
        model.run_with_hooks(random_ids(), fwd_hooks=hooks, stop_at_layer=1)
    assert seen == ["hook_embed"]
