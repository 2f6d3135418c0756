"""The channel between the caller and one worker process: messages both ways over a pair of connected sockets.

There is no address and no port: the caller makes the pair, and the worker gets one end when it is forked. A message is
bytes and, rarely, file descriptors. When a process ends, its end of the channel closes; so a wait for a message also
ends with the other process. Ctrl-C may end it, too: half a message may be in the channel then, which is of no more use.

A waiting process polls for a moment first: a message that arrives then costs no wake-up by the kernel. Then it sleeps.
"""

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from unisono.engines.processes.limits import explained, explanation
from unisono.runtime.interrupts import WAKE_S, deliver, interruptible

_HEADER = struct.Struct("<QB")  # how many bytes follow; whether this frame carries only file descriptors
_MAX_FDS = 200  # in one frame; Linux allows 253
_CUT = int(socket.MSG_CTRUNC)  # the system has closed file descriptors that found no place; an int, which is faster


class ChannelClosedError(Exception):
    """The other process has closed its end."""


class Channel:
    """One end of a channel."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        """Return the two ends of a new channel."""
        with explained("a channel to a worker process"):
            first, second = socket.socketpair()
        return cls(first), cls(second)

    def set_timeout(self, seconds: float | None) -> None:
        """Have `send` and `receive` raise TimeoutError if the other process takes, or gives, nothing for so long."""
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        return self._socket.fileno()

    @interruptible
    def send(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: the other end is closed.
            OSError: the system lets no further file descriptors be sent.
        """
        try:
            while len(fds) > _MAX_FDS:
                socket.send_fds(self._socket, [_HEADER.pack(0, True)], list(fds[:_MAX_FDS]))
                fds = fds[_MAX_FDS:]
            header = _HEADER.pack(len(body), False)
            if fds:
                socket.send_fds(self._socket, [header], list(fds))
                self._socket.sendall(body)
            else:
                self._socket.sendall(header + body)
        except (BrokenPipeError, ConnectionResetError):
            raise ChannelClosedError from None

    @interruptible
    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for a message; return it, and the file descriptors that came with it.

        Raises:
            ChannelClosedError: the other end is closed.
            OSError: this process may not have so many file descriptors. The message is lost; the next one can be read.
        """
        all_fds: list[int] = []
        is_cut = 0
        try:
            while True:
                header, fds, flags, _ = socket.recv_fds(self._socket, _HEADER.size, _MAX_FDS)
                all_fds += fds
                for fd in fds:
                    os.set_inheritable(fd, False)
                if not header:
                    raise ChannelClosedError
                num_bytes, only_fds = _HEADER.unpack(header + self._exactly(_HEADER.size - len(header)))
                is_cut |= flags & _CUT
                if only_fds:
                    continue
                body = self._exactly(num_bytes)
                if is_cut:
                    raise explanation(OSError(errno.EMFILE, ""), "memory that another process shares")
                return body, all_fds
        except BaseException as error:
            for fd in all_fds:
                os.close(fd)
            if isinstance(error, ConnectionResetError):
                raise ChannelClosedError from None
            raise

    def _exactly(self, num_bytes: int) -> bytes:
        body = bytearray(num_bytes)
        view = memoryview(body)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise ChannelClosedError
            view = view[received:]
        return bytes(body)

    def spin(self, for_s: float) -> None:
        """Poll without sleeping until there is a message or `for_s` seconds have passed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        until = time.perf_counter() + for_s
        while not poll.poll(0) and time.perf_counter() < until:
            os.sched_yield()

    def wait(self, for_s: float) -> bool:
        """Sleep until there is something to receive (a closed other end counts) or the time is over; return whether."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(for_s * 1000))

    def close(self) -> None:
        self._socket.close()

    def shut_down(self) -> None:
        """Close the channel for all processes, also those that have a copy of this end."""
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def detach(self) -> int:
        """Return this end as a file descriptor, which the caller then owns."""
        return self._socket.detach()


def ready(channels: Collection[Channel], spin_s: float, on_wait: Callable[[], None] | None) -> Iterator[Channel]:
    """Yield each channel that has something to receive (a closed other end counts), as soon and as often as it has.

    Args:
        channels: those to wait for. The caller receives from a channel that it is given, and removes it from `channels`
            once it expects no more from it. The iterator ends when none is left.
        spin_s: how long to poll without sleeping, each time.
        on_wait: called now and then while there is nothing to receive; it raises to end the wait.
    """
    poll = select.poll()
    by_fd = {channel.fileno(): channel for channel in channels}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    until = time.perf_counter() + spin_s
    while by_fd:
        found = poll.poll(0)
        if not found and time.perf_counter() < until:
            os.sched_yield()
            continue
        found = found or poll.poll(WAKE_S * 1000)
        if not found:
            deliver()
            if on_wait is not None:
                on_wait()
        for fd, _ in found:
            yield by_fd[fd]
            if by_fd[fd] not in channels:
                poll.unregister(fd)
                del by_fd[fd]
            until = time.perf_counter() + spin_s
