"""map and evaluate: whole batches on whichever device is free. The oracle is the plain module in a plain loop."""

import _thread
import contextlib
import copy
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.comparisons import assert_all_same, assert_same, assert_same_gradients, assert_unchanged, twins
from helpers.contract import KIND, ON_CPU, Wrap, at_one_place, at_the_same_time, in_time, in_turn, on_the_cpu
from helpers.failing import FailureError
from helpers.garbage import wait_for_workers
from helpers.losses import loss_of
from helpers.modules import Calls, Composed, Fn, mlp
from helpers.programs import run_script, until
from unisono import DataParallel, pad
from unisono.inference.lane_choice import LaneChoice
from unisono.runtime import thread_pool

AHEAD = 2  # batches a device that are pulled before they are needed
ROW = 32  # short batches that the caller's thread pulls and computes in a row


# As many for the plain module as for each replica: then the numbers are equal bit for bit.
pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def batches(number: int = 9) -> list[torch.Tensor]:
    """Return batches of different sizes."""
    return [torch.randn(1 + 3 * k % 7, 5) for k in range(number)]


def numbered(number: int, rows: int = 2) -> list[torch.Tensor]:
    """Return batches full of their own number."""
    return [torch.full((rows, 2), float(k)) for k in range(number)]


def plain_loop(module: nn.Module, some: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [module(x) for x in some]


def assert_equal(actual: Any, expected: Any) -> None:
    """Check that two values, or the tensors in two lists of them, are equal bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def plus_1(batches: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x + 1 for x in batches]


def fails_at(errors: dict[float, BaseException]) -> nn.Module:
    """Return a module that adds 1, and raises an error for the batches that are full of certain numbers."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        if float(x[0, 0]) in module.errors:
            raise module.errors[float(x[0, 0])]
        return x + 1

    return Calls(forward, errors=errors, calls=nn.Buffer(torch.zeros(1)))


def outcomes_of(outputs: Iterator[Any]) -> list[Any]:
    """Return all outputs, with the errors in their places."""
    found: list[Any] = []
    while True:
        try:
            found.append(next(outputs))
        except StopIteration:
            return found
        except BaseException as error:  # noqa: BLE001 - it is looked at
            found.append(error.with_traceback(None))  # which refers to this frame


class Counted:
    """Batches that count how many have been pulled."""

    def __init__(self, some: list[Any]) -> None:
        self.some, self.num_pulled = some, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.some:
            self.num_pulled += 1
            yield batch


def lane_threads() -> set[threading.Thread]:
    """Return the threads that work for a call now; the pool keeps them when they have ended."""
    return {worker.thread for worker in thread_pool.pool._busy if worker.thread.is_alive()}


@contextlib.contextmanager
def no_lane_left() -> Iterator[None]:
    before = lane_threads()
    yield
    assert until(lambda: not lane_threads() - before)


# ---- outputs, and when batches are pulled --------------------------------------------------------


def test_how_many_outputs_there_will_be(wrap: Wrap) -> None:
    """I1: as long as the batches, where their number is known; a notebook shows it. Without batches nothing starts."""
    model = wrap(mlp())
    outputs = model.map(batches())
    assert (len(outputs), repr(outputs)) == (9, "<outputs of 9 batches>")
    outputs = model.map(iter(batches()))
    assert repr(outputs) == "<outputs of some batches>"
    with pytest.raises(TypeError, match="the number of outputs is unknown"):
        len(outputs)
    assert len([*outputs]) == 9
    threads_before = lane_threads()
    outputs = model.map([])
    assert [*outputs, *outputs] == []
    assert not lane_threads() - threads_before


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_outputs_are_the_plain_modules_in_order(wrap: Wrap, num_replicas: int) -> None:
    """I1: one output a batch, bit for bit, with no history; a second map of the same model works."""
    plain, model = twins(wrap, mlp(), num_replicas)
    some = batches()
    for _ in range(2):
        outputs = list(model.map(some))
        assert_equal(outputs, plain_loop(plain, some))
        assert not any(output.requires_grad for output in outputs)


@at_the_same_time
def test_a_device_that_is_busy_does_not_hold_up_the_others(wrap: Wrap) -> None:
    """I1: while one device has the first batch, the other computes all that have been pulled; the order is kept."""
    others = threading.Semaphore(0)

    def wait_for_the_others(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0]:
            others.release()
        else:
            assert all(others.acquire(timeout=60) for _ in range(2 * AHEAD - 1))
        return x + 1

    model, some = wrap(Fn(wait_for_the_others)), numbered(8)
    assert_equal(in_time(lambda: list(model.map(some))), plus_1(some))


def test_batches_are_pulled_when_they_are_needed(wrap: Wrap) -> None:
    """I3: none before the first output is asked for, then two a device ahead."""
    model = wrap(mlp())
    source = Counted(batches(20))
    with use_lanes(True):
        outputs = model.map(source)
        assert source.num_pulled == 0
        for number in range(10):
            next(outputs)
            assert source.num_pulled == number + 2 * AHEAD
        assert len(list(outputs)) == 10


@pytest.mark.usefixtures("collector_off")
def test_memory_is_flat(wrap: Wrap) -> None:
    """I3: no more batches and outputs exist than have been pulled ahead, however many there are."""
    model = wrap(mlp())
    inputs: list[weakref.ref[torch.Tensor]] = []
    outputs: list[weakref.ref[torch.Tensor]] = []

    def source() -> Iterator[torch.Tensor]:
        for _ in range(300):
            x = torch.zeros(4, 5)
            inputs.append(weakref.ref(x))
            yield x
            del x

    def alive(references: list[weakref.ref[torch.Tensor]]) -> int:
        return sum(reference() is not None for reference in references)

    # Without the lock, a lane frees what it made, and the caller dropped, when it goes on.
    most = 1 + 2 * AHEAD if thread_pool.OBJECTS_HAVE_THREADS else 1
    for output in model.map(source()):
        outputs.append(weakref.ref(output))
        assert alive(outputs) <= most
        assert alive(inputs) <= max(2 * AHEAD, ROW) + 1
    del output
    wait_for_workers()
    assert alive(inputs) == alive(outputs) == 0


@given(st.integers(1, 3), st.lists(st.integers(0, 5), max_size=12), st.integers(1, 7))
@settings(max_examples=50)
def test_each_row_exactly_once(num_replicas: int, sizes: list[int], batch_size: int) -> None:
    """I1, I2, I3: batches of any sizes, and samples, or the rows of a tensor, in batches of any size."""
    model, rows = DataParallel(Fn(lambda x: x + 0.5), ["cpu"] * num_replicas), torch.arange(float(sum(sizes)))
    assert_equal(list(model.map(rows.split(sizes))), [part + 0.5 for part in rows.split(sizes)])
    for samples in (list(rows), rows):
        outputs = list(model.map(samples, batch_size=batch_size))
        assert_equal(outputs, [part + 0.5 for part in rows.split(batch_size) if len(part)])


@given(st.lists(st.booleans(), min_size=14, max_size=14))
@settings(max_examples=30)
def test_whichever_lanes_get_the_batches(uses_all: list[bool]) -> None:
    """I15, I1, I3: the same outputs, in order; no more batches are pulled ahead than two a lane, or a row."""
    model, some = DataParallel(Fn(lambda x: x + 0.5), ["cpu"] * 3), Counted(numbered(20))
    with use_lanes(uses_all[0]) as choice:
        outputs = model.map(some)
        for k, choice.uses_all in enumerate(uses_all):
            assert torch.equal(next(outputs), some.some[k] + 0.5)
            assert k < some.num_pulled <= min(20, k + max(3 * AHEAD, 1 + ROW))
        assert_equal(list(outputs), [x + 0.5 for x in some.some[14:]])


@contextlib.contextmanager
def use_lanes(uses_all: bool) -> Iterator[LaneChoice]:
    """Make the choice of lanes for all maps."""
    choice = LaneChoice("Fn", 3, 1000)
    choice.uses_all, choice.is_made = uses_all, True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unisono.ways.choice_for", lambda *_: choice)
        yield choice


@on_the_cpu
def test_batches_that_are_too_short_are_computed_by_the_caller(wrap: Wrap) -> None:
    """I15, I4, I5: random numbers and intra-op threads are the same; the caller's threads keep their number."""
    torch.set_num_threads(4)
    model, some = wrap(Fn(lambda x: (x + torch.rand(2), torch.get_num_threads(), threading.get_ident()))), numbered(12)
    found = []
    for uses_all in (True, False):
        torch.manual_seed(7)
        with use_lanes(uses_all), model.map(some) as outputs:
            first = next(outputs)
            assert torch.get_num_threads() == in_time(torch.get_num_threads) == 4  # and those that it starts
            found.append([*zip(first, *outputs, strict=True)])
    (of_all, threads_of_all, _), (of_one, threads_of_one, lanes) = found
    assert_equal(of_one, of_all)
    assert threads_of_one == threads_of_all == (2,) * 12
    assert {*lanes} == {threading.get_ident()}
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("event", ["a change", "an error", "Ctrl-C"])
@pytest.mark.filterwarnings("ignore:forward of")
def test_an_event_in_a_row_of_short_batches(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I15, I4, I6, I7: as batch by batch; what changes the module in a row is seen by the rest of the row only."""
    monkeypatch.setattr("unisono.inference.batch_map._ROW_S", 1000.0)
    calls: list[float] = []

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append(float(x[0, 0]))
        if calls[-1] == 5 and event == "an error":
            raise FailureError(5, "as asked")
        if calls[-1] == 5 and event == "Ctrl-C" and calls.count(5) == 1:
            raise KeyboardInterrupt
        if calls[-1] == 5 and event == "a change":
            module.number += 10
        return x + module.number

    plain, some = Calls(forward, number=1), numbered(12)
    with use_lanes(False):
        found = outcomes_of(DataParallel(copy.deepcopy(plain), ["cpu"] * 2).map(some))
    assert calls.count(5) == 1 + (event == "Ctrl-C")
    if event == "an error":
        assert isinstance(found.pop(5), FailureError)
        some.pop(5)
    if event == "Ctrl-C":
        assert isinstance(found.pop(1), KeyboardInterrupt)
    assert_equal(found, [plain(x) if event == "a change" else x + 1 for x in some])


def test_with_a_timeout_all_lanes_get_batches() -> None:
    """I15, F7: one that is stuck is noticed; in the caller's thread it would not be."""
    model = DataParallel(nn.Identity(), ["cpu"] * 2, timeout=60)
    assert until(lambda: not lane_threads())  # those of an earlier map may be ending
    with use_lanes(False), model.map(numbered(2)) as outputs:
        next(outputs)
        assert len(lane_threads()) == 2


# ---- what a batch is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_batch", "expected"),
    [
        (torch.ones(2), "x=(2,)"),
        ((torch.ones(2), torch.ones(3)), "x=(2,), y=(3,)"),
        ([torch.ones(2)], "x=(2,)"),
        ({"y": torch.ones(3), "x": torch.ones(2)}, "x=(2,), y=(3,)"),
        (((torch.ones(2), torch.ones(2)),), "x=tuple"),
        (nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]), "x=PackedSequence"),
    ],
    ids=["a tensor", "a tuple", "a list of one", "a dict", "a tuple as one input", "a registered class"],
)
def test_what_a_batch_is(wrap: Wrap, given_batch: Any, expected: str) -> None:
    """I2, S13: a tuple or list has the positional inputs, a dict the keyword inputs, all else is the only one."""

    def name_inputs(**inputs: Any) -> str:
        shown = {n: tuple(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__ for n, v in inputs.items()}
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    model = wrap(Fn(lambda x, y=None: name_inputs(x=x) if y is None else name_inputs(x=x, y=y)))
    assert list(model.map([given_batch] * 3)) == [expected] * 3


ROWS = torch.arange(15.0).view(5, 3)


@at_one_place
@pytest.mark.parametrize(
    ("samples", "batch_size", "expected"),
    [
        ([(row, k) for k, row in enumerate(ROWS)], 2, [[ROWS[:2], [0, 1]], [ROWS[2:4], [2, 3]], [ROWS[4:], [4]]]),
        (torch.utils.data.TensorDataset(ROWS, torch.arange(5)), 3, [[ROWS[:3], [0, 1, 2]], [ROWS[3:], [3, 4]]]),
        ([{"x": row, "name": "a"} for row in ROWS], 8, [{"x": ROWS, "name": ["a"] * 5}]),
        (iter([torch.ones(2), torch.ones(3)]), 2, [[[torch.ones(2), torch.ones(3)]]]),
        (ROWS.numpy(), 8, [[ROWS]]),
    ],
    ids=["pairs", "a data set", "dicts", "what does not fit together", "an array"],
)
def test_samples_become_batches(wrap: Wrap, samples: Any, batch_size: int, expected: list[Any]) -> None:
    """I2: stacked, taken apart, or kept as a list where they do not fit together; the last batch may be shorter."""
    outputs = wrap(Fn(lambda *inputs, **kwargs: kwargs or list(inputs))).map(samples, batch_size=batch_size)
    for output, theirs in zip(outputs, expected, strict=True):
        if isinstance(theirs, list) and len(theirs) == 2:
            output[1] = output[1].tolist()
        name = output.pop("name", None) if isinstance(output, dict) else None
        assert name == (theirs.pop("name") if isinstance(theirs, dict) else None)
        torch.testing.assert_close(output, theirs, check_dtype=False, check_device=False)


def test_samples_on_another_axis() -> None:
    """I2, S10"""
    outputs = DataParallel(nn.Identity(), ["cpu"] * 2, dim=1).map(ROWS.numpy(), batch_size=2)
    assert_equal(list(outputs), list(ROWS.split(2, dim=1)))


@at_one_place
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batches": torch.ones(3, 2)}, TypeError, r"Tensor of shape \(3, 2\), expected an iterable of .*batch_size="),
        ({"batches": 3}, TypeError, "batches: got int, expected an iterable of batches"),
        ({"batch_size": 0}, ValueError, "batch_size=0: expected 1 or more"),
        ({"batch_size": 1.5}, TypeError, "batch_size=1.5: expected an int"),
        ({"method": "generate"}, AttributeError, "has no method 'generate'"),
        ({"method": 3}, TypeError, "method=3: expected the name of a method"),
        (
            {"batches": torch.tensor(1.0), "batch_size": 2},
            ValueError,
            r"Tensor of shape \(\), which has no dimension 0",
        ),
        ({"progress": 1}, TypeError, "progress=1: expected True or False"),
        ({"out": [1, 2]}, TypeError, r"out\[0\]: expected a tensor or a numpy array"),
        ({"batches": torch.utils.data.DataLoader([1]), "batch_size": 2}, ValueError, "DataLoader makes batches itself"),
    ],
)
def test_wrong_arguments(wrap: Wrap, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """A13, I2: refused when map is called, before anything is computed."""
    with pytest.raises(error, match=message):
        wrap(Fn(lambda *inputs: inputs)).map(**{"batches": [], **arguments})


X, CYCLIC = torch.ones(2, 5), [[]]
CYCLIC[0].append(CYCLIC[0])


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ((X.to("meta"),), TypeError, r"cannot compute batch\[0\], a tensor on the meta device.*torch.empty_like"),
        (CYCLIC, ValueError, "contains itself"),
        ((X, X), TypeError, "positional arguments"),
        ({1: X}, TypeError, "1 is not a name"),
    ],
    ids=["meta", "cyclic", "with a target", "named by a number"],
)
def test_a_batch_that_cannot_be_computed(wrap: Wrap, bad: Any, error: type[Exception], message: str) -> None:
    """S15, I2, I6: an error of that batch only, with its path and the remedy."""
    outputs = wrap(mlp()).map([bad, torch.ones(2, 5)])
    with pytest.raises(error, match=message) as caught:
        next(outputs)
    notes = "".join(caught.value.__notes__)
    assert "batch 0" in notes
    assert ("If one is a target" in notes) == (message == "positional arguments")
    assert len(list(outputs)) == 1


