"""Simulated devices: test code for several devices on a machine that has none.

    with unisono.testing.simulated_accelerators(2):
        x = torch.ones(2, 3, device="sim:0")
        layer = torch.nn.Linear(3, 3).to("sim:1")
        layer(x)     # RuntimeError: Expected all tensors to be on the same device, but found ... sim:0 and sim:1!

What is simulated. Tensors on `sim:0` to `sim:7` are CPU tensors with the name of a device, and torch treats the devices
as different, like GPUs: an operation whose tensors are on different devices is refused (a 0-dim CPU tensor
may join any), `.to("sim:1")` copies into memory of its own, `.cpu()` gives a plain tensor, gradients are on the
devices of their tensors. Modules, optimizers, autograd and in-place operations run CPU kernels, so the numbers are the
CPU's within rounding (an LSTM or an attention layer may use other CPU kernels than on "cpu").
Within `simulated_accelerators(2)` unisono itself believes that the machine has two accelerators.

What is not. There are no streams and no asynchrony, nothing is faster, and autograd runs the backward of all simulated
devices in the thread that calls it, as on the CPU. Random numbers come from the CPU's generators.
`torch.autocast` has no effect on simulated devices; sparse tensors are refused; torch.compile and quantized tensors are
not supported. What `torch.save` writes of simulated tensors needs `weights_only=False` to load: save `.cpu()` copies. A
device is named with its number, "sim:0".

One kind of accelerator a process. The first `simulated_accelerators` of a process changes it for good: it takes torch's
one free device name (PrivateUse1) and calls it "sim", with a `torch.sim` that reports no available device. From then on
tensors can be on "sim:0" outside of the context, too, `torch.accelerator.is_available()` is False, and
`torch.accelerator.current_accelerator()` is `sim`, also where there are GPUs. A process that has used GPUs, or in which
another backend has that name, gets an error instead. Neither the import of this module nor `separate_memory()` changes
it, and everything that stays on the CPU runs as before.

How it works. A simulated tensor is a wrapper whose C++ side says `lazy:N` and whose Python side says `sim:N`. `lazy`
is a device type that torch knows, that ordinary builds have no kernels for, and whose backward pass the autograd engine
runs in the calling thread. PrivateUse1 itself does not work: the engine keeps a thread for each of its devices, and
their number is fixed at the first backward pass of the process. No mode has to be active, so simulated tensors work in
any thread. Some messages from inside torch show the C++ name.
"""

import contextlib
import copy
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unisono.runtime import devices
from unisono.runtime.contexts import contextmanager

__all__ = ["SimulatedTensor", "separate_memory", "simulated_accelerators"]

MAX_DEVICES = 8
_SIMULATED = ("sim", "lazy")  # the name of a simulated device in Python, and inside torch
_aten = torch.ops.aten

