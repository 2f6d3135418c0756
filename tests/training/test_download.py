"""Downloads against a server on loopback that behaves well, badly, and not at all."""

import hashlib
import os
import random
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers.commands import serving
from unisono.training import download
from unisono.training.download import DownloadError, download_file, download_files

BODY = random.Random(0).randbytes(300_000)
MD5 = hashlib.md5(BODY).hexdigest()
HALF = 150_000


def whole_or_rest(start):
    if start >= len(BODY):
        return 416, b"", {}
    return (206 if start else 200), BODY[start:], {"Content-Range": f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"}


def wrong_rest(start):
    first = max(0, start - 1)
    return (206 if start else 200), BODY[first:], {"Content-Range": f"bytes {first}-/{len(BODY)}"}


CHUNK = b"%x\r\n%s\r\n" % (HALF, BODY[:HALF])
# What a server answers: status, body and headers, by the byte that the client wants to begin at.
MANNERS = {
    "ranges": whole_or_rest,
    "no_ranges": lambda start: (200, BODY, {}),
    "wrong_range": wrong_rest,
    "truncated": lambda start: (200, BODY[:HALF], {"Content-Length": len(BODY)}),
    "truncated_chunks": lambda start: (200, CHUNK, {"Content-Length": None, "Transfer-Encoding": "chunked"}),
    "without_length": lambda start: (200, BODY, {"Content-Length": None}),
    "web_page": lambda start: (200, b"<html>Please log in</html>", {}),
    "not_found": lambda start: (404, b"", {}),
    "redirect": lambda start: (302, b"", {"Location": "/elsewhere"}),
}


class Server(ThreadingHTTPServer):
    """Serve BODY under every name, in one of the manners, and keep the requests' Range headers."""

    manner = "ranges"

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/file.gz"
        self.requests: list[tuple[str, str | None]] = []

    @property
    def ranges(self):
        return [requested for _, requested in self.requests]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        requested = self.headers["Range"]
        self.server.requests.append((self.path, requested))
        manner = "ranges" if self.path == "/elsewhere" else self.server.manner
        status, body, headers = MANNERS[manner](int(requested[6:-1]) if requested else 0)
        try:
            self.send_response(status)
            for name, value in ({"Content-Length": len(body)} | headers).items():
                if value is not None:
                    self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            self.close_connection = True  # the client has gone, as some of the tests make it

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server():
    server = Server()
    with serving(server):
        yield server


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "file.gz"


@pytest.fixture
def part(path):
    return path.with_name("file.gz.part")


def files(path):
    return sorted(os.listdir(path.parent))


def leave(path, content):
    path.parent.mkdir()
    path.write_bytes(content)


def interrupt_at(num_bytes):
    def progress(name, done, total):
        if done >= num_bytes:
            raise KeyboardInterrupt

    return progress


def assert_arrived(path):
    assert path.read_bytes() == BODY
    assert files(path) == ["file.gz"]


@pytest.mark.parametrize(
    ("manner", "total"),
    [("ranges", len(BODY)), ("no_ranges", len(BODY)), ("without_length", None), ("redirect", len(BODY))],
)
def test_a_file_arrives_whole_and_leaves_no_part(server, path, manner, total):
    server.manner = manner
    calls = []
    download_file(server.url, path, MD5, progress=lambda *call: calls.append(call))
    assert_arrived(path)
    assert (calls[0], calls[-1]) == (("file.gz", 0, total), ("file.gz", len(BODY), total))
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})


def test_a_verified_file_is_not_downloaded_again(server, path):
    leave(path, BODY)
    os.chmod(path.parent, 0o500)  # a shared cache may be read-only
    try:
        download_file(server.url, path, MD5)
    finally:
        os.chmod(path.parent, 0o700)
    assert server.requests == []


