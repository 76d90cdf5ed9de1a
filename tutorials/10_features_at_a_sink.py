# %% [markdown]
# # 10. Features at a sink
#
# A *sparse autoencoder* (SAE) represents an activation as a sum of a few *features* out of many. In a diffusion model
# there are two kinds of activation at every step: of positions that hold a token, and of positions that are still
# masked. At the end of this tutorial you will know
#
# - how to load an SAE and to check that it fits where you use it,
# - which features fire at a sink, and how to distinguish a feature of the *sink* from one of the *place*,
# - what ablating such features does to the sink and to the answer, and what a control says about it,
# - how to collect activations and train an SAE of your own,
# - how to read a stream with a lens that was tuned for each masked share.
#
# It uses `tiny-llada` and the two SAEs that ship with it, both at the stream between layer 2 and layer 3.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

import sinklens
from sinklens import features
from sinklens.tasks.word_problems import held_out, training
from sinklens.views import color_map

torch.set_num_threads(1)  # models this small gain nothing from more
model = sinklens.load("tiny-llada")
prompts = [problem.prompt for problem in held_out(6)]
run = sinklens.generate(model, prompts)

# %% [markdown]
# ## Two SAEs, two distributions
#
# One SAE was trained at masked positions, the other at every position with a token (the prompt and the decided part of
# the answer). `assess` measures both in both places: how much of the variance they explain, and how much of the loss is
# recovered when the activations are replaced by their reconstructions.

# %%
saes = {name: features.load_sae(f"tiny-llada-{name}") for name in ("masked", "decided")}
point = saes["masked"].point
print(point, [f"{sae.d_sae} features, {sae.k} fire" for sae in saes.values()])
quality = {name: features.assess(model, sae, point, prompts[:3]) for name, sae in saes.items()}
columns = ["explained_variance", "dead", "recovered"]
print(pd.concat({name: found[columns].to_dataframe() for name, found in quality.items()}, names=["SAE"]).round(3))
assert float(quality["masked"]["recovered"].sel(scope="masked")) > 0.95
assert float(quality["masked"]["explained_variance"].sel(scope="decided")) < 0.8

# %% [markdown]
# Each fits the positions that it was trained on. The SAE of masked positions does not describe tokens: its features
# must not be read there. `SpliceSAE` therefore takes a `scope`.

# %%
whole = [
    features.SpliceSAE(saes["masked"], point, scope="masked"),
    features.SpliceSAE(saes["decided"], point, scope="decided"),
]
spliced = sinklens.generate(model, prompts, hooks=whole)
print(spliced.text[0], "|", run.text[0])
print(sum(a == b for a, b in zip(spliced.text, run.text, strict=True)), "of", len(prompts), "answers stay the same")

# %% [markdown]
# ## Which features fire at a sink?
#
# `read_features` returns the features of every position and step. Layer 3 reads this stream, so compare them with its
# sinks; here, with those on masked positions.

# %%
layer = 3
sinks = run.sinks.detect().isel(layer=layer).any("head").to_numpy()  # [batch, step, pos]
masked = (run.undecided[:, :-1] & run.real[:, None]).numpy()
fires = np.nan_to_num(features.read_features(run, saes["masked"], point).to_numpy()) > 0  # [batch, step, pos, feature]
at_sinks, elsewhere = fires[sinks & masked].mean(axis=0), fires[~sinks & masked].mean(axis=0)
excess = at_sinks - elsewhere
top = np.argsort(-excess)[:5]
print(f"{(sinks & masked).sum()} sinks on masked positions")
print(pd.DataFrame({"at sinks": at_sinks[top], "elsewhere": elsewhere[top]}, index=top).round(3))
assert excess[top[0]] > 0.5

# %% [markdown]
# These features fire at nearly every such sink, and rarely elsewhere. Are they features of the sink? Look at where they
# fire, row by row of one prompt: the picture shows one of them beside the sinks.

# %%
row = int(np.argmax((sinks & masked).sum(axis=(1, 2))))
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", sharey=True)
answer = slice(run.prompt_length, None)
for ax, shown, title in zip(
    axes, (sinks[row] & masked[row], fires[row, ..., top[0]] & masked[row]), ("sink", f"feature {top[0]}"), strict=True
):
    ax.imshow(shown[:, answer], aspect="auto", cmap=color_map(), interpolation="nearest")
    ax.set(title=f"{title}, masked positions", xlabel="position of the answer")
axes[0].set_ylabel("step")
plt.show()

# %% [markdown]
# ## The sink, or the place?
#
# A fair comparison is the *same position* at steps at which it is masked but not a sink. A feature of the sink comes
# and goes with it; a feature of the place stays.


# %%
def follows(feature):
    """Firing at masked positions while they are sinks, minus while the same positions are not."""
    differences = []
    for row, pos in np.argwhere((sinks & masked).any(axis=1) & (~sinks & masked).any(axis=1)):
        on, off = sinks[row, :, pos] & masked[row, :, pos], ~sinks[row, :, pos] & masked[row, :, pos]
        differences.append(fires[row, on, pos, feature].mean() - fires[row, off, pos, feature].mean())
    return np.mean(differences)


compared = pd.DataFrame({"excess": excess[top], "follows": [follows(feature) for feature in top]}, index=top)
print(compared.round(3))
assert compared["follows"].abs().max() < 0.5 * compared["excess"].min()

