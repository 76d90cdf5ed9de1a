"""When is the answer to a word problem known, and what does stopping early cost? docs/papers/early-answers.md.

    python benchmarks/papers/early_answers.py [MODEL ...] [each=N] [SETTING=VALUE ...]

Three held-out problems of each of the seven templates. For each model: the share of problems whose answer is right when
all steps run; when undecided positions are filled with their predictions after half of the steps, and before the first;
the share of half-time answers whose number was not yet decided then; and the exit by gap 0.9 beside an exit after the
same number of steps for all problems. Intervals: Wilson's for shares over problems, t over templates for steps.

About 40 seconds of processor time for the default models.
"""

import sys

import numpy as np
from templates import call, loaded, mean

import sinklens
from sinklens.experiments import answer_emergence, early_exit, guesses, step_predictions
from sinklens.tasks.word_problems import read_answer
from sinklens.utils.estimates import paired, proportion

MODELS = ("tiny-llada", "tiny-mmada", "tiny-dream", "tiny-mdlm")


def main() -> None:
    """Print the tables."""
    names, problems, settings = call(sys.argv[1:], MODELS, 3)

    def right(row: int, text: str) -> bool:
        """Whether the text ends with the row's result."""
        return read_answer(text) == problems[row].result

    for name in names:
        model = loaded(name, masks=True)
        run = sinklens.generate(model, [problem.prompt for problem in problems], progress=False, **settings)
        found = step_predictions(run)
        known, exits = answer_emergence(run, found, right), early_exit(run, found, right, [0.9]).isel(threshold=0)
        judged, full, half = known["right"].to_numpy(), known["final"].to_numpy(), run.steps_run // 2
        decided = found.assign(token=found["token"] * 0 + model.mask_token_id)  # undecided positions stay masked
        spelled = np.array([right(row, texts[half]) for row, texts in enumerate(guesses(run, decided))])
        fixed = judged[:, round(float(exits["exit"].mean())) - 1]  # the same mean number of steps, equal for all
        others = [read_answer(texts[half]) == problems[row - 3].result for row, texts in enumerate(guesses(run, found))]
        print(f"\n{name}: all steps {proportion(int(full.sum()), len(full))}")
        for label, verdicts in {"step 0": judged[:, 0], "half": judged[:, half], "decided at half": spelled}.items():
            print(f"  {label}: {proportion(int(verdicts.sum()), len(full))}")
        print(f"  another problem's result at half: {proportion(sum(others), len(full))}")
        print(f"  exit by gap 0.9: {mean(exits['share'], problems, '.2f', (0, 1))} of the steps")
        for label, verdicts in {"gap": exits["right"].to_numpy(), "same steps for all": fixed}.items():
            cost = paired(full, verdicts).difference
            print(f"  {label}: {cost.value:+.2f} [{cost.low:+.2f}, {cost.high:+.2f}]")


if __name__ == "__main__":
    main()
