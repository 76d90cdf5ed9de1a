"""Documents that a stranger wrote: what is refused, in one sentence with the name of the file."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from contracts import relied_on

import sinklens
from sinklens.errors import CheckpointError, PromptError, SettingError, SinklensError, TrackError
from sinklens.features import ActivationStore, collect, load_sae
from sinklens.runs import generate
from sinklens.runs.recordings import read_canvases
from sinklens.sinks.track import SinkTrack
from sinklens.utils.documents import read_json, read_yaml

SHIPPED = Path(sinklens.__file__).parent / "model" / "shipped"
VALUES = ([], {}, "x", -7, 7, 10**30, 1.5, None, True, [[1]], float("nan"), 10**12)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", '{"a":' * 100 + "1" + "}" * 100, "nested more than 64 deep"),
        ("a.json", '{"a": ' + "9" * 5000 + "}", "does not fit into 64 bits"),
        ("a.json", '{"a": 9223372036854775808}', "does not fit into 64 bits"),
        ("a.json", '{"a": NaN}', "NaN is not finite"),
        ("a.json", '{"a": 1e999}', "1e999 is not finite"),
        ("a.json", '{"a": "\\ud800"}', "surrogates not allowed"),
        ("a.json", "[]", "contains a JSON list, not an object"),
        ("a.json", "", "is not valid JSON"),
        ("a.json", " " * 2**26, "is larger than 33,554,432 bytes"),
        ("a.yaml", "a: &a [x, x]\nb: [*a, *a]", "anchors and aliases are not read"),
        ("a.yaml", "a: .nan", "not JSON compliant"),
        ("a.yaml", "a: 2001-99-99", "month must be in"),
        ("a.yaml", "a: 2001-01-01", "date is not JSON serializable"),
        ("a.yaml", "".join(" " * depth + "a:\n" for depth in range(300)), "nested"),
        ("a.yaml", "a: " + "9" * 5000, "4300"),
        ("a.yaml", "a: " + "x" * 2**17, "larger than 65,536 bytes"),
    ],
)
def test_a_document_beyond_the_limits_is_refused_with_the_name_of_its_file(
    tmp_path: Path, name: str, content: str, reason: str
):
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"(?s){re.escape(name)} .*{reason}"):
        read_json(tmp_path / name) if name == "a.json" else read_yaml(tmp_path / name, CheckpointError)


def test_json_within_the_limits_is_read_as_python_reads_it(tmp_path: Path):
    content = {"a": [2**63 - 1, -(2**63), 1.5e300, None, True, "é\U0001f600"], "b": {"1": {}}, "c": "9" * 30}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert read_json(tmp_path / "a.json") == content


def changed(content: Any) -> list[str]:
    """The content as JSON, with every value that is not in another one replaced, and cut."""
    found = [json.dumps({**content, name: value}) for name in content for value in VALUES]
    for name, inner in content.items():
        if isinstance(inner, dict):
            found += [json.dumps({**content, name: {**inner, key: value}}) for key in inner for value in VALUES]
    whole = json.dumps(content)
    return [*found, "[" * 100_000, '{"a": ' + "9" * 5000 + "}", *(whole[:cut] for cut in range(0, len(whole), 9))]


def canvases(folder: Path) -> Any:
    content = {"format": "canvases 1", "prompt_ids": [5], "canvas": [[5, 1], [5, 7]], "undecided": [[1], []]}
    return {**content, "settings": {"steps": 1}, "seed": 0, "model": "m"}, folder / "runs.jsonl", read_canvases


def sae(folder: Path) -> Any:
    place = shutil.copytree(next((SHIPPED.parents[1] / "features" / "shipped").glob("*/cfg.json")).parent, folder / "s")
    content = {**json.loads((place / "cfg.json").read_text()), "activation_fn_kwargs": {"k": 2}, "meta": {"a": 1}}
    return content, place / "cfg.json", lambda file: load_sae(file.parent)


def defaults(folder: Path) -> Any:
    place = shutil.copytree(SHIPPED / "tiny-llada", folder / "m")
    content = {"eos_token_id": 0, "pad_token_id": 0, "sinklens": {"gen_length": 8, "steps": 4, "temperature": 0.0}}

    def use(file: Path) -> None:
        generate(sinklens.load(file.parent, check=False), [[5, 6]], progress=False, record_sinks=False)

    return content, place / "generation_config.json", use


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", [canvases, sae, defaults], ids=lambda kind: kind.__name__)
def test_mistyped_or_cut_files_raise_errors_of_sinklens(tmp_path: Path, kind: Any):
    content, file, use = kind(tmp_path)
    refused = 0
    for text in changed(content):
        file.write_text(text)
        try:
            use(file)
        except SinklensError:
            refused += 1
    assert refused > 50


@pytest.fixture(scope="module")
def track() -> SinkTrack:
    found = generate(sinklens.load("tiny-llada", check=False), [[5, 6]], gen_length=4, steps=2, progress=False).sinks
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["t.nc", "t.zarr"])
@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("vocabulary", "x"), ("vocabulary", '{"a": "b"}'), ("vocabulary", '{"1": 5}'), ("settings", "[]"),
        ("settings", '{"steps": "x"}'), ("special", "[" * 100_000), ("special", '{"mask": 5}'), ("model", 5),
        ("prompt_length", "x"), ("prompt_length", -3), ("prompt_length", 99), ("causal", "x"),
    ],
)  # fmt: skip
def test_a_track_with_a_mistyped_attribute_is_refused(
    tmp_path: Path, track: SinkTrack, name: str, attribute: str, value: Any
):
    SinkTrack(track.data.assign_attrs({attribute: value})).save(tmp_path / name)
    with pytest.raises(TrackError, match=rf"{re.escape(name)} is not a complete"):
        SinkTrack.open(tmp_path / name)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("written", "x"), ("written", -1), ("about", 5), ("prompts_done", []), ("about", {"points": 5, "prompts": 1})],
)
def test_a_store_of_activations_with_a_mistyped_attribute_is_refused(tmp_path: Path, attribute: str, value: Any):
    model = sinklens.load("tiny-llada", check=False)
    collect(model, [[5, 6]], ["blocks.0.hook_resid_post"], out=tmp_path / "a.zarr", gen_length=4, steps=2)
    meta = json.loads((tmp_path / "a.zarr" / "zarr.json").read_text())
    meta["attributes"][attribute] = value
    (tmp_path / "a.zarr" / "zarr.json").write_text(json.dumps(meta))
    with pytest.raises(SettingError, match=r"a\.zarr is damaged"):
        ActivationStore(tmp_path / "a.zarr")


DOUBLED = "{% set n = namespace(x='aaaaaaaa') %}{% for a in range(60) %}{% set n.x = "


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ 'a' * 10**10 }}", "{{ ['a'] * 3000000000 }}", "{{ 9 ** 9 ** 9 }}", "{{ 'a'|center(3000000000) }}",
        "{{ 'a'.ljust(3000000000) }}", "{{ '%3000000000d' % 1 }}", "{{ '%*d' % (3000000000, 1) }}",
        "{{ '{:3000000000}'.format(1) }}", DOUBLED + "n.x + n.x %}{% endfor %}", DOUBLED + "n.x ~ n.x %}{% endfor %}",
        DOUBLED + "n.x.replace('a', n.x) %}{% endfor %}", DOUBLED + "n.x|replace('a', n.x) %}{% endfor %}",
        "{% set x = 'aaaaaaaa' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
        "{% set x = 'a' * 100000 %}{% for a in range(100000) %}{{ x }}{% endfor %}",
    ],
)  # fmt: skip
def test_a_template_that_never_ends_or_explodes_is_stopped(template: str):
    model = sinklens.load("tiny-llada", check=False)
    with pytest.raises(PromptError, match="the chat template failed on a user turn"):
        model.encode("12", chat_template="{{ messages[0].content }}" + template)


def test_a_template_within_the_limits_is_rendered_as_by_transformers():
    tokenizer = sinklens.load("tiny-llada", check=False).tokenizer
    template = "{% for m in messages %}{{ bos_token + m.role ~ ':' ~ m.content|replace('a', 'bb') }}{% endfor %}!"
    turns = [{"role": "user", "content": "12 and 3 " * 1000}]
    from sinklens.model.templates import render

    expected = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert render(tokenizer, turns, template, "") == expected


def test_templates_of_transformers_have_the_parts_that_are_limited():
    with relied_on("transformers", "_compile_jinja_template(text), a template of a sandboxed environment,"):
        from transformers.utils.chat_template_utils import _compile_jinja_template

        made = _compile_jinja_template("{{ 1 + 1 }}")
        assert made.environment.sandboxed
    with relied_on("jinja2", "a sandbox that calls through call and call_binop, and joins through these functions,"):
        assert {"str_join", "markup_join"} <= made.root_render_func.__globals__.keys()
        assert {"+", "*", "**", "%"} <= made.environment.binop_table.keys()
