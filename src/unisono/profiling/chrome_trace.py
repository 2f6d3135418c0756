"""A profile as a Chrome trace, which chrome://tracing and https://ui.perfetto.dev open.

One process, whose number is the rank; one thread a lane. Its events are complete ones ("ph": "X") in microseconds from
the first step on, as the Trace Event Format of Chromium defines them.
"""

import json
from collections.abc import Sequence
from typing import Any

from unisono.profiling.steps import ProfiledStep


def text(steps: Sequence[ProfiledStep], model: str, rank: int) -> str:
    """Return the trace: what each lane did in each step, and the names of the lanes."""
    lanes = list(dict.fromkeys(lane for step in steps for lane in step.lanes))
    found = [_name("process_name", rank, 0, f"{model}, rank {rank}")]
    found += [_name("thread_name", rank, number, lane) for number, lane in enumerate(lanes)]
    for number, step in enumerate(steps):
        for lane, spans in step.lanes.items():
            args = {"step": number} | ({"rows": step.rows[lane]} if lane in step.rows else {})
            place = {"ph": "X", "pid": rank, "tid": lanes.index(lane), "args": args}
            found += [
                {"name": phase, "ts": 1e6 * (began - steps[0].began), "dur": 1e6 * (ended - began), **place}
                for phase, began, ended in spans
            ]
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"})


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
