"""A typed program of a user's: type checkers accept all of it, and `main` runs.

`assert_type` fails where a type is another one. What follows `type: ignore[...]` must be rejected: strict mypy, and
pyright with `reportUnnecessaryTypeIgnoreComment`, complain where it is not.
"""

from collections.abc import Iterator
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import unisono


class Logged(unisono.DataParallel[nn.Linear]):
    """A subclass that knows its module's class."""

    def features(self) -> int:
        return assert_type(self.module.in_features, int)


class AnyModule(unisono.DataParallel):
    """A subclass as it is written without types: its module is `Any`."""

    def name(self) -> str:
        return str(self.module.name)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.zeros(4, 5), torch.zeros(4, 2)


def rates(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"error": (output - target).abs().mean(), "rows": torch.tensor(len(output))}


def describe(timing: unisono.ReplicaTiming, report: unisono.Report, profile: unisono.Profile) -> str:
    return f"{timing.rows} {report.same} {len(profile.steps())}"


def main() -> None:
    """Use what has a type."""
    devices: list[unisono.DeviceLike] = ["cpu", torch.device("cpu")]
    model = unisono.DataParallel(nn.Linear(5, 2), devices, shares=[2, 1])
    assert_type(model, unisono.DataParallel[nn.Linear])
    assert_type(model.module, nn.Linear)
    assert_type(model.devices, list[torch.device])
    assert_type(model.device_ids, list[int | torch.device])
    assert_type(unisono.DataParallel(model.module, model.device_ids).module.out_features, int)
    assert_type(unisono.DataParallel[nn.Module](nn.Linear(5, 2), ["cpu"]).module, nn.Module)
    Logged(nn.Linear(5, 2), ["cpu"] * 2).features()
    model.shares, model.timeout, model.sync_batch_norm = "even", 60, False
    model.scalars = {"loss": "mean:tokens", "tokens": "sum"}
    model.scalars = "stack"

    outputs = model.map(x for x, _ in batches())
    with outputs:
        assert_type(next(outputs), Any)
    assert_type(model.map([torch.zeros(4, 5)], out=torch.empty(4, 2)), Tensor)
    assert_type(model.evaluate(batches(), nn.functional.mse_loss), float)
    assert_type(model.evaluate(batches(), rates, reduction={"rows": "sum"}), dict[str, float])
    for x, y in model.batches(batches()):
        assert_type((x, y), tuple[Tensor, Tensor])
        model(x).sum().backward()

    samples = unisono.SampleList([1, 2, 3])
    assert_type(samples[0], int)
    assert_type(samples[1:], unisono.SampleList[int])
    assert_type(samples + samples, unisono.SampleList[int])
    assert_type(unisono.scatter(torch.zeros(4, 5), ["cpu", "cpu"]), list[Tensor])
    assert_type(unisono.replicate(nn.Linear(5, 2), ["cpu"]), list[nn.Linear])

    report = unisono.verify(model.module, torch.zeros(3, 5), device_ids=["cpu"] * 2, shares="even", show=False)
    with model.profile() as profile:
        model(torch.zeros(4, 5))
    describe(model.replica_timings[0], report, profile)


def rejected(net: nn.Linear, x: Tensor, model: unisono.DataParallel[nn.Linear]) -> None:
    """What a checker must not accept."""
    unisono.DataParallel("net")  # type: ignore[type-var]
    unisono.DataParallel(net, "cpu")  # type: ignore[arg-type]
    unisono.DataParallel(net, scalars="avg")  # type: ignore[arg-type]
    unisono.DataParallel(net, shares="evenly")  # type: ignore[arg-type]
    unisono.DataParallel(net, loss="max")  # type: ignore[arg-type]
    unisono.DataParallel(net, sync_batch_nrm=True)  # type: ignore[arg-type]
    unisono.DataParallel[nn.Conv2d](net)  # type: ignore[arg-type]
    unisono.verify(net, x, sync_batch_nrm=True)  # type: ignore[call-arg]
    unisono.verify(net, x, scalars="avg")  # type: ignore[arg-type]
    unisono.data_parallel(net, x, "cpu")  # type: ignore[arg-type]
    unisono.scatter(x, "cpu")  # type: ignore[arg-type]
    unisono.install(shares="evenly")  # type: ignore[arg-type]
    model.scalars = "avg"  # type: ignore[assignment]
    model.shares = "evenly"  # type: ignore[assignment]
    model.evaluate(batches(), nn.functional.mse_loss, reduction="max")  # type: ignore[call-overload]
    model.map([x], bach_size=2)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
