"""The accelerators of this machine, and marks for tests that need some: elsewhere they are skipped, visibly."""

from typing import Any

import pytest
import torch

_KIND = torch.accelerator.current_accelerator(check_available=True)
_NUM = torch.accelerator.device_count() if _KIND is not None else 0
_RUN = "run `make gpu-check` on a machine with one"
FIRST, SECOND = (f"{_KIND.type}:{index}" if _KIND is not None else "none" for index in range(2))


class Needs(list[pytest.MarkDecorator]):
    """The marks of a file (`pytestmark`), of a parameter (`marks=`), or, called, of a test."""

    def __init__(self, is_there: bool, reason: str) -> None:
        super().__init__([pytest.mark.gpu, pytest.mark.skipif(not is_there, reason=reason)])

    def __call__(self, test: Any) -> Any:
        for mark in self:
            test = mark(test)
        return test


on_accelerator = Needs(_NUM > 0, f"no accelerator: {_RUN}")
on_two_accelerators = Needs(_NUM > 1, "needs two accelerators")
on_cuda = Needs(torch.cuda.is_available(), f"no GPU: {_RUN}")
on_two_gpus = Needs(torch.cuda.device_count() > 1, "needs two GPUs")
