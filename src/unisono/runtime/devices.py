"""Devices: naming, checking, and everything that differs from one kind of device to another.

No other file of the library asks what kind a device is. There are two ways to compute:

    on the host     the CPU, and simulated devices: a replica computes in the thread that calls it, so a backward pass
                    runs in whichever thread asks for it, and the CPU's intra-op threads are divided among replicas
    on accelerators work is queued on streams, and torch's autograd engine has a thread of its own for each device

Copies from one accelerator to another are verified. On some machines peer-to-peer copies arrive damaged, without an
error: a bridge or an IOMMU that is set up wrongly is enough. So before a pair's first copy, known numbers are copied
both ways; if they arrive changed in either direction, all copies of the pair are made through the host.
"""

import functools
import math
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import torch

from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import log_once, shown, text_of, warn

DeviceLike: TypeAlias = int | str | torch.device
"""What names a device: an accelerator's index, a string such as "cuda:0" or "cpu", or a `torch.device`."""


class DeviceIds(Protocol):
    """A sequence of devices. To type checkers a `str` is none: what its `__contains__` takes is not any object."""

    def __contains__(self, value: object, /) -> bool: ...
    def __getitem__(self, index: int, /) -> DeviceLike: ...
    def __iter__(self) -> Iterator[DeviceLike]: ...
    def __len__(self) -> int: ...


# Seeds differ by 2**64 / golden ratio: far from each other, and from seeds that people choose.
_SEED_STEP = 0x9E3779B97F4A7C15
_CPU = torch.device("cpu")
_NUM_TRIED = 1 << 20  # numbers of 4 bytes that a test copy has
_NEAR_S = 10.0  # within which the time between two events is exact to a microsecond


def accelerators() -> list[torch.device]:
    """Return every accelerator of this machine, in index order; an empty list where there is none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def resolve(device_ids: DeviceIds | None) -> list[torch.device]:
    """Return the devices that `device_ids` names, one a replica, in order.

    None is every accelerator. Ints are accelerator indices. On a machine without accelerators, None, ints and an empty
    list give an empty list: "the plain module, where it is", so that a script written for GPUs runs unchanged.

    >>> resolve(["cpu", "cpu"])
    [device(type='cpu'), device(type='cpu')]

    Raises:
        TypeError: not a sequence of ints, strings and devices.
        ValueError: an index or device that does not exist, an empty list although there are accelerators, or devices
            of different kinds.
    """
    present = accelerators()
    if device_ids is None:
        return present
    _check_is_list(device_ids, "device_ids")
    if not present and all(_is_index(device_id) for device_id in device_ids):
        return []
    if not device_ids:
        raise ValueError(f"device_ids is empty: leave it out for all accelerators, or name some of {_names(present)}")
    devices = resolve_each(device_ids, "device_ids")
    if not are_one_kind(devices):
        raise ValueError(
            f'device_ids={list(device_ids)!r} mixes kinds of device: expected one kind, such as ["cuda:0", '
            '"cuda:1"] or ["cpu"] * 2'
        )
    return devices


def resolve_each(device_ids: DeviceIds, argument: str) -> list[torch.device]:
    """Return the devices that a list names; check that they exist."""
    _check_is_list(device_ids, argument)
    return [resolve_one(device_id, argument) for device_id in device_ids]


def resolve_one(device_id: DeviceLike, argument: str) -> torch.device:
    """Return the device that an int, a string or a `torch.device` names, with its index; check that it exists."""
    if _is_index(device_id):
        present = accelerators()
        if not 0 <= device_id < len(present):  # type: ignore[operator]
            raise ValueError(f"{argument}: there is no accelerator {device_id}; {_visible(present, argument)}")
        return present[device_id]  # type: ignore[index]
    if not isinstance(device_id, str | torch.device):
        raise TypeError(f"{argument}: expected an int, a string or a torch.device, got {shown(device_id)}")
    try:
        device = torch.device(device_id)
    except RuntimeError:  # torch's message lists every kind of device that it knows
        raise ValueError(
            f'{argument}: {device_id!r} is not a device; expected an index (0), or a name ("cuda:0", "cpu")'
        ) from None
    if device.type == "cpu":
        return _CPU
    if device.type == "meta":
        raise ValueError(f"{argument}: the meta device stores no data, so no replica can run on it")
    present = accelerators()
    if present and device.type == present[0].type:
        if device.index is None:
            return torch.device(device.type, torch.get_device_module(device).current_device())
        return resolve_one(device.index, argument)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # what torch raises differs by kind
        reason = str(error).splitlines()[0].split(". ")[0][:200]  # torch's can be long
        raise ValueError(
            f"{argument}: {device} cannot be used here ({reason}); {_visible(present, argument)}"
        ) from None
    return torch.device(device.type, device.index or 0)


def resolve_output(
    output_device: DeviceLike | None, devices: Sequence[torch.device], argument: str = "output_device"
) -> torch.device:
    """Return the device on which outputs are gathered: the first replica's unless another is named.

    -1 is the CPU, as in torch, and deprecated there as here.
    """
    if output_device is None:
        return devices[0]
    if _is_index(output_device) and output_device == -1:
        warn(f'{argument}=-1 is deprecated: write {argument}="cpu"', FutureWarning)
        return _CPU
    return resolve_one(output_device, argument)


def public_id(device: torch.device) -> int | torch.device:
    """Return a device as `torch.nn.DataParallel` shows it in `device_ids`: an accelerator's index, else the device."""
    return device.index if device in accelerators() else device


