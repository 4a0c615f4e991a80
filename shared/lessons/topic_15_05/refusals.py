"""What TorchScript refuses, for 15-05: the line of its error that counts, and whether a rewritten version will do."""

from collections.abc import Callable

import torch

from shared.quiet import quiet
from shared.text import wrapped


def refused(*functions: Callable) -> None:
    """Script each function and print the decisive line of its refusal. Raises AssertionError if one is accepted."""
    for function in functions:
        try:
            with quiet():
                torch.jit.script(function)
        except Exception as error:  # the types differ between constructs and versions
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            decisive = (line for line in lines if line.startswith(("Expected a value", "Could not match")))
            print(wrapped(f"{function.__name__}: {type(error).__name__}: {next(decisive, lines[0])}", lines=2))
        else:
            raise AssertionError(f"{function.__name__} was accepted")


def repaired(bad: Callable, good: Callable, *args: object) -> None:
    """Script the good function. Raises AssertionError if it doesn't return what the bad one does in Python."""
    with quiet():
        compiled = torch.jit.script(good)
    torch.testing.assert_close(compiled(*args), bad(*args))
    print(f"{good.__name__} is accepted, agrees: True")
