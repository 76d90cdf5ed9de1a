# %% [markdown]
# # 2. Find the sinks
#
# An *attention sink* is a token that draws much of a head's attention, often regardless of its content. In
# autoregressive models it is mostly the first token. [Rulli et al. (2025)](https://arxiv.org/abs/2510.15731) found
# sinks in diffusion language models (DLMs), where they move. At the end of this tutorial you will know
#
# - what a sink score is, and what "3 above the mean" means in four different units,
# - how definitions of a sink differ, and how much the result depends on them,
# - how to measure whether sinks move from step to step,
# - how to find out which kinds of token sinks prefer.
#
# The tutorial compares two models: `tiny-llada` (diffusion) and `tiny-llama` (autoregressive), of the same size,
# tokenizer and training data.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

import sinklens
from sinklens import views
from sinklens.sinks import EpsilonOverMean, MeanPlusStd, NoOp, Record, SinkRate, SmallValueNorm, TopK, kinds, motion
from sinklens.tasks.word_problems import held_out

torch.set_num_threads(1)  # models this small gain nothing from more

# %% [markdown]
# ## Scores
#
# Every run records, for each step, layer and head, how much attention each position received. The *score* of position j
# is the column sum Σ_i A[i, j] of the attention pattern A over the queries i. With uniform attention each position has
# score 1, and the scores of one head add up to the number of positions.

# %%
names = ("tiny-llada", "tiny-llama")
prompts = [problem.prompt for problem in held_out(20)]
runs = {name: sinklens.generate(name, prompts, record_sinks=Record(["values"])) for name in names}
tracks = {name: run.sinks for name, run in runs.items()}
track = tracks["tiny-llada"]
score = track.scores()  # NaN on padding, and where a position does not exist yet
print(track)
assert np.allclose(score.sum("pos"), runs["tiny-llada"].real.sum(1)[:, None, None, None].numpy(), atol=1e-3)

# %% [markdown]
# `Record(["values"])` also keeps the norms of the value vectors, which one of the definitions below needs. Here is one
# head of one run: scores by step and position.

# %%
layer, head = views.stillest_head(track)
ax = track.plot(layer=layer, head=head)

# %% [markdown]
# ## Which unit?
#
# The paper calls position j a sink if its score exceeds the mean of the other positions by more than ε, and takes ε =
# 3. It does not state the unit, and the result depends on it:
#
# | `unit` | score of position j |
# |---|---|
# | `"sum"` | the column sum; uniform attention is 1 |
# | `"percent"` | its share of all attention, in percent |
# | `"fraction"` | the same share between 0 and 1, as the formula is printed |
# | `"visible"` | the mean over the queries that can see j; differs from `"fraction"` only under a causal mask |


# %%
def share(detector, name):
    """Share of all (step, layer, head, position) that are a sink."""
    return float(tracks[name].detect(detector).sum() / motion.existing(tracks[name]).sum())


units = pd.DataFrame(
    {name: {unit: share(EpsilonOverMean(3, unit), name) for unit in ("sum", "percent")} for name in names}
)
print((100 * units).round(2))
assert units.loc["percent", "tiny-llada"] > 3 * units.loc["sum", "tiny-llada"]

# %% [markdown]
# With ε = 3 in column sums, 1.13 % and 1.96 % of the positions are sinks; in percent of all attention, 4.31 % and 13.49
# %. As a fraction, no position can ever be a sink, because no fraction exceeds 1 (an error says so). In sinklens the
# unit is an argument; `"sum"` is the default.
#
# The number of sinks depends on ε at least as much. The paper requires at least 96 % of the positions *not* to be
# sinks:

# %%
epsilons = [0, 0.5, 1, 2, 3, 4, 6, 8, 10]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
for ax, unit in zip(axes, ("sum", "percent"), strict=True):
    for name in names:
        ax.plot(epsilons, [1 - share(EpsilonOverMean(epsilon, unit), name) for epsilon in epsilons], "o-", label=name)
    ax.axhline(0.96, color="0.5", linestyle="--", linewidth=1)
    ax.set(xlabel=f"ε, unit {unit!r}")
axes[0].set_ylabel("share of positions that are no sink")
axes[0].legend()
plt.show()

# %% [markdown]
# ## Other definitions
#
# Other papers define a sink differently; each definition is a *detector* that names its source in its docstring.
#
# - `TopK(1)`: the strongest key of every head and step, whatever its score.
# - `MeanPlusStd(2)`: more than two standard deviations above the mean, averaged over layers and heads.
# - `SinkRate(epsilon=0.3)`: positions that are a sink (mean attention above 0.3) in at least a tenth of all heads.
# - `SmallValueNorm(0.2)`: positions whose value vector is short, so that attending to them adds little.
# - `NoOp(0.2)`: those of the paper's sinks whose value vector is that short.

