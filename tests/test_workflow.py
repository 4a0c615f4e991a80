"""The GitHub workflow, as far as it can be looked at without GitHub."""

import re

from course.__main__ import COMMANDS
from course.environment import ROOT


def test_its_commands_and_files_are_there_and_each_action_is_pinned_to_a_commit():
    text = (ROOT / ".github" / "workflows" / "course.yml").read_text(encoding="utf-8")
    commands = re.findall(r"python -m course (\w+)", text)
    assert {"setup", "lint", "run", "test", "site", "release"} <= set(commands) <= set(COMMANDS)
    for name in re.findall(r"tests/\w+\.py|requirements-\w+\.txt|\.ci/\w+", text):
        assert (ROOT / name).is_file(), name
    for action in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
