# %% [markdown]
# # 6. Coming from nnsight
#
# At the end you will know
#
# - that a loaded model is an nnsight model: `model.trace`, `.output`, `.save()`, invokes and `.edit()` are nnsight's;
# - how a trace block follows a *denoising run* step by step, and how to select steps and stop;
# - in which order values can be read, and what happens when a value is read too late;
# - how to intervene by hand: edit a point, patch one run into another, force a token, reorder the sampler's decisions;
# - how to get gradients at one step.
#
# Everything runs on a laptop's CPU in about a minute.

# %%
import matplotlib.pyplot as plt
import torch

import sinklens
from sinklens.errors import HookOrderError
from sinklens.experiments import of_step

torch.set_num_threads(1)  # models this small gain nothing from more
torch.set_grad_enabled(True)  # the default; gradients are read below
model = sinklens.load("tiny-llada")
prompt = "Question: Mia has 20 pens. She loses 6 of them. How many pens are left?\nAnswer:"
run = sinklens.generate(model, prompt)
words = model.to_str_tokens(run.tokens[0])
first = run.prompt_length  # the answer begins here
print(run.text)
assert run.text.endswith("#### 14")

# %% [markdown]
# ## One pass: plain nnsight
#
# A diffusion language model answers in *denoising steps*. Each is one pass over the *canvas*, the prompt followed by
# masks; then some positions get their token. `run.canvas[:, s]` is what step s worked on. One such canvas is a batch of
# token ids, and `model.trace(ids)` is nnsight's trace of one pass over it. The children of `model` are hook points with
# TransformerLens's names. The modules of the transformers model have the paths that they have on nnsight's own models,
# such as `model.model.layers[1]` and `model.lm_head`.

# %%
ids = run.canvas[:, 18]
with model.trace(ids):
    stream = model.blocks[1].hook_resid_pre.output.save()  # [batch, pos, d_model]
    pattern = model.blocks[2].attn.hook_pattern.output.save()  # [batch, head, query, key]
    logits = model.output.detach().save()  # [batch, pos, vocab]
print(list(stream.shape), list(pattern.shape), list(logits.shape))
torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern.sum(-1)))

# %% [markdown]
# A point is the identity function: `.input` is the computed value, `.output` the value that the model continues with.
# In-place edits and assignments both take effect.

# %%
with model.trace(ids):
    before = model.blocks[0].attn.hook_z.input.clone().save()
    model.blocks[0].attn.hook_z.output[:, :, 0] = 0  # head 0 writes nothing
    edited = model.output.detach().save()
print("largest change of a logit:", round(float((edited - logits).abs().max()), 1))
assert (before[:, :, 0] != 0).any()

# %% [markdown]
# ## A complete run: the same, with steps
#
# `sinklens.trace` opens a run. `t` is an nnsight tracer; `for step in t.steps` waits for each step in turn. `t[name]`
# is short for `t.blocks[…]….output`, and it reads and assigns.

# %%
proposed = {}
with sinklens.trace(model, prompt) as t:
    for step in t.steps:
        proposed[step] = t["denoise.hook_candidates"][0].clone()  # [pos]: the token each position would get
print(t.text)
print("proposed at step 0:", repr(model.tokenizer.decode(proposed[0][first : first + 13])))
assert torch.equal(proposed[0][first:], t.tokens[0, first:])

# %% [markdown]
# On this short problem the model proposes the complete answer at step 0; the 24 steps commit it, one position each.
#
# There are two differences from a plain trace:
#
# - Names that the block assigns are available after it, so `.save()` is not needed (but works).
# - `t[name]` is the live tensor. `.clone()` what you keep over steps, because later edits may change it in place.
#
# After the block, `t.text`, `t.canvas`, `t.unmask_step` and `t.sinks` hold what `sinklens.generate` returns.
#
# ### Choosing steps
#
# `t.steps` takes slices, lists, numbers and, with `at`, fractions of the run. Several loops in one block share the run.

# %%
CANVAS = "denoise.hook_canvas"  # [batch, pos]
masks = {}
with sinklens.trace(model, prompt) as t:
    for chosen in (t.steps[:2], t.steps[[5, 9]], t.steps.at(0.5, 1.0)):
        for step in chosen:
            masks[step] = int((t[CANVAS] == model.mask_token_id).sum())
