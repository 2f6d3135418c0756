"""The folders of this process's control groups (cgroups) in the system's files, of either version (Linux)."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's control group, then those of the groups that it is in, up to the top.

    Inside a container the path may be the host's, and only the top is there: the caller passes over what does not
    exist. Nothing is yielded where the system says nothing.

    Args:
        root: of the system's files.
        controller: "cpu" or "memory"; in version 1 each has folders of its own.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers
        inner = PurePosixPath(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            yield base / folder
