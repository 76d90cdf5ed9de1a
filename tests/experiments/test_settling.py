"""When an answer is known: predictions against the logits of the run, and rules on predictions made by hand."""

import numpy as np
import pytest
import torch
import xarray as xr
from watching import PADDED, logits_of, short, watch

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import answer_emergence, early_exit, guesses, settling_steps, step_predictions


@pytest.mark.parametrize("architecture", ["llama", "dream"])
def test_predictions_are_those_of_the_logits_at_every_position(worded, architecture):
    seen = watch(worded(architecture), PADDED, points=["denoise.hook_logits"])
    found, chances = step_predictions(seen.run), logits_of(seen).softmax(dim=-1)
    best = chances.topk(2, dim=-1)
    real = seen.run.real.numpy()[:, None].repeat(seen.run.steps_run, 1)
    assert (found["token"].to_numpy()[real] == best.indices[..., 0].numpy()[real]).all()
    expected = {
        "probability": best.values[..., 0],
        "gap": best.values[..., 0] - best.values[..., 1],
        "entropy": torch.special.entr(chances).sum(dim=-1),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].to_numpy()[real], values.numpy()[real], atol=2e-4)
        assert np.isnan(found[name].to_numpy()[~real]).all()
    assert (found["token"].to_numpy()[~real] == -1).all()
    assert found["masked"].to_numpy().tolist() == (seen.run.undecided[:, :-1] & seen.run.real[:, None]).tolist()


def by_hand(token, decided, gap=None, entropy=None):
    """Predictions [step, pos] of one row without a prompt, whose positions are decided at the given steps."""
    token, decided = np.array([token]), np.array([decided])
    final = np.array([[token[0, min(step, token.shape[1] - 1), pos] for pos, step in enumerate(decided[0])]])
    masked = np.arange(token.shape[1])[None, :, None] <= decided[:, None]
    axes = ("batch", "step", "pos")
    numbers = {"gap": gap, "entropy": entropy}
    data = {name: (axes, np.array([value], dtype=float)) for name, value in numbers.items() if value is not None}
    data |= {"token": (axes, token), "masked": (axes, masked), "token_id": (axes, np.where(masked, 99, final[:, None]))}
    data |= {"final_token": (("batch", "pos"), final), "decided_step": (("batch", "pos"), decided)}
    return xr.Dataset(data | {"answer": ("pos", np.ones(token.shape[2], dtype=bool))}, {"step": range(token.shape[1])})


TOKENS = [[1, 7, 3], [1, 2, 4], [5, 2, 3], [5, 2, 3]]


def test_a_position_settles_after_its_last_other_prediction():
    found = by_hand(TOKENS, decided=[0, 3, 2])
    assert settling_steps(found).values.tolist() == [[0, 1, 2]]  # the first was decided before it changed
    late = found.assign(final_token=(("batch", "pos"), [[1, 9, 3]]))  # the sampler drew another token
    assert settling_steps(late).values.tolist() == [[0, 4, 2]]
    assert settling_steps(found.assign(answer=("pos", [False, True, True]))).values.tolist() == [[-1, 1, 2]]


class Words:
    """A stand-in for a run of one row: ids are their own text."""

    STANDS_FOR = sinklens.Generation

    def __init__(self, found, active=None):
        steps, length = found.sizes["step"], found.sizes["pos"]
        self.model = self.tokenizer = self
        self.name, self.eos_token_ids, self.prompt_length = "words", [8], 0
        self.settings = type("Settings", (), {"gen_length": length})
        self.canvas, self.steps_run = torch.zeros(1, steps + 1, length), steps
        self.active = torch.ones(1, steps, dtype=torch.bool) if active is None else torch.tensor([active])
        self.answers = [type("Answer", (), {"text": self.decode(found["final_token"].values[0].tolist())})]

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


def test_a_guess_fills_undecided_positions_and_ends_at_the_end_token():
    found = by_hand(TOKENS, decided=[0, 3, 2])
    assert guesses(Words(found), found) == [["1 7 3", "1 2 4", "1 2 3", "1 2 3"]]
    ends = by_hand([[1, 8, 3]], decided=[0, 0, 0])
    assert guesses(Words(ends), ends) == [["1"]]


def test_an_answer_emerges_where_its_guess_is_first_right_and_where_it_stays_so():
    found = by_hand([[1, 2], [1, 3], [1, 2], [1, 2]], decided=[3, 3])
    known = answer_emergence(Words(found), found, lambda row, text: text == "1 2")
    assert known["right"].values.tolist() == [[True, False, True, True]]
    assert (known["first"].item(), known["stable"].item(), known["final"].item()) == (0.0, 0.5, True)
    waits = answer_emergence(Words(found, [True, False, True, True]), found, lambda row, text: text == "1 2")
    assert (waits["first"].item(), waits["stable"].item()) == (0.0, 0.0)  # the guess of a step it waits is not its own
    never = answer_emergence(Words(found), found, lambda row, text: text == "7")
    assert np.isnan([never["first"].item(), never["stable"].item()]).all()


def test_early_exits_return_the_guess_of_the_step_at_which_their_rule_holds():
    gap = [[0.9, 0.2], [0.9, 0.6], [0.9, 0.9], [0.9, 0.9]]
    found = by_hand([[1, 5], [1, 3], [1, 2], [1, 2]], decided=[0, 3], gap=gap)
    right = lambda row, text: text == "1 2"  # noqa: E731
    by_gap = early_exit(Words(found), found, right, [0.1, 0.5, 0.8, 0.95])
    assert {name: by_gap[name].values[:, 0].tolist() for name in ("exit", "share", "right", "same")} == {
        "exit": [1, 2, 3, 4],
        "share": [0.25, 0.5, 0.75, 1.0],
        "right": [False, False, True, True],
        "same": [False, False, True, True],
    }
    assert by_gap["full"].item()


def test_autoregressive_runs_and_senseless_thresholds_are_refused(worded, unchecked):
    model = worded("llama", True)
    found, right = by_hand(TOKENS, decided=[0, 3, 2], gap=np.ones((4, 3))), lambda row, text: True
    written = sinklens.generate(model, PADDED, **short(model, {}))
    for call, match in [
        (lambda: step_predictions(written), "predicts only the next token at each step"),
        (lambda: early_exit(Words(found), found, right, [0.0]), "thresholds are above 0"),
        (lambda: early_exit(Words(found), found, right, 1.5), "thresholds are above 0"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=match):
            call()


@pytest.mark.extended
def test_the_planted_checkpoint_knows_its_answer_from_the_first_step_and_a_random_one_does_not(tmp_path, worded):
    from planted_model import planted_checkpoint

    run = sinklens.generate(
        sinklens.load(planted_checkpoint(tmp_path / "planted")), "Question: 1?", gen_length=8, steps=8, progress=False
    )
    found = step_predictions(run)
    assert (settling_steps(found).to_numpy()[:, run.prompt_length :] == 0).all()
    assert early_exit(run, found, lambda row, text: True)["same"].all()
    other = sinklens.generate(worded(), "w1 w2", gen_length=8, steps=8, progress=False)
    assert settling_steps(step_predictions(other)).to_numpy().max() > 0
