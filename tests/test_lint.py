"""Lint: a notebook in order passes, each damage is named by its rule and cell, and look-alikes are left alone."""

import argparse
import copy
import json
import shutil
from dataclasses import replace as changed

import pytest

from course import lint, module_readme
from course.environment import ROOT
from course.exercise_form import MarkerError, answer_metadata, check_metadata, student_source
from course.rules import lint_notebook, relaxed_for
from course.rules.notebook import named_topics
from course.rules.outputs import current_palette
from course.rules.table import RULES
from course.start_page import GUARD
from course.syllabus import load

SYLLABUS = load()
LOSSES = changed(SYLLABUS.topics["15-04"], status="finished")  # it has cross-references to name
CAPSTONE = changed(SYLLABUS.topics["15-10"], status="finished")
FOLD = {"jupyter": {"source_hidden": True}, "tags": ["hide-input"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def markdown(id_, source):
    return {"id": id_, "cell_type": "markdown", "metadata": {}, "source": source}


def code(id_, source, *outputs, tags=(), nbgrader=None, folded=False):
    metadata = ({"tags": list(tags)} if tags else {}) | ({"nbgrader": nbgrader} if nbgrader else {})
    metadata |= FOLD if folded else {}
    cell = {"id": id_, "cell_type": "code", "metadata": metadata, "source": source}
    return cell | {"outputs": list(outputs), "execution_count": None}


def said(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def figure(kind="image/png", alt="A falling line."):
    described = {kind: {"alt": alt, "palette": current_palette()}} if alt is not None else {}
    return {"output_type": "display_data", "metadata": described, "data": {kind: PIXEL, "text/plain": "<Figure>"}}


def exercise(number, slug, place):
    task = f"### Exercise {number}.{place} — Half of {slug} (25 points, 15 minutes)\n\nReturn half.\n\n"
    task += "<details><summary>Hint 1: which operation</summary>\n\nDivide.\n\n</details>"
    stub = f'def {slug}(x: float) -> float:\n    """Half of x."""\n'
    stub += "    ### BEGIN SOLUTION\n    return x / 2\n    ### END SOLUTION"
    return [
        markdown(f"ex-{slug}-task", task),
        code(f"ex-{slug}", stub, nbgrader=answer_metadata(f"ex-{slug}")),
        code(
            f"ex-{slug}-check", f"check.{slug}({slug})", said("passed"), nbgrader=check_metadata(f"ex-{slug}-check", 25)
        ),
    ]


def notebook(topic):
    """A notebook that is in order, with the least that the standard asks for."""
    rows = {
        "Topic": topic.title,
        "Category": topic.category,
        "Dataset": topic.dataset,
        "Time": topic.time,
        "Prerequisites": ", ".join(topic.prerequisites),
        "Teaches": topic.owns,
        "Related": f"Other modules own {', '.join(topic.must_reference) or 'the rest'}",
    }
    glance = "\n".join(["| At a glance | |", "|---|---|", *(f"| **{key}** | {value} |" for key, value in rows.items())])
    setup = "import matplotlib.pyplot as plt\n\nfrom shared import get_device, load_cifar10\n"
    setup += f"from shared.checks import topic_{topic.number.replace('-', '_')} as check"
    solved = [cell for place in range(1, 5) for cell in exercise(topic.number, "abcd"[place - 1] * 3, place)]
    teaching = [
        markdown("idea", "An idea in some words."),
        *(code(f"figure-{place}", f"draw({place})", figure()) for place in range(6)),
        *(code(f"step-{place}", f"print({place})", said(f"{place}\n")) for place in range(10)),
        code("verified", 'print("max error 0.0")', said("max error 0.0\n"), tags=["nbval-check-output"]),
        *solved,
    ]
    if topic is CAPSTONE:
        sections = [
            markdown("brief", "## The brief\n\n1. It trains."),
            markdown("architecture", "## Architecture"),
            markdown("milestones", "## Milestones"),
            *teaching,
            markdown("integration-test", "## Integration test"),
            markdown("evaluation", "## Evaluation"),
        ]
    else:
        sections = [markdown("losses", "## 1. Losses"), *teaching, markdown("averages", "## 2. Averages")]
    question = "{}. What does this print?\n\n<details><summary>Answer</summary>\n\nOne.\n\n</details>\n\n"
    cells = [
        markdown("title", f"# {topic.number}: {topic.title}\n\nWhich loss is wrong, and how would you know?"),
        markdown("glance", glance),
        markdown("objectives", "## Learning objectives\n\n- derive\n- measure\n- verify\n- explain"),
        markdown("setup-heading", "## Setup"),
        code("course", GUARD, folded=True),
        code("setup", setup),
        code("device", "device = get_device()", said("cpu")),
        code("data", "train = load_cifar10()\nlen(train)", said("6000")),
        *sections,
        markdown("self-assessment", "## Self-assessment\n\n" + "".join(question.format(n) for n in range(1, 6))),
        markdown("takeaways", "## Key takeaways\n\n- one"),
        markdown("next", "## Where this goes next\n\nOn."),
        markdown("references", "## References\n\n- one"),
    ]
    for count, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), start=1):
        cell["execution_count"] = count
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def check_file(topic):
    """The checks of `notebook(topic)`."""
    text = "from shared.checks.exercise import exercise\nfrom shared.checks.trial import Trial\n"
    for place, slug in enumerate(("aaa", "bbb", "ccc", "ddd"), start=1):
        text += f'\n\n@exercise("{topic.number}.{place}", "Half of {slug}", points=25, demands=1)\n'
        text += f"def {slug}(trial: Trial, answer) -> None:\n    pass\n"
    return text


def test_file(topic):
    """The tests of these checks."""
    entries = "\n".join(f'    "{slug}": check.{slug},' for slug in ("aaa", "bbb", "ccc", "ddd"))
    tables = f"CHECKS = {{\n{entries}\n}}\n"
    for name in ("RIGHT", "WRONG"):
        tables += f"{name} = {{\n" + "\n".join(f'    "{slug}": [],' for slug in ("aaa", "bbb", "ccc", "ddd")) + "\n}\n"
    return f"from shared.checks import topic_{topic.number.replace('-', '_')} as check\n\n{tables}"


test_file.__test__ = False


def place(tmp_path, topic):
    """Put the topic into a repository of its own with its checks and tests; returns it and their files."""
    name = topic.number.replace("-", "_")
    folder, checks, tests = tmp_path / SYLLABUS.module.folder, tmp_path / "shared" / "checks", tmp_path / "tests"
    for path in (folder, checks, tests):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "figure.png").write_bytes(b"")
    files = {"checks": checks / f"topic_{name}.py", "tests": tests / f"test_checks_{name}.py"}
    files["checks"].write_text(check_file(topic), encoding="utf-8")
    files["tests"].write_text(test_file(topic), encoding="utf-8")
    return changed(topic, path=folder / topic.file), files


