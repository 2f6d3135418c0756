"""Several processes under a launcher: each computes its part of the same batches; the first one has all outputs.

Of n processes, process r computes batches r, r + n, r + 2 n, ... Round t has batches t n to t n + n - 1: the ranks tell
each other how theirs went, and rank 0 gathers the outputs. While rank 0 uses them, the lanes of all ranks go on.

Guarantees
    - Rank 0 yields all outputs in order. Other ranks yield none: their iterators run until rank 0's ends.
    - All ranks have been given the same batches, as far as a sample of their numbers shows; else all raise an error.
      Otherwise a loader of which each rank has its own part (a DistributedSampler) would lose rows unnoticed.
    - A batch that fails ends the iteration on all ranks, on rank 0 after the outputs before it.
"""

import contextlib
import hashlib
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from unisono.distributed.process_group import Communicator
from unisono.inference.batch_map import OutputIterator
from unisono.inference.batches import SampleBatches
from unisono.inference.metrics import Totals
from unisono.primitives import pytree
from unisono.primitives.visitor import INERT
from unisono.runtime import devices as _devices
from unisono.runtime.buckets import is_plain
from unisono.runtime.errors import described
from unisono.runtime.streams import wait_for_makers
from unisono.runtime.thread_pool import Outcome
from unisono.runtime.tracebacks import without_own_frames

_MAPPING = "the outputs of a map"
_OUTPUT, _NO_MORE, _FAILED, _CLOSED = range(4)
_SAMPLED = 64  # numbers of each tensor that are compared
_DIFFERENT_BATCHES = (
    "the processes got different batches. Under a launcher give map and evaluate the same batches in every "
    "process, in the same order; each process computes its part. So use no DistributedSampler and no "
    "shuffling, and equal seeds for random augmentation."
)
_CPU = torch.device("cpu")


