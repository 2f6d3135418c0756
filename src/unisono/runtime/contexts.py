"""Context managers from generators, as contextlib's, through which exceptions of the user's code come as they are.

contextlib sets `__traceback__` of each exception. So one whose class is frozen (`dataclass(frozen=True)`) is replaced
by FrozenInstanceError.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial, wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Return what makes a context manager of a generator function, as `contextlib.contextmanager`.

    >>> @contextmanager
    ... def timed(name):
    ...     started = time.perf_counter()
    ...     yield
    ...     print(name, time.perf_counter() - started)
    """

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Context(partial(function, *args, **kwargs))

    return made


class _Context(ContextDecorator, AbstractContextManager[T], Generic[T]):
    def __init__(self, make: Callable[[], Iterator[T]]) -> None:
        self._make = make

    def _recreate_cm(self) -> Any:  # of ContextDecorator: for each call of a function that it decorates
        return _Context(self._make)

    def __enter__(self) -> T:
        self._generator = self._make()
        return next(self._generator)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            next(self._generator, None)
            return False
        try:
            self._generator.throw(error)  # type: ignore[attr-defined]
        except StopIteration as stop:
            return stop is not error
        except BaseException as raised:
            # Python makes a RuntimeError of a StopIteration that leaves a generator.
            if raised is not error and not (issubclass(type(error), StopIteration) and raised.__cause__ is error):
                raise
            BaseException.with_traceback(error, trace)
            return False
        raise RuntimeError("the generator of a context manager has yielded twice")
