"""Identities of interventions and policies: equal for equal ones in any process, and different otherwise.

Results in files are looked up by identity. ``repr`` is not enough: it abbreviates tensors, is equal for two recorded
tracks of the same size, and shows a function's address. So the text of an identity is the ``repr`` of a value's
dataclass fields, in which tensors, arrays and tracks are hashes of their contents, and functions their code and
closure. Dataclasses from outside sinklens are also identified by a hash of their source.

Pitfall: the code that a class or a function calls is not part of its identity, and neither are the values of the
globals that it reads.
"""

import functools
import hashlib
import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from sinklens.errors import require
from sinklens.sinks.track import SinkTrack


class Identity(NamedTuple):
    """What identifies a value.

    Attributes:
        text: its settings; for plain values their ``repr``.
        code: hashes of the source of the dataclasses in it that are defined outside sinklens; "" for one without a
            source file, as in a plain REPL.
    """

    text: str
    code: tuple[str, ...]


def identify(value: Any) -> Identity:
    """The identity of an intervention, a policy, a (name, function) pair, or a list or mapping of them.

    Raises:
        SettingError: a value can be identified only by its memory address, or keeps settings outside its fields.
    """
    classes: dict[type, None] = {}
    text = _text(value, classes)
    return Identity(text, tuple(_code_hash(kind) for kind in classes if not _ours(kind)))


def fingerprint(value: Any) -> str:
    """The identity of a value as one text; raises like `identify`."""
    text, code = identify(value)
    return f"{text} with code {' '.join(code)}" if code else text


def _text(value: Any, classes: dict[type, None]) -> str:
    """The text of an identity; adds the dataclasses in `value` to `classes`."""

    def of(part: Any) -> str:
        return _text(part, classes)

    if isinstance(value, Tensor):
        return _hashed(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), value.dtype, value.shape)
    if isinstance(value, np.ndarray):
        return of(value.tolist()) if value.dtype == object else _hashed(value, value.dtype, value.shape)
    if isinstance(value, SinkTrack | xr.Dataset | xr.DataArray):
        return f"{type(value).__name__}({of(_contents(value))})"
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__module__}.{type(value).__qualname__}({value!r}, {of(dict(value.state_dict()))})"
    if isinstance(value, Mapping) or hasattr(value, "items"):  # an ActivationCache is not a Mapping
        return f"{{{', '.join(f'{of(key)}: {of(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(of, value)))}}}"
    if is_dataclass(value) and not isinstance(value, type):
        classes[type(value)] = None
        _check_state_in_fields(value)
        settings = {part.name: getattr(value, part.name) for part in fields(value) if part.init and part.compare}
        return f"{type(value).__qualname__}({', '.join(f'{name}={of(entry)}' for name, entry in settings.items())})"
    if isinstance(value, tuple):
        return f"({of(value[0])},)" if len(value) == 1 else f"({', '.join(map(of, value))})"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | range):
        return f"[{', '.join(map(of, value))}]"
    if isinstance(value, functools.partial):
        return f"partial({of(value.func)}, {of(value.args)}, {of(value.keywords)})"
    if isinstance(value, MethodType):
        return f"{of(value.__func__)} of {of(value.__self__)}"
    if isinstance(value, CodeType):
        return of([value.co_code.hex(), value.co_names, value.co_varnames, value.co_consts])
    if isinstance(value, FunctionType):
        closure = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, closure]
        return f"{value.__module__}.{value.__qualname__}({of(parts)})"
    return _repr(value)


def _hashed(values: np.ndarray, dtype: Any, shape: Any) -> str:
    return f"{dtype}{list(shape)}:{hashlib.sha256(values.tobytes()).hexdigest()[:16]}"


def _contents(value: Any) -> dict[str, Any]:
    data = value.data if isinstance(value, SinkTrack) else value
    data = data.to_dataset(name="value") if isinstance(data, xr.DataArray) else data
    arrays = {str(name): [list(data[name].dims), data[name].to_numpy()] for name in sorted(map(str, data.variables))}
    return arrays | {"attributes": dict(sorted(data.attrs.items()))}


def _repr(value: Any) -> str:
    text = repr(value)
    require(
        type(value).__repr__ is not object.__repr__ and " at 0x" not in text,
        f"cannot fingerprint {text}: only its memory address identifies it, and saved results need an intervention "
        f"that another process recognizes. Make its class a dataclass, give it a __repr__ with its settings, or "
        f"omit out=.",
    )
    return text


def _ours(kind: type) -> bool:
    return kind.__module__.startswith("sinklens.")


def _code_hash(kind: type) -> str:
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def _check_state_in_fields(value: Any) -> None:
    """Refuse an object from outside sinklens with state that is neither a field nor declared by its class."""
    kind = type(value)
    outside = sorted(vars(value).keys() - {entry.name for entry in fields(value)} - set(dir(kind)))
    require(
        not outside or _ours(kind),
        f"{kind.__name__} keeps {', '.join(outside)} outside dataclass fields, so saved results cannot distinguish "
        f"it from another one; decorate the class with @dataclass(frozen=True) and declare its settings as fields.",
    )