_COPIES = {_aten.copy_.default, _aten._to_copy.default}  # the operations that copy data between devices
_CPU_ARGUMENT = {  # operations that take one argument from the CPU on any device: indices, lengths; its position
    _aten.index.Tensor: 1,
    _aten.index_put.default: 1,
    _aten.index_put_.default: 1,
    _aten._index_put_impl_.default: 1,
    _aten._pack_padded_sequence.default: 1,
    _aten._pack_padded_sequence_backward.default: 2,
}


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device: a CPU tensor and the number of the device.

    Programs do not construct it; they pass a device as usual.

    >>> with unisono.testing.simulated_accelerators(2):
    ...     x = torch.arange(3.0, device="sim:1")
    >>> x * 2
    tensor([0., 2., 4.], device='sim:1')
    >>> x.cpu()
    tensor([0., 1., 2.])
    """

    _host: torch.Tensor

    # As in Parameter, nothing happens here: operations are caught below autograd, in __torch_dispatch__.
    __torch_function__ = torch.nn.Parameter.__torch_function__

    @staticmethod
    def __new__(cls, host: torch.Tensor, index: int) -> "SimulatedTensor":
        if host.layout is not torch.strided or host.is_nested:
            kind = "nested ones" if host.is_nested else host.layout
            raise NotImplementedError(f"simulated devices hold dense tensors only, not {kind}")
        tensor: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device("lazy", index),
        )
        tensor._host = host
        return tensor

    def __init__(self, host: torch.Tensor, index: int) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        label = _common_label(func, args, kwargs)
        if kwargs.get("device") is not None:
            label = kwargs["device"]
            if label.type in _SIMULATED:
                kwargs["device"] = torch.device("cpu")
        inputs = list(_tensors((args, kwargs)))
        known = {id(_host_of(tensor)): tensor for tensor in inputs}
        outputs = func(*_map_tensors(_host_of, args), **_map_tensors(_host_of, kwargs))
        if func._schema.is_mutable:
            for tensor in inputs:
                _follow_host(tensor)

        # In inference mode too, a view of an ordinary tensor is an ordinary tensor.
        is_view = any(result.alias_info is not None for result in func._schema.returns)
        as_ordinary = is_view and not any(tensor.is_inference() for tensor in inputs)

        def label_output(output: torch.Tensor) -> torch.Tensor:
            if id(output) in known:  # an in-place operation, or out=, returns its argument
                return known[id(output)]
            if label.type not in _SIMULATED:
                return output
            with torch.inference_mode(False) if as_ordinary else contextlib.nullcontext():
                return SimulatedTensor(output, _index(label))

        if func is _aten._pack_padded_sequence.default:
            return label_output(outputs[0]), outputs[1]  # torch keeps batch sizes on the CPU, whatever the device
        return _map_tensors(label_output, outputs)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("sim", super().device.index)

    @property
    def data(self) -> torch.Tensor:
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_outside(self, value)
        if isinstance(value, SimulatedTensor):
            self._host = value._host.detach()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convert as `torch.Tensor.to` does; the same device and dtype give the tensor itself unless copy=True."""
        to: Callable[..., torch.Tensor] = super().to
        return to(*map(_inner_device, args), **{name: _inner_device(value) for name, value in kwargs.items()})

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """Make a tensor as `torch.Tensor.new` does, on this one's device (the C++ side would take the first)."""
        device = kwargs.pop("device", self.device)
        return self._host.new(*_map_tensors(_host_of, args), **kwargs).to(device)

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} tensor to numpy: use .cpu() to copy it to the CPU first")
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return self._host.tolist()

    def data_ptr(self) -> int:
        return self._host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._host.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = f"{repr(self._host)[:-1]}, device='{self.device}'"
        if self.grad_fn is not None:
            text += f", grad_fn=<{self.grad_fn.name()}>"
        elif self.requires_grad:
            text += ", requires_grad=True"
        return f"Parameter containing:\n{text})" if isinstance(self, torch.nn.Parameter) else f"{text})"

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SimulatedTensor":
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError("only tensors that are graph leaves can be deep-copied: use .detach() or .clone()")
        new = SimulatedTensor(copy.deepcopy(self._host, memo), self.device.index)
        memo[id(self)] = new.requires_grad_(self.requires_grad)
        new.grad = copy.deepcopy(self.grad, memo)
        new.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k != "_host"}, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        extra = {name: value for name, value in self.__dict__.items() if name != "_host"}
        return _rebuild, (self._host, self.device.index, self.requires_grad, extra)

    # nn.Module.to recognises a wrapper by these two methods: it then changes parameters in place, so that tied weights
    # stay tied and an optimizer keeps the parameters that it was given.
    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["_host"], self.device.index

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], index: int, size: Any, stride: Any) -> "SimulatedTensor":
        return SimulatedTensor(inner["_host"], index)


@contextmanager
def simulated_accelerators(count: int) -> Iterator[list[torch.device]]:
    """Make unisono believe that this machine has `count` accelerators, `sim:0` to `sim:{count - 1}`.

    It replaces `unisono.runtime.devices.accelerators`, for all threads of the process, until the context ends; if
    several contexts are open, the one opened last counts. The first one makes torch know these devices, for good.

    >>> import unisono
    >>> with simulated_accelerators(2):
    ...     model = unisono.DataParallel(torch.nn.Linear(3, 1).to("sim:0"))
    ...     model(torch.ones(4, 3)).device
    device(type='sim', index=0)

    Args:
        count: number of devices, 1 to 8.

    Yields:
        The devices.

    Raises:
        ValueError: `count` is not from 1 to 8.
        RuntimeError: this process has used another kind of accelerator, or another backend has torch's free name.
    """
    if count not in range(1, MAX_DEVICES + 1):
        raise ValueError(f"count={count!r}: expected 1 to {MAX_DEVICES} simulated devices")
    _register()
    present = [torch.device("sim", index) for index in range(count)]
    with _lock:
        _open.append(present)
        devices.accelerators = _accelerators
    try:
        yield list(present)
    finally:
        with _lock:
            _open[:] = [other for other in _open if other is not present]
            if not _open:
                devices.accelerators = _real_accelerators


