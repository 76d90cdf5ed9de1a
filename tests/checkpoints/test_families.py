"""The table of families is consistent, and its renames map every public weight name to its parameter."""

import re

import pytest
from building import random_hf
from layouts import ARCHITECTURES, causal, llada_names, public_weights

from sinklens.checkpoints import BY_MODEL_TYPE, FAMILIES, family_named
from sinklens.checkpoints.files import rename
from sinklens.checkpoints.packing import stored_shapes
from sinklens.hooks.architectures import ARCHITECTURES as WITH_POINTS
from sinklens.sampling import SAMPLERS

LLADAS = ["llada", "mmada"]
STANDARD = [family for family in FAMILIES if not family.class_attention]  # the others have files of their own


def test_every_family_is_tested_here():
    assert {family.name: family.architecture for family in STANDARD} == ARCHITECTURES
    assert [family.name for family in FAMILIES if family not in STANDARD] == ["diffusion-gemma"]


def test_families_that_share_a_model_type_say_how_they_were_trained():
    for kind, first in BY_MODEL_TYPE.items():
        sharing = [family for family in FAMILIES if kind in family.model_types]
        assert sharing[0] is first
        assert len(sharing) == 1 or len({family.regime for family in sharing} - {""}) == len(sharing)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_has_hook_points_and_a_sampler(family):
    assert family.architecture in WITH_POINTS
    assert family.attention in SAMPLERS[family.sampler].attention
    assert family.causal == causal(family.name) == (family.sampler == "autoregressive")


@pytest.mark.parametrize("name", LLADAS)
def test_llada_names_map_to_llamas(name):
    found = {public: rename(public, family_named(name)) for public in llada_names(layers=12)}
    assert found == llada_names(layers=12)


def test_ff_out_is_the_head_at_the_top_level_and_the_down_projection_in_a_block():
    family = family_named("llada")
    assert rename("model.transformer.ff_out.weight", family) == "lm_head.weight"
    assert rename("model.transformer.blocks.31.ff_out.weight", family) == "model.layers.31.mlp.down_proj.weight"


@pytest.mark.parametrize("family", STANDARD, ids=lambda family: family.name)
def test_public_names_become_exactly_the_parameters_of_the_class(family):
    hf = random_hf(ARCHITECTURES[family.name], family.causal)
    renamed = {rename(public, family): tuple(value.shape) for public, value in public_weights(family.name, hf).items()}
    shapes = {name: tuple(value.shape) for name, value in hf.state_dict().items()}
    assert renamed == stored_shapes(shapes, family.fused)


@pytest.mark.parametrize("name", LLADAS)
def test_renames_are_plain_substitutions(name):
    """transformers accepts patterns with at most one group."""
    assert all(re.compile(pattern).groups <= 1 for pattern in family_named(name).renames)
