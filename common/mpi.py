"""Ranks and reductions for both frameworks, under Spinning Up's names.

A single process needs no launcher. MPI starts at the first call, not on import.
"""

import functools
import os
import warnings

import numpy as np


@functools.cache
def comm():
    """Return the communicator of all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a foreign launcher: launch.py explains it better
        from mpi4py import MPI
    return MPI.COMM_WORLD


def proc_id():
    """Return the rank of this process."""
    return comm().Get_rank()


def num_procs():
    """Return the number of ranks."""
    return comm().Get_size()


@functools.cache
def hosts():
    """Return the host of each rank, as the launcher names it; all ranks make the first call."""
    from mpi4py import MPI

    return comm().allgather(os.environ.get("PMI_HOSTNAME") or MPI.Get_processor_name())


def broadcast(x, root=0):
    """Overwrite the array x on every rank with the root's."""
    comm().Bcast(x, root=root)


def mpi_op(x, op):
    """Reduce a number or an array over all ranks; anything but a float32 array becomes float64."""
    from mpi4py import MPI

    x = np.asarray(x, order="C")
    x = x if x.ndim and x.dtype == np.float32 else x.astype(np.float64)
    out = np.empty_like(x)
    comm().Allreduce(x, out, op=getattr(MPI, op))
    return out if out.ndim else out.item()


def mpi_sum(x):
    """Sum a number or an array over all ranks."""
    return mpi_op(x, "SUM")


def mpi_avg(x):
    """Average a number or an array over all ranks."""
    return mpi_sum(x) / num_procs()


def mpi_statistics_scalar(x, with_min_and_max=False):
    """Return mean and std (and min and max) over all ranks; NaN if no rank has any numbers."""
    x = np.asarray(x, np.float64).ravel()
    total, n = mpi_sum([x.sum(), x.size])
    mean = total / n if n else np.nan
    with np.errstate(invalid="ignore"):  # the std of an infinite number is NaN
        std = np.sqrt(mpi_sum(np.sum((x - mean) ** 2)) / n) if n else np.nan
    if not with_min_and_max:
        return mean, std
    low = mpi_op(x.min(initial=np.inf), "MIN")
    high = mpi_op(x.max(initial=-np.inf), "MAX")
    return (mean, std, low, high) if n else (mean, std, np.nan, np.nan)


def first_problem(problem):
    """Return on every rank the first problem of any rank, or None, so that all decide alike."""
    return next(filter(None, comm().allgather(problem)), None)
