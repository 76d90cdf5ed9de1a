# %% [markdown]
# # 5. Coming from TransformerLens
#
# At the end you will know
#
# - how a hook function written for TransformerLens acts on a complete denoising run, or at one step of it;
# - how `run_with_cache`, `run_with_hooks` and TransformerLens's own patching functions work on one canvas of a run;
# - how to get an `ActivationCache` of every step, and use TransformerLens's helpers on it;
# - which names are the same, and which points a diffusion model adds;
# - how to trace an existing `TransformerBridge` step by step.
#
# Everything runs on a laptop's CPU in about a minute.

# %%
import os

os.environ["TQDM_DISABLE"] = "1"  # no progress bars of TransformerLens and transformers in this page

import matplotlib.pyplot as plt
import torch
from transformer_lens import ActivationCache, patching, utilities
from transformer_lens.model_bridge import TransformerBridge

import sinklens
from sinklens.views import color_map

torch.set_num_threads(1)  # models this small gain nothing from more
torch.set_grad_enabled(False)
model = sinklens.load("tiny-llada")
prompt = "Question: Mia has 20 pens. She loses 6 of them. How many pens are left?\nAnswer:"
print(model.cfg.n_layers, "layers,", model.cfg.n_heads, "heads,", len(model.hook_names()), "hook points")

# %% [markdown]
# ## The difference: one pass, or many
#
# A TransformerLens experiment is one forward pass. A diffusion language model answers in many: it starts from a
# *canvas*, the prompt followed by mask tokens. Each *denoising step* is one pass over the canvas, after which some
# positions get their token. `run.canvas[:, s]` is what step s worked on; `run.unmask_step` is the step that decided
# each position.

# %%
run = sinklens.generate(model, prompt)
print(run.text)
first = run.prompt_length
words = model.to_str_tokens(run.tokens[0])
for position in range(first, first + 13):
    print(f"position {position}: {words[position]!r:8} decided at step {int(run.unmask_step[0, position])}")
assert run.text.endswith("#### 14")

# %% [markdown]
# ## A hook function, unchanged
#
# This is the head ablation of TransformerLens's main demo. It takes a value and a hook point, and returns the value.

# %%
LAYER, HEAD = 0, 0
Z = utilities.get_act_name("z", LAYER)  # "blocks.0.attn.hook_z", the same name here


def head_ablation_hook(value, hook):  # [batch, pos, head, d_head]
    value[:, :, HEAD, :] = 0.0
    return value


# %% [markdown]
# On one canvas, use it as in TransformerLens. `model(ids)` returns the logits [batch, pos, vocab]; in LLaDA, the logits
# at a position predict the token *at* that position, not the next one.

# %%
ids = run.canvas[:, 5]
plain = model(ids)
ablated = model.run_with_hooks(ids, fwd_hooks=[(Z, head_ablation_hook)])
print("logits", list(plain.shape), "largest change", round(float((ablated - plain).abs().max()), 1))

# %%
# In `hooks=` of `generate` (and of `trace`) it acts at every step:
every = sinklens.generate(model, prompt, hooks=[(Z, head_ablation_hook)])
print(every.text)
assert not every.text.endswith("#### 14")

# %% [markdown]
# To act at one step only, use the hook point: `hook.step` is the current step (besides `hook.name` and `hook.layer()`,
# which TransformerLens has too). A wrapper leaves your function unchanged.


# %%
def at_steps(steps, fn):
    def only_then(value, hook):
        return fn(value, hook) if hook.step in steps else value

    return only_then


once = sinklens.generate(model, prompt, hooks=[(Z, at_steps([5], head_ablation_hook))])
moved = int((once.unmask_step != run.unmask_step).sum())
print(once.text, f"\n{moved} positions are decided at another step than before")
assert once.text == run.text
assert moved > 0

# %% [markdown]
# Without this head at step 5, some positions are decided in another order, but the answer is the same; without it at
# all steps the answer is wrong. Here is the same edit in a `trace` block, which calls your function directly:

# %%
with sinklens.trace(model, prompt) as t:
    for _ in t.steps[[5]]:
        t[Z] = head_ablation_hook(t[Z], hook=None)

assert torch.equal(t.canvas, once.canvas)

# %% [markdown]
# After step 5 the two runs work on different canvases, so later differences are consequences, not effects. With
# `replay=` a run computes everything under the hooks, but starts every step from the canvas of an earlier run. Each
# step is then exactly a `run_with_hooks` on that canvas:

# %%
seen = []
keep = ("denoise.hook_logits", lambda logits, hook: seen.append(logits.clone()))
sinklens.generate(model, prompt, hooks=[(Z, head_ablation_hook), keep], replay=run)
torch.testing.assert_close(seen[5], ablated, atol=1e-4, rtol=1e-4)
print(f"{len(seen)} steps, and step 5 gives the logits of run_with_hooks on canvas 5")

