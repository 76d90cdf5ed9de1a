"""What models make of the right answers to the held-out word problems, in nats per token.

    python benchmarks/likelihoods.py MODEL ... > likelihoods.csv

One line for each of 20 answers and each model: the log-likelihood of an autoregressive model, or a masked model's lower
bound on it, estimated from 32 draws of masks. The mean over answers and its 95 % t interval go to the standard error
stream.
"""

import sys

import sinklens
from sinklens.evaluation.verification import mean_of
from sinklens.tasks.word_problems import held_out

COUNT, DRAWS = 20, 32


def main(names: list[str]) -> None:
    """Print one line per model and answer."""
    problems = held_out(COUNT)
    prompts, answers = [one.prompt for one in problems], [f" {one.answer}" for one in problems]
    print("model,problem,tokens,nats,standard_error,kind")
    for name in names:
        model, losses = sinklens.load(name), []
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens = len(model.encode(answer, prepend_bos=False).ids[0])
            found = model.likelihood(prompt, answer, mc_num=DRAWS)
            losses.append(-found.value / tokens)
            print(f"{name},{number},{tokens},{-found.value:.4f},{found.standard_error:.4f},{found.kind}", flush=True)
        mean = mean_of(losses)
        print(f"{name}: {mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}] nats per token", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
