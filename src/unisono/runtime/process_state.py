"""State that torch and Python keep once a process: replicas that run at the same time change it together.

`with sdpa_kernel(...)`, `torch.func.jvp` or `torch.set_default_dtype` in a forward set what all threads see. Replicas
run the same program, so they make the same changes. Each change is a meeting point:

    replica i:   a change ──► wait until all replicas that still run ask for it ──► it is made once ──► go on

So no replica computes under a setting that is not its own, and each context restores what was there before it. What
is caught are the functions that change the state (`torch_private.process_state_setters`), not the context managers that
call them: so names that a program has imported earlier work, too.

Guarantees
    - Where the data leads replicas different ways, one of them raises an error that names the changes. Replicas that
      have ended are not waited for.
    - torch.fx traces, as `torch.func.linearize` does, in one replica after the other.
    - Lanes of a map compute different batches. A lane that changes the state waits until no other lane is in the middle
      of a batch, and then runs the rest of its batch alone.
    - `warnings.catch_warnings` is no meeting point: it changes no number, and libraries use it anywhere, also once a
      process. Replicas that overlap in it share the filters; the last that leaves restores those from before the first.
    - `parametrize.cached()` has a cache for each replica.
    - Functions are replaced when replicas first run in threads. Outside of replicas they do what torch's do.

Assumes that replicas are threads: in backward on accelerators, hooks run in threads of torch's own, where nothing is
caught; nor is it in code that torch.compile has compiled, while it compiles, and while a module is imported.
"""

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from unisono.runtime import thread_pool, torch_private
from unisono.runtime.exchange import Exchange, Purpose, Request, replica_exchange
from unisono.runtime.interrupts import WAKE_S, acquire, deliver, uninterruptible

T = TypeVar("T")


class StateChange(Purpose):
    """A change of the process's state, which the replicas make together that still run."""

    went_different_ways = (
        "torch keeps what forward sets here once a process, so all replicas change it together, and the replicas went "
        "different ways: {ways}. Let all replicas make the same changes in the same order, whatever their rows are "
        "(set it around the model, for all of them), or give each device a process (torchrun, with the same line)."
    )
    needs_withdrawn = False


def change(name: str, make: Callable[[], T]) -> T | None:
    """Change the state of the process by `make`, together with the other replicas; return its result."""
    run, index = thread_pool.current_run()
    if _changes_alone() or run is None:
        return make()
    exchange = replica_exchange() or _exchange_of(run)
    if exchange.is_last(index):
        return make()
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, Exception):  # Ctrl-C does not wait for other replicas
        exchange.withdraw(index, failed=True)
        return None
    exchange.threads[index] = threading.get_ident()
    request = Request(StateChange, name, error is not None)
    result = exchange.all_gather(index, request)
    return result.once(lambda _: make()) if result.values else None


def in_turns(make: Callable[[], T]) -> T:
    """Call `make` in one replica after the other: for state that it sets, and puts back at its end.

    Replicas that do not ask for a turn go on meanwhile. A meeting of all would wait for ever where the module has a
    lock of its own around what takes turns.
    """
    if _changes_alone():
        return make()
    while not acquire(_turn, 1.0):
        pass
    try:
        with alone():
            return make()
    finally:
        _turn.release()


def _changes_alone() -> bool:
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
    """Return whether a lock is held here for which other replicas may wait: that of an import, or of the compiler.

    Until Python 3.12 `functools.cached_property` has one for each class, too.
    """
    while frame is not None:
        if frame.f_globals.get("__name__") in _LOADERS or frame.f_code in _LOCKING:
            return True
        frame = frame.f_back
    return False


_LOADERS = {"importlib._bootstrap", "torch._dynamo.convert_frame"}
_LOCKING = {functools.cached_property.__get__.__code__} if sys.version_info < (3, 12) else set()


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


# ---- what is replaced ------------------------------------------------------------------------------


def _replace_all() -> None:
    torch_private.replace_process_state_setters(_replacement)
    torch_private.replace_tracing(lambda original: lambda *args: in_turns(lambda: original(*args)))
    torch_private.replace_cached_parametrizations(_cached_apart)
    warnings.catch_warnings.__enter__ = _enter_warnings  # type: ignore[method-assign]
    warnings.catch_warnings.__exit__ = _leave_warnings  # type: ignore[method-assign]


def _replacement(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called in place of a function that changes the state of the process."""

    @functools.wraps(original)
    def together(*args: Any, **kwargs: Any) -> Any:
        if not thread_pool.inside_replica():
            return original(*args, **kwargs)
        given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
        return change(f"{name}({given})", functools.partial(original, *args, **kwargs))

    return together


# ---- warnings.catch_warnings -----------------------------------------------------------------------


def _enter_warnings(context: Any) -> Any:
    if not thread_pool.inside_replica():
        return _warnings_enter(context)
    with _lock:
        value = _warnings_enter(context)
        _in_warnings.append([context, context])
        return value


def _leave_warnings(context: Any, *error: object) -> None:
    """Restore what was before `context`; if another one was entered since, that one will do it when it is left."""
    with _lock:
        found = [i for i, (entered, _) in enumerate(_in_warnings) if entered is context]
        before = context
        if found:
            _, before = _in_warnings.pop(found[0])
            if found[0] < len(_in_warnings):
                _in_warnings[found[0]][1] = before
                return
        _warnings_exit(before, *error)


_warnings_enter: Any = warnings.catch_warnings.__enter__
_warnings_exit: Any = warnings.catch_warnings.__exit__
_in_warnings: list[list[Any]] = []  # what replicas have entered, in order: each, and the one that restores


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
thread_pool.before_first_threads(_replace_all)
