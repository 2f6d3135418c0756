"""Which options of the training command go together on which devices."""

from collections.abc import Sequence

import torch

from manyhands.console.errors import OptionError
from manyhands.training.options import Options


def expect_combination(options: Options, places: Sequence[Sequence[torch.device]], *, synchronised: bool) -> None:
    """Check that what is asked for goes together on these devices.

    Args:
        options: what is asked for.
        places: the devices of each process.
        synchronised: whether the model has batch norm, and that is to see the rows of all replicas.

    Raises:
        OptionError: it cannot be done; says what to leave out.
    """
    everywhere = [device for process in places for device in process]
    there = ", ".join(map(str, everywhere))
    if options.engine == "processes" and synchronised and any(device.type != "cpu" for device in everywhere):
        raise OptionError(
            f"--engine processes on accelerators, and --devices {options.devices} is {there}, cannot synchronise batch "
            "norm: leave out --engine, or take --no-sync-batch-norm"
        )
    if options.compile and synchronised and len(everywhere) > 1:
        one_device = " or --devices 1" if len(places) == 1 else ""
        raise OptionError(
            f"--compile with batch norm synchronised over {len(everywhere)} replicas ({there}) would be compiled in "
            f"pieces between the batch norms, and be slower than without: take --no-sync-batch-norm{one_device}, or "
            "leave out --compile"
        )