print("masks on the canvas, by step:", masks)
assert list(masks) == [0, 1, 5, 9, 12, 23]

# %% [markdown]
# ### Stopping
#
# `t.stop()` ends the run, here as soon as "####" is on the canvas; positions still masked are filled with proposals.

# %%
mark = model.to_tokens("\n####")[0, -1]
with sinklens.trace(model, prompt) as t:
    for _ in t.steps:
        written = bool((t[CANVAS][0, first:] == mark).any())
        guess = t["denoise.hook_candidates"].clone()
        if written:
            t.stop()
answer = model.tokenizer.decode(guess[0, first:], skip_special_tokens=True)
print(f"{t.steps_run} steps kept, {t.answers[0].masks} masks left over: {t.text!r}\nfilled: {answer!r}")
assert t.steps_run == 15
assert answer == run.text

# %% [markdown]
# ## The order of points
#
# The block does not run before or after the model: it runs *with* it, and pauses wherever it reads a value. So points
# are read in the order in which a step reaches them. `model.hook_names()` lists them in that order.

# %%
names = model.hook_names()
print(names[0], names[1], "…", *(name for name in names if name.startswith("blocks.2.")), "…", *names[-4:], sep="\n")

# %% [markdown]
# After layer 2, it is too late to read layer 0. A plain nnsight loop over iterations would serve the value of the
# *next* step; here, the line that reads it raises an error. (`t.iter[...]` is another name for `t.steps[...]`.) Reading
# a step that has passed, or a value after the run, is an error too:


# %%
def backwards():
    with sinklens.trace(model, prompt) as t:
        for _ in t.steps:
            late = t["blocks.2.hook_resid_post"]
            early = t["blocks.0.hook_resid_post"]
    return late, early


def a_step_that_has_passed():
    with sinklens.trace(model, prompt) as t:
        for _ in t.steps[:5]:
            pass
        for _ in t.steps[2:]:
            pass


def after_the_run():
    with sinklens.trace(model, prompt) as t:
        pass
    return t["blocks.0.hook_resid_post"]


messages = []
for mistake in (backwards, a_step_that_has_passed, after_the_run):
    try:
        mistake()
    except HookOrderError as error:
        messages.append(str(error))
print(*messages, sep="\n\n")
assert "'blocks.0.hook_resid_post' was requested in step 0 after the step had passed it" in messages[0]
assert len(messages) == 3

# %% [markdown]
# Modules of the transformers model follow the same order, between the points: the output of layer 1's `q_proj` is ready
# just before `blocks.1.attn.hook_q`.

# %%
with sinklens.trace(model, prompt) as t:
    for _ in t.steps[:1]:
        raw = t.hf.model.layers[1].self_attn.q_proj.output  # [batch, pos, head · d_head]
        queries = t.blocks[1].attn.hook_q.output  # [batch, pos, head, d_head]
assert torch.equal(raw.reshape(queries.shape), queries)

# %% [markdown]
# Without any pass, `sinklens hooks tiny-llada` on the command line prints every point with its shape and meaning.
#
# A run can also be opened as on nnsight's own models: `max_new_tokens` is `gen_length`, the iterations of the tracer
# are denoising steps, and `tracer.result` is the ids of prompt and answer.

# %%
with model.generate(prompt, max_new_tokens=24) as tracer:
    for _ in tracer.iter[:2]:
        best = model.lm_head.output[0, first:].argmax(-1)  # [pos]: the most likely token of each position
    written = tracer.result
assert torch.equal(best, proposed[1][first:])
assert torch.equal(written, run.tokens)

# %% [markdown]
# ## Interventions by hand
#
# **A head, from some step on.** Without head 0 of layer 0, the numbers are lost:

# %%
with sinklens.trace(model, prompt) as t:
    for _ in t.steps[8:]:
        t["blocks.0.attn.hook_z"][:, :, 0] = 0

print(t.text)
assert not t.text.endswith("#### 14")

# %% [markdown]
# **One run into another.** The second run's prompt says 7 instead of 6. Only its residual stream at that position is
# patched into the first run, at every step, at the input of one layer:

