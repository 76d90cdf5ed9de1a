"""What samplers with a noise level show beside their canvases."""

import pytest
import torch

import sinklens
from sinklens.errors import ReadOnlyHookError
from sinklens.live import reading
from sinklens.live.execution import denoising, repeat
from sinklens.live.outcome import RunOutcome
from sinklens.live.spec import RunSpec

KINDS = {
    "mdlm": {}, "mdlm analytic": {"predictor": "analytic"}, "mdlm remdm": {"sampler": "remdm"}, "sedd": {},
    "bd3lm-owt": {}, "duo": {}, "gidd": {}, "gidd correction": {"sampler": "gidd-self-correction", "temperature": 1.0},
}  # fmt: skip
PROMPT = [161 % 150, 9, 13]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def model(kind, conformance):
    return sinklens.load(conformance / kind.split()[0], family="sedd" if kind == "sedd" else None)


@pytest.mark.fast_cases(4)
def test_confidence_is_the_networks_probability_of_the_drawn_token(kind, model):
    seen = {}

    def keep(value, hook):
        seen[hook.name.removeprefix("denoise."), hook.step] = value.clone()

    points = [f"denoise.hook_{name}" for name in ("logits", "candidates", "confidence", "canvas")]
    given = {"gen_length": 6, "seed": 3, "record_sinks": False} | KINDS[kind]
    run = sinklens.generate(model, [PROMPT], hooks=[(point, keep) for point in points], **given)
    assert torch.equal(run.canvas, sinklens.generate(model, [PROMPT], **given).canvas)
    for step in range(run.steps_run):
        logits, canvas = seen["hook_logits", step].clone(), seen["hook_canvas", step]
        if model.mask_token_id is not None:
            logits[..., model.mask_token_id] = -torch.inf
        probs = logits.double().softmax(dim=-1)
        if "remdm" in kind:  # a decided token predicts itself
            own = torch.nn.functional.one_hot(canvas, probs.shape[-1]).double()
            probs = torch.where((canvas == model.mask_token_id)[..., None], probs, own)
        expected = probs.gather(-1, seen["hook_candidates", step][..., None])[..., 0]
        found = seen["hook_confidence", step]
        shown = found > -torch.inf
        torch.testing.assert_close(found[shown], expected[shown], atol=1e-6, rtol=1e-5)
        drawn = torch.arange(canvas.shape[1]) >= 3 if "gidd" in kind or kind in ("duo", "mdlm remdm") else None
        undecided = canvas == model.mask_token_id
        if kind == "bd3lm-owt":
            first = int(undecided[0].nonzero()[0, 0]) // 4 * 4
            undecided[:, first + 4 :] = False
        assert torch.equal(shown[0], undecided[0] if drawn is None else drawn)


@pytest.mark.fast_cases(2)
def test_an_edit_of_a_confidence_that_decides_nothing_is_refused(kind, model):
    given = {"gen_length": 6} | KINDS[kind]
    half = ("denoise.hook_confidence", lambda value, hook: value * 0.5)
    if kind == "gidd correction":  # it keeps the most confident correction
        sinklens.generate(model, [PROMPT], hooks=[half], **given)
        return
    with pytest.raises(ReadOnlyHookError, match=r"hook_confidence decides nothing with this sampler"):
        sinklens.generate(model, [PROMPT], hooks=[half], **given)


@pytest.mark.fast_cases(2)
def test_the_lab_lists_the_proposals_of_a_step(kind, model):
    spec = RunSpec("", PROMPT, settings={"gen_length": 6} | {k: v for k, v in KINDS[kind].items() if k != "sampler"},
                   sampler=KINDS[kind].get("sampler"))  # fmt: skip
    run = denoising(spec, model)
    run.carry_out()
    outcome = RunOutcome.of(run.result())
    for step in (0, outcome.steps - 1):
        if outcome.undecided[step].any():
            found = reading.proposals(spec, outcome, model, step)
            assert sorted(found) == outcome.undecided[step].nonzero()[0].tolist()
            assert all(len(entry["proposals"]) == reading.LISTED for entry in found.values())
    assert torch.equal(repeat(spec, model, outcome).canvas[0], torch.from_numpy(outcome.canvas.astype(int)))
