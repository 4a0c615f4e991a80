"""The first lines of every notebook: one that was copied elsewhere gets what it lacks, or says what that is."""

CURE = "run `make lab` in the course's folder"  # where the repository is; the students' bundle has another

GUARD = f"""\
import subprocess
import sys
from glob import glob
from importlib.util import find_spec

if find_spec("torch") and not find_spec("shared"):
    for wheel in sorted(glob("advanced_pytorch_*.whl") + glob("../advanced_pytorch_*.whl"))[-1:]:
        print(f"Installing {{wheel}}, which came with this notebook")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wheel], timeout=900)
if not (find_spec("torch") and find_spec("shared")):
    raise ImportError(
        f"The kernel's Python, {{sys.executable}}, lacks torch or `shared`. Choose another kernel "
        "(VS Code: Select Kernel), or {CURE} and restart the kernel."
    )\
"""


def with_cure(source: str, cure: str) -> str:
    """A cell's source; if it begins with the guard, that now names another way to get what is missing."""
    return GUARD.replace(CURE, cure) + source.removeprefix(GUARD) if source.startswith(GUARD) else source
