"""``python -m training.continued masked causal --base FOLDER --tokens-file FILE``: continue SmolLM2-135M in two arms.

The recipe of smollm2-135m-masked and smollm2-135m-causal. Both arms start from the same weights and train the same
number of steps, and with one seed on the same tokens; only the objective and the attention that it needs differ.

A batch is `ROWS` windows of `LENGTH` tokens of text, or, with probability 0.4, as many tokens in rows of problems,
whose prompts are never predicted. The *masked* arm draws a share t in (0.02, 1) for each row, masks each token with
probability t, and divides the cross-entropy by t; logits at position i − 1 predict position i. The *causal* arm
predicts every next token.

FOLDER is that of smollm2-135m in the cache. FILE holds four arrays of token ids: ``train`` and ``held`` (documents that
``python -m training.text`` gathered, each followed by token 0), ``rows`` (problems with their answers, padded with
token 0 to 256) and ``starts`` (where the answers begin).

Batches depend only on (seed, step), so an interrupted run resumes exactly; on a graphics card, up to rounding. At
chosen numbers of tokens, the sinks are measured (sinks.py). Each run has a folder: ``state.pt`` to resume from,
``log.jsonl``, ``measures.jsonl`` and, in the end, ``adapter``, a folder in peft's format.

Pitfall: a seed decides the batches, the masks and the first factors, so arms of two seeds differ in all of them.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor

from sinklens.errors import SettingError, SinklensError, require
from sinklens.utils.atomic import atomic_write, write_file
from training.low_rank import MASK_ROW, PROJECTIONS, LowRankLlama
from training.run_files import append_record, read_records, read_tensors, write_tensors
from training.sinks import Windows, measure

MASK_ID = 16  # <empty_output>, which the base hardly knows
END_ID = 0  # pads the rows of problems, so it is learned as their end
TASKS = 0.4
SHIPPED = 22_052_864  # tokens: 673 steps
MILESTONES = (
    0.0,
    0.03,
    0.1,
    0.2,
    0.3,
    0.5,
    0.7,
    1.0,
    1.5,
    2.2,
    3.0,
    5.0,
    7.0,
    10.0,
    15.0,
)  # millions of tokens; and the end
LOG_EVERY, SAVE_EVERY = 20, 60  # steps; seconds
LARGEST = 2.0**8  # of a factor before rounding; float8 e4m3 reaches 448


@dataclass(frozen=True)
class Continuation:
    """What determines the weights of a run.

    Attributes:
        arm: the objective.
        seed: of the batches, the masks and the first factors.
        tokens: length of the schedule; rounded to steps.
        rows, length: size of a batch of text.
        rank: of the factors.
        peak: highest learning rate.
        warmup: steps until it is reached.
    """

    arm: Literal["masked", "causal"]
    seed: int = 1
    tokens: int = SHIPPED
    rows: int = 64
    length: int = 512
    rank: int = 48
    peak: float = 1.2e-3
    warmup: int = 100

    @property
    def steps(self) -> int:
        return max(1, round(self.tokens / (self.rows * self.length)))

    def rate(self, step: int) -> float:
        """A linear warm-up, and a cosine over all steps to 2 %."""
        wave = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.peak * min(1, (step + 1) / self.warmup) * max(0.02, wave)


@dataclass(frozen=True)
class Texts:
    """The tokens of all runs.

    Attributes:
        train, held: text to train on, and text to measure on.
        rows: problems with their answers, padded with token 0, which ends an answer.
        starts: where their answers begin.
    """

    train: Int[Tensor, " token"]
    held: Int[Tensor, " held"]
    rows: Int[Tensor, "row pos"]
    starts: Int[Tensor, " row"]

    @classmethod
    def read(cls, file: Path) -> "Texts":
        """Read an .npz file with these arrays.

        Raises:
            SettingError: there is no such file, or it lacks an array.
        """
        try:
            with np.load(file) as arrays:
                return cls(*(torch.from_numpy(arrays[name].astype(np.int64)) for name in cls.__annotations__))
        except (OSError, ValueError, KeyError) as error:
            raise SettingError(f"{file} is no .npz file with the arrays {', '.join(cls.__annotations__)}.") from error


class Batch(NamedTuple):
    """What one step reads and predicts.

    Attributes:
        tokens: the rows, masked in the masked arm.
        places: for each predicted token, the place before it in the flattened rows.
        wanted: the predicted tokens.
        weight: their weights in the loss.
    """

    tokens: Int[Tensor, "batch pos"]
    places: Int[Tensor, " predicted"]
    wanted: Int[Tensor, " predicted"]
    weight: Float[Tensor, " predicted"]


def batch_of(texts: Texts, run: Continuation, step: int) -> Batch:
    """The batch of a step, which depends only on the arguments; both arms have the same rows."""
    generator = torch.Generator().manual_seed(run.seed * 1_000_003 + step)
    if float(torch.rand((), generator=generator)) < TASKS:
        count = run.rows * run.length // texts.rows.shape[1]
        chosen = torch.randint(len(texts.rows), (count,), generator=generator)
        ids, starts = texts.rows[chosen], texts.starts[chosen].clamp(min=1)
    else:
        first = torch.randint(len(texts.train) - run.length, (run.rows, 1), generator=generator)
        ids, starts = texts.train[first + torch.arange(run.length)], torch.ones(run.rows, dtype=torch.long)
    predicted = eligible = torch.arange(ids.shape[1]) >= starts[:, None]
    weight, tokens = torch.ones(len(ids), 1), ids
    if run.arm == "masked":
        share = (torch.arange(len(ids)) + torch.rand(len(ids), generator=generator)) / len(ids)
        share = share.clamp(0.02, 1)[:, None]
        predicted = eligible & (torch.rand(ids.shape, generator=generator) < share)
        weight, tokens = 1 / share, ids.masked_fill(predicted, MASK_ID)
    places = predicted.flatten().nonzero()[:, 0] - 1  # never −1: the first token is not predicted
    return Batch(tokens, places, ids[predicted], weight.expand(ids.shape)[predicted] / eligible.sum())


def loss_of(net: LowRankLlama, batch: Batch) -> Float[Tensor, ""]:
    """The weighted cross-entropy of the predicted tokens."""
    stream, _ = net(batch.tokens)
    logits = net.logits(stream.flatten(0, 1).index_select(0, batch.places))
    return (F.cross_entropy(logits, batch.wanted, reduction="none") * batch.weight).sum()


def train(
    run: Continuation, base: Path, texts: Texts, out: Path, *, device: str = "cpu", compiled: bool = False,
    windows: tuple[int, int] = (32, 128), milestones: Sequence[float] = MILESTONES, keep: Sequence[float] = (),
    until: float = math.inf,
) -> bool:  # fmt: skip
    """Start or resume a run; whether it is finished.

    Args:
        base: folder of the base model.
        out: folder of the run.
        windows: number and length of the held-out windows.
        milestones: millions of tokens after which to measure, each rounded to a step; the end is always measured.
        keep: millions of tokens after which to write an adapter, ``adapter-STEP``, likewise.
        until: when to stop, on the clock `time.monotonic`.

    Raises:
        SettingError: `out` has another run, or the batch does not divide into rows of problems.
        CheckpointError: the state is corrupt, or `base` is not a plain Llama.
    """
    width, batch = texts.rows.shape[1], run.rows * run.length
    require(
        batch % width == 0,
        f"a batch of {batch} tokens does not divide into rows of {width}; change --rows.",
        SettingError,
    )
    held = Windows.drawn(texts.held, *windows, device)
    mask_id = MASK_ID if run.arm == "masked" else None
    net = LowRankLlama(base, rank=run.rank, seed=run.seed, mask_id=mask_id, device=device, compiled=compiled)
    parameters = list(net.trained.values())
    optimizer = torch.optim.AdamW(parameters, lr=run.peak, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda")
    first = _resume(out / "state.pt", run, net, optimizer)
    measured = {record["step"] for record in read_records(out / "measures.jsonl")}
    measures = {min(run.steps, round(one * 1e6 / batch)) for one in milestones} | {run.steps}
    kept = {min(run.steps, round(one * 1e6 / batch)) for one in keep}
    started = saved = time.monotonic()
    for step in range(first, run.steps + 1):
        now = time.monotonic()
        late = now > until
        if step > first and (late or step == run.steps or now - saved >= SAVE_EVERY):
            _write_state(out / "state.pt", run, net, optimizer, step)
            saved = now
        if step in kept:
            write_adapter(net, run, base, out / f"adapter-{step}")
        if step in measures - measured:
            found = {"arm": run.arm, "seed": run.seed, "step": step, "tokens": step * batch, "base": base.name}
            append_record(out / "measures.jsonl", found | {"windows": list(windows), "shares": measure(net, held)})
            started += time.monotonic() - now  # so that the log has the time of training
        if step == run.steps:
            break
        if late:
            return False
        for group in optimizer.param_groups:
            group["lr"] = run.rate(step)
        loss = loss_of(net, Batch(*(one.to(device, non_blocking=True) for one in batch_of(texts, run, step))))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % LOG_EVERY == 0:
            record = {"step": step + 1, "loss": loss.item(), "seconds": time.monotonic() - started}
            append_record(out / "log.jsonl", record)
            print(f"{run.arm} {run.seed}: {record}", flush=True)
    write_adapter(net, run, base, out / "adapter")
    return True


def _write_state(file: Path, run: Continuation, net: LowRankLlama, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {"run": asdict(run), "step": step, "trained": net.trained, "optimizer": optimizer.state_dict()}
    write_tensors(state, file)


def _resume(file: Path, run: Continuation, net: LowRankLlama, optimizer: torch.optim.Optimizer) -> int:
    """Restore a state, if there is one, and return the step to continue from."""
    if not file.exists():
        return 0
    state = read_tensors(file, net.device)
    require(
        state["run"] == asdict(run),
        f"{file} belongs to another run: {state['run']}, not {asdict(run)}. Choose another folder.",
        SettingError,
    )
    with torch.no_grad():
        for name, value in net.trained.items():
            value.copy_(state["trained"][name])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def rounded(factors: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[dict[str, tuple[Tensor, Tensor]], int]:
    """Pairs of factors in float8 e4m3, and the exponent e: the product of each pair is 2^e times that of the given one.

    Both factors of a pair are scaled by powers of two, to use as much of the format's range as one e for all allows.
    """
    room = {
        name: [math.log2(LARGEST / max(float(one.abs().max()), 2.0**-40)) for one in pair]
        for name, pair in factors.items()
    }
    exponent = math.floor(min(sum(one) for one in room.values()))
    found = {}
    for name, (a, b) in factors.items():
        of_a = round(room[name][0] - (sum(room[name]) - exponent) / 2)
        scaled = (a * 2.0**of_a, b * 2.0 ** (exponent - of_a))
        found[name] = (scaled[0].to(torch.float8_e4m3fn), scaled[1].to(torch.float8_e4m3fn))
    return found, exponent


@torch.no_grad()
def write_adapter(net: LowRankLlama, run: Continuation, base: Path, folder: Path) -> None:
    """Write what was trained in peft's format, with the config.json of the continued model beside it.

    Together with the other files of the base, the folder is a checkpoint.
    """
    values = {name: value.detach().cpu() for name, value in net.trained.items()}
    paths = sorted({name.partition(".lora_")[0] for name in values if ".lora_" in name})
    pairs = {one: (values[f"{one}.lora_A.weight"], values[f"{one}.lora_B.weight"]) for one in paths}
    factors, exponent = rounded(pairs)
    for one, (a, b) in factors.items():
        values |= {f"{one}.lora_A.weight": a, f"{one}.lora_B.weight": b}
    settings: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base.name, "r": run.rank,
        "lora_alpha": run.rank * 2.0**-exponent, "target_modules": [one.rpartition(".")[2] for one in PROJECTIONS],
        "modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"], "bias": "none",
        "inference_mode": True, "lora_dropout": 0.0, "fan_in_fan_out": False, "init_lora_weights": True,
    }  # fmt: skip
    ends = {"eos_token_id": END_ID, "pad_token_id": END_ID}
    config = net.config | ends
    if MASK_ROW in values:
        settings["trainable_token_indices"] = {"embed_tokens": [MASK_ID]}
        config |= {"sinklens_family": "diffullama", "mask_token_id": MASK_ID}
    with atomic_write(folder / "adapter_model.safetensors") as part:
        stored = {f"base_model.model.{name}": value.contiguous() for name, value in values.items()}
        save_file(stored, part, metadata={"format": "pt"})
    write_file(folder / "adapter_config.json", json.dumps(settings, indent=1))
    write_file(folder / "config.json", json.dumps(config, indent=1))
    write_file(folder / "generation_config.json", json.dumps({"bos_token_id": config["bos_token_id"]} | ends, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the arms that the command line names, and return the exit code."""
    parser = argparse.ArgumentParser("python -m training.continued", allow_abbrev=False)
    parser.add_argument("arms", nargs="+", choices=["masked", "causal"])
    parser.add_argument("--base", type=Path, required=True, help="folder of smollm2-135m, as `sinklens fetch` made it")
    parser.add_argument("--tokens-file", type=Path, required=True, help=".npz file with train, held, rows and starts")
    parser.add_argument("--out", type=Path, default=Path("runs/continued"), help="a folder ARM-SEED for each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=SHIPPED, help="length of the schedule")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, nargs=2, default=[32, 128], metavar=("NUMBER", "LENGTH"))
    parser.add_argument("--measure", type=float, nargs="*", default=MILESTONES, help="at these millions of tokens")
    parser.add_argument("--keep", type=float, nargs="*", default=[], help="adapters at these millions of tokens")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after these; run again to resume")
    parser.add_argument("--compile", action="store_true", help="compile the layers, which takes a minute")
    options = parser.parse_args(arguments)
    until, device = time.monotonic() + options.seconds, "cuda" if torch.cuda.is_available() else "cpu"
    try:
        texts = Texts.read(options.tokens_file)
        for seed in options.seeds:
            for arm in options.arms:
                run = Continuation(arm, seed, options.tokens, options.rows, options.length)
                finished = train(
                    run, options.base, texts, options.out / f"{arm}-{seed}", device=device, compiled=options.compile,
                    windows=tuple(options.windows), milestones=options.measure, keep=options.keep, until=until,
                )  # fmt: skip
                print(f"{arm} {seed}: {'finished' if finished else 'stopped in time; run again to resume'}", flush=True)
    except SinklensError as error:
        print(f"training: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
