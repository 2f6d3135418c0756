import torch
from torch import nn

from manyhands import DataParallel
from manyhands.training.work import Work

CPU = torch.device("cpu")


def work_of(num_replicas: int, parts: list[int]) -> Work:
    """Run parts with so many rows, forward and backward."""
    devices = [CPU] * num_replicas
    model = DataParallel(nn.Linear(3, 2), device_ids=devices, shares="even")
    work = Work(devices)
    for rows in parts:
        with work.measured(model, rows):
            model(torch.rand(rows, 3)).sum().backward()
    return work


def test_one_device_has_all_rows() -> None:
    (share,) = work_of(1, [5]).shares
    assert (share.device, share.rows) == (CPU, 5)
    assert share.seconds > 0


def test_parts_of_a_step_are_added_up() -> None:
    shares = work_of(3, [7, 7, 6]).shares
    assert [share.rows for share in shares] == [3 + 3 + 2, 2 + 2 + 2, 2 + 2 + 2]
    assert all(share.seconds > 0 for share in shares)


def test_a_replica_without_rows_is_there_with_none() -> None:
    shares = work_of(3, [2]).shares
    assert [share.rows for share in shares] == [1, 1, 0]
    assert shares[2].seconds == 0
