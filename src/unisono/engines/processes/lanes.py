"""The lanes of the processes engine: the first computes in this process, each other one has a worker to itself.

    open     what changed in the module ──► all workers, and wait for their replies
    a batch  one message with the whole batch ──► the lane's worker ──► one reply with its output

A lane sends and receives in a thread of its own, on its worker's channel alone. A batch shares the engine's step lock
with those of other lanes; a step (the backward of an earlier forward, say) waits for their end, and has the workers
until it ends. Forwards do not: while lanes are open they run in this process, because the workers' modules must stay as
they were when the lanes were opened.

A worker that dies takes its batch with it. Its lane ends, the other ones go on; the group is ended when no lane will
get another batch.
"""

from typing import Any

import torch

from unisono.engines.base import Lane, LaneCall, LaneEndedError, LaneOutput, Lanes
from unisono.engines.lanes import tensors_to_place
from unisono.engines.processes.channel import ChannelClosedError
from unisono.engines.processes.messages import Forward, Reply, TensorRef
from unisono.engines.processes.pickling import dumps
from unisono.engines.processes.remote_graph import repeat_messages
from unisono.engines.processes.worker_group import StepLock, WorkerGroup, workers_timed_out
from unisono.runtime import devices as _devices
from unisono.runtime.errors import ReplicaLost, log
from unisono.runtime.thread_state import ProcessState, ThreadState

_BATCH_IS_LOST = "Its batch is lost. The iteration can go on, without this worker; the module is as it was."


class WorkerLanes(Lanes):
    """The open lanes of a worker group.

    Args:
        here: the lane in this process.
        retries: whether another lane computes the batch of a worker that is lost.
    """

    def __init__(
        self, worker_group: WorkerGroup, step_lock: StepLock, call: LaneCall, here: Lane, *, retries: bool
    ) -> None:
        self._worker_group = worker_group
        self._is_stopped = False
        numbers = range(1, len(call.devices))
        self._of_workers = [WorkerLane(worker_group, step_lock, call, number, retries) for number in numbers]
        super().__init__([here, *self._of_workers], worker_group.timeout_s)

    @property
    def are_open(self) -> bool:
        """Whether workers may get another batch."""
        return not self._is_stopped and not self._worker_group.ended

    def stop(self) -> None:
        self._is_stopped = True
        if any(lane.has_ended for lane in self._of_workers):
            self._worker_group.end()


class WorkerLane(Lane):
    """See the module's docstring; `retries` as in `WorkerLanes`."""

    has_own_timeout = True  # the channel's, which has that of the group

    def __init__(
        self, worker_group: WorkerGroup, step_lock: StepLock, call: LaneCall, number: int, retries: bool
    ) -> None:
        super().__init__(call, number)
        self._group, self._step_lock = worker_group, step_lock
        self._worker, self._retries = worker_group.workers[number - 1], retries

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int | None) -> LaneOutput:
        with self._step_lock.share():
            if self._group.ended:
                raise LaneEndedError
            try:
                self._send(args, kwargs, seed or 0)
                reply = self._worker.receive()
            except ChannelClosedError:
                raise self._lost(self._worker.death(self.name, self.number, self.device, _BATCH_IS_LOST)) from None
            except TimeoutError:
                error = workers_timed_out({0: self._worker}, self._group.timeout_s or 0.0, self.names(), _BATCH_IS_LOST)
                self._worker.kill()
                raise self._lost(error) from None
            except OSError:  # the system refuses what a message takes, perhaps in its middle
                self.has_ended = True
                raise
            assert isinstance(reply, Reply)
            self.has_ended = reply.out_of_step
            repeat_messages(reply)
            if reply.error is not None:
                raise reply.error.exception()
            segments, target = self._worker.received_segments, self.call.output_device
            value = reply.output(segments, lambda _, tensor: _devices.copied_to(tensor, target))
            return LaneOutput(value, reply.random_digest is not None)

    def _lost(self, error: ReplicaLost) -> Exception:
        """Return what to raise when the worker is lost."""
        self.has_ended = True
        if not self._retries:
            return error
        log.warning("%s Another replica computes its batch.", error.cause)
        return LaneEndedError()

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> None:
        buffer = self._worker.send_buffer
        to_place = set(map(id, tensors_to_place((args, kwargs))))

        def to_reference(tensor: torch.Tensor) -> TensorRef:
            target = self.device if id(tensor) in to_place else tensor.device
            return TensorRef.put(buffer, tensor, requires_grad=tensor.requires_grad, device=target)

        try:
            shard = dumps((args, kwargs), to_reference)
        except BaseException:
            buffer.clear()
            raise
        self._worker.send(forward_of_lane(self.call, self.number, shard, seed), ())


def forward_of_lane(call: LaneCall, replica: int, shard: bytes | None, seed: int) -> Forward:
    """Return the message of a batch to a replica; without a shard, of an update only."""
    return Forward(
        thread=ThreadState.capture(),
        process=ProcessState.capture(),
        num_threads=torch.get_num_threads(),
        seed=seed,
        graph=-1,  # without gradients there is none
        method=call.method,
        shard=shard,
        replica=replica,
        num_replicas=len(call.devices),
        device=call.devices[replica],
    )
