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
    assert ["changes", "AblateHeads(layers=[0], heads=[2], by='zero')"] in info(pages[1])["facts"]
    assert "changes" not in dict(info(pages[0])["facts"])
    assert info(pages[1])["attention"]["places"] == expected["attention"]["places"], "patterns of a run with a chip"


@pytest.mark.extended
def test_a_saved_pair_records_its_changes_and_the_comparison(client):
    plain = client.run(prompt=PROMPT, settings=SHORT)["summary"]["id"]
    chips = [{"kind": "ablate_head", "layer": 0, "head": 2}, {"kind": "force_token", "pos": 25, "step": 0, "token": 40}]
    changed = client.run(prompt=PROMPT, settings=SHORT, chips=chips)["summary"]["id"]
    pair = client.http.get(f"/api/runs/{plain}/page?other={changed}").text
    found = json.loads(re.search(r'id="comparison">(.*?)</script>', pair, flags=re.DOTALL)[1])
    compared = client.get("/api/compare", a=plain, b=changed)
    for name in ("cells", "first_difference", "sinks_moved", "texts", "kl", "kl_why"):
        assert found[name] == compared[name], name
    assert found["cells"]
    assert max(found["kl"]) > 0
    assert [len(run["chips"]) for run in found["runs"]] == [0, 2]
    head = html.unescape(pair.partition("<iframe")[0])
    assert "<td>none</td><td>AblateHeads(layers=[0], heads=[2], by='zero'); ForceTokens(tokens={25: 40}" in head
    assert f"The canvases differ from step {found['first_difference']} on." in head
