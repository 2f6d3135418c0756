"""The rules of the asynchronous device, which are CUDA's: each by a program on plain torch.

Nothing here waits for time to pass: `held` keeps a stream from running until the end of its block, so what a program
reads too early it reads too early each time.
"""

import ctypes
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from async_device import C, build, held
from async_device import stream as on
from async_device.tools import BLOCK, FIRST, SECOND, child, current, in_thread

pytestmark = pytest.mark.usefixtures("fresh_device")


# ---- streams and events ----------------------------------------------------------------------------------------------


def test_a_kernel_runs_later_than_its_call() -> None:
    x = torch.zeros(4, device=FIRST)
    with held(current()):
        x.add_(1)
        ended = current().record_event()
        assert not ended.query()
        assert not current().query()
    ended.synchronize()
    assert x.tolist() == [1, 1, 1, 1]


def test_a_stream_runs_its_kernels_in_order() -> None:
    C.set_delay(200, 50)
    x = torch.ones((), device=FIRST, dtype=torch.int64)
    for i in range(1, 30):
        x.mul_(3).add_(i).remainder_(1_000_003)
    expected = 1
    for i in range(1, 30):
        expected = (expected * 3 + i) % 1_000_003
    assert x.item() == expected


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=str)
@pytest.mark.parametrize("wait", ["wait_stream", "wait_event", "event.wait", "none"])
def test_a_stream_that_waits_and_one_that_does_not(device: torch.device, wait: str) -> None:
    """The reader's stream is on the writer's device, or on the other one."""
    writer, reader = current(FIRST), torch.Stream(device)
    x, seen = torch.zeros(4, device=FIRST), torch.zeros(4, device=device)
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    with held(writer):
        x.fill_(5)
        written = writer.record_event()
        with on(reader):
            if wait == "wait_stream":
                reader.wait_stream(writer)
            elif wait == "wait_event":
                reader.wait_event(written)
            elif wait == "event.wait":
                written.wait(reader)
            # A copy between devices waits on the current streams of both. The writer's stream must not be one of them.
            with on(reader if device == FIRST else torch.Stream(FIRST)):
                seen.copy_(x)
        if wait == "none":
            reader.synchronize()
    C.synchronize_all()
    assert seen.tolist() == ([0.0] * 4 if wait == "none" else [5.0] * 4)


def test_an_event_that_was_never_recorded_holds_nothing() -> None:
    event = torch.Event("queued")
    current().wait_event(event)
    assert event.query()


