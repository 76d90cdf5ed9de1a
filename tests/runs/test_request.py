"""The arguments of a run: declared by `RunRequest`, taken by every function that makes a run."""

import inspect

import pytest
import torch

import sinklens
from sinklens.analyses import find
from sinklens.analyses.runs import own_run
from sinklens.checkpoints.loading import LoadRequest
from sinklens.errors import HookNameError, SettingError
from sinklens.experiments import effect, sweep
from sinklens.features import collect
from sinklens.interventions import AblateHeads
from sinklens.live.spec import RunSpec
from sinklens.runs.request import RunRequest
from sinklens.utils.arguments import REQUIRED, arguments, meanings

DECLARED = arguments(RunRequest)
SOME = ("seed", "chat_template", "cache", "progress")  # of functions that also have arguments of their own


def test_every_argument_has_a_meaning_and_all_but_the_prompt_a_default():
    assert all(argument.meaning for argument in [*DECLARED.values(), *arguments(LoadRequest).values()])
    assert [name for name, argument in DECLARED.items() if argument.default is REQUIRED] == ["prompt"]


@pytest.mark.parametrize(
    ("function", "request_type"),
    [(sinklens.trace, RunRequest), (sinklens.generate, RunRequest), (sinklens.load, LoadRequest)],
    ids=["trace", "generate", "load"],
)
def test_a_function_shows_the_arguments_of_its_request_and_their_meanings(function, request_type):
    shown, declared = inspect.signature(function), inspect.signature(request_type)
    assert list(shown.parameters.values())[1:] == list(declared.parameters.values())
    described = meanings(function.__doc__)
    assert next(iter(described)) == next(iter(shown.parameters))
    for name, argument in arguments(request_type).items():
        assert described[name] == argument.meaning, name


@pytest.mark.parametrize("function", [sweep, collect], ids=["sweep", "collect"])
def test_a_function_with_some_of_the_arguments_declares_them_alike(function):
    shared = {name: one for name, one in arguments(function).items() if name in SOME}
    assert {"seed", "chat_template", "cache"} <= set(shared)
    for name, argument in shared.items():
        assert (argument.annotation, argument.default) == (DECLARED[name].annotation, DECLARED[name].default), name


@pytest.mark.parametrize("function", [effect, own_run, find("layers"), RunSpec], ids=lambda function: function.__name__)
def test_further_declarations_have_the_same_defaults(function):
    shared = {name: one.default for name, one in arguments(function).items() if name in SOME}
    assert "seed" in shared
    assert shared == {name: DECLARED[name].default for name in shared}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"seed": 1.5}, SettingError, r"seed must be an integer from 0 to 2\*\*63 - 1; got 1\.5"),
        ({"record_sinks": 1}, SettingError, r"record_sinks must be True, False or a Record such as .*; got 1"),
        ({"progress": "yes"}, SettingError, "progress must be True, False or None; got 'yes'"),
        ({"cache": 5}, SettingError, r"cache must be a policy such as .* or its name, 'dual', or None; got 5"),
        ({"hooks": "blocks.0"}, HookNameError, "hooks= must be a list of .*; got 'blocks.0'"),
    ],
)
def test_a_value_of_another_type_is_refused_before_any_model_is_asked(given, error, text):
    with pytest.raises(error, match=text):
        RunRequest("a", **given)


def test_a_changed_request_keeps_the_rest_and_leaves_the_original():
    request = RunRequest("a", seed=3, cache="dual", gen_length=4)
    changed = request.changed(prompt=torch.tensor([1]), hooks=AblateHeads(), copies=2)
    assert (changed.seed, changed.cache, changed.settings) == (3, "dual", {"gen_length": 4})
    assert (changed.copies, request.copies) == (2, 1)
    assert (len(changed.hooks), len(request.hooks)) == (1, 0)


@pytest.mark.usefixtures("unchecked")
def test_hooks_of_a_generator_are_read_once():
    request = RunRequest("a", hooks=(pair for pair in [("hook_embed", print)]))
    assert request.hooks == request.changed(seed=1).hooks == (("hook_embed", print),)