def identity(device: torch.device) -> str:
    """Return a name of a device that is unique on this machine, and the same in all its processes.

    Indices are not, where CUDA_VISIBLE_DEVICES numbers each process's devices from 0. The slices (MIG) of one GPU have
    different UUIDs and the GPU's address on the bus; they are one device, because NCCL cannot connect two of them.
    (Not run on several GPUs so far.)
    """
    if not computes_on_host(device):
        if address := pci_address(device):
            return f"{device.type} at {address}"
        uuid = getattr(properties_of(device), "uuid", None)
        if uuid is not None:
            return f"{device.type} {uuid}"
    return str(device)


def properties_of(device: torch.device) -> Any:
    """Return torch's properties of an accelerator; None for a kind without them."""
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    return None if ask is None else ask(device)


def pci_address(device: torch.device) -> str | None:
    """Return where an accelerator is on the PCI bus, as "domain:bus:device" in hexadecimal; None where torch has none.

    The slices (MIG) of one GPU have the GPU's.
    """
    if computes_on_host(device):
        return None
    properties = properties_of(device)
    address: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in address:
        return None
    domain, bus, slot = address
    return f"{domain:04x}:{bus:02x}:{slot:02x}"


def same_device(a: torch.device, b: torch.device) -> bool:
    """Return whether two devices are one; the CPU is one device, with an index or without."""
    return a == b or a.type == b.type == "cpu"


_ONLY_CPU = frozenset({"cpu"})
_type_of = attrgetter("type")  # in C, as each call of Python code counts in every step


def is_cpu(device: torch.device) -> bool:
    """Return whether a device is the CPU, whose memory is the host's."""
    return device.type == "cpu"


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: Apple's GPUs, for one, do not."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def is_cuda(device: torch.device) -> bool:
    """Return whether a device is one of CUDA's, or of ROCm's."""
    return device.type == "cuda"


def are_cpu(devices: Sequence[torch.device]) -> bool:
    """Return whether all of `devices` are the CPU."""
    return {*map(_type_of, devices)} <= _ONLY_CPU


def are_one_kind(devices: Sequence[torch.device]) -> bool:
    """Return whether all of `devices` are of one kind: CPUs, or GPUs of one make."""
    return len({device.type for device in devices}) <= 1


