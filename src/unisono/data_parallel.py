"""DataParallel: the one line, and its plain composition `data_parallel`.

An engine runs the replicas. If a subclass overrides one of the four verbs, if a mode is active that cannot follow into
other threads, or if a hook keeps tensors of replicas, the plain composition of the verbs runs instead.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain
from time import monotonic
from typing import Any, ClassVar

import torch
from torch import nn

from unisono.distributed.comm_hooks import CommHook
from unisono.distributed.environment import devices_of_process, started_by_launcher
from unisono.distributed.gradient_sync import GradientSync
from unisono.distributed.process_group import communicator_for
from unisono.distributed.uneven_inputs import even_batches
from unisono.engines.base import Call, Engine, LaneCall, Lanes, OneGraphNeededError, called, check_flag, check_timeout
from unisono.engines.distributed import DistributedEngine
from unisono.engines.threads import ThreadsEngine
from unisono.inference.map_and_evaluate import Callee, evaluate_batches, map_batches
from unisono.primitives import pytree
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.dims import OutputRules, check_dim, check_dims, check_scalars
from unisono.primitives.inputs import Arguments, scattered
from unisono.primitives.measured_shares import MeasuredShares, StepTime
from unisono.primitives.outputs import gathered
from unisono.primitives.parallel_apply import parallel_apply
from unisono.primitives.placements import check_have_data
from unisono.primitives.reassigned_buffers import buffer_registries, commit_buffers, modules_in_common
from unisono.primitives.replicate import check_device, replicate, unchanged_on_failure
from unisono.primitives.scatter_gather import check_kwargs
from unisono.primitives.split_sizes import MEASURED, Shares, check_parts, check_shares, split_rows, unequal
from unisono.profiling.profile import Profile
from unisono.runtime import devices as _devices
from unisono.runtime import timeline, torch_private
from unisono.runtime.devices import DeviceLike
from unisono.runtime.errors import log_once
from unisono.runtime.interrupts import critical, interruptibly
from unisono.runtime.step_status import StepStatus
from unisono.runtime.step_timer import StepTimer
from unisono.runtime.thread_pool import inside_replica, replica_device
from unisono.runtime.thread_state import modes_that_stay
from unisono.runtime.timeline import ReplicaTiming
from unisono.runtime.whole_batch_draws import draws_for_whole_batch
from unisono.sync_batch_norm.function_mode import inside_synchronised_replica, run_synchronised
from unisono.wrapper import Wrapper, accept_clean_names

_ENGINES = ("threads", "processes")
_NO_ACCELERATOR = (
    "this machine has no accelerator: DataParallel runs the plain module. For several replicas on the CPU, write "
    'DataParallel(model, ["cpu"] * n).'
)
_RUNS_WHOLE = (
    "DataParallel with {option} runs the whole batch on its first device while a mode is active that cannot follow "
    "into other threads: a dispatch or function mode, a torch.func transform, saved-tensor hooks. In one thread "
    "replicas cannot wait for each other."
)
_RANDOMNESS = ("per_replica", "one_device")
_ONE_DEVICE = "one_device"
_ON_THE_CPU_ONLY = (
    'randomness="one_device" on {devices}: replicas can draw as one device on the CPU only, as yet. Use '
    'randomness="per_replica".'
)
_IN_ONE_PROCESS_ONLY = (
    'randomness="one_device" in one of several processes: how many rows the other processes have is not known when '
    'numbers are drawn. Use randomness="per_replica", or keep the model to this process with process_group=False.'
)
_NO_VERBS = (
    '{name}.{verb} is overridden, and with randomness="one_device" the rows of every replica have to be known: leave '
    'it as it is, or use randomness="per_replica".'
)
_COMPILED_OUTSIDE = (
    "torch.compile stops at a DataParallel: to have its replicas compiled, compile the module in it, "
    "DataParallel(torch.compile(model))."
)
_TOO_FEW_FOR_BATCH_NORM = "Expected more than 1 value per channel"  # torch's words
_ONE_ROW = (
    "batch norm in training needs more than one row, and each replica normalises its own rows. With "
    "sync_batch_norm=True it normalises the rows of all replicas. Or leave a short last batch out (drop_last=True)."
)
_ON_WORKER_LOSS = ("raise", "retry")
_LOSSES = ("mean", "sum")
_DECIDED = (
    "{name}={value!r}, assigned to a wrapper: {name} is decided when a module is wrapped. Wrap it anew, {wrap}. An "
    "attribute of your own needs another name"
)
_VERBS = ("replicate", "scatter", "parallel_apply", "gather")


def _engine_of(engine: object) -> Engine:
    """Return the engine that the argument `engine` names or is."""
    if isinstance(engine, Engine):
        return engine
    if not isinstance(engine, str) or engine not in _ENGINES:
        wrong = ValueError if isinstance(engine, str) else TypeError
        remedy = f": make one, {engine.__name__}()" if isinstance(engine, type) and issubclass(engine, Engine) else ""
        raise wrong(f"engine={engine!r}: expected one of {list(_ENGINES)}, or an Engine{remedy}")
    if engine == "threads":
        return ThreadsEngine()
    from unisono.engines.processes.engine import ProcessesEngine  # only now: it needs more than torch

    return ProcessesEngine()


def _one_of(words: Sequence[str], value: object, argument: str) -> str:
    """Return a word; raise TypeError or ValueError for what is not one of `words`."""
    if not isinstance(value, str) or value not in words:
        wrong = ValueError if isinstance(value, str) else TypeError
        raise wrong(f"{argument}={value!r}: expected one of {list(words)}")
    return value


def _check_is_module(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {module!r}")
    return module


def _check_module(wrapper: "DataParallel", value: object) -> nn.Module:
    module = _check_is_module(value)
    if wrapper._is_made() and wrapper.spans_processes:
        raise AttributeError(_DECIDED.format(name="module", value=value, wrap="DataParallel(module)"))
    return module


def _check_device_ids(wrapper: "DataParallel", value: Any) -> Any:
    if not wrapper._is_made():
        return value
    if _devices.resolve(value) != wrapper.devices:
        wrap = "DataParallel(model.module, device_ids)"
        raise AttributeError(_DECIDED.format(name="device_ids", value=value, wrap=wrap))
    return wrapper.device_ids


def _check_output_device(wrapper: "DataParallel", value: Any) -> Any:
    if value is not None and not isinstance(value, int | str | torch.device):
        raise TypeError(f"output_device: expected an int, a string or a torch.device, got {value!r}")
    if not wrapper.devices:
        return None
    wrapper._gather_on = _devices.resolve_output(value, wrapper.devices)
    return _devices.public_id(wrapper._gather_on)


def _check_sync_batch_norm(wrapper: "DataParallel", value: object) -> bool:
    flag = check_flag(value, "sync_batch_norm")
    wrapper._engine.check(wrapper.devices, sync_batch_norm=flag)
    return flag


def _check_randomness(wrapper: "DataParallel", value: object) -> str:
    randomness, devices = _one_of(_RANDOMNESS, value, "randomness"), wrapper.devices
    if randomness == _ONE_DEVICE and wrapper._one_of_several:
        raise ValueError(_IN_ONE_PROCESS_ONLY)
    if randomness == _ONE_DEVICE and len(devices) > 1 and not _devices.all_on_host(devices):
        raise ValueError(_ON_THE_CPU_ONLY.format(devices=", ".join(map(str, devices))))
    return randomness


def _decided(name: str, wrap: str) -> Callable[["DataParallel", Any], Any]:
    """Return the function for what more follows from than can be changed between steps."""

    def check(wrapper: "DataParallel", value: Any) -> Any:
        if wrapper._is_made():
            raise AttributeError(_DECIDED.format(name=name, value=value, wrap=wrap))
        return value

    return check


# Every option of the constructor: what it becomes when a value is assigned, to a wrapper that is made or being made.
_OPTIONS: dict[str, Callable[["DataParallel", Any], Any]] = {
    "module": _check_module,
    "device_ids": _check_device_ids,
    "devices": _decided("devices", "DataParallel(model.module, devices)"),
    "output_device": _check_output_device,
    "dim": lambda _, value: check_dim(value),
    "engine": _decided("engine", "DataParallel(model.module, engine=...)"),
    "shares": lambda wrapper, value: check_shares(value, len(wrapper.devices) or None),
    "parts": lambda _, value: check_parts(value),
    "scalars": lambda _, value: check_scalars(value),
    "in_dims": lambda _, value: check_dims(value, "in_dims"),
    "out_dims": lambda _, value: check_dims(value, "out_dims"),
    "sync_batch_norm": _check_sync_batch_norm,
    "randomness": _check_randomness,
    "on_worker_loss": lambda _, value: _one_of(_ON_WORKER_LOSS, value, "on_worker_loss"),
    "rescue": lambda _, value: check_flag(value, "rescue"),
    "process_group": _decided("process_group", "DataParallel(model.module, process_group=...)"),
    "loss": _decided("loss", "DataParallel(model.module, loss=...)"),
    "timeout": lambda _, value: check_timeout(value),
}


class DataParallel(Wrapper, nn.DataParallel[Any]):
    """Run a module on every device of the machine, each on its share of the batch, with the results of one device.

        >>> model = torch.nn.Linear(5, 2)
        >>> model = unisono.DataParallel(model, device_ids=["cpu", "cpu"])
        >>> output = model(torch.zeros(30, 5))  # two replicas, 15 rows each, forward and backward at once
        >>> output.shape
        torch.Size([30, 2])

    With GPUs, and nothing else to say: `model = unisono.DataParallel(model.to("cuda"))`.

    Everything else of a training script stays as it is. Gradients arrive in the module's own parameters, summed over
    the replicas; outputs are in the order of the inputs. For a module whose rows do not interact, outputs and
    gradients are the plain module's within float rounding; where rows do interact (batch normalisation in training),
    each replica sees its own rows only, as in `torch.nn.DataParallel`. With `sync_batch_norm=True` batch norm sees the
    whole batch, and the numbers are the plain module's again.

    Args:
        module: the model; with two or more devices, its parameters and buffers are on the first one.
        device_ids: one device a replica: accelerator indices, strings or `torch.device`s; `["cpu"] * 4` is four
            replicas on the CPU, and a device may be named twice. None: every accelerator. On a machine without
            accelerators None, an empty list and indices mean the plain module.
        output_device: where outputs are gathered; None: the first device.
        dim: the axis of the rows, in every input and output tensor that is not 0-dim.
        engine: what runs the replicas. "threads": threads of this process. "processes": the first replica in this
            process, each other in a worker process that is started and stopped for you, where Python's interpreter
            lock does not slow it down. On the CPU parameters lie in memory that all of them share; GPUs have their
            own, and torch.distributed takes them there and gradients back. Or an engine of one's own, an instance of
            `unisono.engines.base.Engine`.
        shares: how many rows each replica gets. "chunk": ceil(rows / n) each, torch's rule; "even": differing by one
            row at most; or one weight a device, where 0 leaves a device idle. "measured": the fastest ones. Some tens
            of steps try a few, one device alone among them; then the fastest are kept, and logged with the line to
            write instead. See docs/usage.md.
        parts: in how many parts each replica runs its shard, one after the other, each computed once more in backward,
            so that only one part's activations are in memory. Outputs and gradients are the same within float rounding:
            for a loss over the whole batch that does not fit, and no batch norm in training. `rescue` finds the number
            by itself.
        scalars: what becomes of 0-dim outputs (and of numbers), such as a loss. "stack": a vector, one entry a replica,
            torch's rule; "mean": their mean, weighted by rows, which is exact for a mean over rows; "sum". Where rows
            are not what the mean is over, "mean:name" weights by the output of that name:
            `scalars={"loss": "mean:tokens", "tokens": "sum"}`, in a form like the output.
        in_dims: the axis of the rows in each input, as `torch.func.vmap` has it: an int for all; or a tuple with one
            entry a positional input, or a dict with names of inputs, nested as far down as needed. None: it has no
            rows, every replica gets all of it. What is left out has `dim`: `in_dims={"mask": 1, "table": None}`.
        out_dims: the same for outputs; None: the replicas agree on it; `unisono.pad(1)`: what differs in size on axis
            1 is padded to the longest. `out_dims=(0, 1)` for the output and the hidden state of an RNN with
            batch_first=True.
        sync_batch_norm: whether batch norm in training normalises over the rows of all replicas instead of each one's
            own: `torch.nn.BatchNorm1d`, 2d and 3d, subclasses, and `torch.nn.functional.batch_norm`. Outputs,
            gradients and running statistics are then those of one device. The replicas wait for each other at every
            batch norm, forward and backward; where they do not all call the same ones, an error says so.
        randomness: which random numbers dropout and all other draws have. "per_replica": each replica has a stream of
            its own; equal seeds give equal runs. "one_device": those of one device with the same seed, for any number
            of replicas; afterwards torch's random state is that of one device, too. Each replica draws for the whole
            batch and takes its own rows, and waits for the other replicas at every draw. An even split gives one row
            of the last replica to the first: by the shapes of replicas with different numbers of rows it is known
            which axis of a draw has the rows. What cannot be told is an error that names the operation. On the CPU
            only, and within one process.
        on_worker_loss: what becomes of a step whose worker process dies, with engine="processes". "raise":
            `ReplicaDied`; parameters, gradients and buffers are as before the step, and the next forward starts other
            workers. "retry": the step is run again on other workers, from the same inputs, buffers and random state, so
            it ends with exactly the numbers that it would have had. Its inputs are copied for that. Other effects of
            the module's forward happen twice. See docs/reliability.md.
        rescue: whether a step in which a replica runs out of memory is run again with that replica's shard in parts,
            each computed once more in backward, so that only one part's activations are in memory. Gradients are the
            same within float rounding. What the replica can bear is logged and remembered.
        process_group: which processes train the model together, where a launcher such as torchrun has started several.
            None: all of them, or this one alone if there is no launcher and no default process group; a
            `torch.distributed.ProcessGroup`: those in it; False: this one alone.
        loss: what each process's own loss is over its rows, "mean" or "sum", where several train together.
        timeout: after how many seconds without progress a wait for a replica ends in `ReplicaTimeout`, which has the
            Python stack of the stuck replica; progress is any message of a replica, and any part that one has finished.
            None: never. So it has to be longer than a replica's whole forward, or backward, may take after the first
            replica's. The first replica runs in the calling thread: where it is stuck itself, nothing is raised.

    Under a launcher the same line joins the processes. Each has its own device (that of its LOCAL_RANK; or several,
    named in `device_ids`) and its own batches; parameters and buffers begin as those of rank 0, and gradients are those
    of one device over all processes' rows, whatever each one's batch size. Buckets of gradients are summed over the
    processes while backward still runs. Forwards without gradients stay in their process.

    Attributes read or assigned through the wrapper that only the module has are the module's: `model.config`.

    Attributes:
        module: the module itself; its parameters are the only truth.
        devices: the `torch.device` of each replica; empty where the plain module runs.
        device_ids, output_device: as torch has them: indices for accelerators, else `torch.device`s. Where the plain
            module runs, `[]` and None.
        replica_timings: what each replica did in the last step.
        spans_processes: whether several processes train the module together.

    Raises:
        TypeError, ValueError: arguments that cannot be used, with what was expected.
        RuntimeError: launcher's variables that are incomplete; processes that do not come, or whose models differ.
    """

    _options: ClassVar[Mapping[str, Callable[[Any, Any], Any]]] = _OPTIONS
    _has_own_verbs: ClassVar[type]  # the class whose verbs a subclass may override

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        engine: str | Engine = "threads",
        shares: str | Sequence[float] = "chunk",
        parts: int = 1,
        scalars: Any = "stack",
        in_dims: Any = ...,
        out_dims: Any = ...,
        sync_batch_norm: bool = False,
        randomness: str = "per_replica",
        on_worker_loss: str = "raise",
        rescue: bool = False,
        process_group: Any = None,
        loss: str = "mean",
        timeout: float | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not that of torch.nn.DataParallel, which knows GPUs only
        _check_arguments(module, dim)
        self.dim, self.scalars, self.in_dims, self.out_dims = dim, scalars, in_dims, out_dims
        self._engine = _engine_of(engine)
        _one_of(_LOSSES, loss, "loss")
        communicator = communicator_for(process_group)
        one_of_several = communicator is not None or (process_group is None and started_by_launcher())
        resolve = devices_of_process if one_of_several else _devices.resolve
        self.devices: list[torch.device] = resolve(device_ids)
        if one_of_several:
            _devices.make_current(self.devices[0])
        self.device_ids: list[Any] = [_devices.public_id(device) for device in self.devices]
        gather_on = _devices.resolve_output(output_device, self.devices) if self.devices else output_device
        self.output_device: Any = gather_on
        self._one_of_several = communicator is not None
        self.shares: Shares = shares
        self.parts = parts
        self.sync_batch_norm = sync_batch_norm
        self.timeout = timeout
        self.randomness = randomness
        self.on_worker_loss = on_worker_loss
        self.rescue = rescue
        self._row_limits: dict[int, int] = {}
        self._measured: dict[tuple[bool, str | None], MeasuredShares] = {}  # by: are gradients on, and the method
        self._most_rows = [0.0]  # of the batches so far; a list, because to assign an attribute here takes 18 calls
        self._status = StepStatus()
        self._profile: Profile | None = None
        if self.devices:
            self.src_device_obj = self.devices[0]  # torch's, for code that reads it off a wrapper
        self.register_load_state_dict_pre_hook(accept_clean_names)  # type: ignore[no-untyped-call]
        self._engine.claim(self)
        self.module = module  # the last one: from here on, what is assigned and only the module has is the module's
        if not self.devices:
            log_once(_NO_ACCELERATOR)
            return
        _devices.warn_if_unequal(self.devices)
        if len(self.devices) == 1:
            module.to(self.devices[0])
        if communicator is not None:
            gradient_sync = GradientSync(communicator, self.devices[0], loss)
            gradient_sync.sync_module_states(module)
            self._engine = DistributedEngine(self._engine, gradient_sync, self.devices)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on every device, each on its share of the rows; return the outputs as one.

            >>> model = unisono.DataParallel(torch.nn.Bilinear(5, 3, 2), ["cpu", "cpu"])
            >>> model(torch.zeros(30, 5), input2=torch.zeros(30, 3)).shape
            torch.Size([30, 2])

        Args:
            inputs, kwargs: what the module's forward takes. Tensors in them are split, all else goes to every replica.

        Raises:
            ValueError: tensors with different numbers of rows; outputs that cannot be joined.
            RuntimeError: a parameter or buffer that is not on the first device.
            ReplicaDied: a worker process that has died.
            ReplicaTimeout: a replica that has made no progress for `timeout`.
            BaseException: what a replica raised, the same object, with a note that names the replica.
        """
        if timeline.recording:
            return self._run_recorded(None, inputs, kwargs)
        return self._run(None, inputs, kwargs)

    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> Any:
        """Call another method of the module on every device, its inputs scattered and outputs gathered as forward's.

            >>> model = unisono.DataParallel(torch.nn.LSTM(5, 2), ["cpu", "cpu"])
            >>> model.call("permute_hidden", torch.arange(4.0), None)
            tensor([0., 1., 2., 3.])

        `model.generate(x)` reads the method off the module and runs it in one place; `model.call("generate", x)` runs
        it on every device. `in_dims`, `out_dims` and `scalars` hold for it too; a method that needs others, or none, is
        called through another wrapper of the same module.

        Raises:
            AttributeError: the module has no such method. Else as forward.
        """
        self._check_method(method)
        if timeline.recording:
            return self._run_recorded(method, inputs, kwargs)
        return self._run(method, inputs, kwargs)

    def map(
        self,
        batches: Iterable[Any],
        *,
        method: str | None = None,
        batch_size: int | None = None,
        out: Any = None,
        progress: bool = False,
    ) -> Any:
        """Return an iterator over the outputs of many batches, each computed whole by whichever device is free.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> loader = [torch.zeros(30, 5), torch.zeros(30, 5), torch.zeros(7, 5)]
            >>> [output.shape[0] for output in model.map(loader)]
            [30, 30, 7]

        For inference over a data set. Outputs come in the order of the batches, one a batch, and are those of
        `model.module(batch)` under `torch.no_grad()`, on `output_device`. They are computed while you use them: at most
        two batches a device have been pulled from the loader ahead, so memory stays flat; a loader must not write into
        these afterwards. The module is left as it was: every batch finds the same buffers. Random numbers follow from
        torch's random state and the batch's number.

        Args:
            batches: a DataLoader or any other iterable, pulled from in this thread. A batch that is a tuple or list has
                the positional inputs, one that is a mapping the keyword inputs; anything else is the only input.
            method: the method to call, such as "generate"; None: forward.
            batch_size: `batches` is a sequence of samples (or a data set, a tensor, an array), and so many of them are
                one batch, the last one perhaps fewer. Tuples and mappings are taken apart, tensors stacked; what cannot
                be stacked, tensors of different lengths say, stays a list.
            out: a tensor, an array of numpy's or a memory map (or these in a form like the output's): all outputs are
                written into it, row by row, and `map` returns it instead of an iterator, when it is full. Outputs that
                `out_dims=unisono.pad(...)` describes are padded to its size.
            progress: show a bar, if standard error is a terminal. It needs rich.

        Returns:
            An iterator. `close()`, the end of a `with` block, or deleting it ends it early: devices finish the batch at
            which they are. `out` if that is given.

        Raises:
            TypeError, ValueError: arguments that cannot be used; an `out` that outputs do not fit into.
            AttributeError: the module has no such method.
            BaseException: of a batch: what the module raised, with a note that names the batch, after the outputs
                before it. The next `next()` goes on with the next batch. What the loader raises ends the iteration.
            ReplicaDied, ReplicaTimeout: the worker process that had the batch has died; the replica that has it has
                made no progress for `timeout`. `next()` goes on without it.

        Under a launcher every process is given the same batches and computes its part of them. The first process gets
        all outputs; the others get none, and help until it has all. There an error ends the iteration in all of them.
        """
        return map_batches(self._callee(method), batches, batch_size, out, check_flag(progress, "progress"))

    def evaluate(
        self,
        batches: Iterable[Any],
        metric: Callable[[Any, Any], Any],
        *,
        method: str | None = None,
        batch_size: int | None = None,
        reduction: str | Mapping[str, str] = "mean",
        progress: bool = False,
    ) -> float | dict[str, float]:
        """Return the mean of a metric over all rows of many batches, each computed whole by whichever device is free.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> loader = [(torch.zeros(30, 5), torch.ones(30, 2)), (torch.zeros(7, 5), torch.ones(7, 2))]
            >>> loss = model.evaluate(loader, torch.nn.functional.mse_loss)
            >>> def accuracy(output, target):
            ...     return {"accuracy": (output.argmax(1) == target[:, 0]).double().mean(), "rows": len(output)}
            >>> sorted(model.evaluate(loader, accuracy, reduction={"rows": "sum"}))
            ['accuracy', 'rows']

        Each row counts once: a mean is weighted by the rows of each batch, so the sizes of batches do not matter for a
        metric that is a mean over rows. The module is not switched to `eval()`; that is for you to do.

        Args:
            batches: as in `map`, but each with a target: the last value of a tuple or list, as in (x, y). What precedes
                it are the positional inputs; if that is one mapping, the keyword inputs. A batch that is a mapping has
                the keyword inputs, and is the target, too.
            metric: from the output and the target of a batch, both on `output_device`, to a number, or a dict of
                numbers. It is called in this thread.
            reduction: what becomes of the numbers of all batches: "mean" or "sum", or a dict from names to these; a
                name that it lacks has the mean.
            method, batch_size, progress: as in `map`.

        Returns:
            A float, or a dict of floats as the metric returns it. Under a launcher it is over the batches of all
            processes, and the same in each; every process is given the same batches and computes its part of them.

        Raises:
            TypeError, ValueError: arguments that cannot be used; batches without a target or without rows.
            BaseException: what the module raised, or the metric.
        """
        callee = self._callee(method)
        return evaluate_batches(callee, batches, metric, batch_size, reduction, check_flag(progress, "progress"))

    def _callee(self, method: str | None) -> Callee:
        """Return what a map calls for each batch."""
        self._check_method(method)
        if verb := self._overridden_verb():
            raise RuntimeError(
                f"{type(self).__name__}.{verb} is overridden, and whole batches go through no verb: call the model "
                "batch by batch instead"
            )
        here = self._here()
        gradient_sync = None if here else self._gradient_sync()
        devices = [here] if here else self.devices or [torch.device("cpu")]
        output_device = self._gather_on if self.devices and not here else devices[0]

        def open_lanes(devices: Sequence[torch.device]) -> Lanes:
            retry = self.on_worker_loss == "retry"
            return self._engine.open_lanes(
                self.module, LaneCall(devices, devices[0], output_device, method, retry, self.timeout)
            )

        return Callee(
            open_lanes=open_lanes,
            devices=devices,
            output_device=output_device,
            function=getattr(self.module, method or "forward"),
            in_dims=self.in_dims,
            rules=self._rules(),
            communicator=gradient_sync.communicator if gradient_sync is not None else None,
        )

    def _check_method(self, method: str | None) -> None:
        if method is None:
            return
        if not isinstance(method, str):
            raise TypeError(f"method={method!r}: expected the name of a method")
        if not callable(getattr(self.module, method, None)):
            raise AttributeError(f"method: {type(self.module).__name__} has no method {method!r}")

    def _run_recorded(self, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what `_run` does, as a step of this model's profile, or in none: another model's is being recorded."""
        if torch.compiler.is_compiling():
            return self._run(method, inputs, kwargs)
        profile = self._profile  # read once: another thread may end it
        if profile is None or inside_replica():
            with timeline.in_no_step():
                return self._run(method, inputs, kwargs)
        step = profile.new_step()
        with step.recorded(timeline.FORWARD, timeline.SCATTER):
            output = self._run(method, inputs, kwargs)
        if not step.replicas:
            step.watch_backward([tensor for _, tensor in pytree.tensors(output)])
        return output

    def _run(self, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.devices:
            return called(self.module, method)(*inputs, **kwargs)
        module: Any = self._modules["module"]  # `self.module` takes a microsecond
        must_run = self._engine.must_run(module)
        if not must_run and ((len(self.devices) == 1 and self.parts == 1) or self._runs_whole()):
            return self._run_on_one_device(method, inputs, kwargs)
        if torch.compiler.is_compiling():  # the wrapper, or a model around it: replicas stay out of its graph
            return torch.compiler.disable(self._run_uncompiled)(must_run, method, inputs, kwargs)  # type: ignore[no-untyped-call]
        if self.shares == MEASURED:
            return self._run_measured(must_run, method, inputs, kwargs)
        return self._run_on_devices(must_run, method, inputs, kwargs)

    def _gradient_sync(self) -> GradientSync | None:
        """Return what sums the gradients over several processes; None where this process trains alone."""
        gradient_sync: GradientSync | None = self._engine.gradient_sync(self.module)
        return gradient_sync

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]) -> Any:
        """Split the inputs of a call for `device_ids`; override it, and forward uses yours.

            >>> class Loud(unisono.DataParallel):
            ...     def scatter(self, inputs, kwargs, device_ids):
            ...         shards, shard_kwargs = super().scatter(inputs, kwargs, device_ids)
            ...         print([x.shape[0] for (x,) in shards], "rows")
            ...         return shards, shard_kwargs
            >>> output = Loud(torch.nn.Linear(5, 2), ["cpu", "cpu"])(torch.zeros(30, 5))
            [15, 15] rows

        A wrapper with a verb of its own runs the four of them one after the other, as `data_parallel` does: slower,
        and with engine="threads" only.

        Returns:
            Two sequences with one entry a shard: tuples of positional inputs, and dicts of keyword inputs.
        """
        devices = _devices.resolve_each(device_ids, "device_ids")
        arguments = self._arguments(None, tuple(inputs), kwargs or {})
        sizes = self._sizes(arguments.rows) if len(devices) == len(self.devices) else []
        if not any(sizes):  # other devices than the wrapper's: torch's rule
            sizes = split_rows(arguments.rows or 0, len(devices))
        used = [0] * len(devices) if arguments.rows is None else [size for size in sizes if size] or [0]
        numbers = [number for number, size in enumerate(sizes) if size] or range(len(used))
        shards = scattered(arguments, devices[: len(used)], used, numbers)
        return [args for args, _ in shards], [kw for _, kw in shards]

    def replicate(self, module: nn.Module, device_ids: Sequence[DeviceLike]) -> list[nn.Module]:
        """Return one replica of `module` a device; override it, and forward uses yours, as with `scatter`.

        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
        >>> model.replicate(model.module, model.device_ids)
        [Linear(in_features=5, out_features=2, bias=True), Linear(in_features=5, out_features=2, bias=True)]
        """
        return replicate(module, device_ids, detach=not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Call every replica with its shard; override it, and forward uses yours, as with `scatter`.

        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
        >>> replicas = model.replicate(model.module, model.device_ids)
        >>> [output.shape for output in model.parallel_apply(replicas, torch.zeros(30, 5).chunk(2), [{}, {}])]
        [torch.Size([15, 2]), torch.Size([15, 2])]
        """
        call = _plain_call.get()
        devices = call.devices if call is not None and len(call.devices) == len(replicas) else None
        return parallel_apply(replicas, inputs, kwargs, devices)

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """Join the replicas' outputs; override it, and forward uses yours, as with `scatter`.

        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
        >>> model.gather([torch.zeros(15, 2), torch.zeros(15, 2)], "cpu").shape
        torch.Size([30, 2])
        """
        call = _plain_call.get()
        rules, sizes = (call.rules, call.sizes) if call is not None else (self._rules(), None)
        return gathered(outputs, _devices.resolve_output(output_device, ()), rules, sizes)

    def refresh(self) -> None:
        """Have the next forward take the whole module anew, after a change that cannot be seen.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> model.refresh()

        With engine="processes" workers have the module as it was pickled. Attributes, flags, hooks, children,
        parameters and plain containers that change are noticed; a class attribute, a variable that a lambda closes
        over, the inside of an object of another class are not. (A global of an imported module is never sent: a worker
        has what the import gives it.) With engine="threads" nothing is ever stale.
        """
        critical(self._engine.refresh)()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients to this process: those of forwards inside reach the others with the next backward outside.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu"])
            >>> with model.no_sync():
            ...     model(torch.zeros(3, 5)).sum().backward()
            >>> model(torch.zeros(3, 5)).sum().backward()

        For gradient accumulation over processes: one sum over the network for several batches. Each batch is weighted
        by its rows, as it would be outside. Until that next backward `grad` is this process's own. In a single process
        it changes nothing.
        """
        gradient_sync = self._gradient_sync()
        if gradient_sync is None:
            yield
            return
        before, gradient_sync.synchronised = gradient_sync.synchronised, False
        try:
            yield
        finally:
            gradient_sync.synchronised = before

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of this process's loader, then empty ones until every process has had all its batches.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu"])
            >>> for x, y in model.batches([(torch.zeros(3, 5), torch.zeros(3, 2))]):
            ...     torch.nn.functional.mse_loss(model(x), y).backward()

        For loaders of different lengths: every process has to take the same steps. An empty batch is like the others
        but without rows, and counts for nothing; its loss (nan, for a mean) is ignored. In a single process these are
        the loader's batches.
        """
        gradient_sync = self._gradient_sync()
        communicator = gradient_sync.communicator if gradient_sync is not None else None
        return even_batches(communicator, loader, self.dim, next(iter(self.devices), torch.device("cpu")))

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Have `hook` sum the buckets of gradients over the processes, in the place of a plain sum.

            >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu"])
            >>> model.register_comm_hook(None, bf16_compress_hook)

        It is what `torch.nn.parallel.DistributedDataParallel.register_comm_hook` takes: compression to bf16, PowerSGD.

        Args:
            state: given to each call of the hook.
            hook: from state and bucket to a `torch.futures.Future` of a flat tensor, the mean over the processes.

        Raises:
            TypeError: a hook that cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"hook={hook!r}: expected a function of a state and a bucket")
        gradient_sync = self._gradient_sync()
        if gradient_sync is not None:
            gradient_sync.hook = (state, hook)

    def set_batch_weight(self, weight: float) -> None:
        """Set the weight of this process's next batch, relative to the other processes', in place of its rows.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu"])
            >>> model.set_batch_weight(17)
            >>> model(torch.zeros(3, 5)).sum().backward()

        For a loss that is a mean over something other than rows, such as tokens or pixels: their number in this batch.
        In a single process it changes nothing.

        Raises:
            TypeError: a weight that is no number.
            ValueError: one that is negative or not finite.
        """
        expected = "expected a number from 0, such as how many tokens the batch has"
        try:
            number = float(weight)
        except (TypeError, ValueError, RuntimeError):  # the last: a tensor of several
            raise TypeError(f"weight={weight!r}: {expected}") from None
        if not 0 <= number < math.inf:
            raise ValueError(f"weight={weight!r}: {expected}")
        gradient_sync = self._gradient_sync()
        if gradient_sync is not None:
            gradient_sync.next_weight = number

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Do what `half`, `to` and their like do; the engine refers no longer to the memory that this replaces."""
        self._engine.refresh()
        return nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Release what the engine holds: threads, or worker processes. A later forward starts again.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> model.close()

        This happens by itself when the wrapper is deleted, and when the program ends.
        """
        critical(self._engine.close)()

    @property
    def spans_processes(self) -> bool:
        """Whether several processes train the module together, as under torchrun.

        >>> unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"]).spans_processes
        False
        """
        return self._engine.spans_processes

    @property
    def replica_timings(self) -> list[ReplicaTiming]:
        """What each replica did in the last step: device, rows, seconds forward and backward.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> output = model(torch.zeros(31, 5))
            >>> [timing.rows for timing in model.replica_timings]
            [16, 15]

        Empty before the first step, and where no engine runs: with one device, or with overridden verbs.
        """
        return self._engine.timings()

    @contextlib.contextmanager
    def profile(self) -> Iterator[Profile]:
        """Record what every replica does when, while the block runs; print it to see where a step goes.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> with model.profile() as profile:
            ...     for _ in range(3):
            ...         model(torch.zeros(8, 5)).sum().backward()
            >>> print(profile)  # doctest: +ELLIPSIS
            Linear: 3 steps, ... ms a step; milliseconds:
            ...
            >>> profile.save("steps.json")  # for chrome://tracing and https://ui.perfetto.dev

        A step is a forward and the backwards that belong to it. `Profile` says what the phases are. Steps compute the
        same numbers, and are slower by 1 to 9 % with two replicas, most where they are short. On accelerators the times
        are those of the devices, by events on their streams. Of several processes each one profiles its own replicas.
        `map` and `evaluate` are not profiled.

        Raises:
            RuntimeError: the model is being profiled already.
        """
        if self._profile is not None:
            raise RuntimeError("this model is being profiled already: use that profile, or leave its block first")
        gradient_sync = self._gradient_sync()
        rank = gradient_sync.communicator.rank if gradient_sync is not None else 0
        where = next(chain(self.module.parameters(), self.module.buffers()), torch.empty(0)).device
        profile = self._profile = Profile(type(self.module).__name__, [*self.devices, where][0], rank)
        try:
            with profile.recording():
                yield profile
        finally:
            self._profile = None

    def _plan(
        self,
        method: str | None,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        measured: MeasuredShares | None = None,
        is_timed: bool = False,
    ) -> Call:
        """Decide which rows each replica gets. Without rows there is one replica, on the first device."""
        arguments = self._arguments(method, inputs, kwargs)
        sizes = self._sizes(arguments.rows, measured)
        used = [i for i, size in enumerate(sizes) if size] or [self._has_share().index(True)]
        here = self._here()
        if arguments.rows and here is None and measured is None:
            self._say_if_idle(arguments.rows, sizes)
        return Call(
            arguments=arguments,
            sizes=tuple([sizes[i] for i in used]),
            devices=[here or self.devices[i] for i in used],
            replica_numbers=used,
            source=here or self.devices[0],
            output_device=here or self._gather_on,
            rules=self._rules(),
            method=method,
            sync_batch_norm=self.sync_batch_norm,
            one_device_randomness=self.randomness == _ONE_DEVICE,
            retry=self.on_worker_loss == "retry",
            parts=self.parts,
            rescue=self.rescue,
            row_limits=self._row_limits,
            timeout_s=self.timeout,
            is_timed=is_timed,
        )

    def _arguments(self, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        function = getattr(self.module, method or "forward")
        return Arguments(inputs, kwargs, self.dim, self.in_dims, function, devices=self.devices)

    def _rules(self) -> OutputRules:
        return OutputRules(self.dim, self.out_dims, self.scalars)

    def _sizes(self, rows: int | None, measured: MeasuredShares | None = None) -> list[int]:
        if measured is not None:
            sizes = measured.sizes(rows or 0)
        else:
            sizes = split_rows(rows or 0, len(self.devices), "even" if self.shares == MEASURED else self.shares)
        return unequal(sizes) if self.randomness == _ONE_DEVICE else sizes

    def _has_share(self) -> list[bool]:
        """Return for each device whether its share is more than 0."""
        return [True] * len(self.devices) if isinstance(self.shares, str) else [weight > 0 for weight in self.shares]

    def _here(self) -> torch.device | None:
        """Return the device of all replicas if this wrapper is inside a replica itself; None if it is not."""
        if not inside_replica():
            return None
        tensor = next(chain(self.module.parameters(), self.module.buffers()), None)
        return tensor.device if tensor is not None else replica_device()

    def _say_if_idle(self, rows: int, sizes: Sequence[int]) -> None:
        """Say once if full batches leave a device without rows; a short last batch may."""
        most_rows: list[float] = self._most_rows
        if rows < most_rows[0]:
            return
        most_rows[0] = rows
        if all(sizes):
            return
        idle = [str(d) for d, size, share in zip(self.devices, sizes, self._has_share(), strict=True) if share > size]
        if idle:
            needed = len(sizes) + (self.randomness == _ONE_DEVICE)  # then two replicas have different numbers of rows
            better = 'shares="even"' if rows >= needed else f"batches of {needed} rows or more"
            log_once(
                f"a batch of {rows} rows gives {list(sizes)} rows to the {len(sizes)} devices: {len(idle)} of them "
                f"({', '.join(dict.fromkeys(idle))}) stay idle. Use {better}."
            )

    def _run_uncompiled(
        self, must_run: bool, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not inside_replica():
            log_once(_COMPILED_OUTSIDE)
        run = self._run_measured if self.shares == MEASURED else self._run_on_devices
        return run(must_run, method, inputs, kwargs)

    def _run_measured(self, must_run: bool, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward with the shares that are measured, or have been; time it while they are measured."""
        if inside_replica():  # its replicas run one after the other
            return self._run_on_devices(must_run, method, inputs, kwargs)
        kind = torch.is_grad_enabled(), method
        measured = self._measured.get(kind)
        if measured is None:
            name = ("training" if kind[0] else "forwards without gradients") + (f", {method}" if method else "")
            ids = [id if isinstance(id, int) else str(id) for id in self.device_ids]
            measured = self._measured.setdefault(kind, MeasuredShares(ids, name))
        measured.skip -= 1
        if measured.skip < 0:
            return self._run_timed(measured, must_run, method, inputs, kwargs)
        if measured.on_first_device and not must_run and self.parts == 1:
            return self._run_on_one_device(method, inputs, kwargs)
        return self._run_on_devices(must_run, method, inputs, kwargs, measured)

    def _run_timed(
        self,
        measured: MeasuredShares,
        must_run: bool,
        method: str | None,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        weights, on_one_device = measured.weights, measured.on_first_device and not must_run and self.parts == 1
        try:
            rows = self._arguments(method, inputs, kwargs).rows
        except (TypeError, ValueError):  # several devices refuse such inputs, with this error; one takes them
            rows = None
        if not rows or self._overridden_verb() or modes_that_stay():
            if on_one_device:
                return self._run_on_one_device(method, inputs, kwargs)
            return self._run_on_devices(must_run, method, inputs, kwargs, measured)
        devices, row_limits = self.devices, self._row_limits
        sizes = self._sizes(rows, measured)
        timings: list[ReplicaTiming] = []
        bytes_before = [*map(_devices.allocated_bytes, devices)]

        def ended(seconds: float) -> None:  # refers to nothing that a graph may not keep alive
            of_replicas = iter(timings)
            on_host = _devices.all_on_host(devices)
            replica_s = [_seconds(next(of_replicas), on_host) if size else 0.0 for size in sizes] if timings else []
            most_rows = [
                min(row_limits.get(i, math.inf), _devices.most_rows(device, sizes[i], bytes_before[i]))
                for i, device in enumerate(devices)
            ]
            measured.record(StepTime(weights, sizes, replica_s, seconds, most_rows))

        before = self._engine.timings()
        timer = StepTimer(devices, ended)
        if on_one_device:
            output = self._run_on_one_device(method, inputs, kwargs)
        else:
            output = self._run_on_devices(must_run, method, inputs, kwargs, measured, is_timed=True)
            now = self._engine.timings()
            if now is not before and [timing.rows for timing in now] == [size for size in sizes if size]:
                timings += now
        timer.forward_ended([tensor for _, tensor in pytree.tensors(output)])
        return output

    @critical
    def _run_on_devices(
        self,
        must_run: bool,
        method: str | None,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        measured: MeasuredShares | None = None,
        is_timed: bool = False,
    ) -> Any:
        status = self._status
        if monotonic() >= status.due:
            self._publish(self._engine.timings())  # of the step before
        status.steps += 1
        verb = self._overridden_verb()
        if verb and (reason := self._engine.why_no_verbs(self.module)):
            raise RuntimeError(f"{type(self).__name__}.{verb} is overridden, and {reason}")
        if verb and self.randomness == _ONE_DEVICE:
            raise RuntimeError(_NO_VERBS.format(name=type(self).__name__, verb=verb))
        if not must_run and (verb or modes_that_stay()):
            return self._run_plain_composition(method, inputs, kwargs)
        try:
            return self._engine.forward(self.module, self._plan(method, inputs, kwargs, measured, is_timed))
        except OneGraphNeededError:
            return self._run_plain_composition(method, inputs, kwargs)
        except ValueError as error:
            if _TOO_FEW_FOR_BATCH_NORM in str(error) and not self.sync_batch_norm:
                error.add_note(_ONE_ROW)
            raise

    def _run_on_one_device(self, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The cost of this is mostly code that is in no cache, so it calls few functions.
        if not torch.compiler.is_compiling():
            status = self._status
            if monotonic() >= status.due:
                self._publish(())
            status.steps += 1
        if self._overrides("scatter"):
            (inputs, *_), (kwargs, *_) = self.scatter(inputs, kwargs, self.device_ids[:1])
        first, inside = self.devices[0], inside_replica()
        device = (self._here() or first) if inside else first
        module: Any = self._modules["module"]
        try:
            output = called(module, method)(
                *[_moved(value, device) for value in inputs],
                **(kwargs and {name: _moved(value, device) for name, value in kwargs.items()}),
            )
        except RuntimeError as error:
            check_have_data("scatter", inputs, "inputs")
            check_have_data("scatter", kwargs, "kwargs")
            named = chain(self.module.named_parameters(), self.module.named_buffers())
            elsewhere = next((name for name, t in named if not _devices.same_device(t.device, device)), None)
            if elsewhere is not None:
                error.add_note(f"{elsewhere!r} is not on {device}, the wrapper's device: model.to('{device}')")
            raise
        return output if inside or self._gather_on == first else _moved(output, self._gather_on)

    def _publish(self, timings: Sequence[ReplicaTiming]) -> None:
        """Let `unisono watch` see the step before this one."""
        self._status.publish(type(self.module).__name__, type(self._engine).__name__, self.devices, timings)

    def _runs_whole(self) -> bool:
        """Return whether batch norm or draws need all rows but the replicas would run one after the other."""
        one_device = self.randomness == _ONE_DEVICE
        if inside_replica():
            return self.sync_batch_norm or one_device or inside_synchronised_replica() or draws_for_whole_batch()
        if (self.sync_batch_norm or one_device) and modes_that_stay():
            log_once(_RUNS_WHOLE.format(option='randomness="one_device"' if one_device else "sync_batch_norm=True"))
            return True
        return False

    def _overrides(self, verb: str) -> bool:
        return verb in self.__dict__ or getattr(type(self), verb) is not getattr(self._has_own_verbs, verb)

    def _overridden_verb(self) -> str | None:
        if type(self) is DataParallel and self.__dict__.keys().isdisjoint(_VERBS):
            return None
        return next(filter(self._overrides, _VERBS), None)

    def _run_plain_composition(self, method: str | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = self._here()
        check_device(self.module, chain(self.module.parameters(), self.module.buffers()), here or self.devices[0])
        if self.sync_batch_norm and self._overrides("parallel_apply"):
            raise RuntimeError(
                "sync_batch_norm=True with a parallel_apply of your own: replicas wait for each other in batch norm, "
                "for ever if yours runs them one after the other. Leave one of the two out."
            )
        # A user's own scatter may find rows where ours sees none.
        own_scatter = self._overrides("scatter")
        plan = None if own_scatter else self._plan(method, inputs, kwargs)
        device_ids = [here or self.device_ids[i] for i in (plan.replica_numbers if plan else range(len(self.devices)))]
        if plan:
            shards, shard_kwargs = zip(
                *scattered(plan.arguments, plan.devices, plan.sizes, plan.replica_numbers), strict=True
            )
        else:
            shards, shard_kwargs = interruptibly(self.scatter, inputs, kwargs, device_ids)
        before = _plain_call.set(plan)
        try:
            with unchanged_on_failure(torch_private.of_one_kind(self.module.buffers())):
                replicas = interruptibly(self.replicate, self.module, device_ids[: len(shards)])
                modules, live_modules = modules_in_common(replicas, self.module)
                registries = buffer_registries(modules)
                calls: Sequence[Any] = [called(replica, method) for replica in replicas]
                if self.sync_batch_norm and len(replicas) > 1:
                    calls = run_synchronised(replicas, calls)
                outputs = interruptibly(self.parallel_apply, calls, shards, shard_kwargs)
                output = interruptibly(self.gather, outputs, here or self.output_device)
            commit_buffers(registries.changes(), modules, live_modules, {})
            return output
        finally:
            _plain_call.reset(before)


DataParallel._has_own_verbs = DataParallel

# The call that the plain composition runs: the verbs in it take the replicas' devices and rows from there.
_plain_call: ContextVar[Call | None] = ContextVar("_plain_call", default=None)


def _seconds(timing: ReplicaTiming, on_host: bool) -> float:
    """Return how long a replica computed; on an accelerator, forward only: backward's time is that of queueing it."""
    return timing.forward_s + timing.backward_s if on_host else timing.forward_s


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors on `device`, each itself if it is there already."""
    if isinstance(value, torch.Tensor):  # the common case, without pytree's cost
        return value if value.device == device else _devices.copy_to(value, device)
    return pytree.map_tensors(lambda tensor: _devices.copy_to(tensor, device), value)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run `module` once on every device: scatter, replicate, parallel_apply and gather, one after the other.

        >>> unisono.data_parallel(torch.nn.Linear(5, 2), torch.zeros(30, 5), ["cpu", "cpu"]).shape
        torch.Size([30, 2])

    This is what `DataParallel` means, in its plainest form; `DataParallel` is the faster one for a training loop.

    Args:
        inputs: the positional inputs: a tuple of them, or the only one; None for none.
        module_kwargs: the keyword inputs.
        module, device_ids, output_device, dim: as in `DataParallel`. Inside a replica of another wrapper the device is
            that replica's.

    Returns:
        The gathered output, linked to inputs and parameters for autograd.

    Raises:
        As the four verbs; RuntimeError for a parameter that is not on the first device.
    """
    _check_arguments(module, dim)
    if not isinstance(inputs, tuple) or batch_type_of(inputs) is not None:
        inputs = () if inputs is None else (inputs,)
    kwargs = check_kwargs(module_kwargs, "module_kwargs")
    devices = _devices.resolve(device_ids)
    if not devices:
        log_once(_NO_ACCELERATOR)
        return module(*inputs, **kwargs)
    wrapper = DataParallel(module, devices, output_device, dim, process_group=False)
    wrapper._most_rows = [math.inf]  # a single call cannot tell a short last batch from a full one
    return wrapper(*inputs, **kwargs) if len(devices) == 1 else wrapper._run_plain_composition(None, inputs, kwargs)


def _check_arguments(module: object, dim: object) -> None:
    _check_is_module(module)
    check_dim(dim)
