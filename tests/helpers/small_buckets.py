"""Buckets so small that a small module has several of them."""

import functools

import pytest

from unisono.engines import broadcast, replica
from unisono.runtime.buckets import buckets_of


def use_small_buckets(patch: pytest.MonkeyPatch, full_bytes: int) -> None:
    """Send parameters, and sum gradients, in buckets that are full with this many bytes."""
    patch.setattr(broadcast, "buckets_of", functools.partial(buckets_of, full_bytes=full_bytes))
    for name in ("BUCKET_BYTES", "SHARED_BUCKET_BYTES"):
        patch.setattr(replica, name, full_bytes)
