"""`python -m course COMMAND`: what people and CI call.

Only the standard library is imported here, so that a clone needs nothing but a Python: the first command makes the
environment (course/environment.py) and starts itself again in it. The commands are modules of the same name with
`add_arguments(parser)` and `main(args) -> int`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from course import environment

COMMANDS = {
    "setup": "make the environment in .venv, or bring it up to date, and do nothing else",
    "run": "execute the notebooks, two at a time, and show a table of how they did",
    "test": "run all tests: the notebooks (nbval), shared, course, the checks, both editions",
    "lab": "make the student edition in workbook/ and open it in JupyterLab",
    "workbook": "make the student edition in workbook/, or renew it with your answers in it",
    "release": "write the bundles that are handed out to students and to instructors into dist/",
    "site": "build the web site from the stored outputs into site/: to read before anything is installed",
    "grade": "grade a folder of submissions: a table, feedback pages and a summary",
    "data": "say which data sets are here; fetch the full ones",
    "lint": "hold the notebooks against the syllabus and their templates",
    "mutate": "change the answers in small ways and see which changes the checks accept",
    "new": "make a new notebook from a template",
    "clean": "remove executed/ and caches; --all also the environment",
    "help": "show this list, or with a command's name its options",
}
USAGE = """\
usage: python -m course COMMAND [OPTIONS]

{commands}

The first command sets the environment up. `python -m course help COMMAND` shows a command's options.

  COURSE_ENV=current       use this Python and what it has, install nothing
  COURSE_TORCH_INDEX=URL   take torch and torchvision from that index (smaller CPU-only wheels, another CUDA)
  COURSE_DATA=sample|full|auto       which data the notebooks use
  COURSE_DATA_DIR=FOLDER             where the full data sets are, or go
  COURSE_DATA_MIRROR=URL|FOLDER      where they are looked for first
  COURSE_DEVICE=cpu|cuda|cuda:N|mps  the device of the notebooks; default: the best there is""".format(
    commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
)


def run_command(command: str, arguments: list[str]) -> int:
    """Import the command's module and run it; called in the environment."""
    module = importlib.import_module("course." + command)
    parser = argparse.ArgumentParser(
        prog="python -m course " + command, description=module.__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    module.add_arguments(parser)
    # a command that hands arguments on to another program (pytest, JupyterLab) finds them in args.extra
    if getattr(module, "TAKES_EXTRA_ARGUMENTS", False):
        args, args.extra = parser.parse_known_args(arguments)
    else:
        args = parser.parse_args(arguments)
    return module.main(args)


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status (2: wrong usage, 130: interrupted)."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this very check is for the Pythons that are too old
        sys.stderr.write(
            f"This course needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable}).\n"
            "Install a newer one and name it, e.g.:  python3.12 -m course lab   or   make lab PYTHON=python3.12\n"
        )
        return 2
    for stream in (sys.stdout, sys.stderr):  # a console that can't show a sign must not end a run
        stream.reconfigure(errors="replace")
    command, *arguments = arguments or ["help"]
    if command in ("-h", "--help", "help"):
        command, arguments = (arguments or ["help"])[0], ["--help"]
    if command == "help":
        print(USAGE)
        return 0
    if command not in COMMANDS:
        sys.stderr.write(f"There is no command '{command}'.\n\n{USAGE}\n")
        return 2
    try:
        return _in_environment(command, arguments)
    except environment.SetupError as error:
        sys.stderr.write(f"\n{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 130


def _in_environment(command: str, arguments: list[str]) -> int:
    """Run a command, in the environment if it needs that. Raises SetupError."""
    asks = bool({"-h", "--help"} & set(arguments))
    if asks and (command == "setup" or not environment.is_there()):  # to ask must install nothing
        print(f"{command}: {COMMANDS[command]}\n\nIts options, if any, are shown once `setup` has been run.")
        return 0
    if command == "setup" and arguments:
        sys.stderr.write(f"setup has no options, so it can't use {' '.join(arguments)}.\n")
        return 2
    if command == "site" and importlib.util.find_spec("sphinx_book_theme"):
        return run_command(command, arguments)
    if command == "site" and not environment.is_there():  # whoever wants to look first must not wait for PyTorch
        raise environment.SetupError(environment.SITE_ADVICE)
    # JupyterLab says so, too, but after the set-up and without the form that make needs
    if command == "lab" and not asks and getattr(os, "geteuid", lambda: 1)() == 0 and "--allow-root" not in arguments:
        sys.stderr.write('JupyterLab doesn\'t run as root unless it is told to: make lab ARGS="--allow-root"\n')
        return 2
    if command != "clean" and (status := environment.enter(command, arguments)) is not None:
        return status
    if command == "setup":
        print(f"The environment is ready: {sys.prefix}, Python {sys.version.split()[0]}")
        return 0
    return run_command(command, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