def test_another_method(wrap: Wrap) -> None:
    """I2, R12"""
    permuted = wrap(nn.LSTM(5, 2), dim=1).map([(torch.arange(4.0), None)] * 3, method="permute_hidden")
    assert_equal(list(permuted), [torch.arange(4.0)] * 3)


# ---- the module, the caller's settings, random numbers -------------------------------------------


def count(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Change a buffer and an attribute, and return both."""
    module.calls += x[0, 0] + 1
    module.number += 1
    assert module.listed[0] is module.norm
    return module.calls, module.number, module.listed[0](x)


@pytest.mark.filterwarnings(r"ignore:output\[1\] is a number in each replica")
@pytest.mark.filterwarnings("ignore:forward of")
def test_the_module_is_left_as_it_was(wrap: Wrap) -> None:
    """I4, R3: every batch finds the same buffers and attributes, and an output that is a buffer keeps its value.

    A list of the module's layers led to the live ones, and a map wrote into their buffers.
    """
    norm = nn.BatchNorm1d(2)
    module = Calls(count, norm=norm, listed=[norm], calls=nn.Buffer(torch.zeros(1)), number=0)
    model = wrap(module, sync_batch_norm=False)
    before = copy.deepcopy(model.module.state_dict())
    batches = numbered(9, rows=3)
    outputs = list(model.map(batches))
    assert [(calls.item(), number) for calls, number, _ in outputs] == [(x[0, 0].item() + 1, 1) for x in batches]
    assert_unchanged(model.module, before)
    assert model.module.number == 0
    plain = copy.deepcopy(model.module)
    assert_same(model(torch.ones(6, 2))[2], plain(torch.ones(3, 2))[2].repeat(2, 1))
    assert model.module.number == 1


def test_thread_state_is_the_callers(wrap: Wrap) -> None:
    """I4, R14: that at the call of map; gradients are off."""
    model, x = wrap(Fn(lambda x: (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (x @ x).dtype))), ROWS[:3]
    assert list(model.map([x.double()] * 3)) == [(False, False, torch.float64)] * 3
    with torch.inference_mode(), torch.autocast(KIND, torch.bfloat16):
        outputs = model.map([x.float()] * 3)
    assert list(outputs) == [(False, True, torch.bfloat16)] * 3
    assert torch.is_grad_enabled()


@on_the_cpu
def test_random_numbers_follow_from_the_seed_and_the_batch(wrap: Wrap) -> None:
    """I5: on any number of devices; torch's random state advances by one number, if anything was drawn."""
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 40), nn.Dropout(0.5))

    def run(model: DataParallel) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(7)
        outputs = [output for _ in range(2) for output in model.map([torch.ones(3, 5)] * 6)]
        return outputs, torch.get_rng_state()

    expected, state = run(DataParallel(copy.deepcopy(module), ["cpu"]))
    assert len({tuple(output.flatten().tolist()) for output in expected}) == 12
    for num_replicas in (2, 3):
        assert_equal(run(wrap(copy.deepcopy(module), num_replicas)), (expected, state))
    torch.manual_seed(7)
    unmoved = torch.get_rng_state()
    torch.rand(2)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(run(wrap(module.eval()))[1], unmoved)


