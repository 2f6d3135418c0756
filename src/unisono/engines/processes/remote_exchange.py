"""A worker's view of an exchange (runtime/exchange.py) that the caller's process holds, and its messages.

    worker i                                     caller, whose own replica waits at the exchange or has ended
    submits ──► a `Request`, on its channel ─────────► `LocalExchange.submit`
    waits   ◄── the `Response` ◄──────────────────── when every replica has submitted or withdrawn

A worker has one channel. Requests and its withdrawal precede the reply to the message that the worker is handling.
Values are small, some numbers for each channel of a batch norm: their tensors travel as bytes, inside the message.
"""

import ctypes
import io
import pickle
from typing import Any, NamedTuple

import torch

from unisono.engines.processes.channel import Channel
from unisono.runtime import timeline
from unisono.runtime.exchange import Exchange, Request, Response

_SPIN_S = 0.0002


class Withdrawal(NamedTuple):
    """Sent by a worker that will submit no more, though its reply may have to wait for other workers."""

    failed: bool


class RemoteExchange(Exchange):
    """A worker's view of an exchange at the other end of its channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def submit_and_wait(self, index: int, request: Request) -> Response:
        with timeline.during(timeline.WAIT):
            self._channel.send(packed(request))
            self._channel.spin(_SPIN_S)
            body, _ = self._channel.receive()
        response: Response
        response, self.failed = pickle.loads(body)
        return response

    def withdraw(self, index: int, *, failed: bool) -> None:
        self._channel.send(packed(Withdrawal(failed)))


def packed(value: Any) -> bytes:
    """Return a value pickled, with tensors on the host as their bytes; `pickle.loads` returns it."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {torch.Tensor: _reduce_tensor}
    pickler.dump(value)
    return stream.getvalue()


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    tensor = tensor.contiguous()
    return _rebuild_tensor, (ctypes.string_at(tensor.data_ptr(), tensor.nbytes), tensor.dtype, tuple(tensor.shape))


def _rebuild_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    # frombuffer needs a writable buffer of at least one byte.
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
