"""Collectives of the asynchronous device run in the order of the calls, and the host waits for none of them."""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from async_device import C, process_group
from helpers.ranks import drawn, end_ranks, on_own_devices, run_ranks


def meet() -> None:
    """Wait, on the host, until the other rank is here."""
    dist.all_reduce(torch.zeros(1, device="cpu"))


def numbers(rank: int) -> torch.Tensor:
    return torch.full((1000,), 1.0 + 2 * rank)


def reads(rank: int, waits: bool) -> list[float]:
    """Return what rank 0 reads of a sum which rank 1 joins when that has been read, or has been queued."""
    with on_own_devices(rank):
        x = numbers(rank)
        if rank:
            meet()
        work = dist.all_reduce(x, async_op=True)
        if waits or rank:
            work.wait()
        found = x.clone() if waits or rank else x.cpu()
        if not rank:
            assert not work.is_completed()
            meet()
        work.wait()
        return [found.unique().item(), x.unique().item()]


@pytest.mark.parametrize(("waits", "first"), [(False, 1.0), (True, 4.0)], ids=["no wait", "a wait"])
def test_streams_wait_and_the_host_does_not(waits: bool, first: float) -> None:
    """Without `work.wait()` a stream reads what was there before."""
    assert run_ranks(2, reads, waits) == [[first, 4.0], [4.0, 4.0]]


def late_input(rank: int) -> float:
    """Return a sum of numbers that the calling stream computes after the call."""
    with on_own_devices(rank):
        x, gate = numbers(rank), C.Marker()
        C.stream_waits(x.device.index, gate)
        x.add_(10)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        x.add_(1)
        for _ in range(50):  # time enough for one that does not wait
            meet()
        assert not work.is_completed()
        gate.set()
        return x.unique().item()


def test_a_collective_comes_after_what_was_queued_before_it() -> None:
    assert run_ranks(2, late_input) == [25.0, 25.0]


def all_kinds(rank: int) -> None:
    with on_own_devices(rank) as options:
        (device,) = map(torch.device, options["device_ids"])
        all_ranks = [drawn(5, 3, seed=seed) for seed in (1, 2)]
        mine = all_ranks[rank]
        found = [torch.empty_like(mine) for _ in all_ranks]
        dist.all_gather(found, mine)
        flat = mine.new_empty(2 * mine.numel())
        dist.all_gather_single(flat, mine.flatten())
        source = mine.clone()
        dist.broadcast(source, 1)
        images = mine.reshape(1, 5, 3, 1).to(memory_format=torch.channels_last)
        mean = dist.all_reduce(images, async_op=True).get_future().then(lambda future: future.value()[0] / 2).wait()
        largest = mine.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        dist.barrier()
        torch.testing.assert_close(found, all_ranks)
        torch.testing.assert_close(flat.view(2, 5, 3), torch.stack(all_ranks))
        torch.testing.assert_close(source, all_ranks[1])
        torch.testing.assert_close(mean.flatten(), sum(all_ranks).flatten() / 2)
        torch.testing.assert_close(largest, torch.maximum(*all_ranks))
        with pytest.raises(ValueError, match="dense"):
            dist.all_reduce(mine.t()[::2])
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, rank)  # by the host's
        assert gathered == [0, 1]
        assert mine.device == device


def test_each_collective() -> None:
    """Where no backend is named, the device has this one, and the CPU gloo."""
    run_ranks(2, all_kinds)


def out_of_order(rank: int) -> None:
    process_group._GRACE_S = 0.1
    with on_own_devices(rank):
        x, y = torch.ones(10), torch.ones(10, dtype=torch.int32)  # gloo would take one for the other
        for tensor in (y, x) if rank else (x, y):
            dist.all_reduce(tensor, async_op=True)
        torch.accelerator.synchronize(x.device)


def test_collectives_in_different_orders_end_the_process() -> None:
    assert -6 in [end.exit_code for end in end_ranks(2, out_of_order)]


def aborted(rank: int) -> None:
    with on_own_devices(rank):
        group = dist.new_group(timeout=datetime.timedelta(minutes=5))
        x = torch.ones(10)
        if not rank:  # the other one never joins
            dist.all_reduce(x, group=group, async_op=True).wait()
            group._get_backend(x.device).abort()
        torch.accelerator.synchronize(x.device)
        meet()


def test_an_aborted_group_lets_its_streams_go_on() -> None:
    run_ranks(2, aborted)
