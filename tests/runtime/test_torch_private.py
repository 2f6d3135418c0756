"""Every private call of torch: its result in each situation, and its fallback where a torch lacks it."""

import contextlib
import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from helpers.modules import PassingMode
from unisono.runtime import torch_private
from unisono.runtime.stand_ins import StandIns


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def lacking(owner: Any, *names: str) -> Iterator[None]:
    """A release of torch that has no such things."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delattr(owner, name, raising=False)
        yield


def keep_flags() -> None:
    torch_private.clear_dispatch_mode_flags(torch_private.dispatch_mode_flags())


without_hooks: Any = SimpleNamespace(register_hook=lambda _: SimpleNamespace(remove=lambda: None))

FALLBACKS: list[tuple[Any, str, Callable[[], Any], Any]] = [
    (torch._C._autograd, "_get_current_graph_task_keep_graph", torch_private.backward_keeps_graph, True),
    (torch._C, "_will_engine_execute_node", lambda: torch_private.backward_reaches(None), True),
    (torch._C, "_will_engine_execute_node", lambda: torch_private.backward_runs(None), True),
    (torch.autograd, "_is_checkpoint_valid", torch_private.backward_is_restricted, False),
    (torch.utils.checkpoint, "_StopRecomputationError", lambda: torch_private.stops_recomputation(Exception()), False),
    (torch._C, "_functorch", lambda: torch_private.is_batched(torch.ones(3)), False),
    (torch._C, "_functorch", lambda: torch_private.is_of_transform(torch.ones(3)), False),
    (torch._C, "_get_dispatch_mode", torch_private.is_tracing, False),
    (torch._C, "_is_tracing", torch_private.has_tracer, False),
    (torch._C, "_is_tracing", torch_private.traces_with_jit, False),
    (torch.utils._python_dispatch, "_is_in_torch_dispatch_mode", keep_flags, None),
    (SimpleNamespace, "_backward_hooks", lambda: torch_private.skip_hooks_without_gradient([SimpleNamespace()]), None),
    (SimpleNamespace, "_backward_hooks", lambda: bool(torch_private.hooks_of(without_hooks)), True),
    (torch.utils.checkpoint, "check_backward_validity", lambda: len(torch_private.checkpoints_noted()) == 1, True),
    (torch._dynamo, "mark_static_address", lambda: torch_private.mark_static([torch.ones(2)]), None),
    (torch.utils._pytree, "SUPPORTED_NODES", lambda: torch_private.flatten_registered([1, 2]), None),
    (nn.utils.parametrize, "_cache_enabled", torch_private.parametrizations_not_cached().__enter__, None),
]


@pytest.mark.parametrize(("owner", "name", "call", "expected"), FALLBACKS)
def test_what_a_release_of_torch_lacks(owner: Any, name: str, call: Callable[[], Any], expected: Any) -> None:
    """What these do where torch has what they need is shown where they are used."""
    with lacking(owner, name):
        assert call() is expected


hooks, no_hooks = partial(saved_tensors_hooks, id, id), partial(disable_saved_tensors_hooks, "no hooks here")
in_checkpoint = partial(torch.utils.checkpoint._checkpoint_hook, SimpleNamespace(unpack_error_cb=None))
GET_DISABLED = "_saved_tensors_hooks_get_disabled_error_message"


@pytest.mark.parametrize(
    ("question", "active", "owner", "name"),
    [
        (torch_private.has_dispatch_modes, PassingMode, torch._C, "_len_torch_dispatch_stack"),
        (torch_private.has_transforms, forward_ad.dual_level, torch._C._functorch, "maybe_current_level"),
        (torch_private.function_modes, FunctionMode, torch._C, "_len_torch_function_stack"),
        (torch_private.function_modes, FunctionMode, torch.overrides, "_get_current_function_mode_stack"),
        (torch_private.default_device, lambda: torch.device("meta"), torch.utils._device, "DeviceContext"),
        (torch_private.has_saved_tensor_hooks, hooks, torch._C._autograd, "_top_saved_tensors_default_hooks"),
        (torch_private.has_checkpoint_hooks, in_checkpoint, torch._C._autograd, "_top_saved_tensors_default_hooks"),
        (torch_private.saved_tensor_hooks_disabled, no_hooks, torch._C._autograd, GET_DISABLED),
    ],
)
def test_what_is_active_in_a_thread(question: Callable[[], Any], active: Any, owner: Any, name: str) -> None:
    """R14: nothing, where this torch cannot tell."""
    nothing = question()
    assert nothing in (False, None, [])
    with active():
        assert question()
        with lacking(owner, name):
            assert question() == nothing
    assert question() == nothing


def test_checkpoints_that_older_releases_leave_open() -> None:
    """R13, F1: those around an error, and around the errors that led to it, are ended, even by another error."""

    def opened():
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            try:
                yield
            finally:
                raise KeyError("at the end of a checkpoint")

    def checkpoint(function):
        generator = opened()
        next(generator)
        function()

    def fails() -> None:
        raise ValueError("in forward")

    def raises_another() -> None:
        try:
            older(lambda: older(fails))
        except ValueError as error:
            raise RuntimeError("and so") from error

    older = FunctionType(checkpoint.__code__, {"__name__": "torch.utils.checkpoint"}, closure=checkpoint.__closure__)
    with pytest.raises(RuntimeError, match="and so") as raised:
        older(raises_another)
    assert torch_private.has_saved_tensor_hooks()
    torch_private.end_checkpoints(raised.value)
    assert not torch_private.has_saved_tensor_hooks()


@pytest.mark.parametrize("reentrant", [True, False])
def test_random_states_that_a_checkpoint_keeps(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R13, N6: those of other accelerators are added once, to the innermost checkpoint; elsewhere nothing happens."""
    asked: list[torch.device] = []
    restored: list[int] = []
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.utils.checkpoint.DefaultDeviceType, "_default_device_type", "cuda")
    monkeypatch.setattr(torch.utils.checkpoint, "get_device_states", lambda *_: ([0], ["state of the inputs' device"]))
    monkeypatch.setattr(torch.utils.checkpoint, "set_device_states", lambda indices, *_, **__: restored.extend(indices))
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: contextlib.nullcontext())

    def add() -> None:
        torch_private.add_to_checkpoint(gpus, lambda device: asked.append(device) or torch.zeros(1))

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            add()
        return x.sin()

    add()
    with lacking(torch.utils.checkpoint, "CheckpointFunction"), torch.no_grad():
        add()
    assert asked == []
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert asked == gpus[1:]
    assert restored == [0, 1]


