# %% [markdown]
# # 7. Your own model, your own detector, your own study
#
# sinklens can be extended from your own script or notebook. At the end of this tutorial you will know
#
# - how to load a checkpoint from a folder, and what is checked before it is loaded,
# - how to add a new family of checkpoints: two records, no code,
# - how to write a detector, also one that needs a new recorded quantity,
# - how to write a study: a question about several models, with intervals over problems, tables and figures.

# %%
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from safetensors.torch import load_file, save_file

import sinklens
from sinklens.errors import CheckpointError
from sinklens.families import Family, register
from sinklens.hooks import Architecture
from sinklens.interventions import AblateHeads, MaskSinks
from sinklens.model.files import find_checkpoint
from sinklens.tasks.word_problems import held_out

torch.set_num_threads(1)  # models this small gain nothing from more
prompts = [problem.prompt for problem in held_out(20)]

# %% [markdown]
# ## A checkpoint in a folder
#
# `sinklens.load` takes a folder with `config.json`, one or several `*.safetensors` and, for text, a tokenizer: the
# layout in which checkpoints are published. A checkpoint's code is never run, and pickles are refused.
#
# We write one: `tiny-llada` without head 0 of layer 0. For that, we set the first 32 columns of the output projection,
# LLaDA's `attn_out`, to 0. An intervention that ablates the head must give the same canvases.

# %%
shipped = find_checkpoint("tiny-llada")  # the folder of the shipped checkpoint; a name on the hub is downloaded
mine = Path("headless")
shutil.copytree(shipped, mine, dirs_exist_ok=True)
weights = load_file(mine / "model.safetensors")
weights["model.transformer.blocks.0.attn_out.weight"][:, :32] = 0  # [d_model, head · d_head]
save_file(weights, mine / "model.safetensors")
tiny, headless = sinklens.load("tiny-llada"), sinklens.load(mine)
print(headless)
reference, by_weights = sinklens.generate(tiny, prompts), sinklens.generate(headless, prompts)
by_hook = sinklens.generate(tiny, prompts, hooks=AblateHeads(layers=[0], heads=[0]))
assert torch.equal(by_weights.canvas, by_hook.canvas)
changed = sum(a != b for a, b in zip(by_weights.text, reference.text, strict=True))
print(f"without this head {changed} of {len(prompts)} answers change")

# %% [markdown]
# ### What is checked
#
# Names and shapes in the files are compared with what the config describes before any weight is read: transformers
# alone would continue with random weights. An error names a config value that transformers' class cannot express.

# %%
file = mine / "config.json"
described = json.loads(file.read_text())
for wrong in ({"n_layers": 5}, {"activation_type": "gelu"}):
    file.write_text(json.dumps(described | wrong))
    try:
        sinklens.load(mine)
    except CheckpointError as error:
        print(error, end="\n\n")

# %% [markdown]
# After loading, a short pass checks that watching changes no logit, that pattern rows sum to 1, that attention has the
# direction that the family declares, and that editing a pattern reaches the logits.
#
# ## Your own family
#
# Suppose "newdlm" is published: Mistral's architecture without the causal mask, with other weight names. We make it
# from `tiny-llada`, so we know what it must compute: with `sliding_window` off, Mistral is Llama.

# %%
THEIRS = [  # in the order of replacement
    ("model.transformer.wte.", "tok."), ("model.transformer.ln_f.", "final."), ("model.transformer.ff_out.", "head."),
    ("model.transformer.blocks.", "layer."), (".attn_norm.", ".n1."), (".ff_norm.", ".n2."), (".attn_out.", ".wo."),
    (".ff_proj.", ".gate."), (".up_proj.", ".up."), (".ff_out.", ".down."),
    (".q_proj.", ".wq."), (".k_proj.", ".wk."), (".v_proj.", ".wv."),
]  # fmt: skip
new, renamed = Path("newdlm"), load_file(shipped / "model.safetensors")
for ours, theirs in THEIRS:
    renamed = {name.replace(ours, theirs): value for name, value in renamed.items()}
