"""Other noise levels, kept conditioning and clamped gates, against the same network in plain torch."""

import pytest
import torch
from dit_oracle import PARTS, PlainDit

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import ClampGates, ForceTime, FreezeCond

SETTINGS = {"gen_length": 8, "steps": 4, "record_sinks": False, "progress": False}
PROMPTS = torch.tensor([[3, 9, 4], [5, 5, 11]])


@pytest.fixture(scope="module", params=["duo", "sedd", "gidd"])
def timed(request, conformance):
    """A network that reads its noise level, as sinklens loads it and in plain torch."""
    folder = conformance / request.param
    return sinklens.load(folder, family=request.param), PlainDit(folder)


@pytest.fixture(scope="module", params=["mdlm", "bd3lm-owt"])
def untimed(request, conformance):
    return sinklens.load(conformance / request.param)


def watched(model, hooks):
    """A run, and its raw logits by step."""
    seen = {}

    def keep(value, hook):
        seen[hook.step] = value.clone()

    name = "denoise.hook_logits"
    run = sinklens.generate(model, PROMPTS, hooks=[*hooks, (name, keep)], seed=3, **SETTINGS)
    return run, seen


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=3e-5 * float(wanted.abs().max()), rtol=0)
    assert wanted.std() > 0.05


@torch.no_grad()
def check(network, hook, times=lambda run, step: run.time[:, step], edits=lambda run, step: {}):
    """Every step of a run under `hook` has the logits of the plain network; returns the run and its logits.

    Args:
        times: the noise levels that a step of a run reads.
        edits: what else is changed in its pass.
    """
    model, dit = network
    run, logits = watched(model, [hook])
    for step in range(run.steps_run):
        close(logits[step], dit(run.canvas[:, step], times(run, step), edits(run, step)).logits)
    return run, logits


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("given", [0.4, torch.tensor([0.2, 0.7])], ids=["one", "rows"])
def test_a_forced_time_is_read_at_its_steps_and_the_run_goes_on_from_what_follows(timed, given):
    hook, read = ForceTime(time=given, steps=[1, 2]), torch.as_tensor(given).expand(2)
    run, logits = check(timed, hook, lambda run, step: read if step in (1, 2) else run.time[:, step])
    other, unchanged = watched(timed[0], [])
    assert torch.equal(run.time, other.time)
    assert torch.equal(run.canvas[:, :2], other.canvas[:, :2])
    assert not torch.equal(logits[1], unchanged[1])


@pytest.mark.fast_cases(1)
def test_times_of_another_run_are_read_by_row_and_step(timed):
    times = watched(timed[0], [])[0].time.flip(1) * torch.tensor([[1.0], [0.5]])
    check(timed, ForceTime(time=times), lambda run, step: times[:, step])


@pytest.mark.fast_cases(1)
def test_conditioning_of_a_step_is_kept_by_the_later_ones(timed):
    check(timed, FreezeCond(of_step=1), lambda run, step: run.time[:, min(step, 1)])


def modulated(dit, layer, cond):
    """Edits after which a layer is modulated by `cond`."""
    made = cond @ dit.weights[f"blocks.{layer}.adaLN_modulation.weight"].T
    parts = (made + dit.weights[f"blocks.{layer}.adaLN_modulation.bias"]).chunk(6, dim=-1)
    pairs = zip(PARTS, parts, strict=True)
    return {f"blocks.{layer}.adaln.{name}": lambda value, part=part: part.expand_as(value) for name, part in pairs}


@torch.no_grad()
@pytest.mark.fast_cases(1)
def test_frozen_layers_are_modulated_by_the_given_vector_and_the_others_by_the_time(timed):
    model, dit = timed
    frozen = dit.condition(torch.tensor([0.3, 0.9]))
    steps = torch.stack([frozen] * SETTINGS["steps"] + [frozen * 0.5], dim=1)  # [batch, step, d_cond]
    hook = FreezeCond(cond=steps, layers=[-1])
    run, _ = check(timed, hook, edits=lambda run, step: modulated(dit, dit.layers - 1, steps[:, step]))
    ids = run.canvas[:, 1]
    with model.hooks(fwd_hooks=FreezeCond(cond=frozen[0], layers=[0]).hooks_for(model)):
        found = model(ids, time=0.6)
    close(found, dit(ids, 0.6, modulated(dit, 0, frozen[:1])).logits)


