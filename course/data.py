"""Say which data sets are here, and fetch the full ones.

Without options: for each data set, whether its bundled sample and its full set are here and undamaged, and where the
full set would come from. The exit status is 0 if all that was asked for is here and nothing is damaged, else 1 (2 for
wrong usage).
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.data_formats import read_sample, read_split
from shared.data_specs import SPECS
from shared.data_store import data_root, fetch, mirrors_for
from shared.data_types import SPLITS, DamagedFile, DataError, DataSpec, Split
from shared.downloads import terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m course data`."""
    parser.add_argument("--fetch", choices=[*SPECS, "all"], help="fetch full sets that are missing or damaged")
    parser.add_argument(
        "--mirror", metavar="URL|FOLDER", help="try this first (default: COURSE_DATA_MIRROR); see datasets/README.md"
    )
    parser.add_argument(
        "--root", metavar="FOLDER", help="where the full sets are (default: COURSE_DATA_DIR, else datasets/full)"
    )


def main(args: argparse.Namespace) -> int:
    """Fetch what was asked for, then show what is here. Returns the exit status."""
    console = Console(soft_wrap=True)
    root = data_root(args.root)
    try:
        mirrors = {spec.key: mirrors_for(spec, root, args.mirror) for spec in SPECS.values()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    wanted = [spec for spec in SPECS.values() if args.fetch in (spec.key, "all")]
    fetched = [_fetch(spec, root, args.mirror) for spec in wanted]

    table = Table(title=f"Full sets: {escape(str(root))}", title_justify="left")
    for column in ("data set", "split", "bundled sample", "full set"):
        table.add_column(column)
    status = 0 if all(fetched) else 1
    full_missing = []
    for spec in SPECS.values():
        for split in SPLITS:
            sample, sample_damaged = _status(lambda spec=spec, split=split: read_sample(spec, split))
            full, full_damaged = _status(lambda spec=spec, split=split: read_split(spec, root, split))
            if sample_damaged or full_damaged:
                status = 1
            if (full is None or full_damaged) and spec not in full_missing:
                full_missing.append(spec)
            table.add_row(spec.name, split, sample or "not here", full or "not here")
    console.print(table)
    for spec in full_missing:
        console.print(f"{spec.name} would be fetched from, in this order:", highlight=False)
        for mirror in mirrors[spec.key]:
            console.print(f"  {mirror}", highlight=False, markup=False)
    if full_missing and not wanted:
        names = " or ".join(spec.key for spec in full_missing)
        console.print(f"To fetch: python -m course data --fetch all (or {names})", highlight=False)
    return status


def _fetch(spec: DataSpec, root: Path, mirror: str | None) -> bool:
    def say(line: str) -> None:
        print(line, flush=True)

    say(f"{spec.name}: looking in {root}, fetching what is missing")
    try:
        result = fetch(spec, root, mirror=mirror, show_progress=terminal(), say=say)
    except DataError as error:
        print(error, file=sys.stderr, flush=True)
        return False
    say(f"{spec.name}: {f'fetched from {result.mirror} and verified' if result.mirror else 'already here, verified'}")
    for path in result.set_aside:
        say(f"{spec.name}: a damaged file was kept as {path}")
    return True


def _status(read: Callable[[], Split]) -> tuple[str | None, bool]:
    """What a cell of the table says, None if nothing is there; whether what is there is damaged."""
    try:
        return f"{len(read().images):,} images, verified", False
    except FileNotFoundError:
        return None, False
    except DamagedFile as error:
        return f"[red]{escape(error.path.name)}: {escape(error.reason)}[/red]", True