def lint_it(tmp_path, document, topic=LOSSES, name=None):
    topic, _ = place(tmp_path, topic)
    path = topic.path.with_name(name or topic.file)
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return lint_notebook(path, topic, SYLLABUS.module)


def cell_of(document, id_):
    return next(cell for cell in document["cells"] if cell["id"] == id_)


def replace(id_, old, new):
    """A mutation: other text in a cell's source."""

    def mutate(document):
        cell = cell_of(document, id_)
        assert old in cell["source"], old
        cell["source"] = cell["source"].replace(old, new)

    return mutate


def append(id_, text):
    def mutate(document):
        cell_of(document, id_)["source"] += text

    return mutate


def source(id_, text):
    def mutate(document):
        cell_of(document, id_)["source"] = text

    return mutate


def change(id_, **values):
    def mutate(document):
        cell_of(document, id_).update(values)

    return mutate


def meta(id_, **values):
    def mutate(document):
        cell_of(document, id_)["metadata"].update(values)

    return mutate


def nbgrader(id_, **values):
    def mutate(document):
        cell_of(document, id_)["metadata"]["nbgrader"].update(values)

    return mutate


def remove(*ids):
    def mutate(document):
        document["cells"] = [cell for cell in document["cells"] if cell["id"] not in ids]
        for count, cell in enumerate((cell for cell in document["cells"] if "outputs" in cell), start=1):
            cell["execution_count"] = count

    return mutate


def move(id_, after):
    def mutate(document):
        cell = cell_of(document, id_)
        document["cells"].remove(cell)
        document["cells"].insert(document["cells"].index(cell_of(document, after)) + 1, cell)
        for count, cell in enumerate((cell for cell in document["cells"] if "outputs" in cell), start=1):
            cell["execution_count"] = count

    return mutate


def top(**values):
    def mutate(document):
        document.update(values)

    return mutate


HINT = "<summary>Hint 1: which operation</summary>"
STUB = (
    'def aaa(x: float) -> float:\n    """Half of x."""\n    ### BEGIN SOLUTION\n    return x / 2\n    ### END SOLUTION'
)
GUARDED = "try:\n    import onnx\nexcept ImportError:\n    print('no onnx')"

