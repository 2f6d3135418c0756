"""State that torch and Python keep once a process: replicas that run at the same time change it together.

`with sdpa_kernel(...)` or `torch.set_default_dtype` in a forward sets what all threads see. Replicas run the same
program, so they make the same changes. Each change is a meeting point:

    replica i:   a change ──► wait until all replicas that still run ask for it ──► it is made once ──► go on

So no replica computes under a setting that is not its own, and each context restores what was there before it. What
is caught are the functions that change the state (`process_wide.process_state_setters`), not the context managers that
call them: so names that a program has imported earlier work, too. They are caught while replicas run (stand_ins.py).

Guarantees
    - Where the data leads replicas different ways, one of them raises an error that names the changes. Replicas that
      have ended are not waited for.
    - Forward-mode differentiation, of which torch has one level for all threads, and traces of torch.fx, as of
      `torch.func.linearize`, happen in one thread after the other. A replica's turn ends with its task at the latest; a
      level of forward mode that it leaves open stays open, as on one device.
    - Lanes of a map compute different batches. A lane that changes the state, or does one of these, waits until no
      other lane is in the middle of a batch, and then runs the rest of its batch alone.
    - `warnings.catch_warnings` is no meeting point: it changes no number, and libraries use it anywhere, also once a
      process. Replicas that overlap in it share the filters; the last that leaves restores those from before the first.
    - `parametrize.cached()` has no effect in replicas, which the log says.

Assumes that replicas are threads: in backward on accelerators, hooks run in threads of torch's own, where nothing is
caught; nor is it in code that torch.compile has compiled, while it compiles, and while a module is imported. A replica
that is left alone, after Ctrl-C or a `timeout`, changes the state by itself.
"""

import functools
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from unisono.runtime import thread_pool
from unisono.runtime.contexts import contextmanager
from unisono.runtime.errors import log_once
from unisono.runtime.exchange import Exchange, Purpose, Request, replica_exchange
from unisono.runtime.forks import in_forked_child
from unisono.runtime.interrupts import WAKE_S, acquire, deliver, uninterruptible
from unisono.runtime.stand_ins import StandIn, while_replicas_run
from unisono.runtime.stuck_threads import ReplicaTimeout
from unisono.runtime.torch_private import engine, modes, process_wide

T = TypeVar("T")

_FORWARD_MODE = (
    "forward-mode differentiation (torch.func.jvp, jacfwd, hessian; torch.autograd.forward_ad) in replicas: torch can "
    "do it in one thread at a time, so replicas do it one after the other. To do it at once, use reverse mode "
    "(torch.func.vjp, jacrev; torch.autograd.grad with create_graph=True), or one process for each device (torchrun, "
    "with the same line)."
)
_CHANGE_IN_FORWARD_MODE = (
    "{name} inside forward-mode differentiation: replicas change this setting together, but differentiate in forward "
    "mode one after the other. Change it around the differentiation (torch.func.jvp, jacfwd, hessian, dual_level), or "
    "around the model."
)

_NOT_CACHED = (
    "parametrize.cached() has no effect in replicas: torch's cache is that of the process. Each use of a parametrized "
    "weight computes it; what changes by that, as power iterations of spectral_norm in training do, differs from one "
    "device. Use the weight once, and keep it in a variable."
)


class StateChange(Purpose):
    """A change of the process's state, which the replicas make together that still run."""

    went_different_ways = (
        "torch has this setting once per process, so all replicas change it together, but they differ: "
        "{ways}. Make the same changes in the same order in every replica, or set it outside, around the "
        "model. Or use one process for each device (torchrun, with the same line)."
    )
    needs_withdrawn = False


def change(name: str, make: Callable[[], T]) -> T | None:
    """Change the state of the process by `make`, together with the other replicas; return its result."""
    run, index = thread_pool.current_run()
    if _is_alone() or run is None:
        return make()
    if _has_turn():  # others wait for the turn, so they would never come
        raise RuntimeError(_CHANGE_IN_FORWARD_MODE.format(name=name))
    exchange = replica_exchange() or _exchange_of(run)
    if exchange.is_last(index):
        return make()
    error = sys.exc_info()[1]
    if error is not None and (not issubclass(type(error), Exception) or issubclass(type(error), ReplicaTimeout)):
        exchange.withdraw(index, failed=True)  # the step is lost: what has been set is put back at once
        return make()
    exchange.threads[index] = threading.get_ident()
    request = Request(StateChange, name, error is not None)
    try:
        result = exchange.all_gather(index, request)
    except ReplicaTimeout:
        make()
        raise
    return result.once(lambda _: make()) if result.values else None