@contextmanager
def shown_by_torch() -> Iterator[None]:
    """Have `torch.accelerator` report the simulated devices until the context ends; for the pytest plugin.

    Torch and unisono see what they saw before: no kernels, streams or pinned memory of an accelerator are there.
    """
    module, state = torch.accelerator, types.SimpleNamespace(index=0)

    class DeviceIndex(contextlib.ContextDecorator):
        def __init__(self, index: int | None) -> None:
            self._index = index

        def __enter__(self) -> None:
            self._before = state.index
            state.index = self._before if self._index is None else self._index

        def __exit__(self, *_: object) -> None:
            state.index = self._before

    def set_index(device: Any) -> None:
        state.index = device if isinstance(device, int) else _index(torch.device(device))

    simulated: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: len(_accelerators()),
        # With its number, which torch's has not: a simulated device is named with it.
        "current_accelerator": lambda check_available=False: torch.device("sim", state.index),
        "current_device_index": lambda: state.index,
        "current_device_idx": lambda: state.index,
        "set_device_index": set_index,
        "set_device_idx": set_index,
        "device_index": DeviceIndex,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        **{name: lambda device=None: 0 for name in _AMOUNTS},
    }
    before = {name: getattr(module, name) for name in simulated if hasattr(module, name)}
    for name, original in before.items():
        setattr(module, name, _for_others(original, simulated[name]))
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


