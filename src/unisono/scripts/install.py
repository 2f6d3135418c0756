"""install: from here on torch's DataParallel, data_parallel and the four verbs are unisono's, in the whole program.

References are replaced: the names in torch's modules, and whatever the modules of the program have taken already
(`replacement`). `uninstall` puts torch's back in both. What is torch's own use of them (DistributedDataParallel,
torch.compile) stays as it is. Of torch's class only `__init__` changes: it says in the log who makes torch's own
wrapper, through a reference that was not found.

Assumes that one thread installs, while no other imports.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Never

import torch
from torch import nn

from unisono.data_parallel import ELSEWHERE, argument_names, data_parallel, inputs_of
from unisono.data_parallel import DataParallel as OwnDataParallel
from unisono.primitives.checks import check_names
from unisono.primitives.dims import Scalars
from unisono.primitives.gather import gather
from unisono.primitives.parallel_apply import parallel_apply
from unisono.primitives.replicate import replicate
from unisono.primitives.scatter import scatter, scatter_kwargs
from unisono.primitives.split_sizes import Shares
from unisono.runtime import devices as _devices
from unisono.runtime.devices import DeviceIds
from unisono.runtime.errors import log_once
from unisono.scripts import replacement, trainer, wrapper
from unisono.scripts.activity import ActivityReport
from unisono.scripts.wrapper import TORCHS_MODULE, DataParallel, Settings

# torch's modules, and which names in them are replaced. Some names are both a module's and a function's.
_NAMES = {
    "torch.nn": ["DataParallel"],
    "torch.nn.parallel": ["DataParallel", "data_parallel", "replicate", "scatter", "parallel_apply", "gather"],
    TORCHS_MODULE: ["DataParallel", "data_parallel", "replicate", "scatter_kwargs", "parallel_apply", "gather"],
    "torch.nn.parallel.replicate": ["replicate"],
    "torch.nn.parallel.scatter_gather": ["scatter", "scatter_kwargs", "gather"],
    "torch.nn.parallel.parallel_apply": ["parallel_apply"],
}
_STAYS_TORCHS = (
    "{wrapper} ({file}:{line}) is torch's own DataParallel: its class was defined before unisono.install(), "
    "or stored where install() does not look. Call install() first, or take the class from torch.nn where "
    "you use it."
)

_CAME_TOO_LATE = (
    "unisono.install() came too late for {names}: these classes were defined before and stay torch's own "
    "DataParallel, which runs on accelerators only. Call install() before you import them."
)


def install(
    device_ids: DeviceIds | None = None,
    *,
    shares: Shares = "chunk",
    in_dims: Any = ...,
    out_dims: Any = ...,
    scalars: Scalars = "stack",
    sync_batch_norm: bool | None = None,
    **unknown: Never,
) -> "Installation":
    """Let torch's DataParallel, data_parallel, replicate, scatter, parallel_apply and gather mean unisono's.

        >>> with unisono.install(["cpu", "cpu"]):
        ...     model = torch.nn.DataParallel(torch.nn.Linear(5, 2))  # in any module of the program
        ...     output = model(torch.zeros(30, 5))
        >>> [timing.rows for timing in model.replica_timings]
        [15, 15]

    `unisono run script.py` does this for a script that is left as it is. Options hold for every wrapper that is made
    from then on. What the program's modules have imported already is replaced too, also in registries, default
    arguments and class attributes; an object that was made before, and a subclass that was defined before, stay
    torch's: the log names these subclasses, and says so when one is made. A second call only changes the options.

    Args:
        device_ids: the devices of every wrapper, whatever the script names. A device's number, as the primitives take
            it, is its place in this list, modulo the list's length. None: the script's own devices.
        shares, in_dims, out_dims, scalars, sync_batch_norm: as in `unisono.DataParallel`.

    Returns:
        What was installed. `uninstall()`, or the end of a `with` block, puts torch's names back; wrappers that were
        made stay usable. `replaced` names what was replaced.

    Raises:
        TypeError, ValueError: arguments that cannot be used.
    """
    check_names(unknown, argument_names(install), "install", ELSEWHERE)
    devices = None if device_ids is None else tuple(_devices.resolve(device_ids))
    options: dict[str, Any] = {
        "shares": shares,
        "in_dims": in_dims,
        "out_dims": out_dims,
        "scalars": scalars,
        "sync_batch_norm": sync_batch_norm,
    }
    some = devices or ["cpu"] * (1 if isinstance(shares, str) else len(shares))
    OwnDataParallel(nn.Identity(), some, process_group=False, **options)  # which checks them
    now = wrapper.installed
    if now is not None:
        wrapper.installed = dataclasses.replace(now, devices=devices, options=options)
        return Installation((), now)
    wrapper.installed = Settings(devices, options)
    type.__setattr__(_torchs["DataParallel"], "__init__", _noted_init)
    trainer.adapt_when_imported()
    if names := [f"{each.__module__}.{each.__qualname__}" for each in _subclasses(_torchs["DataParallel"])]:
        log_once(_CAME_TOO_LATE.format(names=", ".join(sorted(names))))
    return Installation(_replace(_torchs, _ours))


def _subclasses(cls: type) -> Iterator[type]:
    """Yield the program's classes that are derived from a class, also indirectly."""
    direct: list[type] = type.__subclasses__(cls)
    for each in direct:
        if each.__module__.partition(".")[0] not in ("torch", "unisono") and not issubclass(each, OwnDataParallel):
            yield each
            yield from _subclasses(each)


