"""Every private call of torch: what it says in each situation, and what is said where a torch lacks it."""

import os
import subprocess
import sys
import textwrap
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.runtime import torch_private


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class AsksInBackward(torch.autograd.Function):
    answers: list[bool]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        AsksInBackward.answers.append(torch_private.backward_keeps_graph())
        return grad


def answers_of_two_backwards() -> list[bool]:
    AsksInBackward.answers = []
    loss = AsksInBackward.apply(torch.ones(2, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return AsksInBackward.answers


def test_backward_keeps_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """N10"""
    assert answers_of_two_backwards() == [True, False]
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert answers_of_two_backwards() == [True, True]


class AsksWhereItGoes(torch.autograd.Function):
    """Adds two tensors; notes whether backward goes on to each, and whether it runs each one's node."""

    answers: list[tuple[bool, bool]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nodes = [node for node, _ in ctx.next_functions]
        AsksWhereItGoes.answers = [(torch_private.backward_reaches(n), torch_private.backward_runs(n)) for n in nodes]
        return grad, grad


def test_where_backward_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """C4, C6"""
    leaf, base = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    away, handed_out, runs = (False, False), (True, False), (True, True)

    def answers(**options: Any) -> list[tuple[bool, bool]]:
        loss = AsksWhereItGoes.apply(leaf, base * 2).sum()
        if "grad" in options:
            torch.autograd.grad(loss, options["grad"])
        else:
            loss.backward(**options)
        return AsksWhereItGoes.answers

    assert answers() == [runs, runs]
    assert answers(grad=[leaf]) == [handed_out, away]
    assert answers(grad=[base]) == [away, runs]
    assert answers(grad=[leaf, base]) == [handed_out, runs]
    assert answers(inputs=[leaf]) == [runs, away]
    monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    assert answers(grad=[leaf]) == [runs, runs]


def test_saved_tensor_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14"""
    assert not torch_private.has_saved_tensor_hooks()
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert torch_private.has_saved_tensor_hooks()
    assert not torch_private.has_saved_tensor_hooks()
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    assert not torch_private.has_saved_tensor_hooks()
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert torch_private.has_saved_tensor_hooks()
        assert torch_private.has_saved_tensor_hooks()
        assert torch_private.saved_tensor_hooks_disabled() is None
        with monkeypatch.context() as without:
            without.delattr(torch._C._autograd, "_saved_tensors_hooks_disable")
            assert not torch_private.has_saved_tensor_hooks()
    assert not torch_private.has_saved_tensor_hooks()
    with disable_saved_tensors_hooks("not now"):
        assert not torch_private.has_saved_tensor_hooks()
        assert torch_private.saved_tensor_hooks_disabled() == "not now"


def test_batched_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: inside vmap, and where many gradients are asked for at once."""
    seen: list[bool] = []
    plain = torch.ones(3)
    assert not torch_private.is_batched(plain)

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.is_batched(tensor))
        with monkeypatch.context() as without:
            without.delattr(torch._C, "_functorch")
            seen.append(torch_private.is_batched(tensor))
        return tensor

    torch.vmap(look)(torch.ones(2, 3))
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(look)
    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    assert seen == [True, False, True, False]


def test_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: what may be written into."""
    tensor = torch.ones(3)
    assert torch_private.owns_its_memory(tensor)
    alias = tensor.detach()
    assert not torch_private.owns_its_memory(tensor)
    del alias
    assert torch_private.owns_its_memory(tensor)
    view = tensor[:2]
    assert not torch_private.owns_its_memory(view)
    del tensor
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert not torch_private.owns_its_memory(torch.ones(3))


def test_saved_tensor_hooks_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14"""
    assert torch_private.saved_tensor_hooks_disabled() is None
    with disable_saved_tensors_hooks("not now"):
        assert torch_private.saved_tensor_hooks_disabled() == "not now"
        assert not torch_private.has_saved_tensor_hooks()
        with monkeypatch.context() as without:
            without.delattr(torch._C._autograd, "_saved_tensors_hooks_get_disabled_error_message")
            assert torch_private.saved_tensor_hooks_disabled() is None
    assert torch_private.saved_tensor_hooks_disabled() is None


def test_function_modes_and_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14"""
    assert torch_private.function_modes() == []
    with torch.device("cpu"):
        (mode,) = torch_private.function_modes()
        assert torch_private.is_default_device(mode)
        with FunctionMode() as inner:
            assert torch_private.function_modes() == [mode, inner]
            assert not torch_private.is_default_device(inner)
        with monkeypatch.context() as without:
            without.delattr(torch._C, "_len_torch_function_stack")
            assert torch_private.function_modes() == []
        with monkeypatch.context() as without:
            without.delattr(torch.overrides, "_get_current_function_mode_stack")
            assert torch_private.function_modes() == []
        with monkeypatch.context() as without:
            without.delattr(torch.utils._device, "DeviceContext")
            assert not torch_private.is_default_device(mode)
            assert torch_private.default_device() is None


def test_default_device() -> None:
    """R14: the innermost; with a number where the device has one; whatever else is active."""
    assert torch_private.default_device() is None
    with FunctionMode():
        assert torch_private.default_device() is None
        with torch.device("cpu"):
            assert torch_private.default_device() == torch.device("cpu")
            with torch.device("meta"), FunctionMode():
                assert torch_private.default_device() == torch.device("meta")
            assert torch_private.default_device() == torch.device("cpu")
    torch.set_default_device("meta")
    try:
        assert torch_private.default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)
    assert torch_private.default_device() is None


def test_has_dispatch_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14"""
    assert not torch_private.has_dispatch_modes()
    with Mode():
        assert torch_private.has_dispatch_modes()
        with monkeypatch.context() as without:
            without.delattr(torch._C, "_len_torch_dispatch_stack")
            assert not torch_private.has_dispatch_modes()
    assert not torch_private.has_dispatch_modes()


def test_has_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14"""
    answers: list[bool] = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        answers.append(torch_private.has_transforms())
        return x.sum()

    assert not torch_private.has_transforms()
    torch.func.grad(ask)(torch.ones(2))
    torch.func.vmap(ask)(torch.ones(2, 2))
    with forward_ad.dual_level():
        assert torch_private.has_transforms()
    assert not torch_private.has_transforms()
    assert answers == [True, True]
    with forward_ad.dual_level(), monkeypatch.context() as without:
        without.delattr(torch._C._functorch, "maybe_current_level")
        assert not torch_private.has_transforms()


def test_without_post_accumulate_hooks() -> None:
    called: list[int] = []
    hooked, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first = hooked.register_post_accumulate_grad_hook(lambda tensor: called.append(1))
    hooked.register_post_accumulate_grad_hook(lambda tensor: called.append(2))
    with torch_private.without_post_accumulate_hooks([hooked, other]):
        (hooked * other).sum().backward()
    assert called == []
    (hooked * other).sum().backward()
    assert called == [1, 2]
    first.remove()
    (hooked * other).sum().backward()
    assert called == [1, 2, 2]
    with torch_private.without_post_accumulate_hooks([object()]):  # type: ignore[list-item]  # a torch without them
        pass


def test_is_compiled() -> None:
    """R13: what the ways to compile leave in a module's attributes."""
    module = nn.Linear(2, 2)
    assert not torch_private.is_compiled(module.forward)
    assert torch_private.is_compiled(torch.compile(module, backend="eager").__dict__["forward"])
    assert torch_private.is_compiled(torch.compile(module.forward, backend="eager"))
    module.compile(backend="eager")
    assert torch_private.is_compiled(module.__dict__["_compiled_call_impl"])
    assert not any(map(torch_private.is_compiled, [module, None, test_is_compiled, "text"]))


def test_compiled_code_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: said to torch once; where torch has no such switch, nothing happens."""
    said: list[bool] = []
    if not hasattr(torch._C._dynamo.eval_frame, "_set_lru_cache"):
        pytest.skip("this torch has no torch._C._dynamo.eval_frame._set_lru_cache")
    torch_private.keep_compiled_code_in_order.cache_clear()
    monkeypatch.setattr(torch._C._dynamo.eval_frame, "_set_lru_cache", said.append)
    torch_private.keep_compiled_code_in_order()
    torch_private.keep_compiled_code_in_order()
    assert said == [False]
    torch_private.keep_compiled_code_in_order.cache_clear()
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_set_lru_cache")
    torch_private.keep_compiled_code_in_order()
    torch_private.keep_compiled_code_in_order.cache_clear()


def test_owns_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: a view, its base, a detached alias and a parameter's data share memory; a fresh tensor does not."""
    fresh = torch.ones(4)
    assert torch_private.owns_its_memory(fresh)
    also_fresh = fresh
    assert torch_private.owns_its_memory(also_fresh)
    alias = fresh.detach()
    assert not torch_private.owns_its_memory(fresh)
    assert not torch_private.owns_its_memory(alias)
    del alias
    assert torch_private.owns_its_memory(fresh)
    view = fresh[:2]
    assert not torch_private.owns_its_memory(fresh)
    assert not torch_private.owns_its_memory(view)
    sparse = torch.ones(2, 2).to_sparse()
    assert not torch_private.owns_its_memory(sparse)
    del view
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert not torch_private.owns_its_memory(fresh)


@pytest.mark.parametrize("there", [True, False])
def test_clones(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: values, strides and classes kept; nothing shared."""
    if not there:
        monkeypatch.delattr(torch, "_foreach_clone", raising=False)
    tensors = [torch.rand(3), torch.tensor(5), torch.rand(2, 3).t(), torch.zeros(0), torch.rand(2, 2).to_sparse()]
    for given in (tensors, [*tensors, nn.Parameter(torch.rand(2))], []):
        copies = torch_private.clones(given)
        for copy, tensor in zip(copies, given, strict=True):
            torch.testing.assert_close(copy, tensor)
            assert copy is not tensor
            assert copy.layout != torch.strided or copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
            assert copy.layout != torch.strided or copy.stride() == tensor.stride()


def test_num_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors on a storage, and the storage object that asks."""
    tensor = torch.ones(4)
    assert torch_private.num_references(tensor.untyped_storage()) == 2
    view = tensor[:2]
    assert torch_private.num_references(tensor.untyped_storage()) == 3
    del view
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert torch_private.num_references(tensor.untyped_storage()) is None


@pytest.mark.parametrize("present", [True, False])
def test_many_tensors_in_one_call(monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    if not present:
        monkeypatch.delattr(torch, "_foreach_add_")
        monkeypatch.delattr(torch, "_foreach_copy_")
    targets = [torch.ones(2), torch.ones(2, 3)]
    torch_private.add_all_in_place(targets, [torch.ones(2), torch.full((2, 3), 4.0)])
    assert [target.sum().item() for target in targets] == [4.0, 30.0]
    torch_private.copy_all_in_place(targets, [torch.zeros(2), torch.full((2, 3), 2.0)])
    assert [target.sum().item() for target in targets] == [0.0, 12.0]
    torch_private.add_all_in_place([], [])
    torch_private.copy_all_in_place([], [])


def test_the_axis_that_vmap_hides() -> None:
    """N3: taken out and hidden again, as under `is_grads_batched`; not torch.func's own."""
    seen: list[torch.Size] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            plain = torch_private.without_batch(grad)
            seen.append(plain.shape)
            return torch_private.with_batch(plain * 2)

    x = torch.ones(3, requires_grad=True)
    vectors = torch.eye(3)
    (result,) = torch.autograd.grad(Looks.apply(x), x, vectors, is_grads_batched=True)
    assert torch.equal(result, vectors * 2)
    assert seen == [(3, 3)]
    with pytest.raises(NotImplementedError, match='engine="threads"'):
        torch_private.without_batch(torch.ones(3))


def test_what_backward_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: it is there afterwards; where torch has no such module, nothing happens."""
    torch_private.import_what_backward_imports.cache_clear()
    torch_private.import_what_backward_imports()
    assert "torch.fx.experimental.symbolic_shapes" in sys.modules
    torch_private.import_what_backward_imports.cache_clear()
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)  # importing it raises ImportError
    torch_private.import_what_backward_imports()


def test_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cache:
        def __init__(self, keys: list[int]) -> None:
            self.keys = keys

    register: Any = torch.utils._pytree.register_pytree_node
    register(Cache, lambda cache: (cache.keys, None), lambda keys, _: Cache(keys), serialized_type_name="test.Private")
    taken = torch_private.taken_apart(Cache([1, 2]))
    assert taken is not None
    children, rebuild, context = taken
    assert (children, context) == ([1, 2], None)
    assert rebuild([3]).keys == [3]
    assert torch_private.taken_apart(object()) is None
    monkeypatch.delattr(torch.utils._pytree, "SUPPORTED_NODES")
    assert torch_private.taken_apart(Cache([1, 2])) is None


def test_catch_operations() -> None:
    """N6: caught in the context only, in that thread only, inside C++ and in backward too; higher-order operators run.

    In a process of its own, because it is for good.
    """
    script = """
        import threading, torch
        from torch import nn
        from torch.nn import functional as F
        from manyhands.runtime.torch_private import catch_operations

        caught = []

        def handler(keys, tensor, p=0.5, **kwargs):  # what equals its default is not passed
            caught.append(p)
            return bernoulli.redispatch(keys, tensor, p, **kwargs)

        bernoulli = torch.ops.aten.bernoulli_.float
        context = catch_operations({bernoulli: handler})
        assert catch_operations({bernoulli: handler}) is None, "the key is taken"

        def draw():
            return F.dropout(torch.ones(4, requires_grad=True), 0.25)

        def calls_of(function):
            caught.clear()
            function()
            return list(caught)

        class DrawsInBackward(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return grad + torch.empty(4).bernoulli_(0.5)

        def backward():
            DrawsInBackward.apply(torch.ones(4, requires_grad=True)).sum().backward()

        def in_a_thread():
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()

        lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.5)
        assert calls_of(draw) == []
        with context():
            assert calls_of(draw) == [0.75]
            assert draw().grad_fn is not None
            assert calls_of(lambda: lstm(torch.ones(3, 2))) == [0.5]
            assert calls_of(backward) == [0.5]
            assert calls_of(in_a_thread) == []
            torch.cond(torch.ones(()) > 0, torch.sin, torch.cos, (torch.ones(3),))
            with context():
                assert calls_of(draw) == [0.75]
            assert calls_of(draw) == [0.75]
            from torch.nn.attention.flex_attention import flex_attention
            flex_attention(*[torch.ones(1, 1, 4, 8)] * 3)
        assert calls_of(draw) == []
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


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


def test_is_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """N6: while torch.compile and export record operations, but not in any dispatch mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    answers: list[bool] = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        answers.append(torch_private.is_tracing())
        return x + 1

    ask(torch.ones(2))
    with Mode():
        ask(torch.ones(2))
    assert answers == [False, False]
    make_fx(ask)(torch.ones(2))
    with FakeTensorMode():
        ask(torch.ones(2))
        with monkeypatch.context() as without:
            without.delattr(torch._C, "_get_dispatch_mode")
            answers.append(torch_private.is_tracing())
    assert answers == [False, False, True, True, False]


def test_is_default_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """N6"""
    assert torch_private.is_default_generator(torch.default_generator)
    assert not torch_private.is_default_generator(torch.Generator())
    assert not torch_private.is_default_generator(torch.default_generator.clone_state())
    assert not torch_private.is_default_generator(object())  # type: ignore[arg-type]


def test_redirect_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """N6: torch's functions act on the generator that is looked up at each call, and return what it returns."""
    monkeypatch.setattr(torch.random, "default_generator", torch.default_generator)  # undone at the end
    own = torch.Generator()
    looked_up = [own]
    torch_private.redirect_random_state(lambda: looked_up[0])
    before = torch.default_generator.get_state()
    assert torch.manual_seed(3) is own
    assert own.initial_seed() == torch.initial_seed() == 3
    assert torch.equal(torch.get_rng_state(), own.get_state())
    with torch.random.fork_rng(devices=[]):
        assert torch.seed() == own.initial_seed()
    assert own.initial_seed() == 3
    torch.set_rng_state(before)
    assert torch.equal(own.get_state(), before)
    assert torch.equal(torch.default_generator.get_state(), before)
    looked_up[0] = torch.default_generator
    assert torch.equal(torch.get_rng_state(), before)
    assert deepcopy(torch.random.default_generator).device == torch.device("cpu")
    monkeypatch.delattr(torch.random, "default_generator")
    torch_private.redirect_random_state(lambda: own)
    assert not hasattr(torch.random, "default_generator")


def test_parametrizations_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            Counting.calls += 1
            return weight * 2

    layer = nn.Linear(2, 2)
    nn.utils.parametrize.register_parametrization(layer, "weight", Counting())
    Counting.calls = 0
    with nn.utils.parametrize.cached():
        assert layer.weight is layer.weight
        with torch_private.parametrizations_not_cached():
            assert layer.weight is not layer.weight
        assert Counting.calls == 3
        _ = layer.weight
        assert Counting.calls == 3, "what had been cached is still there"
    with torch_private.parametrizations_not_cached():
        _ = layer.weight
    monkeypatch.delattr(nn.utils.parametrize, "_cache_enabled")
    with torch_private.parametrizations_not_cached():
        pass


def test_has_compiled_call() -> None:
    plain, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile(backend="eager")
    assert not torch_private.has_compiled_call(plain)
    assert torch_private.has_compiled_call(in_place)
    assert torch_private.has_compiled_call(torch.compile(plain, backend="eager"))


def test_hooks_of_every_module() -> None:
    assert not torch_private.hooks_of_every_module()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: None)
    try:
        assert torch_private.hooks_of_every_module()
    finally:
        handle.remove()
    assert not torch_private.hooks_of_every_module()


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the call for every accelerator, else by CUDA's, else none that is known of."""
    device = torch.device("cuda", 1)
    asked: list[torch.device] = []

    def answer(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 100, 1000

    monkeypatch.setattr(torch.accelerator, "get_memory_info", answer, raising=False)
    assert torch_private.free_memory_bytes(device) == 100
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer)
    assert torch_private.free_memory_bytes(device) == 100
    monkeypatch.delattr(torch.cuda, "mem_get_info")
    assert torch_private.free_memory_bytes(device) == 0
    assert asked == [device, device]


def test_process_groups(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process here, which has the others' part too; test_collectives.py has several."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), -1)
    group = torch_private.process_group("gloo", store, 0, 1)
    assert not torch.distributed.is_initialized()
    for tensor in (torch.tensor([1.0, 2.0]), torch.tensor([1.0 + 2.0j])):
        before = tensor.clone()
        torch_private.reduce(group, tensor).wait()
        assert torch.equal(tensor, before)
    torch_private.broadcast(group, torch.ones(3, dtype=torch.uint8)).wait()
    for backend in ("gloo", "nccl"):
        monkeypatch.delattr(torch.distributed, f"ProcessGroup{backend.upper()}", raising=False)
        monkeypatch.delattr(torch.distributed, f"ProcessGroup{backend.title()}", raising=False)
        with pytest.raises(RuntimeError, match=f"torch.distributed with {backend}, which this build of torch .* lacks"):
            torch_private.process_group(backend, store, 0, 1)


@pytest.mark.parametrize("local_world_size", ["2", "4"])
def test_what_nccl_is_told_while_a_group_is_made(monkeypatch: pytest.MonkeyPatch, local_world_size: str) -> None:
    """That errors are the caller's, and where to listen: not in a job over several machines. And only then."""
    seen: dict[str, str] = {}

    class Group:
        class Options:
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            seen.update(os.environ)
            self.aborted = False

        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
            assert options.asyncOp
            return SimpleNamespace(wait=lambda: None)

        def abort(self) -> None:
            self.aborted = True

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    # A build of torch for CUDA names "cuda" here, with no driver too.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "of the user")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    group = torch_private.process_group("nccl", None, 0, 2)
    assert dict(os.environ) == before
    told = {name: value for name, value in seen.items() if before.get(name) != value}
    assert told.pop("NCCL_SOCKET_IFNAME", None) == ("lo" if local_world_size == "4" else None)
    assert told == {
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    torch_private.end_process_group(group)
    assert group.aborted


def test_compiler_errors(monkeypatch):
    def fails(module, inputs):
        raise ValueError("as asked")

    compiled = torch.compile(lambda x: x + 1, backend=fails)  # this imports the compiler
    with pytest.raises(Exception, match="as asked") as caught:
        compiled(torch.ones(1))
    assert isinstance(caught.value, torch_private.compiler_errors())
    assert not issubclass(ValueError, torch_private.compiler_errors())
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert torch_private.compiler_errors() == ()