def test_the_innermost_default_device() -> None:
    """R14: whatever else is active."""
    with torch.device("cpu"), torch.device("meta"), FunctionMode() as mode:
        assert torch_private.default_device() == torch.device("meta")
        assert torch_private.function_modes()[2:] == [mode]
        assert not torch_private.is_default_device(mode)


@pytest.mark.parametrize("lacks", [False, True])
def test_the_order_in_which_nodes_run(monkeypatch: pytest.MonkeyPatch, lacks: bool) -> None:
    """N1: the highest number first; where torch cannot be told, the last one that was made."""
    leaf, order = torch.ones((), requires_grad=True), list[int]()

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
            ctx.number = number
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            order.append(ctx.number)
            return grad, None

    if lacks:
        monkeypatch.setattr(torch_private, "_numbers_nodes", False)
    results = [Noting.apply(leaf, number) for number in range(3)]
    for result, number in zip(results, (1, 3, 2), strict=True):
        torch_private.run_first(result.grad_fn, (1 << 62) + number)
    torch.autograd.backward(results)
    assert order == ([2, 1, 0] if lacks else [1, 2, 0])


def test_sequence_numbers() -> None:
    """They grow with each node that the thread makes, with gradients on or off; 0 where torch does not tell."""
    with torch.no_grad():
        before = torch_private.sequence_number()
    node: Any = torch.ones(2, requires_grad=True).exp().grad_fn
    assert before == node._sequence_nr() == torch_private.sequence_number() - 1
    with lacking(torch.autograd, "_get_sequence_nr"):
        assert torch_private.sequence_number() == 0


