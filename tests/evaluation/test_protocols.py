"""Protocols: the hash covers every setting that can change a score, and the published protocols match the papers."""

from dataclasses import replace

import pytest

from sinklens import load
from sinklens.errors import PromptError, PromptWarning, SettingError
from sinklens.evaluation import HARNESS_PROTOCOLS, PROTOCOLS, EvalProtocol, evaluate
from sinklens.evaluation.checked import evaluations
from sinklens.evaluation.conditions import UNMASKED
from sinklens.evaluation.protocols import departures, find_protocol
from sinklens.evaluation.units import Batch, Job
from sinklens.families import settings_for
from sinklens.families.samplers import make_settings
from sinklens.tasks import NAMES
from sinklens.tasks.prompts import Prompts

BLOCKS = find_protocol("llada-instruct-gsm8k-blocks")


def test_every_setting_that_can_change_a_score_changes_the_hash_and_a_note_does_not():
    base = find_protocol("llada-gsm8k")
    changed = [
        replace(base, task="gsm8k-cot"),
        replace(base, shots=4),
        replace(base, extractor="strict"),
        replace(base, chat_template=False),
        base.with_settings({"temperature": 0.5}),
        base.with_settings({"mode": "autoregressive"}),
    ]
    assert len({base.hash, *(other.hash for other in changed)}) == 7
    assert replace(base, note="", name="other").hash == base.hash
    assert base.with_settings({}).hash == base.hash
    assert base.with_settings({"sampler": "dream"}).hash != base.hash


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=lambda protocol: protocol.name)
def test_every_protocol_is_valid_for_its_samplers_and_its_task(protocol):
    assert protocol.make_task().name == protocol.task
    assert protocol.note
    for sampler, settings in protocol.settings.items():
        complete = make_settings(sampler, dict(settings), {})
        assert complete.steps == complete.gen_length  # one token per step, our reading of the study


@pytest.mark.parametrize(
    ("name", "sampler", "settings"),
    [
        ("llada-gsm8k", "llada", {"gen_length": 256, "steps": 256, "block_length": 32}),
        ("llada-humaneval", "autoregressive", {"gen_length": 512}),
        ("dream-gsm8k", "dream",
         {"gen_length": 256, "steps": 256, "temperature": 0.1, "top_p": 0.9, "alg": "entropy"}),
        ("dream-humaneval", "llada", {"gen_length": 768, "steps": 768, "block_length": 32}),
        ("rnd1-gsm8k", "rnd1", {"gen_length": 256, "steps": 256, "temperature": 0.01, "greedy": False}),
        ("open-dcoder-humaneval", "open-dcoder",
         {"gen_length": 128, "steps": 128, "temperature": 0.8, "top_p": 0.95, "alg": "p2"}),
        ("llada-instruct-gsm8k", "llada",
         {"gen_length": 512, "steps": 512, "block_length": 512, "confidence_eos_eot_inf": True}),
        ("llada-instruct-gsm8k-blocks", "llada", {"gen_length": 256, "steps": 256, "block_length": 8}),
        ("llada-gsm8k", "diffullama", {"gen_length": 256, "steps": 256}),  # not named: lengths on which the named agree
        ("llada-gsm8k", "sdar", {"gen_length": 256}),
        ("sdar-gsm8k", "llada", {}),
    ],
)  # fmt: skip
def test_settings_are_those_of_the_study_and_the_repositories(name, sampler, settings):
    """Rulli et al.; RND1's README; Open-dLLM's eval/eval_completion/run_eval.sh; LLaDA's EVAL.md."""
    assert find_protocol(name).of(sampler) == settings


def test_a_setting_reaches_only_the_samplers_that_have_it():
    changed = find_protocol("tiny-gsm").with_settings({"block_length": 8, "gen_length": 16})
    assert changed.of("llada") == {"block_length": 8, "gen_length": 16}
    assert changed.of("dream") == changed.of("autoregressive") == {"gen_length": 16}


def test_a_length_resets_what_fits_the_length_of_the_protocol():
    changed = find_protocol("llada-gsm8k").with_settings({"gen_length": 32})
    assert [changed.of(sampler) for sampler in ("llada", "diffullama")] == [{"gen_length": 32}, {"gen_length": 32}]


def test_every_task_is_a_protocol():
    assert all(find_protocol(name).task == name and not find_protocol(name).settings for name in NAMES)


MODES = EvalProtocol("modes", "tiny-gsm").with_settings({"gen_length": 16, "threshold": 0.9})


@pytest.mark.parametrize(("call", "text"), [
    (lambda _: find_protocol("lada-gsm8k"), r"no protocol is called 'lada-gsm8k'.* Nearest: llada-gsm8k"),
    (lambda _: MODES.with_settings({"blocklength": 8}), "no sampler has a setting 'blocklength'.* Nearest: block_leng"),
    (
        lambda model: MODES.with_settings({"mode": "diffusion"}).run_settings(model),
        "mode='diffusion' must be left out for llada models",
    ),
    (
        lambda _: MODES.with_settings({"mode": "diffusion", "sampler": "llada"}),
        "both choose how to decode; name one of them",
    ),
])  # fmt: skip
def test_unknown_names_and_settings_that_exclude_each_other_are_refused(tiny_llada, call, text):
    with pytest.raises(SettingError, match=text):
        call(tiny_llada)


