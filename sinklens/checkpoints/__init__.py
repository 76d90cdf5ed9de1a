"""The checkpoint families, and how their files are checked and loaded. Code that ships with a checkpoint never runs."""

from sinklens.checkpoints.bridges import from_bridge
from sinklens.checkpoints.families import BY_MODEL_TYPE, FAMILIES, Family
from sinklens.checkpoints.files import find_checkpoint, shipped_names
from sinklens.checkpoints.loading import Checkpoint, build_empty, from_pretrained_model, load_checkpoint
from sinklens.checkpoints.quantization import Quantization
from sinklens.checkpoints.registry import register
from sinklens.checkpoints.translate import family_named, family_of, translate

__all__ = [
    "BY_MODEL_TYPE",
    "FAMILIES",
    "Checkpoint",
    "Family",
    "Quantization",
    "build_empty",
    "family_named",
    "family_of",
    "find_checkpoint",
    "from_bridge",
    "from_pretrained_model",
    "load_checkpoint",
    "register",
    "shipped_names",
    "translate",
]
