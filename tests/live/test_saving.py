"""The saved page is the offline report of the run."""

import json
import re

import pytest

import sinklens
from sinklens.views import report

PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
SHORT = {"gen_length": 4}


def info(page: str) -> dict:
    """The facts that a report contains."""
    found = re.search(r'<script[^>]*id="info"[^>]*>(.*?)</script>', page, flags=re.DOTALL)
    assert found, "the page has no data"
    return json.loads(found.group(1))


@pytest.mark.extended
def test_the_saved_page_is_the_report_of_the_run(client, tiny_llada, tmp_path):
    run = sinklens.generate(tiny_llada, PROMPT, **SHORT)
    expected = info(report(run, tmp_path / "run.html").read_text())
    plain = client.run(prompt=PROMPT, settings=SHORT)["summary"]["id"]
    chips = [{"kind": "ablate_head", "layer": 0, "head": 2}]
    changed = client.run(prompt=PROMPT, settings=SHORT, chips=chips)
    pages = [client.http.get(f"/api/runs/{one}/page").text for one in (plain, changed["summary"]["id"])]
    assert info(pages[0]) == expected
    assert info(pages[1])["answer"] == changed["text"]
    assert ["changes", "AblateHeads(layers=[0], heads=[2], by='zero')"] in info(pages[1])["facts"]
    assert info(pages[1])["attention"]["places"] == expected["attention"]["places"], "patterns of a run with a chip"
