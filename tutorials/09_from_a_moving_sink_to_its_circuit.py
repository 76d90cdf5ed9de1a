# %% [markdown]
# # 9. From a moving sink to its circuit
#
# A sink moves from one position to another between two steps. At the end of this tutorial you will know
#
# - which components wrote the key that the head now prefers, and whether the jump changed them;
# - which edge of the graph moved the sink, and how to verify it with a path patch;
# - which components read the head;
# - whether the message of the sink matters, or the attention that it absorbs;
# - why a patch from a free corrupted run misleads, and what to patch from instead.
#
# It uses `tiny-llada` and takes about a minute on a laptop's CPU. Everything here is about one jump of one head on one
# problem: an example of the method, not a finding.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

import sinklens
from sinklens.experiments import (
    Circuit,
    agreement,
    corrupted,
    edge_attribution,
    jump_undone,
    path_patching_effects,
    read_attribution,
    sink_jumps,
    sweep,
    write_attribution,
)
from sinklens.interventions import AblateValues, Activations, MaskSinks, PatchHooks, Where
from sinklens.tasks.word_problems import held_out
from sinklens.views import sink_path, writer_bars

torch.set_num_threads(1)  # models this small gain nothing from more
model = sinklens.load("tiny-llada")
prompts = [problem.prompt for problem in held_out(6)]
writers = ["embed", *(f"L0H{head}" for head in range(6)), "0_mlp_out"]  # all that layer 1 reads
run = sinklens.generate(model, prompts[0])
print(prompts[0] + run.text)

# %% [markdown]
# ## The picture
#
# The head is 1.0, head 0 of layer 1. Marks are filled where its strongest key is a sink. The sink jumps at step 8.

# %%
LAYER, HEAD, STEP = 1, 0, 8
sink_path(run.sinks, LAYER, HEAD)
plt.show()

(jump,) = (jump for jump in sink_jumps(run) if (jump.layer, jump.head, jump.step) == (LAYER, HEAD, STEP))
old, new = jump.old, jump.new
tokens = model.to_str_tokens(run.canvas[0, STEP])
decided = (run.canvas[0, STEP - 1] != run.canvas[0, STEP]).nonzero()[:, 0].tolist()
print(f"from {old} ({tokens[old]}) to {new} ({tokens[new]}); step {STEP - 1} decided {decided}")
assert (old, new, decided) == (34, 18, [37])

# %% [markdown]
# The sink moves from an undecided position, 34, to the word " have" of the question. Between the two steps, the canvas
# changed only at position 37, which is neither of the two: it became an end token.

# %% [markdown]
# ## Who writes its key?
#
# `write_attribution` splits the head's pre-softmax score for a key over everything that wrote the residual stream at
# the key. A softmax only compares keys, so read the *excess*, the score minus its mean over the other keys.
# `weighted=True` weights the queries by the attention that they pay to the key.

# %%
tables = {
    f"key {key}, step {step}": write_attribution(run, step, LAYER, HEAD, key=key, weighted=True)
    for key in (old, new)
    for step in (STEP - 1, STEP)
}
parts = pd.DataFrame({name: table["from_key_excess"].to_series() for name, table in tables.items()})
print(parts.round(2))
writer_bars(tables[f"key {new}, step {STEP}"], "key")
plt.show()
before, after = parts[f"key {new}, step {STEP - 1}"], parts[f"key {new}, step {STEP}"]
assert before.idxmax() == after.idxmax() == "0_mlp_out"
assert (after - before).abs().max() < 0.05  # the jump does not change what wrote the new sink's key

# %% [markdown]
# The first MLP writes most of the key of " have", and writes the same before and after the jump. The key was there
# before the jump, so the queries must have changed.

# %% [markdown]
# ## Who moves it?
#
# Take what the writers wrote at step 7, and put it into what *one* receiver reads at step 8: the queries of head 1.0,
# or its keys. `jump_undone` reports how much of the jump this undoes: 1 if the sink goes back to 34.

# %%
complete = {letter: jump_undone(run, jump, letter=letter) for letter in "qk"}  # all that layer 1 reads
print("share of the jump undone through", {letter: round(share, 2) for letter, share in complete.items()})
assert complete["q"] > 0.9
assert abs(complete["k"]) < 0.1

