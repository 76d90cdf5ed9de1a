"""The table of chips agrees with what the page is offered and with the documentation."""

import re
from pathlib import Path

import pytest

from sinklens import interventions
from sinklens.families import SAMPLERS
from sinklens.live.chips import CHIPS, expressions, read_chips
from sinklens.live.forms import of_chips, of_settings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "concepts" / "lab.md").read_text()
DOCUMENTED = re.findall(r"^\| `(\w+)` \| `(\w+\(.*\))` \|$", PAGE, flags=re.MULTILINE)
VALUES = {"layer": 1, "head": 2, "by": "zero", "token": 500, "step": 7, "from_step": 7}
EXTENDED = {
    "force_token": {"pos": 30, "steps": [7, 23]},
    "remask": {"pos": 30},
    "hide_key": {"pos": 3},
    "ablate_heads": {"heads": [2, 5]},
}
RESTRICTED = {"freeze_pattern": ("head",), "hold_sink": ("head",), "hide_key": ("layer", "head")}


@pytest.mark.parametrize(("kind", "source"), DOCUMENTED)
def test_the_documented_expression_is_that_of_the_chip(kind, source):
    names = [entry.name for entry in CHIPS[kind].fields if entry.name not in RESTRICTED.get(kind, ())]
    values = {name: value for name, value in VALUES.items() if name in names}
    (expression,) = expressions(read_chips([{"kind": kind, **values, **EXTENDED.get(kind, {})}]))
    assert expression.source() == source
    assert expression.build() == eval(source, vars(interventions))


def test_every_chip_is_documented_and_offered():
    assert sorted(kind for kind, _ in DOCUMENTED) == sorted(CHIPS) == sorted(form["kind"] for form in of_chips())


def test_the_settings_offered_are_those_of_the_samplers_that_fit(tiny_llada, tiny_llama):
    for model in (tiny_llada, tiny_llama):
        offered = of_settings(model)
        assert offered["samplers"] == [
            name
            for name, one in SAMPLERS.items()
            if model.family_record.attention in one.attention and not one.sets_time and one.masked is not False
        ]
        for name, forms in offered["of"].items():
            assert [form["name"] for form in forms] == list(SAMPLERS[name].settings())
            assert all(form["help"] and form["type"] in ("int", "float", "bool", "str") for form in forms)
    fields = {form["name"]: form for form in of_settings(tiny_llada)["fields"]}
    assert fields["remasking"]["choices"] == ["low_confidence", "random"]
    assert fields["gen_length"]["default"] == tiny_llada.checkpoint.defaults["gen_length"]
    assert fields["threshold"]["default"] is None
