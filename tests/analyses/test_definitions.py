"""The definitions study: each definition masks the stated keys, and models without a definition have no number."""

import numpy as np
import pytest
from asked import PROMPT

from sinklens.analyses.definitions import DEFINITIONS, Definitions, newest_rows
from sinklens.experiments import effect
from sinklens.interventions import MaskSinks

FEW = {"gen_length": 6}


@pytest.mark.parametrize("cached", [True, False])
def test_the_scores_of_the_newest_query_are_its_attention_and_sum_to_the_number_of_keys(tiny_llama, cached):
    settings = FEW | {"use_cache": cached}
    track = newest_rows(Definitions(), tiny_llama, PROMPT, settings)
    seen = {}
    hooks = [("blocks.2.attn.hook_pattern", lambda value, hook: seen.update({hook.step: value[0, :, -1]}))]
    run = Definitions().generate(tiny_llama, [PROMPT], settings, hooks=hooks).run
    scores = track.scores().to_numpy()[0]
    for step in range(run.steps_run):
        length = run.prompt_length + step
        np.testing.assert_allclose(scores[step, 2, :, :length], seen[step] * length, atol=1e-5)
        assert np.isnan(scores[step, ..., length:]).all()
        np.testing.assert_allclose(np.nansum(scores[step], axis=-1), length, rtol=1e-4)


@pytest.fixture(scope="module")
def measured(tiny_llada, tiny_llama):
    return {
        model.name: Definitions().measure(model, [PROMPT], FEW).isel(prompt=0) for model in (tiny_llada, tiny_llama)
    }


def test_a_model_has_numbers_for_its_own_definitions_only(measured):
    known = {name: data["changed"].sel(pick="strongest", top_k=1).notnull() for name, data in measured.items()}
    assert [name for name in DEFINITIONS if known["tiny-llada"].sel(definition=name, reach="all")] == [
        "columns_steady", "columns_step", "first",
    ]  # fmt: skip
    assert not known["tiny-llada"].sel(reach="newest").any()
    for reach in ("newest", "all"):
        assert [name for name in DEFINITIONS if known["tiny-llama"].sel(definition=name, reach=reach)] == [
            "columns_steady", "row_steady", "row_step", "first",
        ]  # fmt: skip


def test_every_number_equals_that_of_a_separate_run(tiny_llama, measured):
    rows = newest_rows(Definitions(), tiny_llama, PROMPT, FEW | {"use_cache": False})
    for definition, top_k, mask in (
        ("row_steady", 1, MaskSinks(source=rows, queries="all")),
        ("row_step", 5, MaskSinks(top_k=5, queries="all")),
        ("first", 5, MaskSinks(top_k=5, positions=range(5), queries="all")),
    ):
        one = effect(tiny_llama, [PROMPT], mask, **FEW, use_cache=False)
        got = measured["tiny-llama"]["changed"].sel(definition=definition, reach="all", pick="strongest", top_k=top_k)
        assert float(got) == float(not one.free_running["same_answer"].item())
