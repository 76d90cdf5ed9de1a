"""The bars of a split score."""

import numpy as np
import pytest
import xarray as xr

from sinklens.errors import SettingError
from sinklens.views import writer_bars

PARTS = [0.5, -2.0, 0.1, 1.0, 0.2, 0.0]
TABLE = xr.Dataset(
    {"from_key": ("writer", PARTS), "from_query_excess": ("writer", np.array(PARTS) * 2)},
    {"writer": ["embed", "L0H0", "L0H1", "0_mlp_out", "bias", "rest"],
     "kind": ("writer", ["embed", "head", "head", "mlp", "bias", "rest"])},
    {"layer": 1, "head": 3, "step": 4, "query": -1, "key": 17},
)  # fmt: skip


def test_the_largest_parts_have_bars_and_the_others_share_one():
    ax = writer_bars(TABLE, excess=False, top=3)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["L0H0", "0_mlp_out", "embed", "3 others"]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([-2.0, 1.0, 0.5, 0.3])
    assert ax.get_title() == "who wrote the key: head 1.3, step 4, key 17, mean over queries"
    heads = writer_bars(TABLE, "query", top=6)
    assert [bar.get_width() for bar in heads.patches] == pytest.approx([-4.0, 2.0, 1.0, 0.4, 0.2, 0.0])
    assert heads.patches[0].get_facecolor() == heads.patches[4].get_facecolor()  # both heads


@pytest.mark.usefixtures("unchecked")
def test_a_side_that_does_not_exist_is_refused():
    with pytest.raises(SettingError, match="side must be 'key' or 'query' and top at least 1; got 'value' and 3"):
        writer_bars(TABLE, "value", top=3)
