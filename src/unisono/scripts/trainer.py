"""The Trainer of the library transformers takes a wrapper of ours for one device.

For several devices (`args.n_gpu`) the Trainer has arithmetic of its own, made for torch's wrapper: it repeats the
number of tokens for each device, multiplies the loss by the number of devices, and takes the mean of the devices'
losses. That is exact for some models only. For a model that is parallel by itself it counts one device; here it does so
for one in a wrapper of ours. The number stays as it is where it decides how many rows a batch has, and whether a model
is wrapped.

Changes the class `transformers.Trainer` when it is imported, and only what it does with a wrapper of ours; so this
stays when torch's names are put back. What it assumes of the class, tests/clients/test_transformers.py checks with the
installed version.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from unisono.data_parallel import DataParallel as OwnDataParallel
from unisono.runtime.errors import log_once
from unisono.scripts.label_counts import LabelWeights
from unisono.scripts.wrapper import is_own

_MODULE = "transformers.trainer"
_ARITHMETIC = ("get_batch_samples", "training_step", "prediction_step", "compute_loss")
_ADAPTED = "_unisono_adapted"  # an attribute of the class that was changed
_UNKNOWN = (
    "the Trainer of this version of transformers has no {names}, so unisono leaves it unchanged: on several "
    "devices its losses may be wrong. Use transformers 5.23, with which unisono is tested."
)


def adapt_when_imported() -> None:
    """Change the Trainer, now or as soon as the program imports it."""
    if _MODULE in sys.modules:
        _adapt(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _TrainerFinder())


def stop_waiting() -> None:
    """Leave a Trainer that is imported from now on as it is."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _TrainerFinder)]


class _TrainerFinder(MetaPathFinder):
    """Finds the Trainer's module once, as the other finders do, and changes the class when the module has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        stop_waiting()
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_adapt(module: ModuleType) -> None:
                execute(module)
                _adapt(module)

            loader.exec_module = execute_and_adapt
        return spec


def _adapt(module: ModuleType) -> None:
    trainer: Any = vars(module).get("Trainer")
    if trainer is None or _ADAPTED in vars(trainer):
        return
    if missing := [name for name in (*_ARITHMETIC, "_wrap_model") if not hasattr(trainer, name)]:
        log_once(_UNKNOWN.format(names=", ".join(missing)))
        return
    setattr(trainer, _ADAPTED, True)
    for name in _ARITHMETIC:
        setattr(trainer, name, _for_one_device(getattr(trainer, name)))
    trainer._wrap_model = _wrapping_once(trainer._wrap_model)


def _for_one_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of the Trainer that counts one device while the Trainer has a wrapper of ours."""

    @functools.wraps(method)
    def counting_one(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = trainer.args
        num_devices = arguments.n_gpu
        if num_devices <= 1 or not isinstance(trainer.model_wrapped, OwnDataParallel):
            return method(trainer, *args, **kwargs)
        arguments._n_gpu = 1  # as the Trainer does for a model that is split over devices
        try:
            return method(trainer, *args, **kwargs)
        finally:
            arguments._n_gpu = num_devices

    return counting_one


def _wrapping_once(wrap_model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the Trainer's `_wrap_model`, with one wrapper for training and all evaluations.

    The Trainer would make one for each evaluation, with replicas of its own.
    """

    @functools.wraps(wrap_model)
    def wrapping_once(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        before = trainer.model_wrapped
        if isinstance(before, OwnDataParallel) and before.module is model:
            return before
        wrapped = wrap_model(trainer, model, *args, **kwargs)
        if is_own(wrapped) and wrapped is not model:
            wrapped.label_weights = LabelWeights(shifted=_shifts_labels(trainer, model))
            trainer.model_wrapped = wrapped
            if trainer.accelerator.native_amp:  # bf16=True, fp16=True: autocast, which it gives to one device only
                trainer.accelerator.prepare_model(wrapped, device_placement=False, evaluation_mode=True)
        return wrapped

    return wrapping_once


def _shifts_labels(trainer: Any, model: Any) -> bool:
    """Return whether a model's loss leaves the first label of each row out, as that of causal language models does.

    The Trainer knows two signs of that, the loss (for its number of tokens) and the class (for label smoothing).
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    causal = set(getattr(sys.modules[_MODULE], "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {}).values())
    by_class = any(type(module).__name__ in causal for module in model.modules())  # adapters such as PEFT's wrap it
    return by_class or getattr(trainer, "_loss_shifts_labels", False)
