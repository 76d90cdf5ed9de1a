# %% [markdown]
# # 4. Heads and patches: what causes an answer
#
# At the end you will know
#
# - how to ablate every head of a diffusion language model in one sweep, and to read the layer × head map;
# - how to patch values of one run into another, and to draw the layer × step map of where a number of the prompt is
#   stored;
# - how attribution patching estimates all patches from gradients, and how to detect where it is wrong.
#
# Everything runs on a laptop's CPU in about a minute.

# %%
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import torch

import sinklens
from sinklens.experiments import agreement, attribution_patching, donors, of_step, patching_effects, sweep
from sinklens.interventions import AblateHeads, Activations, PatchHooks
from sinklens.tasks.word_problems import held_out, read_answer, training
from sinklens.views.effects import effect_map

torch.set_num_threads(1)  # models this small gain nothing from more
model = sinklens.load("tiny-llada")
LAYERS, HEADS = model.cfg.n_layers, model.cfg.n_heads
candidates = held_out(6)
base = sinklens.generate(model, [problem.prompt for problem in candidates], record_sinks=False)
answered = [read_answer(text) == problem.result for text, problem in zip(base.text, candidates, strict=True)]
problems = list({problem.kind: problem for problem, good in zip(candidates, answered, strict=True) if good}.values())
assert len(problems) == 3
prompts = [problem.prompt for problem in problems]
for problem in problems:
    print(problem.question, "→", problem.result)

# %% [markdown]
# ## Every head, one at a time
#
# `AblateHeads` sets the output of heads, `hook_z`, to zero (or to a mean, below), at every step of a run. `sweep` runs
# many interventions on many prompts by stacking them in a batch, and compares each with the run without.

# %%
every = {
    f"{layer}.{head}": AblateHeads(layers=[layer], heads=[head]) for layer in range(LAYERS) for head in range(HEADS)
}
swept = sweep(model, prompts, every, progress=False)

results = [[read_answer(text) for text in row] for row in swept["answer"].values]  # [intervention, prompt]
right = np.array(results) == [problem.result for problem in problems]
for name in ("0.0", "1.0", "2.2"):
    print(f"without head {name}:", swept["answer"].sel(intervention=name).values.tolist())

# %% [markdown]
# These runs are *free*: after the first difference they work on other canvases, so an answer shows whether a head was
# needed, but not when. With `replay=True` every step starts from the canvas of the unchanged run, which isolates each
# step's effect: `kl` is how far its predictions move, KL(p‖q) = Σ p log(p/q) in nats, mean over the positions still
# masked.

# %%
forced = sweep(model, prompts, every, replay=True, progress=False)
kl = forced["kl"].mean("prompt").values.reshape(LAYERS, HEADS, -1)  # [layer, head, step]

figure, (left, middle, far) = plt.subplots(1, 3, figsize=(14, 3.4), layout="constrained")
axes = {"rows": ("layer", range(LAYERS)), "columns": ("head", range(HEADS))}
effect_map(right.mean(1).reshape(LAYERS, HEADS), left, **axes, bounds=(0.0, 1.0)).set_title("answers that stay right")
effect_map(kl.mean(2), middle, **axes).set_title("KL, mean over steps (nats)")
per_layer = {"rows": ("layer", range(LAYERS)), "columns": ("step", range(kl.shape[2]))}
effect_map(kl.mean(1), far, **per_layer, label="nats").set_title("KL by step, mean over heads")
plt.show()

worst = np.unravel_index(kl.mean(2).argmax(), kl.shape[:2])
print(f"largest KL: head {worst[0]}.{worst[1]}, {kl.mean(2).max():.2f} nats")
print(f"heads whose loss leaves all answers right: {int(right.all(1).sum())} of {right.shape[0]}")
assert tuple(map(int, worst)) == (1, 5)
assert not right[list(every).index("1.5")].any()

