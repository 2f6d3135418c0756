"""The data sets of `unisono train`, loaded into memory.

Three sources: the digits that scikit-learn carries (no network), Fashion-MNIST (downloaded once), and any
folder with four IDX files. Pictures are float32, scaled to [0, 1] and not normalised further, as in the tutorials
that the project starts from: the ResNet has batch norm after its first layer, the perceptron trains well without,
and so no mean and deviation need to be saved with a model.

Every problem with the data is raised as a DataError: one line that says which file or address, why, and what to do.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from unisono.console.errors import CommandError
from unisono.training.download import DownloadError, OnBytes, download_files
from unisono.training.idx import IdxError, read_idx

SOURCES = {
    "digits": "8x8 digits that scikit-learn carries; no network needed",
    "fashion-mnist": "28x28 pictures of clothes; 30 MB, downloaded once",
    "DIR": "a folder with four IDX files, gzipped or not, named like those of MNIST",
}

FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}

_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

_MAX_SIDE = 1024  # of a picture, in pixels: a model for more would be larger than the data

_DIGITS_SPLIT_SEED = 0
_DIGITS_MAX = 16  # each pixel counts the inked dots of a 4x4 block


class DataError(CommandError):
    """The data cannot be loaded; the message is one line that says which, why, and what to do."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pictures and their labels, for training and for testing.

    Example:
        >>> pictures, labels = torch.rand(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> Dataset("mine", pictures[:4], labels[:4], pictures[4:], labels[4:], num_classes=3)
        Dataset(name='mine', num_classes=3)

    Args:
        name: for summaries.
        train_images: float32 (rows, channels, height, width); from `load`, scaled to [0, 1].
        train_labels: int64 (rows,), from 0 to num_classes - 1.
        test_images: like train_images.
        test_labels: like train_labels.
        num_classes: at least 2.

    Raises:
        DataError: shapes, types or labels are not as above, or do not fit each other.
    """

    name: str
    train_images: Tensor = field(repr=False)
    train_labels: Tensor = field(repr=False)
    test_images: Tensor = field(repr=False)
    test_labels: Tensor = field(repr=False)
    num_classes: int

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise DataError(f"{self.name}: a classifier needs at least 2 classes, got {self.num_classes}")
        self._check_split("train", self.train_images, self.train_labels)
        self._check_split("test", self.test_images, self.test_labels)
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise DataError(
                f"{self.name}: train images are {_by(self.train_images.shape[1:])}, "
                f"test images are {_by(self.test_images.shape[1:])}; expected one size"
            )

    def _check_split(self, split: str, images: Tensor, labels: Tensor) -> None:
        if images.dtype != torch.float32 or images.dim() != 4 or images.numel() == 0:
            raise DataError(
                f"{self.name}: expected {split} images as float32 (rows, channels, height, width), none of them "
                f"0, got {images.dtype} {tuple(images.shape)}"
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise DataError(
                f"{self.name}: expected {split} labels as int64 ({len(images)},), one for each image, "
                f"got {labels.dtype} {tuple(labels.shape)}"
            )
        if labels.min() < 0 or labels.max() >= self.num_classes:
            raise DataError(
                f"{self.name}: expected {split} labels from 0 to {self.num_classes - 1}, "
                f"got {int(labels.min())} to {int(labels.max())}"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one picture."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    @property
    def num_bytes(self) -> int:
        """How much memory pictures and labels take."""
        return sum(t.nbytes for t in (self.train_images, self.train_labels, self.test_images, self.test_labels))

    def on(self, device: torch.device) -> "Dataset":
        """Return the same data on a device."""
        return dataclasses.replace(
            self,
            train_images=self.train_images.to(device),
            train_labels=self.train_labels.to(device),
            test_images=self.test_images.to(device),
            test_labels=self.test_labels.to(device),
        )


def load(
    source: str, *, mirror: str | None = None, cache: Path | None = None, progress: OnBytes | None = None
) -> Dataset:
    """Load a data set by name, or from a folder.

    Example:
        >>> digits = load("digits")
        >>> digits.train_images.shape, digits.test_images.shape
        (torch.Size([1437, 1, 8, 8]), torch.Size([360, 1, 8, 8]))

    Args:
        source: "digits", "fashion-mnist", or a folder with the four IDX files of MNIST (train-images-idx3-ubyte
            and so on), each plain, or gzipped with .gz at the end of its name; if both exist, the gzipped one is
            read. Write ./digits for a folder that has the name of a data set.
        mirror: where to download Fashion-MNIST from; its own address if None. Only for "fashion-mnist".
        cache: the folder for downloads, `default_cache()` if None. Fashion-MNIST is saved to `fashion-mnist` in it.
        progress: called as bytes arrive with the file's name, the bytes so far, and the bytes in all or None.

    Returns:
        The data set, named like `source`, or like the folder. A folder's highest label says how many classes it
        has.

    Raises:
        DataError: the data is missing, damaged or cannot be downloaded, or `mirror` does not go with `source`.
    """
    if mirror is not None and source != "fashion-mnist":
        raise DataError(f"--mirror {mirror} goes with --data fashion-mnist only; --data is {source}: leave it out")
    if source == "digits":
        return _load_digits()
    if source == "fashion-mnist":
        return _load_fashion_mnist(mirror or FASHION_MNIST_URL, cache or default_cache(), progress)
    folder = _find_folder(source)
    return _load_folder(folder, folder.resolve().name or source)


def expect_known(source: str) -> None:
    """Check that there is such a data set, or such a folder; nothing is loaded.

    Raises:
        DataError: there is not.
    """
    if source not in ("digits", "fashion-mnist"):
        _find_folder(source)


def default_cache() -> Path:
    """Return the folder for downloads: $XDG_CACHE_HOME/unisono, or ~/.cache/unisono."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # a relative one is to be ignored, says the XDG base directory specification
        return base / "unisono"
    try:
        return Path.home() / ".cache" / "unisono"
    except RuntimeError as error:
        raise DataError("no home folder to keep downloads in; set XDG_CACHE_HOME to a folder") from error


def _load_digits() -> Dataset:
    """Load scikit-learn's digits; one in five rows of each class is for testing (360 of 1,797)."""
    try:
        import numpy as np
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            f"--data digits needs scikit-learn ({error}); to install it: pip install 'unisono[train]'"
        ) from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div_(_DIGITS_MAX).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    # RandomState's streams are frozen: the split is the same with every release of numpy.
    shuffled = torch.from_numpy(np.random.RandomState(_DIGITS_SPLIT_SEED).permutation(len(labels)))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[by_class[::5]] = True
    return Dataset("digits", images[~is_test], labels[~is_test], images[is_test], labels[is_test], num_classes=10)


