"""The GitHub workflow, as far as it can be looked at without GitHub: pinned actions, commands and files."""

import re

import yaml

from course.__main__ import COMMANDS
from course.environment import ROOT

TEXT = (ROOT / ".github" / "workflows" / "course.yml").read_text(encoding="utf-8")
JOBS = yaml.safe_load(TEXT)["jobs"]


def test_actions_are_pinned_to_a_commit_whose_release_is_named():
    used = re.findall(r"uses: (\S+)(.*)", TEXT)
    assert used
    for action, remark in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", remark), action
    assert len({action.partition("@")[0] for action, _ in used}) == len({action for action, _ in used}), (
        "one version each"
    )


def test_its_commands_and_files_are_there():
    commands = re.findall(r"python -m course (\w+)", TEXT)
    assert {"setup", "lint", "run", "test", "site", "release"} <= set(commands) <= set(COMMANDS)
    for name in re.findall(r"tests/\w+\.py|requirements-\w+\.txt|\.ci/\w+", TEXT):
        assert (ROOT / name).is_file(), name


def test_jobs_have_limits_and_wait_for_jobs_that_there_are():
    for name, job in JOBS.items():
        assert job["timeout-minutes"] <= 90, name
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(JOBS)


def test_what_was_made_is_kept_when_something_failed():
    for name in ("course", "look"):
        kept = [step for step in JOBS[name]["steps"] if "/upload-artifact@" in step.get("uses", "")]
        assert kept
        assert all(step["if"] == "${{ !cancelled() }}" for step in kept)