# %% [markdown]
# ## `run_with_cache` on one canvas
#
# It returns TransformerLens's own `ActivationCache`. Sixteen steps into the run, eight positions of the answer are
# still masked. The logit lens shows what each layer would predict there:

# %%
ids = run.canvas[:, 16]
logits, cache = model.run_with_cache(ids)
assert isinstance(cache, ActivationCache)
print("cache['pattern', 2]", list(cache["pattern", 2].shape), "  ", len(cache), "values")

streams, labels = cache.accumulated_resid(apply_ln=True, return_labels=True)  # [component, batch, pos, d_model]
lens = (streams @ model.tree.W_U).softmax(-1)
torch.testing.assert_close(lens[-1], logits.softmax(-1), atol=1e-4, rtol=1e-4)


# %%
def heat(ax, values, rows, columns, label, kind="sequential", **how):
    image = ax.imshow(values, aspect="auto", cmap=color_map(kind), **how)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns, rotation=90)
    ax.figure.colorbar(image, ax=ax).set_label(label)


masked = (ids[0] == model.mask_token_id).nonzero()[:, 0]
chance, token = lens[:, 0, masked].max(-1)
figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
heat(ax, chance, labels, [f"pos {position}" for position in masked], "probability of the likeliest", vmin=0, vmax=1)
for row, column in torch.cartesian_prod(*map(torch.arange, token.shape)).tolist():
    text = model.to_str_tokens([int(token[row, column])])[0]
    colour = "black" if chance[row, column] < 0.5 else "white"
    ax.text(column, row, repr(text)[1:-1], ha="center", va="center", fontsize=8, color=colour)
ax.set_title("Logit lens at the masked positions, step 16")
plt.show()

answers = [model.to_str_tokens([int(token[-1, column])])[0] for column in range(len(masked))]
print(answers)
assert answers == [words[position] for position in masked]

# %% [markdown]
# All eight are right at the last layer, though none has been committed: the sampler commits one per step. CircuitsVis's
# view of attention heads works as well; `sinklens.views.attention` draws it offline.

# %%
sinklens.views.attention(run, step=16, layer=0, heads=[0, 4])

# %% [markdown]
# ## TransformerLens's own patching functions
#
# `transformer_lens.patching` needs a model's `cfg`, `run_with_cache` and `run_with_hooks`, so it works here. The clean
# canvas is that of step 18, where " 6" is about to be copied from the prompt to position 27. The corrupted one has " 7"
# in the prompt. Where does the number go?

# %%
NUMBER, COPY = 10, 27
good, bad = (int(model.to_tokens(text)[0, -1]) for text in (" 6", " 7"))
clean_ids = run.canvas[:, 18]
corrupted_ids = clean_ids.clone()
corrupted_ids[0, NUMBER] = bad
assert (words[NUMBER], words[COPY]) == (" 6", " 6")


def logit_difference(logits):
    return logits[0, COPY, good] - logits[0, COPY, bad]


clean_logits, clean_cache = model.run_with_cache(clean_ids)
top, bottom = logit_difference(clean_logits), logit_difference(model(corrupted_ids))
print(f"logit of ' 6' minus logit of ' 7': clean {top:.1f}, corrupted {bottom:.1f}")

# %%
patched = patching.get_act_patch_resid_pre(model, corrupted_ids, clean_cache, logit_difference)  # [layer, pos]
restored = (torch.as_tensor(patched) - bottom) / (top - bottom)
figure, ax = plt.subplots(figsize=(9, 3), layout="constrained")
columns = [repr(word)[1:-1].replace("<|endoftext|>", "end") for word in model.to_str_tokens(clean_ids[0])]
columns = [word.replace("<|mdm_mask|>", "[mask]").replace("<|startoftext|>", "start") for word in columns]
heat(ax, restored, [f"layer {n}" for n in range(4)], columns, "share restored", kind="diverging", vmin=-1, vmax=1)
ax.tick_params(axis="x", labelsize=6)
ax.set_title("hook_resid_pre patched, clean into corrupted")
plt.show()
print(f"layer 0, at the number: {restored[0, NUMBER]:.2f}; layer 3, at the copy: {restored[3, COPY]:.2f}")
assert restored[0, NUMBER] > 0.99
assert restored[3, COPY] > 0.95

# %% [markdown]
# The number enters at its position and has moved to the masked position by the last layer. Exercise 1 asks which head
# carries it.
#
# ## An `ActivationCache` of every step
#
# `t.cache(names, steps)` in a block keeps points by step: `caches[step]` is an `ActivationCache`, with the values after
# the block's edits. `names` are names, or predicates as in `names_filter`.