def _load_fashion_mnist(base_url: str, cache: Path, progress: OnBytes | None) -> Dataset:
    folder = cache / "fashion-mnist"
    try:
        download_files(base_url, folder, FASHION_MNIST_MD5, progress=progress)
    except DownloadError as error:
        raise DataError(
            f"{error} (--mirror URL takes another address, --data DIR a folder with the files, XDG_CACHE_HOME "
            "another cache)"
        ) from error
    return _load_folder(folder, "fashion-mnist")


def _find_folder(source: str) -> Path:
    expected = "expected digits, fashion-mnist, or a folder of IDX files"
    try:
        folder = Path(source).expanduser()
        if folder.is_dir():
            return folder
        problem = "is not a folder" if folder.exists() else "does not exist"
    except (OSError, RuntimeError) as error:  # no permission, too long a name; ~user without such a user
        raise DataError(f"--data {source} cannot be read ({error}); {expected}") from error
    raise DataError(f"--data {source} {problem}; {expected}")


def _load_folder(folder: Path, name: str) -> Dataset:
    train_images_path, train_labels_path, test_images_path, test_labels_path = _find_files(folder)
    train_images, train_labels = _load_split(train_images_path, train_labels_path)
    test_images, test_labels = _load_split(test_images_path, test_labels_path)
    if train_images.shape[1:] != test_images.shape[1:]:
        raise DataError(
            f"{train_images_path} has pictures of {_by(train_images.shape[2:])}, "
            f"{test_images_path} of {_by(test_images.shape[2:])}; expected one size"
        )
    num_classes = 1 + int(max(train_labels.max(), test_labels.max()))
    if num_classes < 2:
        raise DataError(f"{train_labels_path}: every label is 0; expected at least 2 classes")
    return Dataset(name, train_images, train_labels, test_images, test_labels, num_classes)


def _find_files(folder: Path) -> list[Path]:
    """Return the paths of the four files, in the order of `_FILES`."""
    try:
        found = {name: path for name in _FILES for path in (folder / name, folder / f"{name}.gz") if path.is_file()}
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror or error}") from error
    if missing := [name for name in _FILES if name not in found]:
        raise DataError(f"{folder} lacks {', '.join(missing)} (plain, or gzipped with .gz at the end)")
    return [found[name] for name in _FILES]


def _load_split(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    """Read one pair of files: pictures (rows, 1, height, width) in [0, 1], and labels (rows,)."""
    try:
        images = read_idx(images_path, dims=3)
        labels = read_idx(labels_path, dims=1)
    except IdxError as error:
        raise DataError(str(error)) from error
    if max(images.shape[1:]) > _MAX_SIDE:
        raise DataError(f"{images_path} has pictures of {_by(images.shape[1:])}; expected at most {_MAX_SIDE} a side")
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images)} pictures, {labels_path} has {len(labels)} labels; expected as many"
        )
    return images.unsqueeze(1).float().div_(255), labels.long()


def _by(sizes: torch.Size) -> str:
    return " x ".join(map(str, sizes))