# what is done to a notebook in order, and the (rule, cell) that must be named
DAMAGE = {
    "old format": (top(nbformat_minor=4), "nbformat", "-"),
    "unknown cell type": (change("idea", cell_type="prose"), "nbformat", "-"),
    "no source": (lambda nb: cell_of(nb, "idea").pop("source"), "nbformat", "-"),
    "no id": (lambda nb: cell_of(nb, "setup-heading").pop("id"), "nbformat", "-"),
    "same id twice": (change("averages", id="idea"), "nbformat", "idea"),
    "title": (replace("title", "Custom Loss", "Own Loss"), "title", "title"),
    "number in the title": (replace("title", "15-04", "15-05"), "title", "title"),
    "no opening paragraph": (replace("title", "Which loss is wrong, and how would you know?", ""), "title", "title"),
    "second H1": (append("takeaways", "\n\n# Another title"), "title", "takeaways"),
    "link by reference": (append("takeaways", " See [x].\n\n[x]: none.ipynb"), "links", "takeaways"),
    "glance: topic": (replace("glance", "Custom Loss", "Own Loss"), "glance", "glance"),
    "glance: time": (replace("glance", "~8 min", "~18 min"), "glance", "glance"),
    "glance: prerequisite": (replace("glance", "5-04, 5-07", "15-04, 5-07"), "glance", "glance"),
    "glance: row missing": (replace("glance", "**Related**", "**Needs**"), "glance", "glance"),
    "glance: order": (replace("glance", "| **Topic**", "| **Related** | x |\n| **Topic**"), "glance", "glance"),
    "heading of no template": (append("takeaways", "\n\n## Epilogue"), "headings", "takeaways"),
    "section number": (replace("averages", "2. ", "3. "), "headings", "averages"),
    "section without number": (replace("averages", "2. ", ""), "headings", "averages"),
    "section outside": (append("takeaways", "\n\n## 3. More losses"), "headings", "takeaways"),
    "heading twice": (append("references", "\n\n## Setup"), "headings", "references"),
    "appendix too early": (append("averages", "\n\n## Appendix: more"), "headings", "averages"),
    "objectives": (replace("objectives", "- explain", "and explain"), "objectives", "objectives"),
    "too many objectives": (append("objectives", "\n- e\n- f\n- g"), "objectives", "objectives"),
    "too few questions": (replace("self-assessment", "5. What", "What"), "self-assessment", "self-assessment"),
    "answer not folded": (append("self-assessment", "6. And now?\n\nTwo."), "self-assessment", "self-assessment"),
    "details left open": (replace("ex-bbb-task", "</details>", ""), "folds", "ex-bbb-task"),
    "no empty line after summary": (replace("ex-bbb-task", "</summary>\n\n", "</summary>\n"), "folds", "ex-bbb-task"),
    "cross-reference": (replace("glance", "9-06", "9-07"), "references", "-"),
    "too few figures": (change("figure-3", outputs=[]), "figures", "-"),
    "path in source": (source("figure-2", 'open("/home/ann/data")'), "paths", "figure-2"),
    "path in Markdown": (append("next", "\n\nSee `/tmp/run`."), "paths", "next"),
    "path in output": (change("figure-2", outputs=[figure(), said("C:\\Users\\ann\\x")]), "paths", "figure-2"),
    "site-packages": (change("device", outputs=[said("/opt/x/site-packages/torch/nn.py:3")]), "paths", "device"),
    "syntax error": (source("figure-1", "draw(1)\nx = (2"), "syntax", "figure-1"),
    "cell magic": (source("figure-1", "%%bash\nls"), "syntax", "figure-1"),
    "shell": (source("figure-1", "!pip install torch"), "syntax", "figure-1"),
    "no device cell": (source("device", 'device = "cpu"'), "device-cell", "device"),
    "two device cells": (source("figure-1", "other = get_device()"), "device-cell", "figure-1"),
    "get_device twice": (source("device", "device = get_device() or get_device()"), "device-cell", "device"),
    "import elsewhere": (source("figure-1", "import math"), "imports", "figure-1"),
    "import in a function": (source("figure-1", "def f():\n    from torch import nn"), "imports", "figure-1"),
    "import for typing": (source("figure-1", "if TYPE_CHECKING:\n    import torch"), "imports", "figure-1"),
    "import not allowed": (append("setup", "\nimport pandas as pd"), "imports", "setup"),
    "optional but needed": (
        lambda nb: (source("figure-1", "import onnx")(nb), meta("figure-1", tags=["optional"])(nb)),
        "imports",
        "figure-1",
    ),
    "not executed": (change("figure-4", execution_count=None), "executed", "figure-4"),
    "run in another order": (change("figure-4", execution_count=90), "executed", "figure-4"),
    "stored error": (
        change(
            "figure-4",
            outputs=[figure(), {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}],
        ),
        "outputs",
        "figure-4",
    ),
    "stderr": (change("figure-4", outputs=[figure(), said("UserWarning: x", "stderr")]), "outputs", "figure-4"),
    "nothing to compare": (change("verified", outputs=[]), "checked-output", "verified"),
    "only a figure to compare": (
        change("verified", outputs=[figure() | {"data": {"image/png": PIXEL}}]),
        "checked-output",
        "verified",
    ),
    "address to compare": (change("verified", outputs=[said("<f at 0x7f3a9c001000>")]), "checked-output", "verified"),
    "tag on prose": (meta("idea", tags=["nbval-check-output"]), "checked-output", "idea"),
    "raises-exception": (meta("figure-4", tags=["raises-exception"]), "tags", "figure-4"),
    "nbval-skip": (meta("figure-4", tags=["nbval-skip"]), "tags", "figure-4"),
    "unknown tag": (meta("figure-4", tags=["nbval-check-ouput"]), "tags", "figure-4"),
    "timestamps": (meta("figure-4", execution={"iopub.execute_input": "2026"}), "metadata", "figure-4"),
    "widget state": (lambda nb: nb["metadata"].update(widgets={}), "metadata", "-"),
    "kernel": (lambda nb: nb["metadata"]["kernelspec"].update(name="torch-env"), "kernel", "-"),
    "too large": (change("figure-4", outputs=[figure(), said("x" * 3_000_000)]), "size", "-"),
    "random id": (change("figure-4", id="9f3b2a1c"), "cell-ids", "9f3b2a1c"),
    "UUID": (
        change("figure-4", id="123e4567-e89b-12d3-a456-426614174000"),
        "cell-ids",
        "123e4567-e89b-12d3-a456-426614174000",
    ),
    "id in capitals": (change("figure-4", id="Figure_4"), "cell-ids", "Figure_4"),
    "required id": (change("data", id="dataset"), "cell-ids", "-"),
    "required cell of another kind": (
        lambda nb: change("glance", cell_type="raw")(nb),
        "cell-ids",
        "glance",
    ),
    "required cell elsewhere": (move("data", "setup-heading"), "cell-ids", "data"),
    "answer without partner": (remove("ex-bbb-check"), "exercise-cells", "ex-bbb-task"),
    "slugs differ": (change("ex-bbb-check", id="ex-bb-check"), "exercise-cells", "ex-bbb-task"),
    "cell in between": (move("verified", "ex-bbb"), "exercise-cells", "ex-bbb-task"),
    "exercise after the sections": (
        lambda nb: [move(id_, "takeaways")(nb) for id_ in ("ex-ddd-check", "ex-ddd", "ex-ddd-task")],
        "exercise-cells",
        "ex-ddd-task",
    ),
    "exercise without id": (append("averages", "\n\n### Exercise 15-04.5 — More"), "exercise-cells", "averages"),
    "hyphen for dash": (replace("ex-bbb-task", "—", "-"), "exercise-headings", "ex-bbb-task"),
    "no minutes": (replace("ex-bbb-task", ", 15 minutes", ""), "exercise-headings", "ex-bbb-task"),
    "5 minutes": (replace("ex-bbb-task", "15 min", "5 min"), "exercise-headings", "ex-bbb-task"),
    "90 minutes": (replace("ex-bbb-task", "15 min", "90 min"), "exercise-headings", "ex-bbb-task"),
    "exercise number": (replace("ex-bbb-task", "15-04.2", "15-04.3"), "exercise-headings", "ex-bbb-task"),
    "topic in the number": (replace("ex-bbb-task", "15-04.2", "15-05.2"), "exercise-headings", "ex-bbb-task"),
    "points differ": (replace("ex-bbb-task", "25 points", "20 points"), "exercise-headings", "ex-bbb-task"),
    "no hint": (
        replace("ex-bbb-task", f"<details>{HINT}\n\nDivide.\n\n</details>", ""),
        "exercise-hints",
        "ex-bbb-task",
    ),
    "hint in the open": (append("ex-bbb-task", "\n\n**Hint:** divide."), "exercise-hints", "ex-bbb-task"),
    "answer is locked": (nbgrader("ex-bbb", locked=True), "exercise-metadata", "ex-bbb"),
    "check without points": (
        lambda nb: cell_of(nb, "ex-bbb-check")["metadata"]["nbgrader"].pop("points"),
        "exercise-metadata",
        "ex-bbb-check",
    ),
    "points as text": (
        nbgrader("ex-bbb-check", points="10"),
        "exercise-metadata",
        "ex-bbb-check",
    ),
    "grade_id": (nbgrader("ex-bbb", grade_id="ex-ccc"), "exercise-metadata", "ex-bbb"),
    "1 for true": (nbgrader("ex-bbb", solution=1), "exercise-metadata", "ex-bbb"),
    "no metadata": (change("ex-bbb", metadata={}), "exercise-metadata", "ex-bbb"),
    "metadata elsewhere": (meta("figure-4", nbgrader={"grade": True}), "exercise-metadata", "figure-4"),
    "no markers": (source("ex-aaa", STUB.replace("### ", "# ").replace("SOLUTION", "")), "exercise-markers", "ex-aaa"),
    "no end": (source("ex-aaa", STUB.replace("### END SOLUTION", "")), "exercise-markers", "ex-aaa"),
    "end before begin": (source("ex-aaa", STUB.replace("BEGIN", "END")), "exercise-markers", "ex-aaa"),
    "crooked marker": (source("ex-aaa", STUB.replace("### BEGIN", "# BEGIN")), "exercise-markers", "ex-aaa"),
    "solution at top level": (
        source("ex-aaa", 'def f():\n    """One."""\n\n### BEGIN SOLUTION\naaa = f\n### END SOLUTION'),
        "exercise-markers",
        "ex-aaa",
    ),
    "stub is no Python": (
        source(
            "ex-aaa",
            STUB.replace("    ### BEGIN SOLUTION\n    return", "    if x:\n    ### BEGIN SOLUTION\n      return"),
        ),
        "exercise-markers",
        "ex-aaa",
    ),
    "no docstring": (replace("ex-aaa", '    """Half of x."""\n', ""), "exercise-markers", "ex-aaa"),
    "markers elsewhere": (append("figure-1", "\n### BEGIN SOLUTION\n### END SOLUTION"), "exercise-markers", "figure-1"),
    "small markers elsewhere": (append("figure-1", "\n# begin solution"), "exercise-markers", "figure-1"),
    "check of another topic": (replace("setup", "topic_15_04", "topic_15_05"), "exercise-import", "setup"),
    "too few exercises": (remove("ex-ddd-task", "ex-ddd", "ex-ddd-check"), "exercise-count", "-"),
    "a box of the template": (append("idea", "\n\n> **What belongs here.** The idea."), "placeholders", "idea"),
    "a placeholder of the template": (append("idea", "\n\nAbout {{title}}."), "placeholders", "idea"),
    "TODO in prose": (append("idea", " TODO: say why."), "placeholders", "idea"),
    "TODO in code": (append("step-1", "  # TODO: more"), "placeholders", "step-1"),
    "figure without text": (change("figure-1", outputs=[figure(alt=None)]), "alt", "figure-1"),
    "figure with an empty text": (change("figure-1", outputs=[figure(alt=" ")]), "alt", "figure-1"),
    "SVG without text": (change("figure-1", outputs=[figure("image/svg+xml", None)]), "alt", "figure-1"),
    "SVG with the text of a PNG": (
        change("figure-1", outputs=[figure("image/svg+xml") | {"metadata": {"image/png": {"alt": "A line."}}}]),
        "alt",
        "figure-1",
    ),
    "figure in other colours": (
        change("figure-1", outputs=[figure() | {"metadata": {"image/png": {"alt": "A line.", "palette": "0"}}}]),
        "palette",
        "figure-1",
    ),
    "text that is none": (change("figure-1", outputs=[figure(alt=3)]), "alt", "figure-1"),
    "101 characters": (source("step-1", f"print({'1' * 94})"), "line-length", "step-1"),
    "no guard": (remove("course"), "cell-ids", "-"),
    "more than the guard": (append("course", "\nimport time"), "guard", "course"),
    "guard of another package": (replace("course", 'find_spec("shared")', 'find_spec("torch")'), "guard", "course"),
    "open guard": (meta("course", jupyter={}, tags=[]), "guard", "course"),
    "folded without the tag": (meta("figure-1", jupyter=FOLD["jupyter"]), "folding", "figure-1"),
    "tag without the fold": (meta("figure-1", tags=FOLD["tags"]), "folding", "figure-1"),
    "other metadata of Jupyter": (meta("step-1", jupyter={"outputs_hidden": True}), "folding", "step-1"),
    "link to a topic that isn't there": (
        append("next", "\n\n[15-09](15-09_debugging_pytorch_models.ipynb)"),
        "links",
        "next",
    ),
    "picture that isn't there": (append("idea", "\n\n![a drawing](images/none.png)"), "links", "idea"),
    "hint without number": (replace("ex-bbb-task", "Hint 1: which", "Hint: which"), "exercise-hints", "ex-bbb-task"),
    "hint that says nothing": (replace("ex-bbb-task", ": which operation", ""), "exercise-hints", "ex-bbb-task"),
    "hints in another order": (
        append("ex-bbb-task", "\n\n<details><summary>Hint 3: more</summary>\n\nTwo.\n\n</details>"),
        "exercise-hints",
        "ex-bbb-task",
    ),
}