# %% [markdown]
# The entire jump went through the queries and none of it through the keys: other positions began to look elsewhere.
# Which writer caused that? Patch the edges one at a time.

# %%
edges = pd.DataFrame({letter: {name: jump_undone(run, jump, name, letter) for name in writers} for letter in "qk"})
print(edges.round(2))
ax = edges.plot.bar(figsize=(7, 3), ylabel="share of the jump undone", rot=30)
ax.axhline(0, color="0.5", linewidth=0.8)
plt.show()
assert edges["q"].idxmax() == "L0H4"
assert edges.loc["L0H4", "q"] > 0.6
assert edges["k"].abs().max() < 0.1

# %% [markdown]
# One edge undoes most of the jump: L0H4 → L1H0.q, from the output of head 0.4 to the queries of head 1.0. The shares of
# single edges need not add up to 1, because norms and the softmax are nonlinear. Does the edge act at the position that
# was just decided, or at all queries?

# %%
there = [position for position in range(run.canvas.shape[2]) if position not in decided]
places = {"the decided position": decided, "all others": there}
at = {name: jump_undone(run, jump, "L0H4", "q", positions=positions) for name, positions in places.items()}
print({name: round(share, 2) for name, share in at.items()})
assert at["the decided position"] > 0.65
assert abs(at["all others"]) < 0.1

# %% [markdown]
# This is the edge that moved the sink: when position 37 becomes an end token, head 0.4 writes something different
# there, and the query that head 1.0 forms from it moves from the old sink to the new one. Nothing went through the
# keys.
#
# ## Who reads the head?
#
# Now the metric is a function of the logits. `edge_attribution` estimates all edges of the graph from gradients. The
# metric here is the log-probability of the tokens that are still to come; the estimate says how the canvas of step 8
# changes it, compared with that of step 7.

# %%
left = run.undecided[0, STEP].nonzero()[:, 0]


def metric(logits):
    """Mean log-probability of the final tokens at the undecided positions."""
    return logits[0, left].log_softmax(-1).gather(1, run.canvas[0, -1, left, None]).mean()


clean, other = run.canvas[:, STEP], run.canvas[:, STEP - 1]
estimate = edge_attribution(model, clean, other, metric, ig_steps=4)
reads = estimate.sel(sender=[f"L{LAYER}H{HEAD}"])
print(f"the metric changes by {estimate.attrs['clean'] - estimate.attrs['corrupted']:.5f} nats")
print(*Circuit.strongest(reads, count=3).edges, sep="\n")

# %% [markdown]
# An estimate is not yet a result. Patch the edges out of head 1.0 one at a time and compare.

# %%
truth = path_patching_effects(model, clean, other, metric, senders=[f"L{LAYER}H{HEAD}"])
match = agreement(reads, truth)["effect"]
print(*Circuit.strongest(truth, count=3).edges, sep="\n")
print(f"rank correlation of estimate and truth: {match.rank_correlation:.2f}")
assert Circuit.strongest(truth, count=1).edges[0].receiver == Circuit.strongest(reads, count=1).edges[0].receiver
assert match.rank_correlation > 0.9
assert float(abs(truth["effect"]).max()) < 1e-3

# %% [markdown]
# The second MLP reads the head most. But look at the size: the step that moved the sink, and every edge that reads it,
# changes these predictions by less than 0.001 nats. A circuit of a sink is not yet a reason for the answer.
#
# ## The message, or the attention?
#
# A sink may say something, or only absorb attention. Masking a key removes both; `AblateValues` replaces only its
# value. The control is a weaker key with the same kind of token. `where=` follows the strongest key of each step, and
# `sweep` runs the two interventions on the sink and on the control, on six problems in one batch, under replay.

# %%
base = sinklens.generate(model, prompts)
strongest = Where(top_k=1, source=base, same_step=True)
control = Where(top_k=1, source=base, same_step=True, pick="same_kind", seed=1)
head, changes = {"layers": [LAYER], "heads": [HEAD]}, {}
for name, where in (("strongest", strongest), ("control", control)):
    changes[f"{name}: masked"] = MaskSinks(top_k=None, where=where, **head)
    changes[f"{name}: value replaced"] = AblateValues(where=where, **head)
