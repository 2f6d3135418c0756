"""Graphs on the asynchronous device follow CUDA's rules: each by a program on plain torch.

The oracle is the same program without a graph. `held` keeps a stream from running, as in test_rules.py.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from async_device import C, held
from async_device import stream as on
from async_device.tools import BLOCK, FIRST, SECOND, current, in_thread

NOT_PERMITTED = "operation not permitted when stream is capturing"
INVALID = "operation failed due to a previous error during capture"

Graph = torch.accelerator.Graph


@pytest.fixture(autouse=True)
def _no_capture_is_left(fresh_device: None) -> Iterator[None]:
    yield
    assert not any(C.is_capturing(device) for device in (0, 1))


@pytest.fixture
def stream() -> Iterator[torch.Stream]:
    """Make a new stream of the first device current."""
    new = torch.Stream(FIRST)
    with on(new):
        yield new


@contextlib.contextmanager
def captured(graph: torch.accelerator.Graph) -> Iterator[None]:
    """Capture without the synchronisation that `with graph:` begins with."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


@contextlib.contextmanager
def captured_in_vain(graph: torch.accelerator.Graph) -> Iterator[None]:
    """Capture what has an error in it, which capture_end says again."""
    graph.capture_begin()
    yield
    with pytest.raises(RuntimeError, match=INVALID):
        graph.capture_end()


def reserved() -> tuple[int, int]:
    return torch.accelerator.memory_allocated(0), torch.accelerator.memory_reserved(0)


