"""What every topic's checks are held to; a topic's test file fills in the answers.

class TestChecks(CheckProtocol):
    CHECKS, ANSWERS, STUBS, RIGHT, WRONG = ...
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from shared.checks.feedback import CheckFailed, Exercise


class CheckProtocol:
    """Run for each exercise of a topic.

    Attributes:
        CHECKS: name of the answer in the notebook → its check.
        ANSWERS, STUBS: what the full and the student edition define under these names.
        RIGHT: name → a right answer that is written otherwise.
        WRONG: (name, wrong answer, regular expression that the check's message must contain).
    """

    CHECKS: ClassVar[Mapping[str, Exercise]]
    ANSWERS: ClassVar[Mapping[str, Any]]
    STUBS: ClassVar[Mapping[str, Any]]
    RIGHT: ClassVar[Mapping[str, Any]]
    WRONG: ClassVar[Sequence[tuple[str, Any, str]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "message" in metafunc.fixturenames:
            ids = [f"{name}-{number}" for number, (name, _, _) in enumerate(self.WRONG)]
            metafunc.parametrize(("name", "answer", "message"), self.WRONG, ids=ids)
        elif "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.CHECKS))

    def test_each_check_has_three_wrong_answers_or_more(self, name):
        assert sum(wrong[0] == name for wrong in self.WRONG) >= 3

    def test_the_notebooks_own_answer_passes(self, name):
        result = self.CHECKS[name].run(self.ANSWERS[name])
        assert result.status == "passed", str(result)

    def test_a_right_answer_written_otherwise_passes(self, name):
        result = self.CHECKS[name].run(self.RIGHT[name])
        assert result.status == "passed", str(result)

    def test_a_wrong_answer_is_rejected_for_the_right_reason(self, name, answer, message):
        with pytest.raises(CheckFailed, match=message) as failure:
            self.CHECKS[name](answer)
        assert "hint:" in str(failure.value)

    def test_a_stub_is_not_attempted_and_the_stand_in_is_right(self, name, capsys):
        stand_in = self.CHECKS[name](self.STUBS[name])
        assert capsys.readouterr().out.count("not attempted yet") == 1
        self.hold_stand_in(name, stand_in)

    def hold_stand_in(self, name: str, stand_in: Any) -> None:
        """Assert what the cells below need of a stand-in; a topic without stand-ins needs nothing."""
