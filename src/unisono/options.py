"""The options of a wrapper: what it was told once, each checked whenever it is assigned."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypedDict

import torch

from unisono.primitives.checks import check_flag
from unisono.primitives.dims import OutputRules, Scalars, check_dim, check_dims, check_scalars
from unisono.primitives.measured_shares import MeasuredShares
from unisono.primitives.split_sizes import MEASURED, Shares, check_parts, check_shares, split_rows
from unisono.runtime import devices as _devices
from unisono.runtime.errors import shown
from unisono.runtime.model_warnings import ModelWarnings

_SHARED_ACCELERATOR = (
    "sync_batch_norm=True with device_ids={}: expected each accelerator once, because torch runs all "
    "backwards of one accelerator in one thread, and replicas that wait for each other there would never "
    "finish. Name each accelerator once, or pass sync_batch_norm=False."
)
_COUNT = 'write device_ids=[0, 1] or ["cpu"] * 2; for all accelerators leave device_ids out'
_LAUNCHER = "leave it out: one process uses all devices; for several processes start the same script with torchrun"
_LOADER = "leave it out: your DataLoader makes whole batches, of any size, and each is split over the devices"
_LOOP = "leave it out: DataParallel wraps a module only, and the training loop stays yours"
_PRECISION = "use torch.autocast around forward, as without a wrapper"
_ACCUMULATION = "call backward several times before optimizer.step(), as without a wrapper"
# What to say of arguments that DistributedDataParallel, Accelerate and Lightning have.
OF_OTHER_LIBRARIES = {
    **dict.fromkeys(("devices", "device", "gpus", "gpu_ids", "devices_ids", "ids"), "device_ids"),
    **dict.fromkeys(("num_gpus", "n_gpus", "n_gpu", "num_devices", "num_replicas", "accelerator", "cpu"), _COUNT),
    **dict.fromkeys(("sync_bn", "sync_batchnorm", "convert_sync_batchnorm"), "sync_batch_norm"),
    **dict.fromkeys(("batch_dim", "axis", "batch_axis"), "dim"),
    **dict.fromkeys(("weights", "chunk_sizes"), "shares"),
    "gather_dim": "out_dims",
    **dict.fromkeys(
        (
            "find_unused_parameters",
            "static_graph",
            "gradient_as_bucket_view",
            "bucket_cap_mb",
            "check_reduction",
            "skip_all_reduce_unused_params",
        ),
        "leave it out: unused parameters need no option here, and the size of buckets is chosen for you",
    ),
    "init_sync": "leave it out: under a launcher all processes begin with rank 0's parameters and buffers",
    **dict.fromkeys(
        ("broadcast_buffers", "forward_sync_buffers"),
        "leave it out: under a launcher all processes get the same buffers in each step",
    ),
    **dict.fromkeys(("device_mesh", "mesh"), "process_group"),
    **dict.fromkeys(("mixed_precision", "precision"), _PRECISION),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), _ACCUMULATION),
    **dict.fromkeys(("strategy", "num_nodes", "num_processes", "rank", "world_size"), _LAUNCHER),
    **dict.fromkeys(("split_batches", "dispatch_batches", "even_batches", "batch_size"), _LOADER),
    **dict.fromkeys(("max_epochs", "callbacks", "logger", "log_with"), _LOOP),
    "device_placement": "leave it out: inputs are copied for you; move the module to the first device before wrapping",
}
_MAX_TIMEOUT_S = 2_000_000  # a longer wait overflows in systems that count milliseconds in 32 bits

LossRule: TypeAlias = Literal["mean", "sum"]


class WrapperOptions(TypedDict, total=False):
    """The types of `DataParallel`'s keyword options, for functions that pass them on."""

    shares: Shares
    parts: int
    rescue: bool
    graphs: bool
    timeout: float | None
    scalars: Scalars
    in_dims: Any
    out_dims: Any
    sync_batch_norm: bool | None
    loss: LossRule


def decided(name: str, value: object, wrap: str) -> AttributeError:
    """Return the error for an assignment to what more follows from than can be changed between steps.

    Args:
        wrap: how to wrap the module anew.
    """
    given = type(value).__name__ if isinstance(value, torch.nn.Module) else repr(value)
    return AttributeError(
        f"{name}={given}: {name} cannot be assigned, because it is fixed when the module is wrapped. Wrap "
        f"the module again: {wrap}. For an attribute of your own use another name"
    )