# a second rule that rightly speaks up too
COMPANIONS = {
    "required cell of another kind": {"references"},
    "slugs differ": {"exercise-metadata", "exercise-headings", "exercise-count"},
    "points as text": {"exercise-headings"},
}
# of the checks and their tests: (file, what is replaced, by what, rule, cell)
DAMAGE_OF_FILES = {
    "no checks": ("checks", None, None, "exercise-tests", "-"),
    "TODO in the checks": ("checks", "    pass", "    pass  # TODO: hold it", "exercise-tests", "-"),
    "no tests": ("tests", None, None, "exercise-tests", "-"),
    "TODO in the tests": ("tests", '"bbb": [],', '"bbb": [],  # TODO', "exercise-tests", "-"),
}  # fmt: skip


@pytest.mark.parametrize(("mutate", "rule", "cell"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(tmp_path, request, mutate, rule, cell):
    document = notebook(LOSSES)
    mutate(document)
    findings = lint_it(tmp_path, document)
    assert (rule, cell) in [(finding.rule, finding.cell) for finding in findings], findings
    others = {finding.rule for finding in findings} - {rule}
    assert others <= COMPANIONS.get(request.node.callspec.id, set()), findings


def lint_with(tmp_path, file, old, new):
    """Findings for a notebook in order whose checks or tests were changed (removed if `old` is None)."""
    topic, files = place(tmp_path, LOSSES)
    topic.path.write_text(json.dumps(notebook(LOSSES)), encoding="utf-8")
    text = files[file].read_text(encoding="utf-8")
    if old is None:
        files[file].unlink()
    else:
        assert old in text, old
        files[file].write_text(text.replace(old, new), encoding="utf-8")
    return lint_notebook(topic.path, topic, SYLLABUS.module)


@pytest.mark.parametrize(("file", "old", "new", "rule", "cell"), DAMAGE_OF_FILES.values(), ids=DAMAGE_OF_FILES.keys())
def test_damage_to_checks_and_their_tests_is_named(tmp_path, file, old, new, rule, cell):
    findings = lint_with(tmp_path, file, old, new)
    assert (rule, cell) in [(finding.rule, finding.cell) for finding in findings], findings
    assert {finding.rule for finding in findings} == {rule}


@pytest.mark.parametrize("topic", [LOSSES, CAPSTONE], ids=["algorithm", "capstone"])
def test_a_notebook_in_order_passes(tmp_path, topic):
    assert lint_it(tmp_path, notebook(topic), topic) == []


def test_every_rule_is_tried():
    tried = {rule for _, rule, _ in DAMAGE.values()} | {rule for *_, rule, _ in DAMAGE_OF_FILES.values()}
    assert set(RULES) - tried == {"file-name"}  # test_file_name


def test_file_name(tmp_path):
    findings = lint_it(tmp_path, notebook(LOSSES), name="15-04_losses.ipynb")
    assert [finding.rule for finding in findings] == ["file-name"]
    assert LOSSES.file in findings[0].message


@pytest.mark.parametrize("content", ["", "{", "not JSON", "\x00"])
def test_not_json(tmp_path, content):
    findings = lint_it(tmp_path, content)
    assert [finding.rule for finding in findings] == ["json"]


@pytest.mark.parametrize(
    "content", ["[]", "3", '{"nbformat": 4}', '{"nbformat": 4, "nbformat_minor": 5, "cells": [3]}']
)
def test_json_but_no_notebook(tmp_path, content):
    assert {finding.rule for finding in lint_it(tmp_path, content)} == {"nbformat"}


def test_not_utf8(tmp_path):
    path = tmp_path / LOSSES.file
    path.write_bytes(b'{"cells": "\xff"}')
    assert [finding.rule for finding in lint_notebook(path, LOSSES, SYLLABUS.module)] == ["json"]


def test_source_as_list_of_lines(tmp_path):
    document = notebook(LOSSES)
    for cell in document["cells"]:
        cell["source"] = cell["source"].splitlines(keepends=True)
    assert lint_it(tmp_path, document) == []


@pytest.mark.parametrize(
    ("topic", "mutate", "rule"),
    [
        (CAPSTONE, replace("milestones", "## Milestones", "## 1. Milestones"), "headings"),
        (CAPSTONE, remove("brief"), "cell-ids"),
        (CAPSTONE, replace("glance", "15-03, ", ""), "glance"),
        (LOSSES, append("idea", "\n\n## Milestones"), "headings"),
    ],
)
def test_each_template_has_its_own_headings(tmp_path, topic, mutate, rule):
    document = notebook(topic)
    mutate(document)
    assert rule in {finding.rule for finding in lint_it(tmp_path, document, topic)}


HARMLESS = {
    "!= in code": source("figure-1", "if a != b:\n    draw(1)"),
    "! and ? in a string": source("figure-1", 'print("!ls", "what?")  # why?'),
    "% at the start of a line": source("figure-1", "x = (7\n% 2)"),
    "comment in fenced code is no heading": append("takeaways", "\n\n```python\n# A comment\n## Another\n```"),
    "web address with home": append("references", "\n- https://example.org/home/ann and [x](https://x.org/tmp/y)"),
    "relative path": source("figure-1", 'open("data/tmp/x")'),
    "eight letters": change("figure-1", id="facade-d"),
    "word of hexadecimal letters": change("figure-1", id="deadbeef"),
    "optional import": lambda nb: (source("figure-1", GUARDED)(nb), meta("figure-1", tags=["optional"])(nb)),
    "standard library": append("setup", "\nfrom __future__ import annotations\nimport os.path\nimport numpy as np"),
    "a word that contains todo": append("idea", " A todo of a mastodon, {braces} and {{ spaces }}."),
    "braces of an f-string": source("step-1", 'print(f"{{name}}")'),
    "braces in a formula and in code": append("idea", " $x_{{a}}$ and `{{name}}`."),
    "SVG with text": change("figure-1", outputs=[figure("image/svg+xml")]),
    "100 characters": source("step-1", f"print({'1' * 93})"),
    "101 characters of prose": append("idea", "\n\n" + "x" * 101),
    "links to what is there": append(
        "next",
        "\n\n[1](15-04_custom_loss_functions_and_training_utilities.ipynb#Setup), [2](#Setup), [3](mailto:a@b.org)",
    ),
    "a link as an editor writes it, such as %20 for a space": append(
        "next", "\n\n[1](15%2D04_custom_loss_functions_and_training_utilities.ipynb)"
    ),
    "a link in an indented code block": append("takeaways", "\n\nAs typed:\n\n    [x](none.ipynb) and more!"),
    "a link behind an escape": append("takeaways", " An \\[x\\](none.ipynb) in brackets."),
    "an appendix": append("takeaways", "\n\n## Appendix: more of it"),
    "a heading in a comment": append("takeaways", "\n\n<!--\n# Another title\n-->"),
    "signs of an inequality in a formula": append("takeaways", " For $i<j$ there is $j>i$, for $a<b!$ one more."),
    "a second hint": append("ex-bbb-task", "\n\n<details><summary>Hint 2: more</summary>\n\nTwo.\n\n</details>"),
    "questions as headings": lambda nb: source(
        "self-assessment",
        cell_of(nb, "self-assessment")["source"].replace("1. What", "### 1. What").replace("2. What", "**2.** What"),
    )(nb),
    "escaped and linked glance": lambda nb: (
        replace("glance", LOSSES.title, LOSSES.title.replace("&", "&amp;"))(nb),
        replace("glance", "5-07", "[5-07](https://example.org/m.ipynb)")(nb),
        replace("glance", "A — Algorithm", "`A — Algorithm`")(nb),
    ),
    "attributes of other tools": meta("figure-1", editable=True),
    "Jupyter's own version": lambda nb: nb["metadata"].update(language_info={"name": "python", "version": "3.11"}),
}


@pytest.mark.parametrize("mutate", HARMLESS.values(), ids=HARMLESS.keys())
def test_look_alikes_are_left_alone(tmp_path, mutate):
    document = notebook(LOSSES)
    mutate(document)
    for count, cell in enumerate((cell for cell in document["cells"] if "outputs" in cell), start=1):
        cell["execution_count"] = count
    assert lint_it(tmp_path, document) == []


def test_draft_is_relaxed(tmp_path):
    draft = changed(LOSSES, status="draft")
    document = notebook(LOSSES)
    for name in (
        "too few figures",
        "cross-reference",
        "objectives",
        "not executed",
        "TODO in code",
    ):
        DAMAGE[name][0](document)
    assert {finding.rule for finding in lint_it(tmp_path, copy.deepcopy(document))} <= set(relaxed_for("draft"))
    assert lint_it(tmp_path, document, draft) == []
    DAMAGE["stored error"][0](document)
    assert [finding.rule for finding in lint_it(tmp_path, document, draft)] == ["outputs"]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("5-06 and (16-03), [9-06](x)", {"5-06", "16-03", "9-06"}),
        ("on 2026-11-20, 115-06, 5-061", set()),
    ],
)
def test_named_topics(text, numbers):
    assert named_topics(text) == numbers


