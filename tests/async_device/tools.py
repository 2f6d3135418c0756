"""What several files of tests here use."""

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import torch
from torch import nn

import async_device
from async_device import C, held

FIRST, SECOND = BOTH = [torch.device("queued:0"), torch.device("queued:1")]
BLOCK = 4096  # numbers of float32, which fill a block of the allocator


def layers(count: int, width: int) -> nn.Module:
    """Return some layers on the first device, whose parameters are most of a step's memory."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).to(FIRST)


def current(device: torch.device = FIRST) -> torch.Stream:
    return torch.accelerator.current_stream(device)


@contextlib.contextmanager
def stalled(*where: torch.device | torch.Stream) -> Iterator[None]:
    """Hold streams back, of a device the current one; at the end of the block all that is queued ends."""
    with contextlib.ExitStack() as stack:
        stack.callback(C.synchronize_all)
        for each in where:
            stack.enter_context(held(current(each) if isinstance(each, torch.device) else each))
        yield


def in_thread(call: Callable[[], object]) -> object:
    """Return what a call returns, or raises, in another thread."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def child(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that imports torch and nothing of the tests, with the variables of `environment`."""
    env = {**os.environ, **async_device.environment(), **variables}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=120)