def copies_on_cpu(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return differentiable copies of tensors that are on the CPU."""
    return [None if tensor is None else tensor.to(_CPU, copy=True) for tensor in tensors]


def moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`: itself if it is there already, else a differentiable copy.

    Copies between accelerators are queued, ordered by both devices' current streams; copies from and to the host
    have ended on return.
    """
    return tensor if same_device(tensor.device, device) else copied_to(tensor, device)


def copied_to(tensor: torch.Tensor, device: torch.device, *, wait: bool = True) -> torch.Tensor:
    """Return a differentiable copy of `tensor` on `device`, even where it is there already.

    Without `wait` a copy from or to pinned host memory is queued as well, and may not have ended on return.
    """
    if tensor.device != device and not copies_arrive(tensor.device, device):
        return tensor.to(_CPU).to(device)  # in backward, the gradient is copied through the host too
    return tensor.to(device, copy=True, non_blocking=not wait)


def copy_into(memory: torch.Tensor, tensor: torch.Tensor, *, wait: bool = True) -> None:
    """Copy `tensor` into `memory`, which may be on another device. `wait` is as in `copied_to`."""
    if tensor.device != memory.device and not copies_arrive(tensor.device, memory.device):
        tensor = tensor.to(_CPU)
    memory.copy_(tensor, non_blocking=not wait)


_lock = threading.Lock()
_arriving: dict[frozenset[torch.device], bool] = {}  # pairs of accelerators that have been tested


def copies_arrive(source: torch.device, target: torch.device) -> bool:
    """Return whether direct copies between two devices arrive unchanged; tested at the first call for a pair."""
    pair = frozenset((source, target))
    if pair not in _arriving:
        if computes_on_host(source) or computes_on_host(target):
            return True
        with _lock:
            if pair not in _arriving:
                with ThreadPoolExecutor(1) as elsewhere:  # a thread without this one's modes and streams
                    _arriving[pair] = elsewhere.submit(_arrives_both_ways, source, target).result()
        if not _arriving[pair]:
            log_once(
                f"copies between {source} and {target} damage data: some of {_NUM_TRIED} known numbers "
                "changed on the way. unisono now copies through the host, which is slower; other programs on "
                "this machine probably compute wrong numbers. The usual causes are PCIe access control (ACS) "
                "and an IOMMU that translates traffic between devices."
            )
    return _arriving[pair]


def arrives(
    source: torch.device,
    target: torch.device,
    copy: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to,
) -> bool:
    """Return whether a copy of known numbers from `source` to `target` has the same bits."""
    known = [_known_numbers(device) for device in (source, target)]
    return torch.equal(copy(known[0], target), known[1])


def _arrives_both_ways(a: torch.device, b: torch.device) -> bool:
    return arrives(a, b) and arrives(b, a)


def _known_numbers(device: torch.device) -> torch.Tensor:
    """Return numbers that use all bits, and of which no part equals another."""
    return torch.arange(_NUM_TRIED, dtype=torch.int32, device=device) * -1640531535  # 2**32 / golden ratio, odd


def computes_on_host(device: torch.device) -> bool:
    """Return whether work on `device` runs in the calling thread rather than on an accelerator's streams."""
    if device.type == "cpu":
        return True
    if device.type in _accelerator_types:
        return False
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or device.type != kind.type:
        return True
    _accelerator_types.add(kind.type)
    return False


_accelerator_types: set[str] = set()  # those found so far: torch takes microseconds to say so again


def all_on_host(devices: Sequence[torch.device]) -> bool:
    """Return whether work on all of `devices` runs in the calling threads."""
    return False not in {*map(computes_on_host, {*devices})}


def has_streams(device: torch.device) -> bool:
    """Return whether work on `device` is queued on streams, of which it can have several: Apple's devices have one."""
    return device.type != "mps" and not computes_on_host(device)


def has_separate_memory() -> bool:
    """Return whether each replica but the first has copies of parameters and buffers, even on the module's own device.

    Only `unisono.testing.separate_memory` says so: to show on one device what happens on several.
    """
    return _has_separate_memory


_has_separate_memory = False


def set_separate_memory(flag: bool) -> None:
    """Set what `has_separate_memory` returns, for the whole process."""
    global _has_separate_memory  # noqa: PLW0603 - one flag for all threads
    _has_separate_memory = flag


IsDone: TypeAlias = Callable[[bool], bool]


def begin_copy_to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, IsDone]:
    """Begin to copy a tensor of an accelerator to the host; return the copy and `is_there(wait)`.

    `is_there(False)` returns whether the copy has ended; `is_there(True)` waits for it and returns True.
    """
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    return copy, queued_work(tensor.device)


def queued_work(device: torch.device) -> IsDone:
    """Return `is_done(wait)` of what the calling thread has queued on a device.

    `is_done(False)` returns whether it has ended; `is_done(True)` waits for it and returns True.
    """
    if computes_on_host(device):
        return lambda wait: True
    queued = Event(torch.accelerator.current_stream(device))

    def is_done(wait: bool) -> bool:
        if wait:
            queued.wait()
        return wait or queued.has_passed()

    return is_done


def wait_for_work(device: torch.device) -> None:
    """Wait until a device has done all that is queued on it."""
    with using(device, []):
        if not computes_on_host(device):
            torch.accelerator.synchronize(device)


