"""When does a node of a graph run, and who sees the gradients that pass it: what hooks are there?"""

import functools
import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

from unisono.runtime.torch_private.engine import number_of_backward

# ---- nodes ---------------------------------------------------------------------------------------

# Return the sequence number of the next node: torch counts the nodes that each thread makes.
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr


def run_first(node: Any, number: int) -> None:
    """Add to the sequence number of a node: of the nodes that are ready, torch's engine runs the highest first."""
    node._set_sequence_nr(number + node._sequence_nr())


def number_nodes_from(number: int) -> None:
    """Have the next nodes that the calling thread makes a sequence number of at least this.

    It makes nodes, so it costs what those have cost that are to be passed.
    """
    missing = number - sequence_number()
    with torch.enable_grad():
        for _ in range(missing):
            _counted.neg()


_counted = torch.zeros((), device="cpu", requires_grad=True)


def is_batch_norm_in_training(node: Any) -> bool:
    """Return whether a node of a graph belongs to a batch norm by the statistics of its input, which has several rows.

    An instance norm is the batch norm of one row to torch. A node without its metadata is taken for a batch norm.
    """
    if "BatchNorm" not in node.name() or not getattr(node, "_saved_training", False):
        return False
    inputs = node._input_metadata
    return not inputs or bool(inputs[0].shape[0] > 1)


# ---- hooks ---------------------------------------------------------------------------------------


def num_hooks(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many hooks are on tensors: of `register_hook`, and of `register_post_accumulate_grad_hook`."""
    return sum(map(len, filter(None, chain.from_iterable(map(_hooks_of, tensors)))))


_hooks_of = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def have_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether hooks are on any of some tensors that are no leaves, which can have those of `register_hook`."""
    return any(map(_own_hooks_of, tensors))


_own_hooks_of = operator.attrgetter("_backward_hooks")


def hooks_of(tensor: torch.Tensor) -> dict[int, Any]:
    """Return the dict of a tensor's hooks, of `register_hook`, which stays when the tensor is gone."""
    handle: Any = tensor.register_hook(_no_change)  # type: ignore[no-untyped-call]
    handle.remove()  # the dict stays
    hooks: dict[int, Any] = tensor._backward_hooks  # type: ignore[assignment]
    return hooks


def _no_change(gradient: torch.Tensor | None) -> None:
    pass


class _IfGiven:
    """A tensor hook on a leaf that is called only where there is a gradient."""

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        functools.update_wrapper(self, hook)
        self._hook = hook

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else self._hook(gradient)


class _IfAccumulated:
    """A hook for what is accumulated in a leaf's `grad`.

    Attributes:
        before: the state of `grad` in backwards, by number, in which perhaps nothing is accumulated. Nothing was, if it
            is the same when torch calls the hook.
    """

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hook = hook
        self.before: dict[int, tuple[int, int]] = {}

    def __call__(self, leaf: torch.Tensor) -> Any:
        before = self.before.pop(number_of_backward(), None)
        found = None if before == _state_of_grad(leaf) else self._hook(leaf)
        self.before = dict.fromkeys(self.before, _state_of_grad(leaf))  # of backwards around this one
        return found


def _state_of_grad(leaf: torch.Tensor) -> tuple[int, int]:
    """Return what changes when something is accumulated in a leaf's `grad`."""
    return (0, 0) if leaf.grad is None else (id(leaf.grad), leaf.grad._version)


def skip_hooks_without_gradient(leaves: Iterable[torch.Tensor]) -> None:
    """Let hooks that `leaves` have now be called only with a gradient, in this backward and in later ones.

    torch calls a leaf's tensor hooks with None where a node leads to the leaf and has no gradient for it, and those for
    what is accumulated although nothing is. Those of torch itself (`register_multi_grad_hook`) count their calls and
    expect None: they stay as they are.
    """
    for leaf in leaves:
        of_tensor, of_sum = _hooks_of(leaf)
        call_with_gradient_only(of_tensor or {})
        hooks: dict[int, Any] = of_sum or {}
        for key, hook in [*hooks.items()]:
            ours = hook if isinstance(hook, _IfAccumulated) else _IfAccumulated(hook)
            if key in hooks:
                hooks[key] = ours
                ours.before[number_of_backward()] = _state_of_grad(leaf)


def call_with_gradient_only(hooks: dict[int, Any]) -> None:
    """Let tensor hooks, of `hooks_of`, be called only with a gradient; as above, not those of torch itself."""
    for key, hook in [*hooks.items()]:
        is_torchs = getattr(hook, "__module__", None) == "torch.autograd.graph"
        if key in hooks and not is_torchs and not isinstance(hook, _IfGiven):
            hooks[key] = _IfGiven(hook)
