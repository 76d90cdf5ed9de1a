# %% [markdown]
# # 3. Ablate them
#
# Do the sinks matter? Block attention to them and see how the answers change. For diffusion language models the paper
# ([Rulli et al., 2025](https://arxiv.org/abs/2510.15731)) finds that masking one to five sinks per head costs little,
# where an autoregressive model collapses. At the end of this tutorial you will know
#
# - how to mask sinks in a run, and why it needs a control with random keys,
# - why a masked sink comes back every second step, and how to keep it masked,
# - how to measure accuracy under masking, with intervals and paired differences,
# - what the paper's table looks like for two small models, which behave differently from the paper's.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import sinklens
from sinklens import views
from sinklens.evaluation import evaluate, frame, masking
from sinklens.interventions import MaskSinks

torch.set_num_threads(1)  # models this small gain nothing from more

# %% [markdown]
# ## One problem, one key per head
#
# `MaskSinks(top_k=1)` does what the paper does: at step t, in each layer and head, no query attends to the key that had
# the largest column sum at step t − 1. (At step 0 nothing is masked.) Pass an intervention in `hooks=`.

# %%
model = sinklens.load("tiny-llada")
prompt = "Question: Ana has 4 boxes of 6 eggs and finds 9 more. How many eggs does Ana have now?\nAnswer:"
plain = sinklens.generate(model, prompt)
masked = sinklens.generate(model, prompt, hooks=MaskSinks(top_k=1))
control = sinklens.generate(model, prompt, hooks=MaskSinks(top_k=1, pick="random"))
for name, run in (("unmasked", plain), ("one sink", masked), ("one random key", control)):
    print(f"{name:15}{run.text!r}")

# %%
assert control.text == plain.text
assert masked.text != plain.text

# %% [markdown]
# Without the control you would not know whether the *sink* matters, or whether any missing key would have the same
# effect. One problem proves nothing, but it is worth a first look.
#
# ## A masked sink comes back every second step
#
# Which keys were masked? `keys` reads them from the run, which recorded them.

# %%
keys = MaskSinks(top_k=1).keys(masked).isel(batch=0)  # [step, layer, head, pos], True where masked
layer, head = 3, 0
path = keys.isel(layer=layer, head=head).argmax("pos").to_numpy()
print("masked key by step:", path[1:].tolist())

# %% [markdown]
# Position 3 and other keys are masked at alternate steps. The reason: a key that is masked at step t gets no attention
# there, so it is not a sink *of step t*, and at t + 1 the key that took its place is masked. At t + 1 the old sink is
# unmasked, draws attention again, and is masked at t + 2.

# %%
score = masked.sinks.scores().isel(batch=0, layer=layer, head=head)
steps = np.arange(masked.steps_run)
figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
ax.plot(
    steps, plain.sinks.scores().isel(batch=0, layer=layer, head=head, pos=3), "o-", color="0.6", label="unmasked run"
)
ax.plot(steps, score.isel(pos=3), "o-", color="#d94801", label="one sink masked per step")
ax.set(xlabel="step", ylabel="score of position 3", title=f"layer {layer}, head {head}")
ax.legend()
plt.show()

# %%
again = {gap: float((keys[gap + 1 :].values & keys[1 : len(keys) - gap].values).any(-1).mean()) for gap in (1, 2)}
print(f"masked again one step later: {again[1]:.0%} of all heads and steps; two steps later: {again[2]:.0%}")
assert again[1] == 0
assert again[2] > 0.5

# %% [markdown]
# To keep the sinks masked, take them from a run in which nothing was masked: `source=`. At step t this masks the sinks
# that the *unmasked* run had at step t − 1. We call these masks steady.

# %%
steady = sinklens.generate(model, prompt, hooks=MaskSinks(top_k=1, source=plain.sinks))
print(repr(steady.text))
assert steady.text != plain.text

# %% [markdown]
# ## Accuracy, with intervals
#
# `evaluate` runs a model on a task under each *condition*, the same problems under all, and appends every answer to a
# ledger in a folder; after an interruption the same call resumes where it stopped. `masking` makes the paper's
# conditions: no masking, the K strongest keys, and on request as many random keys and steady masks
# (`of_unmasked=True`). Here are 25 problems; the shell command for more is `sinklens evaluate tiny-llada tiny-llama
# --task tiny-gsm --mask-sinks 0 1 5 10 --controls random --of-unmasked --out results/`.

# %%
conditions = masking([1, 5], controls=["random"], of_unmasked=True)
print(*[condition.name for condition in conditions], sep="\n")

# %%
for name in ("tiny-llada", "tiny-llama"):
    evaluate(name, "tiny-gsm", conditions, "results", limit=25)
table = frame("results")
print(table[["model", "condition", "right", "total", "estimate", "low", "high"]].round(2).to_string(index=False))

# %% [markdown]
# `low` and `high` bound the 95 % interval of the accuracy (Wilson's). With 25 problems it is wide.

# %%
ax = views.interval_dots(table, by="condition")
ax.set(xlabel="accuracy on 25 problems, with 95 % intervals", xlim=(-0.03, 1.03))
plt.show()

# %% [markdown]
# The intervals of two conditions say little of their *difference*, because both saw the same problems. The table also
# contains paired differences, against the unmasked run and against as many random keys, with intervals and p-values of
# McNemar's exact test, corrected for their number (Holm).

