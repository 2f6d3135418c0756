"""A meeting (sync_batch_norm/exchange.py) that is held in another process: a worker's view of it, and what travels.

    worker i                                   caller, whose own replica waits at the meeting or has ended
    comes ──► a `Request`, on its channel ──────────► `LocalExchange.submit`
    waits ◄── what the exchange came to ◄────────── when everybody who can still come has come

The channel is the worker's only one. Visits, and that it has left the meeting, go before the answer to the message that
the worker is at. Values are small, some numbers for each channel of a batch norm: tensors in them travel as their
bytes, inside the message.
"""

import ctypes
import io
import pickle
from typing import Any, NamedTuple

import torch

from manyhands.engines.processes.channel import Channel
from manyhands.sync_batch_norm.exchange import Exchange, Request, Result

_SPIN_S = 0.0002


class Left(NamedTuple):
    """What a worker says that comes to the meeting no more, though its answer may wait for other workers."""

    failed: bool


class RemoteExchange(Exchange):
    """A worker's view of a meeting that is held at the other end of its channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def submit_and_wait(self, index: int, request: Request) -> Result | None:
        self._channel.send(packed(request))
        self._channel.spin(_SPIN_S)
        body, _ = self._channel.receive()
        result: Result | None
        result, self.failed = pickle.loads(body)
        return result

    def withdraw(self, index: int, *, failed: bool) -> None:
        self._channel.send(packed(Left(failed)))


def packed(value: Any) -> bytes:
    """Return a value pickled, with tensors on the host as their bytes; `pickle.loads` returns it."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {torch.Tensor: _taken_apart}
    pickler.dump(value)
    return stream.getvalue()


def _taken_apart(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = tensor.contiguous()
    return _put_together, (ctypes.string_at(tensor.data_ptr(), tensor.nbytes), tensor.dtype, tuple(tensor.shape))


def _put_together(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # frombuffer wants bytes that may be written, and at least one.
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
