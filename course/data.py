"""Say which data sets are here, and fetch the full ones.

Without options: for each data set, whether its bundled sample and its full set are here and undamaged, and where the
full set would come from. The exit status is 0 if all that was asked for is here and nothing is damaged, else 1 (2 for
wrong usage).
"""

import argparse
import sys

from shared.data.arrays import SPLITS, DataError
from shared.data.decoding import read_sample, read_split
from shared.data.facts import ALL
from shared.data.fetching import data_root, fetch, sources


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fetch", choices=[*ALL, "all"], help="fetch full sets that are missing or damaged")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    root, status, missing = data_root(), 0, {}
    try:
        offers = {facts.name: sources(facts, programs=True) for facts in ALL.values()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for facts in ALL.values():
        if args.fetch in (facts.key, "all"):
            try:
                source = fetch(facts, programs=True)
                print(f"{facts.name}: {f'fetched from {source} and verified' if source else 'already here, verified'}")
            except DataError as error:
                print(error, file=sys.stderr, flush=True)
                status = 1
    print(f"Full sets: {root}")
    for facts in ALL.values():
        for split in SPLITS:
            for kind, read, *folder in (("sample", read_sample), ("full", read_split, root)):
                try:
                    state = f"{len(read(facts, *folder, split).labels):,} images, verified"
                except FileNotFoundError:
                    state = "not here"
                    missing[facts.name] = offers[facts.name]
                except DataError as error:
                    state = str(error)
                    status = 1
                print(f"  {facts.name:13} {split:6} {kind:7} {state}")
    for name, addresses in missing.items():
        print(f"{name} would be fetched (--fetch all) from, in this order:", *addresses, sep="\n  ")
    return status
