"""The class that torch.nn.DataParallel is while unisono is installed: unisono's own, with torch's arguments.

What it is pickled as is torch's: the name of torch's class, and the attributes that torch's has. So a plain program
loads what a program with unisono installed has saved, as torch's wrapper, and the other way round: where unisono
is installed the name leads here, and the wrapper is made anew, with the options of that program.

A subclass of torch's wrapper that was defined before stays torch's, and may call torch's methods by name,
`DataParallel.forward(self, x)`. The name means this class now, so these methods are torch's for objects that are not of
this class.
"""

import copy
import copyreg
import functools
import importlib
import sys
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from unisono.data_parallel import DataParallel as OwnDataParallel
from unisono.data_parallel import M
from unisono.engines.step_plan import StepPlan
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceIds, DeviceLike
from unisono.runtime.tracebacks import without_own_frames
from unisono.scripts.activity import Activity
from unisono.scripts.first_step import FirstStepComparison
from unisono.scripts.label_counts import LabelWeights
from unisono.wrapper import accept_clean_names

TORCHS_MODULE = "torch.nn.parallel.data_parallel"
_Torchs: Any = vars(sys.modules[TORCHS_MODULE])["DataParallel"]  # before anything is installed
_GIVEN = "_unisono_given"  # in a pickle, what the wrapper was made with; torch's wrapper does not read it


@dataclass(frozen=True)
class Settings:
    """What holds for every wrapper."""

    devices: tuple[torch.device, ...] | None = None  # whatever the script names; None: the script decides
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of `unisono.DataParallel`
    activity: Activity = field(default_factory=Activity)  # what counts the rows
    comparison: FirstStepComparison | None = None  # compares first steps with one device


# What the command line calls the arguments of wrappers.
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in ("in_dims", "out_dims", "scalars", "sync_batch_norm")}

installed: Settings | None = None  # what holds for wrappers; None while unisono is not installed

# Torch's wrapper has no such options: a script's subclass may have attributes with these names.
_NOT_TORCHS = {"graphs", "loss", "process_group", "rescue", "timeout"}