class Event:
    """A moment of a stream: when it has done what is queued on it so far.

    torch's event makes its device the current one while it is recorded, waited for, or freed, and then the one before.
    On CUDA the latter takes half a gigabyte of a device that nothing else may have used. So here its device is the
    current one already, and torch's events are used again instead of being freed.
    """

    __slots__ = ("__weakref__", "_of_torch")

    def __init__(self, stream: torch.Stream, *, timed: bool = False) -> None:
        spare = _spare_events.setdefault((stream.device, timed), [])
        # The callback is C code: in a finalizer in Python Ctrl-C would be lost.
        self._of_torch = _EventOf(self, spare.append)
        with using(stream.device, []):
            try:
                self._of_torch.event = spare.pop().event
            except IndexError:
                self._of_torch.event = torch.Event(stream.device, enable_timing=timed)
            self._of_torch.event.record(stream)

    def let_wait(self, stream: torch.Stream) -> None:
        """Let what is queued on a stream from now on wait for this moment."""
        with using(stream.device, []):
            stream.wait_event(self._of_torch.event)

    def has_passed(self) -> bool:
        """Return whether the moment is over."""
        return bool(self._of_torch.event.query())

    def wait(self) -> None:
        """Wait until the moment is over."""
        self._of_torch.event.synchronize()

    def ms_until(self, later: "Event") -> float:
        """Return the milliseconds from this moment to a later one; both are timed, and over."""
        event = self._of_torch.event
        with using(event.device, []):
            return float(event.elapsed_time(later._of_torch.event))


class _EventOf(weakref.ref[Event]):
    """A reference to an `Event`, with torch's event, which another can have when that one is freed."""

    __slots__ = ("event",)
    event: torch.Event


_spare_events: dict[tuple[torch.device, bool], list[_EventOf]] = {}  # by device, and whether they are timed


def wait_stream(stream: torch.Stream, other: torch.Stream) -> None:
    """Let what is queued on a stream from now on wait for what is queued on another."""
    with using(stream.device, []):  # see `Event`
        stream.wait_stream(other)


Moment: TypeAlias = float | Event


class DeviceClock:
    """When a device does what is queued on it, in seconds of the host's `time.perf_counter`.

        >>> clock = DeviceClock(torch.device("cpu"))
        >>> began = clock.now()
        >>> clock.seconds(clock.now()) >= clock.seconds(began)
        True

    On a device with streams a moment is an event on the calling thread's stream, and no one waits for it before its
    seconds are asked for. Elsewhere it is the host's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A moment, and its seconds: others are measured from it, and it follows them, because torch has the time
        # between two events in single precision, which after an hour has steps of a quarter of a millisecond.
        self._near: tuple[Event, float] | None = None
        if has_streams(device):
            start = self._event()
            start.wait()
            self._near = start, time.perf_counter()

    def now(self) -> Moment:
        """Return the moment at which the device will have done what the calling thread has queued so far."""
        return time.perf_counter() if self._near is None else self._event()

    def seconds(self, moment: Moment) -> float:
        """Return the time of a moment; waits until it is over."""
        if isinstance(moment, float):
            return moment
        assert self._near is not None
        moment.wait()
        near, near_s = self._near
        elapsed_s = near.ms_until(moment) / 1000
        if abs(elapsed_s) > _NEAR_S:
            self._near = moment, near_s + elapsed_s
        return near_s + elapsed_s

    def _event(self) -> Event:
        return Event(torch.accelerator.current_stream(self._device), timed=True)


def numbers(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host's numbers on a device; the host does not wait for the device.

    `torch.tensor(values, device=device)` would: it copies from pageable memory.
    """
    if not has_streams(device):
        return torch.tensor(values, dtype=dtype, device=device)
    # "cpu", because a default device of the user's holds here too, and only the host's memory can be pinned.
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(device, non_blocking=True)


def has_batch_norm_kernels(device: torch.device) -> bool:
    """Return whether torch has its kernels of synchronised batch norm for a device (sync_batch_norm/kernels.py)."""
    return device.type in ("cuda", "xpu")


def current_streams(devices: Sequence[torch.device]) -> list[torch.Stream]:
    """Return the calling thread's current stream on each accelerator among `devices`."""
    return [torch.accelerator.current_stream(d) for d in dict.fromkeys(devices) if not computes_on_host(d)]


