"""Four processes that load the same missing data set at once; started by test_data_fetching.py.

    python data_race.py FOLDER URL

Each says in FOLDER that it is ready, waits until all are, loads, and writes what it got.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

COUNT = 4


def main(folder: Path, url: str) -> bool:
    """Race; returns whether all processes ended well. On Linux PyTorch is imported once, in a fork server."""
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["shared.data"])
    racers = [context.Process(target=race, args=(folder, url, number), daemon=True) for number in range(COUNT)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(100)
    return [racer.exitcode for racer in racers] == [0] * COUNT


def race(folder: Path, url: str, number: int) -> None:
    """Load the tiny set from `url` and leave the result in `folder`/result-`number`.json."""
    os.environ["COURSE_DATA"] = "full"
    from tiny_data import tiny_fashion

    from shared.data import load
    from shared.data.arrays import digest

    spec, _ = tiny_fashion(folder / f"own-{number}", addresses=(url,))
    (folder / f"ready-{number}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < COUNT and time.monotonic() < deadline:
        time.sleep(0.01)
    data = load(spec, "train", root=folder / "root")
    result = {"source": data.source, "images": digest(data.images[:, 0].numpy())}
    (folder / f"result-{number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(not main(Path(sys.argv[1]), sys.argv[2]))
