"""What torch keeps once a process."""

import torch

from unisono.runtime.torch_private import process_wide


def test_hooks_of_every_module() -> None:
    """R9: by their registries."""
    assert not any(process_wide.hooks_of_every_module().values())

    def hook(*_: object) -> None: ...

    with torch.nn.modules.module.register_module_forward_hook(hook):
        assert process_wide.hooks_of_every_module()["_global_forward_hooks"] == [hook]
