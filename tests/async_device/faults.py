"""Faults that are planted in the library, each in one line of its source, to see that the device shows them."""

import inspect
import textwrap
from typing import Any, NamedTuple

import pytest

from unisono.autograd import boundary, gradient_sums
from unisono.distributed import gradient_sync
from unisono.distributed.process_group import Communicator
from unisono.inference.lanes import LaneOutput
from unisono.runtime import devices
from unisono.runtime.streams import Copies, CopiesToHost


class Fault(NamedTuple):
    """A function of the library with one line replaced."""

    owner: Any  # the class that has it, or the module that uses it
    function: str
    line: str
    instead: str = "pass"

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Plant the fault. The line has to exist, exactly once, so that a fault that has lost its place is an error."""
        function = vars(self.owner)[self.function]
        source = textwrap.dedent(inspect.getsource(function))
        count = source.count(self.line)
        assert count == 1, f"{count} times in {self.owner.__name__}.{self.function}: {self.line}"
        planted: dict[str, Any] = {}
        source = source.replace("super()", f"super({self.owner.__name__}, self)")  # which works inside a class only
        code = "from __future__ import annotations\n" + source.replace(self.line, self.instead)
        exec(code, inspect.unwrap(function).__globals__, planted)
        patch.setattr(self.owner, self.function, planted[self.function])


_COMPUTE = "tensor.record_stream(self._computing[target])"
_MADE = "self._made.append((here, [tensor]))"
_WAIT = "event.let_wait(torch.accelerator.current_stream(self._devices[reader]))"
_MAKERS = "wait_for_maker(stream, (t for t in tensors if t is not None and t.device == stream.device))"

# Of maps, which a map shows sooner than the training.
MAP_FAULTS = {
    "a mapped output is used before its copy has ended": Fault(LaneOutput, "given", "self.copies.wait_copies(0)"),
    "a mapped output is copied to the host before it is computed": Fault(
        CopiesToHost, "begin", "_devices.wait_stream(stream, computing)"
    ),
    "no record_stream of a mapped output on the copy stream": Fault(
        CopiesToHost, "begin", "tensor.record_stream(stream)"
    ),
    "a lane does not wait until its output is on the host": Fault(
        LaneOutput, "arrived", "copies.have_ended(wait=True)"
    ),
}

FAULTS = {
    # A wait for a stream or an event is missing.
    "the copy does not wait for what makes its source": Fault(
        Copies, "_read_from", "_devices.wait_stream(stream, torch.accelerator.current_stream(source))"
    ),
    "the reader does not wait for its copies": Fault(Copies, "wait_copies", _WAIT),
    "no event after the copies": Fault(
        Copies, "_on_copy_streams", "self._last[reader, from_host] = _devices.Event(copy_stream(target, from_host))"
    ),
    "no event after the parameters": Fault(
        Copies, "_pass_along", "self._last[hop.reader, False] = _devices.Event(hop.arrives_on)"
    ),
    "the sum does not wait for the gradients here": Fault(Copies, "wait_made", "event.let_wait(copy_stream(target))"),
    "the boundary does not wait for the gradients of its outputs": Fault(boundary, "wait_for_makers", _MAKERS),
    "the gradients of inputs, or of a loss that left forward, are joined before they are computed": Fault(
        gradient_sums, "wait_for_makers", _MAKERS
    ),
    # Memory is freed, and used again, too early.
    "no record_stream of a copy on its reader's stream": Fault(
        Copies, "to", "copy.record_stream(self._computing[target])"
    ),
    "a gradient here is not kept for the copy stream": Fault(Copies, "keep", _MADE),
    "no record_stream of a sum on the compute stream": Fault(Copies, "record_stream", _COMPUTE),
    "no record_stream of the gradients of inputs, or of a loss that left forward": Fault(
        gradient_sums, "wait_for_makers", _MAKERS, "wait_for_maker(stream, [])"
    ),
    # The host reads too early.
    "a copy to the host is not waited for": Fault(devices, "copied_to", "non_blocking=not wait", "non_blocking=True"),
    "a begun copy to the host is not waited for": Fault(devices, "queued_work", "queued.wait()"),
    # The caller's buffers are written into again before they have been read.
    "a batch on a device may be overwritten too early, and parameters do not wait for the last sums": Fault(
        Copies, "join", "_devices.wait_stream(torch.accelerator.current_stream(device), stream)"
    ),
    "a batch in pinned memory may be overwritten too early": Fault(Copies, "__exit__", "event.wait()"),
    **MAP_FAULTS,
}

# Each with the ranks, of two, in which it is planted.
COLLECTIVE_FAULTS = {
    "one rank sends its buckets in another order": (
        [1],
        Fault(
            gradient_sync,
            "plan_for_ranks",
            "in reversed(list(enumerate(parameters)))",
            "in enumerate(parameters)",
        ),
    ),
    "no stream waits for a collective": ([0, 1], Fault(Communicator, "wait", "work.wait()")),
}