print(*[name for name in renamed if not name.startswith("layer.") or name.startswith("layer.0.")])
old = json.loads((shipped / "config.json").read_text())
config = {
    "model_type": "newdlm", "vocab_size": old["vocab_size"], "hidden_size": old["d_model"],
    "intermediate_size": old["mlp_hidden_size"], "num_hidden_layers": old["n_layers"],
    "num_attention_heads": old["n_heads"], "num_key_value_heads": old["n_kv_heads"],
    "max_position_embeddings": old["max_sequence_length"], "rms_norm_eps": old["rms_norm_eps"],
    "rope_parameters": {"rope_type": "default", "rope_theta": old["rope_theta"]}, "sliding_window": None,
    "tie_word_embeddings": False, "mask_token_id": old["mask_token_id"], "eos_token_id": old["eos_token_id"],
}  # fmt: skip
shutil.copytree(shipped, new, dirs_exist_ok=True)
save_file(renamed, new / "model.safetensors")
(new / "config.json").write_text(json.dumps(config))
try:
    sinklens.load(new)
except CheckpointError as error:
    print("\n", error, sep="")

# %% [markdown]
# Register it with two records. An `Architecture` says where transformers' class keeps the modules that the hook points
# attach to; Mistral uses Llama's names, so the defaults apply. A `Family` says how the files become that class: its
# sampler, the weight names (regular expressions), and the required config values.

# %%
family = Family(
    name="newdlm", model_types=("newdlm",), architecture="mistral",  # transformers' model_type
    sampler="llada",  # denoise in blocks, least confident positions stay masked
    verified="canvases equal tiny-llada's", required={"sliding_window": (None,)},
    renames={
        r"^tok\.": "model.embed_tokens.", r"^final\.": "model.norm.",
        r"^head\.": "lm_head.", r"^layer\.": "model.layers.",
        r"\.n1\.": ".input_layernorm.", r"\.n2\.": ".post_attention_layernorm.",
        r"\.w([qkvo])\.": r".self_attn.\1_proj.", r"\.(gate|up|down)\.": r".mlp.\1_proj.",
    },
)  # fmt: skip
register(family, Architecture())
newdlm = sinklens.load(new)
print(newdlm)

# %% [markdown]
# Loading, every hook point, traces, interventions and sinks now work. Is the result correct? The self-check of `load`
# cannot decide that; only a comparison with outputs of the family's own code can. Here these are `tiny-llada`'s:

# %%
ours = sinklens.generate(newdlm, prompts)
assert torch.equal(ours.canvas, reference.canvas)
xr.testing.assert_allclose(ours.sinks.scores(), reference.sinks.scores(), atol=1e-4)
print("every canvas of 20 problems equals tiny-llada's")

# %% [markdown]
# A name or `model_type` already in use is refused. In your script call `register` before `load`. The command line and
# workers on other machines do not run your script; they read the entry-point group `sinklens.families`, in which an
# installed package names a function that registers the family (docs/concepts/your-own.md). Architectures that are not
# of the Llama kind (another order of norms, attention outside transformers' attention interface) need more than two
# records; see docs/design.md.
#
# ## Your own detector
#
# A detector says where a track has a sink (`detect`) and how strong each position is (`strength`). Equation 3 of the
# paper requires a score that is 3 above the mean of the others, which is stricter at some lengths than at others; a
# *relative* bound has no unit. `track.scores()` is NaN where a position does not exist (padding, or not generated yet);
# comparisons with NaN are False, so nothing more is needed.

# %%
from sinklens.sinks import Detector, EpsilonOverMean, Quantity, Record, kinds, motion, over_others


@dataclass(frozen=True)
class TimesMean(Detector):
    """Score above `times` the mean of the other positions."""

    times: float = 4.0

    def strength(self, track):
        score = track.scores()
        return score / over_others(score)

    def detect(self, track):
        return self.strength(track) > self.times


