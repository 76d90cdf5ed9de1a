"""Other noise levels, kept conditioning and clamped gates, against the same network in plain torch."""

import pytest
import torch
from torch.nn import functional as F

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import ClampGates, ForceTime, FreezeCond
from sinklens.model import Model

SETTINGS = {"gen_length": 8, "steps": 4, "record_sinks": False, "progress": False}
PROMPTS = torch.tensor([[3, 9, 4], [5, 5, 11]])


@pytest.fixture(scope="module", params=["duo", "sedd", "gidd"])
def timed(request, conformance) -> Model:
    return sinklens.load(conformance / request.param, family=request.param)


@pytest.fixture(scope="module", params=["mdlm", "bd3lm-owt"])
def untimed(request, conformance) -> Model:
    return sinklens.load(conformance / request.param)


def plain(model, ids, conds, final, gates=lambda layer, part, gate: gate):
    """Logits of a DiT, written out: `conds` is the conditioning of each layer, [layer, batch, d_cond]."""
    base, heads = model.hf.model, model.cfg.n_heads
    x, width = base.embed_tokens(ids), model.cfg.d_head
    half = torch.arange(0, width, 2, dtype=torch.float32)
    angles = torch.arange(ids.shape[1])[:, None] * 10000.0 ** (-half / width)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotated(y):
        return y * cos + torch.cat([-y[..., width // 2 :], y[..., : width // 2]], dim=-1) * sin

    def normed(norm, y):
        mean, variance = y.mean(dim=-1, keepdim=True), y.var(dim=-1, unbiased=False, keepdim=True)
        return (y - mean) / (variance + 1e-5).sqrt() * norm.weight

    for number, layer in enumerate(base.layers):
        made = F.linear(conds[number], layer.modulation.weight, layer.modulation.bias)
        shift, scale, gate, shift_2, scale_2, gate_2 = made[:, None].chunk(6, dim=-1)
        read = normed(layer.input_layernorm, x) * (1 + scale) + shift
        attn = layer.self_attn
        q, k, v = (
            (read @ one.weight.T).unflatten(-1, (heads, width)).transpose(1, 2)
            for one in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        pattern = (rotated(q) @ rotated(k).transpose(-1, -2) / width**0.5).softmax(dim=-1)
        x = x + gates(number, "attn", gate) * ((pattern @ v).transpose(1, 2).flatten(2) @ attn.o_proj.weight.T)
        read = normed(layer.post_attention_layernorm, x) * (1 + scale_2) + shift_2
        x = x + gates(number, "mlp", gate_2) * layer.mlp.down_proj(F.gelu(layer.mlp.up_proj(read), approximate="tanh"))
    shift, scale = F.linear(final, base.modulation.weight, base.modulation.bias)[:, None].chunk(2, dim=-1)
    return (normed(base.norm, x) * (1 + scale) + shift) @ model.hf.lm_head.weight.T + model.hf.lm_head.bias


def cond_of(model, times):
    """The conditioning of each row, from the definition."""
    embed = model.hf.model.time_embed
    angles = torch.as_tensor(times)[:, None] * 10000.0 ** (-torch.arange(128) / 128)
    waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
    hidden = F.silu(F.linear(waves, embed.in_proj.weight, embed.in_proj.bias))
    return F.silu(F.linear(hidden, embed.out_proj.weight, embed.out_proj.bias))


def same_everywhere(model, ids, times, **more):
    cond = cond_of(model, times)
    return plain(model, ids, [cond] * model.cfg.n_layers, cond, **more)


def watched(model, hooks):
    """A run, and its raw logits by step."""
    seen = {}

    def keep(value, hook):
        seen[hook.step] = value.clone()

    name = "denoise.hook_logits"
    run = sinklens.generate(model, PROMPTS, hooks=[*hooks, (name, keep)], seed=3, **SETTINGS)
    return run, seen


def close(found, wanted):
    assert (found - wanted).abs().max() < 2e-4
    assert wanted.std() > 0.05


def check(model, hook, times, gates=lambda layer, part, gate: gate):
    """Every step of a run under `hook` has the logits of the plain network; returns the run and its logits.

    Args:
        times: the noise levels that a step of a run reads.
    """
    run, logits = watched(model, [hook])
    for step in range(run.steps_run):
        close(logits[step], same_everywhere(model, run.canvas[:, step], times(run, step), gates=gates))
    return run, logits


@torch.no_grad()
@pytest.mark.parametrize("given", [0.4, torch.tensor([0.2, 0.7])], ids=["one", "rows"])
def test_a_forced_time_is_read_at_its_steps_and_the_run_goes_on_from_what_follows(timed, given):
    hook = ForceTime(time=given, steps=[1, 2])
    read = torch.as_tensor(given).expand(2)
    run, logits = check(timed, hook, lambda run, step: read if step in (1, 2) else run.time[:, step])
    other, unchanged = watched(timed, [])
    assert torch.equal(run.time, other.time)
    assert torch.equal(run.canvas[:, :2], other.canvas[:, :2])
    assert not torch.equal(logits[1], unchanged[1])


@torch.no_grad()
def test_times_of_another_run_are_read_by_row_and_step(timed):
    times = watched(timed, [])[0].time.flip(1) * torch.tensor([[1.0], [0.5]])
    check(timed, ForceTime(time=times), lambda run, step: times[:, step])


@torch.no_grad()
def test_conditioning_of_a_step_is_kept_by_the_later_ones(timed):
    check(timed, FreezeCond(of_step=1), lambda run, step: run.time[:, min(step, 1)])


@torch.no_grad()
def test_frozen_layers_are_modulated_by_the_given_vector_and_the_others_by_the_time(timed):
    frozen = cond_of(timed, torch.tensor([0.3, 0.9]))
    steps = torch.stack([frozen] * SETTINGS["steps"] + [frozen * 0.5], dim=1)  # [batch, step, d_cond]
    last = timed.cfg.n_layers - 1
    run, logits = watched(timed, [FreezeCond(cond=steps, layers=[-1])])
    for step in range(run.steps_run):
        now = cond_of(timed, run.time[:, step])
        close(logits[step], plain(timed, run.canvas[:, step], [now] * last + [steps[:, step]], now))
    ids = run.canvas[:, 1]
    with timed.hooks(fwd_hooks=FreezeCond(cond=frozen[0], layers=[0]).hooks_for(timed)):
        found = timed(ids, time=0.6)
    now = cond_of(timed, torch.tensor([0.6, 0.6]))
    close(found, plain(timed, ids, [frozen[:1], *[now] * last], now))


GATES = {
    "attention of a layer off": (
        ClampGates(of="attn", layers=[0]),
        lambda layer, part, gate: gate * (0 if (layer, part) == (0, "attn") else 1),
    ),
    "MLPs at a half": (
        ClampGates(of="mlp", at=0.5),
        lambda layer, part, gate: gate * 0 + 0.5 if part == "mlp" else gate,
    ),
    "limited": (ClampGates(at=0.02, mode="limit"), lambda layer, part, gate: gate.clamp(-0.02, 0.02)),
}


@torch.no_grad()
@pytest.mark.parametrize("case", GATES)
def test_gates_are_set_and_limited_in_the_named_layers_alone(timed, case):
    hook, change = GATES[case]
    check(timed, hook, lambda run, step: run.time[:, step], change)


@torch.no_grad()
def test_gates_of_an_untimed_network_are_clamped_and_its_steps_respected(conformance):
    model = sinklens.load(conformance / "mdlm")
    gate = torch.linspace(-1, 1, model.cfg.d_model)
    run, logits = watched(model, [ClampGates(layers=[1], of="mlp", at=gate, steps=[0])])
    for step in range(run.steps_run):

        def change(layer, part, value, step=step):
            return gate.expand_as(value) if (step, layer, part) == (0, 1, "mlp") else value

        close(logits[step], same_everywhere(model, run.canvas[:, step], torch.zeros(2), gates=change))


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
        call(timed, tiny_llada)
