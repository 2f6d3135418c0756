"""Make a program smaller, as long as it still shows the same difference."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from fuzz.actions import ACTIONS
from fuzz.compare import Difference
from fuzz.program import Program, Step

Find = Callable[[Program], Difference | None]


def shrink(program: Program, found: Difference, find: Find, limit_s: float) -> tuple[Program, Difference]:
    """Return the smallest program that was found, and its difference, which is of the same kind.

    Args:
        find: runs a program.
        limit_s: no program is begun later.
    """
    end = time.monotonic() + limit_s
    smaller: Program | None = program
    while smaller is not None:
        program, smaller = smaller, None
        for candidate in simpler(program):
            if time.monotonic() > end:
                return program, found
            difference = find(candidate)
            if difference is not None and difference.kind == found.kind:
                smaller, found = candidate, difference
                break
    return program, found


def simpler(program: Program) -> Iterator[Program]:
    """Yield programs that are a little simpler, those that save most first."""
    candidates = (*_shorter(program, "steps"), *_shorter(program, "blocks"), *_with_defaults(program), *_steps(program))
    for candidate in candidates:
        if candidate.steps and all(ACTIONS[step.action].suits(candidate.traits) for step in candidate.steps):
            yield candidate


def _shorter(program: Program, name: str) -> Iterator[Program]:
    """Leave out a half, a quarter and so on, and in the end one item after the other."""
    items: tuple[Any, ...] = getattr(program, name)
    length = len(items) // 2 if len(items) > 1 else len(items)
    while length:
        for start in range(0, len(items), length):
            shorter: Any = {name: items[:start] + items[start + length :]}
            yield replace(program, **shorter)
        length //= 2


def _with_defaults(program: Program) -> Iterator[Program]:
    for field in fields(program):
        value = getattr(program, field.name)
        if not field.init or field.name in ("steps", "blocks", "place") or value == field.default:
            continue
        if field.name == "num_replicas" and not isinstance(program.shares, str):
            continue  # a weight for each: shares become simple first
        default: Any = {field.name: field.default}
        yield replace(program, **default)


def _steps(program: Program) -> Iterator[Program]:
    default = Step()
    for number, step in enumerate(program.steps):
        for field in fields(step):
            simple = replace(step, **{field.name: getattr(default, field.name)})
            if simple != step:
                yield replace(program, steps=(*program.steps[:number], simple, *program.steps[number + 1 :]))