# %% [markdown]
# ### A new quantity
#
# The second detector asks a question that column sums cannot answer: which keys are sinks *of the masked queries*, the
# positions still to be decided? Column sums add up all queries, and half of them are the prompt's. So the pattern
# itself must be recorded. A `Quantity` names a hook point in a block and what to keep of it; we add the axis `query`.


# %%
class Patterns(Quantity):
    """The complete pattern of every step and layer: ``pattern`` [head, query, pos]."""

    name = "pattern"
    point = "attn.hook_pattern"
    variables: ClassVar = {"pattern": ("head", "query", "pos")}

    def finish(self, kept, real, heads):
        return {"pattern": kept}


run = sinklens.generate(tiny, prompts, record_sinks=Record([Patterns()]))
track, pattern = run.sinks, run.sinks.data["pattern"]
print(dict(pattern.sizes), f"{pattern.nbytes / 1e6:.0f} MB")
real = track.data["is_real"].rename(pos="query").astype(np.float32)  # 0 for the queries of the padding on the left
assert np.allclose(xr.dot(pattern, real, dim="query"), track.data["score"].transpose(..., "pos"), atol=1e-3)

# %% [markdown]
# For 20 short problems that fits in memory; for a large model keep less in `Quantity.keep`. `masked` in the track marks
# the positions that were masks when the step began. The scores of the masked queries are scaled so that uniform
# attention is 1. Fewer queries make noisier scores, so there is a control: as many queries, drawn at random.


# %%
@dataclass(frozen=True)
class MaskedQueries(Detector):
    """Eq. 3 on S / |M| · Σ_{i in M} A[i, j], with M the masked ones of S positions; needs "pattern"."""

    epsilon: float = 3.0
    at_random: bool = False  # M are as many queries, drawn at random

    def queries(self, track):
        masked, real = track.data["masked"], track.data["is_real"]
        if self.at_random:
            drawn = np.random.default_rng(0).random(masked.shape) + 2.0 * ~real.to_numpy()[:, None]  # padding last
            masked = masked.copy(data=drawn.argsort(-1).argsort(-1) < masked.sum("pos").to_numpy()[..., None])
        return masked.rename(pos="query").astype(np.float32)  # [batch, step, query]

    def strength(self, track):
        asking = self.queries(track)
        received = xr.dot(track.need("pattern")["pattern"], asking, dim="query")
        received = received * track.data["is_real"].sum("pos") / asking.sum("query")
        score = received.transpose("batch", "step", "layer", "head", "pos")
        return score - over_others(score)

    def detect(self, track):
        return self.strength(track) > self.epsilon


# A new detector works wherever one is accepted: in `track.detect`, the measures of motion, and the token kinds.
detectors = {
    "Eq. 3": EpsilonOverMean(), "4 times the mean": TimesMean(),
    "of masked queries": MaskedQueries(), "of random queries": MaskedQueries(at_random=True),
}  # fmt: skip
exists, paper = motion.existing(track), track.detect(EpsilonOverMean())
rows = {}
for name, detector in detectors.items():
    found = track.detect(detector)
    rows[name] = {
        "positions [%]": float(100 * found.sum() / exists.sum()),
        "of Eq. 3's [%]": float(100 * (found & paper).sum() / paper.sum()),
        "lifetime [steps]": motion.motion_table(track, detector)["lifetime"].mean(),
    }
table = pd.DataFrame(rows).T
print(table.round(2))


def preference(detector):
    """Share among sinks over share among positions, by kind of token; 1 is chance."""
    counts = kinds.enrichment(track, detector).sum("batch")[["sinks", "positions"]].to_dataframe()
    counts = counts[counts["positions"] > 0]
    return (counts["sinks"] / counts["sinks"].sum()) / (counts["positions"] / counts["positions"].sum())