def _is_alone() -> bool:
    """Return whether the calling thread asks no other one: it runs no replica, or alone. A lane waits until it does."""
    if getattr(_thread, "alone", False) or _is_loading(sys._getframe(2)):
        return True
    lane: _Batch | None = getattr(_thread, "batch", None)
    if lane is not None:
        lane.become_alone()
    return lane is not None or thread_pool.current_run()[0] is None


def _exchange_of(run: thread_pool.Run) -> Exchange:
    """Return the exchange of replicas that have none for anything else; it is made for the first change."""
    with _lock:
        if run.on_end is None:
            exchange = Exchange(run.num_tasks, timeout_s=run.timeout_s, names=run.names)
            run.on_end = functools.partial(_end, exchange)
            for index in list(run.ended):  # a task that ends now sees `on_end`, or is in this list, or both
                exchange.withdraw(index, failed=False)
        ended: Any = run.on_end
    found: Exchange = ended.args[0]
    return found


def _end(exchange: Exchange, index: int, outcome: thread_pool.Outcome[Any]) -> None:
    try:
        exchange.withdraw(index, failed=outcome.error is not None)
    except RuntimeError as error:
        outcome.error = error
    finally:
        del outcome  # a traceback refers to this frame: nothing in it may refer to an exception


def _is_loading(frame: Any) -> bool:
    """Return whether a lock is held here for which other replicas may wait: that of an import, or of the compiler."""
    while frame is not None:
        if frame.f_globals.get("__name__") in _LOADERS:
            return True
        frame = frame.f_back
    return False


_LOADERS = {"importlib._bootstrap", "torch._dynamo.convert_frame"}


@contextmanager
def alone() -> Iterator[None]:
    """The context in which the calling thread's replica runs while no other one of its pass does."""
    before = getattr(_thread, "alone", False)
    _thread.alone = True
    try:
        yield
    finally:
        _thread.alone = before


# ---- the lanes of a map ----------------------------------------------------------------------------


class LaneTurns:
    """Lets a lane that changes the state of the process run the rest of its batch alone.

    A batch may become the only one that computes when all other ones have ended or wait for the same. Those that wait
    do so before their first change, so each finds the state as it was. No batch begins meanwhile.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running: set[object] = set()
        self._waiting: set[object] = set()
        self._alone: object = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """The context of one batch in its lane's thread."""
        if thread_pool.current_run()[0] is not None:  # a map inside a replica
            yield
            return
        mine = _Batch(self)
        self._wait(lambda: self._alone is None and not self._waiting, lambda: self._running.add(mine))
        _thread.batch = mine
        try:
            yield
        finally:
            _thread.batch = None
            _end_turn()
            with self._condition:
                self._running.remove(mine)
                self._alone = None if self._alone is mine else self._alone
                self._condition.notify_all()

    def become_alone(self, batch: object) -> None:
        """Wait until no other batch computes."""
        if self._alone is batch:
            return
        with self._condition:
            self._waiting.add(batch)
            self._condition.notify_all()
        try:
            self._wait(
                lambda: self._alone is None and self._running == self._waiting,
                lambda: setattr(self, "_alone", batch),
            )
        finally:
            with self._condition:
                self._waiting.discard(batch)
                self._condition.notify_all()

    @uninterruptible
    def _wait(self, condition: Callable[[], bool], then: Callable[[], None]) -> None:
        with self._condition:
            while not condition():
                self._condition.wait(WAKE_S)
                deliver()
            then()


class _Batch:
    def __init__(self, turns: LaneTurns) -> None:
        self._turns = turns

    def become_alone(self) -> None:
        self._turns.become_alone(self)


# ---- what stands in ---------------------------------------------------------------------------------


def _stand_ins() -> Iterator[StandIn]:
    for owner, name in process_wide.process_state_setters():
        yield owner, name, functools.partial(_together, name)
    for owner, name in process_wide.forward_mode():
        yield owner, name, _IN_FORWARD_MODE[name]
    for owner, name in process_wide.tracing():
        yield owner, name, _in_turns
    for cell in process_wide.cell_of_cached_parametrizations():
        yield cell, "cell_contents", _cached_nowhere
    if not getattr(sys.flags, "context_aware_warnings", False):  # else each thread has filters of its own
        yield warnings.catch_warnings, "__enter__", _entering_warnings
        yield warnings.catch_warnings, "__exit__", _leaving_warnings


