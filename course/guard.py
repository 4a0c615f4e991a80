"""The first code cell of every notebook: one that was copied elsewhere gets what it lacks, or says what that is."""

CURE = "run `make lab` in the course's folder"  # where the repository is; the students' bundle has another

_BESIDE = """\
    for wheel in sorted(glob("advanced_pytorch_*.whl") + glob("../advanced_pytorch_*.whl"))[-1:]:
        print(f"Installing {wheel}, which came with this notebook")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", wheel], timeout=900)
"""
GUARD = f"""\
# Does nothing where the course is installed. Elsewhere it installs it, or says what is missing.
import subprocess
import sys
from glob import glob
from importlib.util import find_spec

if find_spec("torch") and not find_spec("shared"):
{_BESIDE}if not (find_spec("torch") and find_spec("shared")):
    raise ImportError(
        f"The kernel's Python, {{sys.executable}}, lacks torch or `shared`. Choose another kernel "
        "(VS Code: Select Kernel, `.venv` of the course's folder), or "
        "{CURE} and restart the kernel."
    )\
"""

# what notebooks have that are handed out: another cure, and, where the course has an address, what is fetched when no
# wheel lies beside them
_FETCHED = """\
    beside = sorted(glob("advanced_pytorch_*.whl") + glob("../advanced_pytorch_*.whl"))
    course = beside[-1] if beside else "git+{address}"
    print(f"Installing {{course}}: the helpers, checks and data samples of this notebook")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", course], timeout=900)
"""
STUDENTS_CURE = "run `%pip install -r requirements.txt` in the course's folder (get it {source})"


def for_students(source: str, address: str = "") -> str:
    """A cell's source with another guard: one that names the students' way to get the course, and fetches it.

    It takes the course from `address` if no wheel lies beside the notebook.
    """
    found_at = f"from {address}" if address else "where you got this notebook"
    lines = GUARD.replace(CURE, STUDENTS_CURE.format(source=found_at))
    if address:
        lines = lines.replace(_BESIDE, _FETCHED.format(address=address))
    return source.replace(GUARD, lines)