def test_student_source():
    source = (
        "def f():\n    ### BEGIN SOLUTION\n    x = 1\n\n    return x\n    ### END SOLUTION\n\n\ndef g(x):\n    if x:\n"
    )
    source += "        ### BEGIN SOLUTION\n        return 2\n        ### END SOLUTION\n    return 3"
    expected = "def f():\n    # YOUR CODE HERE\n    raise NotImplementedError\n\n\ndef g(x):\n    if x:\n"
    expected += "        # YOUR CODE HERE\n        raise NotImplementedError\n    return 3"
    assert student_source(source) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x\n### BEGIN SOLUTION", "line 2: ### BEGIN SOLUTION without"),
        ("### END SOLUTION", "line 1: ### END SOLUTION without"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", "line 2: ### BEGIN SOLUTION inside"),
    ],
)
def test_student_source_of_unpaired_markers(source, message):
    with pytest.raises(MarkerError, match=message):
        student_source(source)


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments):
    parser = argparse.ArgumentParser()
    lint.add_arguments(parser)
    return lint.main(parser.parse_args([str(argument) for argument in arguments]))


def test_the_repository_is_in_order(capsys):
    status = run()
    assert status == 0, capsys.readouterr().out


def test_a_file_is_named_with_cell_and_rule(tmp_path, capsys):
    document = notebook(LOSSES)
    DAMAGE["syntax error"][0](document)
    path = tmp_path / LOSSES.file
    path.write_text(json.dumps(document), encoding="utf-8")
    assert run(path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(f"{path.as_posix()}: figure-1: syntax: is not plain Python")]
    assert lines[-1].startswith("lint: ")