# %% [markdown]
# They stay: `follows` is near 0. These features mark a place of the answer, at which a sink forms at some steps. They
# describe the place, not the sink.

# %% [markdown]
# ## Ablate them
#
# With `error=True` only the chosen features change. The control is a set of features that fire about as often. Both are
# run on the canvases of the unchanged run (`replay=`), where sinks can be compared position by position.

# %%
rate = fires[masked].mean(axis=0)
candidates = [f for f in np.flatnonzero(rate > 0) if f not in np.argsort(-np.abs(excess))[:40]]
control = []
for feature in top:
    control.append(min(set(candidates) - set(control), key=lambda other: abs(rate[other] - rate[feature])))


def ablated(chosen):
    """Share of the sinks on masked positions that are gone, and the number of answers that change."""
    splice = features.SpliceSAE(saes["masked"], point, features=[int(f) for f in chosen], error=True, scope="masked")
    replayed = sinklens.generate(model, prompts, hooks=splice, replay=run)
    still = replayed.sinks.detect().isel(layer=layer).any("head").to_numpy()
    free = sinklens.generate(model, prompts, hooks=splice, record_sinks=False)
    changed = sum(a != b for a, b in zip(free.text, run.text, strict=True))
    return float((sinks & masked & ~still).sum() / (sinks & masked).sum()), changed


table = pd.DataFrame([ablated(top), ablated(control)], ["chosen", "control"], ["sinks gone", "answers changed"])
print(table)
assert table.loc["chosen", "sinks gone"] > table.loc["control", "sinks gone"] + 0.2

# %% [markdown]
# Without the features, about half of these sinks fall below the threshold; the control leaves them all. No answer
# changes: these sinks can be removed without a cost.

# %% [markdown]
# ## Collect activations for an SAE of your own
#
# `collect` writes activations to disk, filtered by scope and step, and resumes after an interrupt. In a clone of the
# repository, `training.saes` trains TopK SAEs on such stores; the shipped ones took 5,001 steps on 1,200 and 400
# prompts. `assess` measures how good an SAE is where it is used.

# %%
texts = [problem.prompt for problem in training(seed=5, size=24)]
store = features.collect(model, texts, point, "masked.zarr", scope="masked", batch_size=12)
quality = features.assess(model, saes["masked"], point, texts[:4])
print(f"{len(store)} activations")
print(quality[["explained_variance", "dead", "recovered"]].to_dataframe().round(3))
assert quality["recovered"].sel(scope="masked") > 0.99

# %% [markdown]
# ## A lens for each masked share
#
# The same stream can be read without an SAE: the logit lens reads it with the unembedding. A tuned lens first applies
# an affine map, trained per layer and per bucket of the masked share, because early and late steps use the stream
# differently.

# %%
from sinklens.experiments import logit_lens, train_tuned_lens

lens = train_tuned_lens(model, texts, buckets=2, updates=60, update_size=128, learning_rate=3e-3, sample_size=4000)
agreement = {}
for name, tuned in (("logit lens", None), ("tuned lens", lens)):
    data = logit_lens(model, run, lens=tuned, top_k=1, steps=range(0, 24, 2))
    token = data["token"].isel(rank=0)
    same = (token == token.sel(layer=layer)).where(data["masked"])
    agreement[name] = same.mean(("step", "pos")).to_series()
print(pd.DataFrame(agreement).round(3))  # share of masked positions at which a layer names the model's own candidate
assert (agreement["tuned lens"] >= agreement["logit lens"]).all()

# %% [markdown]
# ## Exercises
#
# 1. Do the same for sinks on *tokens*, with the SAE of decided positions. Does its strongest feature fire at sinks, or
#    at a kind of token that is often a sink? Compare `excess` over all tokens with `excess` over digits only.
# 2. Clamp the strongest of the masked features to a high value at *every* masked position. Do new sinks appear?

# %% [markdown]
# ## Solutions
#
# **1.** Sinks on tokens are often digits, so a feature of digits looks like one of sinks. Among digits, none of its
# excess is left.

# %%
from sinklens.sinks.kinds import Kind, kinds

tokens = ~masked & run.real[:, None].numpy()
digits = tokens & (kinds(run.sinks).to_numpy() == Kind.DIGIT)
firing = np.nan_to_num(features.read_features(run, saes["decided"], point).to_numpy()) > 0


def difference(inside):
    """Firing of all features at sinks minus elsewhere, among some positions."""
    return firing[sinks & inside].mean(axis=0) - firing[~sinks & inside].mean(axis=0)


strongest = int(difference(tokens).argmax())
print(f"feature {strongest}: {difference(tokens)[strongest]:.2f} over all tokens,", end=" ")
print(f"{difference(digits)[strongest]:.2f} among digits")

# %% [markdown]
# **2.** No: on the same canvases, half of the sinks on masked positions disappear. The feature does not make a sink.

# %%
values = np.nan_to_num(features.read_features(run, saes["masked"], point).to_numpy())[..., top[0]]
high = {int(top[0]): float(values.max())}
clamp = features.SpliceSAE(saes["masked"], point, features=high, error=True, scope="masked")
clamped = sinklens.generate(model, prompts, hooks=clamp, replay=run).sinks.detect().isel(layer=layer).any("head")
print(int((sinks & masked).sum()), "sinks before,", int((clamped.to_numpy() & masked).sum()), "after")