# %%
NUMBER = 10
other_prompt = prompt.replace(" 6", " 7")
assert words[NUMBER] == " 6"
Z = "blocks.0.attn.hook_z"
stored, head = {}, {}
with sinklens.trace(model, other_prompt) as other:
    for step in other.steps:
        for layer in range(4):
            stored[step, layer] = other[f"blocks.{layer}.hook_resid_pre"][:, NUMBER].clone()
            if layer == 0:
                head[step] = other[Z][:, :, 0].clone()
print("7 in the prompt:     ", repr(other.text))

texts = {}
for layer in range(4):
    with sinklens.trace(model, prompt) as t:
        for step in t.steps:
            t[f"blocks.{layer}.hook_resid_pre"][:, NUMBER] = stored[step, layer]
    texts[layer] = t.text
    print(f"patched into layer {layer}:", repr(t.text))
assert texts[0] == other.text
assert "20 - 7 = 14" in texts[1]
assert texts[2] == texts[3] == run.text

# %% [markdown]
# Patched at the input of layer 0, the 7 takes effect everywhere. At layer 1 it is copied into the calculation, but the
# result is that of 6: the components that compute the result have read the number in layer 0. From layer 2 on no
# component reads it at its position. Which component reads it in layer 0? Patch one head's output instead of the
# stream:

# %%
for start in (0, 16, 20):
    with sinklens.trace(model, prompt) as t:
        for step in t.steps[start:]:
            t[Z][:, :, 0] = head[step]
    print(f"head 0.0 from step {start:2}: {t.text!r}")
assert "20 - 6 = 13" in t.text

# %% [markdown]
# One head of 24 is enough to carry the number. From step 20 on the copy is already written (at step 18), but the result
# is not.
#
# **A token.** `denoise.hook_canvas` is the canvas that a step works on; an edit stays on the canvas. If we make the
# model write 19 for 20, does it compute with 19?

# %%
with sinklens.trace(model, prompt) as t:
    for _ in t.steps[[10]]:
        t["denoise.hook_canvas"][:, 25] = model.to_tokens(" 19")[0, -1]

print(t.text)
assert "19 - 6 = 14" in t.text

# %% [markdown]
# It does not: the result comes from the prompt.
#
# **The order of decisions.** Unchanged, this model commits the end tokens first. `denoise.hook_confidence` determines
# the order; with small values for end tokens, the words come first:

# %%
with sinklens.trace(model, prompt) as t:
    for _ in t.steps:
        ends = t["denoise.hook_candidates"] == model.eos_token_ids[0]
        confidence = t["denoise.hook_confidence"]
        t["denoise.hook_confidence"] = torch.where(ends, confidence - 10, confidence)

figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
ax.plot(run.unmask_step[0, first:], "o", label="by confidence")
ax.plot(t.unmask_step[0, first:], "x", label="end tokens last")
ax.set_xticks(range(24), [repr(word)[1:-1].replace("<|endoftext|>", "end") for word in words[first:]], rotation=90)
ax.set(ylabel="step that decides the position", title="The order of decisions")
ax.legend()
plt.show()
print(t.text)
assert t.text == run.text
assert t.unmask_step[0, first : first + 13].max() == 12

# %% [markdown]
# ## Several inputs in one pass
#
# Invokes of `model.trace` work as in nnsight; a barrier passes a value from one to the other. With the clean stream
# patched into the corrupted pass at all positions of one layer, the logits are the clean ones.

# %%
clean = of_step(run, 18).ids
corrupted = clean.clone()
corrupted[0, NUMBER] = model.to_tokens(" 7")[0, -1]

with model.trace() as tracer:
    barrier = tracer.barrier(2)
    with tracer.invoke(clean):
        carried = model.blocks[2].hook_resid_pre.output
        barrier()
    with tracer.invoke(corrupted):
        barrier()
        model.blocks[2].hook_resid_pre.output = carried
        patched_logits = model.output.save()
torch.testing.assert_close(patched_logits, model(clean), atol=1e-4, rtol=1e-4)

# %% [markdown]
# For several prompts, pass a list: `sinklens.trace(model, [prompt, other_prompt])` has two rows in every value. A row's
# result does not depend on its batch.
#
# ## Gradients at one step
#
# A run needs no gradients and keeps none. But a step is a pass over its canvas, so its gradients are those of
# `model.trace` on that canvas; `of_step(run, s)` returns the ids (and, in a batch, the mask of the left padding). Step
# 18 writes the copy of the number, at position 27. Which positions of the stream would change that decision?

