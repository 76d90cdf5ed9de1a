"""Regimes: the same settings in one block or in several, and nothing else changes."""

import pytest

import sinklens
from sinklens.errors import SettingError
from sinklens.evaluation import UNMASKED, EvalProtocol
from sinklens.evaluation.protocols import find_protocol, in_regime
from sinklens.evaluation.tables import regime_of
from sinklens.evaluation.units import identities
from sinklens.families import settings_for


def resolved(model, given, regime):
    return settings_for(model, in_regime(model, given, regime))


@pytest.mark.parametrize(
    ("regime", "block", "text"),
    [("diffusion", 24, "diffusion"), ("blocks:8", 8, "blocks of 8"), ("blocks:12", 12, "blocks of 12")],
)
def test_only_the_blocks_of_llada_change(tiny_llada, regime, block, text):
    given = {"gen_length": 24, "steps": 24, "temperature": 0.5}
    found, plain = resolved(tiny_llada, given, regime), settings_for(tiny_llada, given)
    assert found.block_length == block
    assert vars(found) | {"block_length": 0} == vars(plain) | {"block_length": 0}
    assert regime_of(found.name, vars(found)) == text


def test_blocks_without_a_length_are_those_of_the_settings(tiny_llada):
    given = {"gen_length": 64, "steps": 64, "block_length": 16}
    assert resolved(tiny_llada, given, "blocks").block_length == 16
    assert resolved(tiny_llada, given | {"block_length": 64}, "blocks").block_length == 32
    assert in_regime(tiny_llada, given, "") is given


def test_dream_decodes_blocks_by_the_sampler_of_its_rule():
    tiny_dream = sinklens.load("tiny-dream")
    given = {"gen_length": 24, "steps": 24, "temperature": 0.1}
    found = resolved(tiny_dream, given, "blocks:8")
    assert (found.name, found.block_length, found.temperature) == ("dream-blocks", 8, 0.1)
    assert resolved(tiny_dream, given, "diffusion") == settings_for(tiny_dream, given)


def test_models_with_one_regime_and_unknown_regimes_are_refused(tiny_llama, tiny_llada):
    with pytest.raises(SettingError, match=r"tiny-llama decodes with the autoregressive sampler in one regime only"):
        in_regime(tiny_llama, {}, "diffusion")
    for wrong in ("block", "blocks:0", "blocks:x"):
        with pytest.raises(SettingError, match=rf"a regime is diffusion, blocks or blocks:N.*; got '{wrong}'"):
            EvalProtocol("p", "tiny-gsm", regime=wrong)


def test_a_regime_that_changes_nothing_shares_the_records(tiny_llada):
    """The identity has the settings that were used, not what they were called."""
    from dataclasses import replace

    plain = find_protocol("tiny-gsm")
    task = plain.make_task()
    names = [
        identities(tiny_llada, [UNMASKED], task, replace(plain, regime=regime), 0)
        for regime in ("", "diffusion", "blocks:8")
    ]
    assert names[0] == names[1] != names[2]
    assert names[2][0]["settings"]["block_length"] == 8