# ---- capture and replay ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay_us", [0, 200])
def test_a_graph_computes_what_the_program_computes(stream: torch.Stream, delay_us: int) -> None:
    C.set_delay(delay_us, 50)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    x, rows = torch.zeros(5, 4, device=FIRST), torch.tensor([2, 0, 1, 4, 3], device=FIRST)
    model.to(FIRST)

    def program() -> torch.Tensor:
        hidden = model(x)
        parts = torch._foreach_mul([hidden[rows], hidden.softmax(1)[:, :2]], 2.0)
        return torch.cat([*parts, torch.mul(hidden, hidden, out=torch.empty_like(hidden))], 1).pow(2)

    graph, before = Graph(), C.num_replays()
    with torch.no_grad(), graph:
        y = program()
    for seed in range(4):
        x.copy_(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        got = y.clone()
        with torch.no_grad():
            assert torch.equal(got, program())
    assert C.num_replays() == before + 4
    assert C.num_replayed_kernels() >= 4


def test_a_capture_runs_nothing_and_a_replay_runs_later(stream: torch.Stream) -> None:
    x, graph = torch.zeros(4, device=FIRST), Graph()
    with graph:
        assert C.is_capturing(0)
        assert torch.queued.is_current_stream_capturing()
        assert not C.is_capturing(1)
        x.add_(1)
    assert not C.is_capturing(0)
    assert x.tolist() == [0] * 4
    with held(stream):
        graph.replay()
        graph.replay()
        assert not stream.query()
    assert x.tolist() == [2] * 4


def test_a_replay_runs_on_the_stream_that_is_current_then(stream: torch.Stream) -> None:
    x, graph = torch.zeros(4, device=FIRST), Graph()
    with graph:
        x.add_(1)
    other = torch.Stream(FIRST)
    with held(stream):
        with on(other):
            graph.replay()
            assert x.tolist() == [1] * 4
        with on(torch.accelerator.current_stream(SECOND)):  # another device: the graph's own counts
            graph.replay()
            assert not stream.query()
    assert x.tolist() == [2] * 4


def test_a_kernels_error_arrives_at_the_next_synchronisation(stream: torch.Stream) -> None:
    table, index, x = torch.zeros(4, 2, device=FIRST), torch.tensor([9], device=FIRST), torch.zeros(1, device=FIRST)
    graph = Graph()
    with graph:
        table.index_select(0, index)
        x.add_(1)
    stream.synchronize()
    graph.replay()
    with pytest.raises(RuntimeError, match=r"asynchronous, of an earlier call\): .*out of range"):
        stream.synchronize()
    assert x.item() == 1


def test_graphs_of_several_threads_are_captured_at_once() -> None:
    barrier = threading.Barrier(3)
    found: dict[int, list[float]] = {}

    def program(number: int) -> None:
        device = (FIRST, FIRST, SECOND)[number]
        with on(torch.Stream(device)):
            x = torch.full((4,), float(number), device=device)
            graph = Graph(capture_error_mode="thread_local")
            barrier.wait()
            with captured(graph):  # `with graph:` would synchronize the device
                barrier.wait()
                y = x * 2
                barrier.wait()
                z = y + 1
            barrier.wait()
            graph.replay()
            found[number] = z.tolist()

    threads = [threading.Thread(target=program, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [2.0 * number + 1] * 4 for number in range(3)}


def test_pinned_memory_is_read_at_each_replay(stream: torch.Stream) -> None:
    pinned, back = torch.ones(4).pin_memory(), torch.zeros(4).pin_memory()
    graph = Graph()
    with graph:
        x = pinned.to(FIRST, non_blocking=True) * 2
        back.copy_(x, non_blocking=True)
    for number in (1, 2):
        pinned.fill_(number)
        graph.replay()
        stream.synchronize()
        assert back.tolist() == [2 * number] * 4


def test_an_exception_in_a_capture_ends_it(stream: torch.Stream) -> None:
    x, graph = torch.zeros(4, device=FIRST), Graph()
    with contextlib.suppress(KeyError), graph:
        x.add_(1)
        raise KeyError
    assert not C.is_capturing(0)
    graph.replay()
    assert x.tolist() == [1] * 4


# ---- what is not permitted -------------------------------------------------------------------------------------------


def _graph_inside(x: torch.Tensor) -> None:
    graph = Graph()
    with on(torch.Stream(FIRST)), captured(graph):
        y = x + 1
    del y
    graph.replay()


NOT_PERMITTED_CALLS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), NOT_PERMITTED),
    "nonzero": (lambda x: x.nonzero(), NOT_PERMITTED + ": aten::nonzero waits for it"),
    "to the host": (lambda x: x.cpu(), "unless the CPU tensor is pinned"),
    "to pageable memory": (lambda x: torch.zeros(4).copy_(x, non_blocking=True), "unless the CPU tensor is pinned"),
    "from pageable memory": (lambda x: x.copy_(torch.zeros(4), non_blocking=True), "unless the CPU tensor is pinned"),
    "a new tensor of numbers": (lambda x: torch.tensor([1.0], device=FIRST), "unless the CPU tensor is pinned"),
    "from pinned memory, and wait": (lambda x: x.copy_(torch.zeros(4).pin_memory()), NOT_PERMITTED),
    "an index of the host": (lambda x: x[torch.tensor([0, 1])], "unless the CPU tensor is pinned"),
    "synchronize the stream": (lambda x: current().synchronize(), NOT_PERMITTED),
    "query the stream": (lambda x: current().query(), NOT_PERMITTED),
    "synchronize the device": (lambda x: torch.accelerator.synchronize(0), NOT_PERMITTED),
    "synchronize an event": (lambda x: current().record_event().synchronize(), "last recorded in a capturing stream"),
    "query an event": (lambda x: current().record_event().query(), NOT_PERMITTED),
    "query an event of another stream": (lambda x: torch.Stream(FIRST).record_event().query(), NOT_PERMITTED),
    "wait for another stream": (lambda x: current().wait_stream(torch.Stream(FIRST)), "uncaptured work"),
    "wait for another device": (lambda x: x.copy_(torch.zeros(4, device=SECOND)), "joins a capture"),
    "copy to another device": (lambda x: x.to(SECOND), "uncaptured work"),
    "another stream waits": (lambda x: torch.Stream(FIRST).wait_stream(current()), "joins a capture"),
    "a graph is replayed": (_graph_inside, "replayed in another's capture"),
}


