"""The table of families is consistent, and its renames map every public weight name to its parameter."""

import re

import pytest
from layouts import ARCHITECTURES, causal

from sinklens.families import FAMILIES, SAMPLERS
from sinklens.families.dit import DitConfig, DitForMaskedLM
from sinklens.hooks.architectures import ARCHITECTURES as WITH_POINTS
from sinklens.model.files import rename
from sinklens.model.packing import joined_shape, stored_places

RECORDS = list(FAMILIES.values())
STANDARD = [one for one in RECORDS if not (one.class_attention or one.module or one.architecture == "gpt2")]
OWN_FILES = {"gpt2", "diffugpt", "diffusion-gemma", "mdlm", "bd3lm-owt", "duo", "sedd", "gidd"}
DIT = [family for family in RECORDS if family.module == "sinklens.families.dit"]
DIT_NAMES = {
    "vocab_embed.embedding": (11, 8),
    "sigma_map.mlp.0.weight": (6, 256),
    "sigma_map.mlp.0.bias": (6,),
    "sigma_map.mlp.2.weight": (6, 6),
    "sigma_map.mlp.2.bias": (6,),
    "output_layer.norm_final.weight": (8,),
    "output_layer.adaLN_modulation.weight": (16, 6),
    "output_layer.adaLN_modulation.bias": (16,),
    "output_layer.linear.weight": (11, 8),
    "output_layer.linear.bias": (11,),
}
"""Weights outside the blocks, for 11 tokens, width 8 and a conditioning of width 6, as the repositories name them."""

DIT_BLOCK = {
    "norm1.weight": (8,),
    "norm2.weight": (8,),
    "attn_qkv.weight": (24, 8),
    "attn_out.weight": (8, 8),
    "mlp.0.weight": (32, 8),
    "mlp.0.bias": (32,),
    "mlp.2.weight": (8, 32),
    "mlp.2.bias": (8,),
    "adaLN_modulation.weight": (48, 6),
    "adaLN_modulation.bias": (48,),
}
DIT_RECOMPUTED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "sampling_eps_min", "backbone.rotary_emb.inv_freq")


def test_every_family_is_tested_here():
    assert {family.name: family.architecture for family in STANDARD} == ARCHITECTURES
    assert {family.name for family in RECORDS if family not in STANDARD} == OWN_FILES


def test_families_that_share_a_model_type_say_how_they_were_trained():
    for kind in {kind for family in RECORDS for kind in family.model_types}:
        sharing = [family for family in RECORDS if kind in family.model_types]
        assert len(sharing) == 1 or len({family.regime for family in sharing} - {""}) == len(sharing)


@pytest.mark.parametrize("family", RECORDS, ids=lambda family: family.name)
def test_family_has_hook_points_and_a_sampler(family):
    assert family.architecture in WITH_POINTS
    assert family.attention in SAMPLERS[family.sampler].attention
    assert family.causal == causal(family.name) == (family.sampler == "autoregressive")


@pytest.mark.parametrize("prefix", ["", "backbone."])
@pytest.mark.parametrize("family", DIT, ids=lambda family: family.name)
def test_names_of_a_modulated_network_become_exactly_its_parameters(family, prefix):
    sizes = {"vocab_size": 11, "hidden_size": 8, "cond_dim": 6, "num_hidden_layers": 2, "num_attention_heads": 2}
    hf = DitForMaskedLM(DitConfig(**sizes))
    blocks = {f"blocks.{layer}.{name}": shape for layer in range(2) for name, shape in DIT_BLOCK.items()}
    renamed = {rename(prefix + name, family.renames): shape for name, shape in (DIT_NAMES | blocks).items()}
    shapes = {name: tuple(value.shape) for name, value in hf.state_dict().items()}
    assert renamed == {name: joined_shape(places) for name, places in stored_places(shapes, family.fused).items()}
    assert all(re.search(family.ignored, name) for name in DIT_RECOMPUTED)
    assert not any(re.search(family.ignored, name) for name in renamed)
