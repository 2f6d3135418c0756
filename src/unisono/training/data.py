"""The data sets of `unisono train`, loaded into memory.

Three sources: the digits that scikit-learn carries (no network), Fashion-MNIST (downloaded once, by pooch), and any
folder with four IDX files. Pictures are float32, scaled to [0, 1] and not normalised further, as in the tutorials
that the project starts from: the ResNet has batch norm after its first layer, the perceptron trains well without,
and so no mean and deviation need to be saved with a model.
"""

import ctypes
import gzip
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.console.errors import CommandError
from unisono.console.options import expect_installed
from unisono.console.progress import Progress

FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}

_PACKAGES = {"digits": "sklearn", "fashion-mnist": "pooch"}
_GZIP_MAGIC = b"\x1f\x8b"
_DIGITS_MAX = 16  # each pixel counts the inked dots of a 4x4 block


class DataError(CommandError):
    """The data cannot be loaded; one line that says which file or address, why, and what to do."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pictures, float32 (rows, channels, height, width) in [0, 1], and their labels, int64 (rows,) from 0 on."""

    name: str
    num_classes: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one picture."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Pictures and labels, in the order of the fields."""
        return self.train_images, self.train_labels, self.test_images, self.test_labels

    def checksum(self) -> str:
        """Return what tells these data, on the CPU, from others."""
        checksum = 0
        for tensor in map(torch.Tensor.contiguous, self.tensors):
            if num_bytes := tensor.numel() * tensor.element_size():
                memory = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())  # numpy's view would need numpy
                checksum = zlib.crc32(memory, checksum)
        return f"{checksum:08x}"

    def on(self, device: torch.device) -> "Dataset":
        """Return the same data on a device."""
        return Dataset(self.name, self.num_classes, *(tensor.to(device) for tensor in self.tensors))


def load(source: str, progress: Progress | None = None) -> Dataset:
    """Load a data set by name, or from a folder.

    Example:
        >>> digits = load("digits")
        >>> digits.train_images.shape, digits.test_images.shape
        (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))

    Args:
        source: "digits", "fashion-mnist", or a folder with the four IDX files of MNIST (train-images-idx3-ubyte
            and so on), each plain, or gzipped with .gz at the end of its name; if both exist, the gzipped one is
            read. Write ./digits for a folder that has the name of a data set.
        progress: shows what is downloaded (default: not at all).

    Returns:
        The data set. A folder's highest label says how many classes it has.

    Raises:
        CommandError: one line that says what is wrong with the data or the arguments.
    """
    found = known(source)
    if found == "digits":
        return _load_digits()
    if found == "fashion-mnist":
        return _load_folder(_downloaded(progress or Progress()), found)
    return _load_folder(Path(found), Path(found).name or source)


def known(source: str) -> str:
    """Return the name of a data set, or a folder's path, which is then the same from everywhere; an argparse type.

    Raises:
        CommandError: there is neither, or the package that loads it is not installed.
    """
    if source in _PACKAGES:
        expect_installed([_PACKAGES[source]])
        return source
    folder = os.path.abspath(os.path.expanduser(source))
    if not os.path.isdir(folder):
        raise DataError(f"--data {source} is not a folder; expected digits, fashion-mnist, or a folder of IDX files")
    return folder


def _load_digits() -> Dataset:
    """Load scikit-learn's digits; one in five rows of each class is for testing (360 of 1,797)."""
    import numpy as np
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div_(_DIGITS_MAX).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    # RandomState's streams are frozen: the split is the same with every release of numpy.
    shuffled = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[by_class[::5]] = True
    return Dataset("digits", 10, images[~is_test], labels[~is_test], images[is_test], labels[is_test])


# ---- Fashion-MNIST -------------------------------------------------------------------------------


def _downloaded(progress: Progress) -> Path:
    """Return the folder of Fashion-MNIST's files; those that are missing or damaged are downloaded first.

    pooch writes to a temporary file, and renames it once its MD5 is right; proxies are those of the environment.
    """
    import pooch

    pooch.get_logger().setLevel("WARNING")  # `progress` says what is downloaded
    folder = Path(pooch.os_cache("unisono")) / "fashion-mnist"

    def download(url: str, *where: Any) -> None:  # called for what is missing or damaged
        progress.begin(f"downloading {url}")
        pooch.HTTPDownloader(stream=False)(url, *where)  # with a stream, an error leaves the connection open

    for name, md5 in FASHION_MNIST_MD5.items():
        url = f"{FASHION_MNIST_URL}{name}"
        try:
            pooch.retrieve(url, f"md5:{md5}", fname=name, path=folder, downloader=download)
        except BrokenPipeError:  # of `progress`: nothing reads the output any more
            raise
        except (OSError, ValueError) as error:  # no connection, no such file, no room; another MD5
            raise DataError(
                f"cannot download {url} to {folder} ({' '.join(str(error).split())}); pass a folder that has "
                "the files (--data DIR), or another cache (XDG_CACHE_HOME)"
            ) from error
    return folder


# ---- IDX files -----------------------------------------------------------------------------------


def _load_folder(folder: Path, name: str) -> Dataset:
    train_images, train_labels = _load_split(folder, "train")
    test_images, test_labels = _load_split(folder, "t10k")
    if train_images.shape[1:] != test_images.shape[1:]:
        raise DataError(
            f"{folder} has training pictures of {_by(train_images.shape[2:])} and test pictures of "
            f"{_by(test_images.shape[2:])}; expected one size"
        )
    num_classes = 1 + int(max(train_labels.max(), test_labels.max()))
    return Dataset(name, num_classes, train_images, train_labels, test_images, test_labels)


def _load_split(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Read one pair of files: pictures (rows, 1, height, width) in [0, 1], and labels (rows,)."""
    arrays = []
    for name, dims in ((f"{split}-images-idx3-ubyte", 3), (f"{split}-labels-idx1-ubyte", 1)):
        found = [path for path in (folder / f"{name}.gz", folder / name) if path.is_file()]
        if not found:
            raise DataError(f"{folder} has no {name} (plain, or compressed as {name}.gz)")
        arrays.append(read_idx(found[0], dims=dims))
    images, labels = arrays
    if len(images) != len(labels):
        raise DataError(
            f"{folder} has {len(images)} {split} pictures but {len(labels)} labels; expected the same number"
        )
    return images.unsqueeze(1).float().div_(255), labels.long()


def read_idx(path: Path, *, dims: int) -> Tensor:
    """Read an IDX file of unsigned bytes, the format of MNIST and its relatives, gzipped or not.

    Its header is big-endian: 00 00 08 (unsigned bytes), the number of dimensions in a byte, each dimension in 4.

    It has 3 dimensions for pictures (rows, height, width), 1 for labels (rows,). Its content says whether it is
    gzipped: browsers unpack files and keep the name.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    expected, header_bytes = bytes([0, 0, 8, dims]), 4 + 4 * dims
    if content[:4] != expected or len(content) < header_bytes:
        raise DataError(
            f"{path} is not an IDX file of unsigned bytes in {dims} dimension(s): it begins with "
            f"{content[:header_bytes].hex(' ') or 'nothing'}, expected {expected.hex(' ')} and {dims} sizes"
        )
    shape = struct.unpack_from(f">{dims}I", content, offset=4)
    if math.prod(shape) == 0 or len(content) != header_bytes + math.prod(shape):
        raise DataError(
            f"{path} is damaged: its header promises {_by(shape)} = {math.prod(shape)} bytes, "
            f"{len(content) - header_bytes} follow it"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header_bytes).view(shape)


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))