class RankBatches(Iterator[Any]):
    """The batches of one process, and digests of all batches, by which the processes compare them."""

    def __init__(self, batches: Iterable[Any], communicator: Communicator) -> None:
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self._samples = batches if isinstance(batches, SampleBatches) else None
        self._batches: Iterable[Any] = batches
        self._iterator: Iterator[Any] | None = None
        self._num_seen = 0
        self._hash = hashlib.blake2b(digest_size=6)
        self._digests: dict[int, float] = {}  # of all batches before a round
        if self._samples is not None:
            self._hash.update(str(len(self._samples)).encode())

    def __next__(self) -> Any:
        if self._samples is not None:  # which need not be read to be skipped
            number = self._num_seen + self._rank
            if number >= len(self._samples):
                raise StopIteration
            self._num_seen += self._world_size
            return self._samples[number]
        self._iterator = iter(self._batches) if self._iterator is None else self._iterator
        while True:
            batch = next(self._iterator)
            number, self._num_seen = self._num_seen, self._num_seen + 1
            if number % self._world_size == 0:
                self._digests[number // self._world_size] = self.digest
            self._hash.update(_sample(batch))
            if number % self._world_size == self._rank:
                return batch

    def __len__(self) -> int:
        """Return how many batches this process has in all; raise TypeError if that is not known."""
        return len(range(self._rank, len(self._batches), self._world_size))  # type: ignore[arg-type]

    @property
    def digest(self) -> float:
        """Of all batches so far."""
        return float(int.from_bytes(self._hash.digest()))

    def digest_before(self, number: int) -> float:
        """Return the digest of all batches before a round; -1 if this process has not had so many."""
        return self.digest if self._samples is not None else self._digests.pop(number, -1.0)


def _sample(batch: Any) -> bytes:
    """Return what differs, most likely, between two batches of different rows."""
    seen: list[Any] = []
    for path, leaf in pytree.leaves(batch):
        if isinstance(leaf, torch.Tensor):
            seen.append((path, tuple(leaf.shape), str(leaf.dtype)))
            if is_plain(leaf) and _devices.is_cpu(leaf.device) and leaf.numel():
                flat = leaf.detach().reshape(-1)
                seen.append(flat[:: -(-len(flat) // _SAMPLED)].tolist())
        else:
            seen.append((path, leaf if type(leaf) in INERT else type(leaf).__name__))
    return repr(seen).encode()


class RankMap(OutputIterator):
    """The outputs of all processes' batches, on rank 0. See the module's docstring.

    Args:
        outputs: of this process's part of the batches.
        own_batches: these.
        device: where rank 0 has the outputs.
    """

    def __init__(
        self, outputs: OutputIterator, own_batches: RankBatches, communicator: Communicator, device: torch.device
    ) -> None:
        self._outputs, self._own_batches = outputs, own_batches
        self._communicator, self._device = communicator, device
        self._round = 0
        self._gathered: deque[Outcome[Any]] = deque()  # of the last round
        self._streams: list[torch.Stream] = []  # that are current in a round
        self._has_ended = False

    @without_own_frames
    def __next__(self) -> Any:
        while not self._gathered:
            if self._has_ended:
                raise StopIteration
            try:
                self._run_round()
            except BaseException as error:
                if not issubclass(type(error), Exception):  # Ctrl-C: the others must not wait for this process
                    self._communicator.failures.abort(error)
                self._end()
                raise
        outcome = self._gathered.popleft()
        try:
            if outcome.error is not None:
                raise outcome.error
            if self._streams != _devices.current_streams([self._device]):  # the caller may have others for each
                wait_for_makers(self._streams, pytree.all_tensors(outcome.value))
            return outcome.value
        finally:
            del outcome  # a traceback refers to this frame: nothing in it may refer to an exception

    def _run_round(self) -> None:
        rank, world_size, number = self._communicator.rank, self._communicator.world_size, self._round
        self._round += 1
        self._streams = _devices.current_streams([self._device])
        status, value, error = self._next_own()
        mine = [status, self._own_batches.digest_before(number)]
        all_ranks = self._communicator.all_gather(mine, _MAPPING).wait()
        statuses = [int(other) for other, _ in all_ranks]
        if _CLOSED in statuses:
            self._end()
            if statuses[0] != _CLOSED:
                raise RuntimeError(f"rank {statuses.index(_CLOSED)} closed its map before all outputs were gathered")
            return
        if set(statuses) == {_NO_MORE}:
            self._end()
            last = self._communicator.all_gather([self._own_batches.digest], _MAPPING).wait()
            _check_same_batches(digest for (digest,) in last)
            return
        if _FAILED in statuses:
            self._end()
        else:
            _check_same_batches(digest for _, digest in all_ranks)
        values = self._communicator.gather_object(value if rank else None, _MAPPING)
        if rank:
            if _FAILED in statuses:
                failed = number * world_size + statuses.index(_FAILED)
                raise error or RuntimeError(f"rank {statuses.index(_FAILED)} failed at batch {failed}")
            return
        for other, how in enumerate(statuses):
            if how == _OUTPUT:
                if other:
                    value = pickle.loads(values[other])
                    value = pytree.map_tensors(lambda tensor: _devices.moved_to(tensor, self._device), value)
                self._gathered.append(Outcome(value))
            elif how == _FAILED:
                text = f"batch {number * world_size + other} failed on rank {other}: {values[other]}"
                self._gathered.append(Outcome(error=RuntimeError(text) if error is None or other else error))
                break

    def _next_own(self) -> tuple[int, Any, Exception | None]:
        """Return how this process's next batch went; the output, as rank 0 needs it, or the error's text; the error."""
        try:
            output = next(self._outputs)
            if self._communicator.rank:  # pickled here, so that what cannot be is an error of this batch on all ranks
                output = pickle.dumps(pytree.map_tensors(lambda tensor: _devices.moved_to(tensor, _CPU), output))
        except StopIteration:
            return _NO_MORE, None, None
        except Exception as error:  # noqa: BLE001 - raised when all ranks know of it
            return _FAILED, described(error), error
        return _OUTPUT, output, None

    def _end(self) -> None:
        self._has_ended = True
        self._outputs.close()

    def close(self) -> None:
        self._gathered.clear()
        if not self._has_ended:
            self._end()
            self._communicator.all_gather([_CLOSED, 0.0], _MAPPING).wait()

    def __del__(self) -> None:
        if not getattr(self, "_has_ended", True) and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):  # the next call of a collective raises it again
                self.close()


def _check_same_batches(digests: Iterable[float]) -> None:
    if len(set(digests)) > 1:
        raise RuntimeError(_DIFFERENT_BATCHES)


def merged(communicator: Communicator, own_batches: RankBatches, totals: Totals, error: BaseException | None) -> Totals:
    """Return the totals of all processes, the same in each.

    Args:
        own_batches: this process's batches; all of them have been taken, unless there is an error.
        totals: of these.
        error: what has ended this process's evaluation.

    Raises:
        BaseException: `error`. RuntimeError: another process's, or batches that differ.
    """
    text = None if error is None else described(error)
    all_ranks = communicator.all_gather_object((totals, own_batches.digest, text), "the results of an evaluation")
    if error is not None:
        raise error
    for rank, (_, _, other) in enumerate(all_ranks):
        if other is not None:
            raise RuntimeError(f"the evaluation failed on rank {rank}: {other}")
    _check_same_batches(digest for _, digest, _ in all_ranks)
    result: Totals = all_ranks[0][0]
    for other, _, _ in all_ranks[1:]:
        result.merge(other)
    return result
