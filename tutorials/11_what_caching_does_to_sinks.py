# %% [markdown]
# # 11. What caching does to sinks
#
# A step of a bidirectional model computes every position. Inference engines *reuse* keys and values from earlier steps,
# which is faster but no longer exact. In sinklens such a rule is a *cache policy*, and it is measured like any other
# intervention. At the end of this tutorial you will know
#
# - how to run a model under a policy, and how to see which keys were computed and how old the others were,
# - what a policy changes on the *same* canvases: the predictions (KL divergence) and the sinks,
# - how making keys stale differs from hiding them, for sinks and for other keys,
# - which of these numbers can be compared, and which cannot.
#
# It uses `tiny-llada` in blocks of eight positions, not in its default single block of 24: each block begins with a
# complete step, and the policies act in the steps after it.

# %%
import time

import matplotlib.pyplot as plt
import pandas as pd
import torch

import sinklens
from sinklens.experiments import effect, sinks_compared
from sinklens.sampling import DualCache, KeepSinks, PrefixCache
from sinklens.tasks.word_problems import held_out
from sinklens.views import color_map

torch.set_num_threads(1)  # models this small gain nothing from more
model = sinklens.load("tiny-llada")
prompts = [problem.prompt for problem in held_out(4)]
exact = sinklens.generate(model, prompts, block_length=8)

# %% [markdown]
# ## One run under a policy
#
# `DualCache` computes everything in the first step of a block, and then only the block. The track of such a run also
# has `fresh` and `staleness`: which keys a step computed, and how many steps old the others are.

# %%
run = sinklens.generate(model, prompts, block_length=8, cache=DualCache())
computed = run.sinks["fresh"].isel(layer=0).sum("pos")  # [batch, step]
print(computed.isel(batch=0).to_numpy())
print("oldest key, in steps:", int(run.sinks["staleness"].max()))
assert (computed.isel(step=[1, 9, 17]) == 8).all()
assert int(run.sinks["staleness"].max()) == 7

# %%
plt.figure(figsize=(8, 3), layout="constrained")
plt.imshow(run.sinks["staleness"].isel(batch=0, layer=0), aspect="auto", cmap=color_map(), interpolation="nearest")
plt.gca().set(xlabel="position", ylabel="step", title="age of each key under DualCache, in steps")
plt.colorbar()
plt.show()

# %% [markdown]
# ## The same canvases
#
# Two free runs soon have different tokens, so their steps cannot be compared. `effect` therefore also runs the policy
# *under replay*, on the canvases of the exact run. These are the policies:
#
# - `PrefixCache` leaves the columns before the block stale, `DualCache` also those after it;
# - `KeepSinks` is `DualCache` with up to four sinks per layer computed in every step, and `~KeepSinks` its negation:
#   everything is computed *except* these sinks;
# - with `others="gone"`, keys outside the block are *hidden* instead of stale: all but the sinks, or, in the negation,
#   only the sinks.

# %%
policies = {
    "prefix": PrefixCache(),
    "dual": DualCache(),
    "sinks fresh": KeepSinks(k=4),
    "sinks stale": ~KeepSinks(k=4),
    "only sinks left": KeepSinks(k=4, others="gone"),
    "sinks hidden": ~KeepSinks(k=4, others="gone"),
}
costs = {name: effect(model, prompts, cache=policy, block_length=8) for name, policy in policies.items()}
assert all(torch.equal(cost.replayed.canvas, exact.canvas) for cost in costs.values())

# %% [markdown]
# ## What changes in the predictions
#
# KL divergence from the exact step, in nats, over the masked positions that the step computes. It is 0 in the first
# step of each block, in which everything is computed.

# %%
plt.figure(figsize=(8, 3.2), layout="constrained")
for name, cost in costs.items():
    plt.plot(cost.under_replay["kl"].mean("batch").clip(min=1e-9), label=name)
plt.gca().set(xlabel="step", ylabel="KL, nats (mean over prompts)", yscale="log")
plt.legend(ncols=2, fontsize="small")
plt.show()
kl = pd.Series({name: float(cost.under_replay["kl"].mean()) for name, cost in costs.items()})
print(kl.apply("{:.2g} nats".format))
first = [float(abs(cost.under_replay["kl"].isel(step=[0, 8, 16])).max()) for cost in costs.values()]
assert max(first) < 1e-4
stale = ["prefix", "dual", "sinks fresh", "sinks stale"]
assert kl[stale].max() < 0.01
assert kl[["only sinks left", "sinks hidden"]].min() > 10 * kl[stale].max()

