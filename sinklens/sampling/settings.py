"""Types of the settings of a run: `sinklens.families.settings_for` says which a model has."""

from typing import Any, Literal

Mode = Literal["autoregressive", "diffusion", "speculation"]
"""How a run of a model with several modes decodes."""

Settings = dict[str, Any]
"""Sampler settings as given, by name."""
