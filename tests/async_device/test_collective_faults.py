"""Two ranks with a device each: a collective out of order is seen, and nothing is seen without a fault."""

import signal

import pytest
import torch
from torch import Tensor, nn

from async_device import C, process_group
from async_device.faults import COLLECTIVE_FAULTS
from async_device.training import DELAY_PERCENT, DELAY_US, SEEDS, TOLERANCE, WIDTH, batches, gradients_of, sgd
from helpers.ranks import end_ranks, own_devices, run_ranks
from unisono import DataParallel
from unisono.distributed import bucketed_all_reduce


def normalised() -> nn.Module:
    """Return a module that needs collectives in forward and in backward, in double precision, the same each time."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4)).double()


def trained(module: nn.Module, model: nn.Module, rank: int | None) -> dict[str, Tensor]:
    """Train with the rank's half of each batch, or with all of it; return gradients and parameters, on the host."""
    optimizer, found = sgd(module), dict[str, Tensor]()
    device = next(module.parameters()).device
    for step, batch in enumerate(batches()):
        rows = batch if rank is None else batch.chunk(2)[rank]
        optimizer.zero_grad()
        model(rows.to(device)).pow(2).mean().backward()
        found |= gradients_of(module, step)
        optimizer.step()
    return {name: tensor.detach().cpu() for name, tensor in [*found.items(), *module.named_parameters()]}


def first_seed_with_a_difference(rank: int, fault: str | None) -> int | None:
    """Train with one seed after the other; return the first that shows a difference."""
    expected = trained(plain := normalised(), plain, None)
    (device,) = own_devices(rank)
    process_group._GRACE_S = 0.1
    bits: dict[str, Tensor] | None = None
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FIRST_BUCKET_BYTES", "BUCKET_BYTES"):
            patch.setattr(bucketed_all_reduce, name, WIDTH * WIDTH * 8)
        if fault is not None:
            ranks, planted = COLLECTIVE_FAULTS[fault]
            if rank in ranks:
                planted.plant(patch)
        for seed in SEEDS if fault is not None else SEEDS[:5]:
            module = normalised().to(device)
            found = trained(module, DataParallel(module, [device], sync_batch_norm=True), rank)
            bits = bits or found
            assert found.keys() == expected.keys() == bits.keys()
            for name, tensor in found.items():
                if not torch.allclose(tensor, expected[name], rtol=TOLERANCE, atol=TOLERANCE):
                    return seed
                assert fault is not None or torch.equal(tensor, bits[name]), f"seed {seed}: {name}"
            C.set_seed(seed)
            C.set_delay(DELAY_US, DELAY_PERCENT)
    return None


def test_without_a_fault_all_bits_are_those_without_delays() -> None:
    assert run_ranks(2, first_seed_with_a_difference, None) == [None, None]


@pytest.mark.parametrize("fault", COLLECTIVE_FAULTS)
def test_a_planted_fault_is_seen(fault: str) -> None:
    """By its numbers; or the process group ends the process, as NCCL's watchdog does."""
    ended = end_ranks(2, first_seed_with_a_difference, fault)
    if not any(end.exit_code == -signal.SIGABRT for end in ended):
        assert [end.error for end in ended] == [None, None]
        assert any(end.value for end in ended), f"not seen in {len(SEEDS)} runs"