@contextmanager
def using(device: torch.device, streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Make `device` the current one, and `streams` current on their devices, within the context."""
    if computes_on_host(device):
        yield
        return
    streams_before = [torch.accelerator.current_stream(stream.device) for stream in streams]
    # The device before is current again only if this process has used it: to make a device of CUDA's current takes half
    # a gigabyte of its memory.
    with torch.accelerator.device_index(device.index):
        try:
            for stream in streams:
                torch.accelerator.set_stream(stream)  # makes its device the current one
            if streams:
                torch.accelerator.set_device_index(device.index)
            yield
        finally:
            for stream in streams_before:
                torch.accelerator.set_stream(stream)


def make_current(device: torch.device) -> None:
    """Make an accelerator the current one, which "cuda" without an index means; on the host nothing happens."""
    if not computes_on_host(device):
        torch.accelerator.set_device_index(device.index)


def is_captured(device: torch.device) -> bool:
    """Return whether the calling thread's kernels become a graph, as in `torch.cuda.graph`, instead of running."""
    ask = getattr(_module_of(device.type), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


_module_of = functools.cache(torch.get_device_module)  # by the kind's name


def has_graphs(device: torch.device) -> bool:
    """Return whether kernels of a device can be captured in a `Graph`."""
    return not computes_on_host(device) and _has_graphs(device.type)


@functools.cache
def _has_graphs(kind: str) -> bool:
    if kind == "cuda":
        return True
    try:
        torch.accelerator.Graph()  # torch 2.12 and older have none
    except (AttributeError, RuntimeError):
        return False
    return True


class Graph:
    """Kernels of one device, captured from the stream that is current in a thread, to be launched again together.

    What the thread queues there between `begin` and `end` does not run. Other threads, and other streams, go on.

    Args:
        device: it and a stream of it are current in `begin`, `end` and `launch`.
        pool: of a graph that is launched before this one, and never at once: its memory is used again.

    Attributes:
        pool: where what is allocated meanwhile comes from; set by `end`.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        mode: dict[str, Any] = {"pool": pool, "capture_error_mode": "thread_local"}
        if is_cuda(device):
            self._graph: Any = torch.cuda.CUDAGraph()
            self._begin = functools.partial(self._graph.capture_begin, **mode)
        else:
            self._graph = torch.accelerator.Graph(**mode)
            self._begin = self._graph.capture_begin
        self.pool = pool

    def begin(self) -> None:
        """Begin to capture."""
        self._begin()

    def end(self) -> None:
        """End it; raise torch's error if something that cannot be captured was called."""
        self._graph.capture_end()
        self.pool = self._graph.pool()

    def launch(self) -> None:
        """Queue the kernels on the current stream."""
        self._graph.replay()


def random_states(devices: Sequence[torch.device] | None = None) -> list[torch.Tensor]:
    """Return the state of the random number generator of the host, then of each accelerator that has one of its own.

    Args:
        devices: the accelerators that are asked, which gives each of them a context; None: every accelerator.
    """
    states = [torch.get_rng_state()]
    for device in _with_generators(devices):
        states.append(random_state(device))
    return states


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of an accelerator's random number generator."""
    with using(device, []):
        state: torch.Tensor = torch.get_device_module(device).get_rng_state()
    return state


def set_random_states(states: Sequence[torch.Tensor], devices: Sequence[torch.device] | None = None) -> None:
    """Restore what `random_states` returned for the same devices."""
    host, *others = states
    torch.set_rng_state(host)
    for device, state in zip(_with_generators(devices), others, strict=True):
        with using(device, []):
            torch.get_device_module(device).set_rng_state(state)


def _with_generators(devices: Sequence[torch.device] | None) -> list[torch.device]:
    asked = accelerators() if devices is None else [d for d in dict.fromkeys(devices) if not computes_on_host(d)]
    return [device for device in asked if hasattr(torch.get_device_module(device), "get_rng_state")]


def seed_differently(devices: Sequence[torch.device]) -> None:
    """Give accelerators whose random generators have the same seed, as after `torch.manual_seed`, seeds of their own.

    The first keeps its seed, and those of the other devices are computed from it and from their positions in the list;
    a seed that differs already stays. On the host there is one generator for all. (Not run on several GPUs so far.)
    """
    different = [device for device in dict.fromkeys(devices) if not computes_on_host(device)]
    if len(different) < 2:
        return
    first, *others = map(_default_generator, different)
    for number, generator in enumerate(others, 1):
        if first is not None and generator is not None and generator.initial_seed() == first.initial_seed():
            generator.manual_seed((first.initial_seed() + number * _SEED_STEP) % 2**64)


def shared_generators(devices: Sequence[torch.device]) -> dict[torch.device, torch.Generator]:
    """Return the random generator of each accelerator that is named more than once."""
    shared = [device for device, times in Counter(devices).items() if times > 1 and not computes_on_host(device)]
    generators = {device: _default_generator(device) for device in shared}
    return {device: generator for device, generator in generators.items() if generator is not None}


def _default_generator(device: torch.device) -> torch.Generator | None:
    """Return an accelerator's default generator, where its module of torch has one for each index, as CUDA's has."""
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    return generators[device.index] if device.index is not None and device.index < len(generators) else None


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return an accelerator's own random generator; None on the host, where all threads share one."""
    if computes_on_host(device):
        return None
    torch.empty(0, device=device)  # before a process has used the kind of device, it may have no generators
    return _default_generator(device)


# What says so in errors that are no `torch.OutOfMemoryError`: torch's for the host's memory, on Windows too; cuBLAS,
# cuDNN, cuSOLVER, their like for ROCm, which take memory of their own; and the runtime, as for pinned memory.
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|_ALLOC(ATION)?_FAILED\b|miopenStatusAllocFailed"
    r"|^(CUDA|HIP|XPU|Triton) [eE]rror( \[\w+\])?: (out of memory|hipErrorOutOfMemory)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether torch found too little memory on a device or on the host; Python's MemoryError does not count."""
    return issubclass(type(error), torch.OutOfMemoryError) or (
        issubclass(type(error), RuntimeError) and bool(_NO_MEMORY.search(text_of(error)))
    )


def free_cached_memory() -> None:
    """Give back what torch keeps of accelerators' memory without using it: for libraries with memory of their own."""
    if accelerators():
        torch.accelerator.empty_cache()


def _check_is_list(device_ids: object, argument: str) -> None:
    if isinstance(device_ids, str | bytes) or not isinstance(device_ids, Sequence):
        raise TypeError(f'{argument}={shown(device_ids)}: expected a list, such as [0, 1], ["cuda:0"] or ["cpu"] * 2')


def _is_index(device_id: object) -> bool:
    return isinstance(device_id, int) and not isinstance(device_id, bool)


def _names(devices: Sequence[torch.device]) -> str:
    return ", ".join(str(device) for device in devices)


def _visible(present: Sequence[torch.device], argument: str) -> str:
    """Return which accelerators a process sees, and what to write in a script where there is none."""
    visible = f"this process sees {_names(present)}" if present else "this process sees no accelerator"
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        if variable in os.environ:
            visible += f" ({variable}={os.environ[variable]!r} hides the others and numbers these from 0)"
    if not present and argument == "device_ids":
        visible += '. For replicas on the CPU write ["cpu"] * 2; indices, such as [0, 1], run the plain module here'
    return visible


def allocated_bytes(device: torch.device) -> int:
    """Return how much memory tensors have on an accelerator; 0 on the host."""
    return 0 if computes_on_host(device) else int(torch.accelerator.memory_allocated(device))


def most_rows(device: torch.device, rows: int, bytes_before: int) -> float:
    """Return how many rows fit in an accelerator's memory, after a step of `rows` rows; inf on the host.

    The step needed no more than what the largest amount so far exceeds the amount before it, and what it needed is free
    for the next one.
    """
    if computes_on_host(device) or not rows:
        return math.inf
    needed = int(torch.accelerator.max_memory_allocated(device)) - bytes_before
    return rows * (needed + free_memory_bytes(device)) / needed if needed > 0 else math.inf


def free_memory_bytes(device: torch.device) -> int:
    """Return how much memory of an accelerator is free; 0 where torch does not say."""
    accelerator: Any = torch.accelerator
    if hasattr(accelerator, "get_memory_info"):  # torch 2.9 lacks it
        free_bytes, _ = accelerator.get_memory_info(device)
        return int(free_bytes)
    module: Any = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        free_bytes, _ = module.mem_get_info(device)
        return int(free_bytes)
    return 0


def has_fused_optimizers(device: torch.device) -> bool:
    """Return whether torch's optimizers have a fused form for an accelerator: one kernel for all parameters."""
    return device.type in ("cuda", "xpu", "mps")
