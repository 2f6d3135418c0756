"""The accelerators that tests see, and marks for tests that need some: without them they are skipped, visibly.

tests/conftest.py hides those of the machine unless UNISONO_TEST_DEVICES names some.
"""

from typing import Any

import pytest
import torch

_KIND = torch.accelerator.current_accelerator(check_available=True)
_NUM = torch.accelerator.device_count() if _KIND is not None else 0
_RUN = "run `make gpu-check`, or pytest with UNISONO_TEST_DEVICES=cuda:0"
_RUN_ON_TWO = "run `make gpu-check`, or pytest with UNISONO_TEST_DEVICES=cuda:0,cuda:1"
COMPUTES_ON_HOST = _KIND is not None and _KIND.type == "queued"  # the asynchronous device: slow, and unknown to gloo
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
on_two_accelerators = Needs(_NUM > 1, f"needs two accelerators: {_RUN_ON_TWO}")
on_shared_accelerator = Needs(_NUM > 0 and not COMPUTES_ON_HOST, "no accelerator whose tensors gloo takes")
on_cuda = Needs(torch.cuda.is_available(), f"no GPU: {_RUN}")
on_two_gpus = Needs(torch.cuda.device_count() > 1, f"needs two GPUs: {_RUN_ON_TWO}")