swept = sweep(model, prompts, changes, replay=True, progress=False)
kl = swept["kl"].mean(("prompt", "step")).to_series()
print(kl.map("{:.5f} nats".format).to_string())
assert kl["strongest: masked"] < 0.001
assert kl["strongest: value replaced"] < 0.001

# %% [markdown]
# Here neither matters. Without the strongest key of head 1.0, or without its message, the predictions stay the same.
# The controls cost more, but only on two of the six problems. One head on six problems is an example, not a finding:
# `sinklens analyse content` compares masking and replaced values over all heads and 100 problems.
#
# Who would read the message? `read_attribution` removes it from what one later component reads.

# %%
readers = read_attribution(run, STEP, LAYER, HEAD, key=new)["kl"].to_series()
print(readers.drop("all").nlargest(3).map("{:.1e} nats".format).to_string(), f"\nall: {readers['all']:.1e} nats")
assert readers.max() < 0.001

# %% [markdown]
# The values of one head read it most, and even this effect is far too small to decide a token.
#
# ## The trap: patching from a free run
#
# So far, the values came from the same run, one step earlier. To ask what a number in the *prompt* causes, take them
# from a run of another prompt. Here 17 − 6 becomes 17 − 8, and head 0.0 is patched at the last step.

# %%
prompt = "Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:"
names, mia = ["blocks.0.attn.hook_z"], sinklens.generate(model, prompt)
free, controlled = Activations(names=names), Activations(names=names)
sinklens.generate(model, prompt.replace(" 6", " 8"), hooks=free)  # decides its own tokens
corrupted(mia, {" 6": " 8"}, hooks=controlled)  # the other prompt on the canvases of `mia`
answers = {}
for name, source in (("free", free), ("corrupted", controlled)):
    patch = PatchHooks(source={23: source.caches[23]}, names=names, heads=[0])
    answers[name] = sinklens.generate(model, prompt, hooks=patch).text.split()[-1]
print(answers)
assert answers == {"free": "9", "corrupted": "11"}

# %% [markdown]
# Patched from the free run, one head at one step turns 11 into 9. It looks as if head 0.0 computed the result. It does
# not: the free run had already written 9 on its canvas, and the head's output carries that token. With `corrupted`,
# only the number in the prompt differs, and the answer stays 11.

# %% [markdown]
# ## Exercises
#
# 1. On the problem `held_out(5)[4]`, the sink of head 3.2 jumps at step 8. Does it jump through the queries or the
#    keys, and along which edge?
# 2. Head 1.0 also jumps at step 7 on `held_out(7)[5]` and `held_out(7)[6]`. Is it the same edge?

# %% [markdown]
# ## Solutions
#
# **1.** Through the keys, and mostly by the edge from head 0.2: the sink moves onto a position that was just decided,
# whose key changed.


# %%
def jump_of(number, layer, head, step):
    """The run of a problem, and the jump of a head at a step."""
    run = sinklens.generate(model, held_out(number + 1)[number].prompt)
    return run, next(jump for jump in sink_jumps(run) if jump[1:4] == (step, layer, head))


third = jump_of(4, 3, 2, 8)
every = ["embed", *(f"L{n}H{head}" for n in range(3) for head in range(6)), *(f"{n}_mlp_out" for n in range(3))]
print({letter: round(jump_undone(*third, letter=letter), 2) for letter in "qk"})
shares = pd.Series({sender: jump_undone(*third, sender, "k") for sender in every})
print(shares.nlargest(3).round(2))
assert shares.idxmax() == "L0H2"

# %% [markdown]
# **2.** On one of the two. On the other no single edge undoes even half of the jump, although all of them together undo
# it: a circuit found on one problem must be checked on others.

# %%
again = {}
for number in (5, 6):
    other = jump_of(number, LAYER, HEAD, 7)
    again[number] = pd.Series({name: jump_undone(*other, name) for name in writers})
    again[number]["all"] = jump_undone(*other)
print(pd.DataFrame(again).round(2))
assert again[6]["L0H4"] > 0.6
assert again[5].drop("all").max() < 0.5