@pytest.mark.parametrize("name", NOT_PERMITTED_CALLS)
def test_what_is_not_permitted_in_a_capture(name: str, stream: torch.Stream) -> None:
    """It is an error at once, and capture_end raises too; then all is as it was before."""
    call, message = NOT_PERMITTED_CALLS[name]
    x, graph = torch.ones(4, device=FIRST), Graph()
    torch.manual_seed(3)
    expected = torch.rand(4, device=FIRST).tolist()
    torch.manual_seed(3)
    C.synchronize_all()
    torch.accelerator.empty_cache()
    before = reserved()
    with captured_in_vain(graph):
        y = x + torch.rand(4, device=FIRST)
        with pytest.raises(RuntimeError, match=message):
            call(x)
        with pytest.raises(RuntimeError, match=INVALID):
            x.add_(1)
    assert not C.is_capturing(0)
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.replay()
    del y
    assert torch.rand(4, device=FIRST).tolist() == expected
    C.synchronize_all()
    torch.accelerator.empty_cache()
    assert reserved() == before
    with captured(graph):
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2] * 4


def test_an_event_in_a_capture_is_for_its_stream(stream: torch.Stream) -> None:
    x, graph = torch.zeros(4, device=FIRST), Graph()
    with graph:
        x.add_(1)
        event = stream.record_event()
        stream.wait_event(event)
        x.mul_(2)
    graph.replay()
    assert x.tolist() == [2] * 4
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        event.query()  # also after the capture
    with pytest.raises(RuntimeError, match="joins a capture"):
        stream.wait_event(event)
    event.record(stream)
    event.synchronize()


def test_the_default_stream_cannot_capture() -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        Graph().capture_begin()
    x, side, graph = torch.zeros(4, device=FIRST), torch.Stream(FIRST), Graph()
    with on(side), graph:
        x.add_(1)
    graph.replay()  # it can replay
    assert x.tolist() == [1] * 4


@pytest.mark.parametrize("mode", ["default", "global", "thread_local", "relaxed"])
def test_no_thread_may_synchronize_the_device(mode: str, stream: torch.Stream) -> None:
    """Another device may be synchronized, by another thread, if the capture is not global."""
    graph = Graph(capture_error_mode=mode)  # type: ignore[arg-type]
    allowed = mode in ("thread_local", "relaxed")
    with captured(graph) if allowed else captured_in_vain(graph):
        error = in_thread(lambda: torch.accelerator.synchronize(1))
        assert error is None if allowed else NOT_PERMITTED in str(error)
    graph.reset()
    with captured_in_vain(graph):
        assert NOT_PERMITTED in str(in_thread(lambda: torch.accelerator.synchronize(0)))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_of_a_graph_is_its_own(stream: torch.Stream) -> None:
    """What was freed before the capture is not used in it, and what is freed in it is not used outside of it."""
    ordinary = torch.zeros(BLOCK, device=FIRST)
    address, graph = ordinary.data_ptr(), Graph()
    del ordinary
    with captured(graph):
        first = torch.zeros(BLOCK, device=FIRST)
        private = first.data_ptr()
        assert private != address
        del first
        assert torch.zeros(BLOCK, device=FIRST).data_ptr() == private  # in it, it is used again
        with on(torch.Stream(FIRST)):
            assert torch.zeros(BLOCK, device=FIRST).data_ptr() != private
    assert torch.zeros(BLOCK, device=FIRST).data_ptr() == address
    kept = [torch.zeros(BLOCK, device=FIRST) for _ in range(4)]
    assert private not in [each.data_ptr() for each in kept]


@pytest.mark.parametrize("poison", [1, 2], ids=["poisoned when free", "poisoned when reused"])
def test_stale_memory_in_a_graph_is_nan_at_each_replay(stream: torch.Stream, poison: int) -> None:
    C.set_poison(poison)
    graph = Graph()
    with captured(graph):
        x = torch.ones(BLOCK, device=FIRST)
        address = x.data_ptr()
        seen = x.sum()
        del x
        stale = torch.empty(BLOCK, device=FIRST)
        assert stale.data_ptr() == address
        y = stale.sum()
    for _ in range(2):
        stale.zero_()
        graph.replay()
        assert seen.item() == BLOCK
        assert y.isnan().item()


