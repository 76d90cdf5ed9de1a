"""Parts of a score, against a plain pass that forms the key and the query of every writer explicitly."""

import pytest
import torch
from building import plain_pass, random_model, shared_model

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import write_attribution

HEADS, KV_HEADS = 6, 2
PROMPTS = [[3, 17, 5, 44, 9], [21, 8]]


def with_biases():
    """A Llama whose attention has biases, that of the output included."""
    return random_model("llama", attention_bias=True)


def run_of(model):
    settings = {"steps": 3} if model.mask_token_id is not None and not model.config.is_causal else {}
    return sinklens.generate(model, PROMPTS, gen_length=4, record_sinks=False, **settings)


def writes(values, model, layer):
    """What each writer before `layer` wrote, [pos, d_model], by name."""
    found = {"embed": values["hook_embed"][0]}
    bias = torch.zeros(model.cfg.d_model)
    for one in range(layer):
        for head in range(HEADS):
            found[f"L{one}H{head}"] = values[f"blocks.{one}.attn.hook_result"][0, :, head]
        found[f"{one}_mlp_out"] = values[f"blocks.{one}.hook_mlp_out"][0]
        o = model.tree.hf.model.layers[one].self_attn.o_proj
        bias = bias if o.bias is None else bias + o.bias
    return found | {"bias": bias.expand_as(found["embed"])}