preferred = pd.DataFrame({name: preference(detector) for name, detector in detectors.items()})
print(preferred.round(2))
assert table.loc["4 times the mean", "of Eq. 3's [%]"] == 100
assert preferred.loc["start", "of masked queries"] < 1 < preferred.loc["start", "of random queries"]

# %% [markdown]
# The relative bound finds all sinks of Eq. 3 and a few more. That follows from arithmetic: scores are 1 on average, so
# if there is a sink, the mean of the others is below 1, and a score 3 above that mean is more than 4 times that mean.
# The masked queries have 3.5 times as many sinks as Eq. 3 finds, and 60 % of those of Eq. 3 are among them; but the
# same is true for random queries (61 %), and part of it is the noise of few queries. The difference is where their
# sinks are. They are seldom on the start token, which draws the prompt's queries (0.19 times as often as chance,
# against 3.63 by Eq. 3 and 1.79 for random queries), and more often on line breaks (1.48), which lead the paper's list
# for LLaDA. Their sinks last 6.6 steps; those of random queries, drawn again at each step, last 1.5.

# %% [markdown]
# ## Your own study
#
# A study asks one question of several models on the same prompts. It is a subclass of `Study` that defines what to
# *measure* on a batch of prompts (a Dataset with the axis `prompt`), and the *tables* and *figures* of the
# measurements. The base class loads, batches, resumes after an interruption, and writes files and a manifest.
#
# Our question: **is a head's strongest key at the most recently decided position?** The *lag* of a position is the
# number of steps since it got its token: 1 is the position decided a step ago, 0 the one that this step decides, and −1
# the one that the next step will decide. For every lag we measure how often the strongest key of a head has it, over
# the steps at which a position of that lag exists. The chance level is one over the number of positions.

# %%
from sinklens.analyses import Study, difference_table, interval_table
from sinklens.views import curves, panels

LAGS = np.arange(-6, 13)


def shares_by_lag(track, unit):
    """``share``, ``chance`` and ``excess``, their difference, [prompt, lag]; NaN where no step has a position of it."""
    score = track.scores(unit)
    exists, strongest = score.notnull(), score == score.max("pos")
    committed = track.data["committed"]  # [batch, step, pos], True at the step that decides a position
    lag = (track.data["step"] - committed.argmax("step")).where(committed.any("step"))
    found = []
    for number in LAGS:
        there = exists & (lag == number)
        asked = there.any("pos")
        share = (strongest & there).any("pos").where(asked).mean(("step", "layer", "head"))
        chance = (there.sum("pos") / exists.sum("pos")).where(asked).mean(("step", "layer", "head"))
        found.append(xr.Dataset({"share": share, "chance": chance, "excess": share - chance}))
    return xr.concat(found, dim="lag").assign_coords(lag=LAGS).rename(batch="prompt").transpose("prompt", "lag")


@dataclass
class Recency(Study):
    """Does a head's strongest key stand at the most recently decided position?"""

    name: ClassVar[str] = "recency"
    unit: str = "sum"  # an option of the study, recorded in its manifest

    def measure(self, model, prompts, settings):
        return shares_by_lag(self.generate(model, prompts, settings).track, self.unit)

    def tables(self, measured):
        lags = interval_table(measured, ["share", "chance", "excess"], self.seed)
        return {"lags": lags, "differences": difference_table(measured, ["excess"], self.seed)}

    def figures(self, measured, examples):
        figure, (ax,) = panels(1, size=(8, 3.8))
        curves(interval_table(measured, ["share"], self.seed), "lag", ax)
        for line, data in zip(list(ax.lines), measured.values(), strict=True):
            ax.plot(LAGS, data["chance"].mean("prompt"), "--", color=line.get_color(), linewidth=1)
        ax.set(xlabel="steps since the position was decided", ylabel="share of heads and steps", xticks=LAGS)
        ax.set_title("Where the strongest key stands; bands: 95 % intervals over templates; dashed: chance")
        return {"lags": figure}


