"""DataParallel: the one line, and its plain composition `data_parallel`.

ways.py decides how a call is run: by replicas in threads, by the plain composition of the four primitives, on one
device, or as the plain module.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Never, SupportsFloat, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch import nn
from typing_extensions import TypeVar as TypeVarWithDefault  # torch needs it, too

from unisono import ways
from unisono.distributed.bucketed_all_reduce import CommHook
from unisono.distributed.environment import devices_of_process
from unisono.distributed.gradient_sync import GradientSync, checked_weight
from unisono.distributed.launchers import launch
from unisono.distributed.process_group import communicator_for
from unisono.distributed.uneven_inputs import even_batches
from unisono.engines.rank_forward import Ranks
from unisono.engines.step_memory import StepMemory
from unisono.inference.batch_map import OutputIterator
from unisono.inference.map_and_evaluate import evaluate_batches, map_batches
from unisono.inference.metrics import Reduction
from unisono.leftovers.first_steps import FirstSteps
from unisono.options import OF_OTHER_LIBRARIES, LossRule, Options, check_timeout, decided
from unisono.primitives.batch_types import batch_type_of
from unisono.primitives.checks import check_flag, check_kwargs, check_module, check_names, check_word
from unisono.primitives.dims import Scalars, check_dim, warn_if_rows_elsewhere
from unisono.primitives.gather import gathered
from unisono.primitives.output_rows import ROWS
from unisono.primitives.parallel_apply import parallel_apply
from unisono.primitives.replicate import replicate
from unisono.primitives.split_sizes import IdleDevices, Shares
from unisono.profiling.profile import Profile
from unisono.runtime import devices as _devices
from unisono.runtime import timeline
from unisono.runtime.contexts import contextmanager
from unisono.runtime.devices import DeviceIds, DeviceLike
from unisono.runtime.errors import log_once
from unisono.runtime.interrupts import critical
from unisono.runtime.timeline import ReplicaTiming
from unisono.runtime.tracebacks import leave_out_own_frames, without_own_frames
from unisono.runtime.unequal_devices import warn_if_unequal
from unisono.wrapper import Wrapper, accept_clean_names, of_wrapper

M = TypeVarWithDefault("M", bound=nn.Module, default=Any)
B = TypeVar("B")
Out = TypeVar("Out")
_NO_RESCUE = "rescue=True does nothing with one device ({device}), where the plain module runs: give parts=2, or more"
_NO_GRAPHS = "graphs=True does nothing on {device}: graphs of kernels are for accelerators"


class DataParallel(Wrapper, nn.DataParallel[M]):
    """Run a module on every device of the machine, each on its share of the batch, with the results of one device.

        >>> model = torch.nn.Linear(5, 2)
        >>> model = unisono.DataParallel(model, device_ids=["cpu", "cpu"])
        >>> output = model(torch.zeros(30, 5))  # two replicas, 15 rows each, forward and backward at once
        >>> output.shape
        torch.Size([30, 2])

    With GPUs: `model = unisono.DataParallel(model.to("cuda"))`.

    Everything else of a training script stays as it is. Gradients arrive in the module's own parameters, summed over
    the replicas; outputs are in the order of the inputs. For a module whose rows do not interact, outputs and
    gradients are the plain module's within float rounding; where rows do interact (batch normalisation in training),
    each replica sees its own rows only, as in `torch.nn.DataParallel`. With `sync_batch_norm=True` batch norm sees the
    whole batch, and the numbers are the plain module's again. What forward writes into parameters is kept if all
    replicas write the same; else it is an error.

    Args:
        module: the model; with two or more devices, its parameters and buffers are on the first one.
        device_ids: one device a replica: accelerator indices, strings or `torch.device`s; `["cpu"] * 4` is four
            replicas on the CPU, and a device may be named twice. None: every accelerator. On a machine without
            accelerators None, an empty list and indices mean the plain module; a name such as "cuda:0" is an error.
        output_device: where outputs are gathered; None: the first device.
        dim: the axis of the rows, in every input and output tensor that is not 0-dim.
        shares: how many rows each replica gets. "chunk": ceil(rows / n) each, torch's rule; "even": differing by one
            row at most; or one weight a device, where 0 leaves a device idle. "measured": the fastest ones. Some tens
            of steps try a few, one device alone among them; then the fastest are kept, logged with the line to write
            instead, and `model.shares` is what was chosen. See docs/shares.md.
        parts: in how many parts each replica runs its shard, each computed once more in backward, so that only one
            part's activations are in memory. For a loss over the whole batch that does not fit, and no batch norm in
            training; the same numbers within float rounding. `rescue=True` finds the number by itself.
        rescue: whether a step in which a replica runs out of memory is run again with that replica's shard in parts,
            each computed once more in backward, so that only one part's activations are in memory. Gradients are the
            same within float rounding. How many rows fit is logged and remembered. On one device, where the plain
            module runs, it does nothing: give `parts`.
        graphs: whether each replica's forward and backward are captured as graphs of kernels (CUDA graphs) after the
            first steps of a kind, and launched as such: a step of many small kernels then costs the host little. What
            forward decides by numbers in tensors, or takes from outside, stays as it was captured. What cannot be
            captured runs as without graphs, and is logged once. See docs/graphs.md.
        timeout: after how many seconds without progress a wait for a replica ends in `ReplicaTimeout`, which has the
            Python stack of the stuck replica; progress is any part of its work that a replica has finished.
            None: never. Choose more than the whole forward, or backward, of the slowest replica can take. The first
            replica runs in the calling thread: where it is stuck itself, nothing is raised. If the wrapper makes the
            process group, it is the group's timeout too; None: torch's, half an hour.
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
            batch norm, forward and backward; where they do not all call the same ones, an error says so. Each
            accelerator can have one replica only. False: each one's own rows. None: the same, with a warning in the
            first step with a batch norm in training, because the numbers are not those of one device.
        process_group: which processes train the model together, where a launcher such as torchrun has started several.
            None: all of them, or this one alone if there is no launcher and no default process group; a
            `torch.distributed.ProcessGroup`: those in it; False: this one alone.
        loss: what each process's own loss is over its rows, "mean" or "sum", where several train together.

    Under a launcher the same line joins the processes. Each has its own device (that of its LOCAL_RANK; or several,
    named in `device_ids`) and its own batches; parameters and buffers begin as those of rank 0, and gradients are those
    of one device over all processes' rows, whatever each one's batch size. Buckets of gradients are summed over the
    processes while backward still runs. Forwards without gradients stay in their process; with `sync_batch_norm=True`
    those in training mode exchange batch norm's statistics, so every process calls them.

    `dim`, `shares`, `parts`, `rescue`, `graphs`, `timeout`, `scalars`, `in_dims`, `out_dims` and `sync_batch_norm` can
    be assigned between steps: `model.shares = [2, 1]`. Attributes that only the module has are read from it and
    assigned to it: `model.config`.

    Attributes:
        module (nn.Module): your module, with the parameters that are trained.
        devices (list[torch.device]): the device of each replica; empty where the plain module runs.
        device_ids (list[int | torch.device]): the same as torch has it: indices for accelerators; `[]` where the plain
            module runs.
        output_device (int | torch.device | None): in the same form; None where the plain module runs.
        replica_timings: what each replica did in the last step.
        spans_processes: whether several processes train the module together.

    Raises:
        TypeError, ValueError: arguments that cannot be used, with what was expected.
        RuntimeError: launcher's variables that are incomplete; processes that do not come, or whose models differ.
    """

    module: M
    devices: list[torch.device]
    device_ids: list[int | torch.device]  # type: ignore[assignment]  # torch's are ints, on accelerators only
    output_device: int | torch.device | None  # type: ignore[assignment]
    shares: Shares
    parts: int
    rescue: bool
    graphs: bool
    timeout: float | None
    scalars: Scalars
    in_dims: Any
    out_dims: Any
    sync_batch_norm: bool | None

    _option_names: ClassVar[frozenset[str]] = Options.names
    _says_names_of_both: ClassVar[bool] = True

    @without_own_frames
    def __init__(
        self,
        module: M,
        device_ids: DeviceIds | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        shares: Shares = "chunk",
        parts: int = 1,
        rescue: bool = False,
        graphs: bool = False,
        timeout: float | None = None,
        scalars: Scalars = "stack",
        in_dims: Any = ...,
        out_dims: Any = ...,
        sync_batch_norm: bool | None = None,
        process_group: Any = None,
        loss: LossRule = "mean",
        **unknown: Never,
    ) -> None:
        check_names(unknown, ARGUMENTS, "DataParallel", OF_OTHER_LIBRARIES)
        nn.Module.__init__(self)  # not that of torch.nn.DataParallel, which knows GPUs only
        check_module(module, "module")
        check_word(("mean", "sum"), loss, "loss")
        communicator = communicator_for(process_group, check_timeout(timeout))
        is_launched = communicator is not None or (process_group is None and launch() is not None)
        devices = (devices_of_process if is_launched else _devices.resolve)(device_ids)
        self._options = Options(
            devices,
            dim=dim,
            scalars=scalars,
            in_dims=in_dims,
            out_dims=out_dims,
            output_device=_devices.resolve_output(output_device, devices) if devices else output_device,
            shares=shares,
            parts=parts,
            rescue=rescue,
            graphs=graphs,
            timeout=timeout,
            sync_batch_norm=sync_batch_norm,
        )
        self._show_torchs_attributes()
        self._step_memory, self._idle_devices = StepMemory(), IdleDevices()
        self._ranks = self._profile = None
        self.register_load_state_dict_pre_hook(accept_clean_names)  # type: ignore[no-untyped-call]
        if devices:
            self.src_device_obj = devices[0]  # torch's, for code that reads it off a wrapper
        self.module = module  # the last one: from here on, what is assigned and only the module has is the module's
        if self._says_names_of_both:
            self._say_names_of_both()
        if not devices:
            log_once(ways.NO_ACCELERATOR)
        elif len(devices) == 1:
            module.to(devices[0])
            if rescue and communicator is None:
                log_once(_NO_RESCUE.format(device=devices[0]))
            if graphs and not self._options.accelerators:
                log_once(_NO_GRAPHS.format(device=devices[0]))
        if communicator is not None:
            gradient_sync = GradientSync(communicator, devices[0], loss)
            gradient_sync.sync_module_states(module)
            self._ranks = Ranks(gradient_sync, devices)
        if len(devices) > 1:
            warn_if_unequal(devices)
            if warn_if_rows_elsewhere(module, dim, out_dims):
                self._step_memory.warnings.leave_out(ROWS)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            check_module(value, "module")
            if self._is_made() and self.spans_processes:
                raise decided("module", value, "DataParallel(module)")
        Wrapper.__setattr__(self, name, value)
        if name == "graphs" and self._is_made():
            self._step_memory.refresh()  # gives the memory of graphs back

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
            ReplicaTimeout: a replica that has made no progress for `timeout`.
            BaseException: what a replica raised, the same object, with a note that names the replica. Its traceback
                has the frames of the module, without unisono's, unless the environment has UNISONO_TRACEBACK=full.
        """
        try:
            return (ways.run_recorded if timeline.recording else ways.run)(self, None, inputs, kwargs)
        except BaseException as error:
            leave_out_own_frames(error)
            raise

    @of_wrapper
    def call(self, method: str, /, *inputs: Any, **kwargs: Any) -> Any:
        """Call another method of the module on every device, its inputs scattered and outputs gathered as forward's.

            >>> model = torch.nn.AdaptiveLogSoftmaxWithLoss(5, 4, cutoffs=[2])
            >>> unisono.DataParallel(model, ["cpu", "cpu"]).call("predict", torch.zeros(6, 5)).shape
            torch.Size([6])

        `model.generate(x)` reads the method off the module and runs it in one place; `model.call("generate", x)` runs
        it on every device. `in_dims`, `out_dims` and `scalars` hold for it too; a method that needs others, or none, is
        called through another wrapper of the same module.

        Raises:
            AttributeError: the module has no such method. Else as forward.
        """
        ways.check_method(self.module, method)
        return (ways.run_recorded if timeline.recording else ways.run)(self, method, inputs, kwargs)

    @overload
    def map(
        self,
        batches: Iterable[Any],
        *,
        method: str | None = None,
        batch_size: int | None = None,
        out: None = None,
        progress: bool = False,
    ) -> OutputIterator: ...
    @overload
    def map(
        self,
        batches: Iterable[Any],
        *,
        method: str | None = None,
        batch_size: int | None = None,
        out: Out,
        progress: bool = False,
    ) -> Out: ...
    @of_wrapper
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
                be stacked, tensors of different lengths say, becomes a `SampleList`.
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
            ReplicaTimeout: the replica that has the batch has made no progress for `timeout`. `next()` goes on without
                it.

        Under a launcher every process is given the same batches and computes its part of them. The first process gets
        all outputs; the others get none, and help until it has all. There an error ends the iteration in all of them.
        """
        callee = ways.whole_batches(self, method)
        return map_batches(callee, batches, batch_size, out, check_flag(progress, "progress"))

    @overload
    def evaluate(
        self,
        batches: Iterable[Any],
        metric: Callable[[Any, Any], SupportsFloat],
        *,
        method: str | None = None,
        batch_size: int | None = None,
        reduction: Reduction = "mean",
        progress: bool = False,
    ) -> float: ...
    @overload
    def evaluate(
        self,
        batches: Iterable[Any],
        metric: Callable[[Any, Any], Mapping[str, SupportsFloat]],
        *,
        method: str | None = None,
        batch_size: int | None = None,
        reduction: Reduction | Mapping[str, Reduction] = "mean",
        progress: bool = False,
    ) -> dict[str, float]: ...
    @of_wrapper
    def evaluate(
        self,
        batches: Iterable[Any],
        metric: Callable[[Any, Any], Any],
        *,
        method: str | None = None,
        batch_size: int | None = None,
        reduction: Reduction | Mapping[str, Reduction] = "mean",
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
        callee = ways.whole_batches(self, method)
        return evaluate_batches(callee, batches, metric, batch_size, reduction, check_flag(progress, "progress"))

    def _gradient_sync(self) -> GradientSync | None:
        """Return what sums the gradients over several processes; None where this process trains alone."""
        return self._ranks.gradient_sync(self.module) if self._ranks is not None else None

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]) -> Any:
        """Split the inputs of a call for `device_ids`; override it, and forward uses yours.

            >>> class Loud(unisono.DataParallel):
            ...     def scatter(self, inputs, kwargs, device_ids):
            ...         shards, shard_kwargs = super().scatter(inputs, kwargs, device_ids)
            ...         print([x.shape[0] for (x,) in shards], "rows")
            ...         return shards, shard_kwargs
            >>> output = Loud(torch.nn.Linear(5, 2), ["cpu", "cpu"])(torch.zeros(30, 5))
            [15, 15] rows

        A wrapper that overrides one runs the four primitives one after the other, as `data_parallel` does: slower.

        Returns:
            Two sequences with one entry a shard: tuples of positional inputs, and dicts of keyword inputs.
        """
        devices = _devices.resolve_each(device_ids, "device_ids")
        shards = ways.shards_for(self, tuple(inputs), kwargs or {}, devices)
        return [args for args, _ in shards], [kw for _, kw in shards]

    def replicate(self, module: M, device_ids: Sequence[DeviceLike]) -> list[M]:
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
        plan = ways.plan_of_verbs.get()
        devices = plan.devices if plan is not None and len(plan.devices) == len(replicas) else None
        return parallel_apply(replicas, inputs, kwargs, devices)

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """Join the replicas' outputs; override it, and forward uses yours, as with `scatter`.

        >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
        >>> model.gather([torch.zeros(15, 2), torch.zeros(15, 2)], "cpu").shape
        torch.Size([30, 2])
        """
        plan = ways.plan_of_verbs.get()
        rules, sizes = (
            (plan.rules, plan.sizes) if plan is not None else (self._options.rules(self._step_memory.warnings), None)
        )
        live_of = ways.live_tensors_of_verbs.get()
        live_of = live_of if len(live_of) == len(outputs) else ()
        return gathered(outputs, _devices.resolve_output(output_device, ()), rules, sizes, live_of)

    @of_wrapper
    def refresh(self) -> None:
        """Have the next forward take the whole module anew, after a change that cannot be seen.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> model.refresh()

        Attributes, flags, hooks, children, parameters and plain containers that change are seen by themselves, and so
        is what they refer to. This also frees the memory of parameters that the module no longer has.
        """
        critical(self._step_memory.refresh)()

    @of_wrapper
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
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
        return contextlib.nullcontext() if gradient_sync is None else gradient_sync.no_sync()

    @of_wrapper
    def batches(self, loader: Iterable[B]) -> Iterator[B]:
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
        return even_batches(communicator, loader, self.dim, next(iter(self._options.devices), torch.device("cpu")))

    @of_wrapper
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

    @of_wrapper
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
        number = checked_weight(weight)
        gradient_sync = self._gradient_sync()
        if gradient_sync is not None:
            gradient_sync.next_weight = number

    def extra_repr(self) -> str:
        """Return what `repr(model)` says beside the module: the devices, and on several how rows are shared.

        >>> unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"], sync_batch_norm=True).extra_repr()
        "devices=[cpu, cpu], shares='chunk', sync_batch_norm=True"
        """
        options = self._options
        if not options.devices:
            return "devices=[]: no accelerator, so the plain module runs"
        devices = f"devices=[{', '.join(map(str, options.devices))}]"
        if len(options.devices) == 1:
            return devices
        return f"{devices}, shares={options.shares!r}, sync_batch_norm={options.sync_batch_norm}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Do what `half`, `to` and their like do; replicas refer no longer to the memory that this replaces."""
        self._step_memory.refresh()
        return nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]

    @property
    def spans_processes(self) -> bool:
        """Whether several processes train the module together, as under torchrun.

        >>> unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"]).spans_processes
        False
        """
        return self._ranks is not None and self._ranks.train_together

    @property
    def replica_timings(self) -> list[ReplicaTiming]:
        """What each replica did in the last step: device, rows, seconds forward and backward.

            >>> model = unisono.DataParallel(torch.nn.Linear(5, 2), ["cpu", "cpu"])
            >>> output = model(torch.zeros(31, 5))
            >>> [timing.rows for timing in model.replica_timings]
            [16, 15]

        Empty before the first step, where the plain module runs, and with overridden primitives.
        """
        return self._step_memory.timings

    @of_wrapper
    @contextmanager
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
        `map`, `evaluate` and steps on one device are not profiled: `torch.profiler` shows these.

        Raises:
            RuntimeError: the model is being profiled already.
        """
        if self._profile is not None:
            raise RuntimeError("this model is already being profiled: use that profile, or leave its block first")
        gradient_sync = self._gradient_sync()
        rank = gradient_sync.communicator.rank if gradient_sync is not None else 0
        profile = self._profile = Profile(type(self.module).__name__, rank)
        try:
            with profile.recording():
                yield profile
        finally:
            self._profile = None


DataParallel._class_of_verbs = DataParallel


class _OfOneCall(DataParallel):
    """The wrapper of one call of `data_parallel`; no program reads its attributes."""

    _says_names_of_both = False


def argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of a function or class, without those that it only refuses."""
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind is not p.VAR_KEYWORD]


