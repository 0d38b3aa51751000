"""Messages for the user: one exception type for every mistake, and warnings printed once."""

import shlex
import sys
from pathlib import Path

from common.mpi import proc_id

command_line = False  # set by launch(): messages then name flags, not Python arguments
launcher = []  # set by launch(): the command that started several ranks, such as mpirun -np 4


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


def resume_command():
    """Return the command that resumes this program's run, or the call if it began in Python."""
    if not command_line:
        return "main(Args(..., resume=True))"
    own = [word for word in sys.argv if word not in ("--resume", "--overwrite")]
    return shlex.join([*launcher, "python", *own, "--resume"])


def plural(n, noun):
    """Return "1 epoch", "2 epochs" or "1-3 epochs"."""
    return f"{n} {noun}{'s' * (str(n) != '1')}"


def warn(message):
    """Print a warning on rank 0; every rank may call this."""
    if proc_id() == 0:
        print_line(f"warning: {message}")


def print_line(message):
    """Print a line about this program to stderr."""
    program = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
    program = f"{Path(program).name}: " if program else ""
    print(f"{program}{' '.join(message.split())}", file=sys.stderr, flush=True)
