"""Fingerprints of interventions: texts that are equal for equal interventions in any process, and different otherwise.

Results in files are looked up by fingerprint. ``repr`` is not enough: it abbreviates tensors, is equal for two recorded
tracks of the same size, and shows a function's address. A fingerprint covers the values: tensors and tracks by a hash
of their contents, functions by their code and closure.

Pitfall: the fingerprint of a function contains the names of the globals it uses, not their values. Changing those
values leaves the fingerprint unchanged.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.sinks.track import SinkTrack


def fingerprint(value: Any) -> str:
    """The fingerprint of an intervention, of a (name, function) pair, or of a list or mapping of them.

    Raises:
        SettingError: a value can be identified only by its memory address.
    """
    if isinstance(value, Tensor):
        return _hashed(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), value.dtype, value.shape)
    if isinstance(value, np.ndarray):
        return fingerprint(value.tolist()) if value.dtype == object else _hashed(value, value.dtype, value.shape)
    if isinstance(value, SinkTrack | xr.Dataset | xr.DataArray):
        return f"{type(value).__name__}({fingerprint(_parts(value))})"
    if isinstance(value, torch.nn.Module):
        return (
            f"{type(value).__module__}.{type(value).__qualname__}({value!r}, {fingerprint(dict(value.state_dict()))})"
        )
    if isinstance(value, Mapping) or hasattr(value, "items"):  # an ActivationCache is not a Mapping
        return f"{{{', '.join(f'{fingerprint(key)}: {fingerprint(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(fingerprint, value)))}}}"
    if is_dataclass(value) and not isinstance(value, type):
        shown = ", ".join(
            f"{part.name}={fingerprint(getattr(value, part.name))}" for part in fields(value) if part.compare
        )
        return f"{type(value).__module__}.{type(value).__qualname__}({shown})"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | range):
        return f"[{', '.join(map(fingerprint, value))}]"
    if isinstance(value, FunctionType | MethodType | functools.partial | CodeType):
        return _of_function(value)
    return _of_repr(value)


def _hashed(values: np.ndarray, dtype: Any, shape: Any) -> str:
    return f"{dtype}{list(shape)}:{hashlib.sha256(values.tobytes()).hexdigest()[:16]}"


def _parts(value: Any) -> dict[str, Any]:
    data = value.data if isinstance(value, SinkTrack) else value
    data = data.to_dataset(name="value") if isinstance(data, xr.DataArray) else data
    arrays = {str(name): [list(data[name].dims), data[name].to_numpy()] for name in sorted(map(str, data.variables))}
    return arrays | {"attributes": dict(sorted(data.attrs.items()))}


def _of_function(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"partial({fingerprint(value.func)}, {fingerprint(value.args)}, {fingerprint(value.keywords)})"
    if isinstance(value, MethodType):
        return f"{fingerprint(value.__func__)} of {fingerprint(value.__self__)}"
    if isinstance(value, CodeType):
        return fingerprint([value.co_code.hex(), value.co_names, value.co_varnames, value.co_consts])
    closure = [cell.cell_contents for cell in value.__closure__ or ()]
    parts = [value.__code__, value.__defaults__, value.__kwdefaults__, closure]
    return f"{value.__module__}.{value.__qualname__}({fingerprint(parts)})"


def _of_repr(value: Any) -> str:
    text = repr(value)
    if type(value).__repr__ is object.__repr__ or " at 0x" in text:
        raise SettingError(
            f"cannot fingerprint {text}: only its memory address identifies it, and saved results need an intervention "
            f"that another process recognizes. Make its class a dataclass, give it a __repr__ with its settings, or "
            f"omit out=."
        )
    return text