@pytest.mark.extended
def test_a_mode_chooses_the_sampler_of_a_model_that_has_modes(two_modes):
    model = load(two_modes)
    plain, causal = MODES.run_settings(model), MODES.with_settings({"mode": "autoregressive"}).run_settings(model)
    assert (plain, causal) == ({"gen_length": 16, "threshold": 0.9}, {"gen_length": 16, "mode": "autoregressive"})
    assert settings_for(model, causal).name == "autoregressive"
    assert MODES.with_settings({"mode": "diffusion"}).run_settings(model) == {"mode": "diffusion", **plain}
    assert MODES.with_settings({"mode": "diffusion"}).with_settings({"sampler": "llada"}).mode is None


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
        ({"temperature": 0.5}, ["temperature 0.5, not 0.0"]),
        ({"logits_eos_inf": True}, ["logits_eos_inf True, not False"]),
    ],
)
def test_every_changed_setting_of_the_sampler_is_named(changes, text):
    assert departures(what(**changes)) == text


def test_settings_of_the_task_and_another_sampler_are_named():
    run = what()
    run["protocol"] |= {"shots": 5, "chat_template": False}
    assert departures(run) == ["shots 5, not 4", "chat_template False, not True"]
    other = what() | {"sampler": "dream"}
    assert departures(other) == ["the dream sampler, for which llada-instruct-gsm8k-blocks states nothing"]
    assert departures({"protocol": {"name": "tiny-gsm"}, "sampler": "llada", "settings": {}}) == []


def test_lengths_that_a_source_leaves_open_are_no_departure():
    assert departures(what(find_protocol("sdar-gsm8k"), "sdar", gen_length=512)) == []


def test_every_published_score_has_a_source():
    for one in (*PROTOCOLS.values(), *HARNESS_PROTOCOLS.values()):
        assert all(score.source and (score.score is None or 0 <= score.score <= 1) for score in one.published)


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


def test_the_command_of_a_harness_protocol_repeats_its_settings():
    assert HARNESS_PROTOCOLS["llada-base-piqa-cfg"].command() == (
        "sinklens lm-eval --model sinklens --tasks piqa --num_fewshot 0 --model_args "
        "pretrained=GSAI-ML/LLaDA-8B-Base,mc_num=128,mc_batch=8,cfg_scale=0.5"
    )
    assert HARNESS_PROTOCOLS["llada-instruct-math"].command() == ""


def test_settings_of_harness_protocols_are_arguments_of_the_model():
    """Each is a setting of the family's sampler, or of likelihoods."""
    draws = {"mc_num", "mc_batch", "mc_masking", "cfg_scale"}
    samplers = {"llada": "llada", "dream": "dream", "llada2": "llada2", "diffusion": "diffusion-gemma"}
    for one in HARNESS_PROTOCOLS.values():
        if "mc_num" not in one.settings:
            make_settings(samplers[one.name.split("-")[0]], one.settings, {})
        else:
            assert set(one.settings) <= draws


def test_a_listed_protocol_stays_plain_text_without_a_chat_template(tiny_llada, tmp_path):
    def ledger(protocol):
        task = Prompts(path)
        job = Job(tiny_llada, {}, task, replace(protocol, task="prompts"))
        return job.identities([UNMASKED])[0], job.carry_out(Batch(UNMASKED, (task.samples()[0],)))

    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "Question: 1 + 1?", "expected": "2"}\n')
    short = PROTOCOLS["llada-gsm8k"].with_settings({"gen_length": 8, "steps": 2, "block_length": 8})
    with pytest.warns(PromptWarning, match="has no chat template, so the prompts of llada-gsm8k stay plain text"):
        records = ledger(short)[1]
        evaluate(tiny_llada, replace(short, task="prompts"), UNMASKED, tmp_path, task=Prompts(path))
    (run,) = evaluations(tmp_path)
    assert run.what["protocol"]["chat_template"] == "plain"
    assert "chat_template plain, not True" in departures(run.what)
    _, plain = ledger(replace(short, chat_template=False))
    assert records[0]["tokens"] == plain[0]["tokens"]
    with pytest.raises(PromptError, match="has no chat template"):
        ledger(replace(short, name="my own"))
    long = Job(tiny_llada, {}, Prompts(path), replace(short, task="prompts", chat_template=False), allow_longer=True)
    sample = replace(Prompts(path).samples()[0], prompt="Question: " + "1 + 1 = 2. " * 60)
    with pytest.warns(PromptWarning, match="the model was not made for such distances"):
        assert len(long.carry_out(Batch(UNMASKED, (sample,)))) == 1
    with pytest.raises(PromptError, match="tiny-llada has 128 positions"):
        replace(long, allow_longer=False).carry_out(Batch(UNMASKED, (sample,)))
