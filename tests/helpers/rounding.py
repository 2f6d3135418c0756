"""How far rounding may move a result: by an error bound, or by what torch's own kernels are off in the same test.

Another processor sums in another order, and torch picks other kernels on it. So two results in low precision agree
within rounding only, and what one machine prints says nothing about the next one.
"""

import torch

# Torch's result in the same precision is one sample of the rounding, and so is ours: ours may be this many times as far
# from the exact result.
FACTOR = 4.0


def rounding_bound(num_terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return how far a sum of so many terms may be off in any order, as a part of the sum of their magnitudes.

    A product of two rounded numbers is one term.

    Source: N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 2002, section 3.1: n u / (1 -
    n u), where u is half of `torch.finfo(dtype).eps`.
    """
    error = num_terms * torch.finfo(dtype).eps / 2
    assert error < 1, f"{num_terms} terms in {dtype} may lose every digit"
    return error / (1 - error)


def assert_as_accurate(
    actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, num_terms: int, what: str = ""
) -> None:
    """Check that `actual` is as near to the exact result as torch's result in the same precision is.

    Errors are those of the largest entry, and count as parts of the largest exact entry.

    Args:
        actual, plain: ours and torch's, of one dtype.
        exact: the result in double precision.
        num_terms: how many terms the longest sum on the way to it has. Where torch's own error happens to be small,
            the bound for such a sum is what is allowed.
        what: names the tensor in the message.
    """
    assert actual.dtype == plain.dtype, what
    assert actual.shape == plain.shape == exact.shape, what
    if not actual.is_floating_point():
        assert torch.equal(actual, exact), what
        return
    scale = max(1.0, exact.abs().max().item())
    ours, torchs = ((each.double() - exact).abs().max().item() / scale for each in (actual, plain))
    allowed = max(FACTOR * torchs, rounding_bound(num_terms, actual.dtype))
    assert ours <= allowed, f"{what}: {ours:.1e} from the exact result, torch's is {torchs:.1e}; allowed {allowed:.1e}"
