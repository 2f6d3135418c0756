"""Every source gives a Dataset that fits the models; an error is one line."""

import doctest
import functools
import gzip
import hashlib
import re
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from helpers.commands import NAMES, idx_bytes, serving, write_idx
from manyhands.training import data
from manyhands.training.data import DataError, Dataset, load

SUBSET = Path(__file__).resolve().parents[2].parent / "shared/data/fashion-mnist-6k"


def pictures(rows, height=5, width=4):
    values = torch.arange(rows * height * width) * 37 % 256
    return values.to(torch.uint8).view(rows, height, width)


def labels(*values):
    return torch.tensor(values, dtype=torch.uint8)


ARRAYS = [pictures(6), labels(0, 1, 2, 0, 1, 2), pictures(3), labels(2, 1, 0)]


@pytest.fixture
def folder(tmp_path):
    """Six train and three test pictures of 5 x 4, in three classes, as plain IDX files."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_idx(folder, ARRAYS)
    return folder


def gzip_in_place(path):
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def error_of(source, **kwargs):
    with pytest.raises(DataError) as caught:
        load(str(source), **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_examples_in_docstrings():
    failed, attempted = doctest.testmod(data)
    assert (failed, attempted > 0) == (0, True)


# --- digits


def test_digits_are_all_there_once_scaled_to_one():
    from sklearn.datasets import load_digits

    digits = load("digits")
    assert (digits.name, digits.num_classes, digits.image_shape) == ("digits", 10, (1, 8, 8))
    assert (len(digits.train_labels), len(digits.test_labels)) == (1437, 360)
    images = torch.cat([digits.train_images, digits.test_images])
    assert (images.min(), images.max()) == (0, 1)
    rows = torch.cat([images.flatten(1) * 16, torch.cat([digits.train_labels, digits.test_labels])[:, None]], dim=1)
    expected = torch.cat(
        [torch.from_numpy(load_digits().data).float(), torch.from_numpy(load_digits().target)[:, None]], dim=1
    )
    assert sorted(rows.tolist()) == sorted(expected.tolist())


def test_digits_are_split_evenly_in_every_class_and_alike_with_every_numpy():
    digits = load("digits")
    train, test = digits.train_labels.bincount(), digits.test_labels.bincount()
    assert ((test / (train + test) - 0.2).abs() < 0.005).all()
    assert digits.train_labels[:1000].bincount(minlength=10).min() > 50  # the classes are mixed
    # Accuracies of different days are compared with each other: the split must not change.
    assert digits.test_labels[:20].tolist() == [9, 2, 5, 7, 6, 9, 7, 3, 3, 3, 4, 6, 9, 2, 0, 0, 7, 2, 4, 3]
    assert digits.test_images.double().sum().item() * 16 == 112357


def test_digits_leave_the_random_state_alone():
    import numpy as np

    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    load("digits")
    assert torch.get_rng_state().equal(before[0])
    assert np.random.get_state()[1].tolist() == before[1]


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install 'manyhands[train]'" in error_of("digits")


# --- folders


def check_tiny(dataset):
    assert (dataset.name, dataset.num_classes, dataset.image_shape) == ("tiny", 3, (1, 5, 4))
    assert dataset.train_images.equal(pictures(6).unsqueeze(1) / 255)
    assert dataset.train_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert dataset.test_images.equal(pictures(3).unsqueeze(1) / 255)
    assert dataset.test_labels.tolist() == [2, 1, 0]


@pytest.mark.parametrize("gzipped", [[], [0, 3]])
def test_a_folder_of_gzipped_and_plain_files(folder, gzipped):
    for i in gzipped:
        gzip_in_place(folder / NAMES[i])
    check_tiny(load(str(folder)))


def test_if_a_file_exists_twice_the_gzipped_one_is_read(folder):
    gzip_in_place(folder / NAMES[1])
    (folder / NAMES[1]).write_bytes(b"not this one")
    check_tiny(load(str(folder)))


def test_a_folder_is_named_after_itself_however_it_is_written(folder, monkeypatch):
    monkeypatch.chdir(folder)
    check_tiny(load("."))
    monkeypatch.setenv("HOME", str(folder.parent))
    check_tiny(load("~/tiny"))


def test_a_name_goes_before_a_folder_of_that_name(folder, monkeypatch):
    folder.rename(folder.with_name("digits"))
    monkeypatch.chdir(folder.parent)
    assert load("digits").image_shape == (1, 8, 8)
    assert load("./digits").image_shape == (1, 5, 4)


def test_a_class_that_only_the_test_rows_have_counts(folder):
    (folder / NAMES[3]).write_bytes(idx_bytes(labels(0, 6, 0)))
    assert load(str(folder)).num_classes == 7


@pytest.mark.parametrize("missing", [NAMES[:1], [NAMES[0], NAMES[3]], NAMES])
def test_missing_files_are_all_named(folder, missing):
    """A folder with the name of a file is not the file."""
    for name in missing:
        (folder / name).unlink()
    (folder / NAMES[0]).mkdir()
    assert error_of(folder) == f"{folder} lacks {', '.join(missing)} (plain, or gzipped with .gz at the end)"


def test_a_source_that_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"")
    expected = "expected digits, fashion-mnist, or a folder of IDX files"
    assert error_of(file) == f"--data {file} is not a folder; {expected}"
    assert error_of("cifar-10") == f"--data cifar-10 does not exist; {expected}"
    assert "File name too long" in error_of("x" * 5000)
    assert "cannot be read" in error_of("~no-such-user-here/data")


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_file_is_named(folder, name):
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert error_of(folder).startswith(f"{path} is truncated: ")
    (folder / f"{name}.gz").write_bytes(gzip.compress(whole)[:-9])
    assert error_of(folder).startswith(f"{path}.gz is truncated: ")


def test_images_where_labels_belong_are_named(folder):
    (folder / NAMES[1]).write_bytes((folder / NAMES[0]).read_bytes())
    assert error_of(folder).startswith(f"{folder / NAMES[1]} has 3 dimension(s) (pictures) where 1 (labels)")


@pytest.mark.parametrize("split", [0, 2], ids=["train", "test"])
def test_more_labels_than_images_name_both_files(folder, split):
    images_path, labels_path = folder / NAMES[split], folder / NAMES[split + 1]
    rows = len(ARRAYS[split])
    labels_path.write_bytes(idx_bytes(labels(*range(rows + 1))))
    assert error_of(folder) == (
        f"{images_path} has {rows} pictures, {labels_path} has {rows + 1} labels; expected as many"
    )


def test_pictures_of_two_sizes_name_both_files(folder):
    (folder / NAMES[2]).write_bytes(idx_bytes(pictures(3, 5, 5)))
    sizes = f"{folder / NAMES[0]} has pictures of 5 x 4, {folder / NAMES[2]} of 5 x 5"
    assert error_of(folder) == f"{sizes}; expected one size"


def test_one_class_is_nothing_to_learn(folder):
    write_idx(folder, [ARRAYS[0], labels(0, 0, 0, 0, 0, 0), ARRAYS[2], labels(0, 0, 0)])
    assert error_of(folder) == f"{folder / NAMES[1]}: every label is 0; expected at least 2 classes"


@pytest.mark.skipif(not SUBSET.is_dir(), reason=f"the Fashion-MNIST subset is not at {SUBSET}")
def test_the_real_subset():
    dataset = load(str(SUBSET))
    assert (dataset.name, dataset.num_classes, dataset.image_shape) == ("fashion-mnist-6k", 10, (1, 28, 28))
    assert dataset.train_images.shape == (5000, 1, 28, 28)
    assert dataset.test_images.shape == (1256, 1, 28, 28)
    assert dataset.train_labels.bincount().min() > 0
    assert (dataset.train_images.min(), dataset.train_images.max()) == (0, 1)
    assert 0.2 < dataset.train_images.mean() < 0.4  # 0.286 over the whole of Fashion-MNIST


# --- Fashion-MNIST, with the tiny files in its place


@pytest.fixture
def mirror(folder, monkeypatch):
    """A server of the tiny files, gzipped, which the table of checksums knows."""
    for name in NAMES:
        gzip_in_place(folder / name)
    md5 = {f"{name}.gz": hashlib.md5((folder / f"{name}.gz").read_bytes()).hexdigest() for name in NAMES}
    monkeypatch.setattr(data, "FASHION_MNIST_MD5", md5)
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("HTTP_PROXY", raising=False)

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    with serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


def test_fashion_mnist_is_downloaded_once_into_the_cache(mirror, tmp_path, monkeypatch):
    seen = []
    cache = tmp_path / "cache"
    first = load("fashion-mnist", mirror=mirror, cache=cache, progress=lambda name, *_: seen.append(name))
    assert (first.name, first.num_classes, first.image_shape) == ("fashion-mnist", 3, (1, 5, 4))
    assert list(dict.fromkeys(seen)) == [f"{name}.gz" for name in NAMES]
    assert sorted(path.name for path in (cache / "fashion-mnist").iterdir()) == sorted(set(seen))

    again = load("fashion-mnist", mirror="http://127.0.0.1:1", cache=cache)
    assert again.train_images.equal(first.train_images)


def test_the_cache_follows_xdg_and_else_lies_at_home(mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load("fashion-mnist", mirror=mirror)
    assert (tmp_path / "xdg/manyhands/fashion-mnist" / f"{NAMES[0]}.gz").is_file()

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert data.default_cache() == tmp_path / "home/.cache/manyhands"


def test_no_home_says_what_to_set(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert "set XDG_CACHE_HOME" in error_of("fashion-mnist")


def test_a_failed_download_names_address_reason_and_remedy(mirror, folder, tmp_path):
    (folder / f"{NAMES[2]}.gz").unlink()
    message = error_of("fashion-mnist", mirror=f"{mirror}/", cache=tmp_path / "cache")
    assert message.startswith(f"{mirror}/{NAMES[2]}.gz: the server answered 404 File not found (")
    assert "--mirror URL" in message
    assert "--data DIR" in message


def test_a_mirror_that_would_be_ignored_is_refused(folder):
    assert error_of("digits", mirror="http://x") == (
        "--mirror http://x goes with --data fashion-mnist only; --data is digits: leave it out"
    )
    assert "leave it out" in error_of(folder, mirror="http://x")


# --- the class itself

GOOD = {
    "name": "mine",
    "train_images": torch.rand(4, 1, 2, 2),
    "train_labels": torch.tensor([0, 1, 2, 0]),
    "test_images": torch.rand(2, 1, 2, 2),
    "test_labels": torch.tensor([2, 1]),
    "num_classes": 3,
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_classes": 1}, "mine: a classifier needs at least 2 classes, got 1"),
        ({"num_classes": 2}, "mine: expected train labels from 0 to 1, got 0 to 2"),
        ({"train_labels": torch.tensor([0, -1, 2, 0])}, "train labels from 0 to 2, got -1 to 2"),
        ({"test_labels": torch.tensor([2, 1, 0])}, "test labels as int64 (2,), one for each image, got torch.int64"),
        ({"test_labels": torch.tensor([2.0, 1.0])}, "got torch.float32 (2,)"),
        ({"train_images": torch.rand(4, 2, 2)}, "expected train images as float32 (rows, channels, height, width)"),
        ({"train_images": torch.zeros(4, 1, 2, 2, dtype=torch.uint8)}, "got torch.uint8 (4, 1, 2, 2)"),
        ({"test_images": torch.rand(0, 1, 2, 2), "test_labels": torch.arange(0)}, "got torch.float32 (0, 1, 2, 2)"),
        ({"test_images": torch.rand(2, 1, 2, 3)}, "train images are 1 x 2 x 2, test images are 1 x 2 x 3"),
    ],
)  # fmt: skip
def test_a_dataset_that_does_not_fit_together_is_refused(wrong, message):
    Dataset(**GOOD)
    with pytest.raises(DataError, match=re.escape(message)):
        Dataset(**(GOOD | wrong))