def test_time_between_events() -> None:
    first, second = (torch.Event("queued", enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(current().record_event())


def test_current_device_and_streams_are_a_threads_own() -> None:
    side = torch.Stream(FIRST)
    with on(side):
        C.set_device(1)
        assert in_thread(lambda: (C.current_device(), current().stream_id)) == (0, 0)
        assert (C.current_device(), current().stream_id) == (1, side.stream_id)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [1, 2], ids=["poisoned when free", "poisoned when reused"])
@pytest.mark.parametrize("recorded", [True, False], ids=["record_stream", "no record_stream"])
def test_memory_that_another_stream_uses(recorded: bool, poison: int) -> None:
    """Without record_stream, memory that its owner has freed is used again while another stream still reads it."""
    C.set_poison(poison)
    side = torch.Stream(FIRST)
    x = torch.full((BLOCK,), 3.0, device=FIRST)
    torch.accelerator.synchronize(0)
    address = x.data_ptr()
    with held(side):
        with on(side):
            seen = x.sum()
        if recorded:
            x.record_stream(side)
        del x
        other = torch.full((BLOCK,), 7.0, device=FIRST)
        assert (other.data_ptr() == address) is not recorded
        current().synchronize()
    side.synchronize()
    assert (seen.item() == 3.0 * BLOCK) is recorded
    if recorded:  # the side stream has read it
        assert torch.empty(BLOCK, device=FIRST).data_ptr() == address


def test_new_and_freed_memory_is_nan() -> None:
    assert torch.empty(BLOCK + 1, device=FIRST).isnan().all().item()
    x = torch.zeros(BLOCK, device=FIRST)
    address = x.data_ptr()
    del x
    again = torch.empty(BLOCK, device=FIRST)
    assert again.data_ptr() == address
    assert again.isnan().all().item()


def test_memory_belongs_to_the_stream_that_allocated_it() -> None:
    x = torch.zeros(BLOCK, device=FIRST)
    address = x.data_ptr()
    del x
    with on(torch.Stream(FIRST)):
        assert torch.zeros(BLOCK, device=FIRST).data_ptr() != address


def test_memory_statistics() -> None:
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(0)
    before, num_bytes = torch.accelerator.memory_allocated(0), 4 * BLOCK
    x = torch.zeros(BLOCK, device=FIRST)
    assert torch.accelerator.memory_allocated(0) == before + num_bytes
    reserved = torch.accelerator.memory_reserved(0)
    del x
    assert torch.accelerator.memory_allocated(0) == before
    assert torch.accelerator.max_memory_allocated(0) == before + num_bytes
    assert torch.accelerator.memory_reserved(0) == reserved  # it is kept for the next tensor
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(0) == reserved - num_bytes
    free, total = torch.accelerator.get_memory_info(0)
    assert free == total - torch.accelerator.memory_reserved(0)


def test_out_of_memory() -> None:
    torch.accelerator.empty_cache()
    C.set_memory(torch.accelerator.memory_reserved(0) + 8 * BLOCK)
    x = torch.zeros(BLOCK, device=FIRST)
    with pytest.raises(torch.OutOfMemoryError, match=r"queued out of memory\. Tried to allocate"):
        torch.zeros(2 * BLOCK, device=FIRST)
    del x
    torch.zeros(2 * BLOCK, device=FIRST)  # what is cached is given up first


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_between_devices_waits_on_both_current_streams() -> None:
    x, y = torch.zeros(4, device=FIRST), torch.ones(4, device=SECOND)
    torch.accelerator.synchronize(0)
    with held(current(SECOND)):  # the target's: what it still has to do comes first
        old = y + 1
        y.copy_(x.fill_(5))
        assert not current(FIRST).query()
    assert old.tolist() == [2.0] * 4
    with held(current(FIRST)):  # the source's: the target reads what it has still to write
        y.copy_(x.fill_(6))
        new = y + 0
        assert not current(SECOND).query()
    assert new.tolist() == [6.0] * 4


def test_a_copy_from_pinned_memory_is_read_later() -> None:
    pinned, pageable = torch.zeros(4).pin_memory(), torch.zeros(4)
    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    with held(current()):
        late, early = pinned.to(FIRST, non_blocking=True), pageable.to(FIRST, non_blocking=True)
        pinned.fill_(1)
        pageable.fill_(1)
    assert (late.tolist(), early.tolist()) == ([1.0] * 4, [0.0] * 4)


def test_a_copy_into_pinned_memory_is_written_later() -> None:
    x, pinned = torch.ones(4, device=FIRST), torch.zeros(4).pin_memory()
    torch.accelerator.synchronize(0)
    with held(current()):
        pinned.copy_(x, non_blocking=True)
        assert pinned.tolist() == [0.0] * 4
    torch.accelerator.synchronize(0)
    assert pinned.tolist() == [1.0] * 4


def test_pinned_memory_is_not_used_again_before_its_copy() -> None:
    pinned = torch.full((BLOCK,), 2.0).pin_memory()
    address = pinned.data_ptr()
    with held(current()):
        x = pinned.to(FIRST, non_blocking=True)
        del pinned
        assert torch.zeros(BLOCK).pin_memory().data_ptr() != address
    assert x.sum().item() == 2.0 * BLOCK


@pytest.mark.parametrize(
    "read", [lambda x: x.item(), lambda x: x.cpu(), lambda x: x.tolist(), bool, lambda x: x.nonzero()]
)
def test_what_the_host_reads_it_waits_for(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.zeros(1, device=FIRST)
    marker = C.Marker()
    C.stream_waits(0, marker)
    x.fill_(4)
    filled = current().record_event()  # of the stream a query says less: what other tests left is freed in its order
    began = threading.Event()

    def late() -> object:
        began.set()
        return read(x)

    reader = threading.Thread(target=late)
    reader.start()
    began.wait()
    assert not filled.query()
    assert reader.is_alive()  # also where it has not come to the read yet
    marker.set()
    reader.join()
    assert filled.query()


def test_a_host_that_waits_lets_other_threads_run() -> None:
    """Pickle holds the lock of Python while it reads a tensor, and the stream may wait for a thread that needs it."""
    x, marker, may_set = torch.ones(4, device=FIRST), C.Marker(), threading.Event()
    before = sys.getswitchinterval()
    sys.setswitchinterval(10)  # from may_set.set() on, this thread has the lock until it waits
    try:
        C.stream_waits(0, marker)
        setter = threading.Thread(target=lambda: (may_set.wait(), marker.set()))
        setter.start()
        may_set.set()
        assert pickle.loads(pickle.dumps(x)).tolist() == [1.0] * 4
    finally:
        sys.setswitchinterval(before)
    setter.join()


# ---- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")  # which is so here on purpose
def test_backward_runs_in_a_thread_of_the_device_and_on_the_forwards_stream() -> None:
    seen: dict[str, tuple[int, int, int]] = {}

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):  # type: ignore[no-untyped-def]
            ctx.name = name
            return x * 1

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            seen[ctx.name] = (threading.get_ident(), C.current_device(), current(grad.device).stream_id)
            return grad, None

    x = torch.ones(4, device=FIRST, requires_grad=True)
    side = torch.Stream(SECOND)
    with on(side):
        second = Seen.apply(x.to(SECOND), "second")
    first = Seen.apply(x, "first")
    torch.autograd.backward([first.sum(), second.sum()])
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 4
    assert seen["first"][1:] == (0, 0)
    assert seen["second"][1:] == (1, side.stream_id)
    assert len({threading.get_ident(), seen["first"][0], seen["second"][0]}) == 3


# ---- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [FIRST, SECOND], ids=str)
def test_each_device_has_a_generator(device: torch.device) -> None:
    torch.manual_seed(3)
    first = torch.rand(8, device=device)
    state = torch.queued.get_rng_state(device)
    second = torch.rand(8, device=device)
    torch.queued.set_rng_state(state, device)
    assert torch.equal(torch.rand(8, device=device), second)
    torch.manual_seed(3)
    torch.rand(8, device=SECOND if device == FIRST else FIRST)  # another device's draws change nothing
    assert torch.equal(torch.rand(8, device=device), first)
    own = torch.Generator(device).manual_seed(3)
    assert torch.equal(torch.rand(8, device=device, generator=own), first)


def test_draws_do_not_depend_on_delays() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(1)
        return torch.nn.functional.dropout(torch.ones(64, device=FIRST)) + torch.randn(64, device=FIRST)

    prompt = draw()
    C.set_delay(500, 100)
    assert torch.equal(draw(), prompt)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_kernels_error_arrives_at_the_next_synchronisation() -> None:
    table, index = torch.zeros(4, 2, device=FIRST), torch.tensor([9], device=FIRST)
    rows = table.index_select(0, index)  # the call returns
    assert rows.shape == (1, 2)
    with pytest.raises(RuntimeError, match=r"queued error \(asynchronous, of an earlier call\): .*out of range"):
        torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(0)  # once, where CUDA's would stay


def test_tensors_of_two_devices() -> None:
    x = torch.zeros(4, device=FIRST)
    for other in (SECOND, torch.device("cpu")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + torch.zeros(4, device=other)
    assert (x + torch.tensor(1.0)).tolist() == [1.0] * 4  # a scalar of the host is allowed, as on CUDA


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.zeros(1, device="queued:2")


def test_a_forked_process_is_refused() -> None:
    torch.zeros(1, device=FIRST)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a child that hangs ends
        try:
            torch.zeros(1, device=FIRST)
            message = "nothing was raised"
        except RuntimeError as error:
            message = str(error)
        os.write(write, message.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        assert "Cannot re-initialize queued in forked subprocess" in told.read()
    os.waitpid(pid, 0)


# ---- delays ----------------------------------------------------------------------------------------------------------


def test_delays_follow_from_seed_device_and_stream() -> None:
    """The same calls in the same order on a stream get the same delays. When its kernels run is not reproducible."""

    def delays(seed: int, device: torch.device = FIRST, stream: torch.Stream | None = None) -> tuple[int, int]:
        C.set_seed(seed)
        x = torch.zeros(4, device=device)
        stream = stream or current(device)
        with on(stream):
            for _ in range(50):
                x.add_(1)
        C.synchronize_all()
        return C.delays(device.index, stream.stream_id)

    C.set_delay(100, 50)
    C.synchronize_all()
    first = delays(7)
    assert first[0] > 0
    assert delays(7) == first
    assert delays(8) != first
    assert delays(7, SECOND) != first
    assert delays(7, FIRST, torch.Stream(FIRST)) != first


def test_blocking() -> None:
    C.set_delay(200, 100)
    C.set_blocking(True)
    x = torch.zeros(4, device=FIRST)
    memory = (ctypes.c_float * 4).from_address(x.data_ptr())  # the host's; nothing waits
    for number in range(1, 6):
        x.add_(1)
        assert [*memory] == [number] * 4


# ---- the build -------------------------------------------------------------------------------------------------------


def test_a_build_that_fails_is_one_message_and_leaves_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'fallback.cpp:7: expected a semicolon' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match=r"cannot be built:\n(.*\n)*fallback.cpp:7: expected a semicolon"):
        build.built()
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match=r"compiler cannot be run: .*missing"):
        build.built()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler: install g\+\+"):
        build.built()
    assert not list(tmp_path.rglob("*.so"))


def test_each_source_is_in_one_unit() -> None:
    assert sorted(name for unit in build.UNITS for name in unit) == sorted(
        path.stem for path in build.FOLDER.glob("*.cpp")
    )


# ---- child processes -------------------------------------------------------------------------------------------------

PRINT = "import torch; print(torch.accelerator.current_accelerator(), torch.accelerator.device_count()); "


def test_a_child_process_has_the_device_and_the_settings() -> None:
    C.set_seed(11)
    C.set_delay(70, 20)
    settings = f"import async_device; print(async_device.C.settings() == {C.settings()})"
    done = child(PRINT + settings)
    assert done.stdout.split() == ["queued", "2", "True"], done.stderr
    assert child(PRINT, QUEUED_DEVICES="4").stdout.split() == ["queued", "4"]


def test_a_child_process_that_imports_the_device_itself() -> None:
    done = child("import async_device; " + PRINT, PYTHONPATH=os.pathsep.join([os.path.dirname(__file__) + "/.."]))
    assert done.stdout.split() == ["queued", "2"], done.stderr


# ---- operations of its own -------------------------------------------------------------------------------------------


def test_sparse_gradients() -> None:
    plain = torch.nn.Embedding(10, 4, sparse=True)
    there = torch.nn.Embedding(10, 4, sparse=True)
    there.load_state_dict(plain.state_dict())
    there.to(FIRST)
    index = torch.tensor([1, 2, 2, 7])
    for model, at in ((plain, index), (there, index.to(FIRST))):
        model(at).pow(2).sum().backward()
        model(at).sum().backward()
    assert plain.weight.grad is not None
    assert there.weight.grad is not None
    grad, expected = there.weight.grad, plain.weight.grad.to_dense()
    assert grad.layout == torch.sparse_coo
    for same in (grad, grad.coalesce(), grad.to(SECOND), grad.to(SECOND).coalesce(), grad.clone(), grad.cpu()):
        torch.testing.assert_close(same.to_dense().cpu(), expected)
    torch.testing.assert_close((grad + grad).to_dense().cpu(), 2 * expected)
    torch.testing.assert_close((torch.ones(10, 4, device=FIRST) + grad).cpu(), 1 + expected)
    torch.testing.assert_close(grad.add_(grad).to_dense().cpu(), 2 * expected)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_layouts_are_made_and_copied(layout: torch.layout) -> None:
    x = torch.tensor([[0.0, 2.0], [3.0, 0.0], [0.0, 4.0]])
    sparse = x.to(FIRST).to_sparse(layout=layout)
    for same in (sparse, sparse.to(SECOND), sparse.cpu(), sparse.cpu().to(SECOND), sparse.clone()):
        assert same.layout == layout
        torch.testing.assert_close(same.to_dense().cpu(), x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN])
