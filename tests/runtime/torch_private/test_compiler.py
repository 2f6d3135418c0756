"""What torch.compile has made and is told, and what traces."""

import importlib
import sys

import pytest
import torch

from unisono.runtime.stand_ins import StandIns
from unisono.runtime.torch_private import compiler


@pytest.mark.parametrize(
    ("mode", "replays"), [(None, False), ("max-autotune-no-cudagraphs", False), ("reduce-overhead", True)]
)
def test_what_torch_compile_makes_with_cuda_graphs(mode: str | None, replays: bool) -> None:
    """R13: known without compiling anything."""
    assert compiler.replays_cuda_graphs(torch.compile(lambda x: x, mode=mode)) == replays
    module = torch.compile(torch.nn.Linear(2, 2), mode=mode)
    assert any(map(compiler.replays_cuda_graphs, vars(module).values())) == replays
    assert not compiler.replays_cuda_graphs(torch.tanh)


def test_settings_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: as many versions for each accelerator as for one, kept in their order; and as before afterwards."""
    config = importlib.import_module("torch._dynamo.config")
    before, calls = config.recompile_limit, []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(torch._C._dynamo.eval_frame, "_set_lru_cache", calls.append, raising=False)
    stand_ins = StandIns()
    stand_ins.add(compiler.settings_of_compiler)
    for _ in range(2):
        entry = stand_ins.enter()
        assert (config.recompile_limit, calls) == (8 * before, [False])
        stand_ins.leave(entry)
        assert (config.recompile_limit, calls) == (before, [False, True])
        calls.clear()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_set_lru_cache")
    assert {name for _, name, _ in compiler.settings_of_compiler()} <= {"_METRICS_CONTEXT"}


def test_what_may_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """R13: the compiler, which a program may not have loaded, or which cannot be imported: nothing is marked."""
    importlib.import_module("torch._dynamo")
    assert [issubclass(each, Exception) for each in compiler.compiler_errors()] == [True]
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch._dynamo")
        assert compiler.compiler_errors() == ()
        assert compiler.uncompiled(len) is len
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it raises ImportError
    compiler.mark_static([torch.ones(2)])


def test_whether_there_is_a_tracer() -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append((compiler.has_tracer(), compiler.traces_with_jit()))
        return x + 1

    seen: list[tuple[bool, bool]] = []
    torch.fx.symbolic_trace(traced)
    torch.jit.trace(traced, torch.ones(2), check_trace=False)
    assert seen == [(True, False), (True, True)]
    assert not compiler.has_tracer()
