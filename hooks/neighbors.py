"""Importing this checks the versions of the libraries whose internals the hook points rely on.

With another version of TransformerLens or nnsight, a model would fail later, with an error that does not say why.

Limitation: a module that was imported before is not checked again.
"""

from sinklens.utils.versions import check_versions

CHECKED = ("nnsight", "transformer-lens", "transformers")

check_versions(*CHECKED)