@pytest.mark.parametrize("poison", [1, 2], ids=["poisoned when free", "poisoned when reused"])
def test_graphs_that_share_a_pool(stream: torch.Stream, poison: int) -> None:
    """The second graph uses what the first one's tensors have freed; only its replays destroy it."""
    C.set_poison(poison)
    first = Graph()
    with captured(first):
        x = torch.ones(BLOCK, device=FIRST)
    second = Graph(pool=first.pool())
    first.replay()
    address, stale = x.data_ptr(), x.detach()
    with captured(second):
        other = torch.zeros(BLOCK, device=FIRST)
        assert other.data_ptr() != address  # it still lives
    memory = torch.empty(0, device=FIRST)
    del x, stale
    third = Graph(pool=first.pool())
    with captured(third):
        again = torch.empty(BLOCK, device=FIRST)
        assert again.data_ptr() == address
        memory = again.sum()
    assert first.pool() == second.pool() == third.pool()
    assert again.tolist() == [1] * BLOCK  # nothing but a replay writes it
    third.replay()
    assert memory.isnan().item()
    first.replay()
    assert again.tolist() == [1] * BLOCK


def test_a_pool_of_no_graph_is_given_back(stream: torch.Stream) -> None:
    torch.accelerator.empty_cache()
    allocated, kept = reserved()
    num_bytes = 4 * BLOCK
    graph = Graph()
    with captured(graph):
        x = torch.ones(BLOCK, device=FIRST)
        y = x + 1
        del x
    assert reserved() == (allocated + num_bytes, kept + 2 * num_bytes)
    torch.accelerator.empty_cache()
    assert reserved() == (allocated + num_bytes, kept + 2 * num_bytes)
    other = Graph(pool=graph.pool())
    with captured(other):
        z = torch.ones(BLOCK, device=FIRST)
    assert reserved() == (allocated + 2 * num_bytes, kept + 2 * num_bytes)
    graph.replay()
    graph.reset()
    del z
    assert reserved() == (allocated + num_bytes, kept + 2 * num_bytes)  # the other graph has it still
    del other, graph
    gc.collect()
    assert reserved() == (allocated + num_bytes, kept + num_bytes)  # a tensor that lives has its memory
    assert y.tolist() == [2] * BLOCK
    del y
    assert reserved() == (allocated, kept)


def test_memory_is_given_back_behind_replays(stream: torch.Stream) -> None:
    """Replays that have not run yet, on whatever stream, have the memory until they have."""
    x, graph, other = torch.zeros(BLOCK, device=FIRST), Graph(), torch.Stream(FIRST)
    with graph:
        y = torch.ones(BLOCK, device=FIRST)
        x.copy_(y + 1)
    torch.accelerator.synchronize(0)
    with held(other):
        with on(other):
            graph.replay()
        del graph, y
        gc.collect()
        others = [torch.full((BLOCK,), 7.0, device=FIRST) for _ in range(8)]  # memory that the host gives
    other.synchronize()
    assert x.tolist() == [2] * BLOCK
    assert all(each.eq(7).all().item() for each in others)


def test_memory_freed_in_a_capture_that_another_stream_uses(stream: torch.Stream) -> None:
    """With record_stream it is not used again in this capture; in the next one of the pool it may be."""
    graph, side = Graph(), torch.Stream(FIRST)
    with captured(graph):
        x = torch.ones(BLOCK, device=FIRST)
        address = x.data_ptr()
        x.record_stream(side)
        del x
        side.synchronize()
        assert torch.ones(BLOCK, device=FIRST).data_ptr() != address
    side.synchronize()
    second = Graph(pool=graph.pool())
    with captured(second):
        assert address in [each.data_ptr() for each in [torch.ones(BLOCK, device=FIRST) for _ in range(2)]]


