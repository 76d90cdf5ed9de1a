"""Departures: every changed setting is named, and published scores are compared by Newcombe's interval."""

import pytest
from ledgers import planted_run

from sinklens.evaluation import HARNESS_PROTOCOLS, PROTOCOLS, UNMASKED, baselines, masking, read_lines
from sinklens.evaluation.departures import departures
from sinklens.evaluation.protocols import find_protocol
from sinklens.evaluation.published import Published
from sinklens.families.samplers import make_settings
from sinklens.utils.estimates import proportion, unpaired

LLADA = "GSAI-ML/LLaDA-8B-Instruct"
BLOCKS = find_protocol("llada-instruct-gsm8k-blocks")


def what(protocol=BLOCKS, sampler="llada", **changes):
    """What a run of a protocol is in a ledger, with other settings."""
    settings = vars(make_settings(sampler, protocol.of(sampler) | changes, {}))
    return {"protocol": {"name": protocol.name} | protocol.what, "sampler": sampler, "settings": settings}


def test_a_run_as_its_protocol_states_departs_in_nothing():
    for protocol in PROTOCOLS.values():
        for sampler in protocol.settings:
            assert departures(what(protocol, sampler)) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": 128}, ["steps 128, not 256"]),
        ({"steps": 64, "block_length": 32}, ["steps 64, not 256", "block_length 32, not 8"]),
        ({"temperature": 0.5}, ["temperature 0.5, not 0.0, the sampler's default"]),
        ({"logits_eos_inf": True}, ["logits_eos_inf on, not off, the sampler's default"]),
    ],
)
def test_every_changed_setting_of_the_sampler_is_named(changes, text):
    assert departures(what(**changes)) == text


def test_settings_of_the_task_and_another_sampler_are_named():
    run = what()
    run["protocol"] |= {"shots": 5, "chat_template": False}
    assert departures(run) == ["shots 5, not 4", "chat_template off, not on"]
    other = what() | {"sampler": "dream"}
    assert departures(other) == ["the dream sampler, for which llada-instruct-gsm8k-blocks states nothing"]
    assert departures({"protocol": {"name": "tiny-gsm"}, "sampler": "llada", "settings": {}}) == []


def test_lengths_that_a_source_leaves_open_are_no_departure():
    assert departures(what(find_protocol("sdar-gsm8k"), "sdar", gen_length=512)) == []


@pytest.mark.parametrize(("right", "verdict"), [(1037, "agrees"), (950, "below"), (1100, "above")])
def test_a_baseline_agrees_with_a_published_score_or_lies_beside_it(right, verdict):
    (one,) = baselines(BLOCKS.name, f"/models/{LLADA.split('/')[1]}", proportion(right, 1319), ())
    assert one.published.score == 0.786
    assert one.verdict == verdict
    assert one.gap == unpaired(proportion(1037, 1319), proportion(right, 1319))


def test_a_run_that_departs_is_not_compared_and_a_part_of_the_test_set_is_named():
    accuracy = proportion(10, 20)
    (one,) = baselines(BLOCKS.name, LLADA, accuracy, ("steps 128, not 256",))
    assert (one.gap, one.verdict) == (None, "departs")
    (part,) = baselines(BLOCKS.name, LLADA, accuracy, ())
    assert part.departs == ("20 of 1,319 samples",)
    assert part.verdict == "below"
    assert baselines(BLOCKS.name, "tiny-llada", accuracy, ()) == []
    (unknown,) = baselines("sdar-gsm8k", "JetLM/SDAR-8B-Chat", accuracy, ())
    assert unknown.verdict == "no number"


def test_lines_of_a_table_say_in_what_they_depart(tmp_path):
    settings = what()["settings"]
    for steps in (256, 128):
        for condition in masking([1]):
            planted_run(
                tmp_path, {"gsm8k/0": True}, condition, model=LLADA, protocol=BLOCKS.name,
                settings=settings | {"steps": steps},
            )  # fmt: skip
    found = {(line.condition, line.model): line.departs for line in read_lines(tmp_path)}
    assert found == {
        (name, f"{LLADA} (steps {steps})"): () if steps == 256 else ("steps 128, not 256",)
        for name in (UNMASKED.name, "1 sink")
        for steps in (256, 128)
    }


def test_every_published_score_has_a_source_and_what_is_left_open_is_text():
    for one in (*PROTOCOLS.values(), *HARNESS_PROTOCOLS.values()):
        assert all(score.source and (score.score is None or 0 <= score.score <= 1) for score in one.published)
        assert all(isinstance(text, str) and text for text in one.unstated)
        assert isinstance(one.unstated, tuple)


@pytest.mark.parametrize(
    ("name", "settings", "shots", "score"),
    [
        ("llada-base-truthfulqa_mc2-cfg", {"mc_num": 128, "mc_batch": 8, "cfg_scale": 2.0}, 0, 0.464),
        ("llada-base-mmlu", {"mc_num": 1, "mc_batch": 1}, 5, 0.659),
        ("dream-base-gsm8k_cot", {"gen_length": 256, "steps": 256, "temperature": 0.0, "top_p": 0.95}, 8, 0.772),
    ],
)
def test_scores_and_settings_are_those_of_the_sources(name, settings, shots, score):
    """LLaDA's EVAL.md; eval_llada_lm_eval.sh; Dream's eval_dream_gen.sh."""
    found = HARNESS_PROTOCOLS[name]
    assert (found.settings, found.shots, found.published[0].score) == (settings, shots, score)
    assert found.likelihood == ("mc_num" in settings)


def test_the_command_of_a_harness_protocol_repeats_its_settings():
    assert HARNESS_PROTOCOLS["llada-base-piqa-cfg"].command() == (
        "python -m sinklens.evaluation.harness --model sinklens --tasks piqa --num_fewshot 0 --model_args "
        "pretrained=GSAI-ML/LLaDA-8B-Base,mc_num=128,mc_batch=8,cfg_scale=0.5"
    )
    assert HARNESS_PROTOCOLS["llada-instruct-math"].command() == ""


def test_settings_of_harness_protocols_are_arguments_of_the_model():
    """Each is a setting of the family's sampler, or of likelihoods."""
    draws = {"mc_num", "mc_batch", "mc_masking", "cfg_scale"}
    samplers = {"llada": "llada", "dream": "dream", "llada2": "llada2", "diffusion": "diffusion-gemma"}
    for one in HARNESS_PROTOCOLS.values():
        if not one.likelihood:
            make_settings(samplers[one.name.split("-")[0]], one.settings, {})
        else:
            assert set(one.settings) <= draws


def test_a_published_score_is_of_its_checkpoint_under_any_path():
    score = Published("a/LLaDA-8B-Base", 0.5, "somewhere", 10)
    assert score.of("/data/LLaDA-8B-Base/")
    assert not score.of("b/LLaDA-8B-Instruct")
    assert score.accuracy == proportion(5, 10)