def gates(dit, parts, change):
    return {f"blocks.{layer}.adaln.hook_{part}_gate": change for layer in range(dit.layers) for part in parts}


GATES = {
    "attention of a layer off": (
        ClampGates(of="attn", layers=[0]),
        lambda dit: {"blocks.0.adaln.hook_attn_gate": torch.zeros_like},
    ),
    "MLPs at a half": (
        ClampGates(of="mlp", at=0.5),
        lambda dit: gates(dit, ["mlp"], lambda gate: torch.full_like(gate, 0.5)),
    ),
    "limited": (
        ClampGates(at=0.02, mode="limit"),
        lambda dit: gates(dit, ["attn", "mlp"], lambda gate: gate.clamp(-0.02, 0.02)),
    ),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("case", GATES)
def test_gates_are_set_and_limited_in_the_named_layers_alone(timed, case):
    hook, change = GATES[case]
    check(timed, hook, edits=lambda run, step: change(timed[1]))


def test_gates_of_an_untimed_network_are_clamped_and_its_steps_respected(conformance):
    model, dit = sinklens.load(conformance / "mdlm"), PlainDit(conformance / "mdlm")
    gate = torch.linspace(-1, 1, model.cfg.d_model)
    edits = {"blocks.1.adaln.hook_mlp_gate": lambda value: gate.expand_as(value)}
    hook = ClampGates(layers=[1], of="mlp", at=gate, steps=[0])
    check((model, dit), hook, lambda run, step: 0.0, lambda run, step: edits if step == 0 else {})


def test_a_time_that_an_untimed_network_is_given_is_reported(untimed):
    ids = torch.full((1, 4), untimed.mask_token_id)
    with pytest.warns(UserWarning, match="this network is untimed: it reads noise level 0 whatever it gets"):
        given = untimed(ids, time=0.5)
    assert torch.equal(given, untimed(ids))
    for hook in (ForceTime(time=0.5), FreezeCond(of_step=0)):
        with pytest.raises(SettingError, match=f"is untimed: it reads time 0 at every step, so {type(hook).__name__}"):
            hook.hooks_for(untimed)


REFUSED = [
    (
        lambda timed, other: ForceTime(time=0.5).hooks_for(other),
        "not conditioned on a noise level; leave ForceTime out",
    ),
    (lambda timed, other: ClampGates().hooks_for(other), "not conditioned on a noise level; leave ClampGates out"),
    (lambda timed, other: ForceTime(time=torch.tensor([0.5, float("nan")])), "finite numbers of at least 0"),
    (
        lambda timed, other: ForceTime(time=torch.zeros(1, 1, 1)),
        r"the axes \[batch\] or \[batch, step\]; got shape \[1, 1, ",
    ),
    (lambda timed, other: ForceTime(time=0.5, layers=[0]), "does not support layers="),
    (lambda timed, other: ClampGates(positions=[0]), "does not support positions="),
    (lambda timed, other: FreezeCond(), "pass either cond=, a vector for each row, or of_step="),
    (lambda timed, other: FreezeCond(of_step=0).hooks_for(timed), "which a single pass has not; pass cond="),
    (lambda timed, other: FreezeCond(cond=torch.zeros(3)).hooks_for(timed), "cond must end with an axis of"),
    (lambda timed, other: watched(timed, [FreezeCond(of_step=9)]), "step 9 does not exist"),
    (
        lambda timed, other: watched(timed, [ForceTime(time=torch.ones(3))]),
        "time has 3 rows, but the pass has 2; pass one",
    ),
    (
        lambda timed, other: watched(timed, [ForceTime(time=torch.ones(2, 2))]),
        "time has 2 steps, and the run is at step 2",
    ),
    (lambda timed, other: ClampGates(at=-1.0, mode="limit"), "a limit must not be negative"),
    (lambda timed, other: ClampGates(at=torch.zeros(3)).hooks_for(timed), "at must be one number, or"),
    (lambda timed, other: ClampGates(of="all"), "of must be one of attn, mlp, both; got 'all'"),
    (lambda timed, other: ClampGates(mode="max"), "mode must be one of set, limit; got 'max'"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("timed", ["duo"], indirect=True)
@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_has_no_meaning_is_refused(timed, tiny_llada, call, text):
    with pytest.raises(SettingError, match=text):
        call(timed[0], tiny_llada)
