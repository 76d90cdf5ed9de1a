"""The type checks of the test run: what they find, and that they are in place."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import typechecks
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation as Violation
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from sinklens.sampling.decisions import Truncation, truncate

check = typechecks.checking(typechecker=beartype)


@check
def outer(left: Float[Tensor, "row same"], right: Float[Tensor, "same column"], wrong: bool = False) -> "Product":
    return left if wrong else left @ right


@check
def count(name: str, *, times: int = 1) -> int:
    return len(name) * times


Product = Float[Tensor, "row column"]


def test_a_call_is_checked_in_its_arguments_and_result_with_one_size_per_axis():
    for _ in range(3):
        assert outer(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    assert count("ab", times=2) == 4
    for call, text in (
        (lambda: outer(torch.ones(2, 3), torch.ones(2, 4)), r"parameter (left|right)="),
        (lambda: outer(np.ones((2, 3)), torch.ones(3, 4)), r"parameter (left|right)="),
        (lambda: outer(torch.ones(2, 3), torch.ones(3, 4), wrong=True), "return"),
        (lambda: count("ab", times="2"), "parameter times='2'"),
    ):
        typechecks.begin_test()
        with pytest.raises(Violation, match=text):
            call()


def test_calls_one_four_sixteen_and_so_on_of_a_function_are_checked_in_each_test():
    for call in range(1, 18):
        checked = call in (1, 4, 16)
        error, text = (Violation, "parameter name=1") if checked else (TypeError, "has no len")
        with pytest.raises(error, match=text):
            count(1)
    typechecks.begin_test()
    with pytest.raises(Violation, match="parameter name=1"):
        count(1)


@check
@dataclass(frozen=True)
class Cell:
    value: Float[Tensor, "row column"]
    inverse: Float[Tensor, "column row"]
    name: str = "cell"


def test_a_dataclass_is_checked_when_it_is_made():
    assert Cell(torch.ones(2, 3), torch.ones(3, 2)).name == "cell"
    for given, text in (
        ((torch.ones(2, 3), torch.ones(2, 3)), "inverse"), ((torch.ones(2, 3), torch.ones(3, 2), 3), "name"),
    ):  # fmt: skip
        typechecks.begin_test()
        with pytest.raises(TypeCheckError, match=text):
            Cell(*given)


def test_checks_can_be_turned_off_for_a_test(unchecked):
    assert count([1, 2], times=2.0) == 4.0


def test_the_functions_of_the_package_are_checked():
    with pytest.raises(Violation, match="truncate"):
        truncate(torch.ones(5, dtype=torch.long), Truncation())