def test_an_interrupted_download_leaves_a_part_that_the_next_call_continues(server, path, part):
    """Also where a second one is interrupted beside it: it leaves none of its own."""

    def interrupt_a_second(name, done, total):
        if done >= HALF:
            with pytest.raises(KeyboardInterrupt):
                download_file(server.url, path, MD5, progress=interrupt_at(HALF))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_file(server.url, path, MD5, progress=interrupt_a_second)
    assert HALF <= part.stat().st_size < len(BODY)
    server.requests.pop()
    assert_continued(server, path, part)


@pytest.mark.parametrize("manner", ["truncated", "truncated_chunks"])
def test_a_body_that_ends_early_is_an_error_whose_part_is_continued(server, path, part, manner):
    server.manner = manner
    with pytest.raises(DownloadError, match=r"the connection broke after \d+.*; try again to continue") as caught:
        download_file(server.url, path, MD5)
    assert str(caught.value).startswith(server.url)
    assert 0 < part.stat().st_size <= HALF
    server.manner = "ranges"
    assert_continued(server, path, part)


def assert_continued(server, path, part):
    """Check that the part is the beginning of the file, and that the next call asks for the rest only."""
    assert files(path) == ["file.gz.part"]
    arrived = part.read_bytes()
    assert BODY.startswith(arrived)
    calls = []
    download_file(server.url, path, MD5, progress=lambda *call: calls.append(call))
    assert server.ranges == [None, f"bytes={len(arrived)}-"]
    assert (calls[0], calls[-1]) == (("file.gz", len(arrived), len(BODY)), ("file.gz", len(BODY), len(BODY)))
    assert_arrived(path)


@pytest.mark.parametrize(
    ("name", "content", "manner", "asked"),
    [
        ("file.gz", BODY[:-1], "ranges", [None]),
        ("file.gz.part", BODY, "ranges", []),  # the process had ended between the last byte and the rename
        ("file.gz.part", BODY[:HALF], "no_ranges", [HALF]),
        ("file.gz.part", BODY[:HALF], "wrong_range", [HALF, None]),
        ("file.gz.part", bytes(len(BODY)), "ranges", [len(BODY), None]),
        ("file.gz.part", bytes(len(BODY) + 7), "ranges", [len(BODY) + 7, None]),
    ],
    ids=["a damaged file", "a whole part", "no ranges", "continued elsewhere", "a wrong part", "a longer part"],
)
def test_what_cannot_be_continued_begins_again(server, path, caplog, name, content, manner, asked):
    server.manner = manner
    leave(path.with_name(name), content)
    calls = []
    download_file(server.url, path, MD5, progress=lambda *call: calls.append(call))
    assert server.ranges == [start and f"bytes={start}-" for start in asked]
    assert calls[:1] == [("file.gz", 0, len(BODY))] * bool(asked)
    assert_arrived(path)
    assert (f"{path} has the MD5" in caplog.text) == (name == "file.gz")


def test_a_continued_part_that_was_damaged_is_deleted_and_the_next_call_begins_again(server, path, part):
    leave(part, bytes(HALF))
    with pytest.raises(DownloadError, match=f"is not the expected file: its MD5 is .*, not {MD5}"):
        download_file(server.url, path, MD5)
    assert files(path) == []
    download_file(server.url, path, MD5)
    assert server.ranges == [f"bytes={HALF}-", None]
    assert path.read_bytes() == BODY


@pytest.mark.parametrize(
    ("manner", "left", "message", "kept"),
    [
        ("not_found", b"", "{url}: the server answered 404 Not Found", []),
        ("not_found", BODY[:HALF], "{url}: the server answered 404 Not Found", ["file.gz.part"]),
        ("web_page", b"", "{url} is not the expected file.* was deleted", []),
    ],
    ids=["404", "404, and a part", "a web page"],
)
def test_another_answer_is_an_error_that_names_the_address(server, path, part, manner, left, message, kept):
    server.manner = manner
    leave(part, left)
    with pytest.raises(DownloadError, match=f"^{message.format(url=server.url)}$"):
        download_file(server.url, path, MD5)
    assert files(path) == kept


