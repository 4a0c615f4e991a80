"""Make the student edition in workbook/ and open JupyterLab there, on its start page. Options that aren't listed
here go to JupyterLab, e.g. --no-browser or --port 8889.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import urllib.parse
import webbrowser
from pathlib import Path

from course import syllabus, workbook
from course.environment import ROOT, say
from course.files import NotWritableError
from course.processes import share_of_cores, subprocess_status

TAKES_EXTRA_ARGUMENTS = True
SETTINGS = Path(__file__).with_name("lab_settings")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=ROOT / "workbook", help="folder (default: workbook)")


def main(args: argparse.Namespace) -> int:
    """Make the workbook and run JupyterLab until it is ended; returns its exit status."""
    try:
        # a notebook that can't be made is named; the others can be worked on
        book = syllabus.load()
        notebooks = workbook.finished(book)
        workbook.require_folder(args.output, notebooks)
        workbook.make(notebooks, args.output)
        page = workbook.make_start_page(book, args.output).resolve()
    except (syllabus.SyllabusError, NotWritableError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    if address := running(page):
        print(f"JupyterLab is already running in {page.parent}: {address}")
        if "--no-browser" not in args.extra:
            webbrowser.open(address)
        return 0
    say("JupyterLab starts. Ctrl+C here, twice, ends it. Its address, in case no browser opens:")
    command = [
        sys.executable, "-m", "jupyterlab", "--log-level=ERROR", "--LabApp.log_level=ERROR",
        f"--ServerApp.root_dir={page.parent}", f"--LabApp.default_url=/lab/tree/{page.name}", *args.extra,
    ]  # fmt: skip
    environment = {
        **os.environ,
        **share_of_cores(1),
        "JUPYTER_PREFER_ENV_PATH": "1",  # this Python's kernel goes before one of that name that a user installed
        # which leaves out the question about news, and nbgrader's buttons, which are for instructors: *Validate* finds
        # nothing wrong with what nobody has tried
        "JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, [str(SETTINGS), os.environ.get("JUPYTER_CONFIG_PATH")])),
        # which tabs are open is kept in the folder, so that it doesn't open those of another one
        "JUPYTERLAB_WORKSPACES_DIR": str(page.parent / ".jupyterlab"),
    }
    status = subprocess_status(command, environment)
    say(f"JupyterLab has ended. Your answers are in {page.parent}.")
    return status


def running(page: Path) -> str:
    """The page's address at a server that has the page's folder open already and answers; "" if there is none.

    With a second server two tabs could save the same file.
    """
    from jupyter_server.serverapp import list_running_servers  # here: importing it takes seconds

    for server in list_running_servers():
        if Path(server["root_dir"]).resolve() == page.parent:
            with contextlib.suppress(OSError):
                host = urllib.parse.urlsplit(server["url"]).hostname
                socket.create_connection((host, server["port"]), timeout=3).close()
                return f"{server['url']}lab/tree/{page.name}?token={server['token']}"
    return ""
