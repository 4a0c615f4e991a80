"""What the ranks of a process group send each other: recorded below torch.distributed's functions, whichever are used.

    with recorded() as calls:
        dist.send(x, 1)
    calls       # [Call(name='send', group=(0, 1), size=16, peer=1)]

`observe` runs a function on several ranks and keeps their calls also if it fails or hangs, so that a wrong answer can
be drawn like a right one.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shared.launcher import launch
from shared.rank_failures import LaunchError

_COLLECTIVE = re.compile(r"_?(all|broadcast|reduce|gather|scatter|barrier|monitored_barrier)")


@dataclass(frozen=True)
class Call:
    """What reached a process group.

    Attributes:
        name: 'send', 'recv', or the collective's.
        group: the ranks in the group, as ranks of the world.
        size: bytes of the message; of a collective, those that its cost grows with (`ring_bytes`).
        peer: rank of the world a message goes to or comes from; None if it may come from any.
    """

    name: str
    group: tuple[int, ...]
    size: int
    peer: int | None = None

    @property
    def ring_bytes(self) -> float:
        """What a rank sends if a ring carries the call: the mean over the ranks of the group."""
        if self.name in ("send", "recv"):
            return self.size if self.name == "send" else 0
        passes = 2 if re.match("all_?reduce", self.name) else 1
        return passes * (len(self.group) - 1) / len(self.group) * self.size


@contextmanager
def recorded(named: bool = False, each: Callable[[Call], object] | None = None) -> Iterator[list[Call]]:
    """The calls of this rank inside the block, in order; `each` is called on every one before it starts. Where receives
    must be `named`, one from any rank raises: it would take what comes first, sometimes another call's."""
    calls: list[Call] = []

    def watch(owner: Any, name: str, note: Callable[..., Call]) -> None:
        original = getattr(owner, name)  # an operator, which is slow to make, is in vars from now on

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(note(name, *args, *kwargs.values()))
            if each is not None:
                each(calls[-1])
            return original(*args, **kwargs)

        for overload in getattr(original, "overloads", list)():  # of an operator; the dispatcher looks them up here
            setattr(call, overload, getattr(original, overload))
        replaced.enter_context(mock.patch.object(owner, name, call))

    with ExitStack() as replaced:
        for name in dir(dist.ProcessGroup):
            if name in ("send", "recv"):
                watch(dist.ProcessGroup, name, _message)
            elif name == "recv_anysource":
                watch(dist.ProcessGroup, name, _refuse if named else _from_any)
            elif _COLLECTIVE.match(name):
                watch(dist.ProcessGroup, name, _collective)
        for name in _operators():
            watch(torch.ops._c10d_functional, name, _functional)
        yield calls


@cache
def _operators() -> list[str]:
    """The functional collectives, which reach the groups without Python."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    names = {name.removeprefix("_c10d_functional::") for name in names if name.startswith("_c10d_functional::")}
    return sorted(name for name in names if _COLLECTIVE.match(name))


def _members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _message(name: str, group: dist.ProcessGroup, tensors: list[Tensor], place: int, *_: Any) -> Call:
    """Gloo's own words for a peer that can't be are a failed assertion or a crash; these can be read."""
    members, verb = _members(group), {"send": "sends to", "recv": "receives from"}[name]
    if not 0 <= place < len(members):
        raise ValueError(f"rank {dist.get_rank()} {verb} place {place} of a group of {len(members)}")
    if members[place] == dist.get_rank():
        raise ValueError(f"rank {dist.get_rank()} {verb} itself")
    return Call(name, members, _nbytes(tensors), members[place])


def _from_any(_: str, group: dist.ProcessGroup, *__: Any) -> Call:
    return Call("recv", _members(group), 0)


def _refuse(*_: Any) -> Call:
    raise ValueError(f"rank {dist.get_rank()} receives from any rank, so perhaps what belongs to another call")


def _collective(name: str, group: dist.ProcessGroup, *args: Any) -> Call:
    """At a gather's root one argument is the whole, elsewhere all are a part; else one is the whole everywhere."""
    sizes = [size for size in map(_nbytes, args) if size] or [0]
    return Call(name, _members(group), min(sizes) if re.match("gather|scatter", name) else max(sizes))


def _functional(name: str, *args: Any) -> Call:
    group = dist.distributed_c10d._resolve_process_group([arg for arg in args if isinstance(arg, str)][-1])
    size = _nbytes(args) * (group.size() if name.startswith("all_gather") else 1)
    return Call(name, _members(group), size)


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


def collectives(calls: Sequence[Call]) -> list[Call]:
    """The calls that are no messages between two ranks."""
    return [call for call in calls if call.name not in ("send", "recv")]


def rounds(calls: Sequence[Sequence[Call]], root: int) -> list[tuple[int, int, int]]:
    """(round, from, to) of each message of a broadcast, of which `calls` has those of each rank, in order.

    A message leaves in the first round in which its sender has the tensor and is not sending another. Round -1 stands
    for a message of a rank that never got the tensor.
    """
    sends = {rank: [call.peer for call in mine if call.name == "send"] for rank, mine in enumerate(calls)}
    arrived, waiting, found = {root: 0}, [root], []
    while waiting:
        rank = waiting.pop(0)
        for turn, peer in enumerate(sends.pop(rank, []), start=arrived[rank]):
            found.append((turn, rank, peer))
            if peer not in arrived:
                arrived[peer] = turn + 1
                waiting.append(peer)
    return found + [(-1, rank, peer) for rank, peers in sends.items() for peer in peers]


# ---------------------------------------------------------------- of a run that may fail


def observe(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 3) -> tuple[list[list[Call]], str]:
    """Run fn(*args) on `world_size` ranks over gloo.

    Returns:
        The calls of each rank, in order, and why the run failed: the launcher's report, "" if it did not.
    """
    with tempfile.TemporaryDirectory() as folder:
        failure = ""
        try:
            launch(_observed, world_size, folder, fn, *args, backend="gloo", timeout=timeout)
        except LaunchError as error:
            failure = str(error)
        return [_read(Path(folder) / str(rank)) for rank in range(world_size)], failure


def _observed(folder: str, fn: Callable[..., Any], *args: Any) -> None:
    """Each call is written down when it starts: a rank that hangs is ended from outside."""
    with open(Path(folder) / str(dist.get_rank()), "w", encoding="utf-8") as file:

        def note(call: Call) -> None:
            print(json.dumps(astuple(call)), file=file, flush=True)

        with recorded(each=note):
            fn(*args)


def _read(path: Path) -> list[Call]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Call(name, tuple(group), size, peer) for name, group, size, peer in map(json.loads, lines)]
