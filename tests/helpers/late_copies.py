"""Copies between devices that are made as late as they may be, as on a busy accelerator."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from unisono.engines import broadcast, step
from unisono.runtime.buckets import is_plain
from unisono.runtime.devices import Event
from unisono.runtime.streams import Copies

WAIT_S = 60.0


class LateCopies(Copies):
    """Makes a copy when its reader arrives; until then there is NaN in it.

    A source that is written into too early, and a copy that is read too early, so give wrong numbers, on the CPU too.

    Attributes:
        not_before: what readers but the first wait for before they arrive; None: nothing.
    """

    not_before: threading.Event | None = None

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__(devices)
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def to(self, tensor: torch.Tensor, reader: int) -> torch.Tensor:
        if not is_plain(tensor) or tensor.is_inference() or not tensor.numel():
            return super().to(tensor, reader)
        copy = torch.empty_like(tensor)
        copy.fill_(float("nan") if copy.is_floating_point() or copy.is_complex() else 77)
        with self._lock:
            self._pending.append((reader, copy, tensor.detach()))
        return copy

    def fill(
        self,
        memories: Sequence[Sequence[torch.Tensor]],
        values: Sequence[torch.Tensor],
        readers: Sequence[int],
        readers_before: Sequence[Iterable[Event]],
    ) -> None:
        for reader, memory in zip(readers, memories, strict=True):
            for to, value in zip(memory, values, strict=True):
                to.fill_(float("nan") if to.is_floating_point() or to.is_complex() else 77)
                with self._lock:
                    self._pending.append((reader, to, value))

    def _make(self, reader: int | None = None) -> None:
        with self._lock, torch.no_grad():
            for of, copy, source in self._pending:
                if reader in (of, None):
                    copy.copy_(source)
            self._pending = [each for each in self._pending if each[0] != reader and reader is not None]

    def wait_copies(self, reader: int) -> None:
        if reader and self.not_before is not None:
            assert self.not_before.wait(WAIT_S)
        self._make(reader)
        super().wait_copies(reader)

    @contextlib.contextmanager
    def on_copy_stream(self, reader: int) -> Iterator[None]:
        self._make(reader)
        with super().on_copy_stream(reader):
            yield

    def __exit__(self, *error: Any) -> None:
        self._make()
        super().__exit__(*error)


def send_late(monkeypatch: pytest.MonkeyPatch, not_before: threading.Event | None = None) -> None:
    """Have copies between devices made late."""
    monkeypatch.setattr(LateCopies, "not_before", not_before)
    for module in (step, broadcast):
        monkeypatch.setattr(module, "Copies", LateCopies)