def test_a_misnamed_notebook_is_held_against_its_number(tmp_path, capsys):
    path = tmp_path / "15-04_losses.ipynb"
    path.write_text(json.dumps(notebook(LOSSES)), encoding="utf-8")
    assert run(path) == 1
    assert ": -: file-name: " in capsys.readouterr().out


def test_a_file_of_no_topic(tmp_path, capsys):
    (tmp_path / "15-77_x.ipynb").write_text("{}", encoding="utf-8")
    assert run(tmp_path / "15-77_x.ipynb") == 1
    assert "belongs to no topic" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "message"), [("15-77", "there is no topic 15-77"), ("x.ipynb", "neither a topic")])
def test_names_that_mean_nothing(capsys, name, message):
    assert run(name) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["15-02", "2", SYLLABUS.topics["15-02"].file])
def test_topics_are_chosen_as_in_other_commands(monkeypatch, capsys, repository, name):
    root, syllabus = repository
    monkeypatch.setattr(lint, "load", lambda: syllabus)
    monkeypatch.setattr(lint, "ROOT", root)
    assert run(name) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["note: 15-02 Advanced Data Pipelines: not written yet", "lint: there was nothing to look at"]

    topic = changed(syllabus.topics["15-02"], status="draft")
    monkeypatch.setattr(lint, "load", lambda: changed(syllabus, topics=syllabus.topics | {"15-02": topic}))
    topic.path.write_text("{}", encoding="utf-8")
    assert run(name, "15-03") == 1
    out = capsys.readouterr().out
    assert f"{topic.file}: -: nbformat: " in out
    assert "note: 15-02 is a draft, so not held against" in out
    assert "note: 15-03 Advanced nn.Module Patterns: not written yet" in out


