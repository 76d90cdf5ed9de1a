"""The type checks of the test run: what they find, and that they are in place."""

import itertools

import numpy as np
import pytest
import torch
import typechecks
from beartype.roar import BeartypeCallHintViolation as Violation
from jaxtyping import Bool, Float, Int, Shaped, _storage
from torch import Tensor

from sinklens.sampling.decisions import truncate

check = typechecks.checking(typechecker=None)


@check
def outer(left: Float[Tensor, "row same"], right: Float[Tensor, "same column"], wrong: bool = False) -> "Product":
    return left if wrong else left @ right


@check
def count(name: str, *, times: int = 1) -> int:
    return len(name) * times


Product = Float[Tensor, "row column"]


def test_every_call_is_checked_in_its_arguments_and_result_with_one_size_per_axis():
    for _ in range(3):
        assert outer(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    for given in ((torch.ones(2, 3), torch.ones(2, 4)), (np.ones((2, 3)), torch.ones(3, 4))):
        with pytest.raises(Violation, match=r"parameter (left|right)="):
            outer(*given)
    with pytest.raises(Violation, match="return"):
        outer(torch.ones(2, 3), torch.ones(3, 4), wrong=True)
    assert count("ab", times=2) == 4
    with pytest.raises(Violation, match="parameter times='2'"):
        count("ab", times="2")


def test_the_first_calls_of_a_function_are_checked_in_each_test():
    for _ in range(typechecks.CALLS):
        with pytest.raises(Violation, match="parameter name=1"):
            count(1)
    with pytest.raises(TypeError, match="has no len"):
        count(1)
    typechecks.begin_test()
    with pytest.raises(Violation, match="parameter name=1"):
        count(1)


def answers(fits, annotation, values):
    """What a check says of two values in a row, and the sizes it has recorded by then."""
    with typechecks._axes:
        said = [fits(annotation, value) for value in values]
        return said, dict(_storage.get_shape_memo()[0])


def test_the_check_of_an_array_gives_jaxtypings_answers():
    annotations = [
        Float[Tensor, "row column"], Float[Tensor, "same same"], Int[Tensor, "row 3"], Shaped[Tensor, "_ column"],
        Float[Tensor, "#row column"], Float[Tensor, "*rest column"], Float[Tensor, "..."], Bool[Tensor, ""],
        Float[np.ndarray, "row column"], Float[Tensor, "row row+1"],
    ]  # fmt: skip
    values = [
        torch.ones(2, 3), torch.ones(3, 3), torch.ones(1, 3), torch.ones(2, 3, 1), torch.ones(2, 3).double(),
        torch.ones(2, 3, dtype=torch.long), torch.tensor(True), np.ones((2, 3)), np.ones((2, 3), int), "text", None,
    ]  # fmt: skip
    for annotation, *pair in itertools.product(annotations, values, values):
        expected = answers(typechecks._fits_by_jaxtyping, annotation, pair)
        assert answers(typechecks._fits, annotation, pair) == expected, (annotation, pair)


def test_checks_can_be_turned_off_for_a_test(unchecked):
    assert count([1, 2], times=2.0) == 4.0


def test_the_functions_of_the_package_are_checked():
    with pytest.raises(Violation, match="truncate"):
        truncate(torch.ones(5, dtype=torch.long), 1.0, None, None)
