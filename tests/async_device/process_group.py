"""Collectives of the device, over gloo: those of a process group run one after the other, in the order of the calls.

As NCCL's, they are queued on a stream of the group's own, and the host waits for none of them:

    calling stream   ── kernels ──┐(1)                     ┌(4)── what comes after work.wait() ──
    group's stream                └──► (2) ·· waits ·· (3) ┘──► the next collective
    group's thread                          └──► gloo ──┘

(1) The group's stream waits for what the calling stream has been given so far. (2) The group's thread then runs gloo on
the memory of the tensors itself. (3) The group's stream goes on when gloo has ended. (4) `work.wait()` makes the stream
that is current then wait for it. What reads a tensor without waiting, or writes into it too early, has wrong numbers.

A work keeps its tensors until its `wait()`; after that their memory is free when its own stream has come so far.

Before each collective the ranks compare what they are about to do. A collective that differs never ends, and neither
does one whose other rank has gone: until the group is aborted, as by `ncclCommAbort`. If it is not aborted within
`_GRACE_S`, the process says why, and ends by SIGABRT, as NCCL's watchdog ends it.
"""

import atexit
import contextlib
import ctypes
import datetime
import math
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import async_device

NAME = "qccl"
_GRACE_S = 20.0
_POLL = datetime.timedelta(seconds=0.05)
_TEXT_BYTES = 128  # of what a rank says of its collective


class _Call(NamedTuple):
    """A collective that waits for its turn."""

    ready: Any  # marks that the group's stream has come to it
    done: Any  # marks that it has ended; the group's stream waits for it
    text: str  # what it is; the same on all ranks
    begin: Callable[[], Any]  # begins it, with gloo
    kept: list[torch.Tensor]  # its tensors, until the work is waited for


class _Work(dist.Work):
    """A collective that has been queued."""

    def __init__(
        self, call: _Call, stream: torch.Stream, outputs: list[torch.Tensor], *, host_waits: bool = False
    ) -> None:
        super().__init__()
        self._call, self._stream, self._outputs, self._host_waits = call, stream, outputs, host_waits

    def is_completed(self) -> bool:
        return bool(self._call.done.query())

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Have the current stream wait; the host only where it is a barrier."""
        async_device.C.stream_waits(self._stream.device.index, self._call.done)
        if self._host_waits:
            self._call.done.wait()
        self._call.kept.clear()
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """Return a future that is done for the host, as NCCL's is: what waits for it waits on a stream."""
        future: Any = torch.futures.Future(devices=[self._stream.device])
        with async_device.stream(self._stream):
            future.set_result(self._outputs)
        return future

    def result(self) -> list[torch.Tensor]:
        return self._outputs


