"""Measure the tables of docs/papers/attention-floating.md: do anchors shift, and which layers attend to content?

    python benchmarks/papers/attention_floating.py [MODEL ...] [each=N] [SETTING=VALUE ...]

21 held-out word problems, three of each template. The overlap of the sink sets (mean + 3 standard deviations in each
head) of two consecutive steps and layers, beside those of a pattern that does not change (sinklens.analyses.nulls). And
the attention to a place of the prompt by layer, where its word is replaced by another word, a number or a punctuation
mark, on the canvas in the middle of the run. Took 3 minutes for each model on a fraction of a core.
"""

import sys
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from templates import call, mean, row

import sinklens
from sinklens.analyses.nulls import null_of
from sinklens.experiments.swaps import column_sums, kinds_of_vocabulary
from sinklens.sinks import MeanPlusStd, SinkTrack, motion
from sinklens.sinks.kinds import Kind

MODELS = ("tiny-llada", "tiny-dream", "tiny-llama")
KINDS = (Kind.WORD, Kind.DIGIT, Kind.PUNCTUATION)
PLACES = 6


def overlaps(track: SinkTrack) -> tuple[float, float]:
    """Mean Jaccard overlap in percent with the step before, and with the layer before."""
    found, exists = track.detect(MeanPlusStd(k=3, over=())), motion.existing(track)
    step, layer = (float(motion.overlap(found, exists, along).mean()) for along in ("step", "layer"))
    return 100 * step, 100 * layer


def received(model: Any, run: Any, number: int) -> Float[np.ndarray, "kind layer"]:
    """Column sums at places of the prompt that hold a word, if each kind of token stands there; mean over the heads."""
    rng, kinds = np.random.default_rng(number), kinds_of_vocabulary(model)
    step = run.steps_run // 2
    text = run.canvas[0, step, : run.prompt_length + step] if model.causal else run.canvas[0, step]
    seen = run.tokens[0][run.tokens[0] >= 0].unique().numpy()
    words = np.flatnonzero(kinds[text[: run.prompt_length].numpy()] == Kind.WORD)
    places = rng.choice(words, PLACES, replace=False)
    canvases = text.repeat(len(KINDS) * PLACES, 1)
    for at, kind in enumerate(KINDS):
        for other, place in enumerate(places):
            new = seen[(kinds[seen] == kind) & (seen != int(text[place]))]
            canvases[at * PLACES + other, place] = int(rng.choice(new))
    sums = column_sums(model, canvases)[:, 0].mean(axis=2)  # [canvas, layer, pos]
    there = sums[np.arange(len(canvases)), :, np.tile(places, len(KINDS))]
    return there.reshape(len(KINDS), PLACES, -1).mean(axis=1)


def main() -> None:
    """Print the tables."""
    names, asked, settings = call(sys.argv[1:], MODELS, 3)
    for name in names:
        model = sinklens.load(name)
        shares, there = [], []
        for number, one in enumerate(asked):
            with torch.no_grad():
                run = sinklens.generate(model, one.prompt, progress=False, **settings)
                shares.append([*overlaps(run.sinks), *overlaps(null_of(run, 0))])
                there.append(received(model, run, number))
        cells = [mean(part, asked, ".0f") for part in np.array(shares).T]
        print(row(name, "overlap: step, layer; of the null", *cells), flush=True)
        sums = np.array(there)  # [prompt, kind, layer]
        for at, kind in enumerate(KINDS):
            print(row(name, kind.name.lower(), *(mean(part, asked, ".2f") for part in sums[:, at].T)), flush=True)
        for label, content in {"word": 0, "number": 1}.items():
            more = np.log2(sums[:, content] / sums[:, 2])
            cells = [mean(part, asked, ".2f") for part in more.T]
            print(
                row(name, f"log2 {label} / punctuation", *cells, mean(more[:, -1] - more[:, 0], asked, ".2f")),
                flush=True,
            )


if __name__ == "__main__":
    main()