# %%
WANTED = ("hook_embed", "hook_resid_pre", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "hook_z", "hook_scale")

with sinklens.trace(model, prompt) as t:
    caches = t.cache(lambda name: name.endswith(WANTED))

print(len(caches), "steps; step 22 is an", type(caches[22]).__name__, "of", len(caches[22]), "values")

# %% [markdown]
# Next, direct logit attribution by step. The last number of the answer, " 14" at position 35, is committed at the very
# last step. Its logit minus that of " 13" is a sum over what the embedding, the attention layers and the MLPs wrote at
# that position. `logit_attrs` divides each by the final norm's scale. The norm's learned weight is part of its
# directions, because the weights are not folded, so the contributions add up to the logits.

# %%
RESULT = 35
right, wrong = int(run.tokens[0, RESULT]), int(model.to_tokens(" 13")[0, -1])
question = {"tokens": right, "incorrect_tokens": wrong, "pos_slice": RESULT}
rows = []
for step in caches:
    stack, parts = caches[step].decompose_resid(pos_slice=RESULT, return_labels=True)  # [component, batch, d_model]
    rows.append(caches[step].logit_attrs(stack, **question)[:, 0])
attributed = torch.stack(rows, dim=1)  # [component, step]

figure, ax = plt.subplots(figsize=(9, 3.2), layout="constrained")
heat(ax, attributed, parts, [str(step) for step in caches], "logits", kind="diverging", vmin=-9, vmax=9)
ax.set(title='Logit of " 14" less that of " 13" at the result, by component', xlabel="step")
plt.show()

whole = attributed.sum(0)
print(f"the whole difference: step 0 {whole[0]:.1f}, step 22 {whole[22]:.1f}, step 23 {whole[23]:.1f}")
assert int(run.unmask_step[0, RESULT]) == 23
assert whole[0] > 5

sevens = model.to_tokens(prompt.replace(" 6", " 7"))  # of which the answer is 13
start = model(torch.cat([sevens, run.canvas[:, 0, first:]], dim=1))[0, RESULT]
print(f"with 7 instead of 6 in the prompt, step 0: {start[right] - start[wrong]:.1f}")
assert start[right] < start[wrong]

# %% [markdown]
# At step 0, with only masks after the prompt, the model already prefers the right result to the number next to it: by
# 7.3 logits here, and by 6.1 in the other direction with 7 instead of 6 in the prompt, where 13 is right. The
# attribution hardly changes for 23 steps; once the result is in the worked line, the last MLP adds the rest.
#
# `stack_head_results` splits attention by head. It works from the cached `hook_z`, as in TransformerLens:

# %%
heads, labels = caches[22].stack_head_results(pos_slice=RESULT, return_labels=True)  # [layer · head, batch, d_model]
written = caches[22].logit_attrs(heads, **question).reshape(4, 6)
attention = attributed[[parts.index(f"{layer}_attn_out") for layer in range(4)], 22]
torch.testing.assert_close(written.sum(1), attention, atol=1e-3, rtol=1e-3)
strongest = labels[int(written.argmax())]
print(f"strongest head: {strongest}, {written.max():.2f} of {whole[22]:.1f} logits")
assert written.max() < 0.1 * whole[22]

# %% [markdown]
# No head matters much here: the MLPs of the last two layers write most of the difference.
#
# ## Equivalent names
#
# Points, `cfg`, `hook_dict`, weights (`model.W_Q`, `model.blocks[0].attn.W_O`, …), `to_tokens`, `to_str_tokens`,
# `run_with_cache`, `run_with_hooks` and `ActivationCache` are those of TransformerLens. `load` replaces its
# `boot_transformers`, and `generate` also takes `hooks=`. Negative layers and TransformerLens 4's names, such as
# `blocks.0.attn.q.hook_out`, are accepted. The full list is in [From
# TransformerLens](../docs/concepts/from-transformerlens.md).
#
# The helpers of `ActivationCache` work too. `model.tokens_to_residual_directions`, which `logit_attrs` uses, includes
# the final norm's weight.
#
# These are the points of one layer and of the sampler, with the shapes of this canvas:

# %%
shapes = {name: list(value.shape) for name, value in cache.items() if name.startswith(("hook", "blocks.0", "ln_final"))}
for name, shape in shapes.items():
    print(f"{name:35} {shape}")

# %% [markdown]
# ## Points that TransformerLens does not have
#
# Attention has `attn.hook_attn_mask`, which is added to the scores, and `attn.hook_sink_scores`, the pattern's column
# sums (read-only). Neither needs the map. The sampler has `denoise.hook_canvas` and `hook_logits`, its inputs, and
# `hook_candidates`, `hook_confidence` and `hook_commit`, its decisions. [Hook points](../docs/concepts/hook-points.md)
# lists all.
#
# Here, `hook_attn_mask` hides the number from every layer, and `hook_sink_scores` is compared with the pattern's sums.

