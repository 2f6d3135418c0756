"""How devices compute float32 products: settings are restored, whatever torch calls them."""

import pytest
import torch

from unisono.runtime import devices, precision

CPU = torch.device("cpu")


def test_flags_of_products():
    """R14: torch's older setting, and its newer ones, which the older one may know nothing of."""
    before = precision.product_flags()
    try:
        torch.set_float32_matmul_precision("high")
        older = precision.product_flags()
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        newer = precision.product_flags()
        assert newer[0] is None
        for flags in (older, newer):
            precision.set_product_flags(before)
            assert precision.product_flags() != flags
            precision.set_product_flags(flags)
            assert precision.product_flags()[1:] == flags[1:]
    finally:
        precision.set_product_flags(before)
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("kind", "capability", "hip", "expected"),
    [
        ("cuda", (7, 5), None, False),
        ("cuda", (8, 0), None, True),
        ("cuda", (9, 4), "6.0", False),
        ("cpu", (8, 0), None, False),
    ],
)
def test_which_devices_have_tf32_and_fused_optimizers(monkeypatch, kind, capability, hip, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert precision.has_tf32(torch.device(kind, 0)) == expected
    assert devices.has_fused_optimizers(torch.device(kind, 0)) == (kind == "cuda")


@pytest.mark.parametrize("rounded", [False, True])
def test_float32_products_are_the_users_again_afterwards(rounded):
    """The settings themselves can be read and written without a GPU."""

    def settings():
        older = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32  # an error if they do not fit
        return older, precision.convolution_flags()

    before = settings()
    with precision.float32_products(torch.device("cuda", 0), rounded=rounded):
        assert precision.rounds_float32(torch.device("cuda", 0)) == rounded
        assert torch.backends.cudnn.benchmark == rounded
    assert settings() == before
    with precision.float32_products(CPU, rounded=True):
        assert settings() == before
        assert not precision.rounds_float32(CPU)
