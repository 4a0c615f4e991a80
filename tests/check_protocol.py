"""What every topic's checks are held to; a topic's test file fills in right and wrong answers.

    class TestChecks(CheckProtocol, topic="15-01"):
        CHECKS = {"Swish": check.swish, ...}
        ...

The names are those that the notebook's answer cells define.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from course import exercise_form, mutate
from course.lesson_code import answers, definitions, fresh_namespace, run_source
from course.skeleton import skeleton
from shared.checks.exercise import Exercise, exercises_of
from shared.checks.report import Item, Result

MODULE = Path(__file__).parent.parent / "module_15_advanced_pytorch_internals"
_OUTCOMES: dict[tuple[str, str, str | None], Result] = {}  # (topic, name, wrong answer) → what its check says


class CheckProtocol:
    """Run for each exercise of a topic; `given` are names that answers use and the lesson defines, the setup cell's at
    least.

    Attributes:
        CHECKS: name of the answer → its check.
        RIGHT: name → right answers that are written otherwise, two or more.
        WRONG: name → {what is wrong with it: (regular expression for what is said of an item that fails, the answer)}.
            Instead of an answer there may be texts, here and in a tuple of RIGHT's: (…, old, new, old, new), each of
            which is replaced in the notebook's own answer (`edited`).
        ANSWERS, STUBS: what the full and the student edition define under these names.
        IDLE: what the student edition defines if every stub returns None, and if it returns its first argument.
    """

    CHECKS: ClassVar[Mapping[str, Exercise]]
    RIGHT: ClassVar[Mapping[str, Sequence[Any]]]
    WRONG: ClassVar[Mapping[str, Mapping[str, tuple]]]

    def __init_subclass__(cls, topic: str, given: Mapping[str, Any] | None = None) -> None:
        cls.TOPIC, given = topic, given or definitions(topic)
        cls.ANSWERS = answers(topic, given=given)
        cls.STUBS = answers(topic, edit=exercise_form.student_source, given=given)
        cls.IDLE = _idle(topic, given)

        def made(name: str, *answer: Any) -> Any:
            return edited(topic, name, given, *answer) if isinstance(answer[0], str) else answer[0]

        cls.RIGHT = {
            name: [made(name, *one) if _are_texts(one) else one for one in right] for name, right in cls.RIGHT.items()
        }
        cls.WRONG = {
            name: {label: (says, made(name, *answer)) for label, (says, *answer) in table.items()}
            for name, table in cls.WRONG.items()
        }

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "wrong" in metafunc.fixturenames:
            pairs = [(name, wrong) for name, answers in self.WRONG.items() for wrong in answers]
            metafunc.parametrize(("name", "wrong"), pairs, ids=[f"{name}-{wrong}" for name, wrong in pairs])
        elif "number" in metafunc.fixturenames:
            pairs = [(name, number) for name, answers in self.RIGHT.items() for number in range(len(answers))]
            metafunc.parametrize(("name", "number"), pairs)
        elif "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.CHECKS))

    def test_every_exercise_is_tested_and_they_give_100_points(self):
        assert {check.number for check in self.CHECKS.values()} == {e.number for e in exercises_of(self.TOPIC)}
        assert sum(check.points for check in self.CHECKS.values()) == 100
        for name in self.CHECKS:
            assert len(self.WRONG[name]) >= 3
            assert len(self.RIGHT[name]) >= 2

    def test_heading_and_check_cell_are_those_of_the_check(self, name):
        check, slug = self.CHECKS[name], answer_cell(self.TOPIC, name)
        heading = exercise_form.HEADING.search(sources(self.TOPIC)[f"{slug}-task"])
        told = (f"{heading[1]}.{heading[2]}", heading[3], int(heading[4]))
        assert told == (check.number, check.title, check.points)
        assert f"check.{check.body.__name__}(" in sources(self.TOPIC)[f"{slug}-check"]

    def outcome(self, name: str, wrong: str | None = None) -> Result:
        """What the check says of a wrong answer, or of the notebook's own; found once for all tests."""
        key = (self.TOPIC, name, wrong)
        if key not in _OUTCOMES:
            _OUTCOMES[key] = self.CHECKS[name].run(self.ANSWERS[name] if wrong is None else self.WRONG[name][wrong][1])
        return _OUTCOMES[key]

    def test_the_notebooks_own_answer_passes(self, name):
        result = self.outcome(name)
        assert result.status == "passed", str(result)

    def test_a_right_answer_written_otherwise_passes(self, name, number):
        result = self.CHECKS[name].run(self.RIGHT[name][number])
        assert result.status == "passed", str(result)

    def test_a_wrong_answer_is_rejected_for_the_right_reason(self, name, wrong):
        """The hint beside it repeats no expression of the solution; the folded one that it names may."""
        message, cell = self.WRONG[name][wrong][0], answer_cell(self.TOPIC, name)
        failures = self.rejections(name, wrong)
        # not what has passed: its name is no reason
        shown = "\n".join(line for failure in failures for line in failure.lines())
        assert re.search(message, shown), f"{message!r} is not in:\n{shown}"
        assert "hint:" in shown
        for failure in failures:
            hint = re.sub(r"\s", "", failure.hint)
            told = [expression for expression in _expressions(self.TOPIC, cell) if expression in hint]
            assert not told, f"the hint tells {told}"
            see = rf"<summary>Hint {failure.see}\b"
            assert failure.see is None or re.search(see, sources(self.TOPIC)[f"{cell}-task"]), f"no Hint {failure.see}"

    def test_each_demand_is_counted_and_needed(self, name):
        """Of each demand there must be a wrong answer that no other one catches."""
        demands = [item.name for item in self.outcome(name).items if not item.guard]
        assert len(demands) == self.CHECKS[name].demands
        caught_by = {wrong: [item.name for item in self.rejections(name, wrong)] for wrong in self.WRONG[name]}
        needed = {items[0] for items in caught_by.values() if len(items) == 1}
        unneeded = set(demands) - needed
        assert not unneeded, f"no wrong answer needs {sorted(unneeded)}; caught by: {caught_by}"

    def test_a_stub_is_not_attempted_and_the_stand_in_is_right(self, name, capsys):
        check = self.CHECKS[name]
        stand_in = check(self.STUBS[name])
        assert capsys.readouterr().out.count("not attempted yet") == 1
        if stand_in is not None:  # a check cell that is run twice hands it back
            check(stand_in)
            assert capsys.readouterr().out.count("not attempted yet") == 1
        self.hold_stand_in(name, stand_in)

    def test_an_answer_that_does_nothing_earns_nothing(self, name):
        for answers_ in self.IDLE:
            result = self.CHECKS[name].run(answers_[name])
            assert result.earned == 0, str(result)

    @pytest.mark.slow
    def test_what_is_kept_of_its_mutants_is_explained_and_of_the_present_answers_and_checks(self):
        kept, present = mutate.load(self.TOPIC), skeleton(self.TOPIC).tasks
        assert list(kept) == [task.cell for task in present], f"run python -m course mutate {self.TOPIC}"
        for cell, record in kept.items():
            assert not record.unexplained, f"{cell}: {record.unexplained}"
        for task in present:
            earlier = kept[task.cell]
            if earlier.digest != mutate.digest(self.TOPIC, task):
                record = mutate.run(self.TOPIC, task)
                mutate.keep_reasons(record, earlier)
                assert not record.unexplained, f"{task.cell}: the check accepts {record.unexplained}"
                counts, before = (record.mutants, len(record.survivors)), (earlier.mutants, len(earlier.survivors))
                assert counts == before, f"{task.cell}: run python -m course mutate {self.TOPIC}, commit what it keeps"

    def hold_stand_in(self, name: str, stand_in: Any) -> None:
        """Assert what the cells below need of a stand-in; a topic without stand-ins needs nothing."""

    def rejections(self, name: str, wrong: str) -> list[Item]:
        """The items that catch a wrong answer."""
        result = self.outcome(name, wrong)
        assert result.status == "failed", f"accepted, or the check broke:\n{result}"
        return result.failures


