"""What is said to the user: one exception for every mistake, and warnings that are printed once."""

import sys
from pathlib import Path

from common.mpi import proc_id

command_line = False  # launch() sets it: mistakes are then told in terms of flags


class SidespinError(Exception):
    """A mistake or a failure that one sentence explains.

    On the command line it ends the program with that sentence and the exit code: 2 if nothing was
    started, 1 if a run had to stop.
    """

    def __init__(self, sentence, exit_code=2):
        super().__init__(sentence)
        self.exit_code = exit_code


def flag(name):
    """Spell an argument as the user does: --clip-ratio on the command line, else clip_ratio."""
    return f"--{name.replace('_', '-')}" if command_line else name


def warn(message):
    """Print a warning, once; every rank may call it."""
    if proc_id() == 0:
        print_line(f"warning: {message}")


def print_line(message):
    """Print a line about this program to stderr."""
    program = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
    program = f"{Path(program).name}: " if program else ""
    print(f"{program}{' '.join(message.split())}", file=sys.stderr, flush=True)
