"""The declaration of arguments: what is read from a signature and its docstring, and how values are checked."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from annotated_types import Gt, Le, Lt
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.utils.arguments import (
    REQUIRED,
    Argument,
    Count,
    NonNegative,
    Number,
    Positive,
    Seed,
    Share,
    Unread,
    Words,
    arguments,
    check_arguments,
    meanings,
    read_as,
)

NAMED = Annotated[int | str, Words("a number, or its name,")]


@dataclass(frozen=True)
class Base:
    """What both share.

    Attributes:
        width: number of
            positions.
    """

    width: Count = 8


@dataclass(frozen=True)
class Window(Base):
    """A window.

    Attributes:
        share: share that stays.
        by, mode: what ranks them: the "score".
    """

    share: Share | None = None
    by: Literal["score", "mass"] = "score"
    mode: "of any type" = None

    def __post_init__(self) -> None:
        check_arguments(self)


def window(model: Any, *names: str, width: Count, seed: Seed = 0, **settings: Any) -> None:
    """A window of a model.

    Args:
        model: the model.
        width: number of positions.
        **settings: more.

    Raises:
        SettingError: never.
    """


def test_a_dataclass_declares_its_fields_and_those_of_its_bases():
    found = arguments(Window)
    defaults = [(name, one.default) for name, one in found.items()]
    assert defaults == [("width", 8), ("share", None), ("by", "score"), ("mode", None)]
    assert (found["width"].type, found["share"].type, found["by"].choices) == (int, float, ("score", "mass"))
    assert found["width"].meaning == "number of positions."
    assert found["by"].meaning == found["mode"].meaning == 'what ranks them: the "score".'


def test_a_function_declares_its_named_arguments():
    found = arguments(window)
    assert [(name, one.default, one.meaning) for name, one in found.items()] == [
        ("model", REQUIRED, "the model."), ("width", REQUIRED, "number of positions."), ("seed", 0, "")
    ]  # fmt: skip
    assert meanings(None) == meanings("One line: no more.") == {}
    assert {Argument("it", kind, REQUIRED).type for kind in (Number, Share, Positive | None, NonNegative)} == {float}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Count, 1), (Seed, 0), (Seed, 2**63 - 1), (Share, 0), (Share, 1.0), (Positive, 1e-9), (NonNegative, 0),
        (Share | None, None), (bool | str, "a"), (bool, False), (str, ""), (Literal["a", "b"], "b"), (dict, {}),
        (Number, 2), (Number, -0.5), (Any, [1]), ("quoted", 1), (float, np.float32(0.5)),
        (Annotated[float, Gt(0), Lt(1)], 0.5), (Sequence[int] | None, range(3)), (Sequence[int], np.arange(2)),
        (Sequence[str], []), (tuple[int, int], [0, 4]), (tuple[str, ...], ("a", "b", "c")), (Mapping[int, Any], {1: 2}),
        (Callable[[int], int], len), (str | Path, Path("a")), (Float[Tensor, "layer d_model"], torch.zeros(2)),
        (Annotated[int, Unread], "a"), (bool, np.bool_(True)), (Float[np.ndarray, " place"], [1.0]),
        (Float[np.ndarray, " place"], torch.zeros(1)),
    ],
)  # fmt: skip
def test_a_value_of_the_declared_type_is_kept(kind, given):
    assert read_as(kind, "it", given) is given


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        (Count, 0, "it must be an integer of at least 1; got 0."),
        (Count, True, "it must be an integer of at least 1; got True."),
        (Count, 1.0, "it must be an integer of at least 1; got 1.0."),
        (int, "3", "it must be an integer; got '3'."),
        *((Seed, given, f"it must be an integer from 0 to 2**63 - 1; got {given!r}.")
          for given in (1.5, "3", None, -1, True, 2**63, [1], float("nan"), torch.tensor([3]), np.bool_(True))),
        (float, float("nan"), "it must be a finite number; got nan."),
        (Number, True, "it must be a finite number; got True."),
        (Number, float("inf"), "it must be a finite number; got inf."),
        (float, True, "it must be a finite number; got True."),
        (Positive, 0, "it must be a finite number above 0; got 0."),
        (NonNegative, -0.5, "it must be a finite number of at least 0; got -0.5."),
        (Annotated[int, Le(4)], 5, "it must be an integer of at most 4; got 5."),
        (Share | None, 2, "it must be a number from 0 to 1 or None; got 2."),
        (Annotated[float, Gt(0), Le(1)], 0, "it must be a finite number above 0 and of at most 1; got 0."),
        (Annotated[float, Gt(0), Lt(1)], 1, "it must be a finite number above 0 and below 1; got 1."),
        (Literal["a", "b"], "c", "it must be one of a, b; got 'c'."),
        (Literal["a", "b"], ["a"], "it must be one of a, b; got ['a']."),
        (bool | str, 1, "it must be True, False or a text; got 1."),
        (Window | None, "w", "it must be a Window or None; got 'w'."),
        (str, None, "it must be a text; got None."),
        (NAMED | None, [], "it must be a number, or its name, or None; got []."),
        *((Sequence[int], given, f"it must be a list of integers, such as [0, 2] or range(3); got {given!r}.")
          for given in ("12", ["a"], [0, True], 1.5, None, {1: 2}, torch.tensor(1.0))),
        (Sequence[Base] | None, [Window(), 3], "it must be a list of Base or None; got [Window("
            "width=8, share=None, by='score', mode=None), 3]."),
        (tuple[int, int], (0, 1, 2), "it must be a list of integers, such as [0, 2] or range(3); got (0, 1, 2)."),
        (Mapping[int, int], [3], "it must be a dict; got [3]."),
        (Callable[[int], int] | None, 3, "it must be a function or None; got 3."),
        (str | Path, 3, "it must be a text or a path; got 3."),
        (Float[Tensor, "layer d_model"], [1.0], "it must be a tensor [layer, d_model]; got [1.0]."),
        (int, torch.zeros(2, 2), "it must be an integer; got Tensor."),
    ],
)  # fmt: skip
def test_another_value_is_refused_with_what_is_allowed(kind, given, text):
    with pytest.raises(SettingError, match=f"^{re.escape(text)}$"):
        read_as(kind, "it", given)


@pytest.mark.parametrize(
    ("kind", "given"), [(Sequence[int] | None, 3), (Sequence[str], "ab"), (Sequence[tuple[int, int]], (0, 1))]
)
def test_one_value_stands_for_a_list_of_one(kind, given):
    assert read_as(kind, "it", given) == (given,)


def test_a_dataclass_refuses_a_field_by_its_name_and_keeps_its_signature():
    with pytest.raises(SettingError, match=r"share must be a number from 0 to 1 or None; got 1\.5"):
        Window(share=1.5)
    assert list(inspect.signature(Window).parameters) == ["width", "share", "by", "mode"]
