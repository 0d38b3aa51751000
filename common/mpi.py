"""MPI for both frameworks, under Spinning Up's names; one process needs no launcher.

Importing this module makes an exception on any rank end the whole job: the other ranks would
otherwise wait for the failed one in an Allreduce for ever.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD


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
    launched = not {"PMI_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE"}.isdisjoint(os.environ)
    if n <= 1 or launched or num_procs() > 1:
        return
    # The launcher beside the interpreter is the one that this environment's mpi4py belongs to.
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    if mpirun is None:
        fail("--cpu needs mpirun: install the packages of requirements.txt")
    os.execv(mpirun, [mpirun, "-np", str(n), sys.executable, *sys.argv])


def fail(message, code=2):
    """End with one sentence on what the user can mend, printed once; every rank must call it."""
    if proc_id() == 0:
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def _end_all_ranks(kind, value, trace):
    print(f"rank {proc_id()} of {num_procs()} failed and ends the job:", file=sys.stderr)
    sys.__excepthook__(kind, value, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(1)  # for the launcher to pass all of that on: Abort ends it too
    comm.Abort(1)


if num_procs() > 1:
    sys.excepthook = _end_all_ranks
