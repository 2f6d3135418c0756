"""A wrapper that can be used in the place of the module in it: its attributes, its checkpoints.

Attributes that only the module has are read, assigned and deleted through the wrapper; what both have is the wrapper's.
Protocols (names with double underscores) are never the module's: a wrapper has no length because its module has one.

It is copied and pickled as any module. What belongs to this process stays behind, and is made anew by the next step:
`StepMemory`, `GradientSync`, `MeasuredShares` and `Profile` say how, in their `__reduce__`, `__deepcopy__` or
`__getstate__`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

from torch import nn

from unisono.engines.rank_forward import Ranks
from unisono.engines.step_memory import StepMemory
from unisono.engines.step_plan import StepPlan
from unisono.options import Options
from unisono.primitives.split_sizes import IdleDevices
from unisono.profiling.profile import Profile
from unisono.runtime.errors import add_note, log_once
from unisono.runtime.tracebacks import leave_out_own_frames

F = TypeVar("F", bound=Callable[..., Any])

_OF_BOTH = (
    "{module} has {names}, and so has DataParallel: model.{name} is DataParallel's. For the module's write "
    "model.module.{name}."
)
_JOIN = (
    "torch's Join is for DistributedDataParallel. For loaders of different lengths write `for batch in "
    "model.batches(loader)`: every process then takes the same number of steps, and one without rows does "
    "not count"
)
# What programs and torch's tools for DistributedDataParallel read off it, and what there is instead.
_INSTEAD = {
    "join": _JOIN,  # the method
    "join_hook": _JOIN,  # what torch.distributed.algorithms.Join reads
    "process_group": (
        "a DataParallel does not expose its process group. ZeroRedundancyOptimizer(overlap_with_ddp=True) needs "
        "DistributedDataParallel; use ZeroRedundancyOptimizer(model.parameters(), ...) without it, and call its "
        "step() after backward"
    ),
}


class Wrapper(nn.Module):
    """A module around another, its attribute `module`, which a subclass assigns last: from then on names are shared.

    Its options are attributes of `_options`, and are read and assigned through the wrapper too.
    """

    _option_names: ClassVar[frozenset[str]] = frozenset()
    _class_of_verbs: ClassVar[type]  # the class whose verbs a subclass may override
    _modules: Any
    _options: Options
    _step_memory: StepMemory
    # From the plan of a step, returns that of one call, in which outputs have other weights; None: as it is.
    _weighed: Callable[[StepPlan], StepPlan] | None = None
    _ranks: Ranks | None
    _idle_devices: IdleDevices
    _profile: Profile | None

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if self._has_option(name):
                return getattr(self._options, name)
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or hasattr(type(self), name) or (name.startswith("__") and name.endswith("__")):
                raise  # unfinished, as while unpickling; a property of the wrapper's that failed; a protocol
        if name in _INSTEAD and not _has(module, name):
            raise AttributeError(_INSTEAD[name])
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        owner = self._owner_of(name)
        if owner is not self:
            setattr(owner, name, value)
        elif name in self._option_names:
            try:
                setattr(self._options, name, value)
            except (TypeError, ValueError, AttributeError) as error:
                self._note_if_of_both(name, error)
                raise
            self._show_torchs_attributes()
        else:
            nn.Module.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        owner = self._owner_of(name)
        if owner is self and name == "module":
            raise AttributeError("model.module cannot be deleted: a wrapper cannot run without it. Assign another one")
        if owner is self:
            nn.Module.__delattr__(self, name)
        else:
            delattr(owner, name)

    def __prepare_scriptable__(self) -> nn.Module:
        """Say what torch.jit.script can compile, before it fails somewhere in the wrapper's code."""
        raise TypeError(
            "torch.jit.script cannot compile a DataParallel, which runs threads. Compile the module and wrap "
            "that: DataParallel(torch.jit.script(module))"
        )

    def _show_torchs_attributes(self) -> None:
        """Have torch's attributes in `__dict__`, where a subclass that replaces `__getattr__` finds them."""
        options = self._options
        self.__dict__.update(device_ids=options.device_ids, output_device=options.output_device, dim=options.dim)

    def _say_names_of_both(self) -> None:
        """Log which of the module's names are the wrapper's, too, and so cannot be reached through it."""
        if names := self._names_of_both(
            {*dir(self._class_of_verbs), *self.__dict__, *self._option_names} - {*dir(nn.Module())}
        ):
            log_once(self._text_of_both(names))

    def _note_if_of_both(self, name: str, error: Exception) -> None:
        """Say in an error of the wrapper's attribute that the module has one of that name, which may be meant."""
        if names := self._names_of_both({name}):
            add_note(error, self._text_of_both(names))

    def _names_of_both(self, names: set[str]) -> list[str]:
        module = self.__dict__["_modules"].get("module")
        if module is None or isinstance(module, nn.DataParallel):
            return []
        return sorted(n for n in names if not n.startswith("_") and _has(module, n) and self._owner_of(n) is self)

    def _text_of_both(self, names: list[str]) -> str:
        return _OF_BOTH.format(
            module=type(self.__dict__["_modules"]["module"]).__name__, names=", ".join(names), name=names[0]
        )

    def _has_option(self, name: str) -> bool:
        return name in self._option_names and hasattr(self.__dict__.get("_options"), name)

    def _is_made(self) -> bool:
        """Return whether the wrapper has its module, which it is given last."""
        return "module" in self.__dict__.get("_modules", ())

    def _owner_of(self, name: str) -> nn.Module:
        """Return whose attribute is meant by a name: the module's if only it has one, else the wrapper's."""
        module = self.__dict__.get("_modules", {}).get("module")
        if module is None or _has(self, name) or self._has_option(name):
            return self
        if _has(module, name) or (isinstance(module, Wrapper) and module._owner_of(name) is not module):
            return module  # type: ignore[no-any-return]
        return self


def _has(module: nn.Module, name: str) -> bool:
    """Return whether a module has an attribute, without asking for it: properties may compute, or fail."""
    own = module.__dict__
    return (
        name in own
        or hasattr(type(module), name)
        or any(name in own.get(registry, ()) for registry in ("_modules", "_parameters", "_buffers"))
    )


def of_wrapper(method: F) -> F:
    """Make errors of a method of a wrapper name the module's method of that name, without unisono's frames."""

    @wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if issubclass(type(error), Exception):
                self._note_if_of_both(method.__name__, error)
            leave_out_own_frames(error)
            raise

    return cast(F, called)


def accept_clean_names(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Let `load_state_dict` take the module's own names as well as those with `module.` in front."""
    names = list(wrapper.module.state_dict())  # type: ignore[union-attr]
    clean = [name for name in names if prefix + name in state_dict]
    wrapped = [name for name in names if f"{prefix}module.{name}" in state_dict]
    if len(clean) > len(wrapped):  # a module may have a child called "module": the form that fits better counts
        values = [state_dict.pop(prefix + name) for name in clean]
        state_dict.update((f"{prefix}module.{name}", value) for name, value in zip(clean, values, strict=True))
