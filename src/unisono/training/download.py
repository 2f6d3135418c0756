"""Download files once: resumed, verified, and never half-written under their own name.

    name          exists only when its MD5 is right: it is renamed into place, and checked again when used
    name.part     the bytes so far; it stays when a download is interrupted (Ctrl-C, lost network, kill), and the
                  next download continues it with a Range request
    name.part-*   the part of a second process that downloads the same file at the same time

Several processes: `name.part` is locked with flock while it is written, so it has one writer, and the kernel releases
the lock however that writer ends. A process that finds it locked does not wait, because the writer may hang. It
downloads its own copy, and the last rename wins; both files have the same checksum. Windows has no flock: there every
download has its own part, and an interrupted one starts again.

MD5 is what the data sets publish. It guards against damage in transit, not against an attacker.

Connecting, and each wait for more bytes, has a time limit. Proxies are taken from the
environment (http_proxy, https_proxy, no_proxy).
"""

import hashlib
import logging
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from io import FileIO
from pathlib import Path
from typing import TypeAlias
from urllib.error import HTTPError, URLError
from urllib.request import Request, build_opener

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 16
_PARTIAL_CONTENT = 206
_RANGE_NOT_SATISFIABLE = 416

OnBytes: TypeAlias = Callable[[str, int, int | None], None]
"""Called as bytes arrive with the file's name, the bytes so far, and the total (None: unknown)."""


class DownloadError(Exception):
    """A file could not be downloaded; the message names the address or the file, and says why."""


