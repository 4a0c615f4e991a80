"""A storage server on this machine that takes its time, for lessons on data that comes over a network."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

REQUEST = struct.Struct(">IH")  # which item, and after how many milliseconds the answer is sent
START_SECONDS = 60.0


class StorageServer:
    """A process that sends items over loopback connections, as many at once as there are.

    A `StorageClient` is one of them. A request is six bytes, `struct.pack(">IH", index, milliseconds)`; the answer is
    the item's bytes. The process ends with `close`, or with the process that has started it.

    Attributes:
        port: where it listens, on 127.0.0.1.

    Raises:
        RuntimeError: the server doesn't start.
    """

    def __init__(self, items: Tensor) -> None:
        """Args: items: (N, …); the answer to a request is `items[index]`, in the tensor's bytes."""
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name, "items.bin")
        content = items.numpy().tobytes()
        file.write_bytes(content)
        self._process = subprocess.Popen(
            # isolated: it needs nothing but the standard library, and starts faster
            [sys.executable, "-I", __file__, str(file), str(len(content) // len(items))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        patience = threading.Timer(START_SECONDS, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        if not line:
            self.close()
            raise RuntimeError(f"the storage server ended with exit code {self._process.returncode} before it listened")
        self.port = int(line)

    def close(self) -> None:
        """End the process; a second call does nothing."""
        self._process.stdin.close()  # then it ends
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        self._process.stdout.close()
        self._folder.cleanup()


class StorageClient:
    """One connection to a StorageServer. Each process needs its own, or it reads the answers of another one."""

    def __init__(self, port: int, item_size: int) -> None:
        """Args: port: the server's; item_size: bytes of an item."""
        self._item_size = item_size
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._answers = self._connection.makefile("rb")

    def fetch(self, index: int, milliseconds: int) -> bytes:
        """The bytes of an item, which the server sends after that many milliseconds."""
        self._connection.sendall(REQUEST.pack(index, milliseconds))
        return self._answers.read(self._item_size)

    def close(self) -> None:
        """End the connection."""
        self._answers.close()
        self._connection.close()


def _serve(path: str, size: int) -> None:
    """Answer requests for items of `size` bytes until standard input ends."""

    class Storage(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport
            self.unread = b""

        def data_received(self, data: bytes) -> None:
            self.unread += data
            while len(self.unread) >= REQUEST.size:
                index, milliseconds = REQUEST.unpack_from(self.unread)
                self.unread = self.unread[REQUEST.size :]
                items.seek(size * index)
                loop = asyncio.get_running_loop()
                loop.call_later(milliseconds / 1000, self.transport.write, items.read(size))

    def end_with_the_parent() -> None:
        sys.stdin.read()  # returns when the parent closes it, or ends
        os._exit(0)

    async def listen() -> None:
        server = await asyncio.get_running_loop().create_server(Storage, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    with open(path, "rb") as items:
        threading.Thread(target=end_with_the_parent, daemon=True).start()
        asyncio.run(listen())


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
