"""State that torch and Python keep once a process: replicas that run at the same time change it together.

`with sdpa_kernel(...)` or `torch.set_default_dtype` in a forward sets what all threads see. Replicas run the same
program, so they make the same changes. Each change is a meeting point:

    replica i:   a change ──► wait until all replicas that still run ask for it ──► it is made once ──► go on

So no replica computes under a setting that is not its own, and each context restores what was there before it. What
is caught are the functions that change the state (`torch_private.process_state_setters`), not the context managers that
call them: so names that a program has imported earlier work, too. They are caught while replicas run (stand_ins.py).

Guarantees
    - Where the data leads replicas different ways, one of them raises an error that names the changes. Replicas that
      have ended are not waited for.
    - Forward-mode differentiation, which torch can do in one thread at a time, is an error in replicas that run at the
      same time. torch.fx traces, as `torch.func.linearize` does, in one replica after the other.
    - Lanes of a map compute different batches. A lane that changes the state, or does one of these, waits until no
      other lane is in the middle of a batch, and then runs the rest of its batch alone.
    - `warnings.catch_warnings` is no meeting point: it changes no number, and libraries use it anywhere, also once a
      process. Replicas that overlap in it share the filters; the last that leaves restores those from before the first.
    - `parametrize.cached()` has a cache for each replica.

Assumes that replicas are threads: in backward on accelerators, hooks run in threads of torch's own, where nothing is
caught; nor is it in code that torch.compile has compiled, while it compiles, and while a module is imported. A replica
that is left alone, after Ctrl-C or a `timeout`, changes the state by itself.
"""

import contextlib
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from unisono.runtime import thread_pool, torch_private
from unisono.runtime.errors import ReplicaTimeout
from unisono.runtime.exchange import Exchange, Purpose, Request, replica_exchange
from unisono.runtime.interrupts import WAKE_S, acquire, deliver, uninterruptible
from unisono.runtime.stand_ins import StandIn, while_replicas_run

T = TypeVar("T")

_FORWARD_MODE = (
    "forward-mode differentiation (torch.func.jvp, jacfwd, hessian; torch.autograd.forward_ad) in replicas: "
    "torch can do it in one thread at a time only. Use reverse mode (torch.func.vjp, jacrev; "
    "torch.autograd.grad with create_graph=True), one process for each device (torchrun, with the same "
    "line), or one device."
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
    exchange = replica_exchange() or _exchange_of(run)
    if exchange.is_last(index):
        return make()
    error = sys.exc_info()[1]
    if error is not None and (not isinstance(error, Exception) or isinstance(error, ReplicaTimeout)):
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


@contextlib.contextmanager
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

    @contextlib.contextmanager
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
    for owner, name in torch_private.process_state_setters():
        yield owner, name, functools.partial(_together, name)
    for owner, name in torch_private.forward_mode_beginnings():
        yield owner, name, _refused
    for owner, name in torch_private.tracing():
        yield owner, name, _in_turns
    for cell in torch_private.cell_of_cached_parametrizations():
        yield cell, "cell_contents", _cached_apart
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


def _refused(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called in place of a function that begins forward-mode differentiation."""

    @functools.wraps(original)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if thread_pool.inside_replica() and not _is_alone():
            raise RuntimeError(_FORWARD_MODE)
        return original(*args, **kwargs)

    return refused


def _in_turns(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls a function in one replica after the other: state that it sets, and puts back at its end.

    Replicas that do not ask for a turn go on meanwhile. A meeting of all would wait for ever where the module has a
    lock of its own around what takes turns.
    """

    @functools.wraps(original)
    def in_turn(*args: Any, **kwargs: Any) -> Any:
        if not thread_pool.inside_replica() or _is_alone():
            return original(*args, **kwargs)
        while not acquire(_turn, 1.0):
            pass
        try:
            with alone():
                return original(*args, **kwargs)
        finally:
            _turn.release()

    return in_turn


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


def _cached_apart(original: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Return the generator function behind `cached()` that gives each replica a cache."""

    @functools.wraps(original)
    def cached() -> Iterator[None]:
        if not thread_pool.inside_replica():
            yield from original()
            return
        caches, path = _own_caches(), thread_pool.replica_path()
        if path in caches:  # one inside another
            yield
            return
        caches[path] = {}
        try:
            with torch_private.parametrizations_cached_in(_lock, _cache_of_replica):
                yield
        finally:
            del caches[path]

    return cached


def _own_caches() -> dict[Hashable, dict[Any, Any]]:
    """Return the open caches of the replicas that run in the calling thread, by their paths."""
    caches: dict[Hashable, dict[Any, Any]] | None = getattr(_thread, "caches", None)
    if caches is None:
        caches = _thread.caches = {}
    return caches


def _cache_of_replica() -> Any:
    return _own_caches().get(thread_pool.replica_path()) if thread_pool.inside_replica() else NotImplemented


_lock = threading.Lock()
_turn = threading.Lock()
_thread = threading.local()
while_replicas_run.add(_stand_ins)
