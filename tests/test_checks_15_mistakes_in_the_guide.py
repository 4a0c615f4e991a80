"""What the instructors' guide quotes of the checks, they say. Like the checks' own tests, this belongs to `--all`."""

import importlib
import re

import pytest
from test_instructor_guide import MISTAKE, PAGES, TOPICS, words


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", TOPICS)
def test_the_checks_say_of_the_mistakes_what_the_guide_says(number):
    """Each mistake is a wrong answer of the checks' tests; the check is run on it."""
    tests = importlib.import_module(f"test_checks_{number.replace('-', '_')}").TestChecks
    for exercise, text, name, label in MISTAKE.findall(PAGES[number]):
        check = tests.CHECKS[name]
        assert check.number == exercise
        result = check.run(tests.WRONG[name][words(label)][1])
        assert result.status == "failed"
        quotes = re.findall(r"“([^”]+)”", text)
        assert quotes, f"{exercise}: the guide quotes nothing"
        for quote in quotes:
            assert words(quote) in words(str(result)), f"{exercise}: {quote!r} is not in:\n{result}"