def test_a_template_is_chosen_by_its_file(capsys):
    assert run("templates/TEMPLATE_CAPSTONE.ipynb") == 0, capsys.readouterr().out


@pytest.fixture
def repository(tmp_path):
    """A copy of what lint looks at, without notebooks, and its syllabus."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    folder = tmp_path / SYLLABUS.module.folder
    folder.mkdir()
    for name in ("syllabus.toml", "README.md"):
        shutil.copy(SYLLABUS.path.parent / name, folder)
    (tmp_path / "shared" / "checks").mkdir(parents=True)
    shutil.copy(ROOT / "shared" / "checks" / "template.py", tmp_path / "shared" / "checks")
    syllabus = load(folder / "syllabus.toml")
    lint.write_readme(syllabus)  # there are no notebooks here, so no links to them
    return tmp_path, syllabus


def test_stale_page_is_named_and_refreshed(repository):
    root, syllabus = repository
    assert lint.lint_readme(syllabus) == []
    text = syllabus.path.read_text(encoding="utf-8").replace("CUDA memory management, GPU internals", "GPU memory")
    syllabus.path.write_text(text, encoding="utf-8")
    syllabus = load(syllabus.path)
    findings = lint.lint_repository(root, syllabus)
    assert [(finding.rule, "--write-readme" in finding.message) for finding in findings] == [("module-page", True)]
    page = syllabus.path.parent / "README.md"
    before = page.read_text(encoding="utf-8")
    lint.write_readme(syllabus)
    assert lint.lint_readme(syllabus) == []
    changed = set(page.read_text(encoding="utf-8").splitlines()) ^ set(before.splitlines())
    assert changed == {"| CUDA memory management, GPU internals | 15-07 |", "| GPU memory | 15-07 |"}


def test_page_without_markers(repository):
    _, syllabus = repository
    page = syllabus.path.parent / "README.md"
    begin, _ = module_readme.markers("topics")
    page.write_text(page.read_text(encoding="utf-8").replace(begin, ""), encoding="utf-8")
    before = page.read_bytes()
    lint.write_readme(syllabus)
    assert page.read_bytes() == before
    [finding] = lint.lint_readme(syllabus)
    assert begin in finding.message
    page.unlink()
    [finding] = lint.lint_readme(syllabus)
    assert "does not exist" in finding.message


def test_a_stray_notebook_in_the_folder(repository):
    root, syllabus = repository
    (syllabus.path.parent / "Untitled.ipynb").write_text("{}", encoding="utf-8")
    [finding] = lint.lint_repository(root, syllabus)
    assert (finding.rule, "belongs to no topic" in finding.message) == ("file", True)


def test_the_page_links_what_exists(repository):
    _, syllabus = repository
    missing = syllabus.topics["15-09"]
    missing.path.unlink(missing_ok=True)
    row = next(line for line in module_readme.render(syllabus)["topics"].splitlines() if line.startswith("| 15-09"))
    assert "](" not in row
    missing.path.write_text("{}", encoding="utf-8")
    row = next(line for line in module_readme.render(syllabus)["topics"].splitlines() if line.startswith("| 15-09"))
    assert f"[{missing.title}]({missing.file})" in row


def test_bad_syllabus_is_a_finding(monkeypatch, capsys):
    def refuse():
        raise lint.SyllabusError("syllabus.toml: topic 15-01: key 'owns' is missing")

    monkeypatch.setattr(lint, "load", refuse)
    assert run() == 1
    assert "key 'owns' is missing" in capsys.readouterr().out


@pytest.mark.parametrize(("statuses", "expected"), [((0, 0), True), ((1, 0), False), ((0, 1), False)])
def test_ruff_decides_too(monkeypatch, tmp_path, statuses, expected):
    calls, left = [], list(statuses)
    monkeypatch.setattr(
        lint.subprocess,
        "run",
        lambda command, **_: calls.append(command[2:]) or lint.subprocess.CompletedProcess(command, left.pop(0)),
    )
    assert lint.run_ruff(tmp_path) is expected
    assert calls == [["ruff", "check", "."], ["ruff", "format", "--check", "."]]