def _verb(name: str) -> Callable[..., Any]:
    """Return a verb of ours; for an object of torch's class, torch's."""
    own, torchs = getattr(OwnDataParallel, name), getattr(_Torchs, name)

    @functools.wraps(own)
    def verb(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (own if is_own(self) else torchs)(self, *args, **kwargs)

    return verb


class _NamedAsTorchs(ABCMeta):
    """Makes wrappers of both libraries instances of the class that torch's name means now.

    As `ABCMeta` it allows classes that are also derived from an abstract one.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (cls is DataParallel and isinstance(instance, _Torchs))


def is_own(wrapper: object) -> bool:
    """Return whether a wrapper is of the class below itself: `isinstance` says so of torch's, too."""
    return issubclass(type(wrapper), DataParallel)


class DataParallel(OwnDataParallel[M], metaclass=_NamedAsTorchs):
    """See `unisono.DataParallel`; devices and options are those of `unisono.install`, if they are given there.

    Attributes:
        label_weights: how the Trainer of transformers has its losses joined; None: `scalars` says it.
    """

    _option_names: ClassVar[frozenset[str]] = OwnDataParallel._option_names - _NOT_TORCHS
    _says_names_of_both: ClassVar[bool] = False  # a script for torch's wrapper writes model.module

    def __init__(
        self,
        module: M,
        device_ids: DeviceIds | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
    ) -> None:
        if not is_own(self):
            _Torchs.__init__(self, module, device_ids, output_device, dim)
            return
        before = set(self.__dict__)
        given = (None if device_ids is None else list(device_ids), output_device, dim)
        now = installed or Settings()
        if now.devices is not None:
            device_ids, output_device = now.devices, _kept(output_device, now.devices)
        super().__init__(module, device_ids, output_device, dim, **now.options)
        self.label_weights: LabelWeights | None = None
        own = self.__dict__.keys() - before - nn.Module().__dict__.keys()
        self.__dict__["_given"] = given
        self.__dict__["_own_names"] = frozenset({*own, "_given", "_own_names"})
        now.activity.add_wrapper(self._options.devices)

    def __setattr__(self, name: str, value: Any) -> None:
        now = installed
        devices = now.devices if now is not None and self._is_made() else None
        if name == "device_ids" and devices is not None:  # they hold, whatever the script names
            return
        if name == "output_device" and "_given" in self.__dict__:
            device_ids, _, dim = self._given
            self.__dict__["_given"] = (device_ids, value, dim)
        super().__setattr__(name, value if name != "output_device" or devices is None else _kept(value, devices))

    scatter, replicate, parallel_apply, gather = map(_verb, ("scatter", "replicate", "parallel_apply", "gather"))

    @without_own_frames
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not is_own(self):
            return _Torchs.forward(self, *inputs, **kwargs)
        now = installed
        if now is not None and now.comparison is not None:
            with now.activity.uncounted():
                inputs, kwargs = now.comparison.before(self.module, inputs, kwargs, lambda: self, OPTIONS)
        if self.label_weights is not None:
            kwargs = self.label_weights.inputs(kwargs)
        if now is None:
            return super().forward(*inputs, **kwargs)
        return now.activity.measure(super().forward, inputs, kwargs, self.dim, lambda: self._step_memory.timings)

    def _weighed(self, plan: StepPlan) -> StepPlan:
        return plan if self.label_weights is None else self.label_weights.weighed(plan)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in self._own_names}
        state.pop("__orig_class__", None)  # of `DataParallel[Net](net)`: the class may not be there when it is loaded
        hooks = state["_load_state_dict_pre_hooks"].items()
        state["_load_state_dict_pre_hooks"] = OrderedDict(
            (number, hook) for number, hook in hooks if getattr(hook, "hook", hook) is not accept_clean_names
        )
        state[_GIVEN] = self._given
        return state | _torchs_attributes(*self._given)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        module = state["_modules"]["module"]
        given = state.pop(_GIVEN, None) or (
            _pickled_device_ids(state, module),
            state.get("output_device"),
            state.get("dim", 0),
        )
        DataParallel.__init__(self, module, *given)
        own_hooks = self.__dict__["_load_state_dict_pre_hooks"]
        self.__dict__.update({name: value for name, value in state.items() if name not in self._own_names})
        self.__dict__["_load_state_dict_pre_hooks"] = own_hooks | state.get("_load_state_dict_pre_hooks", {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy all attributes. By pickle, options and what the Trainer has set would be lost."""
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __copy__(self) -> Any:
        """Return a wrapper that shares everything with this one, as a copy of any module does."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        pickled_as = _TorchsClass() if type(self) is DataParallel else type(self)
        return copyreg._reconstructor, (pickled_as, object, None), self.__getstate__()  # type: ignore[attr-defined]


DataParallel._class_of_verbs = DataParallel


def _kept(output_device: DeviceLike | None, devices: Sequence[torch.device]) -> torch.device | None:
    """Return the script's output device if it is one of the devices; None, for the first, if not."""
    try:
        wanted = None if output_device is None else _devices.resolve_one(output_device, "output_device")
    except (TypeError, ValueError):
        return None
    return wanted if wanted in devices else None


def _torchs_attributes(
    device_ids: list[DeviceLike] | None, output_device: DeviceLike | None, dim: int
) -> dict[str, Any]:
    """Return the attributes of torch's wrapper that was made with these arguments on this machine."""
    devices = [device for device in _devices.resolve(device_ids) if not _devices.is_cpu(device)]
    if not devices:
        return {"device_ids": []}
    ids = [_devices.public_id(device) for device in devices]
    output = ids[0] if output_device is None else _devices.public_id(_devices.resolve_one(output_device, "output"))
    return {"device_ids": ids, "output_device": output, "dim": dim, "src_device_obj": devices[0]}


def _pickled_device_ids(state: dict[str, Any], module: nn.Module) -> list[Any] | None:
    """Return the devices of torch's wrapper; if it has none, the one on which it runs the plain module."""
    device_ids: list[Any] = state.get("device_ids") or []
    tensor = next(module.parameters(), None)
    if device_ids or not _devices.accelerators() or tensor is None:
        return device_ids
    return [tensor.device]


class _TorchsClass:
    """Is pickled as the name of torch's class, and leads to what has this name in the program that loads it."""

    def __reduce__(self) -> Any:
        return getattr, (_TorchsModule(), "DataParallel")


class _TorchsModule:
    def __reduce__(self) -> Any:
        return importlib.import_module, (TORCHS_MODULE,)
