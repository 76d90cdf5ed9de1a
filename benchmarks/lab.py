"""How fast the lab answers: the time from a request to its first step and to its result, and for a pattern.

    python benchmarks/lab.py [MODEL] [--gen-length N] [--runs N]

The lab runs in this process as a notebook opens it; requests and events pass a real socket. Chips are changed between
runs, so nothing is remembered from one to the next.

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
from typing import Any

import httpx
import torch

import sinklens

PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"


class Clock:
    """The events of a lab with the time at which each arrived."""

    def __init__(self, url: str) -> None:
        address, _, token = url.partition("?token=")
        self.http = httpx.Client(base_url=address.rstrip("/"), headers={"X-Sinklens-Token": token}, timeout=None)
        self._seen = threading.Condition()
        self._arrived: dict[tuple[str, str], float] = {}
        self._since = self.http.get("/api/session").json()["event"]
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        with self.http.stream("GET", "/api/events", params={"since": self._since}) as answer:
            kind = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: "):
                    with self._seen:
                        self._arrived.setdefault((json.loads(line[6:]).get("run", ""), kind), time.perf_counter())
                        self._seen.notify_all()

    def run(self, **body: Any) -> tuple[str, float, float]:
        """The id of a run, and the seconds from its request to its first step and to its end."""
        began = time.perf_counter()
        run = self.http.post("/api/runs", json=body).json()["run"]
        with self._seen:
            self._seen.wait_for(lambda: (run, "done") in self._arrived or (run, "failed") in self._arrived)
        return run, self._arrived[run, "step"] - began, self._arrived[run, "done"] - began

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny-llada")
    parser.add_argument("--gen-length", type=int, help="positions of the answer (default: the checkpoint's)")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    model = sinklens.load(options.model)
    settings = {} if options.gen_length is None else {"gen_length": options.gen_length}
    body = {"prompt": PROMPT, "settings": settings}
    names = ("first step", "result", "chip to result", "pattern", "generate alone", "processor time of a run")
    times: dict[str, list[float]] = {name: [] for name in names}
    with sinklens.lab(model) as lab:
        clock = Clock(lab.url)
        for _ in range(3):
            clock.run(**body)
        for number in range(options.runs):
            began = time.process_time()
            run, first, result = clock.run(**body, seed=number)
            processor = time.process_time() - began
            chip = {"kind": "ablate_head", "layer": number % model.cfg.n_layers, "head": number % model.cfg.n_heads}
            _, _, done = clock.run(**body, chips=[chip])
            pattern, began = clock.pattern(run), time.perf_counter()
            sinklens.generate(model, PROMPT, seed=number, progress=False, **settings)
            alone = time.perf_counter() - began
            for name, value in zip(times, (first, result, done, pattern, alone, processor), strict=True):
                times[name].append(value)
        heads = clock.heads(run)
    print(f"{options.model}, {model.cfg.device}, {torch.get_num_threads()} threads, {platform.machine()}")
    for name, values in times.items():
        print(f"{name:24s} median {statistics.median(values):.3f} s, worst {max(values):.3f} s of {len(values)}")
    print(f"{'processor time, every head':24s} {heads:.1f} s")


if __name__ == "__main__":
    main()