def download_files(
    base_url: str,
    folder: Path,
    md5_by_name: Mapping[str, str],
    *,
    progress: OnBytes | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Download the named files from below one address into a folder, except those already there.

    Example (without network, because the file exists already):
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "hello.txt").write_bytes(b"hello")
        >>> download_files("https://example.org/", folder, {"hello.txt": "5d41402abc4b2a76b9719d911017c592"})

    Args:
        base_url: an http or https address; file names are appended to it, with a slash between.
        folder: for the files; created if it does not exist.
        md5_by_name: file names and their MD5 checksums in hexadecimal digits.
        progress: called as bytes arrive; not called for files that exist already.
        timeout_s: seconds to wait for a connection, and for each further piece of a file.

    Raises:
        DownloadError: `base_url` is not http or https; or as `download_file`. Files that were finished before
            the error stay.
    """
    if not re.match(r"https?://[^/]", base_url):
        raise DownloadError(f"cannot download from {base_url!r}: the address must begin with http:// or https://")
    for name, md5 in md5_by_name.items():
        url = f"{base_url.rstrip('/')}/{name}"
        download_file(url, folder / name, md5, progress=progress, timeout_s=timeout_s)


def download_file(
    url: str, path: Path, md5: str, *, progress: OnBytes | None = None, timeout_s: float = TIMEOUT_S
) -> None:
    """Download one file, unless it exists with the right checksum; continue an interrupted download.

    Args:
        url: an http or https address.
        path: of the file; its folder is created if it does not exist.
        md5: the checksum that the file must have, in hexadecimal digits.
        progress: called as bytes arrive, with `path.name`.
        timeout_s: seconds to wait for a connection, and for each further piece of the file.

    Raises:
        DownloadError: no connection, an answer that is not the file, a body that ends early (the part stays, to
            be continued), a wrong checksum (the part is deleted), or a folder that cannot be written.
    """
    if _is_complete(path, md5):
        return
    with _open_part(path) as part:
        if _is_complete(path, md5):  # another process finished it in the meantime
            part.truncate(0)
            return
        if _md5(part) != md5:  # a complete part: its process ended just before the rename
            _transfer(url, part, path, progress, timeout_s)
            if (found := _md5(part)) != md5:
                part.truncate(0)
                raise DownloadError(f"{url} is not the expected file: its MD5 is {found}, not {md5}; it was deleted")
        with _writing(path):
            # Renamed before closing releases the lock: no other process may continue a finished part.
            if sys.platform == "win32":
                part.close()  # Windows does not rename open files, and there the part is never shared
            os.replace(part.name, path)


def _transfer(url: str, part: FileIO, path: Path, progress: OnBytes | None, timeout_s: float) -> None:
    """Append the missing bytes to `part`; if the server cannot continue it, begin again."""
    done = part.seek(0, os.SEEK_END)
    with _request(url, done, timeout_s) as response:
        if done and response.status != _PARTIAL_CONTENT:
            part.truncate(0)
            done = 0
        total = None if response.length is None else done + response.length
        if progress is not None:
            progress(path.name, done, total)
        while True:
            try:
                chunk = response.read(_CHUNK_BYTES)
            except (OSError, HTTPException) as error:
                raise _broken_off(url, done, total, _reason(error, timeout_s)) from error
            if not chunk:
                break
            with _writing(path):
                _write_all(part, chunk)
            done += len(chunk)
            if progress is not None:
                progress(path.name, done, total)
    if total is not None and done < total:
        raise _broken_off(url, done, total, "closed by the server")


def _request(url: str, start: int, timeout_s: float) -> HTTPResponse:
    """Ask for `url` from byte `start` on.

    The response has status 206 if its body begins at `start`, and another status if it begins at byte 0.
    """
    headers = {"User-Agent": "unisono"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        # Not urlopen: it reads the environment's proxies once, and keeps them for the life of the process.
        response: HTTPResponse = build_opener().open(Request(url, headers=headers), timeout=timeout_s)
    except HTTPError as error:
        error.close()
        if start and error.code == _RANGE_NOT_SATISFIABLE:  # the part is not the beginning of this file
            return _request(url, 0, timeout_s)
        raise DownloadError(f"{url}: the server answered {error.code} {' '.join(error.reason.split())}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise DownloadError(f"{url} cannot be reached: {_reason(error, timeout_s)}") from error
    if start and response.status == _PARTIAL_CONTENT:
        offered = response.headers.get("Content-Range", "nothing")
        if not re.match(rf"bytes {start}-", offered):
            response.close()
            log.warning("%s: asked for bytes from %d on, offered %s: beginning again", url, start, offered)
            return _request(url, 0, timeout_s)
    return response


def _reason(error: Exception, timeout_s: float) -> str:
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer for {timeout_s:g} seconds"
    text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__
    return " ".join(text.split())  # one line, whatever the server sent


def _broken_off(url: str, done: int, total: int | None, reason: str) -> DownloadError:
    of_total = "" if total is None else f" of {total}"
    return DownloadError(f"{url}: the connection broke after {done}{of_total} bytes ({reason}); try again to continue")


@contextmanager
def _open_part(path: Path) -> Iterator[FileIO]:
    """Open a part of `path` that only this call writes; afterwards, leave no part that cannot be continued.

    Between opening `name.part` and locking it, another process may have renamed it to `name`. Then we would
    hold the finished file, and write into it; so the name is looked up again under the lock.
    """
    shared = path.with_name(f"{path.name}.part")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = _open_to_append(shared)
    with part:
        if _lock(part) and _is_named(part, shared):
            try:
                yield part
            finally:
                if os.fstat(part.fileno()).st_size == 0:
                    shared.unlink(missing_ok=True)
            return
    log.info("%s cannot be locked (another process may be writing it): downloading a copy", shared)
    own = path.with_name(f"{path.name}.part-{uuid.uuid4().hex}")
    try:
        with _writing(path):
            part = _open_to_append(own)
        with part:
            yield part
    finally:
        own.unlink(missing_ok=True)


def _open_to_append(path: Path) -> FileIO:
    # Unbuffered: bytes are in the file as soon as they arrive, and a disk error is raised by the write that caused it.
    return open(path, "a+b", buffering=0)


def _write_all(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


if sys.platform == "win32":

    def _lock(file: FileIO) -> bool:
        return False
else:
    import fcntl

    def _lock(file: FileIO) -> bool:
        """Try to become the only writer of `file` until it is closed; do not wait."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held by another, or a file system without locks
            return False
        return True


def _is_named(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a DownloadError that names the file."""
    try:
        yield
    except OSError as error:
        raise DownloadError(f"{path} cannot be written: {error.strerror or error}") from error


def _is_complete(path: Path, md5: str) -> bool:
    """Return whether the file exists with the right checksum; warn if it has another one."""
    try:
        with open(path, "rb", buffering=0) as file:
            found = _md5(file)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DownloadError(f"{path} cannot be read: {error.strerror or error}") from error
    if found != md5:
        log.warning("%s has the MD5 %s, not %s: it is downloaded again", path, found, md5)
    return found == md5


def _md5(file: FileIO) -> str:
    file.seek(0)
    return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