# %%
columns = ["model", "condition", "against_unmasked_difference", "against_unmasked_p", "against_random_difference"]
columns += ["against_random_low", "against_random_high", "against_random_p"]
print(table[columns].rename(columns=lambda name: name.replace("against_", "")).round(3).to_string(index=False))

# %% [markdown]
# ## The paper's table, in miniature
#
# Accuracy by number of masked keys (K), and by which keys they are:

# %%
named = table.replace({"pick": {"": "none"}})
print(named.pivot(index=["model", "pick"], columns="masked", values="estimate").round(2).to_string(na_rep=""))

# %% [markdown]
# | the paper, GSM8K | K = 0 | 1 | 5 | 10 |
# |---|---|---|---|---|
# | LLaDA-8B | .76 | .75 | .73 | .55 |
# | Llama-3.1-8B | .85 | .02 | .02 | .01 |
#
# The small models show the opposite. `tiny-llada`, the diffusion model, loses 44 points when one sink per head is
# masked and 76 when it stays masked, while a random key costs 8. It needs its sinks. `tiny-llama` loses 8 points with
# one sink, as many as with one random key, and none when its sinks stay masked. With five keys it loses 20 points to
# sinks and 44 to random keys. Whether that difference of 24 [0, 48] is due to chance, 25 problems cannot settle.
#
# Neither result refutes the paper. These are models of two million parameters that know one kind of text, on 25
# problems. But three lessons apply to any model: compare with random keys, keep the masks steady, and give intervals.


# %%
def accuracy(model, condition):
    """Share of right answers."""
    return float(table[(table["model"] == model) & (table["condition"] == condition)]["estimate"].iloc[0])


assert accuracy("tiny-llada", "1 sink of the unmasked run") < accuracy("tiny-llada", "1 sink")
assert accuracy("tiny-llada", "1 sink") < accuracy("tiny-llada", "1 random key") - 0.2
assert accuracy("tiny-llama", "1 sink of the unmasked run") == accuracy("tiny-llama", "unmasked")

# %% [markdown]
# ## The same on a real model
#
# `smollm2-135m-masked` and its autoregressive twin `smollm2-135m-causal` have 135 million parameters. They need
# `sinklens fetch smollm2-135m` once (93 MB); without these weights, this section only says so.

# %%
from sinklens.errors import CheckpointError

try:
    for name, settings in (("smollm2-135m-masked", {"steps": 12}), ("smollm2-135m-causal", {})):
        real, hooks = sinklens.load(name), {"unmasked": (), "one sink": MaskSinks(top_k=1)}
        for label, hook in (hooks | {"one random key": MaskSinks(top_k=1, pick="random")}).items():
            run = sinklens.generate(real, prompt, hooks=hook, gen_length=24, record_sinks=False, **settings)
            print(f"{name} {label:15}{run.text!r}")
except CheckpointError as error:
    print(error)

# %% [markdown]
# One problem is a first look. The answer of the autoregressive twin breaks when its sinks are masked, and not with
# random keys. The masked model's answer changes with both, so here the control does not show that its sinks matter.
# Over 200 windows of text (`docs/findings.md`), hiding all sinks costs the twin 1.51 nats per token, and the masked
# model 0.67.

# %% [markdown]
# ## Exercises
#
# 1. In which layer do the sinks of `tiny-llada` matter? Mask them steadily in one layer at a time (`layers=[layer]`),
#    on the first ten held-out problems.
# 2. When do they matter? Mask them steadily only in the first 12 steps, then only in the last 12 (`steps=range(12)`).
# 3. How many problems are needed until the interval of an accuracy of 0.92 is narrower than 5 points?
#    (`sinklens.evaluation.proportion(right, total)`)

# %% [markdown]
# ## Solutions
#
# **1.** Most in the first. Of 9 right answers, masks in layer 0 leave 3, those in layer 1 leave 5, in layer 2 7, and in
# layer 3 8.

# %%
from sinklens.tasks.word_problems import held_out, read_answer

problems = held_out(10)
prompts = [problem.prompt for problem in problems]
unmasked = sinklens.generate(model, prompts)


def right(**where):
    """How many of the problems are answered right with steady masks, one key per head, there."""
    hook = MaskSinks(top_k=1, source=unmasked.sinks, **where)
    run = sinklens.generate(model, prompts, hooks=hook, record_sinks=False)
    return sum(read_answer(text) == problem.result for text, problem in zip(run.text, problems, strict=True))


by_layer = {layer: right(layers=[layer]) for layer in range(4)}
print(by_layer)
assert by_layer[0] < by_layer[3]

# %% [markdown]
# **2.** In the second half, when the numbers are decided (see the first tutorial): masks there leave 1 right answer;
# masks in the first half leave 8.

# %%
by_time = {"first half": right(steps=range(12)), "second half": right(steps=range(12, 24))}
print(by_time)
assert by_time["second half"] < by_time["first half"]

# %% [markdown]
# **3.** About 500: with 500 problems, the interval is 4.8 points wide. A difference between two conditions on the same
# problems needs fewer, because problems that both answer right, or both answer wrong, cancel.

# %%
from sinklens.evaluation import proportion

for total in (25, 100, 500, 2000):
    found = proportion(round(0.92 * total), total)
    print(f"{total:5} problems: {found.low:.3f} to {found.high:.3f}")
