"""MPI for both frameworks, under Spinning Up's names, and how a job ends on all ranks at once.

One process needs no launcher. Importing this module makes an exception on any rank end the whole
job: the other ranks would otherwise wait for the failed one in an Allreduce for ever.
"""

import atexit
import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a foreign launcher: check_launcher says it more clearly
    from mpi4py import MPI

comm = MPI.COMM_WORLD
# What launchers tell the processes they start: the number of ranks, and which one this is
LAUNCHERS = {
    "PMI_SIZE": "PMI_RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


def proc_id():
    """Return the rank of this process."""
    return comm.Get_rank()


def num_procs():
    """Return the number of ranks."""
    return comm.Get_size()


def allreduce(*args, **kwargs):
    """Reduce an array over all ranks into another, on every rank."""
    comm.Allreduce(*args, **kwargs)


def broadcast(x, root=0):
    """Overwrite the array x on every rank by the root's."""
    comm.Bcast(x, root=root)


def mpi_op(x, op):
    """Reduce a number or an array over all ranks; all but float32 arrays become float64."""
    x = np.asarray(x, order="C")
    x = x if x.ndim and x.dtype == np.float32 else x.astype(np.float64)
    out = np.empty_like(x)
    allreduce(x, out, op=op)
    return out if out.ndim else out.item()


def mpi_sum(x):
    """Sum a number or an array over all ranks."""
    return mpi_op(x, MPI.SUM)


def mpi_avg(x):
    """Average a number or an array over all ranks."""
    return mpi_sum(x) / num_procs()


def mpi_statistics_scalar(x, with_min_and_max=False):
    """Return mean and std (and min and max) of all ranks' numbers; NaN where no rank has any."""
    x = np.asarray(x, np.float64).ravel()
    total, n = mpi_sum([x.sum(), x.size])
    mean = total / n if n else np.nan
    with np.errstate(invalid="ignore"):  # of an infinite number the std is NaN
        std = np.sqrt(mpi_sum(np.sum((x - mean) ** 2)) / n) if n else np.nan
    if not with_min_and_max:
        return mean, std
    low = mpi_op(x.min(initial=np.inf), MPI.MIN)
    high = mpi_op(x.max(initial=-np.inf), MPI.MAX)
    return (mean, std, low, high) if n else (mean, std, np.nan, np.nan)


def per_rank(steps):
    """Return this rank's share of an epoch's steps."""
    if steps % num_procs():
        fail(f"--steps-per-epoch {steps} cannot be divided among {num_procs()} ranks")
    return steps // num_procs()


def mpi_fork(n):
    """Start this script again under `mpirun -np n`, unless n is one or this is an MPI job."""
    if n <= 1 or num_procs() > 1 or not {*LAUNCHERS, "PMIX_RANK"}.isdisjoint(os.environ):
        return
    # The launcher beside the interpreter is the one that this environment's mpi4py belongs to.
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    if mpirun is None:
        fail("--cpu needs mpirun: install the packages of requirements.txt")
    os.execv(mpirun, [mpirun, "-np", str(n), sys.executable, *sys.argv])


def check_launcher():
    """Stop if the launcher is of another MPI: each process would take itself for the only one."""
    for size, rank in LAUNCHERS.items():
        started = os.environ.get(size, "1")
        if started != "1" and num_procs() == 1:
            if os.environ.get(rank, "0") == "0":
                library = " ".join(MPI.Get_library_version().split("\n")[0].split())
                print_line(
                    f"error: {started} processes were started, but each takes itself for the only "
                    f"one: the launcher is not of this Python's MPI, {library}"
                )
            sys.exit(2)


def is_terminal(stream):
    """Tell whether a stream is a terminal; one that was closed is None."""
    return stream is not None and stream.isatty()


def print_out(text, end="\n"):
    """Print on stdout, and stop if that cannot be written to."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        raise Stopped(f"cannot write to stdout: {error.strerror}") from error


def print_line(message):
    """Print a line about this script on stderr, whatever progress line the terminal shows."""
    clear = "\r\x1b[K" if is_terminal(sys.stdout) and is_terminal(sys.stderr) else ""
    message = message.replace("\n", " ")
    print(f"{clear}{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)


def warn(message):
    """Print a warning, once; every rank may call it."""
    if proc_id() == 0:
        print_line(f"warning: {message}")


def fail(message, code=2):
    """End with one sentence on what the user can mend, printed once; every rank must call it."""
    if proc_id() == 0:
        print_line(f"error: {message}")
    sys.exit(code)


class Stopped(Exception):
    """One rank has found out that the run cannot go on; the message says why."""


class _Run:
    """What there is to say about the run under way when it ends before its time."""

    epoch, resume_argv, writing, signal = None, None, False, None

    def where(self):
        return "" if self.epoch is None else f" in epoch {self.epoch}"

    def how_to_go_on(self):
        return f"; to go on: {shlex.join(self.resume_argv)}" if self.resume_argv else ""


run = _Run()


@contextlib.contextmanager
def writing(folder):
    """Put off interrupts until what is being written is whole; stop if it cannot be written."""
    run.writing = True
    try:
        yield
    except OSError as error:
        raise Stopped(f"cannot write to {folder}: {error.strerror or error}") from error
    finally:
        run.writing = False
    if run.signal:
        _interrupt(run.signal, None)


def end_together():
    """Make signals, and a rank that exits alone, end the whole job; every rank must call it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    if num_procs() > 1:
        atexit.register(_exit_together, comm.Dup())


def _interrupt(number, frame):
    if run.writing:
        run.signal = number
        return
    _let_rank_0_speak()
    print_line(f"interrupted{run.where()}{run.how_to_go_on()}")
    _end_job(128 + number)


def _exit_together(spare_comm):
    barrier, deadline = spare_comm.Ibarrier(), time.time() + 5
    while not barrier.Test():
        if time.time() > deadline:
            print_line(f"error: rank {proc_id()} has exited alone{run.how_to_go_on()}")
            _end_job(1)
        time.sleep(0.01)


def _end_all_ranks(kind, value, trace):
    _let_rank_0_speak()
    if isinstance(value, BrokenPipeError):  # as of `| head`: nobody wants to read more
        _end_job(128 + signal.SIGPIPE)
    if isinstance(value, MemoryError) or "DefaultCPUAllocator" in str(value):
        print_line(f"error: not enough memory: {value}")
        _end_job(2)
    if isinstance(value, Stopped):
        print_line(f"error: stopped{run.where()}: {value}{run.how_to_go_on()}")
        _end_job(1)
    if num_procs() > 1:
        print_line(f"error: rank {proc_id()} of {num_procs()} failed and ends the job:")
    sys.__excepthook__(kind, value, trace)
    if num_procs() > 1:
        _end_job(1)


def _let_rank_0_speak():
    """Wait, so that what befalls all ranks at once is said once."""
    if proc_id() > 0:
        time.sleep(3)


def _end_job(code):
    if num_procs() > 1:
        time.sleep(1)  # for the launcher to pass on what was printed: Abort ends it too
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what MPI would add helps nobody
        comm.Abort(code)
    os._exit(code)


sys.excepthook = _end_all_ranks
