"""The students' wheel: `shared` with the samples and recordings.

It is written here and not by setuptools because it isn't the repository's own wheel: it has no `course`, its checks are
packed (shared/checks/__init__.py says how), it asks for the packages that `shared` imports but leaves torch as it is,
and the same files give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tomllib
import zipfile
import zlib
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path

from packaging.requirements import Requirement

from course.environment import requirements


def zipped(files: Mapping[str, bytes], moment: datetime) -> bytes:
    """A zip of `files` (path → content), sorted, each dated `moment`; scripts can be executed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in sorted(files):
            entry = zipfile.ZipInfo(path, moment.timetuple()[:6])
            entry.create_system = 3  # Unix, wherever it is made
            entry.external_attr = (0o100755 if files[path].startswith(b"#!") else 0o100644) << 16
            archive.writestr(entry, files[path], zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def student_wheel(root: Path, tracked: Collection[str], moment: datetime) -> tuple[str, bytes]:
    """The file name and the content of the wheel, from those of the files in `root` that are tracked.

    The version ends in the commit's moment, in UTC, so that pip replaces the wheel of an older release.
    """
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project, moved = pyproject["project"], pyproject["tool"]["setuptools"]["package-dir"]
    version = f"{project['version']}.post{moment:%Y%m%d%H%M}"
    stem = f"{project['name'].replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = {f"{info}/licenses/{path}": (root / path).read_bytes() for path in project["license-files"]}
    for package, folder in {"shared": "shared", **moved}.items():
        for path in [path for path in tracked if path.startswith(f"{folder}/")]:
            inside, content = package.replace(".", "/") + path.removeprefix(folder), (root / path).read_bytes()
            if inside.startswith("shared/checks/topic_"):
                inside, content = inside.replace(".py", ".packed"), zlib.compress(content, 9)
            files[inside] = content
    # without torch: the notebooks' first lines install the wheel where torch is there already, and a dependency on it
    # might replace the build that fits the machine's GPU by another
    needed = [line for line in requirements(root) if Requirement(line).name in project["dependencies"]]
    metadata = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {version}"]
    metadata += [f"Requires-Python: {project['requires-python']}", *(f"Requires-Dist: {line}" for line in needed), ""]
    files[f"{info}/METADATA"] = "\n".join(metadata).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: course\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = f"{info}/RECORD,,\n"
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = record.encode()
    return f"{stem}-py3-none-any.whl", zipped(files, moment)