# %%
COPY = 27
good, bad = int(clean[0, NUMBER]), int(corrupted[0, NUMBER])
slopes = {}
with model.trace(corrupted, attention_mask=of_step(run, 18).attention_mask):
    streams = [model.blocks[layer].hook_resid_pre.output for layer in range(4)]
    metric = model.output[0, COPY, good] - model.output[0, COPY, bad]
    value = metric.detach().save()
    with metric.backward():
        for layer in (3, 2, 1, 0):  # backwards, the order in which gradients arrive
            slopes[layer] = streams[layer].grad.clone().save()
gradients = torch.stack([slopes[layer][0] for layer in range(4)])  # [layer, pos, d_model]
print("logit of ' 6' minus logit of ' 7', with 7 in the prompt:", round(float(value), 1))

# %% [markdown]
# Multiplied by the difference between the clean and the corrupted stream, the gradient estimates the effect of patching
# each place (`sinklens.experiments.attribution_patching` does it for all points; [tutorial
# 4](04_heads_and_patches.ipynb) draws the map).

# %%
streams = {}
for name, canvas in {"clean": clean, "corrupted": corrupted}.items():
    with model.trace(canvas):
        for layer in range(4):
            streams[name, layer] = model.blocks[layer].hook_resid_pre.output.detach().clone().save()

difference = torch.cat([streams["clean", layer] - streams["corrupted", layer] for layer in range(4)])
estimate = (difference * gradients).sum(-1)  # [layer, pos]

ranked = estimate[0].abs().argsort(descending=True)
print("position with the largest estimate: layer 0", int(ranked[0]), " layer 3", int(estimate[3].abs().argmax()))
assert int(ranked[0]) == NUMBER

with model.trace(corrupted):
    model.blocks[0].hook_resid_pre.output[:, NUMBER] = streams["clean", 0][:, NUMBER]
    really = (model.output[0, COPY, good] - model.output[0, COPY, bad]).detach().save()
print(f"layer 0, at the number: estimated {float(estimate[0, NUMBER]):.1f}, real {float(really - value):.1f} logits")
assert estimate[0, NUMBER] < 0 < really - value

# %% [markdown]
# The gradient finds the places, but its sign is wrong here. [Tutorial 4](04_heads_and_patches.ipynb) explains why, and
# how to detect it.
#
# ## Edited models
#
# `model.edit()` returns a copy with an edit that acts in each of its `model.trace` calls. It is for single passes: a
# run has many, and `sinklens.trace` and `sinklens.generate` refuse an edited copy. For a run, write the change in the
# block, or as a hook function.

# %%
with model.edit() as (_, muted):
    muted.blocks[0].attn.hook_z.output[:, :, 0] = 0
with muted.trace(ids):
    from_copy = muted.output.save()
assert torch.equal(from_copy, edited)


# %% [markdown]
# ## Exercises
#
# 1. Which key does the masked position 27 attend to most in head 0 of layer 0, half-way through the run?
# 2. Repair this block; its second line reads too late.
#
# ```python
# for _ in t.steps:
#     logits = t["denoise.hook_logits"]
#     t["blocks.3.hook_mlp_out"][:, 35] = 0
# ```
#
# 3. The answer is proposed at step 0. Commit all of it there: make a run of one step by editing `denoise.hook_commit`.
#
# ### Solutions

# %%
with sinklens.trace(model, prompt) as t:
    for _ in t.steps.at(0.5):
        pattern = t["blocks.0.attn.hook_pattern"][0, 0].clone()  # [query, key]
strongest = int(pattern[COPY].argmax())
print(f"1. half-way: key {strongest}, {words[strongest]!r}, weight {float(pattern[COPY, strongest]):.2f}")

# %%
with sinklens.trace(model, prompt) as t:
    for _ in t.steps:
        t["blocks.3.hook_mlp_out"][:, 35] = 0
        logits = t["denoise.hook_logits"]
print("2.", repr(t.text))

# %%
with sinklens.trace(model, prompt) as t:
    for step in t.steps:
        if step == 1:
            t.stop()
        t["denoise.hook_commit"] = t["denoise.hook_confidence"].isfinite()
print("3.", t.steps_run, "step:", repr(t.text))
assert t.text == run.text