def _idle(topic: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The topic's answers if all that a student has to write does nothing: returns None, or its first argument."""

    def returning(source: str, first: bool) -> str:
        tree = ast.parse(exercise_form.student_source(source))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                names = [argument.arg for argument in function.args.args if argument.arg not in ("self", "ctx", "cls")]
                value = names[0] if first and names and function.name != "__init__" else "None"
                for place, statement in enumerate(function.body):
                    if isinstance(statement, ast.Raise) and ast.unparse(statement) == "raise NotImplementedError":
                        function.body[place] = ast.parse(f"return {value}").body[0]
        return ast.unparse(tree)

    return [answers(topic, edit=lambda source, f=first: returning(source, f), given=given) for first in (False, True)]


def _are_texts(answer: Any) -> bool:
    return isinstance(answer, tuple) and isinstance(answer[0], str)


def edited(topic: str, name: str, given: Mapping[str, Any], *texts: str) -> Any:
    """The notebook's answer `name` with each `old` of the texts (old, new, ...) replaced.

    Lines after the first stand in both texts as if the line in which `old` begins were not indented.
    """
    cell = answer_cell(topic, name)
    source = sources(topic)[cell]
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        before = source.partition(old.partition("\n")[0])[0].rpartition("\n")[2]
        margin = "\n" + before[: len(before) - len(before.lstrip())]
        found = old.replace("\n", margin)
        assert found in source, f"{cell} has no {old!r}"
        source = source.replace(found, new.replace("\n", margin))
    namespace = fresh_namespace(given)
    run_source(source, cell, namespace)
    return namespace[name]


# ---------------------------------------------------------------- the notebook's texts


def _path(topic: str) -> Path:
    (path,) = MODULE.glob(f"{topic}_*.ipynb")
    return path


@cache
def sources(topic: str) -> dict[str, str]:
    """The cells of a topic's notebook: id → source."""
    cells = json.loads(_path(topic).read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


@cache
def answer_cell(topic: str, name: str) -> str:
    """Id of the answer cell that defines `name`."""
    found = [
        id_
        for id_, source in sources(topic).items()
        if exercise_form.BEGIN in source and re.search(rf"^(?:class|def) {name}\b|^{name} = ", source, re.MULTILINE)
    ]
    assert len(found) == 1, f"{name} is defined in {found}"
    return found[0]


@cache
def _expressions(topic: str, cell: str) -> set[str]:
    """The expressions in a cell's solution that say something: calls and arithmetic of some length."""
    source = sources(topic)[cell]
    solution = {n for begin, end in exercise_form.solution_blocks(source) for n in range(begin + 1, end + 1)}
    found = {
        re.sub(r"\s", "", ast.unparse(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.BinOp | ast.Call | ast.Compare) and node.lineno in solution
    }
    return {text for text in found if len(text) >= 10 and not text.endswith("()")}
