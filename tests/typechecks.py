"""Run-time type checks that cost little; importing this module, before the package, puts them in place.

pytest's option ``--jaxtyping-packages`` decorates every function of the package with `jaxtyping.jaxtyped`, which checks
the annotations of arguments and result at every call. As jaxtyping does it, this doubles the time of a run of a small
model and triples that of the import. `checking` takes the decorator's place. It makes the same checks, but prepares
them when a function is first called; checks arguments once, not again together with the result; and checks the calls
1, 4, 16, … of a function in each test, not the hundreds that repeat them in each layer and step of a run.

Libraries that the package imports are imported here first: jaxtyping's import hook compiles whatever is imported while
a module of the package is, and does not find the compiled files that Python keeps.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, get_type_hints

import beartype
import jaxtyping
import nnsight  # noqa: F401
import transformer_lens  # noqa: F401
import transformers.masking_utils
import transformers.models.llama.modeling_llama  # noqa: F401
import xarray  # noqa: F401
from jaxtyping import _storage

_original = jaxtyping.jaxtyped


def checking(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """A decorator with the signature of `jaxtyping.jaxtyped`."""

    def decorate(decorated: Any) -> Any:
        if dataclasses.is_dataclass(decorated) and "__init__" in vars(decorated):
            plain = decorated.__init__
            checked = _original(decorated, typechecker=typechecker)
            checked.__init__ = _sampled(plain, checked.__init__)
            return checked
        if not inspect.isfunction(decorated) or inspect.isgeneratorfunction(decorated):
            return _original(decorated, typechecker=typechecker)
        return _checked(decorated)

    return decorate


class _Current:
    """Number of the test under way."""

    test = 0


def begin_test() -> None:
    """Count the calls of every function from 1 again."""
    _Current.test += 1


def _checked(function: types.FunctionType) -> Callable[..., Any]:
    prepared = functools.cache(lambda: _prepared(function))

    def checked(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return prepared()(*args, **kwargs)

    return _sampled(function, checked)


def _sampled(plain: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    """`checked` in the calls 1, 4, 16, … of a test and `plain` in the others."""
    test, calls = 0, 0

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal test, calls
        if jaxtyping.config.jaxtyping_disable:
            return plain(*args, **kwargs)
        if test != _Current.test:
            test, calls = _Current.test, 0
        calls += 1
        power_of_four = not calls & (calls - 1) and calls.bit_length() % 2
        return (checked if power_of_four else plain)(*args, **kwargs)

    return call


def _prepared(function: types.FunctionType) -> Callable[..., Any]:
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__qualname__, copy.__module__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__module__,
    )
    copy.__annotations__ = {name: _resolved(hint, function) for name, hint in function.__annotations__.items()}
    checked = beartype.beartype(copy)

    def with_axes(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        _storage.push_shape_memo({})
        try:
            return checked(*args, **kwargs)
        finally:
            _storage.pop_shape_memo()

    return with_axes


def _resolved(hint: Any, function: types.FunctionType) -> Any:
    """A hint without names in quotes; anything goes where such a name exists only for type checkers."""

    def holder() -> None: ...

    holder.__annotations__ = {"hint": hint}
    try:
        return get_type_hints(holder, function.__globals__, include_extras=True)["hint"]
    except NameError:
        return Any


jaxtyping.jaxtyped = checking
