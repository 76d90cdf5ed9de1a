"""The saved page is the offline report of the run, or of the pair."""

import html
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
def test_the_saved_page_is_the_report_of_the_run_and_of_the_pair(client, tiny_llada, tmp_path):
    run = sinklens.generate(tiny_llada, PROMPT, **SHORT)
    expected = info(report(run, tmp_path / "run.html").read_text())
    plain = client.run(prompt=PROMPT, settings=SHORT)["summary"]["id"]
    chips = [{"kind": "ablate_head", "layer": 0, "head": 2}]
    changed = client.run(prompt=PROMPT, settings=SHORT, chips=chips)
    page = client.http.get(f"/api/runs/{plain}/page").text
    assert info(page) == expected
    pair = client.http.get(f"/api/runs/{plain}/page?other={changed['summary']['id']}").text
    pages = [html.unescape(text) for text in re.findall(r'srcdoc="(.*?)"', pair, flags=re.DOTALL)]
    assert len(pages) == 2
    assert info(pages[1])["answer"] == changed["text"]
    assert info(pages[1])["attention"]["places"] == expected["attention"]["places"], "patterns of a run with a chip"
