"""`unisono run --verify`: the first step of each wrapper of a script, compared with one device.

The comparison runs just before the wrapper's first call, with copies of the model and of the inputs. It has a loss of
its own, so the script needs none.
"""

import sys
import threading
import weakref
from typing import Any

from unisono.data_parallel import DataParallel
from unisono.primitives.shared_iterators import shared
from unisono.runtime.thread_pool import inside_replica
from unisono.verification.first_call import FirstCall
from unisono.verification.verify import verify


class FirstStepComparison:
    """Compares each wrapper's first step, and prints the report on standard error.

    Attributes:
        num_compared: wrappers that were compared.
    """

    def __init__(self) -> None:
        self.num_compared = 0
        self._tried: weakref.WeakSet[DataParallel] = weakref.WeakSet()
        self._lock = threading.Lock()  # held while a comparison runs, whose own calls are not compared

    def before(
        self, model: DataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Compare, if this is the first call of a wrapper on several devices; return the inputs for the call."""
        is_due = len(model.devices) > 1 and model not in self._tried and not inside_replica()
        if not is_due or not self._lock.acquire(blocking=False):
            return inputs, kwargs
        try:
            self._tried.add(model)
            inputs, kwargs = shared((inputs, kwargs))
            self._compare(model, FirstCall(model.module, inputs, kwargs))
        finally:
            self._lock.release()
        return inputs, kwargs

    def _compare(self, model: DataParallel, call: FirstCall) -> None:
        try:
            report = verify(model, call.inputs(), show=False)
        except Exception as error:  # noqa: BLE001 - of the script's model, which the call itself will raise, too
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"unisono run: a wrapper was not compared: {reason}", file=sys.stderr, flush=True)
            return
        self.num_compared += 1
        print(report, file=sys.stderr, flush=True)
