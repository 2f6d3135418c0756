"""The channel between the caller and one worker process: messages both ways over a pair of connected sockets.

No address, no port: the pair is made by the caller, and one end is given to the worker when it is forked. A message is
bytes and, rarely, file descriptors. The end of the other process closes the channel, so waiting for a message is also
waiting for that.

A waiting side first looks again and again, for a moment: a message that comes within it costs no wake-up by the
kernel. Then it sleeps.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Collection, Iterator, Sequence

_HEADER = struct.Struct("<QB")  # how many bytes follow; whether this frame carries only file descriptors
_MOST_FDS = 200  # in one frame; Linux takes 253
_WAKE_S = 0.1  # a waiting caller looks this often for Ctrl-C, which cannot always wake it (_thread.interrupt_main)


class ChannelClosedError(Exception):
    """The other side has gone."""


class Channel:
    """One end of a channel."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def pair(cls) -> tuple["Channel", "Channel"]:
        """Return the two ends of a new channel."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: nobody is there to read it.
        """
        try:
            while len(fds) > _MOST_FDS:
                socket.send_fds(self._socket, [_HEADER.pack(0, True)], list(fds[:_MOST_FDS]))
                fds = fds[_MOST_FDS:]
            header = _HEADER.pack(len(body), False)
            if fds:
                socket.send_fds(self._socket, [header], list(fds))
                self._socket.sendall(body)
            else:
                self._socket.sendall(header + body)
        except (BrokenPipeError, ConnectionResetError):
            raise ChannelClosedError from None

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for a message; return it, and the file descriptors that came with it.

        Raises:
            ChannelClosedError: the other side has gone.
        """
        all_fds: list[int] = []
        while True:
            try:
                header, fds, *_ = socket.recv_fds(self._socket, _HEADER.size, _MOST_FDS)
                for fd in fds:
                    os.set_inheritable(fd, False)
                all_fds += fds
                if not header:
                    raise ChannelClosedError
                num_bytes, only_fds = _HEADER.unpack(header + self._exactly(_HEADER.size - len(header)))
                if only_fds:
                    continue
                return self._exactly(num_bytes), all_fds
            except ConnectionResetError:
                raise ChannelClosedError from None

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
        """Look for a message without sleeping, until there is one or `for_s` seconds are over."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        until = time.perf_counter() + for_s
        while not poll.poll(0) and time.perf_counter() < until:
            os.sched_yield()

    def is_ready(self) -> bool:
        """Return whether there is something to receive (the other side's end counts)."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self._socket.close()

    def detach(self) -> int:
        """Give the end away as a file descriptor."""
        return self._socket.detach()


def ready(channels: Collection[Channel], spin_s: float) -> Iterator[Channel]:
    """Yield channels that have something to receive (their end counts), as soon and as often as they have.

    Args:
        channels: those that are waited for. Who has been given a channel receives from it, and takes it out of there
            if no more is to come; when none is left, this ends.
        spin_s: for so long it looks without sleeping, each time.
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
        for fd, _ in found or poll.poll(_WAKE_S * 1000):
            yield by_fd[fd]
            if by_fd[fd] not in channels:
                poll.unregister(fd)
                del by_fd[fd]
            until = time.perf_counter() + spin_s
