"""`course lab` as a student meets it: JupyterLab in a browser, on a short lesson, from the first start to an update."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import nbformat
import pytest
from browser import chromium, what_is_missing

from course import start_page, syllabus
from course.environment import ROOT

pytestmark = [
    pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing()),
    pytest.mark.skipif(os.name == "nt", reason="a signal ends the server"),
    pytest.mark.slow,
    pytest.mark.processes,
]
SECONDS = 240  # the most that a start, a run or an end may take
TOPIC = syllabus.load().topics["15-03"]
# `python -m course` with another syllabus, so with other lessons
COURSE = """
import sys
from pathlib import Path
from course import syllabus
syllabus.SYLLABUS_FILE = Path(sys.argv.pop(1))
from course.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
CELLS = ("title", "setup", "ex-mae-task", "ex-mae", "ex-mae-check")
ANSWER, CHECK, LAST = 3, 4, 5  # places
PROGRESS = 7  # on the start page
STUB = "    # YOUR CODE HERE\n    raise NotImplementedError"
HEAD = "def mean_absolute_error(prediction, target):\n    "
WRONG = HEAD + "return (prediction - target).mean().abs()"
RIGHT = HEAD + "return (prediction - target).abs().mean()"


def lesson(folder, title):
    """A module of one short lesson, made from the template's example; returns its syllabus."""
    parts = TOPIC.path.with_name("syllabus.toml").read_text(encoding="utf-8").split("\n\n")
    named = [part for part in parts if part.startswith(("[module]", f'[topics."{TOPIC.number}"]'))]
    template = nbformat.read(ROOT / "templates" / "TEMPLATE_ALGORITHM.ipynb", as_version=4)
    template.cells = [cell for cell in template.cells if cell.id in CELLS]
    for cell in template.cells:
        cell.source = cell.source.replace("{{number}}", TOPIC.number).replace("{{title}}", title)
    code = "import os\nprint('kernel', os.getpid(), mean_absolute_error.__name__)"
    template.cells.append(nbformat.v4.new_code_cell(code, id="last"))
    place = folder / "module"
    place.mkdir(exist_ok=True)
    nbformat.write(template, place / TOPIC.file)
    (place / "syllabus.toml").write_text("\n\n".join(named), encoding="utf-8")
    return place / "syllabus.toml"


@contextlib.contextmanager
def lab(book, folder):
    """`course lab` on its lesson: (its address, its process, the file of what it says); asked to end afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"log-{port}.txt"
    command = [
        sys.executable, "-c", COURSE, str(book), "lab", "--output", str(folder / "workbook"), f"--port={port}",
        "--ServerApp.port_retries=0", "--no-browser", "--IdentityProvider.token=", "--allow-root",
        "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    env = {**os.environ, "COURSE_ENV": "current", "JUPYTER_CONFIG_DIR": str(folder / "jupyter")}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
    try:
        wait(lambda: answers(port) or process.poll() is not None, "JupyterLab answers")
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}/lab/tree/{TOPIC.file}?reset", process, log
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
    assert not answers(port), "JupyterLab still runs"


def answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait(condition, what):
    """Return what `condition` gives as soon as that is true."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {SECONDS} s"
        time.sleep(0.2)
    return found


class Page:
    """A notebook in JupyterLab."""

    def __init__(self, driver, address, last=LAST):
        self.driver = driver
        driver.get(address)
        wait(lambda: len(self.cells()) > last, "the notebook is shown")
        kernel = "return jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
        wait(lambda: self.run(kernel) == "idle", "its kernel has started")

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def command(self, name):
        self.run("jupyterapp.commands.execute(arguments[0])", name)

    def cells(self):
        return self.driver.find_elements("css selector", ".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell")

    def output(self, place):
        """What is shown below a cell."""
        shown = self.cells()[place].find_elements("css selector", ".jp-OutputArea-output")
        return "\n".join(part.get_attribute("textContent") for part in shown)

    def source(self, place):
        return self.run(
            "return jupyterapp.shell.currentWidget.content.widgets[arguments[0]].model.toJSON().source", place
        )

    def type(self, place, text):
        """Replace what is in a cell, as if it was pasted."""
        from selenium.webdriver import ActionChains, Keys

        editor = self.cells()[place].find_element("css selector", ".cm-content")
        self.run("arguments[0].scrollIntoView({block: 'center'})", editor)
        editor.click()
        ActionChains(self.driver).key_down(Keys.CONTROL).send_keys("a").key_up(Keys.CONTROL).perform()
        self.driver.execute_cdp_cmd("Input.insertText", {"text": text})
        wait(lambda: "".join(self.source(place)) == text, "the text is in the cell")

    def run_all(self, until, place):
        """Run All, and wait for a text below a cell."""
        self.command("notebook:run-all-cells")
        wait(lambda: until in self.output(place), f"{until!r} below cell {place}")

    def kernel(self):
        """The kernel's process, as the last cell has printed it."""
        found = re.search(r"kernel (\d+)", self.output(LAST))
        return found and int(found[1])


def test_from_the_first_start_to_an_update(tmp_path):
    book = lesson(tmp_path, "Old title")
    with chromium() as driver:
        with lab(book, tmp_path) as (address, process, _):
            page = Page(driver, address.replace(TOPIC.file, start_page.NAME), last=PROGRESS)  # its warm-up
            driver.find_element("link text", "topics").click()
            page.run_all("All", PROGRESS)
            assert "not attempted" in page.output(CHECK)
            page.type(ANSWER, "def cube_backward(x, upstream):\n    return 3 * x ** 2 * upstream")
            page.run_all("passed", CHECK)

            page = Page(driver, address)
            assert STUB in "".join(page.source(ANSWER))
            shown = driver.find_element("tag name", "body").text
            assert "Nbgrader" not in shown, "an instructor's tool"
            assert "news" not in shown, "a question that has to be answered first"

            page.run_all("kernel", LAST)
            assert "not attempted" in page.output(CHECK)

            page.type(ANSWER, WRONG)
            page.run_all("failed", CHECK)

            page.type(ANSWER, RIGHT)
            page.run_all("passed", CHECK)
            wait(page.kernel, "the last cell has run")
            before = page.kernel()

            page.command("notebook:restart-run-all")
            wait(lambda: driver.find_elements("css selector", ".jp-Dialog .jp-mod-accept"), "it asks")[0].click()
            wait(lambda: page.kernel() not in (None, before), "another kernel has run all")
            assert "passed" in page.output(CHECK)

            page.command("docmanager:save")
            file = tmp_path / "workbook" / TOPIC.file
            wait(lambda: ".abs().mean()" in file.read_text(encoding="utf-8"), "it is saved")
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)

        lesson(tmp_path, "New title")
        with lab(book, tmp_path) as (address, _, log):
            assert "with what you wrote: " in log.read_text()
            assert "in place of yours" not in log.read_text(), "the file still says what was handed out"
            page = Page(driver, address)
            wait(lambda: "New title" in page.cells()[0].get_attribute("textContent"), "the new edition is shown")
            assert "".join(page.source(ANSWER)) == RIGHT
            page.run_all("passed", CHECK)
            assert "WARNING" not in log.read_text(), "a reader can do nothing about it"
