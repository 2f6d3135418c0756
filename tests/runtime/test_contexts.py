"""Context managers from generators."""

from collections.abc import Iterator

import pytest

from unisono.runtime.contexts import contextmanager


@contextmanager
def noting(seen: list[object], *caught: type[Exception]) -> Iterator[int]:
    try:
        yield 3
    except caught as error:
        seen.append(type(error))
    finally:
        seen.append("end")


def test_what_comes_through() -> None:
    """F1: the exception as it is, with the traceback of where it was raised, also one that ends generators."""
    seen: list[object] = []
    with noting(seen) as value:
        seen.append(value)
    with noting(seen, KeyError):
        raise KeyError
    assert seen == [3, "end", KeyError, "end"]
    for error in (KeyError(), StopIteration(), RuntimeError()):
        with pytest.raises(type(error)) as caught, noting(seen):
            raise error
        assert caught.value is error
        assert [entry.name for entry in caught.traceback] == ["test_what_comes_through"]


def test_what_a_context_raises_itself() -> None:
    @contextmanager
    def raising() -> Iterator[None]:
        try:
            yield
        finally:
            raise ValueError

    @contextmanager
    def twice() -> Iterator[None]:
        try:
            yield
        except KeyError:
            yield

    with pytest.raises(ValueError), raising():
        raise KeyError
    with pytest.raises(RuntimeError, match="yielded twice"), twice():
        raise KeyError


def test_as_a_decorator() -> None:
    """It is entered anew in each call, also in one inside another."""
    seen: list[object] = []

    @noting(seen)
    def down(number: int) -> None:
        seen.append(number)
        if number:
            down(number - 1)

    down(1)
    down(0)
    assert seen == [1, 0, "end", "end", 0, "end"]