# ---- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True], ids=["the device's generator", "a generator of one's own"])
def test_replays_draw_what_the_program_draws(stream: torch.Stream, own: bool) -> None:
    C.set_delay(200, 50)
    generator = torch.Generator(FIRST) if own else torch.queued.default_generators[0]
    x = torch.ones(64, device=FIRST)

    def program() -> torch.Tensor:
        drawn = torch.rand(64, device=FIRST, generator=generator)
        return torch.nn.functional.dropout(x) + drawn + torch.empty(64, device=FIRST).normal_(generator=generator)

    torch.manual_seed(5)
    generator.manual_seed(5)
    expected = [program().tolist() for _ in range(4)]
    torch.manual_seed(5)
    generator.manual_seed(5)
    graph = Graph()
    with captured(graph):
        y = program()
    outputs = [torch.empty_like(y) for _ in range(3)]
    for output in outputs:  # queued one after another: each replay has its own numbers
        graph.replay()
        output.copy_(y)
    assert [output.tolist() for output in outputs] == expected[:3]
    assert program().tolist() == expected[3]  # replays and calls draw from the one generator


def test_the_state_of_a_generator_in_a_capture(stream: torch.Stream) -> None:
    graph = Graph()
    with captured(graph):
        for call in (torch.queued.get_rng_state, lambda: torch.queued.manual_seed(1)):
            with pytest.raises(RuntimeError, match="during graph capture"):
                call()


# ---- autograd --------------------------------------------------------------------------------------------------------


def _gradients(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x @ weight).tanh().pow(2).sum()
    return torch.autograd.grad(y, (x, weight))


class _Recomputed(torch.autograd.Function):
    """Its backward runs a forward and a backward of its own, in autograd's thread of the device."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return (x @ weight).tanh().pow(2).sum()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        assert C.is_capturing(0)
        with torch.enable_grad():
            found = _gradients(x, weight)
        return tuple(each * grad for each in found)


def _gradients_reentrant(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(_Recomputed.apply(x, weight), (x, weight))


@pytest.mark.parametrize("delay_us", [0, 200])
@pytest.mark.parametrize("gradients", [_gradients, _gradients_reentrant], ids=["a backward", "a reentrant backward"])
@pytest.mark.parametrize("threaded", [False, True], ids=["the main thread", "another thread"])
def test_a_backward_is_captured(gradients, threaded: bool, delay_us: int) -> None:  # type: ignore[no-untyped-def]
    C.set_delay(delay_us, 50)
    x, weight = (torch.zeros(size, device=FIRST, requires_grad=True) for size in ((5, 4), (4, 3)))

    def capture() -> tuple[torch.accelerator.Graph, tuple[torch.Tensor, ...]]:
        graph = Graph()
        with on(torch.Stream(FIRST)), graph:
            return graph, gradients(x, weight)

    torch.accelerator.synchronize(0)
    graph, found = in_thread(capture) if threaded else capture()  # type: ignore[misc]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for each in (x, weight):
                each.copy_(torch.randn(each.shape, generator=generator))
        graph.replay()
        got = [each.clone() for each in found]
        for one, other in zip(got, _gradients(x, weight), strict=True):
            assert torch.equal(one, other)


def test_a_graph_captured_within_a_backward(stream: torch.Stream) -> None:
    """As when the thread of the device captures what it will replay in later backwards."""
    x, weight = (torch.randn(size, device=FIRST).requires_grad_() for size in ((5, 4), (4, 3)))
    graphs: list[tuple[torch.accelerator.Graph, tuple[torch.Tensor, ...]]] = []

    class Captured(_Recomputed):
        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            if not graphs:
                graph = Graph()
                with torch.enable_grad(), graph:
                    found = _gradients(x, weight)
                graphs.append((graph, found))
            graphs[0][0].replay()
            return tuple(each * grad for each in graphs[0][1])

    expected = _gradients(x, weight)
    for _ in range(2):
        got = torch.autograd.grad(Captured.apply(x, weight), (x, weight))
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