class Collectives(dist.ProcessGroup):
    """A process group for tensors of the device; those of the CPU are gloo's."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        # Called by itself: the methods of the base class call it with the GIL, for which gloo's own threads wait.
        self._host, self._gloo = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout) for name in ("host", "device")
        )
        self._host._set_sequence_number_for_group()
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._host)
        self._streams: dict[int, torch.Stream] = {}
        self._lock = threading.Lock()  # the group's stream and its thread have the calls in one order
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._num_calls = 0
        self._aborted = threading.Event()
        self._unfinished: list[Any] = []  # what gloo may still write to, in an aborted group
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()
        _groups.add(self)

    # ---- collectives -----------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, **options: Any) -> Any:
        opts = opts or dist.AllreduceOptions()
        if _on_host(tensors):
            return self._host.allreduce(tensors, opts)
        (tensor,), (alias,) = tensors, _aliases(tensors)
        return self._queue(
            f"all-reduce ({opts.reduceOp.op.name})", tensor, [tensor], lambda: self._gloo.allreduce([alias], opts)
        )

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if _on_host(tensors):
            return self._host.broadcast(tensors, opts)
        (tensor,), (alias,) = tensors, _aliases(tensors)
        text = f"broadcast from rank {opts.rootRank}"
        return self._queue(text, tensor, [tensor], lambda: self._gloo.broadcast([alias], opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if _on_host(inputs):
            return self._host.allgather(outputs, inputs, *filter(None, [opts]))
        (tensor,), (gathered,) = inputs, outputs
        ours, alias = _aliases(gathered), _aliases(inputs)
        return self._queue("all-gather", tensor, list(gathered), lambda: self._gloo.allgather([ours], alias))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        if _on_host([tensor]):
            return self._host._allgather_base(output, tensor, *filter(None, [opts]))
        ours, alias = [*_alias(output).chunk(self.size())], _aliases([tensor])
        return self._queue("all-gather", tensor, [output], lambda: self._gloo.allgather([ours], alias))

    _allgather_base = all_gather_single  # its name in older releases

    def barrier(self, opts: Any = None, **options: Any) -> Any:
        tensor = torch.zeros(1, device=torch.device(async_device.NAME, torch.accelerator.current_device_index()))
        begin = _aliases([tensor]), dist.AllreduceOptions()
        return self._queue("barrier", tensor, [tensor], lambda: self._gloo.allreduce(*begin), host_waits=True)

    def _queue(
        self,
        text: str,
        tensor: torch.Tensor,
        outputs: list[torch.Tensor],
        begin: Callable[[], Any],
        *,
        host_waits: bool = False,
    ) -> _Work:
        device, C = tensor.device, async_device.C  # noqa: N806 - as it is called there
        text = f"{text} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        with self._lock:
            if device.index not in self._streams:
                self._streams[device.index] = torch.Stream(device)
            stream, done = self._streams[device.index], C.Marker()
            stream.wait_stream(torch.accelerator.current_stream(device))
            with async_device.stream(stream):
                ready = C.mark(device.index)
                C.stream_waits(device.index, done)
            call = _Call(ready, done, text, begin, [tensor, *outputs])
            self._num_calls += 1
            self._calls.put(call)
        return _Work(call, stream, outputs, host_waits=host_waits)

    # ---- the group's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        while (call := self._calls.get()) is not None:
            number += 1
            call.ready.wait()
            try:
                self._compare(f"{number}: {call.text}")
                if not self._aborted.is_set():
                    self._finish(call.begin())
            except Exception as error:  # noqa: BLE001 - it ends the process
                self._failed(str(error))
            call.done.set()
            call.kept.clear()

    def _compare(self, mine: str) -> None:
        if self._aborted.is_set():
            return
        own = torch.frombuffer(bytearray(mine.encode().ljust(_TEXT_BYTES)[:_TEXT_BYTES]), dtype=torch.uint8)
        all_ranks = [torch.empty_like(own) for _ in range(self.size())]
        self._finish(self._gloo.allgather([all_ranks], [own]))
        texts = [bytes(each.tolist()).decode().rstrip() for each in all_ranks]
        if len(set(texts)) > 1 and not self._aborted.is_set():
            raise RuntimeError(f"the ranks' collectives of one group are not in one order: {texts}")

    def _finish(self, work: Any) -> None:
        """Wait for gloo; leave it alone if the group is aborted meanwhile."""
        while not work.is_completed():
            if self._aborted.is_set():
                self._unfinished.append(work)
                return
            with contextlib.suppress(RuntimeError):
                work.wait(_POLL)
        if not self._aborted.is_set():
            work.wait()

    def _failed(self, reason: str) -> None:
        if not self._aborted.wait(_GRACE_S):
            sys.stderr.write(f"{NAME}, rank {self.rank()} of {self.size()}: {reason}\n")
            os.abort()

    # ---- what torch.distributed asks for ---------------------------------------------------------

    def abort(self) -> None:
        """End all collectives, also those to come; what is in their tensors then is undefined."""
        self._aborted.set()

    def shutdown(self) -> None:
        """Wait for all collectives."""
        self._calls.put(None)
        self._thread.join()

    @property
    def _device_types(self) -> list[torch.device]:
        return [*super()._device_types, torch.device(async_device.NAME)]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == async_device.NAME else super()._get_backend(device)

    def get_group_store(self) -> Any:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME


def _on_host(tensors: Sequence[torch.Tensor]) -> bool:
    return tensors[0].device.type != async_device.NAME


def _aliases(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*map(_alias, tensors)]


@torch.inference_mode(False)  # gloo writes into it in the group's thread, where that mode is off
def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as a flat tensor of the CPU, which does not keep it."""
    if not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype, device="cpu")
    numbers = [each for each in zip(tensor.stride(), tensor.shape, strict=True) if each[1] > 1]
    expected = 1
    for stride, size in sorted(numbers):
        if stride != expected:
            raise ValueError(f"a collective needs dense tensors, and got strides {tensor.stride()}")
        expected *= size
    num_bytes = math.prod(tensor.shape) * tensor.itemsize
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(tensor.data_ptr()), dtype=tensor.dtype)


_groups: "weakref.WeakSet[Collectives]" = weakref.WeakSet()


def _abort_all() -> None:
    for group in list(_groups):
        group.abort()


def register() -> None:
    """Let torch.distributed use these for the device where no backend is named, as it uses NCCL for CUDA."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # the flight recorder of torch 2.15 wants a backend in C++
    dist.Backend.register_backend(NAME, Collectives, devices=[async_device.NAME])
    atexit.register(_abort_all)  # what waits for a rank that has gone would keep the device's streams from ending