# %%
detectors = [EpsilonOverMean(3), TopK(1), MeanPlusStd(2), SinkRate(0.3), SmallValueNorm(0.2), NoOp(0.2)]
table = pd.DataFrame({name: {type(d).__name__: 100 * share(d, name) for d in detectors} for name in names})
print(table.round(3))
assert (table.loc["NoOp"] == 0).all()

# %% [markdown]
# The definitions disagree, and that is informative. `TopK` finds a sink in every head by construction, even where
# attention is flat. `SinkRate` finds none in `tiny-llada`: no position is shared by many heads there. And the sinks of
# these two models are not "no-ops": the heads also read what they attend to.
#
# `detect` returns where sinks are, `strength` how strong each position is. Your own definition is a class of a few
# lines (exercise 2).

# %% [markdown]
# ## Do sinks move?
#
# The position of each head's strongest key at every step of the first problem:

# %%
figure = views.sink_paths(tracks)

# %% [markdown]
# `motion.motion_table` turns such pictures into numbers, one line per run. Some of its columns:

# %%
columns = [
    "sinks",
    "jump_share",
    "static_share",
    "lifetime",
    "drift",
    "pooled_spatial_variance",
    "pooled_temporal_variance",
]
moved = pd.DataFrame({name: motion.motion_table(tracks[name])[columns].mean() for name in names})
print(moved.round(3))
assert moved.loc["jump_share", "tiny-llada"] > 5 * moved.loc["jump_share", "tiny-llama"]

# %% [markdown]
# - `jump_share`: the strongest key changes at 9.1 % of `tiny-llada`'s steps, and at 1.4 % of `tiny-llama`'s.
# - `static_share`: 27 % of the heads of `tiny-llada` keep their strongest key through the complete run, 78 % of
#   `tiny-llama`'s.
# - `pooled_temporal_variance`: the variance of the sinks' center over the steps, 8.1 positions² in `tiny-llada` against
#   0.13 in `tiny-llama`. Over the positions, in contrast, attention is more even in `tiny-llada`:
#   `pooled_spatial_variance` is 0.06 against 0.75.
# - `lifetime`: how many steps a sink lasts, and `drift`: how many positions per step it wanders to the right.
#
# Every head has a strongest key, even if its attention is almost uniform; there it jumps between nearly equal scores.
# So count only the moves between two consecutive steps at which the head has a sink:

# %%
for name in names:
    moves = motion.jumps(tracks[name], tracks[name].detect())[["changes", "pairs"]].sum()
    print(f"{name}: {int(moves.changes)} moves in {int(moves.pairs)} steps, {float(moves.changes / moves.pairs):.1%}")

# %% [markdown]
# Sinks move in the diffusion model: four times as often as in its twin, though only half as often as its strongest
# keys. Caution: from one step to the next, an autoregressive run adds one query and keeps all others, so its column
# sums *must* change slowly. Compare the attention of the newest query alone before you conclude that nothing moves
# there.

# %% [markdown]
# ## Which tokens are sinks?
#
# Counting sinks by token is not enough: if half of the positions are masks, half of the sinks are masks by chance.
# `kinds.enrichment` compares the share of a kind of token among the sinks with its share among the positions: 1 is
# chance, 2 is twice as often.


# %%
def preference(name):
    """Share among sinks over share among positions, by kind of token, over all runs of a model."""
    counts = kinds.enrichment(tracks[name]).sum("batch")[["sinks", "positions"]].to_dataframe()
    counts = counts[counts["positions"] > 0]
    return (counts["sinks"] / counts["sinks"].sum()) / (counts["positions"] / counts["positions"].sum())


preferred = pd.DataFrame({name: preference(name) for name in names})
print(preferred.round(2))
ax = preferred.plot.barh(figsize=(8, 4), xlabel="share among sinks / share among positions", logx=True)
ax.axvline(1, color="0.3", linewidth=1)
plt.show()

# %% [markdown]
# The sinks of `tiny-llama` are on the start token, 20 times as often as chance. Those of `tiny-llada` prefer digits
# (4.6 times) and the start token (3.6 times), and avoid the masks (0.33), although in absolute numbers masks are not
# rare among them. In the paper, line breaks and masks are the most frequent sinks of LLaDA; a model of two million
# parameters that does arithmetic need not agree with it.

# %%
assert preferred["tiny-llama"].idxmax() == "start"
assert preferred["tiny-llada"].idxmax() == "digit"
assert preferred.loc["mask", "tiny-llada"] < 0.5

