"""What an object holds, by path, and whether two objects hold the same."""

from types import SimpleNamespace

import pytest
import torch

from unisono.primitives.object_state import same_state, state_of


class Slotted:
    __slots__ = ("__hidden", "unset", "x")

    def __init__(self, x):
        self.x, self.__hidden = x, [1]


class Named(dict):
    pass


def test_everything_has_a_path():
    """In slots, attributes of containers, and both; what says nothing about data is left out."""
    named = Named(a=torch.tensor(1.0))
    named.note = "n"
    value = SimpleNamespace(slotted=Slotted(2), named=named, kind=dict, device=torch.device("cpu"), none=None)
    paths = {".slotted.x", ".slotted._Slotted__hidden[0]", ".named['a']", ".named.note"}
    assert state_of(value).keys() == paths


def test_a_cycle_ends():
    loop = [1]
    loop.append(loop)
    assert state_of(loop) == {"[0]": 1}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2).double(), False),
        (1, True, False),
        ([1, None], [1, dict], True),
        ([1], [1, 2], False),
        ({1, 2}, {2, 1}, True),
        (Slotted("x"), Slotted("x"), True),
        (Slotted("x"), Slotted("y"), False),
        (object(), object(), False),
        (range(3), range(3), True),
    ],
)
def test_what_is_the_same(one, other, same):
    assert same_state(state_of(one), state_of(other)) is same
