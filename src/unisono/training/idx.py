"""Read IDX files, the format of MNIST and its relatives.

An IDX file is an array with a short header, all of it big-endian:

    00 00 | type code, 1 byte | number of dimensions, 1 byte | each dimension, 4 bytes | the data

The pictures and labels of the MNIST family are unsigned bytes (type 0x08): `idx3` files have the dimensions
(rows, height, width) and `idx1` files have (rows,). Files may be gzipped; the content decides, not the name, because
browsers and proxies unpack files without changing the name.

A file that is shorter or longer than its header says is an error, and a header that promises terabytes does not make
us allocate them. Nor does a gzipped file of some kilobytes: gzip packs zeros a thousand times smaller, and pictures at
most some ten times.
"""

import gzip
import math
import os
import zlib
from io import BufferedIOBase
from pathlib import Path

import torch
from torch import Tensor

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_TYPES = {
    0x08: "unsigned bytes",
    0x09: "signed bytes",
    0x0B: "16-bit integers",
    0x0C: "32-bit integers",
    0x0D: "32-bit floats",
    0x0E: "64-bit floats",
}
_CHUNK_BYTES = 1 << 20
_MAX_PACKED = 100  # how many times larger than its gzipped file an array may be
_SMALL_BYTES = 16 << 20  # an array that may be packed to any size


class IdxError(ValueError):
    """A file is not the IDX file it should be; the message names the file and says why."""


def read_idx(path: Path, *, dims: int) -> Tensor:
    """Read one IDX file of unsigned bytes, gzipped or not.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "labels-idx1-ubyte"
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 0, 2]))
        >>> read_idx(path, dims=1)
        tensor([7, 0, 2], dtype=torch.uint8)

    Args:
        path: the file.
        dims: how many dimensions it must have: 3 for pictures (rows, height, width), 1 for labels (rows,).

    Returns:
        A uint8 tensor with the shape in the header.

    Raises:
        IdxError: the file cannot be read, is damaged, is not an IDX file of `dims` dimensions of unsigned bytes,
            each of them at least 1, or unpacks to more than 16 MiB and more than 100 times its size.
    """
    try:
        with path.open("rb") as raw:
            zipped = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
            if not zipped:
                return _read_array(raw, path, dims)
            max_bytes = max(_SMALL_BYTES, _MAX_PACKED * os.fstat(raw.fileno()).st_size)
            with gzip.open(raw) as unzipped:
                return _read_array(unzipped, path, dims, max_bytes)
    except EOFError:
        raise IdxError(f"{path} is truncated: its gzip stream ends before its end mark") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise IdxError(f"{path} is damaged: bad gzip data ({error})") from error
    except OSError as error:
        raise IdxError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_array(stream: BufferedIOBase, path: Path, dims: int, max_bytes: float = math.inf) -> Tensor:
    shape = _read_header(stream, path, dims)
    num_bytes = math.prod(shape)
    sizes = " x ".join(map(str, shape))
    if num_bytes > max_bytes:
        raise IdxError(
            f"{path} is gzipped, and its header promises {sizes} = {num_bytes} bytes, more than {_MAX_PACKED} times "
            "the size of the file; if that is right, unpack it (gunzip)"
        )
    # Read one byte more than promised: this shows surplus data, and makes gzip reach its end and check its checksum.
    data = _read_up_to(stream, num_bytes + 1)
    if len(data) < num_bytes:
        raise IdxError(f"{path} is truncated: its header promises {sizes} = {num_bytes} bytes, {len(data)} follow it")
    if len(data) > num_bytes:
        raise IdxError(f"{path} has bytes left over: its header promises {sizes} = {num_bytes}, more follow it")
    return torch.frombuffer(data, dtype=torch.uint8).view(shape)


def _read_header(stream: BufferedIOBase, path: Path, dims: int) -> tuple[int, ...]:
    """Read and check the header; return the shape that it promises."""
    expected = bytes([0, 0, _UNSIGNED_BYTE, dims])
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES:
        given = f"begins with {magic.hex(' ')}" if magic else "is empty"
        raise IdxError(f"{path} is not an IDX file: it {given} where {expected.hex(' ')} was expected")
    if magic[2] != _UNSIGNED_BYTE:
        raise IdxError(
            f"{path} holds {_TYPES[magic[2]]} (type 0x{magic[2]:02x}); "
            f"only unsigned bytes (0x{_UNSIGNED_BYTE:02x}) can be read"
        )
    if magic[3] != dims:
        meaning = {1: " (labels)", 3: " (pictures)"}
        raise IdxError(
            f"{path} has {magic[3]} dimension(s){meaning.get(magic[3], '')} "
            f"where {dims}{meaning.get(dims, '')} were expected"
        )
    sizes = stream.read(4 * dims)
    if len(sizes) < 4 * dims:
        raise IdxError(f"{path} is truncated: it ends inside its header of {4 + 4 * dims} bytes")
    shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, 4 * dims, 4))
    if 0 in shape:
        raise IdxError(f"{path} holds nothing: its header says {' x '.join(map(str, shape))}")
    return shape


def _read_up_to(stream: BufferedIOBase, limit_bytes: int) -> bytearray:
    """Read up to `limit_bytes`; memory grows with the data in the file, not with the size that its header promises."""
    data = bytearray()
    while chunk := stream.read(min(_CHUNK_BYTES, limit_bytes - len(data))):
        data += chunk
    return data
