# %% [markdown]
# # 1. Watch a diffusion model think
#
# An autoregressive model writes from left to right. A diffusion language model (DLM) starts from a row of masks, the
# *canvas*, and at each *denoising step* replaces some of them by tokens, anywhere in the row. At the end of this
# tutorial you will know
#
# - how to load a model and trace one run of it,
# - in which order it decides its tokens, and how confident it is in each at every step,
# - how to read an attention pattern in the middle of a step,
# - how to look at the attention heads of a step, and at a complete run, in a browser.
#
# Everything runs on a laptop, with two models of two million parameters that ship with the package.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import sinklens
from sinklens.tasks.word_problems import held_out, read_answer
from sinklens.views import color_map

torch.set_num_threads(1)  # models this small gain nothing from more

# %% [markdown]
# ## Load and generate
#
# `tiny-llada` is a diffusion model in the format of LLaDA, trained on word problems with numbers up to 20, and answers
# nothing else. `load` also takes a name on the Hugging Face hub, a folder, or a transformers model object; `sinklens
# models` lists the known families.

# %%
model = sinklens.load("tiny-llada")
prompt = "Question: Ana has 4 boxes of 6 eggs and finds 9 more. How many eggs does Ana have now?\nAnswer:"
run = sinklens.generate(model, prompt)
print(model)
print(run)
print(run.text)

# %% [markdown]
# The answer has 24 positions and took 24 steps, one token each. These are the checkpoint's own settings; `gen_length`,
# `steps`, `block_length`, `temperature` and so on are keywords of `generate`;
# `help(sinklens.families.SAMPLERS["llada"])` lists them all.
#
# `run.canvas` [batch, steps + 1, pos] holds the token ids that each step worked on, followed by the final ones.

# %%
print(tuple(run.canvas.shape))
start = run.prompt_length  # the answer begins here
signs = {"<|endoftext|>": "·", "": "⏎"}


def words(ids):
    """The tokens of one row of ids, with short signs for masks, ends and line breaks."""
    texts = [text.strip() for text in model.to_str_tokens(ids)]
    return [
        "░" if token == model.mask_token_id else signs.get(text, text) for token, text in zip(ids, texts, strict=True)
    ]


for step in (0, 6, 12, 18, 24):
    print(f"{step:2}", *words(run.canvas[0, step, start:]))

# %% [markdown]
# ## The canvas fills in
#
# `run.unmask_step` [batch, pos] is the step that decided each position (−1 for the prompt).

# %%
decided = run.unmask_step[0, start:]
final = words(run.tokens[0, start:])
figure, ax = plt.subplots(figsize=(11, 5), layout="constrained")
ax.imshow(np.arange(run.steps_run)[:, None] > decided.numpy(), cmap=color_map(), vmax=4, aspect="auto")
for place, (step, word) in enumerate(zip(decided.tolist(), final, strict=True)):
    ax.text(place, step, word, ha="center", va="center", fontsize=9)
ax.set(xlabel="position in the answer", ylabel="step")
ax.set_title("each token at the step that decided it; blue: decided before")
plt.show()

# %% [markdown]
# The order is not the reading order. The model first decides where the text *ends* (`·` is the end token, which fills
# the rest of the row), then line breaks, full stops and the `####` before the result, then the words and signs of the
# calculation and the numbers from the question; and last the numbers to compute: `24` twice, then `33` twice.

# %%
order = [final[place] for place in decided.argsort()]
print(*order)
assert order[-4:] == ["24", "24", "33", "33"]

# %% [markdown]
# ## Open the steps
#
# `sinklens.trace` is the same run with its steps open. The block runs in step with the model: `t[name]` waits until the
# model has computed that quantity, and returns the live tensor. Names are those of TransformerLens; `denoise.*` are the
# decisions of a step. Points are read in the order in which a step reaches them.

# %%
print(*[name for name in model.hook_names() if name.startswith("denoise.")], sep="\n")
print(*[name for name in model.hook_names() if name.startswith("blocks.0.attn.")], sep="\n")