def test_batch_norms_in_a_graph() -> None:
    """N5: those by the statistics of several rows. A node without its metadata is taken for one."""
    x = torch.randn(4, 3, 5, requires_grad=True)
    norm = torch.nn.functional.batch_norm(x, None, None, training=True).grad_fn
    fixed = torch.nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3)).grad_fn
    of_each_row: Any = torch.nn.functional.instance_norm(x).grad_fn
    nodes = [norm, fixed, of_each_row.next_functions[0][0], x.exp().grad_fn]
    assert [torch_private.is_batch_norm_in_training(node) for node in nodes] == [True, False, False, False]
    unknown = SimpleNamespace(name=lambda: "NativeBatchNormBackward0")
    assert not torch_private.is_batch_norm_in_training(unknown)
    unknown._saved_training = True
    assert torch_private.is_batch_norm_in_training(unknown)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_batch_norms_in_a_script() -> None:
    scripts = [*map(torch.jit.script, (nn.Sequential(nn.BatchNorm1d(2), nn.Tanh()), nn.Tanh()))]
    scripts.append(torch.jit.trace(nn.BatchNorm1d(2).eval(), torch.zeros(3, 2)))
    assert [*map(torch_private.batch_norms_in_script, scripts)] == [[None], [], [False]]
    assert torch_private.batch_norms_in_script(nn.Tanh()) == [None], "what torch lacks is not known"


def test_an_exchange() -> None:
    """R15: what a graph has saved stays valid, and nothing counts as a write."""
    one, other = nn.Parameter(torch.ones(2)), torch.zeros(2)
    one.label = "a"  # type: ignore[attr-defined]
    saved = one * one
    torch_private.exchange(one, other)
    assert (type(one), vars(one), one.tolist(), one.requires_grad) == (nn.Parameter, {"label": "a"}, [0, 0], False)
    assert (type(other), other.tolist(), other._version) == (torch.Tensor, [1, 1], 0)
    saved.sum().backward()
    assert other.grad is not None
    assert other.grad.tolist() == [2, 2]
    with lacking(torch._C, "_swap_tensor_impl"), pytest.raises(RuntimeError, match="Call it before forward"):
        torch_private.exchange(one, other)


@pytest.mark.parametrize("lacks", ["nothing", "the removal", "all"])
def test_what_the_nodes_of_a_backward_see(lacks: str) -> None:
    """N1: what the block around the backward has been given, and nothing after it; blocks may be inside each other."""
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append({**torch_private.seen_in_backward()}))

    def backward() -> None:
        torch_private.run_backward([x.sum()], [torch.ones(())], keep=False)

    with pytest.MonkeyPatch.context() as patch:
        if lacks != "nothing":
            run = torch.autograd.Variable._execution_engine.run_backward
            patch.setattr(torch.autograd.graph, "_engine_run_backward", run)
            names = ["_stash_obj_in_tls", "_get_obj_in_tls", "_is_key_in_tls"] if lacks == "all" else []
            for name in [*names, "_remove_obj_from_tls"]:
                patch.delattr(torch._C, name, raising=False)
        with torch_private.seen_by_backward({1: "outer", 2: "outer"}):
            with torch_private.seen_by_backward({2: "inner"}):
                backward()
            backward()
        backward()
    assert seen == [{1: "outer", 2: "inner"}, {1: "outer", 2: "outer"}, {}]


