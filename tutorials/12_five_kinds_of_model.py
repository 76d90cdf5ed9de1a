# %% [markdown]
# # 12. Five kinds of model, the same eight lines
#
# Diffusion language models differ in how they decide tokens: masks or noise, any position or block after block, one MLP
# or a choice of experts. sinklens gives all of them the same names. At the end of this tutorial you will know
#
# - how the same eight lines open a masked, a shifted, a block-causal, an expert and a canvas model,
# - what each kind has in addition: blocks, routes, accepted and renoised positions,
# - which numbers can be compared between kinds, and which follow from what a query can see.

# %%
import matplotlib.pyplot as plt
import torch

import sinklens
from sinklens.sinks import motion
from sinklens.views import color_map

torch.set_num_threads(1)  # models this small gain nothing from more
PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
KINDS = {
    "masked": "tiny-llada",
    "shifted": "tiny-dream",
    "block-causal": "tiny-sdar",
    "experts": "tiny-llada-moe",
    "canvas": "tiny-canvas",
}

# %% [markdown]
# ## The eight lines
#
# Only the first line names the model. `t.undecided` says which positions are not decided: masks, or on a canvas of
# random tokens those that the last step did not accept.

# %%
runs = {}
for kind, name in KINDS.items():
    model = sinklens.load(name)
    with sinklens.trace(model, PROMPT) as t:
        for step in t.steps:
            pattern = t["blocks.1.attn.hook_pattern"].clone()  # [batch, head, query, key]
            if step == 1:
                t["blocks.1.attn.hook_z"][:, :, 0] = 0  # head 0 of layer 1 writes nothing
    moves = float(motion.jumps(t.sinks)["share"].mean())
    print(f"{kind}: {name}, pattern {tuple(pattern.shape)}, {t.steps_run} steps, jumps {moves:.2f}")
    runs[kind] = t
assert all(run.sinks is not None for run in runs.values())

# %% [markdown]
# The patterns differ in size, because the kinds differ in what a step computes. A masked and a shifted model compute
# the complete canvas. A canvas model computes its canvas, whose queries see the text before it, so the map has more
# keys than queries. The trained canvas model is done after two steps: it is sure of nearly all tokens after the first.

# %%
figure, axes = plt.subplots(1, len(runs), figsize=(15, 2.8), layout="constrained")
for ax, (kind, run) in zip(axes, runs.items(), strict=True):
    ax.imshow(run.undecided[0].int(), aspect="auto", cmap=color_map(), interpolation="nearest")
    ax.set(title=kind, xlabel="position", ylabel="step")
figure.suptitle("undecided positions, by step")
plt.show()

# %% [markdown]
# ## What each kind has in addition
#
# `model.hook_names()` lists the points. Those that only some kinds have:

# %%
for kind, run in runs.items():
    names = set(run.model.hook_names())
    extra = [
        "denoise.hook_confidence", "denoise.hook_edit", "blocks.1.mlp.hook_expert_indices", "denoise.hook_accepted",
        "denoise.hook_renoise", "encoder.blocks.1.attn.hook_k",
    ]  # fmt: skip
    print(f"{kind}: block length {run.model.block_length}; {', '.join(name for name in extra if name in names)}")
assert "denoise.hook_renoise" in runs["canvas"].model.hook_names()
assert runs["block-causal"].model.block_length == 8

# %% [markdown]
# `sinklens analyse dynamics` compares the kinds, with queries held fixed and with controls; the page
# [Five kinds of diffusion model](../docs/concepts/five-kinds.md) reports what it found.
#
# ## Exercises
#
# 1. In a block-causal model, which of these patterns change while a block is decided: those of the queries in earlier
#    blocks, or those of the block itself?
#
# 2. On a canvas, how many positions does each step accept, and how many of the accepted ones are taken back? Make the
#    model hesitate with a small `entropy_bound`, and without an early end (`confidence_threshold`,
#    `stability_threshold`). Then take back a token of your choice with `Renoise`.
#
# ## Solutions
#
# **1.** Queries of earlier blocks do not see the block, so their rows stay as they are, and so do their strongest keys.

# %%
model = runs["block-causal"].model
maps = []


def keep(pattern, hook):
    maps.append(pattern.clone())


sinklens.generate(model, PROMPT, use_cache=False, hooks=[("blocks.1.attn.hook_pattern", keep)])
start = runs["block-causal"].prompt_length // 8 * 8  # where the first block of the answer begins
change = (maps[1] - maps[0]).abs().amax(dim=(0, 1, 3))
print("earlier blocks:", float(change[:start].max()), "the block:", float(change[start : start + 8].max()))
assert change[:start].max() < 1e-5 < change[start : start + 8].max()

# %% [markdown]
# **2.** `track.renoised` marks positions that were decided before the last step and are undecided again: their token no
# longer passes the entropy bound. After a forced renoising, the model decides on the same answer.

# %%
model = runs["canvas"].model
slow = {"entropy_bound": 1e-6, "confidence_threshold": 0.0, "stability_threshold": 24}
alone = sinklens.generate(model, PROMPT, seed=0, record_sinks=True, **slow)
decided = alone.sinks.decided & alone.sinks.on_canvas
position = int(decided.isel(batch=0, step=10).to_numpy().nonzero()[0][0])
renoise = sinklens.interventions.Renoise(steps=[10], positions=[position])
forced = sinklens.generate(model, PROMPT, seed=0, record_sinks=True, hooks=renoise, **slow)
for name, run in {"alone": alone, "forced": forced}.items():
    accepted = (run.sinks.decided & run.sinks.on_canvas).sum("pos").isel(batch=0).to_numpy()
    renoised = run.sinks.renoised.sum("pos").isel(batch=0).to_numpy()
    print(f"{name}: accepted {accepted}, renoised {renoised}")
assert forced.sinks.renoised.sum() > alone.sinks.renoised.sum()
assert forced.text == alone.text
