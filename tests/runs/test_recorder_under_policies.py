"""Under a cache policy, variables and patterns are recorded for the positions that a row's plan computes."""

import re

import numpy as np
import pytest
import torch
from asked import WORDS as PROMPTS

import sinklens
from sinklens.analyses.nulls import FixedQueries
from sinklens.errors import SettingError
from sinklens.sampling import DelayedCache, DualCache
from sinklens.sinks import Record
from sinklens.views import attention, pattern_at

SETTINGS = {"gen_length": 12, "block_length": 6, "seed": 1}
ALL = Record(["values", "stream", "outputs"], patterns=[(3, 1), (9, 2)])


@pytest.fixture(scope="module")
def together(worded):
    return sinklens.generate(worded("llama"), PROMPTS, cache=DelayedCache(4), record_sinks=ALL, **SETTINGS)


def test_a_row_of_a_batch_is_recorded_as_alone(worded, together):
    """The window of a pass covers what any row computes; the rows here compute different positions."""
    fresh = together.sinks["fresh"].any("layer").to_numpy()
    assert (fresh[0] != fresh[1])[:, together.prompt_length :].any()
    for row, prompt in enumerate(PROMPTS):
        alone = sinklens.generate(worded("llama"), prompt, cache=DelayedCache(4), record_sinks=ALL, **SETTINGS)
        start = together.canvas.shape[2] - alone.canvas.shape[2]
        for name in ("stream_peak", "stream_channel", "stream_median", "stream_channel_median", "output_rank",
                     "value_norm"):  # fmt: skip
            ours, theirs = (run.sinks[name].isel(batch=at) for run, at in ((alone, 0), (together, row)))
            if "pos" in theirs.dims:
                theirs = theirs.isel(pos=slice(start, None))
            np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), rtol=2e-3, atol=1e-5, err_msg=name)


def test_recorded_patterns_have_a_row_for_each_computed_query_and_no_other(together):
    for (step, layer), pattern in together.patterns.items():
        computed = torch.from_numpy(together.sinks["fresh"].isel(step=step).any("layer").to_numpy())
        assert (computed != together.real).any()
        assert torch.equal(~pattern.isnan().any(dim=-1), computed[:, None].expand(pattern.shape[:3]))
        score = together.sinks["score"].isel(step=step, layer=layer).to_numpy()
        np.testing.assert_allclose(pattern.nansum(dim=2), score, atol=1e-5)
        for row in range(2):
            shown, start = pattern_at(together, step, layer, row), int(together.real[row].int().argmax())
            assert torch.equal(shown.nan_to_num(), pattern[row, :, start:, start:].nan_to_num())
            assert not re.search(r"[\[,]NaN[\],]", attention(together, step=step, layer=layer, row=row).document)


def test_sums_over_fixed_queries_are_refused(worded):
    model = worded("llama")
    _, real = model.encode(PROMPTS)
    with pytest.raises(
        SettingError, match=r"'fixed queries' needs all positions of attn\.hook_pattern, and under a cache"
    ):
        sinklens.generate(model, PROMPTS, cache=DualCache(), record_sinks=Record([FixedQueries(real)]), **SETTINGS)
