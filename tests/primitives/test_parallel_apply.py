"""parallel_apply: module i to input i, all at once."""

from typing import Any

import pytest
import torch

from unisono import parallel_apply


def describe(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def test_positional_and_keyword_inputs() -> None:
    """A tuple is the arguments; anything else the only one, as in torch; None for no keywords."""
    assert parallel_apply([describe] * 3, [(1, 2), 3, ()]) == [((1, 2), {}), ((3,), {}), ((), {})]
    assert parallel_apply([describe] * 2, [(), ()], [{"a": 1}, None]) == [((), {"a": 1}), ((), {})]
    assert parallel_apply([describe], [None]) == [((None,), {})]
    assert parallel_apply([describe], ["text"]) == [(("text",), {})]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (([], []), "expected at least one"),
        (([describe] * 2, [()]), "2 modules but 1 inputs"),
        (([describe] * 2, [(), ()], [{}, {}, {}]), "2 modules but 3 kwargs_tup"),
        (([describe], [()], None, ["cpu", "cpu"]), "1 modules but 2 devices"),
        (([describe], [()], None, [99]), "no accelerator 99"),
    ],
)
def test_lengths_that_differ_are_refused(args: tuple[Any, ...], message: str) -> None:
    """Nothing is dropped silently."""
    with pytest.raises(ValueError, match=message):
        parallel_apply(*args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((describe, [()]), "modules: expected a list with one entry for each call"),
        (([describe], torch.ones(1)), r"inputs: expected a list with one entry for each call, got a Tensor of shape"),
        (([describe], [()], {"x": 1}), "kwargs_tup: expected a list with one entry for each call, got {'x': 1}"),
        (([describe], [()], [1]), r"kwargs_tup\[0\]: expected a dict from names to inputs, got 1"),
        (([describe], [()], [{1: torch.ones(2)}]), r"expected a dict from names to inputs, got the key 1"),
        (([describe], [()], None, 2), "devices=2: expected a list"),
        (([describe, 3], [(), ()]), r"modules\[1\]: expected a module or a function, got 3"),
    ],
)
def test_arguments_of_other_types_are_named(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        parallel_apply(*args)


@pytest.mark.parametrize("failing", [{0}, {1, 2}])
def test_the_error_is_the_first_calls_own(failing: set[int]) -> None:
    """F1, F2: the same object, with a note of replica and device; the others are in its notes."""
    errors = [KeyError("one"), ValueError(7, "two"), ValueError("three")]

    def fails(number: int) -> int:
        if number in failing:
            raise errors[number]
        return number

    first, *others = sorted(failing)
    with pytest.raises(type(errors[first])) as caught:
        parallel_apply([fails] * 3, [(0,), (1,), (2,)])
    assert caught.value is errors[first]
    assert caught.value.__notes__ == [
        f"raised in replica {first} on cpu",
        *(f"replica {other} on cpu raised too: ValueError: {errors[other]}" for other in others),
    ]
    assert parallel_apply([fails], [(3,)]) == [3]
