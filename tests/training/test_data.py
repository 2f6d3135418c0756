"""Every source gives a Dataset that fits the models; an error is one line that names the file or the address."""

import functools
import gc
import gzip
import hashlib
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.commands import NAMES, idx_bytes, write_idx
from unisono.console.errors import CommandError
from unisono.console.progress import Progress
from unisono.training import data
from unisono.training.data import DataError, load, read_idx

# pooch leaves the connection of a download that fails to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


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


def error_of(source):
    with pytest.raises(CommandError) as caught:
        load(str(source))
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


# ---- folders -------------------------------------------------------------------------------------


def check_tiny(dataset, name="tiny"):
    assert (dataset.name, dataset.num_classes, dataset.image_shape) == (name, 3, (1, 5, 4))
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
    check_tiny(load("./digits"), name="digits")


def test_a_class_that_only_the_test_rows_have_counts(folder):
    (folder / NAMES[3]).write_bytes(idx_bytes(labels(0, 6, 0)))
    assert load(str(folder)).num_classes == 7


@pytest.mark.parametrize("source", ["file", "cifar-10", "x" * 5000, "~no-such-user/data"])
def test_a_source_that_is_no_folder(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    expected = "digits, fashion-mnist, or a folder of IDX files"
    assert error_of(source) == f"--data {source} is not a folder; expected {expected}"


@pytest.mark.parametrize(
    ("number", "array", "message"),
    [
        (0, None, "{folder} has no train-images-idx3-ubyte (plain, or compressed as train-images-idx3-ubyte.gz)"),
        (1, pictures(6), "{folder}/train-labels-idx1-ubyte is not an IDX file of unsigned bytes in 1 dimension(s)"),
        (1, labels(*range(7)), "{folder} has 6 train pictures but 7 labels; expected the same number"),
        (3, labels(*range(4)), "{folder} has 3 t10k pictures but 4 labels; expected the same number"),
        (2, pictures(3, 5, 5), "{folder} has training pictures of 5 x 4 and test pictures of 5 x 5; expected one"),
    ],
)
def test_files_that_do_not_fit_together_are_named(folder, number, array, message):
    """A folder with the name of a file is not the file."""
    path = folder / NAMES[number]
    path.unlink()
    path.mkdir() if array is None else path.write_bytes(idx_bytes(array))
    assert error_of(folder).startswith(message.format(folder=folder))


# ---- IDX files -----------------------------------------------------------------------------------

PICTURES = pictures(2, 3, 4)
GOOD = idx_bytes(PICTURES)
ZIPPED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize("array", [PICTURES, labels(3, 0, 255)], ids=["pictures", "labels"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda c: gzip.compress(c[:9]) + gzip.compress(c[9:])])
@pytest.mark.parametrize("name", ["idx-ubyte", "idx-ubyte.gz"])
def test_an_idx_file_is_read_as_it_was_written(tmp_path, array, pack, name):
    """Gzip is seen from the content, not the name: a browser may unpack a download and keep its name."""
    (tmp_path / name).write_bytes(pack(idx_bytes(array)))
    read = read_idx(tmp_path / name, dims=array.dim())
    assert read.dtype == torch.uint8
    assert read.equal(array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an IDX file .* begins with nothing, expected 00 00 08 03 and 3 sizes"),
        (b"<!DOCTYPE html>", "is not an IDX file .* begins with 3c 21 44 4f"),
        (GOOD[:2] + b"\x0d" + GOOD[3:], "is not an IDX file of unsigned bytes .* begins with 00 00 0d 03"),
        (GOOD[:14], "is not an IDX file"),
        (GOOD[:-1], "is damaged: its header promises 2 x 3 x 4 = 24 bytes, 23 follow it"),
        (GOOD + b"\0", "is damaged: .* 25 follow it"),
        (GOOD[:4] + b"\xff" * 12 + GOOD[16:], "promises 4294967295 x 4294967295 x 4294967295 = "),
        (GOOD[:4] + bytes(4) + GOOD[8:], "is damaged: its header promises 0 x 3 x 4"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path, content, message):
    """T4"""
    for pack in (bytes, gzip.compress):
        path = tmp_path / "images"
        path.write_bytes(pack(content))
        with pytest.raises(DataError, match=message) as caught:
            read_idx(path, dims=3)
        assert str(caught.value).startswith(f"{path} ")
        assert "\n" not in str(caught.value)


@given(at=st.integers(0, len(ZIPPED) - 1), bit=st.integers(0, 7), zipped=st.booleans(), cut=st.booleans())
def test_a_cut_or_a_flipped_bit_is_an_error_or_a_pixel(tmp_path_factory, at, bit, zipped, cut):
    """T4: gzip has a checksum, so there a bit that was flipped changes nothing or is an error."""
    content = bytearray(ZIPPED if zipped else GOOD)
    at %= len(content)
    content[at] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped"
    path.write_bytes(content[:at] if cut else content)
    try:
        read = read_idx(path, dims=3)
    except DataError:
        return
    assert not cut
    assert read.shape == PICTURES.shape
    assert (read != PICTURES).sum() == (0 if zipped else 1)


# ---- Fashion-MNIST, with the tiny files in its place ---------------------------------------------


@pytest.fixture
def server(folder, monkeypatch, tmp_path):
    """A server of the tiny files, gzipped, in the place of the real one; the cache is in a folder of its own."""
    for name in NAMES:
        gzip_in_place(folder / name)
    md5 = {f"{name}.gz": hashlib.md5((folder / f"{name}.gz").read_bytes()).hexdigest() for name in NAMES}
    monkeypatch.setattr(data, "FASHION_MNIST_MD5", md5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(SimpleHTTPRequestHandler, directory=folder))
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    monkeypatch.setattr(data, "FASHION_MNIST_URL", address)
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield address
        server.shutdown()
        thread.join()
    gc.collect()


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "unisono" / "fashion-mnist"


def cached(cache):
    return sorted(path.name for path in cache.iterdir())


def test_fashion_mnist_is_downloaded_once_into_the_cache(server, cache, capfd, monkeypatch):
    """What is damaged there is downloaded again; nothing is printed but what `progress` shows."""
    progress = Mock(Progress())
    check_tiny(load("fashion-mnist", progress), name="fashion-mnist")
    sizes = {path.name: path.stat().st_size for path in cache.iterdir()}
    assert sizes.keys() == data.FASHION_MNIST_MD5.keys()
    begun = [f"downloading {server}{name}" for name in data.FASHION_MNIST_MD5]
    assert [call.args for call in progress.begin.mock_calls] == [(task,) for task in begun]

    (cache / f"{NAMES[0]}.gz").write_bytes(b"half of")
    check_tiny(load("fashion-mnist"), name="fashion-mnist")
    assert cached(cache) == sorted(sizes)
    monkeypatch.setattr(data, "FASHION_MNIST_URL", "http://127.0.0.1:1/")
    check_tiny(load("fashion-mnist"), name="fashion-mnist")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "404"), (b"<html>Please log in</html>", "MD5 hash of downloaded file")]
)
def test_a_download_that_fails_is_one_line_and_leaves_no_half_file(server, folder, cache, content, message):
    path = folder / f"{NAMES[2]}.gz"
    path.unlink() if content is None else path.write_bytes(content)
    error = error_of("fashion-mnist")
    assert error.startswith(f"cannot download {server}{NAMES[2]}.gz to {cache} (")
    assert message in error
    assert "; pass a folder that has the files (--data DIR), or another cache (XDG_CACHE_HOME)" in error
    assert cached(cache) == sorted(f"{name}.gz" for name in NAMES[:2])


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_a_download_that_is_stopped_leaves_no_half_file(server, cache, error):
    """Ctrl-C, and a reader of the output that has gone, end the command as anywhere else."""
    with pytest.raises(error):
        load("fashion-mnist", Mock(begin=Mock(side_effect=error)))
    assert cached(cache) == []