# %% [markdown]
# On these prompts *stale* keys cost little, and *hidden* ones much more. The last two policies hide different numbers
# of keys, so their difference does not say that sinks matter less than the others:

# %%
hidden = {
    name: float((cost.replayed.sinks["staleness"] < 0).where(cost.replayed.sinks["is_real"]).mean())
    for name, cost in costs.items()
}
print(pd.Series(hidden, name="share of keys hidden").round(3))
assert hidden["only sinks left"] > hidden["sinks hidden"] > 0
assert max(hidden[name] for name in stale) == 0

# %% [markdown]
# ## What changes in the sinks
#
# `under_replay` counts the sinks of the exact run, those that are lost and added under the policy, and the heads whose
# strongest key moves. A step under a policy computes fewer queries, so the exact run is summed over the same queries
# (`cost.same_queries`): the number of its sinks differs from policy to policy, and so does the number of its queries.
# Stale keys cost few sinks. Where keys are hidden, their attention goes elsewhere, and many sinks change.

# %%
names = ["sinks", "sinks_lost", "sinks_added", "sinks_moved"]
counts = pd.DataFrame({name: cost.under_replay[names].sum().to_pandas() for name, cost in costs.items()}).T.astype(int)
counts["queries"] = [
    int(cost.replayed.sinks["fresh"].isel(layer=0).where(exact.sinks["is_real"]).sum()) for cost in costs.values()
]
print(counts)
assert counts["queries"].drop("sinks stale").max() < counts.loc["sinks stale", "queries"]
lost = counts["sinks_lost"] / counts["sinks"]
print(lost.round(3))
assert lost[stale].max() < 0.05
assert lost[["only sinks left", "sinks hidden"]].min() > 5 * lost[stale].max()

# %% [markdown]
# Against the exact run as recorded, with sums over all queries, `dual` would seem to lose half of the sinks. Nearly all
# of these are keys that draw their attention from positions outside the block:

# %%
everywhere = sinks_compared(exact, costs["dual"].replayed)
print(float(everywhere["sinks_lost"].sum() / everywhere["sinks"].sum()))
assert everywhere["sinks_lost"].sum() > 0.2 * everywhere["sinks"].sum()

# %% [markdown]
# ## What changes in the answers, and how fast it is
#
# In a free run, errors could add up. Seconds depend on the machine, on its load, and on the size of the model: the
# ratio of this tiny model need not be that of a large one.


# %%
def seconds(**more):
    started = time.perf_counter()
    sinklens.generate(model, prompts, block_length=8, record_sinks=False, **more)
    return time.perf_counter() - started


base = seconds()
answers = pd.DataFrame(
    {
        "tokens changed": {name: float(cost.free_running["changed_share"].mean()) for name, cost in costs.items()},
        "same answer": {name: int(cost.free_running["same_answer"].sum()) for name, cost in costs.items()},
        "speed": {name: base / seconds(cache=policy) for name, policy in policies.items()},
    }
)
print(answers.round(3))
assert answers.loc[stale, "tokens changed"].max() < answers.loc["only sinks left", "tokens changed"]

# %% [markdown]
# Four prompts are an illustration, not a result. For accuracy with intervals and speed on a task, run these commands,
# also in blocks of eight ([evaluation](../docs/concepts/evaluation.md#cache-policies)):
#
#     sinklens evaluate tiny-llada --task tiny-gsm --cache prefix dual keep-sinks:4 drop-sinks:4 --block-length 8 \
#         --out cached/
#     sinklens table cached/
#
# ## Exercise
#
# `Refresh(every=n)` computes everything again after `n` steps. How does the cost depend on `n`?
#
# ## Solution
#
# With `every=2` no key is older than one step, and the KL divergence is smaller than under `DualCache` alone.

# %%
from sinklens.sampling import Refresh

often = {every: effect(model, prompts, cache=Refresh(every=every), block_length=8) for every in (2, 4)}
refreshed = {every: float(cost.under_replay["kl"].mean()) for every, cost in often.items()}
print({every: f"{found:.2g} nats" for every, found in refreshed.items()}, f"never: {kl['dual']:.2g} nats")
assert int(often[2].replayed.sinks["staleness"].max()) == 1
assert refreshed[2] < kl["dual"]