@pytest.mark.parametrize("lacks", [False, True])
def test_hooks_without_a_gradient(lacks: bool) -> None:
    """N4: they are not called in this backward, and are in the next one; where torch lacks the dicts, always."""
    called: list[str] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, gives: bool) -> torch.Tensor:
            ctx.gives = gives
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            if not ctx.gives:
                torch_private.skip_hooks_without_gradient([SimpleNamespace() if lacks else leaf])
            return grad if ctx.gives else None, None

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(torch.utils.hooks.unserializable_hook(lambda grad: called.append("tensor")))
    leaf.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    for gives in (False, True, False, True):
        Node.apply(leaf, gives).sum().backward()
        expected = ["tensor", "accumulated"] if gives or lacks else []
        assert called == expected, gives
        called.clear()
    torch.utils.hooks.warn_if_has_hooks(leaf)  # when it is saved: the hook's own mark says that it need not be


@pytest.mark.parametrize("lacks", [False, True], ids=["one call", "one by one"])
def test_many_tensors_in_one_call(lacks: bool) -> None:
    """R5: clones keep values, strides and classes, and share nothing."""
    tensors = [torch.rand(3), torch.tensor(5), torch.rand(2, 3).t(), torch.zeros(0), torch.rand(2, 2).to_sparse()]
    targets, parts = [torch.ones(2), torch.ones(2, 3)], [torch.tensor([[1, 2], [3, 4]]).t(), torch.tensor(5)]
    with lacking(torch, *["_foreach_clone", "_foreach_add_", "_foreach_copy_"] * lacks):
        for given in (tensors, [*tensors, nn.Parameter(torch.rand(2))], []):
            for copy, tensor in zip(torch_private.clones(given), given, strict=True):
                torch.testing.assert_close(copy, tensor)
                assert copy is not tensor
                assert copy.layout != torch.strided or copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
                assert copy.layout != torch.strided or copy.stride() == tensor.stride()
        torch_private.add_all_in_place(targets, [torch.ones(2), torch.full((2, 3), 4.0)])
        assert [target.sum().item() for target in targets] == [4.0, 30.0]
        torch_private.copy_all_in_place(targets, [torch.zeros(2), torch.full((2, 3), 2.0)])
        assert [target.sum().item() for target in targets] == [0.0, 12.0]
        torch_private.add_all_in_place([], [])
        torch_private.copy_all_in_place([], [])
    with lacking(torch._C._nn, *["flatten_dense_tensors"] * lacks):
        assert torch_private.flattened([*parts, torch.empty(0, dtype=int)]).tolist() == [1, 3, 2, 4, 5]


