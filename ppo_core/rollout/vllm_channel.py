"""Messages between the trainer and the process that runs vLLM: JSON objects, each behind its length, over a socket.

Neither end ever blocks in it for longer than it asks to, so either may look after other things meanwhile. It knows
neither vLLM nor what the messages mean.
"""

from __future__ import annotations

import json
import math
import select
import socket
from typing import Any

Message = dict[str, Any]

_LENGTH_BYTES = 8
_READ_BYTES = 1 << 20


class ChannelClosed(ConnectionError):
    """The other end is gone: nothing more will come."""


class Channel:
    """One end of a connected stream socket, which it owns."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._outgoing = bytearray()
        self._incoming = bytearray()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing)

    def post(self, message: Message) -> None:
        """Put a message in line; it leaves as far as `exchange` is called."""
        body = json.dumps(message, allow_nan=True).encode("ascii")
        self._outgoing += len(body).to_bytes(_LENGTH_BYTES, "big") + body

    def exchange(self, wait_s: float) -> list[Message]:
        """Send what the socket takes and return the whole messages that have come, waiting at most `wait_s` seconds.

        Raises:
            ChannelClosed: the other end is gone and every message that it sent was returned before.
        """
        ready = select.poll()  # `select` itself takes no descriptor above 1023, and a trainer on GPUs has many.
        ready.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        events = dict(ready.poll(math.ceil(wait_s * 1000))).get(self._socket.fileno(), 0)
        if events & select.POLLOUT:
            self._write()
        if events & ~select.POLLOUT and not self._read():
            messages = self._whole()
            if not messages:
                raise ChannelClosed("the other end closed the connection")
            return messages
        return self._whole()

    def close(self) -> None:
        self._socket.close()

    def _write(self) -> None:
        try:
            del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._outgoing.clear()  # The next read says that it is gone, after what it still had to say.

    def _read(self) -> bool:
        """False at the stream's end."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        self._incoming += data
        return bool(data)

    def _whole(self) -> list[Message]:
        messages: list[Message] = []
        start = 0
        while len(self._incoming) >= start + _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            end = body + int.from_bytes(self._incoming[start:body], "big")
            if len(self._incoming) < end:
                break
            messages.append(json.loads(self._incoming[body:end]))
            start = end
        del self._incoming[:start]
        return messages