# %% [markdown]
# Some heads of layer 0 and head 1.5 matter most: without head 1.5 none of the three answers stays right. Nine of the 24
# heads can each be removed without a wrong answer. That does not make these heads idle: others may compensate, and a
# map of single heads cannot show it (exercise 1). KL rises along the steps, because it is a mean over the positions
# still masked, and those decided last (names, things and numbers) depend most on the prompt. Three problems are few.
#
# ### Zero is not a typical output
#
# Where a head's mean output is large, zero moves the stream away from anything the model has seen. The other baseline
# is the mean over other problems, which removes the head's information about *this* prompt and keeps the rest.

# %%
reference = donors(model, [problem.prompt for problem in training(0, 8)], lambda name: name.endswith("hook_z"))
pairs = {"0.0": (0, 0), "0.1": (0, 1), "0.4": (0, 4), "0.5": (0, 5), "1.5": (1, 5), "2.4": (2, 4)}
by_mean = {
    name: AblateHeads(layers=[layer], heads=[head], by="mean", reference=reference)
    for name, (layer, head) in pairs.items()
}
meant = sweep(model, prompts, by_mean, replay=True, progress=False)["kl"].mean(("prompt", "step"))
zeroed = forced["kl"].mean(("prompt", "step")).sel(intervention=list(pairs))
for name in pairs:
    print(
        f"head {name}: zero {float(zeroed.sel(intervention=name)):.2f}, mean {float(meant.sel(intervention=name)):.2f}"
    )

# %% [markdown]
# The two agree closely here: the model needs these heads' information about the prompt, not their mean.
#
# ## Where is a number of the prompt stored?
#
# Two prompts differ in one number. The *corrupted* one says 7, the *clean* one 6; both have the same number of tokens.

# %%
clean_prompt = "Question: Mia has 20 pens. She loses 6 of them. How many pens are left?\nAnswer:"
corrupted_prompt = clean_prompt.replace(" 6", " 7")
clean = sinklens.generate(model, clean_prompt)
corrupted = sinklens.generate(model, corrupted_prompt)
print(clean.text, corrupted.text, sep="\n\n")

NUMBER = 10
first = clean.prompt_length
differ = [p for p in range(first, clean.canvas.shape[2]) if clean.tokens[0, p] != corrupted.tokens[0, p]]
print("positions of the answers that differ:", differ)
assert (clean.text[-2:], corrupted.text[-2:]) == ("14", "13")

# %% [markdown]
# At each step we compare the *gap*: the logit of the clean token minus that of the corrupted one, summed over the
# differing positions that are still masked. To make every step comparable, all runs work on the corrupted run's
# canvases (`replay=`). The clean values are those of a run on the same canvases with the 6 put back into the prompt.

# %%
NAMES = ["hook_embed", *(f"blocks.{layer}.hook_resid_post" for layer in range(LAYERS))]


def gaps(prompt, hooks, canvas):
    """The gap of every step of a run on `canvas`, [step]."""
    kept = []

    def keep(logits, hook):  # [batch, pos, vocab]
        open_ = [p for p in differ if corrupted.unmask_step[0, p] >= hook.step]
        parts = [logits[0, p, clean.tokens[0, p]] - logits[0, p, corrupted.tokens[0, p]] for p in open_]
        kept.append(float(sum(parts)))

    hooks = [*hooks, ("denoise.hook_logits", keep)]
    sinklens.generate(model, prompt, hooks=hooks, replay=SimpleNamespace(canvas=canvas), record_sinks=False)
    return np.array(kept)


put_back = corrupted.canvas.clone()
put_back[:, :, NUMBER] = clean.canvas[:, :, NUMBER]
source = Activations(names=NAMES)
top = gaps(clean_prompt, [source], put_back)
bottom = gaps(corrupted_prompt, [], corrupted.canvas)
print("gap at step 0: clean", round(top[0], 1), " corrupted", round(bottom[0], 1))
print("kept:", len(source.caches), "steps, each an ActivationCache of", len(source.caches[0]), "points")

# %% [markdown]
# Now we patch the stream after one layer at one group of positions, at every step, and draw the share of the gap that
# is restored. After the embedding all of the information is at the number; after the last layer all of it must be at
# the answer's positions.

