# %% [markdown]
# # 8. To the cluster
#
# The calls and commands of the other tutorials, used there on models of two million parameters, also work with models
# of eight billion. At the end of this tutorial you will know
#
# - how to load a published checkpoint, and how to see its size and hook points before anything is downloaded,
# - what a protocol fixes, and how to compute the time of an evaluation in advance,
# - how the ledger lets you kill, resume, shard and distribute an evaluation,
# - how to read the table: intervals, paired differences, controls, and what it refuses to compare,
# - how programs that a model wrote are run, and what isolates them from the rest of the machine.
#
# Nothing is downloaded here; where a command needs a large model or a GPU, it is shown and not run.

# %%
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

torch.set_num_threads(1)  # models this small gain nothing from more


def shell(command):
    """What a command line prints; `sinklens …` is `python -m sinklens.cli …`."""
    call = [sys.executable, "-m", "sinklens.cli", *shlex.split(command)[1:]]
    plain = {**os.environ, "FORCE_COLOR": ""}  # no colours, which notebooks ask for
    done = subprocess.run(call, capture_output=True, text=True, check=False, env=plain)
    return done.stdout + done.stderr + f"[exit code {done.returncode}]" * (done.returncode != 0)


# %% [markdown]
# ## Published checkpoints
#
# A name with a slash is a repository on the Hugging Face hub. The first use downloads it into the hub's cache; gated
# models (Llama) require `hf auth login` first. In Python
#
# ```python
# model = sinklens.load("GSAI-ML/LLaDA-8B-Instruct")                        # a GPU if there is one, the stored bfloat16
# model = sinklens.load("Dream-org/Dream-v0-Instruct-7B", device="cuda:1")
# model = sinklens.load("meta-llama/Llama-3.1-8B-Instruct", device_map="auto")  # spread over several GPUs
# ```
#
# and in the shell
#
#     sinklens hooks GSAI-ML/LLaDA-8B-Instruct
#     sinklens trace GSAI-ML/LLaDA-8B-Instruct --chat --prompt "What is 17 + 25?" --gen-length 64 --steps 64 --out run/
#     sinklens analyse dynamics GSAI-ML/LLaDA-8B-Instruct meta-llama/Llama-3.1-8B-Instruct --prompts mine.txt
#
# If the machine has no network, download elsewhere (`hf download GSAI-ML/LLaDA-8B-Instruct --local-dir LLaDA-8B`) and
# pass the folder. `revision=` names a commit; report it in every paper.
#
# ### Its size, without its weights
#
# The config alone determines a model's size. These are the relevant entries of two published `config.json` files.
# `build_empty` makes the transformers model on PyTorch's meta device: every tensor has its shape but uses no memory.

# %%
from sinklens.families import identify, translate
from sinklens.model.loading import build_empty

