"""What became of each key, when the keys of a checkpoint are rewritten for another net."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn.parameter import is_lazy


@dataclass
class Entry:
    """A tensor on its way from the checkpoint to the new net."""

    tensor: Tensor
    made_from: list[str]  # keys of the checkpoint
    changed: bool = False  # whether a rule has touched it


@dataclass
class Report:
    """What became of each key."""

    kept: list[str] = field(default_factory=list)  # taken over as it was
    # Renamed or computed: the new key, and the keys that it was made from.
    changed: dict[str, list[str]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)  # by a rule without a target
    left: list[str] = field(default_factory=list)  # left over: the new net has no such key
    missing: list[str] = field(default_factory=list)  # a key of the new net that got no tensor
    mismatched: list[str] = field(default_factory=list)  # with a different shape from the new net's

    @property
    def complete(self) -> bool:
        """Whether no key is left over, missing or mismatched."""
        return not (self.left or self.missing or self.mismatched)

    def __str__(self) -> str:
        return ", ".join(f"{len(keys)} {name}" for name, keys in vars(self).items())


def report_on(state: Mapping[str, Tensor], entries: Mapping[str, Entry], net_state: Mapping[str, Tensor]) -> Report:
    """Compare what the rules have made of `state` with the new net's state dict, `net_state`."""
    report = Report()
    used = set()  # keys of the checkpoint that are still in one of the entries
    for key, entry in entries.items():
        used.update(entry.made_from)
        if key not in net_state:
            report.left.append(key)
            continue
        if entry.changed:
            report.changed[key] = entry.made_from
        else:
            report.kept.append(key)
        if not _same_shape(entry.tensor, net_state[key]):
            report.mismatched.append(key)
    report.dropped = [key for key in state if key not in used]
    report.missing = [key for key in net_state if key not in entries]
    return report


def _same_shape(tensor: object, wanted: object) -> bool:
    """Whether two entries have the same shape; True if one of them has none, as a lazy parameter or an extra state."""
    for entry in (tensor, wanted):
        if not isinstance(entry, Tensor) or is_lazy(entry):
            return True
    return tensor.shape == wanted.shape
