"""Settings: their defaults, and error messages that name what is allowed."""

import inspect
import math

import pytest

from sinklens.errors import SettingError
from sinklens.families import SAMPLERS
from sinklens.families.samplers import make_settings

CHECKPOINT = {"gen_length": 24, "steps": 24, "block_length": 8}


@pytest.mark.parametrize(
    ("sampler", "given", "defaults", "expected"),
    [
        ("llada", {"gen_length": 64}, {}, {"steps": 64, "block_length": 32}),
        ("llada", {"gen_length": 24}, {}, {"block_length": 24}),
        ("llada", {}, CHECKPOINT, CHECKPOINT),
        ("llada", {"gen_length": 64}, CHECKPOINT, {"gen_length": 64, "steps": 64, "block_length": 32}),
        ("llada2", {"gen_length": 24, "minimal_topk": 5, "block_length": 8}, {}, {"denoising_steps": 4}),
        ("llada2", {"gen_length": 64, "denoising_steps": 99}, {}, {"denoising_steps": 32}),
        ("llada2.1", {"gen_length": 64, "num_to_transfer": 5}, {}, {"steps": 2 * (7 + 16)}),
        ("autoregressive", {"gen_length": 9}, {}, {"steps": 9}),
    ],
)
def test_settings_follow_from_others_and_those_of_a_checkpoint_from_its_length(sampler, given, defaults, expected):
    made = make_settings(sampler, given, defaults)
    assert {name: getattr(made, name) for name in expected} == expected


@pytest.mark.parametrize("name", SAMPLERS)
def test_help_describes_every_setting_also_those_of_a_shared_part(name):
    text = " ".join((inspect.getdoc(SAMPLERS[name]) or "").split())
    assert [one.name for one in SAMPLERS[name].settings().values() if len(one.meaning) < 10] == []
    assert [one.name for one in SAMPLERS[name].settings().values() if one.meaning not in text] == []


@pytest.mark.parametrize(
    ("sampler", "given", "text"),
    [
        ("llada", {"gen_length": 24, "block_length": 7}, r"block_length 7 does not divide gen_length 24.*1, 2, 3, 4"),
        ("llada", {"gen_length": 24, "block_length": 8, "steps": 10}, r"steps 10 cannot be divided among 3.*multiple"),
        ("llada", {"gen_length": 8, "steps": 16}, r"steps 16 is more than gen_length 8"),
        ("llada", {"gen_length": 0}, r"gen_length must be an integer of at least 1; got 0"),
        ("llada", {"gen_length": 8.0}, r"gen_length must be an integer of at least 1; got 8.0"),
        ("llada", {"steps": -1}, r"steps must be an integer"),
        ("llada", {"temperature": -1.0}, r"temperature must be a finite number of at least 0; got -1.0"),
        ("llada", {"temperature": math.inf}, r"temperature must be a finite number of at least 0; got inf"),
        ("llada", {"cfg_scale": -0.5}, r"cfg_scale must be a finite number of at least 0; got -0.5"),
        ("llada", {"cfg_scale": math.inf}, r"cfg_scale must be a finite number"),
        ("llada", {"threshold": math.nan}, r"threshold must be a number from 0 to 1 or None; got nan"),
        ("llada", {"threshold": -1.0}, r"threshold must be a number from 0 to 1 or None; got -1.0"),
        ("llada", {"threshold": 5.0}, r"threshold must be a number from 0 to 1 or None; got 5.0"),
        ("sdar", {"threshold": 1.5}, r"threshold must be a number from 0 to 1; got 1.5"),
        ("llada2", {"threshold": 1.5}, r"threshold must be a number from 0 to 1; got 1.5"),
        ("llada2.1", {"editing_threshold": 1.5}, r"editing_threshold must be a number from 0 to 1; got 1.5"),
        ("fast-dllm-v2", {"threshold": 1.5}, r"threshold must be a number from 0 to 1; got 1.5"),
        ("llada", {"remasking": "random", "threshold": 0.5}, r"'random' does not use confidences"),
        ("dream", {"threshold": math.nan}, r"threshold must be a finite number or None; got nan"),
        ("dream", {"alg_temp": -1.0}, r"alg_temp must be a finite number of at least 0 or None; got -1.0"),
        ("llada", {"remasking": "low-confidence"}, r"remasking.*low_confidence.*random"),
        ("llada", {"stpes": 4}, r"stpes is not a setting of the llada sampler: no sampler has it. Nearest: steps"),
        ("llada", {"fwd_hooks": []}, r"fwd_hooks is not a setting of the llada sampler: pass hooks=\."),
        ("dream", {"max_new_tokens": 8}, r"max_new_tokens is not a setting of the dream sampler: pass gen_length=\."),
        ("llada", {"alg": "entropy"}, r"not a setting of the llada sampler: .* dream, dream-blocks and open-dcoder"),
        ("dream", {"logits_eos_inf": True}, r"belongs to the llada sampler\."),
        ("autoregressive", {"threshold": 0.9}, r"it belongs to the llada, dream.* and \S+ samplers\."),
        ("dream", {"alg": "entrpoy"}, r"alg.*origin.*maskgit_plus.*topk_margin.*entropy"),
        ("dream", {"eps": 0.0}, r"eps must be a finite number above 0 and below 1; got 0.0"),
        ("dream", {"alg": "origin", "threshold": 0.9}, r"'origin' does not use confidences"),
        ("dream", {"threshold": 0.9}, r"'entropy' compares negative entropies, .*threshold 0.9; .*alg='maskgit_plus'"),
        ("dream-blocks", {"threshold": 0.9}, r"no proposal reaches threshold 0.9"),
        ("dream", {"tokens_per_step": 2}, r"tokens_per_step limits what threshold commits; set threshold"),
        ("dream", {"tokens_per_step": 2, "threshold": -0.1, "alg_temp": 0.1}, r"leave alg_temp out"),
        ("dream", {"tokens_per_step": 0, "threshold": -0.1}, r"tokens_per_step must be an integer of at least 1"),
        ("dream", {"tokens_per_step": 5, "threshold": -0.1, "gen_length": 24}, r"5 does not divide gen_length 24"),
        ("dream", {"tokens_per_step": 2, "threshold": -0.1, "gen_length": 24, "steps": 12}, r"leave steps out"),
        ("dream", {"top_p": 0.0}, r"top_p must be a finite number above 0 and of at most 1 or None; got 0.0"),
        ("autoregressive", {"top_k": 0}, r"top_k must be an integer of at least 1"),
        ("autoregressive", {"steps": 4}, r"steps is not a setting of the autoregressive sampler"),
        ("llada", {"temperature": "hot"}, r"temperature must be a finite number of at least 0; got 'hot'"),
        ("llada2", {"gen_length": 8, "minimal_topk": 9}, r"minimal_topk 9 is more than gen_length 8, .* at most 8"),
        ("llada2", {"eos_early_stop": True, "stop": False}, r"eos_early_stop=True ends rows .* stop=False forbids"),
        ("llada2.1", {"max_post_steps": -1}, r"max_post_steps must be an integer of at least 0; got -1"),
        ("llada2.1", {"editing_threshold": math.nan}, r"editing_threshold must be a number from 0 to 1"),
    ],
)  # fmt: skip
def test_a_bad_setting_raises_an_error_that_says_what_is_allowed(sampler, given, text):
    with pytest.raises(SettingError, match=text):
        make_settings(sampler, given, {})