def rotated(model, letter, layer, head, write, values):
    """The rotated part of a query or key that is due to `write`, and that due to the bias, [pos, d_head]."""
    config, attn = model.tree.hf.config, model.tree.hf.model.layers[layer].self_attn
    d_head = model.cfg.d_head
    rows = slice(head * d_head, (head + 1) * d_head)
    linear = getattr(attn, f"{letter}_proj")
    normed = (
        write / values[f"blocks.{layer}.ln1.hook_scale"][0] * model.tree.hf.model.layers[layer].input_layernorm.weight
    )
    bias = torch.zeros(d_head) if linear.bias is None else linear.bias[rows]
    parts = [normed @ linear.weight[rows].T, bias.expand(len(write), -1)]
    norm = getattr(attn, f"{letter}_norm", None)
    if norm is not None:
        raw = values[f"blocks.{layer}.attn.hook_{letter}"][0, :, head]
        scale = (raw.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        parts = [part / scale * norm.weight for part in parts]
    size = int(d_head * config.rope_parameters.get("partial_rotary_factor", 1))
    angle = torch.arange(len(write))[:, None] * config.rope_parameters["rope_theta"] ** (
        -torch.arange(size // 2) / (size // 2)
    )
    turned = []
    for part in parts:
        first, second, rest = part[:, : size // 2], part[:, size // 2 : size], part[:, size:]
        pair = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
        turned.append(torch.cat([*pair, rest], dim=-1))
    return turned


def naive(model, ids, layer, head, weights):
    """Parts of Σ weights[i, j] · score[i, j] for keys and queries, by name."""
    values = plain_pass(model, ids[None]).values
    group = head // (HEADS // KV_HEADS)
    query, key = values[f"blocks.{layer}.attn.hook_rot_q"][0, :, head], values[f"blocks.{layer}.attn.hook_rot_k"][0]
    key = key[:, head if key.shape[1] == HEADS else group]
    found = {"from_key": {}, "from_query": {}}
    scale = model.cfg.d_head**0.5
    for name, write in writes(values, model, layer).items():
        k, b_k = rotated(model, "k", layer, group, write, values)
        q, b_q = rotated(model, "q", layer, head, write, values)
        found["from_key"] |= {name: float((weights * (query @ k.T)).sum() / scale)}
        found["from_query"] |= {name: float((weights * (q @ key.T)).sum() / scale)}
        found["from_key"]["own_bias"] = float((weights * (query @ b_k.T)).sum() / scale)
        found["from_query"]["own_bias"] = float((weights * (b_q @ key.T)).sum() / scale)
    return found


MODELS = {
    "biases": with_biases,
    "grouped": lambda: shared_model("qwen2", True),
    "normed": lambda: shared_model("qwen3"),
    "experts": lambda: shared_model("glm4_moe"),
}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("layer", "head", "weighted"), [(2, 4, False), (1, 1, True), (0, 5, False)])
def test_parts_are_those_of_a_plain_pass_and_add_up_to_the_score(kind, layer, head, weighted):
    model = MODELS[kind]()
    run, step = run_of(model), 2
    pad = int((~run.real[1]).sum())
    canvas = run.canvas[1, step][run.real[1]]
    ids = canvas[canvas >= 0][: 2 + step] if model.config.is_causal else canvas
    scores = plain_pass(model, ids[None]).values[f"blocks.{layer}.attn.hook_attn_scores"][0, head]
    seen, key = scores > -torch.inf, 1
    attending = seen[:, key] & (seen.sum(1) > 1)
    share = attending * (scores.softmax(-1)[:, key] if weighted else 1.0)
    for query in (None, len(ids) - 1):
        rows = share if query is None else torch.eye(len(ids))[query]
        rows = (rows / rows.sum())[:, None]
        alone = torch.eye(len(ids))[key].expand_as(scores)
        others = seen & (alone == 0)
        excess = alone - others / others.sum(1, keepdim=True).clamp(min=1)
        table = write_attribution(
            run, step, layer, head, None if query is None else query + pad, key + pad, row=1, weighted=weighted
        )
        for ending, weights in (("", alone * rows), ("_excess", excess * rows)):
            for side, parts in naive(model, ids, layer, head, weights).items():
                found = table[side + ending].to_series()
                size = sum(abs(part) for part in parts.values())
                assert {name: found[name] for name in parts} == pytest.approx(parts, abs=1e-4 * size)
                total = float((weights * scores.masked_fill(~seen, 0)).sum())
                assert found.sum() == pytest.approx(total, abs=1e-4 * size)
                assert abs(found["rest"]) < 1e-4 * size
        assert table.attrs["key"] == key + pad


def test_writers_are_described_and_the_strongest_key_is_the_default():
    run = sinklens.generate(shared_model(), PROMPTS, gen_length=4, steps=3)
    table = write_attribution(run, 1, 2, 3)
    assert table.attrs["key"] == int(run.sinks.top(1)[0, 1, 2, 3, 0])
    frame = table.to_dataframe()
    assert list(frame[frame["kind"] == "mlp"].index) == ["0_mlp_out", "1_mlp_out"]
    assert frame.loc["L1H4", ["layer", "head"]].tolist() == [1, 4]
    assert table.attrs["query"] == -1


@pytest.mark.parametrize("normalizer", ["sigmoid", "off-by-one"])
@torch.no_grad()
def test_keys_and_weights_are_those_of_the_models_normalizer(normalizer):
    layer, head = 0, 5
    model = random_model("llama", sinklens_attention=normalizer)
    run = sinklens.generate(model, PROMPTS[:1], gen_length=4, steps=2)
    scores = plain_pass(model, run.canvas[:, 1]).values[f"blocks.{layer}.attn.hook_attn_scores"][0, head]
    pattern = {
        "sigmoid": torch.sigmoid(scores - torch.tensor(float(len(scores))).log()),
        "off-by-one": scores.exp() / (1 + scores.exp().sum(dim=1, keepdim=True)),
    }[normalizer]
    table = write_attribution(run, 1, layer, head, weighted=True)
    key = int(pattern.sum(dim=0).argmax())
    assert table.attrs["key"] == key == int(run.sinks.top(1)[0, 1, layer, head, 0])
    score = float((pattern[:, key] * scores[:, key]).sum() / pattern[:, key].sum())
    assert table.attrs["score"] == pytest.approx(score, abs=1e-4)
    softmax = scores.softmax(dim=-1)[:, key]
    assert abs(score - float((softmax * scores[:, key]).sum() / softmax.sum())) > 0.01


def test_places_without_a_score_are_refused():
    run = run_of(shared_model("qwen2", True))
    with pytest.raises(SettingError, match="position 0 does not exist at this step, is padding or is not decoded yet"):
        write_attribution(run, 1, 1, 0, key=0, row=1)
    with pytest.raises(SettingError, match="query 0 of the real tokens does not see key 1 and another key"):
        write_attribution(run, 1, 1, 0, query=0, key=1)
    with pytest.raises(SettingError, match="layer 3 does not exist"):
        write_attribution(run, 1, 3, 0)
