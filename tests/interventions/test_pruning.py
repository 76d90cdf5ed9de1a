"""The weights that go are those that a naive loop, and a planted truth, name; and as many at random."""

import pytest
import torch
from building import random_dit, random_hf, random_ids, random_model
from watching import LONG, PADDED, entered, short

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import input_norms
from sinklens.interventions import PruneWeights
from sinklens.interventions.pruning import InputNorms
from sinklens.interventions.weights import WeightMatrix
from sinklens.sinks import MeanPlusStd

MLP = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def plain_run(worded):
    """A run without recorded sinks, and the norms of its inputs."""
    run = sinklens.generate(worded(), LONG, **short(worded(), {}))
    return run, input_norms(run)


def looped(rows, share, norms=None):
    """Row by row: the inputs in the order of their scores, the first of equal ones first, and the lowest set to 0."""
    found = rows.clone()
    for row in range(len(rows)):
        score = [abs(float(rows[row, at])) * (1 if norms is None else float(norms[at])) for at in range(rows.shape[1])]
        for at in sorted(range(rows.shape[1]), key=lambda at: score[at])[: round(share * rows.shape[1])]:
            found[row, at] = 0
    return found


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("seed", range(20))
def test_the_lowest_scores_of_each_row_go_as_in_a_loop(seed):
    random = torch.Generator().manual_seed(seed)
    rows = torch.randint(-3, 4, (1 + seed % 4, 7), generator=random).float()  # many equal scores
    norms, share = torch.randint(0, 5, (7,), generator=random).float(), float(torch.rand((), generator=random))
    matrix = WeightMatrix("one", rows, torch.nn.Linear(7, len(rows)), True)
    before = rows.clone()
    assert torch.equal(PruneWeights(share).edited(None, matrix), looped(rows, share))
    wanda = PruneWeights(share, "wanda", norms=InputNorms({"one": norms}, 1.0))
    assert torch.equal(wanda.edited(None, matrix), looped(rows, share, norms))
    assert torch.equal(rows, before)


def test_a_run_has_the_weights_of_a_loop_and_gives_them_back(model):
    norms = input_norms(sinklens.generate(model, PADDED, **short(model, {})))
    before = {name: value.clone() for name, value in model.tree.hf.state_dict().items()}
    seen = {}

    def keep(ids, hook):
        seen.update({name: value.clone() for name, value in model.tree.hf.state_dict().items()})

    hooks = [PruneWeights(0.6, "wanda", norms=norms, layers=[0, 1]), ("denoise.hook_canvas", keep)]
    sinklens.generate(model, LONG, hooks=hooks, **short(model, {}))
    pruned = [name for name in before if not torch.equal(seen[name], before[name])]
    assert len(pruned) == 14
    for name in pruned:
        assert torch.equal(seen[name], looped(before[name], 0.6, norms.values[name]))
    assert all(torch.equal(value, before[name]) for name, value in model.tree.hf.state_dict().items())


def test_random_removes_as_many_by_its_seed_alone():
    model = random_model()
    weights = [model.tree.hf.model.layers[layer].mlp.down_proj.weight for layer in (0, 1)]

    def gone(seed, **places):
        with PruneWeights(0.35, "random", seed=seed, **places).applied(model):
            return [weight.detach() == 0 for weight in weights]

    first, again, other, alone = gone(1), gone(1), gone(2), gone(1, layers=[1])
    assert all((part.sum(dim=1) == 14).all() for part in first)  # 0.35 of 40 inputs
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[1], alone[1])
    assert not alone[0].any()


def test_stacked_experts_are_pruned_expert_by_expert_and_wanda_refuses_them():
    model = random_model("qwen3_moe")
    experts = model.tree.hf.model.layers[1].mlp.experts
    before = experts.gate_up_proj.detach().clone()
    with PruneWeights(0.5).applied(model):
        for expert, rows in enumerate(before):
            assert torch.equal(experts.gate_up_proj[expert], looped(rows, 0.5))
    norms = input_norms(sinklens.generate(model, random_ids(), gen_length=4, steps=2, block_length=4, progress=False))
    with pytest.raises(SettingError, match=r"norms has no inputs of model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        PruneWeights(0.5, "wanda", norms=norms).applied(model).__enter__()
    assert torch.equal(experts.gate_up_proj, before)
    with PruneWeights(0.5, "wanda", norms=norms, layers=[0]).applied(model):  # its MLP is dense
        assert float((model.tree.hf.model.layers[0].mlp.down_proj.weight == 0).float().mean()) == 0.5


def sums(model, run, steps, counts):
    """Norms from the points that matrices read, one position at a time: of the query's and the down projection."""
    total = {"self_attn.q_proj": 0.0, "mlp.down_proj": 0.0}
    for step in steps:
        ids, real = entered(run, step)
        _, cache = model.run_with_cache(ids, attention_mask=real)
        layer = model.tree.hf.model.layers[1]
        read = {
            "self_attn.q_proj": cache["blocks.1.ln1.hook_normalized"] * layer.input_layernorm.weight,
            "mlp.down_proj": cache["blocks.1.mlp.hook_post"],
        }
        for name, x in read.items():
            for row in range(len(ids)):
                for at in range(ids.shape[1]):
                    if real[row, at]:
                        total[name] = total[name] + (float(counts(row, step, at)) * x[row, at]) ** 2
    return {f"model.layers.1.{name}.weight": value.detach().sqrt() for name, value in total.items()}


@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("qwen3", True)])
def test_norms_are_those_of_a_loop_over_positions_without_padding(model):
    run = sinklens.generate(model, PADDED, **short(model, {}))
    found = input_norms(run, steps=[0, -1, 99])
    steps = [0, run.steps_run - 1]
    for name, wanted in sums(model, run, steps, lambda *place: run.active[place[0], place[1]]).items():
        torch.testing.assert_close(found.values[name], wanted, rtol=1e-4, atol=1e-4)
    assert found.positions == sum(int((entered(run, step)[1] & run.active[:, [step]]).sum()) for step in steps)