CONFIGS = {
    "LLaDA-8B": {
        "model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
        "mlp_hidden_size": 12288, "embedding_size": 126464, "max_sequence_length": 4096, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "weight_tying": False, "mask_token_id": 126336, "eos_token_id": 126081,
        "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True,
    },
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_theta": 500000.0, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip

GIB, POSITIONS, rows = 2**30, 1024, {}
for name, raw in CONFIGS.items():
    config = translate(raw, identify(raw).family, name)
    parameters = sum(parameter.numel() for parameter in build_empty(config).parameters())
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    rows[name] = {
        "parameters": parameters,
        "weights [GiB]": 2 * parameters / GIB,  # bfloat16
        "logits [GiB]": 2 * POSITIONS * config.vocab_size / GIB,
        "patterns [GiB]": 2 * layers * heads * POSITIONS**2 / GIB,
        "sink track [MB]": 4 * layers * heads * POSITIONS / 1e6,
    }
sizes = pd.DataFrame(rows).T
print(sizes.astype({"parameters": int}).round(2).to_string())
assert sizes.loc["LLaDA-8B", "parameters"] == 8_015_581_184

# %% [markdown]
# In bfloat16 the weights take two bytes each. The other columns are for *one row* of 1,024 positions: the logits of one
# pass (a run computes them only for undecided positions), all patterns of one pass, and a step of the sink track. A
# batch multiplies them. The size of the patterns is why sinklens does not keep them: column sums are computed beside
# fused attention, layer by layer, and a pattern exists only where a hook reads it.
#
# The list of hook points needs no weights either, only a folder with the config:

# %%
Path("LLaDA-8B").mkdir(exist_ok=True)
Path("LLaDA-8B/config.json").write_text(json.dumps(CONFIGS["LLaDA-8B"]))
listed = shell("sinklens hooks LLaDA-8B").splitlines()
print(*[line[:100] for line in listed[:12]], f"… {len(listed) - 12} more", sep="\n")

# %% [markdown]
# ## Protocols
#
# A score depends on prompt, examples, answer length, steps, blocks and how the answer is read, often more than on the
# model. A *protocol* fixes all of these under one name.

# %%
from sinklens.evaluation import PROTOCOLS, evaluate, frame, masking

for name in ("llada-gsm8k", "llada-instruct-gsm8k", "llada-instruct-gsm8k-blocks"):
    protocol = PROTOCOLS[name]
    scores = [f"{score.model} {score.accuracy}" for score in protocol.published if not score.masked]
    print(f"{name}: {protocol.task}, chat template: {protocol.chat_template}, {protocol.hash}")
    print(f"    llada {protocol.of('llada')}\n    {protocol.note}\n    published: {'; '.join(scores)}")
faster = PROTOCOLS["llada-gsm8k"].with_settings({"steps": 128})
print(faster.hash, faster.of("llada"))
assert faster.hash != PROTOCOLS["llada-gsm8k"].hash

# %% [markdown]
# LLaDA-8B-Instruct's 0.694 and 0.786 are the same model in two decoding regimes. `sinklens protocols` lists all
# protocols with their published scores, sources, and what the sources leave open. The hash covers everything that
# affects a score. A changed setting makes another run in the ledger. The table says how a run departs from the
# protocol; only runs that do not are compared with the published score.
#
# On a machine with GPUs, one command per family then produces the paper's table:
#
#     sinklens evaluate GSAI-ML/LLaDA-8B-Instruct meta-llama/Llama-3.1-8B-Instruct --protocol llada-gsm8k \
#         --mask-sinks 0 1 5 10 --controls random --of-unmasked --batch-size 16 --engine ray --out results/
#     sinklens evaluate Dream-org/Dream-v0-Instruct-7B --protocol dream-gsm8k --mask-sinks 0 1 5 10 --controls random \
#         --of-unmasked --batch-size 16 --engine ray --out results/
#     sinklens table results/
#
# gsm8k and humaneval are downloaded too, or read from `--data`. Generated tasks (`tiny-gsm`, `tiny-code`)
# need no download. `tiny-gsm` is also a protocol: the task's own prompt and the checkpoint's own settings.
#
# ## How long will it take?
#
# Added to any of these commands, `--dry-run` runs nothing and prints passes, operations, time and memory, computed from
# the config alone. In Python it is `plan`. For LLaDA in the command above, with GSM8K's 1,319 problems and prompts of
# 900 tokens, on a card whose peak and utilization we state:

# %%
from sinklens.evaluation.planning import CARDS, plan
from sinklens.tasks.prompts import IdSample

problems = [IdSample(str(number), "", "", ids=(1,) * 900) for number in range(1319)]
study = masking([1, 5, 10], controls=["random"], of_unmasked=True)
cost = plan("LLaDA-8B", PROTOCOLS["llada-gsm8k"], study, problems)
card = CARDS["h100"]
hours = cost.seconds(card, utilization=0.4) / 3600
print(f"{cost.runs} runs, {cost.passes:,} passes, {cost.flops:.2g} operations; {hours:.0f} hours on one {card.name}")
print(f"{cost.run.with_batch(16).device_bytes / 1e9:.1f} GB with 16 rows")
assert (cost.runs, cost.passes) == (16, 16 * 1319 * 256)
assert 20 < cost.passes / hours / 3600 < 25  # passes of one row a second

# %% [markdown]
# Sixteen runs: one without masking, nine with three numbers of keys masked in three ways, and six more without masking,
# since the steady masks and the random keys beside them take keys of the unmasked run. At 40 % of its peak an H100
# makes 23 passes of a row a second, so eight of them take eight hours.

# %% [markdown]
# ## The ledger
#
# `evaluate` writes one record per sample as soon as its batch is finished, into an SQLite database. We interrupt an
# evaluation after its second batch, as Ctrl-C would:


# %%
conditions = masking([1], controls=["random"])


def stop_after_two(condition, done, total):
    print(f"{condition.name}: {done} of {total}")
    if done == 10:
        raise KeyboardInterrupt


try:
    evaluate("tiny-llada", "tiny-gsm", conditions, "results", limit=20, batch_size=5, progress=stop_after_two)
except KeyboardInterrupt:
    print("interrupted")

# %%
from sinklens.evaluation import LedgerRun


def recorded(ledger):
    """Records by condition."""
    return {run.what["condition"]["name"]: run.records() for run in LedgerRun.all(Path(ledger))}


first = recorded("results")
print({name: len(found) for name, found in first.items()})
record = first["unmasked"][0]
print({name: record[name] for name in ("sample", "text", "verdict", "steps", "empty", "ended", "masks", "device")})
assert len(first["unmasked"]) == 10

# %% [markdown]
# Everything that determines a verdict (weights, condition, protocol, settings, seed) describes a run, and its hash is
# the run's name; `results/ledger.sqlite` is all that the table needs. A batch is recorded completely or not at all,
# whenever the process is killed. The same call then resumes. The batch size may differ, because it only divides the
# same work differently.

# %%
evaluate("tiny-llada", "tiny-gsm", conditions, "results", limit=20, batch_size=20)
second = recorded("results")
assert all(record in second["unmasked"] for record in first["unmasked"])  # finished samples are unchanged
assert {name: len(found) for name, found in second.items()} == dict.fromkeys(second, 20)  # the rest was added
evaluate("tiny-llada", "tiny-gsm", conditions, "results", limit=20)  # nothing is left to do
assert recorded("results") == second

# %% [markdown]
# On a cluster that ends jobs after a day, just start the evaluation again. Other programs read the records as JSON
# Lines, each with the description of its run:

# %%
print(shell("sinklens export results --out records.jsonl"))
print(Path("records.jsonl").read_text()[:200])

# %% [markdown]
# ## Many processes, many machines
#
# *Shards.* Process i of n takes every n-th sample, and all write to one ledger. As a Slurm array job:
#
#     sbatch --array=0-7 --gres=gpu:1 --wrap 'sinklens evaluate GSAI-ML/LLaDA-8B-Instruct --protocol llada-gsm8k \
#         --mask-sinks 0 1 5 10 --controls random --of-unmasked --shard $SLURM_ARRAY_TASK_ID/8 --out /shared/results'
#
# *Ray.* With `pip install 'sinklens[ray]'`, `--engine ray` makes a worker per GPU, on this machine or, with `--address
# auto`, on a running cluster. Each worker loads the model once; batches go to whichever is free, a worker that dies is
# replaced, and only the main process writes the ledger.
#
#     sinklens evaluate GSAI-ML/LLaDA-8B-Instruct --protocol llada-gsm8k --mask-sinks 0 1 5 10 --engine ray \
#         --address auto --out /shared/results
#
# In Python this is `engine=OnRay(workers=2)`, from `sinklens.evaluation.distributed`. You can mix Ray and shards
# and restart them in any order, because every process first reads the same ledger. Two processes cannot share a shard:
# the second reports this and stops. Here are two shards, one after the other:

# %%
for number in range(2):
    evaluate("tiny-llada", "tiny-gsm", conditions[:1], "sharded", limit=20, shard=(number, 2))
print(frame("sharded")[["condition", "right", "total"]])

# %% [markdown]
# ## Reading the table
#
# The twin joins the ledger, with the same conditions on the same problems. The command also writes `table.csv` and a
# picture; in Python all results are one table.

# %%
evaluate("tiny-llama", "tiny-gsm", conditions, "results", limit=20)
print(shell("sinklens table results"))
plt.figure(figsize=(6, 5), layout="constrained")
plt.imshow(plt.imread("results/accuracy.png"))
plt.axis("off")
plt.show()
table = frame("results")
shown = ["model", "condition", "right", "against_unmasked_lost", "against_unmasked_gained", "against_unmasked_p"]
against = table[[*shown, "against_random_difference", "against_random_p", "empty", "unended"]]
print(against.rename(columns=lambda name: name.replace("against_", "")).round(4).to_string(index=False))

# %% [markdown]
# - *Accuracy* has Wilson's 95 % interval. With 20 problems it is 40 points wide where half of the answers are right.
# - *against unmasked* compares the same problems with and without the masks. Only problems whose verdict changes count:
#   `lost` were right before, `gained` are right now. p is McNemar's exact test: how likely such an uneven split of lost
#   and gained would be if both were equally likely. It is corrected by Holm's method over the conditions of a model.
# - *against random* is the control: does it cost more to mask the sinks than as many random keys?
# - *empty*, *unended* and masks left over identify answers that are wrong for another reason than a wrong number.
#
# One sink costs `tiny-llada` 9 of its 18 right answers, 7 more than a random key, which the exact test does not
# attribute to chance (p = 0.016). `tiny-llama` loses 2 of 20 to the sink and none to the random key, which 20 problems
# cannot distinguish from chance (p = 0.5).
#
# ### What it refuses
#
# The same model gives other last bits on another kind of device, and occasionally another token. So runs of different
# device types are not paired unless you pass `--mixed-devices`. We imitate a ledger whose masked conditions were run on
# a GPU:

# %%
from sinklens.evaluation.ledger import Writer

for run in LedgerRun.all(Path("results")):
    moved = run.what["model"] == "tiny-llada" and run.what["condition"]["masked"]
    with Writer(LedgerRun.of(Path("mixed"), run.what)) as writer:
        writer.add(*(record | {"device": "cuda" if moved else "cpu"} for record in run.records()))
print(shell("sinklens table mixed"))

# %% [markdown]
# ## lm-evaluation-harness
#
# For tasks that sinklens lacks, its models run under EleutherAI's harness, with an intervention (`pip install
# 'sinklens[lm-eval]'`):
#
#     sinklens lm-eval --model sinklens --tasks gsm8k --apply_chat_template \
#         --model_args pretrained=GSAI-ML/LLaDA-8B-Instruct,mask_sinks=5,gen_length=256,steps=256,block_length=32
#
# In Python this is `lm_eval.simple_evaluate(SinklensLM(model, MaskSinks(top_k=5)), tasks=["gsm8k"])`. Tasks that
# compare likelihoods work too; those of a diffusion model are estimated bounds. The harness's response cache is
# refused, because it ignores the intervention.
#
# ## Programs that a model wrote
#
# HumanEval's verdict requires running a program. `evaluate` never does; it keeps the text.

# %%
evaluate("tiny-llada", "tiny-code", conditions[:1], "code", limit=3)
print(shell("sinklens table code"))
print(shell("sinklens score code"))

# %% [markdown]
# With the flag, each program runs in separate processes without network, without a file to write, and with limits on
# time, memory, processes and output. bubblewrap isolates them. Where it is not installed, or the system does not let
# it, nothing is run and the error says what to do.

# %%
from sinklens.evaluation.sandbox import available_isolation, run_program

isolation = available_isolation()
print(isolation)
if isolation.layers:
    print(shell("sinklens score code --run-generated-code"))
    print(frame("code")[["condition", "right", "total"]])

# %% [markdown]
# `tiny-llada` has never seen a program, and gets none of the three right. The next cell shows what programs may try.
# A program passes only if the tests ran to completion in a process that it cannot reach.

# %%
TEST = "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(-1) == -2\n"
PROGRAMS = {
    "right": "def double(x):\n    return 2 * x\n",
    "wrong": "def double(x):\n    return x + 3\n",
    "equal to all": "class E:\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return E()\n",
    "leaves with success": "import os\nprint('passed')\nos._exit(0)\n",
    "opens a socket": "import socket\nsocket.socket()\ndef double(x):\n    return 2 * x\n",
    "starts a process": "import os\nos.fork()\ndef double(x):\n    return 2 * x\n",
}
outcomes = {}
for what, program in PROGRAMS.items() if isolation.layers else ():
    outcomes[what] = run_program(program, TEST, "double")
    print(f"{what:20} {outcomes[what].status:8} {outcomes[what].detail[:80]}")
assert [what for what, outcome in outcomes.items() if outcome.passed] in ([], ["right"])

# %% [markdown]
# ## Exercises
#
# 1. How many problems are needed to detect a difference of 5 points between two conditions? Assume that masking loses 7
#    of 100 answers and gains 2, and compute McNemar's p for 100, 400 and 1,319 problems.
# 2. Evaluate the condition `MaskKeys(keep=True, window=16, positions=[0])` on 20 problems. What is it compared with?
#
# ## Solutions
#
# **1.** Between 100 and 400: with 100 problems five points cannot be distinguished from chance (p = 0.18), with 400
# they clearly can.

# %%
from sinklens.evaluation import paired

for total in (100, 400, 1319):
    lost, gained = round(0.07 * total), round(0.02 * total)
    before = torch.arange(total).numpy() < total - gained
    after = before.copy()
    after[:lost], after[total - gained :] = False, True
    found = paired(before, after).difference
    print(f"{total:5} problems: {found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}], p = {found.p:.4f}")

# %% [markdown]
# **2.** With the unmasked run of the same model, which was already in the ledger: 17 problems are lost and none gained.
# It has no random-key control; a fair one would hide as many keys, anywhere.

# %%
from sinklens.evaluation import Condition
from sinklens.interventions import MaskKeys

window = Condition("window of 16", (MaskKeys(keep=True, window=16, positions=[0]),))
evaluate("tiny-llada", "tiny-gsm", [window], "results", limit=20)
mine = frame("results").set_index("condition").loc["window of 16"]
print(mine[["right", "total", "against_unmasked_lost", "against_unmasked_gained", "no_random"]])
