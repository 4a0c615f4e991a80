"""Say which data sets are here, and fetch the full ones.

Without options: for each data set, whether its bundled sample and its full set are here and undamaged, and where the
full set would come from. The exit status is 0 if all that was asked for is here and nothing is damaged, else 1 (2 for
wrong usage).
"""

import argparse
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.data.arrays import SPLITS, DamagedFile, DataError
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
    console = Console(soft_wrap=True, highlight=False)
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

    table = Table(
        "data set", "split", "bundled sample", "full set", title=f"Full sets: {escape(str(root))}", title_justify="left"
    )
    missing = {}
    for facts in ALL.values():
        for split in SPLITS:
            cells = [facts.name, split]
            for read, *folder in ((read_sample,), (read_split, root)):
                try:
                    cells.append(f"{len(read(facts, *folder, split).images):,} images, verified")
                except FileNotFoundError:
                    cells.append("not here")
                    missing[facts.key] = facts.name
                except DamagedFile as error:
                    cells.append(f"[red]{escape(f'{error.path.name}: {error.reason}')}[/red]")
                    status = 1
            table.add_row(*cells)
    console.print(table)
    for key, name in missing.items():
        console.print(f"{name} would be fetched from, in this order:")
        for source in offers[key]:
            console.print(f"  {source}", markup=False)
    if missing and not wanted:
        console.print(f"To fetch: python -m course data --fetch all (or {' or '.join(missing)})")
    return status
