"""What torch keeps once a process."""

import torch
from torch.nn.utils import parametrize

from helpers.modules import PassingMode
from unisono.runtime.torch_private import process_wide


def test_hooks_of_every_module() -> None:
    """R9: by their registries."""
    assert not any(process_wide.hooks_of_every_module().values())

    def hook(*_: object) -> None: ...

    with torch.nn.modules.module.register_module_forward_hook(hook):
        assert process_wide.hooks_of_every_module()["_global_forward_hooks"] == [hook]


def test_flags_of_dispatch_modes() -> None:
    """R13: modes of threads that overlap leave them set; those that were set before stay."""
    before = process_wide.dispatch_mode_flags()
    assert before == (False, False, False)
    with PassingMode():
        during = process_wide.dispatch_mode_flags()
        assert during[0] is True
        process_wide.clear_dispatch_mode_flags(during)
        assert process_wide.dispatch_mode_flags() == during
        process_wide.clear_dispatch_mode_flags(before)
        assert process_wide.dispatch_mode_flags() == before
    assert process_wide.dispatch_mode_flags() == before


def test_parametrizations_are_not_cached_for_a_while() -> None:
    """R9."""
    with parametrize.cached(), parametrize.cached():
        assert process_wide.caches_parametrizations()
        with process_wide.parametrizations_not_cached():
            assert not process_wide.caches_parametrizations()
        assert process_wide.caches_parametrizations()
    assert not process_wide.caches_parametrizations()
