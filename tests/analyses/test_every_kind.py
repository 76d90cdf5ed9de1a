"""Every study on every kind of model: it measures something, or says why it cannot."""

import numpy as np
import pytest
from asked import TWO as PROMPTS

from sinklens.analyses import STUDIES, find
from sinklens.errors import SettingError

KINDS = ("tiny-sdar", "tiny-llada-moe", "tiny-canvas", "tiny-mdlm", "tiny-duo")
SETTINGS = {
    "tiny-sdar": {"gen_length": 8, "denoising_steps": 3},
    "tiny-llada-moe": {"gen_length": 8, "steps": 3, "block_length": 8},
    "tiny-canvas": {"gen_length": 8, "max_denoising_steps": 3},
    "tiny-mdlm": {"gen_length": 8, "steps": 5},
    "tiny-duo": {"gen_length": 8, "steps": 5},
}
ON_BLOCKS = {
    "caching": "no cache policy applies, as its attention is block-causal",
    "texts": "attention depends on blocks",
    "pair": "attention depends on blocks",
    "alone": "attention depends on blocks",
}
ON_TOKENS = {
    "settling": "reads predictions at undecided positions",
    "events": "no single step decides a position",
    "edits": "no single step decides a position|reads a noise level",
    "mechanism": "positions are decided in no order",
    "caching": "its keys change with the noise level",
    "texts": "reads a noise level|without a mask token",
    "pair": "reads a noise level|without a mask token",
    "alone": "reads a noise level|without a mask token",
}
ON_CANVASES = {
    "settling": "reads predictions at undecided positions",
    "caching": "no cache policy applies",
    "events": "no single step decides a position",
    "edits": "no single step decides a position|reads a noise level",
    "content": "compute those of their canvas alone",
    "swaps": "compute those of their canvas alone",
    "mechanism": "positions are decided in no order",
    "texts": "without a mask token|depends on blocks",
    "pair": "without a mask token|depends on blocks",
    "alone": "without a mask token|depends on blocks",
}
WHY = {"tiny-canvas": ON_CANVASES, "tiny-sdar": ON_BLOCKS, "tiny-duo": ON_TOKENS}


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_study_measures_and_draws_a_kind_of_model_or_says_why_it_cannot(kind, study, toy, tmp_path):
    why = WHY.get(kind, {})
    one = find(study)(settings=SETTINGS[kind])
    if study in why:
        with pytest.raises(SettingError, match=why[study]):
            one.run(toy(kind), PROMPTS)
        return
    found = one.run(toy(kind), PROMPTS, tmp_path)
    assert any(np.isfinite(table["estimate"]).any() for table in found.tables.values() if len(table))
    assert {file.suffix for file in found.files} == {".csv", ".png", ".svg", ".nc", ".json"}
