"""What the ranks of a process group know, brought together."""

from typing import Any

import torch.distributed as dist


def from_all(mine: Any, ranks: int, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank has, by rank; a list of one where there is one rank and perhaps no process group."""
    everyone = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(everyone, mine, group=group)
    return everyone
