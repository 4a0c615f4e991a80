"""Linux: processes, file systems and a network of their own for a process, without any program's help.

Each step in the child of the one before:

    enter()              # the next child is the first process of a new tree: when it ends, the kernel ends the rest
    close_off(folder, …) # file systems are read-only but for `folder`, and there is no network but loopback
    drop_powers()        # none of this can be undone any more

Each raises OSError where the system doesn't allow it, as inside of most containers.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

INSIDE = 1000  # the user's number in there: not 0, which would get all powers back with each program it starts

_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK, _NEW_MOUNTS = 0x10000000, 0x20000000, 0x40000000, 0x00020000
_PRIVATE, _RECURSIVE = 1 << 18, 0x4000
_MOUNT_SETATTR, _AT_CWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_NO_NEW_PRIVILEGES, _DIE_WITH_PARENT, _SUBREAPER = 38, 1, 36
_SET_INTERFACE, _UP = 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library; OSError if it fails."""
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends."""
    _call("prctl", _DIE_WITH_PARENT, 9)


def adopt_orphans() -> None:
    """Descendants whose parents have ended become children of this process, whatever they did to get away."""
    _call("prctl", _SUBREAPER, 1)


def enter() -> None:
    """Give the next child of this process, which must have one thread only, a tree of its own."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_USER | _NEW_PROCESSES | _NEW_NETWORK | _NEW_MOUNTS)
    maps = {"setgroups": "deny", "uid_map": f"{INSIDE} {user} 1", "gid_map": f"{INSIDE} {group} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def close_off(folder: str, hidden: str, size: int) -> None:
    """Leave nothing to write to but memory: `folder`, shared memory, and an empty folder in the place of `hidden`.

    size: bytes that may be written into each of them.
    """
    _call("mount", None, b"/", None, _PRIVATE | _RECURSIVE, None)
    read_only = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_CWD, b"/", _AT_RECURSIVE, ctypes.byref(read_only), ctypes.sizeof(read_only))
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    for place in filter(os.path.isdir, (folder, "/dev/shm", hidden)):
        _call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", 0, f"size={size},mode=0700".encode())
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_INTERFACE, struct.pack("16sh14x", b"lo", _UP))


def drop_powers() -> None:
    """Give up what the creator of these namespaces may do in them, now and in all that this process starts."""
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