def test_no_server_and_no_answer_are_one_line(path):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and no answer follows
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/file.gz"
        with pytest.raises(DownloadError, match=f"^{url} cannot be reached: no answer for 0.05 seconds$"):
            download_file(url, path, MD5, timeout_s=0.05)
    with pytest.raises(DownloadError, match=f"^{url} cannot be reached: Connection refused$"):
        download_file(url, path, MD5)
    assert files(path) == []


@pytest.mark.parametrize("url", ["http://nowhere.invalid/f", "http://host:port/f", "http://a..b/f", "http://[/f"])
def test_an_address_without_a_host_is_one_line(path, monkeypatch, url):
    def no_host(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_host)
    with pytest.raises(DownloadError, match=f"^{re.escape(url)} cannot be reached: [^\n]+$"):
        download_file(url, path, MD5)


def test_a_server_that_falls_silent_half_way_is_given_up_and_the_part_kept(path, part):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def half_an_answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + BODY[:100_000])
                connection.recv(1)  # returns when the client hangs up

        thread = threading.Thread(target=half_an_answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/file.gz"
        with pytest.raises(DownloadError, match=r"broke after \d+ of 300000 bytes \(no answer for 0.2 seconds\)"):
            download_file(url, path, MD5, timeout_s=0.2)
        thread.join()
    assert BODY.startswith(part.read_bytes())
    assert part.stat().st_size > 0


def test_the_proxy_of_the_environment_is_asked(server, path, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/file.gz"))
    download_file("http://pictures.invalid/file.gz", path, MD5)
    assert server.requests == [("http://pictures.invalid/file.gz", None)]
    assert path.read_bytes() == BODY


def test_two_downloads_at_once_each_write_a_part_of_their_own(server, path, part):
    # The second runs, start to end, while the first is half way; no need for luck with two threads.
    inside = []

    def download_again(name, done, total):
        if done >= HALF and not inside:
            before = part.read_bytes()
            inside.append(len(before))
            download_file(server.url, path, MD5)
            assert path.read_bytes() == BODY
            assert part.read_bytes() == before
            assert files(path) == ["file.gz", "file.gz.part"]

    download_file(server.url, path, MD5, progress=download_again)
    assert inside
    assert server.ranges == [None, None]
    assert_arrived(path)


def test_a_part_that_was_finished_and_renamed_before_we_locked_it_is_not_written(server, path, part, monkeypatch):
    # 1. we open name.part   2. the other process renames it to name and ends   3. we get the lock on `name` itself
    leave(part, BODY)
    lock = download._lock

    def rename_then_lock(file):
        os.replace(part, path)
        return lock(file)

    monkeypatch.setattr(download, "_lock", rename_then_lock)
    download_file(server.url, path, MD5)
    assert server.requests == []
    assert_arrived(path)


def test_a_folder_that_cannot_be_made_is_named(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "file" / "cache" / "file.gz"
    with pytest.raises(DownloadError, match=f"^{path} cannot be (read|written): Not a directory$"):
        download_file(server.url, path, MD5)


def test_a_full_disk_is_named_and_the_part_kept(server, path, part):
    resource = pytest.importorskip("resource", reason="files are kept small by a limit of the process, as Unix has")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HALF, hard))
    try:
        with pytest.raises(DownloadError, match=f"^{path} cannot be written: File too large$"):
            download_file(server.url, path, MD5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert part.read_bytes() == BODY[:HALF]
    assert_continued(server, path, part)


def test_an_error_of_the_progress_callback_is_its_own(server, path):
    def pipe_closed(name, done, total):
        raise BrokenPipeError("stdout")

    with pytest.raises(BrokenPipeError, match="stdout"):
        download_file(server.url, path, MD5, progress=pipe_closed)


@pytest.mark.parametrize("base_url", ["file:///etc", "ftp://host/x", "host/x", "", "http://"])
def test_only_http_is_downloaded_from(tmp_path, base_url):
    with pytest.raises(DownloadError, match=f"cannot download from '{base_url}': .* begin with http:// or https://"):
        download_files(base_url, tmp_path, {"a": MD5})
