"""The storage server that lessons start: its answers, its waits, and that it ends with who started it."""

import contextlib
import socket
import struct
import threading
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


def test_answers_are_the_items_bytes_after_their_waits(storage):
    client = StorageClient(storage.port, item_size=4)
    for index in (3, 0, 9):
        assert list(client.fetch(index, milliseconds=1)) == [4 * index + k for k in range(4)]
    client.close()
    one, two = (socket.create_connection(("127.0.0.1", storage.port), timeout=20) for _ in range(2))
    with one, two:
        start = time.perf_counter()
        for connection in (one, two):
            connection.sendall(struct.pack(">IH", 1, 1000))
        for connection in (one, two):
            assert list(connection.recv(100)) == [4, 5, 6, 7]
        assert 1.0 <= time.perf_counter() - start < 1.9, "not one after the other, which takes 2 s"


def test_it_ends_when_its_starter_closes_it_or_ends_itself(storage):
    storage._process.stdin.close()  # what the system does when a process is killed
    assert storage._process.wait(timeout=10) == 0
    for _ in range(2):
        storage.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", storage.port), timeout=5)


def test_a_server_that_has_started_is_not_ended_for_being_late():
    before = set(threading.enumerate())
    with contextlib.closing(StorageServer(torch.zeros(2, 2))):
        for timer in set(threading.enumerate()) - before:  # it would kill the server a minute later, within the lesson
            timer.join(5)
            assert not timer.is_alive()


def test_a_server_that_does_not_start_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(storage_module, "__file__", str(tmp_path / "nothing.py"))
    with pytest.raises(RuntimeError, match="before it listened"):
        StorageServer(torch.zeros(2, 2))