# %% [markdown]
# ## The same on a real model
#
# `smollm2-135m-masked` and `smollm2-135m-causal` have 135 million parameters. Both are continuations of one
# autoregressive model on the same text, and only the first was trained by masked diffusion. They need `sinklens fetch
# smollm2-135m` once (93 MB); without these weights, this section only says so.

# %%
from sinklens.errors import CheckpointError

pair, measured = ("smollm2-135m-masked", "smollm2-135m-causal"), {}
try:
    for name in pair:
        run = sinklens.generate(name, prompts[0], gen_length=32, record_sinks=Record(["values"]))
        tracks[name] = run.sinks
        measured[name] = {
            "heads with a sink, %": 100 * float(run.sinks.detect().any("pos").mean()),
            "attention to the first position, %": float(run.sinks.scores("percent").isel(pos=0).mean()),
            "sinks that are no-ops, %": 100 * share(NoOp(0.2), name) / share(EpsilonOverMean(3), name),
            "strongest key changes, %": 100 * float(motion.motion_table(run.sinks)["jump_share"].mean()),
        }
    print(pd.DataFrame(measured).round(1))
    received = pd.DataFrame(measured).loc["attention to the first position, %"]
    assert received[pair[1]] > 10 * received[pair[0]]
except CheckpointError as error:
    print(error)

# %% [markdown]
# This is one run of each. It agrees with 200 windows of text (`docs/findings.md`): in the causal model, the first
# position receives nearly half of all attention, and in the masked model hardly any. Most heads of both still have a
# sink, but fewer of the masked model's sinks are no-ops. Its strongest keys also change more often; for the causal
# model, remember the caution above.

# %% [markdown]
# ## Exercises
#
# 1. More queries see the early keys of a causal model, which alone raises their column sums. Use `EpsilonOverMean(0.1,
#    "visible")` instead: what share of `tiny-llama`'s sinks is the start token then, and what share by column sum?
# 2. Write your own detector: a position is a sink if it draws more than `share` of all attention of its head. How many
#    positions draw more than a tenth, in either model?
# 3. Which head of `tiny-llada` has the sink that moves most in the first problem, and between which tokens?
#    (`views.most_moving_head`) And which has the strongest key that moves most, and is that a sink?

# %% [markdown]
# ## Solutions
#
# **1.** 57 % by column sum, 10 % by visible queries. The second is not better in itself: very few queries see the last
# keys (only one sees the newest), and a mean over few queries is easily large. Whichever unit you use, state it.


# %%
def start_share(detector):
    """Share of tiny-llama's sinks that are the start token."""
    counts = kinds.enrichment(tracks["tiny-llama"], detector)["sinks"].sum("batch")
    return float(counts.sel(kind="start") / counts.sum())


print(f"by column sum {start_share(EpsilonOverMean(3)):.2f}, by visible queries", end=" ")
print(f"{start_share(EpsilonOverMean(0.1, 'visible')):.2f}")

# %% [markdown]
# **2.** 0.51 % of the positions in `tiny-llada` and 4.66 % in `tiny-llama`, whose sinks are stronger.

# %%
from dataclasses import dataclass

from sinklens.sinks import Detector


@dataclass(frozen=True)
class MoreThan(Detector):
    """More than `share` of all attention of the head."""

    share: float

    def strength(self, track):
        return track.scores("fraction")

    def detect(self, track):
        return self.strength(track) > self.share


for name in names:
    print(f"{name}: {100 * share(MoreThan(0.1), name):.2f} % of the positions")

# %% [markdown]
# **3.** Head 3 of layer 0 has a sink that moves twice, from `Answer` to ` many` to the start token. The strongest key
# that moves most, six times, is that of head 3 of layer 2; it is not a sink at any step.

# %%
layer, head = views.most_moving_head(track)
path = track.trajectory(layer, head)
tokens = [track.vocabulary[int(token)] for token in runs["tiny-llada"].tokens[0]]
print(
    f"layer {layer}, head {head}: {(np.diff(path) != 0).sum()} changes, over",
    *dict.fromkeys(repr(tokens[place]) for place in path),
)
changes = motion.jumps(track)["changes"][0]
restless = changes.argmax(("layer", "head"))
sunk = track.detect()[0].any("pos")[{axis: int(place) for axis, place in restless.items()}]
print(f"most changes: {int(changes.max())}, in", *(f"{axis} {int(place)}" for axis, place in restless.items()), end="")
print(f"; a sink at {int(sunk.sum())} steps")
ax = views.sink_map(track, layer, head)