# %% [markdown]
# `self.generate` runs a batch and removes the steps at which a row only waits for others of its batch, so a problem's
# numbers do not depend on the rest of the batch.

# %%
names, study = ("tiny-llada", "tiny-llama"), Recency()
findings = study.run(names, [problem.prompt for problem in held_out(30)], "recency-results")
print(*[file.name for file in findings.files])
lags = findings.tables["lags"]
few = lags[lags["lag"].isin([-1, 0, 1, 2, 8]) & (lags["measure"] != "chance")]
print(few.drop(columns="prompts").round(3).to_string(index=False))
print(findings.manifest["options"], findings.manifest["prompts"], "prompts")
figure = study.figures(findings.measured, findings.examples)["lags"]
plt.show()

# %% [markdown]
# No: in `tiny-llada` the strongest key of a head is at the position decided a step ago in 1.4 % [1.1, 1.7] of all
# cases, less often than chance (2.0 %). At the position that *this* step decides, it is about as often as by chance
# (2.1 % [1.5, 2.7]). Intervals are over the seven templates of the problems. Nearly the entire curve is below chance:
# the answer draws less attention than the prompt.
#
# In `tiny-llama` it is never there, but that is not a finding: under a causal mask only one query sees the newest key,
# so its column sum cannot be large. The result depends on the unit, hence the option (exercise 2).

# %%
excess = lags[lags["measure"] == "excess"].set_index(["model", "lag"])[["low", "estimate", "high"]]
assert excess.loc[("tiny-llada", 1), "high"] < 0 < excess.loc[("tiny-llada", 0), "high"]

# %% [markdown]
# The manifest records everything that determined the numbers, and a hash of the study's source: an interrupted study
# resumes where it stopped, unless any of this changed. In a separate file, the class above is also a command: `sinklens
# analyse recency.py MODEL…`.
#
# ## Exercises
#
# 1. `MaskSinks(top_k=None, detector=…, source=run)` masks what a detector finds in the unmasked run. Does `tiny-llada`
#    need the sinks of Eq. 3 more, or those of the masked queries? Compare with random keys (`pick="random"`).
# 2. Run the study again with the unit `"visible"`.
#
# ## Solutions
#
# **1.** It needs both. Masking the sinks of Eq. 3 (0.57 keys per head and step) leaves 1 of 18 right answers; masking
# those of the masked queries (1.98 keys) leaves 2. Masking as many random keys, all weaker than these, leaves all 18 in
# both cases; a warning says that some heads have too few weaker keys.

# %%
from sinklens.tasks.word_problems import read_answer


def right(hooks=()):
    """How many of the 20 problems are answered right."""
    texts = sinklens.generate(tiny, prompts, hooks=hooks, record_sinks=False).text
    return sum(read_answer(text) == problem.result for text, problem in zip(texts, held_out(20), strict=True))


kept = {"unmasked": right()}
for name, detector in {"Eq. 3": EpsilonOverMean(), "masked queries": MaskedQueries()}.items():
    print(f"sinks of {name}: {float(track.detect(detector).sum('pos').mean()):.2f} per head and step")
    for pick in ("strongest", "random"):
        kept[name, pick] = right(MaskSinks(top_k=None, detector=detector, source=run, pick=pick))
print(kept)
assert kept["Eq. 3", "strongest"] < kept["Eq. 3", "random"] - 10

# %% [markdown]
# **2.** `tiny-llada` is unchanged: all its queries see all keys. In `tiny-llama`, with the mean over the queries that
# see a key, the share is 4.3 points above chance at the token written five steps ago, and 1.5 below at the newest.

# %%
visible = Recency(unit="visible").run(names, prompts).tables["lags"]
excess = visible[visible["measure"] == "excess"].set_index(["model", "lag"])[["low", "estimate", "high"]]
print(excess.loc["tiny-llama"].loc[[1, 5]].round(3))
assert excess.loc[("tiny-llama", 5), "low"] > 0
