"""Say which data sets are here, and fetch the full ones.

Without options: for each data set, whether its bundled sample and its full set are here and undamaged, and where the
full set would come from. The exit status is 0 if all that was asked for is here and nothing is damaged, else 1 (2 for
wrong usage).
"""

import argparse
import sys
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.data.arrays import SPLITS, DamagedFile, DataError, Split
from shared.data.decoding import read_split
from shared.data.facts import ALL
from shared.data.fetching import data_root, fetch, sources
from shared.data.samples import read_sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m course data`."""
    parser.add_argument("--fetch", choices=[*ALL, "all"], help="fetch full sets that are missing or damaged")
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
        offers = {key: sources(facts, root, mirror=args.mirror, programs=True) for key, facts in ALL.items()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    status = 0
    wanted = [facts for facts in ALL.values() if args.fetch in (facts.key, "all")]
    for facts in wanted:
        print(f"{facts.name}: looking in {root}, fetching what is missing", flush=True)
        try:
            source = fetch(facts, root, mirror=args.mirror, programs=True)
            print(f"{facts.name}: {f'fetched from {source} and verified' if source else 'already here, verified'}")
        except DataError as error:
            print(error, file=sys.stderr, flush=True)
            status = 1

    table = Table(title=f"Full sets: {escape(str(root))}", title_justify="left")
    for column in ("data set", "split", "bundled sample", "full set"):
        table.add_column(column)
    missing = []
    for facts in ALL.values():
        for split in SPLITS:
            sample, _, sample_damaged = _status(lambda facts=facts, split=split: read_sample(facts, split))
            full, here, full_damaged = _status(lambda facts=facts, split=split: read_split(facts, root, split))
            status = 1 if sample_damaged or full_damaged else status
            missing += [] if here or facts in missing else [facts]
            table.add_row(facts.name, split, sample, full)
    console.print(table)
    for facts in missing:
        console.print(f"{facts.name} would be fetched from, in this order:", highlight=False)
        for source in offers[facts.key]:
            console.print(f"  {source}", highlight=False, markup=False)
    if missing and not wanted:
        names = " or ".join(facts.key for facts in missing)
        console.print(f"To fetch: python -m course data --fetch all (or {names})", highlight=False)
    return status


def _status(read: Callable[[], Split]) -> tuple[str, bool, bool]:
    """What a cell of the table says, whether the split is here and whole, and whether it is damaged."""
    try:
        return f"{len(read().images):,} images, verified", True, False
    except FileNotFoundError:
        return "not here", False, False
    except DamagedFile as error:
        return f"[red]{escape(error.path.name)}: {escape(error.reason)}[/red]", False, True
