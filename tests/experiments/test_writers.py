"""Parts of a score, against a plain pass that forms the key and the query of every writer explicitly."""

import pytest
import torch
from building import VARIANTS as MODELS
from building import plain_pass, random_model, shared_model
from dit_oracle import PlainDit, rotated

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import write_attribution

PROMPTS, DIT_PROMPTS = [[3, 17, 5, 44, 9], [21, 8]], [[5, 9, 13], [8, 2, 4]]
ROW, STEP, KEY = 1, 2, 1


def run_of(model, prompts=PROMPTS):
    return sinklens.generate(model, prompts, gen_length=4, **{} if model.causal else {"steps": 4})


def writes(values, layer):
    """What each head, each MLP and the embedding wrote before `layer`, [pos, d_model], by name."""
    found = {"embed": values["hook_embed"][0]}
    for one in range(layer):
        results = values[f"blocks.{one}.attn.hook_result"][0].unbind(1)
        found |= {f"L{one}H{head}": result for head, result in enumerate(results)}
        found[f"{one}_mlp_out"] = values[f"blocks.{one}.hook_mlp_out"][0]
    return found


def plain_parts(model, values, layer, letter, head):
    """What each writer adds to the rotated queries or keys of a head, [pos, d_head], by name."""
    config, block = model.tree.hf.config, model.tree.hf.model.layers[layer]
    linear, norm = getattr(block.self_attn, f"{letter}_proj"), getattr(block.self_attn, f"{letter}_norm", None)
    rows = slice(head * model.cfg.d_head, (head + 1) * model.cfg.d_head)
    size = int(model.cfg.d_head * config.rope_parameters.get("partial_rotary_factor", 1))
    places = torch.arange(len(values["hook_embed"][0]))
    angle = places[:, None] * config.rope_parameters["rope_theta"] ** (-torch.arange(size // 2) / (size // 2))
    scale = values[f"blocks.{layer}.ln1.hook_scale"][0]

    def turned(part):
        if norm is not None:
            raw = values[f"blocks.{layer}.attn.hook_{letter}"][0, :, head]
            part = part / (raw.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight
        first, second, rest = part[:, : size // 2], part[:, size // 2 : size], part[:, size:]
        pair = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
        return torch.cat([*pair, rest], dim=-1)

    biases = [model.tree.hf.model.layers[one].self_attn.o_proj.bias for one in range(layer)]
    bias = sum((one for one in biases if one is not None), torch.zeros(model.cfg.d_model))
    found = writes(values, layer) | {"bias": bias.expand(len(places), -1)}
    found = {
        name: turned(x / scale * block.input_layernorm.weight @ linear.weight[rows].T) for name, x in found.items()
    }
    own = torch.zeros(model.cfg.d_head) if linear.bias is None else linear.bias[rows]
    return found | {"own_bias": turned(own.expand(len(places), -1))}


def modulated_parts(dit, values, layer, letter, head):
    """The same of a network whose norms subtract the mean and are scaled and shifted by the noise level."""
    at = f"blocks.{layer}"
    shift, scale = (values[f"{at}.adaln.hook_attn_{what}"] for what in ("shift", "scale"))
    matrix = dict(zip("qkv", dit.weights[f"{at}.attn_qkv.weight"].chunk(3), strict=True))[letter]

    def projected(x):
        return rotated((x @ matrix.T).unflatten(-1, (dit.heads, -1))[None])[0, :, head]

    def normed(x):
        x = (x - x.mean(-1, keepdim=True)) / values[f"{at}.ln1.hook_scale"][0]
        return x * dit.weights[f"{at}.norm1.weight"] * (1 + scale)

    found = {name: projected(normed(write)) for name, write in writes(values, layer).items()}
    return found | {"own_bias": projected(shift.expand_as(values["hook_embed"][0]))}


CASES = [(kind, *place) for kind in MODELS for place in ((2, 4, False), (1, 1, True), (0, 5, False))]
CASES += [(kind, *place) for kind in ("mdlm", "duo", "gidd") for place in ((2, 0, False), (1, 1, True))]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("kind", "layer", "head", "weighted"), CASES)
@pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")
@torch.no_grad()
def test_parts_are_those_of_a_plain_pass_and_add_up_to_the_score(conformance, kind, layer, head, weighted):
    model = MODELS[kind]() if kind in MODELS else sinklens.load(conformance / kind)
    run = run_of(model, PROMPTS if kind in MODELS else DIT_PROMPTS)
    pad, canvas = int((~run.real[ROW]).sum()), run.canvas[ROW, STEP][run.real[ROW]]
    ids = canvas[canvas >= 0][None, : 2 + STEP] if model.causal else canvas[None]
    source = model if kind in MODELS else PlainDit(conformance / kind)
    passed = plain_pass(model, ids) if kind in MODELS else source(ids, 0.0 if run.time is None else run.time[ROW, STEP])
    values, parts_of = passed.values, plain_parts if kind in MODELS else modulated_parts
    sides = {}
    for side, letter, other in (("from_key", "k", "q"), ("from_query", "q", "k")):
        here, there = values[f"blocks.{layer}.attn.hook_{letter}"], values[f"blocks.{layer}.attn.hook_rot_{other}"][0]
        heads = values[f"blocks.{layer}.attn.hook_z"].shape[2]
        parts = parts_of(source, values, layer, letter, head * here.shape[2] // heads)
        there = there[:, head * there.shape[1] // heads] / there.shape[-1] ** 0.5
        sides[side] = {name: (there @ x.T if letter == "k" else x @ there.T) for name, x in parts.items()}
    scores = values[f"blocks.{layer}.attn.hook_attn_scores"][0, head]
    seen = scores > -torch.inf
    share = (seen[:, KEY] & (seen.sum(1) > 1)) * (scores.softmax(-1)[:, KEY] if weighted else 1.0)
    for query in (None, len(scores) - 1):
        rows = share if query is None else torch.eye(len(scores))[query]
        alone = torch.eye(len(scores))[KEY].expand_as(scores)
        others = seen & (alone == 0)
        excess = alone - others / others.sum(1, keepdim=True).clamp(min=1)
        place = (None if query is None else query + pad, KEY + pad)
        table = write_attribution(run, STEP, layer, head, *place, row=ROW, weighted=weighted)
        assert table.attrs["key"] == KEY + pad
        for ending, weights in (("", alone), ("_excess", excess)):
            weights = weights * (rows / rows.sum())[:, None]
            total = float((weights * scores.masked_fill(~seen, 0)).sum())
            for side, parts in sides.items():
                expected = {name: float((weights * part).sum()) for name, part in parts.items()}
                found, size = table[side + ending].to_series(), sum(abs(part) for part in expected.values())
                assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-4 * size)
                assert found.sum() == pytest.approx(total, abs=1e-4 * size)
                assert abs(found["rest"]) < 1e-4 * size


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


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({"key": 0, "row": 1}, "position 0 does not exist at this step, is padding or is not decoded yet"),
        ({"query": 0, "key": 1}, "query 0 of the real tokens does not see key 1 and another key"),
        ({"layer": 3}, "layer 3 does not exist"),
    ],
)
def test_places_without_a_score_are_refused(place, text):
    with pytest.raises(SettingError, match=text):
        write_attribution(run_of(shared_model("qwen2", True)), **{"step": 1, "layer": 1, "head": 0} | place)
