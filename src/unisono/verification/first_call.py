"""The first call of a wrapper in a program that goes on: what was given to it, for a comparison with one device."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from unisono.data_parallel import DataParallel
from unisono.runtime.contexts import contextmanager
from unisono.runtime.tracebacks import without_own_frames
from unisono.verification.report import Report
from unisono.verification.state import fresh
from unisono.verification.verify import verify_call


class FirstCall:
    """A call, with copies of its inputs, which it may change, and the mode in which the model was."""

    def __init__(self, model: DataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.mode = model, "training" if model.module.training else "eval"
        with torch.inference_mode(False):
            self._inputs, self._kwargs = fresh((inputs, kwargs))

    def verify(self, given: Mapping[str, Any] | None = None) -> Report:
        """Compare it in its mode; `given` are options that explain a difference, as those of `verify` do."""
        return verify_call(self.model, self._inputs, self._kwargs, self.mode, given or {})


@contextmanager
def forwards_through(around: Callable[..., Any]) -> Iterator[None]:
    """Let each wrapper's forward be `around(forward, model, inputs, kwargs)` meanwhile."""
    forward = DataParallel.forward

    @without_own_frames
    def surrounded(model: DataParallel, *inputs: Any, **kwargs: Any) -> Any:
        return around(forward, model, inputs, kwargs)

    DataParallel.forward = surrounded  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DataParallel.forward = forward  # type: ignore[method-assign]
