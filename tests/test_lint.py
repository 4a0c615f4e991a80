"""Lint: a notebook in order passes, each damage is named by its rule and cell, and look-alikes are left alone."""

import argparse
import json
import shutil
from dataclasses import replace as changed

import pytest

from course import lint, module_readme
from course.environment import ROOT
from course.exercise_form import answer_metadata, check_metadata
from course.guard import GUARD
from course.lint import lint_notebook
from course.rules import RULES
from course.rules.outputs import current_palette
from course.syllabus import load

SYLLABUS = load()
LOSSES = changed(SYLLABUS.topics["15-04"], status="finished")  # it has cross-references to name
CAPSTONE = SYLLABUS.topics["15-10"]
FOLD = {"jupyter": {"source_hidden": True}, "tags": ["hide-input"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def markdown(id_, source):
    return {"id": id_, "cell_type": "markdown", "metadata": {}, "source": source}


def code(id_, source, *outputs, **metadata):
    cell = {"id": id_, "cell_type": "code", "metadata": metadata, "source": source}
    return cell | {"outputs": list(outputs), "execution_count": None}


def said(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def figure(kind="image/png", **stored):
    stored = stored or {"alt": "A falling line.", "palette": current_palette()}
    return {"output_type": "display_data", "metadata": {kind: stored}, "data": {kind: PIXEL, "text/plain": "<Figure>"}}


def exercise(number, slug, place):
    task = f"### Exercise {number}.{place} — Half of {slug} (25 points, 15 minutes)\n\nReturn half.\n\n"
    task += "<details><summary>Hint 1: which operation</summary>\n\nDivide.\n\n</details>"
    stub = f'def {slug}(x: float) -> float:\n    """Half of x."""\n'
    stub += "    ### BEGIN SOLUTION\n    return x / 2\n    ### END SOLUTION"
    return [
        markdown(f"ex-{slug}-task", task),
        code(f"ex-{slug}", stub, nbgrader=answer_metadata(f"ex-{slug}")),
        code(f"ex-{slug}-check", f"check.{slug}({slug})", nbgrader=check_metadata(f"ex-{slug}-check", 25)),
    ]


def questions(first, last):
    fold = "<details><summary>Answer</summary>\n\nOne.\n\n</details>\n\n"
    return "".join(f"{number}. What does this print?\n\n{fold}" for number in range(first, last + 1))


def notebook(topic):
    others = [number for met in topic.warnings for number in met.references]
    rows = {
        "Topic": topic.title,
        "Category": topic.category,
        "Dataset": topic.dataset,
        "Time": topic.time,
        "Prerequisites": ", ".join(topic.prerequisites),
        "Teaches": topic.owns,
        "Related": f"Other modules own {', '.join(others) or 'the rest'}",
    }
    glance = "\n".join(["| At a glance | |", "|---|---|", *(f"| **{key}** | {value} |" for key, value in rows.items())])
    teaching = [
        markdown("idea", "An idea in some words."),
        *(code(f"figure-{place}", f"draw({place})", figure()) for place in range(6)),
        code("step", "print(1)", said("1\n")),
        code("verified", 'print("max error 0.0")', said("max error 0.0\n"), tags=["nbval-check-output"]),
        *(cell for place in range(1, 5) for cell in exercise(topic.number, "abcd"[place - 1] * 3, place)),
    ]
    cells = [
        markdown("title", f"# {topic.number}: {topic.title}\n\nWhich loss is wrong, and how would you know?"),
        markdown("glance", glance),
        markdown("objectives", "## Learning objectives\n\n- derive\n- measure\n- verify\n- explain"),
        markdown("setup-heading", "## Setup"),
        code("course", GUARD, **FOLD),
        code("setup", "import matplotlib.pyplot as plt\n\nfrom shared import get_device, load_cifar10"),
        code("device", "device = get_device()", said("cpu")),
        code("data", "train = load_cifar10()\nlen(train)", said("6000")),
        markdown("losses", "## 1. Losses"),
        *teaching,
        markdown("averages", "## 2. Averages"),
        markdown("self-assessment", "## Self-assessment\n\n" + questions(1, 5)),
        markdown("takeaways", "## Key takeaways\n\n- one"),
        markdown("next", "## Where this goes next\n\nOn."),
        markdown("references", "## References\n\n- one"),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return executed({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


def executed(document):
    code_cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(code_cells, start=1):
        cell["execution_count"] = count
    return document


def lint_it(tmp_path, document, topic=LOSSES):
    """Findings for the notebook in a repository of its own, with files of checks and tests."""
    topic = changed(topic, path=tmp_path / SYLLABUS.module.folder / topic.file)
    for path in (topic.path, topic.check_file, topic.test_file):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    topic.path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return lint_notebook(topic.path, topic, SYLLABUS.module)


def cell_of(document, id_):
    return next(cell for cell in document["cells"] if cell["id"] == id_)


def replace(id_, old, new):
    def damage(document):
        cell = cell_of(document, id_)
        assert old in cell["source"], old
        cell["source"] = cell["source"].replace(old, new)

    return damage


def append(id_, text):
    return lambda document: cell_of(document, id_).update(source=cell_of(document, id_)["source"] + text)


def change(id_, **values):
    return lambda document: cell_of(document, id_).update(values)


def meta(id_, **values):
    return lambda document: cell_of(document, id_)["metadata"].update(values)


def remove(*ids):
    def damage(document):
        document["cells"] = [cell for cell in document["cells"] if cell["id"] not in ids]
        executed(document)

    return damage


def optional(source):
    return change("step", source=source, metadata={"tags": ["optional"]})


BEGIN = "    ### BEGIN SOLUTION"
ERROR = {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}
HINT = "<details><summary>Hint 1: which operation</summary>\n\nDivide.\n\n</details>"

DAMAGE = [  # the rule that must speak up, what is done, the cell that must be named
    ("nbformat", lambda nb: cell_of(nb, "setup-heading").pop("id"), "-"),
    ("nbformat", change("averages", id="idea"), "-"),
    ("size", change("figure-4", outputs=[figure(), said("x" * 3_000_000)]), "-"),
    ("metadata", lambda nb: nb["metadata"]["kernelspec"].update(name="torch-env"), "-"),
    ("metadata", lambda nb: nb["metadata"].update(widgets={}), "-"),
    ("metadata", meta("step", execution={"iopub.execute_input": "2026"}), "step"),
    ("metadata", meta("step", tags=["raises-exception"]), "step"),
    ("cell-ids", change("step", id="9f3b2a1c"), "9f3b2a1c"),
    ("cell-ids", change("step", id="123e4567-e89b-12d3-a456-426614174000"), "123e4567-e89b-12d3-a456-426614174000"),
    ("cell-ids", change("step", id="Step_4"), "Step_4"),
    ("cell-ids", change("data", id="dataset"), "-"),
    ("title", replace("title", "Custom Loss", "Own Loss"), "title"),
    ("title", append("takeaways", "\n\n# Another title"), "takeaways"),
    ("glance", replace("glance", "~8 min", "~18 min"), "glance"),
    ("glance", replace("glance", "5-04, 5-07", "15-04, 5-07"), "glance"),
    ("glance", replace("glance", LOSSES.dataset, "MNIST"), "glance"),
    ("glance", replace("glance", LOSSES.category, "Z"), "glance"),
    ("glance", replace("glance", "**Related**", "**Needs**"), "glance"),
    ("glance", replace("glance", f"**Teaches** | {LOSSES.owns}", "**Teaches** | "), "glance"),
    ("headings", append("takeaways", "\n\n## Epilogue"), "takeaways"),
    ("headings", replace("averages", "2. ", "3. "), "averages"),
    ("headings", append("references", "\n\n## Setup"), "references"),
    ("counts", replace("objectives", "- explain", "and explain"), "objectives"),
    ("counts", append("objectives", "\n- e\n- f\n- g"), "objectives"),
    ("counts", replace("self-assessment", "5. What", "What"), "self-assessment"),
    ("counts", append("self-assessment", "6. And now?\n\nTwo."), "self-assessment"),
    ("counts", append("self-assessment", questions(6, 9)), "self-assessment"),
    ("folds", append("idea", "\n\n<details><summary>More</summary>\n\nText."), "idea"),
    ("folds", append("idea", "\n\n<details>\n\nText.\n\n</details>"), "idea"),
    ("folds", replace("ex-bbb-task", "</summary>\n\n", "</summary>\n"), "ex-bbb-task"),
    ("references", replace("glance", "9-06", "9-07"), "-"),
    ("paths", change("step", source='open("/home/ann/data")'), "step"),
    ("paths", change("step", outputs=[said("C:\\Users\\ann\\x")]), "step"),
    ("paths", change("step", outputs=[said("/opt/x/site-packages/torch/nn.py:3")]), "step"),
    ("paths", change("step", outputs=[figure() | {"data": {"text/plain": "Path('/tmp/x')"}}]), "step"),
    ("links", append("next", "\n\n[15-09](15-09_debugging_pytorch_models.ipynb)"), "next"),
    ("links", append("idea", "\n\n![a drawing](images/none.png)"), "idea"),
    ("placeholders", append("idea", "\n\n> **What belongs here.** The idea."), "idea"),
    ("placeholders", append("idea", "\n\nAbout {{title}}."), "idea"),
    ("placeholders", append("step", "  # TODO: more"), "step"),
    ("syntax", change("step", source="%%bash\nls"), "step"),
    ("imports", change("step", source="def f():\n    from torch import nn"), "step"),
    ("imports", append("setup", "\nimport pandas as pd"), "setup"),
    ("imports", optional("import onnx"), "step"),
    ("guard", append("course", "\nimport time"), "course"),
    ("counts", change("figure-3", outputs=[]), "-"),
    ("executed", change("step", execution_count=90), "step"),
    ("outputs", change("step", outputs=[ERROR]), "step"),
    ("outputs", change("step", outputs=[said("UserWarning: x", "stderr")]), "step"),
    ("alt", change("step", outputs=[figure("image/svg+xml", width=1)]), "step"),
    ("alt", change("step", outputs=[figure(), figure(width=1)]), "step"),
    ("palette", change("step", outputs=[figure(alt="A line.", palette="0")]), "step"),
    ("exercise-cells", remove("ex-ddd-check"), "ex-ddd-task"),
    ("exercise-cells", lambda nb: nb["cells"].insert(19, markdown("between", "")), "ex-aaa-task"),
    ("exercise-headings", replace("ex-bbb-task", "—", "-"), "ex-bbb-task"),
    ("exercise-headings", replace("ex-bbb-task", "15 min", "9 min"), "ex-bbb-task"),
    ("exercise-headings", replace("ex-bbb-task", "15 min", "61 min"), "ex-bbb-task"),
    ("exercise-headings", replace("ex-bbb-task", "15-04.2", "15-04.3"), "ex-bbb-task"),
    ("exercise-headings", replace("ex-bbb-task", "25 points", "20 points"), "ex-bbb-task"),
    ("exercise-hints", replace("ex-bbb-task", HINT, ""), "ex-bbb-task"),
    ("exercise-hints", replace("ex-bbb-task", "Hint 1: which", "Hint 2: which"), "ex-bbb-task"),
    ("exercise-hints", replace("ex-bbb-task", ": which operation", ""), "ex-bbb-task"),
    ("exercise-metadata", lambda nb: cell_of(nb, "ex-bbb-check")["metadata"]["nbgrader"].pop("points"), "ex-bbb-check"),
    ("exercise-metadata", lambda nb: cell_of(nb, "ex-bbb")["metadata"]["nbgrader"].update(grade_id="ex-ccc"), "ex-bbb"),
    ("exercise-metadata", meta("step", nbgrader={"grade": True}), "step"),
    ("student-edition", replace("ex-aaa", BEGIN, "    # BEGIN SOLUTION"), "-"),
    ("student-edition", replace("ex-aaa", '    """Half of x."""\n', ""), "ex-aaa"),
    ("student-edition", append("step", "\n### BEGIN SOLUTION\n### END SOLUTION"), "-"),
    ("counts", remove("ex-ddd-task", "ex-ddd", "ex-ddd-check"), "-"),
]


def test_every_rule_is_tried():
    assert set(RULES) - {rule for rule, *_ in DAMAGE} == {"exercise-tests"}  # in a test of its own


@pytest.mark.parametrize(("rule", "damage", "cell"), DAMAGE, ids=[rule for rule, *_ in DAMAGE])
def test_damage_is_named_by_its_rule_alone(tmp_path, rule, damage, cell):
    document = notebook(LOSSES)
    damage(document)
    findings = lint_it(tmp_path, document)
    assert {finding.rule for finding in findings} == {rule}, findings
    assert cell in [finding.cell for finding in findings]


@pytest.mark.parametrize("kind", ["check_file", "test_file"])
def test_a_finished_topic_needs_checks_and_tests(tmp_path, kind):
    lint_it(tmp_path, notebook(LOSSES))
    topic = changed(LOSSES, path=tmp_path / SYLLABUS.module.folder / LOSSES.file)
    getattr(topic, kind).unlink()
    (finding,) = lint_notebook(topic.path, topic, SYLLABUS.module)
    assert (finding.rule, getattr(topic, kind).name in finding.message) == ("exercise-tests", True)


@pytest.mark.parametrize("content", ["", '{"nbformat": 4, "nbformat_minor": 5, "cells": [3]}'])
def test_a_file_that_is_no_notebook(tmp_path, content):
    assert [finding.rule for finding in lint_it(tmp_path, content)] == ["nbformat"]


def test_a_capstone_has_other_parts(tmp_path):
    document = json.loads(CAPSTONE.path.read_text(encoding="utf-8"))
    remove("brief")(document)
    assert {"cell-ids", "headings"} <= {finding.rule for finding in lint_it(tmp_path, document, CAPSTONE)}


def test_look_alikes_are_left_alone(tmp_path):
    document = notebook(LOSSES)
    for harmless in (
        append("takeaways", "\n\n```python\n# A comment\n## Another\n```\n\n## Appendix: more of it"),
        append("references", "\n- https://example.org/home/ann and [x](https://x.org/tmp/y)"),
        change("verified", source='open("data/tmp/x")'),
        optional("try:\n    import onnx\nexcept ImportError:\n    print('no onnx')"),
        append("idea", " A todo of a mastodon, $x_{{a}}$ and `{{name}}`."),
        change("figure-0", outputs=[figure("image/svg+xml", alt="A line.")]),
        append("next", f"\n\n[1]({LOSSES.file}#Setup), [2](#Setup), [3](mailto:a@b.org), `[4](none.ipynb)`"),
        replace("ex-aaa-task", "15 min", "10 min"),
        replace("ex-bbb-task", "15 min", "60 min"),
        append("self-assessment", questions(6, 8)),
        append("objectives", "\n- e\n- f"),
        replace("glance", "5-07", "[5-07](https://example.org/m.ipynb)"),
    ):
        harmless(document)
    assert lint_it(tmp_path, document) == []


def test_draft_is_relaxed(tmp_path):
    document = notebook(LOSSES)
    for rule, damage, _ in DAMAGE:
        if rule in ("counts", "references", "executed", "placeholders", "palette"):
            damage(document)
    draft = changed(LOSSES, status="draft")
    assert lint_it(tmp_path, document, draft) == []
    change("step", outputs=[ERROR])(document)
    assert [finding.rule for finding in lint_it(tmp_path, document, draft)] == ["outputs"]


def run(*arguments):
    parser = argparse.ArgumentParser()
    lint.add_arguments(parser)
    return lint.main(parser.parse_args([str(argument) for argument in arguments]))


def test_the_repository_is_in_order(capsys):
    status = run()
    assert status == 0, capsys.readouterr().out


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A copy of what lint looks at, without notebooks; returns its syllabus."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    folder = tmp_path / SYLLABUS.module.folder
    folder.mkdir()
    for name in ("syllabus.toml", "README.md"):
        shutil.copy(SYLLABUS.path.parent / name, folder)
    syllabus = load(folder / "syllabus.toml")
    lint.lint_pages(syllabus, write=True)  # there are no notebooks here, so no links to them
    monkeypatch.setattr(lint, "load", lambda: load(syllabus.path))
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    return syllabus


def test_a_finding_names_file_cell_and_rule(repository, capsys):
    topic, document = repository.topics["15-04"], notebook(LOSSES)
    change("step", source="x = (2")(document)
    topic.path.write_text(json.dumps(document), encoding="utf-8")
    assert run(topic.path) == 1
    place = topic.path.relative_to(lint.ROOT)
    assert capsys.readouterr().out.startswith(f"{place}: -: exercise-tests: ")
    text = repository.path.read_text(encoding="utf-8")
    repository.path.write_text(text.replace('."15-04"]', '."15-04"]\nstatus = "draft"'), encoding="utf-8")
    assert run(topic.path) == 1
    line, note, end = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{place}: step: syntax: is not plain Python")
    assert note.startswith("note: 15-04 is a draft, so not held against counts, executed, ")
    assert end == "lint: findings: 1"
    topic.path.rename(topic.path.with_name("Untitled.ipynb"))
    assert run() == 1
    assert "Untitled.ipynb: -: file: belongs to no topic" in capsys.readouterr().out
    assert run("15-77") == 2
    assert "there is no topic 15-77" in capsys.readouterr().err


def test_stale_page_is_named_and_refreshed(repository, capsys):
    page = repository.path.parent / "README.md"
    assert run() == 0
    text = repository.path.read_text(encoding="utf-8")
    repository.path.write_text(text.replace("CUDA memory management, GPU", "GPU"), encoding="utf-8")
    before = page.read_text(encoding="utf-8").splitlines()
    assert run() == 1
    assert "README.md: -: module-page: is older" in capsys.readouterr().out
    assert run("--write-readme") == 0
    renewed = set(page.read_text(encoding="utf-8").splitlines()) ^ set(before)
    assert renewed == {"| CUDA memory management, GPU internals | 15-07 |", "| GPU internals | 15-07 |"}

    begin = "<!-- generated from syllabus.toml: topics -->"
    page.write_text(page.read_text(encoding="utf-8").replace(begin, "My own table"), encoding="utf-8")
    before = page.read_bytes()
    assert run("--write-readme") == 1
    assert f"needs the lines {begin}" in capsys.readouterr().out
    assert page.read_bytes() == before


def test_the_page_links_what_exists(repository):
    topic = repository.topics["15-09"]
    (unwritten,) = [row for row in module_readme.render(repository)["topics"].splitlines() if row[:7] == "| 15-09"]
    assert "](" not in unwritten
    topic.path.write_text("{}", encoding="utf-8")
    assert f"[{topic.title}]({topic.file})" in module_readme.render(repository)["topics"]


@pytest.mark.parametrize("complaining", ["check", "format", None])
def test_ruff_decides_too(repository, monkeypatch, complaining):
    def ruff(command, **_):
        assert command[3:] in (["check", "."], ["format", "--check", "."])
        return lint.subprocess.CompletedProcess(command, int(command[3] == complaining))

    monkeypatch.setattr(lint.subprocess, "run", ruff)
    assert run("--ruff") == (complaining is not None)
    assert run() == 0