# %%
groups = {
    "at the number": [NUMBER],
    "in the rest of the prompt": [p for p in range(first) if p != NUMBER],
    "at the answer": list(range(first, clean.canvas.shape[2])),
}
restored = {}
for group, positions in groups.items():
    patches = [PatchHooks(source=source.caches, names=[name], positions=positions) for name in NAMES]
    found = np.array([gaps(corrupted_prompt, [patch], corrupted.canvas) for patch in patches])
    restored[group] = (found - bottom) / (top - bottom)  # [layer, step]

figure, axes = plt.subplots(1, 3, figsize=(14, 3.2), layout="constrained", sharey=True)
rows, columns = ("behind layer", ["embedding", *range(LAYERS)]), ("step", range(len(top)))
for ax, (group, shares) in zip(axes, restored.items(), strict=True):
    label = "share of the gap restored" if ax is axes[-1] else ""
    effect_map(shares, ax, rows=rows, columns=columns, bounds=(-1.0, 1.0), label=label).set_title(group)
plt.show()

for group, shares in restored.items():
    print(f"{group:26}", *(f"{share:6.2f}" for share in shares.mean(1)))
number, rest, answer = (shares.mean(1) for shares in restored.values())
np.testing.assert_allclose(number[0], 1, atol=1e-3)
np.testing.assert_allclose(answer[-1], 1, atol=1e-3)
assert rest[1] > number[1] > 0.2

# %% [markdown]
# The number is passed on in layers 0 and 1: after layer 0 more than half of the information is at *other* positions of
# the prompt, after layer 1 three quarters of it is at the answer. Along the steps the rows hardly change until step 20,
# when the copy of the number has been decided. Only the result is left then, and after layer 0 it depends on the rest
# of the prompt (0.8) and hardly on the number (less than 0.1).
#
# ### Until when does it matter?
#
# The next runs are free: the clean embedding is patched in from some step on. If the answer flips, the number was still
# read at that step or later.

# %%
turned = {}
for start in (0, 12, 18, 20, 22, 23):
    patch = PatchHooks(source=source.caches, names="hook_embed", positions=[NUMBER], steps=list(range(start, 24)))
    turned[start] = sinklens.generate(model, corrupted_prompt, hooks=[patch], record_sinks=False).text
    print(f"from step {start:2}: {turned[start]!r}")

assert turned[0] == turned[12] == turned[18] == clean.text
assert "20 - 7 = 14" in turned[20]
assert turned[23] == corrupted.text

# %% [markdown]
# Up to step 18 everything flips. From step 20 on the 7 has been copied and stays, while the result is still that of 6:
# the model computes it from the prompt, not from the worked line. At the last step it is too late, because the result
# has been decided.
#
# ## Attribution patching: all patches from two passes
#
# One step is a pass over its canvas. Patching a value v of the pass changes a metric m by about (v_clean − v_corrupted)
# · ∂m/∂v, and one backward pass gives that for all heads, layers and positions. `patching_effects` measures the effect
# itself, with one copy of the pass for each place; `agreement` compares the two. We use the step at which the copy of
# the number is decided; the metric is the logit of the clean number minus that of the corrupted one there.


# %%
def copy_of_number(prompt, column, new):
    """Ids of the step that copies the number at `column`, the same with `new` there, and the metric."""
    run = sinklens.generate(model, prompt, record_sinks=False)
    good, bad = int(run.tokens[0, column]), int(model.to_tokens(f" {new}")[0, -1])
    written = run.prompt_length + int((run.tokens[0, run.prompt_length :] == good).nonzero()[0])
    ids = of_step(run, int(run.unmask_step[0, written])).ids
    other = ids.clone()
    other[0, column] = bad
    return ids, other, lambda logits: logits[0, written, good] - logits[0, written, bad]


def is_head_output(name):
    return name.endswith("hook_z")


