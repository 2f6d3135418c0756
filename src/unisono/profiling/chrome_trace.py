"""A profile as a Chrome trace, which chrome://tracing and https://ui.perfetto.dev open.

One process, whose number is the rank; one thread a lane, and again for each further thread that runs the model. Its
events are complete ones ("ph": "X") in microseconds from the first step on, as the Trace Event Format of Chromium
defines them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.profiling.steps import ProfiledStep


def write(path: Path, steps: Sequence[ProfiledStep], model: str, rank: int) -> None:
    """Write the trace."""
    path.write_text(json.dumps({"traceEvents": events(steps, model, rank), "displayTimeUnit": "ms"}))


def events(steps: Sequence[ProfiledStep], model: str, rank: int) -> list[dict[str, Any]]:
    """Return the events of all steps, and the names of their lanes."""
    lanes = sorted(
        dict.fromkeys((step.thread, lane) for step in steps for lane in step.lanes), key=lambda lane: lane[0]
    )
    numbers = {lane: number for number, lane in enumerate(lanes)}
    found = [_name("process_name", rank, 0, f"{model}, rank {rank}")]
    for (thread, lane), number in numbers.items():
        found.append(_name("thread_name", rank, number, f"{lane}, thread {thread}" if thread else lane))
        found.append({**_name("thread_sort_index", rank, number, ""), "args": {"sort_index": number}})
    for number, step in enumerate(steps):
        for lane, spans in step.lanes.items():
            args = {"step": number} | ({"rows": step.rows[lane]} if lane in step.rows else {})
            found += [
                {
                    "name": phase,
                    "ph": "X",
                    "ts": 1e6 * (began - steps[0].began),
                    "dur": 1e6 * (ended - began),
                    "pid": rank,
                    "tid": numbers[step.thread, lane],
                    "args": args,
                }
                for phase, began, ended in spans
            ]
    return found


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
