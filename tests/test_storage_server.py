"""The storage server that lessons start: its answers, its waits, and that it never outlives who started it."""

import socket
import struct
import subprocess
import sys
import time

import pytest
import torch

from shared.lessons.topic_15_02 import storage_server as storage_module
from shared.lessons.topic_15_02.storage_server import StorageClient, StorageServer


@pytest.fixture
def storage():
    server = StorageServer(torch.arange(40, dtype=torch.uint8).view(10, 2, 2))
    yield server
    server.close()


def connected(server: StorageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def ask(connection: socket.socket, index: int, milliseconds: int = 0) -> None:
    connection.sendall(struct.pack(">IH", index, milliseconds))


def test_an_answer_is_the_items_bytes(storage):
    with connected(storage) as connection:
        for index in (3, 0, 9, 3):
            ask(connection, index)
            assert list(connection.recv(100)) == [4 * index + k for k in range(4)]


def test_a_client_fetches_items(storage):
    client = StorageClient(storage.port, item_size=4)
    for index in (3, 0, 9):
        assert list(client.fetch(index, milliseconds=1)) == [4 * index + k for k in range(4)]
    client.close()


def test_an_answer_is_sent_after_the_wait_and_connections_wait_at_the_same_time(storage):
    with connected(storage) as one, connected(storage) as two:
        start = time.perf_counter()
        for connection in (one, two):
            ask(connection, 1, 1000)
        for connection in (one, two):
            assert list(connection.recv(100)) == [4, 5, 6, 7]
        assert 1.0 <= time.perf_counter() - start < 1.9, "not one after the other, which takes 2 s"


def test_requests_that_arrive_in_pieces_or_together_are_answered(storage):
    with connected(storage) as connection, connection.makefile("rb") as answers:
        request = struct.pack(">IH", 2, 0)
        connection.sendall(request[:2])
        time.sleep(0.1)
        connection.sendall(request[2:] + request)
        assert list(answers.read(8)) == 2 * [8, 9, 10, 11]


def test_close_ends_the_process_and_can_be_repeated(storage):
    port = storage.port
    storage.close()
    storage.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_the_server_ends_with_a_process_that_is_killed():
    code = "import torch, time; from shared.lessons.topic_15_02.storage_server import StorageServer\n"
    code += "print(StorageServer(torch.zeros(1, 1)).port, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        port = int(parent.stdout.readline())
        parent.kill()
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail("the server still listens ten seconds after its parent was killed")


def test_a_server_that_does_not_start_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(storage_module, "__file__", str(tmp_path / "nothing.py"))
    with pytest.raises(RuntimeError, match="before it listened"):
        StorageServer(torch.zeros(2, 2))
