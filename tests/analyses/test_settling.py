"""The settling study reports what its functions find, for any batch."""

import numpy as np
import pytest

import sinklens
from sinklens.analyses.settling import GAPS, Settling
from sinklens.errors import SettingError
from sinklens.experiments import early_exit, settling_steps, step_predictions
from sinklens.tasks import held_out, read_answer

PROBLEMS = held_out(2)
PROMPTS = [problem.prompt for problem in PROBLEMS]


def test_the_tables_hold_what_early_exits_return(tiny_llada):
    found = Settling().run(tiny_llada, PROMPTS)
    data = found.measured["tiny-llada"]
    for number, problem in enumerate(PROBLEMS):
        run = sinklens.generate(tiny_llada, problem.prompt, progress=False)
        predictions = step_predictions(run)
        right = lambda row, text, wanted=problem.result: read_answer(text) == wanted  # noqa: E731
        assert data["right"][number] == (read_answer(run.text) == problem.result)
        settled = settling_steps(predictions).to_numpy()[0, run.prompt_length :]
        ahead = run.unmask_step[0, run.prompt_length :].numpy() - settled
        assert data["lead"][number] == pytest.approx(ahead.clip(min=0).mean() / run.steps_run)
        exits, measured = early_exit(run, predictions, right, GAPS), data.isel(prompt=number)
        np.testing.assert_allclose(measured["exit_share"], exits["share"][:, 0])
        np.testing.assert_array_equal(measured["exit_right"], exits["right"][:, 0])
    exits = found.tables["exits"].set_index(["measure", "threshold"])["estimate"]
    assert exits["exit_share", 0.9] == pytest.approx(float(data["exit_share"].sel(threshold=0.9).mean()))


def test_own_prompts_are_judged_by_their_expected_answers(tiny_llada):
    own = [f"{prompt} " for prompt in PROMPTS]  # not a shipped problem
    texts = [sinklens.generate(tiny_llada, prompt, gen_length=8, progress=False).text for prompt in own]
    expected = {own[0]: texts[0], own[1]: "another text"}
    data = Settling(answers=expected, settings={"gen_length": 8}).run(tiny_llada, own).measured["tiny-llada"]
    assert data["right"].to_numpy().tolist() == [1, 0]
    assert data["stable"].isnull().to_numpy().tolist() == [False, True]


def test_an_autoregressive_model_is_refused(tiny_llama):
    with pytest.raises(SettingError, match="settling cannot measure tiny-llama, an autoregressive model"):
        Settling().run(tiny_llama, PROMPTS)
