"""Operations are not caught where torch has no key for it; a generator that is looked up."""

from copy import deepcopy

import pytest
import torch

from unisono.runtime.torch_private import dispatcher


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_key_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, is_taken: bool) -> None:
    """N6: where torch lacks it, or another library has it, nothing is caught, and nothing is installed."""
    if is_taken:
        monkeypatch.setattr(torch._C, "_dispatch_has_backend_fallback", lambda key: True)
    monkeypatch.setattr(torch.library, "Library", None)
    key = dispatcher.OF_STREAMS if is_taken else "a key that torch lacks"
    assert dispatcher.catch_operations({}, key) is None
    assert not dispatcher.is_caught(key)


def test_a_generator_that_is_looked_up() -> None:
    """N6: torch's functions act on the generator that is looked up at each call, and return what it returns."""
    own = torch.Generator()
    generator = dispatcher.GeneratorOfThread(lambda: own)
    assert isinstance(generator, torch.Generator)
    assert dispatcher.is_default_generator(generator)
    assert generator.manual_seed(3) is own
    assert generator.initial_seed() == own.initial_seed() == 3
    generator.set_state(torch.Generator().manual_seed(4).get_state())
    assert torch.equal(generator.get_state(), own.get_state())
    copied = deepcopy(generator)
    assert type(copied) is torch.Generator
    assert torch.equal(copied.get_state(), own.get_state())