def test_recurrent_cells_are_the_cpus(cell: type[torch.nn.RNNBase], bias: bool) -> None:
    model, x = cell(3, 5, bias=bias).double(), torch.randn(6, 4, 3, dtype=torch.float64)
    expected = model(x)[0]
    grads = torch.autograd.grad(expected.pow(2).sum(), list(model.parameters()))
    there = model.to(FIRST)(x.to(FIRST))[0]
    torch.testing.assert_close(there.cpu(), expected)
    got = torch.autograd.grad(there.pow(2).sum(), list(model.parameters()))
    torch.testing.assert_close([grad.cpu() for grad in got], list(grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norm_of_half_precision_has_float_weights(dtype: torch.dtype) -> None:
    model, x = torch.nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2).to(dtype)
    expected = model(x.float())
    mean = model.running_mean.clone()
    model.reset_running_stats()
    y = model.to(FIRST)(x.to(FIRST))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(model.running_mean.cpu(), mean)
    y.float().pow(2).sum().backward()
    assert model.weight.grad.dtype == torch.float32


def test_autocast_has_cudas_lists() -> None:
    a = torch.randn(4, 4, device=FIRST)
    with torch.autocast("queued"):
        product = a @ a
        assert product.dtype == torch.float16
        assert (product.sum().dtype, product.softmax(1).dtype, product.norm().dtype) == (torch.float32,) * 3
        assert torch.dot(a[0], product[0]).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            torch.nn.functional.binary_cross_entropy(a.sigmoid(), a.sigmoid())
    with torch.autocast("queued", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16


def test_parameters_stay_the_same_objects_when_their_module_moves() -> None:
    model = torch.nn.Linear(3, 3)
    before = list(model.parameters())
    for device in (FIRST, SECOND, torch.device("cpu"), FIRST):
        model.to(device)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        model(torch.ones(2, 3, device=device)).sum().backward()


def test_data_of_conjugated_tensors() -> None:
    x = torch.randn(3, dtype=torch.complex64, device=FIRST)
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64, device=FIRST))
    parameter.data = x.conj()
    torch.testing.assert_close(parameter.detach().cpu(), x.cpu().conj().resolve_conj())


def test_vmap() -> None:
    x = torch.randn(5, 3, device=FIRST)
    torch.testing.assert_close(torch.vmap(lambda row: row.clone().mul_(2))(x).cpu(), 2 * x.cpu())
    for randomness in ("different", "same"):
        torch.vmap(torch.nn.functional.dropout, randomness=randomness)(x)