# %%
sums, map_ = "blocks.2.attn.hook_sink_scores", "blocks.2.attn.hook_pattern"
_, pair = model.run_with_cache(clean_ids, names_filter=[sums, map_])
torch.testing.assert_close(pair[sums], pair[map_].sum(2), atol=1e-4, rtol=1e-4)


def hide_number(mask, hook):  # [batch, head, query or 1, key]
    mask[..., NUMBER] = -torch.inf
    return mask


everywhere = [(lambda name: name.endswith("hook_attn_mask"), hide_number)]
hidden = sinklens.generate(model, prompt, hooks=everywhere)
print(hidden.text)
assert " 20 - 6" not in hidden.text
assert sinklens.generate(model, prompt.replace(" 6", " 7"), hooks=everywhere).text == hidden.text

# %% [markdown]
# No position can read the number now, so 14 is a guess: with 7 in the prompt the text is the same, as the last line
# checks.
#
# The `denoise` points are the decisions of a step, and hook functions can change them too. Here confidence decreases
# from left to right, so the answer is written from left to right:


# %%
def left_to_right(confidence, hook):  # [batch, pos]; -inf where nothing is proposed
    order = -torch.arange(confidence.shape[1], dtype=confidence.dtype)
    return torch.where(confidence.isinf(), confidence, order)


ordered = sinklens.generate(model, prompt, hooks=[("denoise.hook_confidence", left_to_right)])
print(ordered.text)
assert ordered.unmask_step[0, first:].tolist() == list(range(24))

# %% [markdown]
# ## A `TransformerBridge`, step by step
#
# `sinklens.load` accepts a bridge: it shares the weights without copying them, and hooks set on the bridge stay with
# the bridge. An autoregressive model's steps are its decoded tokens. Here the bridge wraps the shipped `tiny-llama`;
# weights that a bridge has folded or centered are refused.

# %%
folder = sinklens.load("tiny-llama").cfg.model_name  # the folder of a checkpoint; a hub name works the same way
bridge = TransformerBridge.boot_transformers(folder)
bridged = sinklens.load(bridge)

newest = {}
with sinklens.trace(bridged, prompt, gen_length=24) as t:
    for step in t.steps:
        newest[step] = t["blocks.2.attn.hook_pattern"][0, :, -1].clone()  # [head, key]: of the newest query

print(t.text)
print("keys that the newest query sees, by step:", [pattern.shape[-1] for pattern in newest.values()])
assert t.text.endswith("#### 14")

# %% [markdown]
# Step s adds the query at position `prompt_length + s - 1`. One pass of the *bridge* over the finished text has the
# same rows in one map:

# %%
_, theirs = bridge.run_with_cache(t.tokens[:, : t.prompt_length + len(newest) - 1])
whole_map = theirs["blocks.2.attn.hook_pattern"][0]
for step, pattern in newest.items():
    query = t.prompt_length + step - 1
    torch.testing.assert_close(pattern, whole_map[:, query, : query + 1], atol=1e-4, rtol=1e-4)
print(f"{len(newest)} steps agree with the bridge's pattern")

# %% [markdown]
# ## Exercises
#
# 1. Which head alone is enough to pass the number on? Use `patching.get_act_patch_attn_head_out_all_pos`.
# 2. `head_ablation_hook` at all steps breaks the answer; at step 5 alone it does not. From which step on can it act
#    without breaking the answer?
# 3. `sinklens.load` takes TransformerLens 4's spellings. Which point is `blocks.-1.mlp.in.hook_out`?
#
# ### Solutions

# %%
by_head = patching.get_act_patch_attn_head_out_all_pos(model, corrupted_ids, clean_cache, logit_difference)
by_head = (torch.as_tensor(by_head) - bottom) / (top - bottom)  # [layer, head]
print(f"1. head 0.0 restores {by_head[0, 0]:.2f}, the next one {by_head.flatten().sort().values[-2]:.2f}")
assert by_head[0, 0] > 0.9

# %%
for start in (0, 8, 16, 20, 22, 23):
    late = sinklens.generate(
        model, prompt, hooks=[(Z, at_steps(range(start, 24), head_ablation_hook))], record_sinks=False
    )
    print(f"2. from step {start:2}: {late.text!r}")

# %%
# Without the head at the last step alone, the last number is wrong: it is computed when it is unmasked.
assert late.text.endswith("#### 16")

found = []
model.run_with_hooks(clean_ids, fwd_hooks=[("blocks.-1.mlp.in.hook_out", lambda value, hook: found.append(hook.name))])
print("3.", found)
assert found == ["blocks.3.mlp.hook_pre_linear"]