class Installation:
    """What `install` has replaced.

        >>> installed = unisono.install()
        >>> "torch.nn.DataParallel" in installed.replaced
        True
        >>> installed.uninstall()

    Attributes:
        replaced (tuple[str, ...]): what was replaced, as `module.name` or `module.name['key']`; nothing if it was
            installed already.
    """

    def __init__(self, replaced: tuple[str, ...], before: Settings | None = None) -> None:
        self.replaced = replaced
        self._before = before  # what held, if it was installed already

    def uninstall(self) -> None:
        """Put torch's names back, in every module; does nothing if they are back already."""
        wrapper.installed = None
        type.__setattr__(_torchs["DataParallel"], "__init__", _torchs_init)
        _replace(_ours, _torchs)
        trainer.stop_waiting()

    def report(self) -> ActivityReport | None:
        """Return what wrappers have done so far; None after `uninstall`."""
        now = wrapper.installed
        return None if now is None else now.activity.report()

    def __enter__(self) -> "Installation":
        return self

    def __exit__(self, *_: object) -> None:
        """Uninstall; or, where unisono was installed already, put the options back that held before."""
        if self._before is None:
            self.uninstall()
        elif wrapper.installed is not None:
            wrapper.installed = self._before

    def __repr__(self) -> str:
        if not self.replaced:
            return "unisono.install: options only, the names were replaced already"
        return f"unisono.install: {len(self.replaced)} names replaced"


def _replace(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Replace what `old` names by what `new` has under the same name; return where.

    In torch's modules these are the names above, in the program's all that refers to one.
    """
    replaced = []
    for place, names in _NAMES.items():
        namespace = vars(sys.modules[place])
        for name in names:
            if namespace[name] is old[name]:
                namespace[name] = new[name]
                replaced.append(f"{place}.{name}")
    pairs = [(value, new[name]) for name, value in old.items()]
    return (*replaced, *replacement.replace(pairs, _namespaces()))


def _namespaces() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the modules that are neither torch's nor unisono's nor Python's, and the names in them."""
    others = sys.stdlib_module_names - {"__main__"} | {"torch", "unisono"}
    for place, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and place.partition(".")[0] not in others:
            yield place, module.__dict__


def _placed(given: Any, devices: Sequence[torch.device]) -> Any:
    """Return the device, or those of a list, that a script means by numbers or accelerators' names; others stay."""
    if isinstance(given, str):
        given = torch.device(given)
    if isinstance(given, Sequence):
        return [_placed(each, devices) for each in given]
    if isinstance(given, torch.device):
        return given if _devices.is_cpu(given) else devices[(given.index or 0) % len(devices)]
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return devices[given % len(devices)]
    return given


def _verb(verb: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """Return a verb that is counted, and whose devices, given as `argument`, are those of the installation."""
    signature = inspect.signature(verb)

    @functools.wraps(verb)
    def installed(*args: Any, **kwargs: Any) -> Any:
        now = wrapper.installed
        if now is None:
            return verb(*args, **kwargs)
        now.activity.add_call(verb.__name__)
        bound = signature.bind(*args, **kwargs)
        if now.devices and argument in bound.arguments:
            bound.arguments[argument] = _placed(bound.arguments[argument], now.devices)
        return verb(*bound.args, **bound.kwargs)

    return installed


@functools.wraps(data_parallel)
def _installed_data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    now = wrapper.installed
    if now is None:
        return data_parallel(module, inputs, device_ids, output_device, dim, module_kwargs)
    now.activity.add_call("data_parallel")
    if now.devices is not None:
        device_ids, output_device = now.devices, _placed(output_device, now.devices) if now.devices else None

    given, kwargs = inputs_of(inputs), module_kwargs or {}
    sync_batch_norm = now.options.get("sync_batch_norm")
    if now.comparison is not None:

        def wrapped() -> OwnDataParallel:
            return OwnDataParallel(
                module, device_ids, output_device, dim, sync_batch_norm=sync_batch_norm, process_group=False
            )

        options = {"sync_batch_norm": wrapper.OPTIONS["sync_batch_norm"]}
        with now.activity.uncounted():
            given, kwargs = now.comparison.before(module, given, kwargs, wrapped, options)

    def call(*inputs: Any, **kwargs: Any) -> Any:
        return data_parallel(module, inputs, device_ids, output_device, dim, kwargs, sync_batch_norm=sync_batch_norm)

    return now.activity.measure(call, given, kwargs, dim)


_torchs: dict[str, Any] = {
    name: vars(sys.modules[place])[name] for place, names in reversed(_NAMES.items()) for name in names
}
_torchs_init = _torchs["DataParallel"].__init__


@functools.wraps(_torchs_init)
def _noted_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Make one of torch's own wrappers, which no name leads to any more, and say where that was."""
    caller = sys._getframe(1)
    while caller.f_back is not None and caller.f_globals.get("__name__", "").startswith("unisono."):
        caller = caller.f_back
    name = f"{type(self).__module__}.{type(self).__qualname__}"
    log_once(_STAYS_TORCHS.format(wrapper=name, file=caller.f_code.co_filename, line=caller.f_lineno))
    _torchs_init(self, *args, **kwargs)


_ours: dict[str, Any] = {
    "DataParallel": DataParallel,
    "data_parallel": _installed_data_parallel,
    "replicate": _verb(replicate, "devices"),
    "scatter": _verb(scatter, "target_gpus"),
    "scatter_kwargs": _verb(scatter_kwargs, "target_gpus"),
    "parallel_apply": _verb(parallel_apply, "devices"),
    "gather": _verb(gather, "target_device"),
}