class Options:
    """The options of one wrapper, checked; `unisono.DataParallel` says what each means.

    Args:
        devices: one a replica; none where the plain module runs.
        options: the other options, by name.

    Raises:
        TypeError, ValueError: a value that cannot be used, with what was expected.
        AttributeError: one is assigned that is decided when a module is wrapped.
    """

    names: ClassVar[frozenset[str]]

    devices: list[torch.device]  # one a replica; empty where the plain module runs
    accelerators: list[torch.device]  # those of `devices` that do not compute on the host, each once
    # As torch has them: indices for accelerators, else `torch.device`s.
    device_ids: list[Any]
    output_device: Any
    gather_on: torch.device  # the device of `output_device`
    dim: int
    # The measured shares by the kind of call: are gradients on, and which method; None: they are not measured.
    measured: dict[tuple[bool, str | None], MeasuredShares] | None
    parts: int
    rescue: bool
    graphs: bool
    timeout: float | None
    scalars: Scalars
    in_dims: Any
    out_dims: Any
    sync_batch_norm: bool | None  # None: not said, so each replica normalises its own rows, with a warning
    version: int = 0  # how often one has been assigned

    def __init__(self, devices: Sequence[torch.device], **options: Any) -> None:
        self.__dict__.update(devices=[*devices], device_ids=[*map(_devices.public_id, devices)])
        accelerators = [device for device in dict.fromkeys(devices) if not _devices.computes_on_host(device)]
        self.__dict__["accelerators"] = accelerators
        for name, value in options.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = _CHECKS[name](self, name, value)
        self.__dict__["version"] = self.version + 1

    def rules(self, warnings: ModelWarnings | None = None) -> OutputRules:
        """Return how outputs are joined; `warnings` are the model's."""
        return OutputRules(self.dim, self.out_dims, self.scalars, warnings=warnings)

    @property
    def shares(self) -> Shares:
        """As assigned; of measured ones those that are kept: training's, else those of the first other kind."""
        in_order = sorted((self.measured or {}).items(), key=lambda item: item[0] != (True, None))
        kept = [measured.weights for _, measured in in_order if measured.is_frozen]
        return kept[0] if kept else self.__dict__["shares"]

    def measured_for(self, method: str | None) -> MeasuredShares:
        """Return the measured shares of a call that begins now."""
        assert self.measured is not None
        with_gradients, _ = kind = torch.is_grad_enabled(), method
        shares = self.measured.get(kind)
        if shares is None:
            name = ("training" if with_gradients else "forwards without gradients") + (f", {method}" if method else "")
            ids = [id if isinstance(id, int) else str(id) for id in self.device_ids]
            shares = self.measured.setdefault(kind, MeasuredShares(ids, name))
        return shares

    def sizes(self, rows: int, measured: MeasuredShares | None = None) -> list[int]:
        """Return how many rows each device gets, by measured shares if they are given."""
        if measured is not None:
            return measured.sizes(rows)
        return split_rows(rows, len(self.devices), self.__dict__["shares"] if self.measured is None else "even")

    def has_share(self) -> list[bool]:
        """Return for each device whether its share is more than 0."""
        return [True] * len(self.devices) if isinstance(self.shares, str) else [weight > 0 for weight in self.shares]


def _check_devices(options: Options, name: str, value: Any) -> Any:
    if _devices.resolve(value) != options.devices:
        raise decided(name, value, "DataParallel(model.module, device_ids)")
    return options.__dict__[name]


def _check_output_device(options: Options, _: str, value: Any) -> Any:
    if value is not None and not isinstance(value, int | str | torch.device):
        raise TypeError(f"output_device: expected an int, a string or a torch.device, got {shown(value)}")
    if not options.devices:
        return None
    options.__dict__["gather_on"] = _devices.resolve_output(value, options.devices)
    return _devices.public_id(options.gather_on)


def _check_shares(options: Options, _: str, value: object) -> Shares:
    shares = check_shares(value, len(options.devices) or None)
    options.__dict__["measured"] = {} if shares == MEASURED else None
    return shares


def check_timeout(value: object, name: str = "timeout") -> float | None:
    """Return a number of seconds to wait, None for ever; raise TypeError or ValueError for what is none."""
    expected = f"expected seconds above 0, at most {_MAX_TIMEOUT_S} (23 days), or None to wait without a limit"
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={shown(value)}: {expected}")
    if not 0 < value <= _MAX_TIMEOUT_S:
        raise ValueError(f"{name}={value!r}: {expected}")
    return float(value)


def _check_sync_batch_norm(options: Options, name: str, value: object) -> bool | None:
    sync_batch_norm = None if value is None else check_flag(value, name)
    accelerators = [device for device in options.devices if not _devices.computes_on_host(device)]
    if sync_batch_norm and len(set(accelerators)) < len(accelerators):
        raise ValueError(_SHARED_ACCELERATOR.format(options.device_ids))
    return sync_batch_norm


def _decided(_: Options, name: str, value: object) -> Any:
    raise decided(name, value, f"DataParallel(model.module, {name}=...)")


# What each option becomes when a value is assigned to it.
_CHECKS: Mapping[str, Callable[[Options, str, Any], Any]] = {
    "device_ids": _check_devices,
    "devices": _check_devices,
    "output_device": _check_output_device,
    "dim": lambda _, name, value: check_dim(value),
    "shares": _check_shares,
    "parts": lambda _, name, value: check_parts(value),
    **dict.fromkeys(("rescue", "graphs"), lambda _, name, value: check_flag(value, name)),
    "timeout": lambda _, name, value: check_timeout(value, name),
    "scalars": lambda _, name, value: check_scalars(value),
    "in_dims": lambda _, name, value: check_dims(value, name),
    "out_dims": lambda _, name, value: check_dims(value, name),
    "sync_batch_norm": _check_sync_batch_norm,
    **dict.fromkeys(("process_group", "loss"), _decided),
}
Options.names = frozenset(_CHECKS)
