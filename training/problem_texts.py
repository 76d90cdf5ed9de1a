"""Word problems with their answers, as texts for the study `pair`: JSON Lines with ``prompt`` and ``template``.

    python -m training.problem_texts problems.jsonl 200
    python -m training.problem_texts gsm8k.jsonl 30 FOLDER

The first command writes held-out problems; the second, test problems of GSM8K (FOLDER holds ``test.jsonl``), without
the marks of its calculator. All of GSM8K counts as one template.
"""

import json
import re
import sys
from pathlib import Path

from sinklens.tasks import find_task
from sinklens.tasks.word_problems import held_out
from sinklens.utils.atomic import write_file


def texts(number: int, gsm8k: str | None = None) -> list[dict[str, str]]:
    """The first problems, of the shipped ones or of GSM8K's test set in a folder."""
    if gsm8k is None:
        return [{"prompt": f"{one.prompt} {one.answer}", "template": one.kind} for one in held_out(number)]
    samples = find_task("gsm8k", path=gsm8k, shots=0).samples(number)
    found = [re.sub(r"<<.*?>>", "", f"{one.prompt}{one.reference}") for one in samples]
    return [{"prompt": text, "template": "gsm8k"} for text in found]


if __name__ == "__main__":
    file, number, *folder = sys.argv[1:]
    lines = [json.dumps(line) for line in texts(int(number), *folder)]
    write_file(Path(file), "\n".join(lines) + "\n")
    print(f"{len(lines)} texts in {file}")