# ---- errors --------------------------------------------------------------------------------------


def test_an_error_is_that_of_its_batch_only(wrap: Wrap) -> None:
    """I6: it is raised in its turn, with a note that names the batch; then the iteration goes on.

    StopIteration, which would end it, is an error like others.
    """
    model = wrap(fails_at({1.0: FailureError(7, "as asked"), 5.0: ValueError("again"), 7.0: StopIteration()}))
    found = outcomes_of(model.map(numbered(9)))
    failed = [found.pop(k) for k in (7, 5, 1)]
    assert [type(error) for error in failed] == [RuntimeError, ValueError, FailureError]
    assert isinstance(failed[0].__cause__, StopIteration)
    assert failed[2].code == 7
    assert any("batch 1, by replica" in note for note in failed[2].__notes__)
    assert_equal(found, plus_1([x for x in numbered(9) if x[0, 0] not in (1, 5, 7)]))
    assert model.module.calls == 0
    assert_same(model(torch.full((4, 2), 9.0)), torch.full((4, 2), 10.0))


@pytest.mark.parametrize("error", [OSError("no such file"), KeyboardInterrupt()], ids=["OSError", "Ctrl-C"])
def test_an_error_of_the_loader_ends_the_iteration(wrap: Wrap, error: BaseException) -> None:
    """I6, I7: its own, with a note, after all outputs before it. After Ctrl-C while a batch is pulled, at once: one
    that was pulled and has not reached a device is not left out unnoticed."""

    def source() -> Iterator[torch.Tensor]:
        yield from numbered(3)
        raise error

    *outputs, caught = outcomes_of(wrap(fails_at({})).map(source()))
    assert caught is error
    if isinstance(error, OSError):
        assert_equal(outputs, plus_1(numbered(3)))
        assert error.__notes__ == ["raised in the iterable of batches, at batch 3"]


