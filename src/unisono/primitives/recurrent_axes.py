"""A recurrent layer whose rows are not where the wrapper splits and joins them: a warning with the line to write.

`torch.nn.RNN`, `LSTM` and `GRU` return two values with rows on different axes:

    batch_first=False   input (steps, rows, features)   output (steps, rows, features)   hidden (layers, rows, features)
    batch_first=True    input (rows, steps, features)   output (rows, steps, features)   hidden (layers, rows, features)

A wrapper that is told nothing splits and joins all of them on axis 0, as torch's does: without an error, and with other
numbers than those of one device. Only a layer that is wrapped itself is known to be used like this: a model around it
may transpose its rows.
"""

import warnings
from typing import Any

from torch import nn

_DIM_1 = (
    "{name}(batch_first=False) has its rows on axis 1, in its input, its output and its hidden state, and DataParallel "
    "with dim=0 splits and joins axis 0. Write DataParallel(module, ..., dim=1)."
)
_OUT_DIMS = (
    "{name}(batch_first=True) has the rows of its hidden state on axis 1, and DataParallel with dim=0 joins it on axis "
    "0. Write DataParallel(module, ..., out_dims=(0, 1))."
)


def warn_if_rows_elsewhere(module: nn.Module, dim: int, out_dims: Any) -> None:
    """Warn if `module` is a recurrent layer, and nothing says where its rows are. For a wrapper's constructor."""
    if isinstance(module, nn.RNNBase) and dim == 0 and out_dims is ...:
        said = _OUT_DIMS if module.batch_first else _DIM_1
        warnings.warn(said.format(name=type(module).__name__), UserWarning, stacklevel=3)
