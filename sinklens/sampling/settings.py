"""The settings of all samplers as keyword arguments, for type checkers.

Each sampler declares its own settings, with ranges and meanings; nothing reads this list when a run is made. A sampler
without an entry here runs all the same.
"""

from typing import Any, Literal, TypedDict

Mode = Literal["autoregressive", "diffusion", "speculation"]
"""How a run of a model with several modes decodes."""


class Settings(TypedDict, total=False):
    """All sampler settings, for type checkers; which ones apply depends on the sampler."""

    gen_length: int
    steps: int
    block_length: int
    temperature: float
    cfg_scale: float
    remasking: Literal["low_confidence", "random"]
    threshold: float
    factor: float
    by_quota: bool
    tokens_per_step: int
    logits_eos_inf: bool
    confidence_eos_eot_inf: bool
    stop_at_eos: bool
    order: Literal["random", "confidence"]
    alg: Literal["origin", "maskgit_plus", "topk_margin", "entropy", "p2"]
    alg_temp: float
    top_p: float
    top_k: int
    eps: float
    use_cache: bool
    denoising_steps: int
    remasking_strategy: Literal["sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"]
    eb_threshold: float
    confidence_of: Literal["draw", "model"]
    stop: bool
    right_shift_logits: bool
    small_block_size: int
    use_block_cache: bool
    minimal_topk: int
    eos_early_stop: bool
    editing_threshold: float
    max_post_steps: int
    num_to_transfer: int
    greedy: bool
    eb_gamma: float
    closing: Literal["pad", "eos", "none"]
    canvas_length: int
    max_denoising_steps: int
    entropy_bound: float
    t_min: float
    t_max: float
    stability_threshold: int
    confidence_threshold: float
    pad_token_id: int
    predictor: Literal["ddpm", "ddpm_cache", "analytic", "euler"]
    noise_removal: bool
    first_hitting: bool
    num_steps: int
    nucleus_p: float
    sliding: bool
    var_length: bool
    window_length: int
    stride_length: int
    window_steps: int
    final_step: Literal["ancestral", "greedy", "none"]
    time_profile: str
    high_mode: str
    middle_mode: str
    low_mode: str
    high_frac: float
    middle_frac: float
    min_p: float
    t0: float
    early_stopping: bool
    causal_context: bool
    neg_entropy: bool
    draft_threshold: float
    use_adapter: bool
    early_stopping_patience: int


class RunSettings(Settings, total=False):
    """The settings of a run: those of its sampler, those that only Python can give, and the sampler or mode."""

    sampler: str
    mode: Mode
    start_canvas: Any
