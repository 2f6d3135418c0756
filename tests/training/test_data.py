"""Every source gives a Dataset that fits the models; an error is one line."""

import functools
import gzip
import hashlib
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from helpers.commands import NAMES, idx_bytes, serving, write_idx
from unisono.training import data
from unisono.training.data import DataError, load


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


def test_digits_are_all_there_once_and_split_alike_everywhere():
    from sklearn.datasets import load_digits

    digits, (expected_images, expected_labels) = load("digits"), load_digits(return_X_y=True)
    assert (digits.name, digits.num_classes, digits.image_shape) == ("digits", 10, (1, 8, 8))
    images = torch.cat([digits.train_images, digits.test_images]).flatten(1) * 16
    rows = zip(images.tolist(), torch.cat([digits.train_labels, digits.test_labels]).tolist(), strict=True)
    assert sorted(rows) == sorted(zip(expected_images.tolist(), expected_labels.tolist(), strict=True))

    train, test = digits.train_labels.bincount(), digits.test_labels.bincount()
    assert ((test / (train + test) - 0.2).abs() < 0.005).all()  # in every class
    assert digits.train_labels[:1000].bincount(minlength=10).min() > 50  # the classes are mixed
    # Accuracies of different days are compared with each other: the split must not change.
    assert digits.test_labels[:20].tolist() == [9, 2, 5, 7, 6, 9, 7, 3, 3, 3, 4, 6, 9, 2, 0, 0, 7, 2, 4, 3]
    assert digits.test_images.double().sum().item() * 16 == 112357


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install 'unisono[train]'" in error_of("digits")


# --- folders


def check_tiny(dataset):
    assert (dataset.name, dataset.num_classes, dataset.image_shape) == ("tiny", 3, (1, 5, 4))
    assert dataset.train_images.equal(pictures(6).unsqueeze(1) / 255)
    assert dataset.train_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert dataset.test_images.equal(pictures(3).unsqueeze(1) / 255)
    assert dataset.test_labels.tolist() == [2, 1, 0]


@pytest.mark.parametrize("gzipped", [[], [0, 3]])
def test_a_folder_of_gzipped_and_plain_files(folder, gzipped):
    """If a file exists twice, the gzipped one is read."""
    for i in gzipped:
        gzip_in_place(folder / NAMES[i])
        (folder / NAMES[i]).write_bytes(b"not this one")
    check_tiny(load(str(folder)))


def test_a_folder_is_named_after_itself_but_a_data_set_goes_before_a_folder_of_its_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    check_tiny(load("."))
    monkeypatch.setenv("HOME", str(folder.parent))
    check_tiny(load("~/tiny"))
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: pictures(6)}, "{1} has 3 dimension(s) (pictures) where 1 (labels) were expected"),
        ({1: labels(*range(7))}, "{0} has 6 pictures, {1} has 7 labels; expected as many"),
        ({3: labels(*range(4))}, "{2} has 3 pictures, {3} has 4 labels; expected as many"),
        ({2: pictures(3, 5, 5)}, "{0} has pictures of 5 x 4, {2} of 5 x 5; expected one size"),
        ({0: pictures(6, 1, 1025)}, "{0} has pictures of 1 x 1025; expected at most 1024 a side"),
        ({1: labels(*[0] * 6), 3: labels(0, 0, 0)}, "{1}: every label is 0; expected at least 2 classes"),
    ],
)
def test_files_that_do_not_fit_together_are_named(folder, changes, message):
    write_idx(folder, [changes.get(i, array) for i, array in enumerate(ARRAYS)])
    assert error_of(folder).startswith(message.format(*(folder / name for name in NAMES)))


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


def test_the_cache_follows_xdg_and_else_lies_at_home_if_there_is_one(mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load("fashion-mnist", mirror=mirror)
    assert (tmp_path / "xdg/unisono/fashion-mnist" / f"{NAMES[0]}.gz").is_file()

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert data.default_cache() == tmp_path / "home/.cache/unisono"

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert "set XDG_CACHE_HOME" in error_of("fashion-mnist")


def test_a_failed_download_names_address_reason_and_remedy(mirror, folder, tmp_path):
    (folder / f"{NAMES[2]}.gz").unlink()
    message = error_of("fashion-mnist", mirror=f"{mirror}/", cache=tmp_path / "cache")
    assert message.startswith(f"{mirror}/{NAMES[2]}.gz: the server answered 404 File not found (")
    assert "--mirror URL" in message
    assert "--data DIR" in message
