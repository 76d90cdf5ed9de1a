"""Measures how far quantized shipped models are from the full-precision ones; prints the table of large-models.md.

python scripts/measure_fidelity.py [MODEL ...] [--methods bnb-int8,bnb-nf4]
"""

import argparse

import sinklens
from sinklens.experiments import effect
from sinklens.tasks import find_task

PROMPTS = 4


def main() -> None:
    """Print one line for each model and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["tiny-llada", "tiny-dream", "tiny-llada-moe"])
    parser.add_argument("--methods", default="bnb-int8,bnb-nf4")
    options = parser.parse_args()
    prompts = [sample.prompt for sample in find_task("tiny-gsm").samples(PROMPTS)]
    print(
        "| model | method | KL per step, mean (largest) | strongest keys moved | same answers |\n|---|---|---|---|---|"
    )
    for name in options.models:
        full = sinklens.load(name, check=False)
        for method in options.methods.split(","):
            other = sinklens.load(name, quantization=method, dtype="float32", check=False)
            found = effect(full, prompts, other=other, gen_length=24)
            kl, same = found.under_replay["kl"].mean("batch"), found.free_running["same_answer"]
            print(
                f"| {name} | {method} | {float(kl.mean()):.3g} ({float(kl.max()):.3g}) nats | "
                f"{100 * found.sinks_moved:.1f} % | {int(same.sum())} of {same.size} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