@pytest.mark.parametrize("way", ["engine", "no stash", "no engine", "mode"])
def test_backward_and_gradients(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do what torch's functions do."""
    if way == "no stash":
        monkeypatch.delattr(torch._C, "_remove_obj_from_tls", raising=False)
        run = torch.autograd.Variable._execution_engine.run_backward  # around which such a release does less
        monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", run)
    if way == "no engine":
        monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", None)  # torch's functions have it by then
    a, b, unused = (torch.linspace(1, 2, 3).requires_grad_() for _ in range(3))
    ends, grads = [a * b, (a * a).sum()], [torch.tensor([1.0, 2.0, 3.0]), torch.tensor(2.0)]
    expected = torch.tensor([1.0, 2.0, 3.0]) * b.detach() + 4 * a.detach()
    with torch.device("cpu") if way == "mode" else contextlib.nullcontext():
        found = torch_private.gradients(ends, [a, unused], grads, create_graph=True)
        assert found[1] is None
        torch.testing.assert_close(found[0], expected)
        (second,) = torch_private.gradients(found[:1], [a], [torch.ones(3)], keep=True)
        torch.testing.assert_close(second, torch.full((3,), 4.0))
        torch_private.run_backward(ends, grads, keep=True)
        torch_private.run_backward(ends, grads, keep=False)
        torch.testing.assert_close(a.grad, 2 * expected)
        with pytest.raises(RuntimeError, match="second time"):
            torch_private.run_backward(ends, grads, keep=False)
        with pytest.raises(RuntimeError, match="shape"):
            torch_private.run_backward([a * b], [torch.ones(2)], keep=False)


@pytest.mark.parametrize(
    ("load", "module"),
    [
        (torch_private._import_what_backward_imports.__wrapped__, "torch.fx.experimental.symbolic_shapes"),
        (torch_private.load_checkpoints, "torch._dynamo"),
    ],
)
def test_what_torch_would_import_later(monkeypatch: pytest.MonkeyPatch, load: Callable[[], None], module: str) -> None:
    """F3, F11: it is there afterwards; where torch has no such module, nothing happens."""
    load()
    assert module in sys.modules
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    load()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch._C, "_parse_dispatch_key"),
        (torch._C, "_IncludeDispatchKeyGuard"),
        (torch._ops, "_higher_order_ops"),
        (torch._ops, "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS"),
    ],
)
def test_catch_operations_where_torch_lacks_it(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """N6: nothing is caught, and nothing is installed."""
    if owner is not torch._C:  # once installed in this process, the key is taken
        monkeypatch.setattr(torch._C, "_dispatch_has_backend_fallback", lambda key: False)
    monkeypatch.delattr(owner, name)
    monkeypatch.setattr(torch.library, "Library", None)
    assert torch_private.catch_operations({}) is None


def test_a_generator_that_is_looked_up() -> None:
    """N6: torch's functions act on the generator that is looked up at each call, and return what it returns."""
    own = torch.Generator()
    generator = torch_private.GeneratorOfThread(lambda: own)
    assert isinstance(generator, torch.Generator)
    assert torch_private.is_default_generator(generator)
    assert generator.manual_seed(3) is own
    assert generator.initial_seed() == own.initial_seed() == 3
    generator.set_state(torch.Generator().manual_seed(4).get_state())
    assert torch.equal(generator.get_state(), own.get_state())
    copied = deepcopy(generator)
    assert type(copied) is torch.Generator
    assert torch.equal(copied.get_state(), own.get_state())


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the call for every accelerator, else by CUDA's, else none that is known of."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (device.index, 9), raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device.index + 1, 9))
    for owner, name, expected in ((torch.accelerator, "get_memory_info", 5), (torch.cuda, "mem_get_info", 6)):
        assert torch_private.free_memory_bytes(torch.device("cuda", 5)) == expected
        monkeypatch.delattr(owner, name)
    assert torch_private.free_memory_bytes(torch.device("cuda", 5)) == 0


@pytest.mark.parametrize(
    ("mode", "replays"), [(None, False), ("max-autotune-no-cudagraphs", False), ("reduce-overhead", True)]
)
def test_what_torch_compile_makes_with_cuda_graphs(mode: str | None, replays: bool) -> None:
    """R13: known without compiling anything."""
    assert torch_private.replays_cuda_graphs(torch.compile(lambda x: x, mode=mode)) == replays
    module = torch.compile(torch.nn.Linear(2, 2), mode=mode)
    assert any(map(torch_private.replays_cuda_graphs, vars(module).values())) == replays
    assert not torch_private.replays_cuda_graphs(torch.tanh)


def test_settings_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: as many versions for each accelerator as for one, kept in their order; and as before afterwards."""
    config = importlib.import_module("torch._dynamo.config")
    before, calls = config.recompile_limit, []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch._C._dynamo.eval_frame, "_set_lru_cache", calls.append, raising=False)
    stand_ins = StandIns()
    stand_ins.add(torch_private.settings_of_compiler)
    for _ in range(2):
        entry = stand_ins.enter()
        assert (config.recompile_limit, calls) == (8 * before, [False])
        stand_ins.leave(entry)
        assert (config.recompile_limit, calls) == (before, [False, True])
        calls.clear()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_set_lru_cache")
    assert {name for _, name, _ in torch_private.settings_of_compiler()} <= {"_METRICS_CONTEXT"}


def test_a_group_is_aborted_without_a_wait() -> None:
    """C12: gloo's collectives end by themselves; others wait on the accelerator for a rank that never comes."""
    aborted, may_end = threading.Event(), threading.Event()

    def abort() -> None:
        aborted.set()
        may_end.wait()

    backend = SimpleNamespace(abort=abort)
    group = SimpleNamespace(_device_types=["cpu", "cuda"], _get_backend=lambda kind: backend)
    torch_private.abort_group(group)
    assert aborted.wait(60)
    may_end.set()
    torch_private.abort_group(SimpleNamespace())


def test_function_modes_are_those_of_before_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: torch takes a mode off its stack while one of its functions runs, by a generator that puts it back.

    If Ctrl-C came in between, "trying to pop from empty mode stack" was raised in its place; and when the error was
    freed, the generator put the mode back, so that later steps ran whole on one device.
    """

    manager: Any = contextlib._GeneratorContextManager
    leave = manager.__exit__

    def interrupted(self: Any, *error: Any) -> Any:
        if self.gen.gi_code.co_name == "_pop_mode_temporarily":
            raise KeyboardInterrupt
        return leave(self, *error)

    def interrupt() -> None:
        before = torch_private.function_modes()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            patch.setattr(manager, "__exit__", interrupted)
            with torch_private.with_function_mode(FunctionMode()):
                nn.functional.dropout(torch.ones(3))
        assert torch_private.function_modes() == before

    with FunctionMode() as mode:
        interrupt()
        gc.collect()  # which frees the errors, and with them torch's generators
        assert torch_private.function_modes() == [mode]
    assert torch_private.function_modes() == []


def test_whether_there_is_a_tracer() -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch_private.has_tracer(), torch_private.traces_with_jit()))
        return x + 1

    seen: list[tuple[bool, bool]] = []
    torch.fx.symbolic_trace(traced)
    torch.jit.trace(traced, torch.ones(2), check_trace=False)
    assert seen == [(True, False), (True, True)]
    assert not torch_private.has_tracer()


def test_hooks_of_every_module() -> None:
    """R9: by their registries."""
    assert not any(torch_private.hooks_of_every_module().values())

    def hook(*_: object) -> None: ...

    with torch.nn.modules.module.register_module_forward_hook(hook):
        assert torch_private.hooks_of_every_module()["_global_forward_hooks"] == [hook]


def test_what_fsdp_and_ddp_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/distributed/test_beside_torch.py has them in torch's own hands; here are the fallbacks."""
    module = torch.nn.Linear(2, 2)
    assert not torch_private.is_sharded(module)
    module._is_fsdp_managed_module = True
    assert torch_private.is_sharded(module)
    tensor = importlib.import_module("torch.distributed.tensor")
    assert tensor.DTensor in torch_private.sharded_tensor_types()
    monkeypatch.delattr(tensor, "DTensor")
    assert "DTensor" not in [kind.__name__ for kind in torch_private.sharded_tensor_types()]
    ddp = torch.nn.parallel.DistributedDataParallel
    assert not torch_private.runs_in_ddp()
    monkeypatch.setattr(ddp, "_active_ddp_module", module)
    assert torch_private.runs_in_ddp()
    monkeypatch.delattr(ddp, "_active_ddp_module")
    assert not torch_private.runs_in_ddp()


@pytest.fixture
def default_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("default_group")
def test_the_name_of_a_group(monkeypatch):
    """The keys of a group begin with its name."""

    def made() -> str:
        return torch.distributed.new_group([0], use_local_synchronization=True).group_name

    with torch_private.group_named("ours"):
        assert made() == "ours"
    assert made() != "ours"
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_process_group_name")
    with torch_private.group_named("ours"):
        pass
