"""What a plan of a run can be asked for by name: quantizations, and points that are watched.

These quantizations are of full-precision checkpoints; what a quantized one takes, its config.json says
(`weight_forms`).
"""

WATCHED = {"patterns": "attn.hook_pattern", "scores": "attn.hook_attn_scores", "streams": "hook_resid_post"}
"""Short names of points in every layer, for `plan_run`."""

QUANTIZATIONS = ("none", "bnb-int8", "bnb-nf4")
"""Names as in `sinklens.load`, of linear layers: LLM.int8 (Dettmers et al., 2208.07339) has a scale per row, and NF4
(2305.14314) one per 64 weights, which is not quantized here."""
