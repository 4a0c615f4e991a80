"""Make the student edition in workbook/ and open JupyterLab there, on its start page.

A topic (15-07) opens its notebook instead of the start page. Options that aren't listed here go to JupyterLab, e.g.
--no-browser or --port 8889.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
import webbrowser
from pathlib import Path

from course import syllabus, workbook
from course.environment import ROOT, say
from course.files import NotWritableError
from course.processes import subprocess_status
from course.selection import SelectionError, select
from course.settings import SettingError, check_settings

TAKES_EXTRA_ARGUMENTS = True
SETTINGS = Path(__file__).with_name("lab_settings")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=ROOT / "workbook", help="folder (default: workbook)")


def main(args: argparse.Namespace) -> int:
    """Make the workbook and run JupyterLab until it is ended; returns its exit status."""
    if importlib.util.find_spec("jupyterlab") is None:
        print("JupyterLab is not installed in this Python: pip install jupyter", file=sys.stderr)
        return 1
    try:
        # a notebook that can't be made is named; the others can be worked on
        book = syllabus.load()
        topics = [argument for argument in args.extra if re.fullmatch(r"\d+-\d+", argument)]
        named = select(topics, book) if topics else []
        for notebook in named:
            if not notebook.path.is_file():
                raise SelectionError(f"{notebook.label} is not written yet: python -m course new {notebook.label}")
        notebooks = list(dict.fromkeys([*workbook.finished(book), *named]))
        check_settings()
        workbook.require_folder(args.output, notebooks)
        workbook.make(notebooks, args.output)
        page = workbook.make_start_page(book, args.output)
    except (SelectionError, SettingError, syllabus.SyllabusError, NotWritableError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    first = args.output / named[0].path.name if named else page
    first = first if first.is_file() else page
    extra = [argument for argument in args.extra if argument not in topics]
    if address := running(first):
        print(f"JupyterLab is already running in {first.resolve().parent}: {address}")
        if "--no-browser" not in extra:
            webbrowser.open(address)
        return 0
    say("JupyterLab starts. Ctrl+C here ends it. Its address, in case no browser opens:")
    return subprocess_status(command(first, extra), environment(args.output.resolve()))


def running(page: Path) -> str:
    """The page's address at a server that has the page's folder open already and answers; "" if there is none.

    With a second server two tabs could save the same file.
    """
    from jupyter_server.serverapp import list_running_servers  # here: importing it takes seconds

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would answer in its place
    for server in list_running_servers():
        if Path(server["root_dir"]).resolve() != page.resolve().parent:
            continue
        try:
            opener.open(f"{server['url']}api", timeout=3).close()
        except urllib.error.HTTPError:
            pass  # it wants a password: that is an answer, too
        except (OSError, http.client.HTTPException):
            continue
        token = f"?token={server['token']}" if server["token"] else ""
        return f"{server['url']}lab/tree/{urllib.parse.quote(page.name)}{token}"
    return ""


def command(page: Path, extra: list[str]) -> list[str]:
    """The command line that opens JupyterLab in the page's folder, on the page. It logs errors and its address."""
    folder, url = page.resolve().parent, f"/lab/tree/{page.name}"
    quiet = ["--log-level=ERROR", "--LabApp.log_level=ERROR"]
    settings = [f"--ServerApp.root_dir={folder}", f"--LabApp.default_url={url}"]
    return [sys.executable, "-m", "jupyterlab", *quiet, *settings, *extra]


def environment(folder: Path) -> dict[str, str]:
    """JupyterLab's environment variables, if it is opened in that folder.

    This Python's kernel goes before one of that name that a user installed. lab_settings leaves out the question about
    news, and nbgrader's buttons, which are for instructors: *Validate* finds nothing wrong with what nobody has tried.
    Which tabs are open is kept in the folder, so that it doesn't open those of another one.
    """
    settings = [str(SETTINGS), *filter(None, os.environ.get("JUPYTER_CONFIG_PATH", "").split(os.pathsep))]
    workspaces = folder / ".jupyterlab"
    return {
        **os.environ,
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_CONFIG_PATH": os.pathsep.join(settings),
        "JUPYTERLAB_WORKSPACES_DIR": os.environ.get("JUPYTERLAB_WORKSPACES_DIR", str(workspaces)),
    }