ARGUMENTS = argument_names(DataParallel)
# What to say of arguments that a function does not have, and other libraries or `DataParallel` have.
ELSEWHERE = dict.fromkeys(ARGUMENTS, "unisono.DataParallel has it") | OF_OTHER_LIBRARIES
# Of modules that were run by `data_parallel`, which makes a wrapper for each call.
_first_steps_of: WeakKeyDictionary[nn.Module, FirstSteps] = WeakKeyDictionary()


def inputs_of(inputs: Any) -> tuple[Any, ...]:
    """Return the positional inputs that `data_parallel` is given: a tuple of them, the only one, or None."""
    if isinstance(inputs, tuple) and batch_type_of(inputs) is None:
        return inputs
    return () if inputs is None else (inputs,)


@without_own_frames
def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: DeviceIds | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    *,
    sync_batch_norm: bool | None = None,
    **unknown: Never,
) -> Any:
    """Run `module` once on every device: scatter, replicate, parallel_apply and gather, one after the other.

        >>> unisono.data_parallel(torch.nn.Linear(5, 2), torch.zeros(30, 5), ["cpu", "cpu"]).shape
        torch.Size([30, 2])

    This is what `DataParallel` means, in its plainest form; `DataParallel` is the faster one for a training loop.

    Args:
        inputs: the positional inputs: a tuple of them, or the only one; None for none.
        module_kwargs: the keyword inputs.
        module, device_ids, output_device, dim, sync_batch_norm: as in `DataParallel`. Inside a replica of another
            wrapper the device is that replica's.

    Returns:
        The gathered output, linked to inputs and parameters for autograd.

    Raises:
        RuntimeError: a parameter that is not on the first device. Else as the four primitives.
    """
    check_names(unknown, argument_names(data_parallel), "data_parallel", ELSEWHERE)
    check_module(module, "module")
    check_dim(dim)
    inputs = inputs_of(inputs)
    kwargs = check_kwargs(module_kwargs, "module_kwargs")
    devices = _devices.resolve(device_ids)
    if not devices:
        log_once(ways.NO_ACCELERATOR)
        return module(*inputs, **kwargs)
    wrapper = _OfOneCall(module, devices, output_device, dim, sync_batch_norm=sync_batch_norm, process_group=False)
    memory = wrapper._step_memory
    memory.first_steps = _first_steps_of.setdefault(module, memory.first_steps)
    wrapper._idle_devices.say_nothing()  # a single call cannot tell a short last batch from a full one
    if sync_batch_norm:  # replicas wait for each other: in one graph they could not
        return ways.run(wrapper, None, inputs, kwargs)
    way = ways.on_one_device if len(devices) == 1 else ways.plain_composition
    return way(wrapper, None, inputs, kwargs)
