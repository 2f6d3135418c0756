"""Modules for tests."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Calls(nn.Module):
    """A module with the given attributes, whose forward is a function of the module and the inputs."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.function(self, *inputs, **kwargs)