def both(prompt, column, new):
    """Real effects of all heads at some positions, and the estimates without and with a path."""
    ids, other, metric = copy_of_number(prompt, column, new)
    masks = (ids[0] == model.mask_token_id).nonzero()[:, 0].tolist()
    positions = sorted({column, *range(0, ids.shape[1], 4), *masks[:3]})
    truth = patching_effects(model, ids, other, metric, is_head_output, positions=positions)
    plain = attribution_patching(model, ids, other, metric, is_head_output)
    along = attribution_patching(model, ids, other, metric, is_head_output, ig_steps=8)
    return truth, {"one gradient": plain, "ig_steps=8": along}


# %%
figure, axes = plt.subplots(2, 2, figsize=(9, 7), layout="constrained")
scores = {}
for row, new in zip(axes, (12, 7), strict=True):
    truth, estimates = both(clean_prompt, NUMBER, new)
    for ax, (way, estimate) in zip(row, estimates.items(), strict=True):
        scores[new, way] = agreement(estimate, truth)["attn.hook_z"]
        at = estimate["attn.hook_z"].sel(pos=truth["pos"])
        ax.axline((0, 0), slope=1, color="0.7", linewidth=0.8)
        ax.plot(truth["attn.hook_z"].values.ravel(), at.values.ravel(), ".")
        ax.set(xlabel="real effect of the patch (logits)", ylabel="estimate")
        ax.set_title(f"6 against {new}, {way}: r = {scores[new, way].correlation:.2f}")
plt.show()

for (new, way), score in scores.items():
    print(f"6 against {new:2}, {way:12}: r = {score.correlation:5.2f}, relative error {score.relative_error:.2f}")
assert scores[12, "one gradient"].correlation > 0.9
assert scores[7, "one gradient"].correlation < 0
assert scores[7, "ig_steps=8"].correlation > 0.8

# %% [markdown]
# For 6 against 12, one gradient ranks the places well. For 6 against 7, its sign is wrong: the attention that copies a
# number is saturated, and its gradient in the corrupted pass carries no information about another number. With
# `ig_steps=8` the gradient is averaged over eight mixtures of the two embeddings, and the correlation is right in both
# cases; the sizes are not (see the relative error). The estimate alone does not show whether its sign is right: compare
# it with `patching_effects` at some places before you rely on it.
#
# ## Exercises
#
# 1. Removing some heads changes none of the three answers. Ablate all of these at once. Are the answers still right?
# 2. How much of the gap is restored at each step if only the clean run's output of head 0.0 is patched into the
#    corrupted run?
# 3. Does a longer path improve the estimate for 6 against 7?
#
# ### Solutions

# %%
unmissed = [name for name, spared in zip(every, right, strict=True) if spared.all()]
together = sinklens.generate(model, prompts, hooks=[every[name] for name in unmissed], record_sinks=False)
kept = [read_answer(text) == problem.result for text, problem in zip(together.text, problems, strict=True)]
print(f"1. without the {len(unmissed)} heads {', '.join(unmissed)}: {sum(kept)} of {len(kept)} right")
assert all(kept)  # on these three problems they do not compensate for each other

# %%
Z = "blocks.0.attn.hook_z"
head = Activations(names=Z)
gaps(clean_prompt, [head], put_back)
share = gaps(corrupted_prompt, [PatchHooks(source=head.caches, heads=[0])], corrupted.canvas)
share = (share - bottom) / (top - bottom)
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.plot(share, "o-")
ax.set(xlabel="step", ylabel="share of the gap restored", ylim=(0, 1.1), title="2. head 0.0 patched")
plt.show()
print(f"2. between {share.min():.2f} and {share.max():.2f}")
assert share.min() > 0.9

# %%
truth, _ = both(clean_prompt, NUMBER, 7)
ids, other, metric = copy_of_number(clean_prompt, NUMBER, 7)
for steps in (2, 8, 32):
    along = attribution_patching(model, ids, other, metric, is_head_output, ig_steps=steps)
    score = agreement(along, truth)["attn.hook_z"]
    print(f"3. ig_steps={steps:2}: r = {score.correlation:.2f}, relative error {score.relative_error:.2f}")

# %% [markdown]
# A longer path does not help. The remaining error has another cause: on the path all values change together, and a
# patch changes only one.
