"""The arguments of a run: declared by `generate`, checked by `RunRequest`, shared by every function that runs."""

import inspect
from dataclasses import replace

import pytest

import sinklens
from sinklens.analyses import find
from sinklens.analyses.runs import own_run
from sinklens.errors import HookNameError, SettingError
from sinklens.experiments import effect, sweep
from sinklens.features import collect
from sinklens.live.spec import RunSpec
from sinklens.model.loading import LoadRequest
from sinklens.runs.request import RunRequest
from sinklens.utils.arguments import REQUIRED, arguments

DECLARED = arguments(sinklens.generate)
SOME = ("seed", "chat_template", "cache", "progress")  # of functions that also have arguments of their own


@pytest.mark.parametrize("function", [sinklens.generate, sinklens.load, sinklens.trace])
def test_every_argument_has_a_meaning_and_all_but_the_first_a_default(function):
    declared = arguments(function)
    assert all(argument.meaning for argument in declared.values())
    required = [name for name, argument in declared.items() if argument.default is REQUIRED]
    assert required in (["name_or_path"], ["model", "prompts"])


@pytest.mark.parametrize(
    ("function", "request_type", "own"),
    [(sinklens.generate, RunRequest, {"copies"}), (sinklens.trace, RunRequest, {"copies"}),
     (sinklens.load, LoadRequest, set())],
    ids=["generate", "trace", "load"],
)  # fmt: skip
def test_a_function_declares_the_arguments_that_its_request_checks(function, request_type, own):
    shown, held = inspect.signature(function).parameters, inspect.signature(request_type).parameters
    assert set(shown) - {next(iter(shown))} == set(held) - own
    for name in set(held) - own - {"settings", "hooks"}:
        assert (function.__annotations__[name], shown[name].default) == (
            held[name].annotation,
            held[name].default,
        )


@pytest.mark.parametrize(
    ("function", "like", "has"),
    [
        (sweep, ("annotation", "default"), SOME[:2]),
        (collect, ("annotation", "default"), SOME[:2]),
        *((function, ("default",), SOME[:1]) for function in (effect, own_run, find("existence"), RunSpec)),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_function_with_some_of_the_arguments_declares_them_alike(function, like, has):
    shared = {name: one for name, one in arguments(function).items() if name in SOME}
    assert {*has} <= set(shared)
    differing = [(name, what) for name in shared for what in like
                 if getattr(shared[name], what) != getattr(DECLARED[name], what)]  # fmt: skip
    assert differing == []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"seed": 1.5}, SettingError, r"seed must be an integer from 0 to 2\*\*63 - 1; got 1\.5"),
        ({"record_sinks": 1}, SettingError, r"record_sinks must be True, False or a Record such as .*; got 1"),
        ({"progress": "yes"}, SettingError, "progress must be True, False, a function or None; got 'yes'"),
        ({"cache": 5}, SettingError, r"cache must be a policy such as .* or its name, 'dual', or None; got 5"),
        ({"hooks": "blocks.0"}, HookNameError, "hooks= must be a list of .*; got 'blocks.0'"),
    ],
)
def test_a_value_of_another_type_is_refused_before_any_model_is_asked(given, error, text):
    with pytest.raises(error, match=text):
        RunRequest("a", **given)


@pytest.mark.usefixtures("unchecked")
def test_hooks_of_a_generator_are_read_once():
    request = RunRequest("a", hooks=(pair for pair in [("hook_embed", print)]))
    assert request.hooks == replace(request, seed=1).hooks == (("hook_embed", print),)
