"""One of several processes that load the same missing data set at once; started by test_data_downloads.py.

    python data_race.py FOLDER URL NUMBER

Says in FOLDER that it is ready, waits until four are, loads, and writes what it got.
"""

import json
import os
import sys
import time
from pathlib import Path


def main(folder: Path, url: str, number: str) -> None:
    """Load the tiny set from `url` and leave the result in `folder`/result-`number`.json."""
    os.environ["COURSE_DATA"] = "full"
    from tiny_data import tiny_fashion

    from shared.data import load
    from shared.data_formats import digest
    from shared.data_specs import IDX_GZ
    from shared.downloads import HttpMirror

    spec, _ = tiny_fashion(folder / f"own-{number}", mirrors=(HttpMirror(url, IDX_GZ, 1_000_000),))
    (folder / f"ready-{number}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    data = load(spec, "train", root=folder / "root")
    result = {"source": data.source, "images": digest(data.images[:, 0].numpy())}
    (folder / f"result-{number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
