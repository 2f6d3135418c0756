"""Every private call of torch: what it says in each situation, and what is said where a torch lacks it."""

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands import torch_private


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


def test_saved_tensor_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """R14"""
    assert not torch_private.has_saved_tensor_hooks()
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert torch_private.has_saved_tensor_hooks()
        with monkeypatch.context() as without:
            without.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
            assert not torch_private.has_saved_tensor_hooks()
    assert not torch_private.has_saved_tensor_hooks()


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
    """R13: both ways to compile a module."""
    module = nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    assert torch_private.is_compiled(torch.compile(module, backend="eager"))
    assert not torch_private.is_compiled(module)
    module.compile(backend="eager")
    assert torch_private.is_compiled(module)


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
        monkeypatch.delattr(torch, "_foreach_clone")
    tensors = [torch.rand(3), torch.tensor(5), torch.rand(2, 3).t(), torch.zeros(0), torch.rand(2, 2).to_sparse()]
    for given in (tensors, [*tensors, nn.Parameter(torch.rand(2))], []):
        copies = torch_private.clones(given)
        for copy, tensor in zip(copies, given, strict=True):
            torch.testing.assert_close(copy, tensor)
            assert copy is not tensor
            assert copy.layout != torch.strided or copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
            assert copy.layout != torch.strided or copy.stride() == tensor.stride()


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
    children, rebuild = taken
    assert children == [1, 2]
    assert rebuild([3]).keys == [3]
    assert torch_private.taken_apart(object()) is None
    monkeypatch.delattr(torch.utils._pytree, "SUPPORTED_NODES")
    assert torch_private.taken_apart(Cache([1, 2])) is None
