"""IDX files are read to the byte, and an error is one line that names the file."""

import gzip
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.commands import idx_bytes
from unisono.training import idx
from unisono.training.idx import IdxError, read_idx

PICTURES = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4) * 10
LABELS = torch.tensor([3, 0, 255], dtype=torch.uint8)
GOOD = idx_bytes(PICTURES)
ZIPPED = gzip.compress(GOOD, mtime=0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some-idx-ubyte"


def two_members(content: bytes) -> bytes:
    return gzip.compress(content[:9]) + gzip.compress(content[9:])


@pytest.mark.parametrize("array", [PICTURES, LABELS], ids=["pictures", "labels"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, two_members])
@pytest.mark.parametrize("name", ["idx-ubyte", "idx-ubyte.gz"])
def test_reads_what_was_written(tmp_path, array, pack, name):
    """Gzip is seen from the content, not the name: a browser may unpack a download and keep its name."""
    path = tmp_path / name
    path.write_bytes(pack(idx_bytes(array)))
    read = read_idx(path, dims=array.dim())
    assert read.dtype == torch.uint8
    assert read.equal(array)
    read += 1  # it is writable, and belongs to the caller
    assert read_idx(path, dims=array.dim()).equal(array)


def test_more_than_one_chunk(path):
    array = (torch.arange(idx._CHUNK_BYTES + 5) % 251).to(torch.uint8)
    path.write_bytes(idx_bytes(array))
    assert read_idx(path, dims=1).equal(array)


def with_type(code: int) -> bytes:
    return GOOD[:2] + bytes([code]) + GOOD[3:]


ABSURD = GOOD[:4] + b"\xff" * 12 + GOOD[16:]

DAMAGED = {
    "empty": (b"", "is not an IDX file: it is empty where 00 00 08 03 was expected"),
    "web page": (b"<!DOCTYPE html>", "is not an IDX file: it begins with 3c 21 44 4f where 00 00 08 03"),
    "three bytes": (GOOD[:3], "is not an IDX file: it begins with 00 00 08 where"),
    "first byte": (b"\1" + GOOD[1:], "is not an IDX file: it begins with 01 00 08 03 where"),
    "unknown type": (with_type(0x0A), "is not an IDX file: it begins with 00 00 0a 03 where"),
    "floats": (with_type(0x0D), r"holds 32-bit floats \(type 0x0d\); only unsigned bytes \(0x08\) can be read"),
    "signed": (with_type(0x09), "holds signed bytes"),
    "labels": (idx_bytes(LABELS), r"has 1 dimension\(s\) \(labels\) where 3 \(pictures\) were expected"),
    "header cut": (GOOD[:14], "is truncated: it ends inside its header of 16 bytes"),
    "no data": (GOOD[:16], "is truncated: its header promises 2 x 3 x 4 = 24 bytes, 0 follow it"),
    "data cut": (GOOD[:-1], "is truncated: its header promises 2 x 3 x 4 = 24 bytes, 23 follow it"),
    "surplus": (GOOD + b"\0", "has bytes left over: its header promises 2 x 3 x 4 = 24, more follow it"),
    "absurd": (ABSURD, "its header promises 4294967295 x 4294967295 x 4294967295 = "),
    "no rows": (GOOD[:4] + bytes(4) + GOOD[8:], "holds nothing: its header says 0 x 3 x 4"),
    "no width": (GOOD[:12] + bytes(4) + GOOD[16:], "holds nothing: its header says 2 x 3 x 0"),
}


def flip(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


BAD_GZIP = {
    "end cut": (ZIPPED[:-1], "is truncated: its gzip stream ends"),
    "method": (flip(ZIPPED, 2), "is damaged: bad gzip data"),
    "stream": (flip(ZIPPED, 10), "is damaged: bad gzip data"),
    "checksum": (flip(ZIPPED, len(ZIPPED) - 8), "is damaged: bad gzip data .*CRC"),
    "tail": (ZIPPED + b"tail", "is damaged: bad gzip data"),
    "bomb": (
        gzip.compress(GOOD[:4] + b"\0\1\0\0" * 3),
        r"gzipped, .* = 281474976710656 bytes, more than.*unpack it \(gunzip\)",
    ),
}
ZIPPED_DAMAGED = {f"{name}, gzipped": (gzip.compress(content), message) for name, (content, message) in DAMAGED.items()}


@pytest.mark.parametrize(("name", "damaged"), (DAMAGED | ZIPPED_DAMAGED | BAD_GZIP).items())
def test_damage_is_one_line_that_names_the_file(path, name, damaged):
    content, message = damaged
    path.write_bytes(content)
    with pytest.raises(IdxError, match=message) as caught:
        read_idx(path, dims=3)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@given(cut=st.integers(0, len(ZIPPED) - 1))
def test_no_cut_of_a_gzipped_file_goes_unnoticed(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "images"
    path.write_bytes(ZIPPED[:cut])
    with pytest.raises(IdxError):
        read_idx(path, dims=3)


@given(at=st.integers(0, len(ZIPPED) - 1), bit=st.integers(0, 7), zipped=st.booleans())
def test_a_flipped_bit_is_an_error_or_a_pixel(tmp_path_factory, at, bit, zipped):
    """T4: gzip has a checksum, so there a bit that was flipped changes nothing or is an error."""
    content = bytearray(ZIPPED if zipped else GOOD)
    at %= len(content)
    content[at] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped"
    path.write_bytes(content)
    try:
        read = read_idx(path, dims=3)
    except IdxError:
        return
    assert read.shape == PICTURES.shape
    assert (read != PICTURES).sum() == (0 if zipped else 1)


def test_what_a_gzipped_file_may_unpack_to(path):
    """T5: a file of some kilobytes took as many megabytes; 16 MiB are always allowed."""
    zeros = torch.zeros(16 << 20, dtype=torch.uint8)
    header = idx_bytes(zeros[:0])[:4]
    path.write_bytes(gzip.compress(header + (16 << 20).to_bytes(4, "big") + bytes(16 << 20)))
    assert read_idx(path, dims=1).equal(zeros)
    path.write_bytes(gzip.compress(header + (1 << 26).to_bytes(4, "big") + bytes(1 << 26), compresslevel=1))
    tracemalloc.start()
    try:
        with pytest.raises(IdxError, match=f"= {1 << 26} bytes, more than 100 times the size"):
            read_idx(path, dims=1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_missing_file_and_a_folder_are_named(tmp_path, path):
    with pytest.raises(IdxError, match=f"{path} cannot be read: No such file"):
        read_idx(path, dims=3)
    with pytest.raises(IdxError, match=f"{tmp_path} cannot be read: Is a directory"):
        read_idx(tmp_path, dims=3)
