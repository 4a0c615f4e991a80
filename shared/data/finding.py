"""Which images are used: the sample, or the full set from the disk or the network; and saying so in one line."""

import os
import sys
from typing import Any

from shared.data.arrays import SPLITS, DamagedFile, DataError, Split
from shared.data.decoding import read_sample, read_split
from shared.data.facts import IN_WHEEL, Facts
from shared.data.fetching import data_root, fetch, recent_failure, remember_failure
from shared.text import wrapped

QUICK = 180  # seconds that a notebook's data cell waits at most
_told: set[tuple[str, object]] = set()


def parse_mode(given: str) -> str:
    """The mode that COURSE_DATA names; "auto" for an empty one. Raises ValueError if it is none of the three."""
    mode = given.strip().lower() or "auto"
    if mode not in ("sample", "full", "auto"):
        raise ValueError(f"COURSE_DATA={given!r} is not known: use sample, full or auto")
    return mode


def _shell() -> Any:
    """The running IPython shell, or None. IPython is not imported for it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def find(facts: Facts, split: str, images: int | None) -> tuple[Split, str]:
    """The arrays of a split and their source, "full" or "sample". See `shared.data.images.load`."""
    mode = parse_mode(os.environ.get("COURSE_DATA", ""))
    if images is not None and images <= facts.sample[split].count:
        _say(f"{facts.name}: {images:,} {split} images of the bundled sample, all that is used here")
        return read_sample(facts, split), "sample"
    why = "COURSE_DATA=sample"
    if mode != "sample":
        try:
            return read_split(facts, data_root(), split), "full"
        except FileNotFoundError:
            why = "the full set is not on disk"
        except DamagedFile as error:
            why = str(error)
    if mode == "full":
        _say(f"{facts.name}: {why}")
        return _fetched(facts, split), "full"
    if mode == "auto" and _shell() is not None and not os.environ.get("CI"):  # a person waits for it
        try:
            if failure := recent_failure(facts):
                raise DataError(failure)
            remark = "It may take 3 minutes; to decline, interrupt the kernel or set COURSE_DATA=sample."
            return _fetched(facts, split, remark, seconds=QUICK), "full"
        except KeyboardInterrupt:  # a person who doesn't want to wait, now or in the next cell
            remember_failure(facts, "interrupted")
            why = "fetching the full set was interrupted"
        except DataError as error:
            why = f"fetching the full set failed: {recent_failure(facts) or error}"
    # one line a data set and cell, so that train and test loaded together don't say it twice
    key = (facts.key, getattr(_shell(), "execution_count", None))
    if key not in _told:
        _told.add(key)
        train, test = (facts.sample[split].count for split in SPLITS)
        why = " ".join(why.split())
        more = "COURSE_DATA=full" if IN_WHEEL else "`make data`"
        _say(f"{facts.name}: sample, {train:,} train and {test:,} test images ({why}); all: {more}")
    return read_sample(facts, split), "sample"


def _fetched(facts: Facts, split: str, remark: str = "", **options: float) -> Split:
    if source := fetch(facts, say=lambda offer: _say(f"{offer} {remark}"), **options):
        _say(f"{facts.name}: full set fetched into {data_root()} and verified (from {source})")
    return read_split(facts, data_root(), split)


def _say(line: str) -> None:
    print(wrapped(line, indent="  "), flush=True)
