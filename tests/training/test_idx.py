"""IDX files are read to the byte, and whatever is wrong with one is said in a line that names it."""

import doctest
import gzip

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.training import idx
from manyhands.training.idx import IdxError, read_idx


def idx_bytes(array: torch.Tensor) -> bytes:
    header = bytes([0, 0, 8, array.dim()]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + bytes(array.flatten().tolist())


PICTURES = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4) * 10
LABELS = torch.tensor([3, 0, 255], dtype=torch.uint8)
GOOD = idx_bytes(PICTURES)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some-idx-ubyte"


def test_examples_in_docstrings():
    result = doctest.testmod(idx)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("array", [PICTURES, LABELS], ids=["pictures", "labels"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
def test_reads_what_was_written(path, array, pack):
    path.write_bytes(pack(idx_bytes(array)))
    read = read_idx(path, dims=array.dim())
    assert read.dtype == torch.uint8
    assert read.equal(array)


def test_what_is_read_is_writable_and_belongs_to_the_reader(path):
    path.write_bytes(GOOD)
    first = read_idx(path, dims=3)
    first += 1
    assert read_idx(path, dims=3).equal(PICTURES)


def test_gzip_is_seen_from_the_content_not_the_name(tmp_path):
    # A browser had unpacked the download and left it the name it came with.
    unpacked = tmp_path / "labels-idx1-ubyte.gz"
    unpacked.write_bytes(idx_bytes(LABELS))
    assert read_idx(unpacked, dims=1).equal(LABELS)


def test_gzip_in_several_members_is_one_file(path):
    path.write_bytes(gzip.compress(GOOD[:13]) + gzip.compress(GOOD[13:]))
    assert read_idx(path, dims=3).equal(PICTURES)


def test_more_than_one_chunk(path):
    array = (torch.arange(idx._CHUNK_BYTES + 5) % 251).to(torch.uint8)
    path.write_bytes(idx_bytes(torch.empty(0, dtype=torch.uint8))[:4] + len(array).to_bytes(4, "big"))
    with path.open("ab") as file:
        file.write(bytes(array.tolist()))
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
    "absurd": (ABSURD, "is truncated: its header promises 4294967295 x 4294967295 x 4294967295 = "),
    "no rows": (GOOD[:4] + bytes(4) + GOOD[8:], "holds nothing: its header says 0 x 3 x 4"),
    "no width": (GOOD[:12] + bytes(4) + GOOD[16:], "holds nothing: its header says 2 x 3 x 0"),
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzipped"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_said_in_one_line_that_names_the_file(path, damage, pack):
    content, message = DAMAGED[damage]
    path.write_bytes(pack(content))
    with pytest.raises(IdxError, match=message) as caught:
        read_idx(path, dims=3)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def flip(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


ZIPPED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ZIPPED[:-1], "is truncated: its gzip stream ends"),
        (ZIPPED[:15], "is truncated: its gzip stream ends"),
        (ZIPPED[:2], "is truncated: its gzip stream ends"),
        (flip(ZIPPED, 2), "is damaged: bad gzip data"),  # the method
        (flip(ZIPPED, 10), "is damaged: bad gzip data"),  # the first byte of the stream
        (flip(ZIPPED, len(ZIPPED) - 8), "is damaged: bad gzip data .*CRC"),
        (ZIPPED + b"tail", "is damaged: bad gzip data"),
    ],
    ids=["end cut", "middle cut", "magic only", "method", "stream", "checksum", "tail"],
)
def test_bad_gzip_is_said_in_one_line_that_names_the_file(path, content, message):
    path.write_bytes(content)
    with pytest.raises(IdxError, match=message) as caught:
        read_idx(path, dims=3)
    assert str(caught.value).startswith(str(path))


@given(cut=st.integers(0, len(ZIPPED) - 1))
def test_no_cut_of_a_gzipped_file_goes_unnoticed(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "images"
    path.write_bytes(ZIPPED[:cut])
    with pytest.raises(IdxError):
        read_idx(path, dims=3)


def test_a_missing_file_and_a_folder_are_named(tmp_path, path):
    with pytest.raises(IdxError, match=f"{path} cannot be read: No such file"):
        read_idx(path, dims=3)
    with pytest.raises(IdxError, match=f"{tmp_path} cannot be read: Is a directory"):
        read_idx(tmp_path, dims=3)
