"""Checks for every study: the same numbers for any batch size, and prompts of token ids."""

import numpy as np
import pytest

from sinklens.analyses import find
from sinklens.tasks import held_out

PROMPTS = [*(problem.prompt for problem in held_out(2)), "Is $x_1$ a _b_ or 12 \n\n $\\frac{ 中?\nAnswer:"]
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
    given = tiny_llada.encode(held_out(1)[0].prompt)[0]
    (measured,) = study.run(tiny_llada, given).measured.values()
    (text,) = study.run(tiny_llada, held_out(1)[0].prompt).measured.values()
    assert measured["right"].isnull().all()
    assert text["right"].notnull().any()
    np.testing.assert_array_equal(measured["changed"], text["changed"])
