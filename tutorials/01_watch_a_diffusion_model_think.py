# %% [markdown]
# # 1. Watch a diffusion model think
#
# An autoregressive model writes from left to right. A diffusion language model (DLM) starts from a row of masks, the
# *canvas*, and at each *denoising step* replaces some of them by tokens, anywhere in the row. At the end of this tutorial
# you will know
#
# - how to load a model and trace one run of it,
# - in which order it decides its tokens, and how sure it is of each,
# - how to read an attention pattern in the middle of a step,
# - how to look at the attention heads of a step, and at a whole run, in a browser.
#
# Everything runs on a laptop with two models of two million parameters that come with the package.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import sinklens

torch.set_num_threads(1)  # models this small gain nothing from more

# %% [markdown]
# ## Load and generate
#
# `tiny-llada` is a diffusion model in the format of LLaDA, trained on word problems. `load` also takes a name on the
# Hugging Face hub, a folder, or a model that you hold already; `sinklens models` lists what is known.

# %%
model = sinklens.load("tiny-llada")
prompt = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
run = sinklens.generate(model, prompt)
print(model)
print(run)
print(run.text)

# %% [markdown]
# The answer has 24 positions and took 24 steps, one token each. These are the checkpoint's own settings; `gen_length`,
# `steps`, `block_length`, `temperature` and so on are keywords of `generate`
# (`help(sinklens.sampling.LladaSettings)` lists them).
#
# `run.canvas` [batch, steps + 1, pos] holds the token ids that each step worked on, and last those that remain.

# %%
print(tuple(run.canvas.shape))
start = run.prompt_length  # the answer begins here
shown = {"<|mdm_mask|>": "░", "<|endoftext|>": "·", "\n": "⏎"}


def words(ids):
    """The tokens of one row of ids, with short signs for masks, ends and line breaks."""
    return [shown.get(word, word.strip()) for word in model.to_str_tokens(ids)]


for step in (0, 6, 12, 18, 24):
    print(f"{step:2}", *words(run.canvas[0, step, start:]))

# %% [markdown]
# ## The canvas fills in
#
# `run.unmask_step` [batch, pos] tells the step that decided each position (−1 for the prompt).

# %%
decided = run.unmask_step[0, start:]
final = words(run.tokens[0, start:])
figure, ax = plt.subplots(figsize=(11, 5), layout="constrained")
ax.imshow(np.arange(run.steps_run)[:, None] > decided.numpy(), cmap="Blues", vmax=3, aspect="auto")
for place, (step, word) in enumerate(zip(decided.tolist(), final, strict=True)):
    ax.text(place, step, word, ha="center", va="center", fontsize=9)
ax.set(xlabel="position in the answer", ylabel="step", title="each token at the step that decided it; blue: decided before")
print(*[final[place] for place in decided.argsort()])

# %% [markdown]
# The order is not that of reading. The model first decides where the text *ends* (`·` is the end token, which fills the
# rest of the row), then the line break, the full stop and the `####` before the result; then the outline of the
# calculation; and last what had to be computed, the two `12`.

# %%
order = [final[place] for place in decided.argsort()]
assert order[:5] == ["·"] * 5
assert order[-2:] == ["12", "12"]

# %% [markdown]
# ## Open the steps
#
# `sinklens.trace` is the same run with its steps open. The block runs in step with the model: `t[name]` waits until the
# model has computed that quantity and gives the live tensor. Names are those of TransformerLens; `denoise.*` are the
# decisions of a step. Points are asked for in the order in which a step reaches them.

# %%
print([name for name in model.hook_names() if name.startswith("denoise.")])
print([name for name in model.hook_names() if name.startswith("blocks.0.attn.")])

# %%
patterns, confidence = [], []
with sinklens.trace(model, prompt) as t:
    for step in t.steps:
        patterns.append(t["blocks.2.attn.hook_pattern"][0].clone())  # [head, query, key]
        confidence.append(t["denoise.hook_confidence"][0].clone())  # [pos]

patterns, confidence = torch.stack(patterns), torch.stack(confidence)
assert t.text == run.text  # looking changes nothing
assert torch.allclose(patterns.sum(-1), torch.ones(()))  # each query spends an attention of 1
print(tuple(patterns.shape), tuple(confidence.shape))

# %% [markdown]
# The *confidence* of a position is the probability of the token that the model would put there. At each step the most
# confident undecided position gets its token. So the confidence of the committed token is the largest of its step, and
# nothing keeps it from being low.

# %%
where = torch.stack([(t.unmask_step[0] == step).nonzero()[0, 0] for step in range(t.steps_run)])
sure = confidence[torch.arange(t.steps_run), where]
figure, ax = plt.subplots(figsize=(11, 3), layout="constrained")
ax.bar(np.arange(t.steps_run), sure)
ax.set_xticks(np.arange(t.steps_run), order)
ax.set(xlabel="token that the step decided, in order of the steps", ylabel="confidence", ylim=(0, 1.02))
print("least sure of:", order[int(sure.argmin())], f"{float(sure.min()):.2f}")
print([round(float(value), 2) for value in sure])