# %%
patterns, candidates, confidence = [], [], []
with sinklens.trace(model, prompt) as t:
    for _ in t.steps:
        patterns.append(t["blocks.0.attn.hook_pattern"][0].clone())  # [head, query, key]
        candidates.append(t["denoise.hook_candidates"][0, start:].clone())  # [pos]
        confidence.append(t["denoise.hook_confidence"][0, start:].clone())  # [pos]

patterns, candidates, confidence = torch.stack(patterns), torch.stack(candidates), torch.stack(confidence)
print(tuple(patterns.shape), tuple(candidates.shape), tuple(confidence.shape))
assert t.text == run.text  # reading changes nothing

# %% [markdown]
# A *candidate* is the token that the model would now choose at an undecided position, and its *confidence* is the
# probability of that token. Each step commits the candidate with the highest confidence. What did the model predict for
# the complete answer before anything was decided?

# %%
print("step 0:", *words(candidates[0]))
assert (candidates == run.tokens[0, start:]).all()  # no step proposed anything else

# %% [markdown]
# It proposed its final answer from the first step on. For a problem this short the steps do not find the answer; they
# decide the order in which it becomes certain. The confidence shows what the steps are for.

# %%
undecided = np.where(confidence > 0, confidence, np.nan)  # -inf where a position is already decided
figure, ax = plt.subplots(figsize=(11, 5), layout="constrained")
image = ax.imshow(undecided, cmap=color_map(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
ax.set_xticks(np.arange(len(final)), final)
ax.set(xlabel="position in the answer, by its final token", ylabel="step", title="confidence of undecided positions")
figure.colorbar(image, ax=ax)
plt.show()

# %%
results = [place for place, word in enumerate(final) if word == "33"]
print(f"confidence of the two 33 at step 22: {confidence[22, results].numpy().round(2)}")
print(f"and at step 23, where one is decided: {confidence[23, results].numpy().round(2)}")
assert confidence[:23, results].max() < 0.6
assert confidence[23, results[1]] > 0.95

# %% [markdown]
# The model is confident at all positions but two: the result of the last calculation and its copy after `####`. Each
# has a confidence of about one half through 23 steps. When the first is decided, the other only has to copy it, and its
# confidence rises from 0.48 to 0.99. Positions decided in the same step are predicted independently and could disagree.
# This is what steps are for.

# %% [markdown]
# ## Attention in the middle of a step
#
# `patterns` [step, head, query, key] are the attention patterns of layer 0 that the block kept. Every query distributes
# an attention of 1 over all keys, including those to its right: a DLM has no causal mask. The positions are labeled
# with their final tokens; at step 0 the complete answer is still masked, and queries hardly attend to it.

# %%
assert torch.allclose(patterns.sum(-1), torch.ones(()))
labels = words(run.tokens[0])
places = np.arange(len(labels))
figure, axes = plt.subplots(1, 2, figsize=(13, 6.4), layout="constrained", sharey=True)
for ax, step in zip(axes, (0, 23), strict=True):
    image = ax.imshow(patterns[step, 4], cmap=color_map(), vmin=0, vmax=0.6)
    ax.axvline(start - 0.5, color="0.3", linewidth=0.6)
    ax.axhline(start - 0.5, color="0.3", linewidth=0.6)
    ax.set_xticks(places, labels, rotation=90, fontsize=6)
    ax.set_yticks(places, labels, fontsize=6)
    ax.set(title=f"layer 0, head 4, step {step}", xlabel="key")
axes[0].set_ylabel("query")
figure.colorbar(image, ax=axes, label="attention", shrink=0.8)
plt.show()

# %% [markdown]
# The bright column is the key `Answer`: from the first step to the last, it draws 17 to 32 % of all attention of this
# head. Such a key is an *attention sink*. Sinks are the subject of the [next
# tutorial](02_find_the_sinks.ipynb).

# %%
received = patterns[:, 4].mean(1)  # [step, key], the attention that each key receives from the average query
print({labels[key] for key in received.argmax(1)}, *(f"{100 * value:.0f} %" for value in received.amax(1).aminmax()))
assert {labels[key] for key in received.argmax(1)} == {"Answer"}

# %% [markdown]
# ## The heads in CircuitsVis
#
# `sinklens.views.attention` shows the heads of one step and layer with CircuitsVis; point at a head to enlarge it, and
# at a token to see where it attends. It works without a network, and `.save("heads.html")` writes it to a file.

# %%
sinklens.views.attention(run, step=23, layer=0, heads=[0, 3, 4])

# %% [markdown]
# ## A complete run as a page
#
# `sinklens.views.report` writes one HTML file that opens without a network: step through the canvas, choose a layer and
# a head, and see which positions attend to which. Open it in a browser.

# %%
page = sinklens.views.report(run, "run.html")
print(f"{page.name}: {page.stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# ## The same on a real model
#
# `smollm2-135m-masked` is SmolLM2 with 135 million parameters, trained further by masked diffusion. It needs `sinklens
# fetch smollm2-135m` once (93 MB); without these weights, this section only says so.

# %%
from sinklens.errors import CheckpointError

try:
    real = sinklens.load("smollm2-135m-masked")
except CheckpointError as error:
    print(error)
else:
    with sinklens.trace(real, prompt, gen_length=32) as t:
        for step in t.steps:
            proposed = t["denoise.hook_candidates"][0].clone() if step == 0 else proposed
    answer = slice(t.prompt_length, None)
    order = np.corrcoef(t.unmask_step[0, answer], np.arange(32))[0, 1]
    kept = (proposed[answer] == t.tokens[0, answer]).float().mean()
    print(t.text)
    print(f"correlation of step and place: {order:.2f}; predicted at step 0: {kept:.0%}")
    assert order > 0.5

# %% [markdown]
# On this problem, the real model decides almost from left to right, while `tiny-llada` decided the ends first. Only 44
# % of its tokens are those predicted at step 0; in `tiny-llada`, all were. Its answer is wrong: it has the format of
# its training problems, and few of its answers are right.

# %% [markdown]
# ## Exercises
#
# 1. In which order does `tiny-llama`, the autoregressive twin, decide the tokens of the same answer?
# 2. With `steps=1` all 24 positions are decided at once. On the first 20 held-out problems (`held_out(20)` has
#    `.prompt` and `.result`, `read_answer` reads the number after `####`), how many answers are right in 1 step, and
#    how many in 24?
# 3. With `block_length=6` the answer is decided in four blocks, from left to right. Does the model still decide the end
#    of the text first?

# %% [markdown]
# ## Solutions
#
# **1.** From left to right, regardless of the tokens: one step per token, until the first end token.

# %%
twin = sinklens.generate("tiny-llama", prompt)
print(twin.unmask_step[0, twin.prompt_length :].tolist())
assert twin.unmask_step[0, twin.prompt_length :].diff().min() >= 0
assert twin.text == run.text

# %% [markdown]
# **2.** 18 both times. The most probable number is mostly the same at both positions, so here they agree even though
# each is predicted without the other. (The loss from fewer steps shows in longer texts, and when tokens are sampled.)

# %%
problems = held_out(20)
right = {}
for steps in (1, 24):
    many = sinklens.generate(model, [problem.prompt for problem in problems], steps=steps, record_sinks=False)
    right[steps] = sum(read_answer(text) == p.result for text, p in zip(many.text, problems, strict=True))
print(right)
assert right == {1: 18, 24: 18}

# %% [markdown]
# **3.** No: the end positions belong to the last block, which is decided last. Within a block the order is by
# confidence again.

# %%
blocks = sinklens.generate(model, prompt, block_length=6)
print(blocks.unmask_step[0, start:].tolist())
assert (blocks.unmask_step[0, start:].reshape(4, 6) // 6 == torch.arange(4)[:, None]).all()
assert blocks.text == run.text
