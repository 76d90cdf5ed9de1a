"""Checks for every study: the same numbers for any batch size, and prompts of token ids."""

from dataclasses import replace

import numpy as np
import pytest
import xarray as xr

from sinklens.analyses import find
from sinklens.tasks import held_out

PROMPTS = [*(problem.prompt for problem in held_out(2)), "Is $x_1$ a _b_ or 12 \n\n $\\frac{ 中?\nAnswer:"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} please{% endfor %}"
TEMPLATED = ("alone", "dynamics", "events", "existence", "pair", "texts", "token_types")  # the others share their runs
EFFECTS = ("necessity", "content", "definitions", "mechanism")


@pytest.mark.parametrize("name", ["existence", "dynamics", "edits", "token_types", "events", "settling"])
def test_tables_do_not_depend_on_the_batch(name, tiny_llada):
    settings = {"gen_length": 6, "steps": 6, "block_length": 3, "threshold": 0.95}  # rows wait
    together, apart = (
        find(name)(batch_size=batch, settings=settings).run(tiny_llada, PROMPTS).tables for batch in (len(PROMPTS), 1)
    )
    compared = {table: values for table, values in together.items() if len(values)}
    assert len(compared) >= 2
    for table, values in compared.items():
        words = [column for column in values if values[column].dtype.kind not in "fi"]
        assert values[words].equals(apart[table][words])
        numbers = ["estimate", "low", "high"]
        np.testing.assert_allclose(values[numbers], apart[table][numbers], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EFFECTS)
def test_prompts_of_token_ids_are_measured_without_scoring_their_answers(name, tiny_llada):
    study = find(name)(settings={"gen_length": 2})
    (measured,) = study.run(tiny_llada, tiny_llada.encode(held_out(1)[0].prompt)[0]).measured.values()
    (text,) = study.run(tiny_llada, held_out(1)[0].prompt).measured.values()
    assert measured["right"].isnull().all()
    assert text["right"].notnull().any()
    np.testing.assert_array_equal(measured["changed"], text["changed"])


@pytest.mark.parametrize("name", TEMPLATED)
@pytest.mark.filterwarnings("ignore")
def test_a_chat_template_is_part_of_every_prompt(name, tiny_llada):
    text = held_out(1)[0].prompt
    study = find(name)(settings={"gen_length": 4}, chat_template=TEMPLATE)
    (measured,) = study.run(tiny_llada, text).measured.values()
    given = tiny_llada.encode(text, TEMPLATE).ids[0].tolist()
    (of_ids,) = replace(study, chat_template=False).run(tiny_llada, [given]).measured.values()
    xr.testing.assert_allclose(measured.drop_vars("prompt_group"), of_ids, rtol=1e-4, atol=1e-4)
