"""How fast the lab answers: from a request to its first step, its first changed step and its result; and a pattern.

    python -m benchmarks.lab [MODEL] [--gen-length N] [--steps N] [--runs N] [--heads]

MODEL ``middle`` is the middle model of run.py (d_model 512, 8 layers, vocabulary 32,000) with random weights, on a
canvas of 256 positions of which the last 32 are decided in 16 steps.

The lab runs in this process as a notebook opens it; requests and events pass a real socket. Each run has another chip,
an ablated head, so nothing is remembered from one to the next. A step is *changed* if its canvas or one of the
strongest keys that it reports differs from the run without the chip.

Beside them: `sinklens.generate` alone, and the processor time of a run with its events, which is about what it takes on
a machine that does nothing else.

Caveat: on a machine that does other work the times say more about that work; compare them with generate's.
"""

import argparse
import json
import platform
import statistics
import threading
import time
from typing import Any, NamedTuple

import httpx
import torch

import sinklens
from benchmarks.plain import random_llada
from benchmarks.run import MIDDLE

PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
LONG = {"ids": list(range(3, 227)), "settings": {"gen_length": 32, "block_length": 32, "steps": 16}}


class Timed(NamedTuple):
    """A run, with seconds since its request.

    Attributes:
        run: its id.
        steps: when each step arrived.
        shown: canvas and strongest keys of each step.
        ended: when the run ended.
    """

    run: str
    steps: list[float]
    shown: list[Any]
    ended: float


class Clock:
    """The events of a lab with the time at which each arrived."""

    def __init__(self, lab: sinklens.live.Lab) -> None:
        self.http = httpx.Client(base_url=lab.address, headers={"X-Sinklens-Token": lab.token}, timeout=None)
        self._seen = threading.Condition()
        self._arrived: dict[str, list[tuple[str, float, str]]] = {}
        self._since = self.http.get("/api/session").json()["event"]
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        with self.http.stream("GET", "/api/events", params={"since": self._since}) as answer:
            kind = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: ") and (run := json.loads(line[6:]).get("run")):
                    with self._seen:
                        self._arrived.setdefault(run, []).append((kind, time.perf_counter(), line[6:]))
                        self._seen.notify_all()

    def run(self, **body: Any) -> Timed:
        """Request a run and wait for its end."""
        began = time.perf_counter()
        run = self.http.post("/api/runs", json=body).json()["run"]
        with self._seen:
            self._seen.wait_for(lambda: self._arrived.get(run, [("", 0.0, "")])[-1][0] in ("done", "failed"))
        events = self._arrived.pop(run)
        kind, ended, text = events[-1]
        assert kind == "done", text
        steps = [(at - began, json.loads(text)) for kind, at, text in events if kind == "step"]
        shown = [(data["canvas"], data["sinks"]) for _, data in steps]
        return Timed(run, [at for at, _ in steps], shown, ended - began)

    def heads(self, run: str) -> float:
        """The processor seconds for trying every head of a run."""
        began = time.process_time()
        self.http.post(f"/api/runs/{run}/heads", json={}).raise_for_status()
        while (trial := self.http.get(f"/api/runs/{run}").json()["heads"])["status"] == "running":
            time.sleep(0.5)
        assert trial["status"] == "done", trial["error"]
        return time.process_time() - began

    def pattern(self, run: str) -> float:
        """The seconds for a pattern."""
        began = time.perf_counter()
        self.http.get(f"/api/runs/{run}/pattern", params={"step": 1, "layer": 0}).raise_for_status()
        return time.perf_counter() - began


def first_changed(plain: Timed, changed: Timed) -> float:
    """When the first step of `changed` arrived that shows something else than that of `plain`."""
    pairs = zip(changed.steps, plain.shown, changed.shown, strict=True)
    return next((at for at, one, other in pairs if one != other), changed.ended)


def measured(clock: Clock, model: sinklens.Model, body: dict[str, Any], number: int) -> dict[str, float]:
    """The seconds of one round: a run, a run with a chip, a pattern, and `sinklens.generate`."""
    began = time.process_time()
    plain = clock.run(**body, seed=number)
    processor = time.process_time() - began
    layer, head = number % model.cfg.n_layers, number % model.cfg.n_heads
    chip = {"id": "a", "kind": "ablate_head", "layer": layer, "head": head}
    changed = clock.run(**body, seed=number, chips=[chip])
    pattern, began = clock.pattern(plain.run), time.perf_counter()
    prompt = body["prompt"] if "prompt" in body else torch.tensor([body["ids"]])
    sinklens.generate(model, prompt, seed=number, progress=False, **body["settings"])
    alone = time.perf_counter() - began
    return {
        "first step": plain.steps[0], "result": plain.ended, "chip to first step": changed.steps[0],
        "chip to first changed step": first_changed(plain, changed), "chip to result": changed.ended,
        "pattern": pattern, "generate alone": alone, "processor time of a run": processor,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny-llada")
    parser.add_argument("--gen-length", type=int, help="positions of the answer (default: the checkpoint's)")
    parser.add_argument("--steps", type=int, help="steps (default: the checkpoint's)")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--heads", action="store_true", help="also try every head (default: no)")
    options = parser.parse_args()
    middle = options.model == "middle"
    model = sinklens.load(random_llada(**MIDDLE) if middle else options.model)
    given = {"gen_length": options.gen_length, "steps": options.steps}
    settings = {name: value for name, value in given.items() if value is not None}
    body: dict[str, Any] = {"prompt": PROMPT, "settings": {}} if not middle else LONG
    body = body | {"settings": body["settings"] | settings}
    with sinklens.lab(model) as lab:
        clock = Clock(lab)
        first = clock.run(**body)  # warms up
        rounds = [measured(clock, model, body, number) for number in range(options.runs)]
        heads = clock.heads(first.run) if options.heads else None
    print(f"{options.model}, {model.cfg.device}, {torch.get_num_threads()} threads, {platform.machine()}")
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        print(f"{name:26s} median {statistics.median(values):.3f} s, worst {max(values):.3f} s of {len(values)}")
    if heads is not None:
        print(f"{'processor time, every head':26s} {heads:.1f} s")


if __name__ == "__main__":
    main()