def test_sinks_count_by_one_minus_their_strength_and_shuffled_ones_elsewhere(model):
    run = sinklens.generate(model, PADDED, **short(model, {"record_sinks": True}))
    sinks = MeanPlusStd(k=0.5)
    weight = sinks.strength(run.sinks).isel(layer=0, head=0)

    found = input_norms(run, steps=[1, 2], without=sinks)
    for name, wanted in sums(model, run, [1, 2], lambda row, step, at: 1 - weight[row, step, at]).items():
        torch.testing.assert_close(found.values[name], wanted, rtol=1e-4, atol=1e-4)
    plain, moved, again = (
        input_norms(run, steps=[1, 2], **how)
        for how in ({}, {"without": sinks, "shuffled": 0}, {"without": sinks, "shuffled": 0})
    )
    assert found.positions == pytest.approx(moved.positions, rel=1e-5)
    assert found.positions < plain.positions
    assert not torch.allclose(moved.values[MLP], found.values[MLP])
    assert torch.equal(moved.values[MLP], again.values[MLP])
    assert bool((moved.values[MLP] < plain.values[MLP]).all())


def test_a_planted_sink_decides_which_weights_go(worded):
    """Only position 2 uses input 7; scaled down as a sink, its weights go first."""
    own = sinklens.load(random_hf(), tokenizer=worded().tokenizer)
    run = sinklens.generate(own, [LONG], **short(own, {"record_sinks": True}))
    run.sinks.data["score"][:] = 0.5
    run.sinks.data["score"][..., 2] = 200.0

    def plant(module, inputs):
        x = inputs[0].clone()
        x[..., 7] = 0.0
        x[:, 2, 7] = 20.0
        return (x,)

    projection = own.tree.hf.model.layers[1].mlp.down_proj
    projection.weight.data[:] = 1.0
    handle = projection.register_forward_pre_hook(plant)
    norms, without, moved = (
        input_norms(run, **how) for how in ({}, {"without": MeanPlusStd()}, {"without": MeanPlusStd(), "shuffled": 3})
    )
    handle.remove()
    for found, kept in ((norms, True), (moved, True), (without, False)):
        with PruneWeights(0.5, "wanda", norms=found).applied(own):
            assert bool((projection.weight[:, 7] != 0).all()) == kept
            assert float((projection.weight == 0).float().mean()) == 0.5


def test_several_runs_add_up_and_conditioned_matrices_have_norms(model):
    runs = [sinklens.generate(model, prompt, **short(model, {})) for prompt in PADDED]
    one, other, both = input_norms(runs[0]), input_norms(runs[1]), input_norms(runs)
    torch.testing.assert_close(both.values[MLP] ** 2, one.values[MLP] ** 2 + other.values[MLP] ** 2)
    run = sinklens.generate(random_dit("sedd"), [[1, 2, 3]], gen_length=4, steps=2, progress=False)
    found = input_norms(run)
    assert (len(found.values), found.values["model.layers.1.modulation.weight"].shape) == (14, (6,))
    assert repr(found) == f"InputNorms(14 matrices, {7 * run.steps_run}.0 positions)"


REFUSED = [
    *(
        (lambda run, norms, share=share: PruneWeights(share), "share must be a number from 0 to 1; got")
        for share in (-0.1, 1.5, True, "half")
    ),
    (lambda run, norms: PruneWeights(0.5, "wandb"), "score must be one of magnitude, wanda, random; got 'wandb'"),
    (lambda run, norms: PruneWeights(0.5, "wanda"), r"score='wanda' and norms=.* belong together"),
    (lambda run, norms: PruneWeights(0.5, "random", norms=norms), r"score='wanda' and norms=.* belong together"),
    (
        lambda run, norms: (
            PruneWeights(0.5, "wanda", norms=norms).applied(random_model(intermediate_size=48)).__enter__()
        ),
        r"norms has no inputs of .* with its size",
    ),
    (
        lambda run, norms: input_norms(run, steps=[7, 9]),
        r"no run reached any of the steps \[7, 9\]; the longest has 4 steps",
    ),
    (lambda run, norms: input_norms([]), "input_norms needs at least one run"),
    (lambda run, norms: input_norms(run, without=MeanPlusStd()), "without= reads the recorded sinks"),
    (lambda run, norms: input_norms(run, shuffled=1), "shuffled= moves the sinks of without="),
    (lambda run, norms: input_norms(run, without=0.5), r"without must be MeanPlusStd\(\.\.\.\)"),
    (
        lambda run, norms: input_norms(
            [run, sinklens.generate(random_model(), [[1, 2]], gen_length=4, steps=2, progress=False)]
        ),
        "all runs must be of one loaded model",
    ),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_settings_that_make_no_sense_are_refused(plain_run, call, text):
    with pytest.raises(SettingError, match=text):
        call(*plain_run)