# ---- an early end --------------------------------------------------------------------------------


def test_an_iterator_that_ends_early_leaves_nothing(wrap: Wrap) -> None:
    """I7: closed, left by a `with` block, deleted; the model works at once."""
    plain, model = twins(wrap, mlp())
    some = batches(20)
    model(some[3])  # its threads stay
    with no_lane_left():
        threads_before = lane_threads()
        outputs = model.map(some)
        next(outputs)
        outputs.close()
        assert not lane_threads() - threads_before
        assert list(outputs) == []
        with model.map(some) as outputs:
            next(outputs)
        assert not lane_threads() - threads_before
        outputs = model.map(some)
        next(outputs)
        del outputs
        assert_same(model(some[3]), plain(some[3]))
    assert_equal(list(model.map(some)), plain_loop(plain, some))


@pytest.mark.usefixtures("collector_off")
def test_no_reference_cycle_is_left(wrap: Wrap) -> None:
    """I7, N10: of the module's replicas, batches and outputs, also after an error and an early end."""
    model = wrap(Fn(lambda x: 1 // (2 - int(x[0, 0]))))

    def fail_and_go_on() -> weakref.ref[Any]:
        outputs = model.map(numbered(6))
        next(outputs), next(outputs)
        with pytest.raises(ZeroDivisionError):
            next(outputs)
        next(outputs)
        return weakref.ref(outputs)

    with no_lane_left():
        reference = fail_and_go_on()
        if thread_pool.OBJECTS_HAVE_THREADS:  # a lane that waits has made the error, which refers to the iterator
            gc.collect()
    assert reference() is None
    reference = weakref.ref(outputs := model.map(numbered(2)))
    list(outputs)
    del outputs
    wait_for_workers()
    assert reference() is None


@pytest.mark.usefixtures("collector_off")
def test_an_iterator_that_is_dropped_after_an_error_leaves_nothing(wrap: Wrap) -> None:
    """I7, N10: nor do the errors of the batches that lanes have computed meanwhile, which nobody takes."""
    model = wrap(Fn(lambda x: 1 // 0))

    def fail() -> weakref.ref[torch.Tensor]:
        x = torch.zeros(4, 5)
        with use_lanes(True), pytest.raises(ZeroDivisionError):
            list(model.map([x] * 6))
        return weakref.ref(x)

    with no_lane_left():
        reference = fail()
    wait_for_workers()
    assert until(lambda: reference() is None)


def test_ctrl_c_while_waiting(wrap: Wrap) -> None:
    """I7, F3: raised at once, although a batch is being computed; nothing is lost if the iteration goes on."""
    are_pulled, release = threading.Event(), threading.Event()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == 2 * AHEAD - 1:
            are_pulled.set()  # it is the last batch that the caller pulls before it waits
        if x[0, 0] == 0:
            assert are_pulled.wait(60)
            _thread.interrupt_main()
            assert release.wait(60)
        return x + 1

    with use_lanes(True):
        outputs = wrap(Fn(forward)).map(numbered(6))
        with pytest.raises(KeyboardInterrupt):
            next(outputs)
        release.set()
        assert_equal(list(outputs), plus_1(numbered(6)))


@pytest.mark.only_on("linux", "macos", because="forks")
def test_a_fork_does_not_wait_for_its_parents_devices() -> None:
    """I7, F5: iterating in the child is an error; the parent goes on."""
    done = run_script("""
        import os, warnings
        import torch, unisono

        warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads
        model = unisono.DataParallel(torch.nn.Linear(4, 2), ["cpu"] * 2)
        outputs = model.map([torch.ones(6, 4)] * 20)
        next(outputs)
        child = os.fork()
        if child == 0:
            try:
                next(outputs)
            except RuntimeError as error:
                del outputs
                os._exit(7 if "forked while a map was running" in str(error) else 1)
        _, status = os.waitpid(child, 0)
        print("child", os.waitstatus_to_exitcode(status), len(list(outputs)))
    """)
    assert (done.returncode, done.stdout) == (0, "child 7 19\n"), done.stderr


# ---- while a map is open -------------------------------------------------------------------------


def test_training_steps_while_a_map_is_open(wrap: Wrap) -> None:
    """I8: forwards and backwards of the same wrapper, in the same thread and in another; the map goes on."""
    plain, model = twins(wrap, mlp())
    some, x = batches(12), torch.randn(6, 5)
    earlier = loss_of(model(x))
    outputs = model.map(some)
    found = [next(outputs)]
    loss_of(model(x)).backward()
    in_time(lambda: loss_of(model(x)).backward())
    found.append(next(outputs))
    in_time(earlier.backward)
    found += outputs
    assert_equal(found, plain_loop(plain, some))
    loss_of(model(x)).backward()
    (4 * loss_of(plain(x))).backward()
    assert_same_gradients(model.module, plain, 1e-10)


def test_two_maps_of_one_model(wrap: Wrap) -> None:
    """I8: in turn, in one loop."""
    plain, model = twins(wrap, mlp())
    some, others = batches(12), batches(12)
    pairs = list(zip(model.map(some), model.map(others), strict=True))
    for found, of in zip(zip(*pairs, strict=True), (some, others), strict=True):
        assert_equal([*found], plain_loop(plain, of))
    assert_equal(list(model.map(some)), plain_loop(plain, some))


# ---- where there are no lanes --------------------------------------------------------------------


@pytest.mark.parametrize("devices", [None, ["cpu"]])
@pytest.mark.usefixtures("no_accelerators", "float64")
def test_on_one_device_and_on_none(devices: list[str] | None) -> None:
    """I10, A2, A3: the same, with one lane."""
    plain, some = mlp(), batches()
    assert_equal(list(DataParallel(copy.deepcopy(plain), devices).map(some)), plain_loop(plain, some))
    with pytest.raises(FailureError):
        list(DataParallel(fails_at({1.0: FailureError(1, "")}), devices).map(numbered(3)))


@at_one_place
def test_a_wrapper_inside_a_replica(wrap: Wrap) -> None:
    """I10, A10: it computes one batch after the other, in that replica."""
    inner = DataParallel(mlp(), ["cpu"] * 2)
    outer = wrap(Calls(lambda module, x: torch.cat(list(module.inner.map(x.split(1)))), inner=inner))
    x = torch.randn(6, 5)
    expected = torch.cat(plain_loop(copy.deepcopy(inner.module), list(x.split(1))))
    assert_same(outer(x), expected)
    assert_equal(list(outer.map([x])), [expected])


@at_one_place
def test_a_mode_that_other_threads_cannot_join(wrap: Wrap) -> None:
    """I10, R14: batches are computed one after the other in the caller's thread, within the mode."""
    seen: list[int] = []

    class Notes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.tanh:
                seen.append(threading.get_ident())
            return function(*args, **kwargs or {})

    model, some, alive = wrap(Fn(torch.tanh)), batches(9), []

    def copies() -> Iterator[torch.Tensor]:
        for x in some:
            alive.append(weakref.ref(copied := x.clone()))
            yield copied
            del copied

    with Notes():
        outputs = []
        for output in model.map(copies()):
            outputs.append(output)
            assert sum(reference() is not None for reference in alive) <= 2 * AHEAD
    assert seen == [threading.get_ident()] * 9
    assert_equal(outputs, [torch.tanh(x) for x in some])


def test_an_overridden_verb_is_refused() -> None:
    """I10, A9: whole batches go through no verb."""
    with pytest.raises(RuntimeError, match=r"Composed\.gather is overridden, but map and evaluate do not use it"):
        Composed(mlp(), ["cpu"] * 2).map([])


@pytest.mark.usefixtures("float64")
def test_on_accelerators(request: pytest.FixtureRequest) -> None:
    """I10, I12: batches come from the host, outputs are on the output device, also those of a registered class."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    # On the host, simulated ones.
    devices = request.getfixturevalue("sim") if ON_CPU else [torch.device(name) for name in in_turn(3)]
    model = DataParallel(copy.deepcopy(plain).to(devices[0]), devices[:3], output_device=devices[1])
    some, expected = [torch.randn(4, 5) for _ in range(9)], torch.ones(4, 4)
    outputs = list(model.map(some))
    assert {output.device for output in outputs} == {devices[1]}
    of_plain = plain_loop(plain, some)
    assert_all_same([output.cpu() for output in outputs], of_plain)
    loss = model.evaluate([(x, expected) for x in some], nn.functional.mse_loss)
    assert loss == pytest.approx(nn.functional.mse_loss(torch.cat(of_plain), expected.repeat(9, 1)).item())
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 5), torch.ones(2, 5)])
    for output in DataParallel(nn.Identity(), devices[:2], output_device="cpu").map([packed] * 4):
        assert torch.equal(output.data, packed.data)
        assert output.data.device.type == "cpu"


# ---- out -----------------------------------------------------------------------------------------


def test_outputs_are_written_into_what_is_given(wrap: Wrap, tmp_path: Path) -> None:
    """I11: a tensor, an array, a memory map, a dict of them; it is returned when it is full."""
    np = pytest.importorskip("numpy")
    plain, model = twins(wrap, mlp())
    some = batches()
    expected = torch.cat(plain_loop(plain, some))
    mapped = np.memmap(tmp_path / "out", dtype=np.float64, mode="w+", shape=(len(expected), 3))
    for out in (torch.empty(len(expected), 3), np.zeros((len(expected), 3)), mapped):
        assert model.map(some, out=out) is out
        assert (torch.as_tensor(out) == expected).all()
    mapped.flush()
    assert (np.fromfile(tmp_path / "out").reshape(-1, 3) == expected.cpu().numpy()).all()
    of_rows = wrap(Fn(lambda x: {"sum": x.sum(1), "x": x}))
    both = {"sum": torch.empty(len(expected)), "x": torch.empty(len(expected), 5)}
    of_rows.map(some, out=both)
    assert_equal(both, {"sum": torch.cat(some).sum(1), "x": torch.cat(some)})


def read_only() -> Any:
    array = torch.zeros(6, 2).numpy()
    array.flags.writeable = False
    return array


@at_one_place
@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(6, 4), r"shape \(6, 4\), with 0 rows filled, but output of batch 0 has .*\(2, 2\)"),
        (torch.empty(5, 2), r"out has the shape \(5, 2\), with 4 rows filled, but output of batch 2"),
        (torch.empty(7, 2), r"out of shape \(7, 2\) has 7 rows, but all outputs together have 6"),
        (torch.empty(6, 2, dtype=torch.int64), "out is torch.int64, which cannot hold the torch.float64"),
        ({"a": torch.empty(6, 2)}, r"out has values at \['a'\], but the output of batch 0 has one value"),
        (torch.empty(2).expand(6, 2), "out: expected a dense tensor in which no elements share memory"),
        (read_only(), "out: the array is read-only"),
        (torch.zeros(6, 2, dtype=torch.float64).numpy()[::-1], r"an array of float64 with the strides \(-16, 8\)"),
    ],
)
def test_an_out_that_does_not_fit(wrap: Wrap, out: Any, message: str) -> None:
    """I11: the error says what was given, and which batch does not fit."""
    with pytest.raises((ValueError, TypeError), match=message):
        wrap(nn.Identity()).map(numbered(3), out=out)


@at_one_place
def test_outputs_without_rows_cannot_be_written(wrap: Wrap) -> None:
    """I11"""
    with pytest.raises(ValueError, match=r"output of batch 0 has no batch dimension \(it is a 0-dim tensor\)"):
        wrap(Fn(lambda x: x.sum())).map(numbered(3), out=torch.empty(3))
    with pytest.raises(ValueError, match="has 3 rows, but all outputs together have 0"):
        wrap(mlp()).map([], out=torch.empty(3, 3))


@at_one_place
def test_ragged_outputs_are_padded_in_out(wrap: Wrap) -> None:
    """I11, G10: those of `unisono.pad`, up to the size of `out`; a longer one does not fit."""
    model = wrap(Fn(lambda x: {"y": x[:, : len(x)]}), out_dims={"y": pad(-1, value=-1)})
    some = [torch.ones(2, 5), torch.ones(3, 5)]
    out = model.map(some, out={"y": torch.empty(5, 4)})["y"]
    assert out.tolist() == [[1, 1, -1, -1]] * 2 + [[1, 1, 1, -1]] * 3
    with pytest.raises(ValueError, match=r"shape \(5, 2\).*\(3, 3\).*shorter on dimension 1, which is padded"):
        model.map(some, out={"y": torch.empty(5, 2)})
    with pytest.raises(ValueError, match="nested deeper") as caught:
        model.map(some, out=torch.empty(5, 4))
    assert caught.value.__notes__ == ["out must have the shape of the output: a tuple for a tuple, a dict for a dict"]


# ---- evaluate ------------------------------------------------------------------------------------


def test_each_row_counts_once_in_a_mean(wrap: Wrap) -> None:
    """I12: whatever the sizes of the batches; as one mean over all rows."""
    plain, model = twins(wrap, mlp())
    xs = batches()
    pairs = [(x, torch.randint(3, (len(x),))) for x in xs]
    empty = (torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))  # over no rows the loss is not a number
    loss = model.evaluate([*pairs, empty], nn.functional.cross_entropy)
    output, target = plain_loop(plain, [torch.cat(xs)])[0], torch.cat([y for _, y in pairs])
    assert loss == pytest.approx(nn.functional.cross_entropy(output, target).item(), rel=1e-12)

    def count(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        assert not torch.is_grad_enabled()
        right = output.argmax(1) == target
        return {"right": int(right.sum()), "accuracy": right.double().mean()}

    right = int((output.argmax(1) == target).sum())
    found = model.evaluate(pairs, count, reduction={"right": "sum"})
    assert found == {"right": right, "accuracy": pytest.approx(right / len(target))}
    assert all(type(value) is float for value in found.values())


@at_one_place
def test_inputs_and_target_of_a_batch(wrap: Wrap) -> None:
    """I12: the last value is the target; a dict before it has keyword inputs; a dict alone is inputs and target."""
    model = wrap(Fn(lambda x, y=0: x + y))
    x, y, target = torch.ones(4, 2), torch.full((4, 2), 2.0), torch.full((4, 2), 3.0)

    def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).abs().max()

    assert model.evaluate([(x, target)], error) == 2
    assert model.evaluate([[x, y, target]], error) == 0
    assert model.evaluate([({"x": x, "y": y}, target)], error) == 0
    assert model.evaluate([{"x": x, "y": y}], lambda output, batch: error(output, batch["x"] + batch["y"])) == 0
    assert model.evaluate(list(zip(x, target, strict=True)), error, batch_size=3, reduction="sum") == 4


@at_one_place
@pytest.mark.parametrize(
    ("pairs", "metric", "options", "error", "message"),
    [
        ([], lambda o, t: 1, {}, ValueError, "nothing to evaluate"),
        ([torch.ones(2)], lambda o, t: 1, {}, TypeError, "a batch is a Tensor: evaluate expects inputs and a target"),
        ([[torch.ones(2)]], lambda o, t: 1, {}, TypeError, "a batch is a list of 1: evaluate expects"),
        ([(torch.ones(2), 1)], 3, {}, TypeError, "metric=3: expected a function"),
        ([(torch.ones(2), 1)], lambda o, t: o, {}, TypeError, r"the metric returned Tensor of shape \(2,\)"),
        (
            [(torch.ones(2), 1)],
            lambda o, t: o.cpu().numpy(),
            {},
            TypeError,
            r"the metric returned ndarray of shape \(2,\)",
        ),
        ([(torch.ones(2), 1)], lambda o, t: {"a": "b"}, {}, TypeError, "the metric's 'a' returned str"),
        ([("text", 1)], lambda o, t: 1, {}, ValueError, "cannot count the rows"),
        ([(torch.ones(2), 1)], lambda o, t: 1, {"reduction": "max"}, ValueError, "reduction='max': expected one of"),
        ([(torch.ones(2), 1)], lambda o, t: 1, {"reduction": {"a": 1}}, TypeError, "reduction={'a': 1}: expected one"),
        ([(torch.ones(2), 1)], lambda o, t: 1, {"reduction": 3}, TypeError, "reduction=3: expected one of"),
        ([(torch.ones(2), 1)], lambda o, t: {"a": 1}, {"reduction": {"b": "sum"}}, ValueError, "reduction names 'b'"),
        ([(torch.ones(2), k) for k in "ab"], lambda o, t: {t: 1}, {}, ValueError, r"for \['a'\] before, but now .*'b'"),
    ],
)
def test_what_cannot_be_evaluated(
    wrap: Wrap, pairs: Any, metric: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """I12"""
    with pytest.raises(error, match=message):
        wrap(nn.Identity()).evaluate(pairs, metric, **options)


@at_one_place
def test_an_error_of_the_metric_ends_the_evaluation(wrap: Wrap) -> None:
    """I12, I7, I6: it names the batch; nothing is left."""
    threads_before = lane_threads()
    with pytest.raises(ZeroDivisionError) as caught:
        wrap(nn.Identity()).evaluate([(x, k) for k, x in enumerate(numbered(9))], lambda output, k: 1 / (k - 3))
    assert caught.value.__notes__ == ["while computing the metric of batch 3"]
    assert not lane_threads() - threads_before


# ---- progress ------------------------------------------------------------------------------------


@at_one_place
def test_a_bar_is_shown_on_a_terminal_only(wrap: Wrap, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """I13: as long as the outputs are iterated over, also after an error."""
    pytest.importorskip("rich")
    model = wrap(fails_at({2.0: ValueError("as asked")}))
    assert len(outcomes_of(model.map(numbered(4), progress=True))) == 4
    assert capsys.readouterr() == ("", "")
    shown: list[str] = []

    class Notes:
        def begin(self, task: str, total: int | None = None) -> None:
            shown.append(f"{task} of {total}")

        def update(self, task: str, done: int, total: int | None, text: str, details: str = "") -> None:
            shown.append(text)

        def close(self) -> None:
            shown.append("closed")

    monkeypatch.setattr(
        "unisono.inference.map_and_evaluate.time", SimpleNamespace(monotonic=itertools.count().__next__)
    )
    monkeypatch.setattr("unisono.inference.map_and_evaluate.for_stderr", Notes)
    outputs = model.map(numbered(4), progress=True)
    assert shown == []
    outcomes_of(outputs)
    begun, *two, ended = ["map of 4", "1/4 batches, 1.0/s", "2/4 batches, 1.0/s", "closed"]
    assert shown == [begun, *two, ended, begun, "4/4 batches, 1.3/s", ended]  # after 3 s
    shown.clear()
    model.module.errors.clear()
    model.evaluate(((x, 1) for x in numbered(2)), lambda output, target: 1, progress=True)
    assert shown == ["evaluate of None", "1 batches, 1.0/s", "2 batches, 1.0/s", "closed"]