def _together(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called in place of a function that changes the state of the process."""

    @functools.wraps(original)
    def together(*args: Any, **kwargs: Any) -> Any:
        if not thread_pool.inside_replica():
            return original(*args, **kwargs)
        given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        return change(f"{name}({given})", functools.partial(original, *args, **kwargs))

    return together


def _beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called in place of a function that begins forward-mode differentiation, until `_ending`."""

    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> Any:
        # Another thread of the program may end it when the stand-ins are gone, and would not give the turn back.
        is_mine = thread_pool.inside_replica() and _take_turn(_FORWARD_MODE)
        try:
            return original(*args, **kwargs)
        except BaseException:
            if is_mine:
                _give_turn()
            raise

    return begin


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called in place of a function that ends what `_beginning` has begun."""

    @functools.wraps(original)
    def end(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            if thread_pool.inside_replica() and _has_turn():
                _give_turn()

    return end


def _in_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called in place of a function that returns a context of forward-mode differentiation."""

    @functools.wraps(original)
    @contextmanager
    def context(*args: Any, **kwargs: Any) -> Iterator[Any]:
        is_mine = _take_turn(_FORWARD_MODE)
        try:
            with original(*args, **kwargs) as value:
                yield value
        finally:
            if is_mine:
                _give_turn()

    return context


_IN_FORWARD_MODE: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "enter_dual_level": _beginning,
    "exit_dual_level": _ending,
    "jvp_increment_nesting": _in_context,
}


def _in_turns(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function in one replica after the other: state that it sets, and puts back at its end.

    Replicas that do not ask for a turn go on meanwhile. A meeting of all would wait for ever where the module has a
    lock of its own around what takes turns.
    """

    @functools.wraps(original)
    def in_turn(*args: Any, **kwargs: Any) -> Any:
        if not thread_pool.inside_replica() or _is_alone():
            return original(*args, **kwargs)
        is_mine = _take_turn()
        try:
            with alone():
                return original(*args, **kwargs)
        finally:
            if is_mine:
                _give_turn()

    return in_turn


def _take_turn(said: str = "") -> bool:
    """Wait for the turn of the calling thread, which may have it already; return False where it must not wait.

    Args:
        said: what the log says, once, where several replicas run.
    """
    if _is_loading(sys._getframe(1)):
        return False
    is_alone, run = _is_alone(), thread_pool.current_run()[0]  # a lane waits until it is
    if not _has_turn():
        if said and not is_alone and run is not None and run.num_tasks > 1:
            log_once(said)
        acquire(_turn, math.inf)
        modes.take_forward_mode(threading.get_ident())
        thread_pool.at_end_of_task(_end_turn)
    _thread.depth = getattr(_thread, "depth", 0) + 1
    return True


def _give_turn() -> None:
    if _thread.depth == 1:
        _end_turn()
    else:
        _thread.depth -= 1


def _end_turn() -> None:
    """Give up the turn if the calling thread has it: also where forward leaves a level open, which stays open."""
    if _has_turn():
        _thread.depth = 0
        thread_pool.at_end_of_task(None)
        modes.take_forward_mode(None)
        _turn.release()


def _has_turn() -> bool:
    return getattr(_thread, "depth", 0) > 0


def _after_fork() -> None:
    global _turn  # a thread that does not exist here may have it
    _turn, _thread.depth = threading.Lock(), 0
    modes.take_forward_mode(None)


# ---- warnings.catch_warnings -----------------------------------------------------------------------


def _entering_warnings(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enter(context: Any) -> Any:
        if not thread_pool.inside_replica():
            return original(context)
        with _lock:
            value = original(context)
            _in_warnings[context] = None
            return value

    return enter


def _leaving_warnings(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what restores what was before a context; the one entered next, if it has not been left, will do it."""

    @functools.wraps(original)
    def leave(context: Any, *error: object) -> None:
        with _lock:
            entered = [*_in_warnings]
            if context in entered:
                del _in_warnings[context]
                for after in entered[entered.index(context) + 1 :][:1]:
                    found = {name: value for name, value in vars(context).items() if name in _SAVED}
                    vars(after).update(found)
                    return
            original(context, *error)

    return leave


_SAVED = ("_filters", "_showwarning", "_showwarnmsg_impl")  # what a context has found, and puts back
_in_warnings: "weakref.WeakKeyDictionary[Any, None]" = weakref.WeakKeyDictionary()  # what replicas are in, in order


# ---- parametrize.cached() --------------------------------------------------------------------------


def _cached_nowhere(original: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Return the generator function behind `cached()` that does nothing in replicas, which would have one cache."""

    @functools.wraps(original)
    def cached() -> Iterator[None]:
        # On accelerators, torch's own threads run checkpoints of replicas.
        if not thread_pool.inside_replica() and engine.number_of_backward() < 0:
            yield from original()
            return
        log_once(_NOT_CACHED)
        yield

    return cached


_lock = threading.Lock()
_turn = threading.Lock()
_thread = threading.local()
in_forked_child(_after_fork)
while_replicas_run.add(_stand_ins)