_AMOUNTS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def _for_others(original: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `simulated` for callers other than torch and unisono."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        return (original if caller in ("torch", "unisono") else simulated)(*args, **kwargs)

    return function


@contextmanager
def separate_memory() -> Iterator[None]:
    """Give each replica but the first copies of its own of parameters and buffers, as on a device of its own.

    What several devices do is so shown on one: parameters are copied to the replicas in every forward, and gradients
    are copied back and summed in flat buckets. It holds for the forwards of all threads until the context ends; if
    several contexts are open, until the last one ends. It needs no simulated devices.

    >>> import unisono
    >>> model = unisono.DataParallel(torch.nn.Linear(3, 1), ["cpu", "cpu"])
    >>> with separate_memory():
    ...     model(torch.ones(4, 3)).sum().backward()
    >>> model.module.bias.grad
    tensor([4.])
    """
    with _lock:
        _separate.append(None)
        devices.set_separate_memory(True)
    try:
        yield
    finally:
        with _lock:
            _separate.pop()
            devices.set_separate_memory(bool(_separate))


_real_accelerators = devices.accelerators
_open: list[list[torch.device]] = []  # the devices of each open context, in the order in which they were opened
_separate: list[None] = []  # one a context of separate memory that is open
_lock = threading.Lock()


def _accelerators() -> list[torch.device]:
    with _lock:
        return list(_open[-1]) if _open else _real_accelerators()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the arguments or results of an operation with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: _map_tensors(function, item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


def _host_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._host if isinstance(tensor, SimulatedTensor) else tensor


def _common_label(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the one device of an operation's tensors; raise RuntimeError if there are several."""
    checked = [argument for position, argument in enumerate(args) if position != _CPU_ARGUMENT.get(func)]
    written = args[0] if func._schema.is_mutable and args else None
    labels = dict.fromkeys(
        tensor.device
        for tensor in _tensors((checked, kwargs))
        if isinstance(tensor, SimulatedTensor) or tensor.dim() > 0 or tensor is written
    )
    if len(labels) > 1 and func not in _COPIES:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(map(str, labels))}! (in {func})"
        )
    return next(iter(labels))


def _follow_host(tensor: torch.Tensor) -> None:
    """Give a wrapper the shape of its CPU tensor after an operation that changed it (t_, squeeze_, resize_)."""
    if isinstance(tensor, SimulatedTensor):
        host = tensor._host
        if tensor.shape != host.shape or tensor.stride() != host.stride():
            _set_outside(tensor, SimulatedTensor(host, tensor.device.index))


def _set_outside(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a wrapper the shape, strides and device of another; the CPU tensors inside stay as they are."""
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]


def _index(device: torch.device | None) -> int:
    index = (device.index or 0) if device is not None else 0
    if index >= MAX_DEVICES:
        raise RuntimeError(
            f"sim:{index}: there are only {MAX_DEVICES} simulated devices, sim:0 to sim:{MAX_DEVICES - 1}"
        )
    return index


def _inner_device(value: Any) -> Any:
    """Return a simulated device as the C++ side names it, so that `.to` sees when a tensor is already on it."""
    if isinstance(value, str):
        value = torch.device(value)
    if isinstance(value, torch.device) and value.type == "sim":
        return torch.device("lazy", _index(value))
    return value


def _rebuild(host: torch.Tensor, index: int, requires_grad: bool, extra: dict[str, Any]) -> SimulatedTensor:
    _register()
    tensor = SimulatedTensor(host, index)
    tensor.__dict__.update(extra)
    tensor.requires_grad_(requires_grad)
    return tensor


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    options = {} if memory_format is None else {"memory_format": memory_format}
    return SimulatedTensor(torch.empty(size, dtype=dtype, layout=layout, device="cpu", **options), _index(device))


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), _index(device))


def _zeros(
    size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    """Make an ordinary tensor of zeros in place of torch's symbolic one, which higher derivatives use."""
    return SimulatedTensor(torch.zeros(size, dtype=dtype, device="cpu"), _index(device))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _host_of(target).copy_(_host_of(source))
    return target


# ---- lazy modules ---------------------------------------------------------------------------------
#
# A parameter without a shape is a subclass of an ordinary tensor, which cannot become a simulated one by itself. So it
# stays on the CPU, remembers its device, and is swapped for a simulated tensor once it has its shape.


def _make_lazy_modules_work() -> None:
    """Let uninitialised parameters and buffers be on simulated devices."""
    mixin: Any = vars(torch.nn.parameter)["UninitializedTensorMixin"]
    materialize = mixin.materialize

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = "device" in kwargs
        device = kwargs.get("device") if named else next(iter(args), None)
        if not isinstance(device, str | torch.device):
            return torch.Tensor.to(self, *args, **kwargs)
        device = torch.device(device)
        is_simulated = device.type == "sim"
        rest = args if named else args[1:]
        kwargs["device"] = torch.device("cpu") if is_simulated else device
        made = torch.Tensor.to(self, *([kwargs.pop("device"), *rest] if not named else rest), **kwargs)
        self.__dict__.pop("_simulated", None)
        if is_simulated:
            self._simulated = _index(device)
        return made

    def materialize_on_device(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        index = self.__dict__.pop("_simulated", None)
        if device is not None and torch.device(device).type == "sim":
            device, index = "cpu", _index(torch.device(device))
        materialize(self, shape, device, dtype)
        if index is not None:
            with torch.no_grad():
                on_device = self.detach().to(torch.device("sim", index))
            if isinstance(self, torch.nn.Parameter):
                on_device = torch.nn.Parameter(on_device, self.requires_grad)
            torch.utils.swap_tensors(self, on_device)  # type: ignore[no-untyped-call]

    mixin.to, mixin.materialize = to, materialize_on_device
    for cls in (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer):
        cls.__new__ = _made_on_cpu(cls.__new__)  # type: ignore[method-assign]


def _made_on_cpu(new: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constructor of an uninitialised tensor that takes simulated devices, too."""
    signature = inspect.signature(new)

    @functools.wraps(new)
    def made(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        device = bound.arguments.get("device")
        index = _index(torch.device(device)) if device is not None and torch.device(device).type == "sim" else None
        if index is not None:
            bound.arguments["device"] = "cpu"
        tensor = new(*bound.args, **bound.kwargs)
        if index is not None:
            tensor._simulated = index
        return tensor

    return made


_library: Any = None  # of simulated devices' kernels, which last as long as it does; None: torch does not know them


def _register() -> None:
    """Make torch know the device type "sim", if it does not yet."""
    global _library  # noqa: PLW0603 - one for the process
    with _lock:
        if _library is None:
            _check_no_other_kind()
            _library = _registered()


def _check_no_other_kind() -> None:
    """Raise RuntimeError if this process has another kind of accelerator: "sim" would take its name, or hide it."""
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise RuntimeError(
            "simulated devices need torch's one free device name (PrivateUse1), but another backend of this "
            f'process uses it as "{name}". Simulate devices in a process without that backend.'
        )
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is not None and getattr(torch.get_device_module(kind), "is_initialized", bool)():  # Apple's has none
        raise RuntimeError(
            "simulated devices need a process that has not used an accelerator, but this one has used "
            f"{kind.type} devices."
        )


def _registered() -> Any:
    """Register the device type with torch; return what keeps its kernels."""
    torch.utils.rename_privateuse1_backend("sim")  # type: ignore[attr-defined]
    module = types.ModuleType("torch.sim", "Simulated devices, by unisono.testing: none is ever 'available'.")
    facts: dict[str, Callable[..., Any]] = {
        "is_available": lambda: False,
        "is_initialized": lambda: True,
        "device_count": lambda: 0,
        "current_device": lambda: 0,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": list,  # torch.autocast("sim") warns that it does nothing
        "manual_seed_all": lambda seed: None,  # the CPU's generator serves simulated devices
    }
    vars(module).update(facts)
    torch._register_device_module("sim", module)  # type: ignore[no-untyped-call]
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("PrivateUse1", "Lazy"):  # the dispatch keys of the two names in _SIMULATED
        library.impl("empty.memory_format", _empty, key)
        library.impl("empty_strided", _empty_strided, key)
        library.impl("_efficientzerotensor", _zeros, key)
    _make_lazy_modules_work()
    library.impl("_copy_from", _copy_from, "Lazy")  # torch.tensor([1.0], device="sim:0") fills its result with it
    return library
