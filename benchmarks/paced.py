"""Environments that stop after every window of steps: how speed.py times any program the same way.

`paced:PacedHopper-v4` is Hopper-v4, but its first step, and the first step after each window, waits
for a signal from speed.py. A window therefore contains all the work for that many steps, whatever a
program does between them, and programs that take turns do not disturb each other. The programs need
no changes.
"""

import os
import time
import warnings
from multiprocessing.connection import Client

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

WAITS = {"skew": 0.0, "exchange": 0.0}  # seconds of this window


def time_waits():
    """Time how long reductions wait for slower ranks, and how long the reductions themselves take.

    A barrier before each reduction tells the two apart. It takes time itself: measure no speed.
    """
    from common import mpi

    mpi_op = mpi.mpi_op

    def timed(x, op):
        start = time.perf_counter()
        mpi.comm().Barrier()
        all_there = time.perf_counter()
        result = mpi_op(x, op)
        WAITS["skew"] += all_there - start
        WAITS["exchange"] += time.perf_counter() - all_there
        return result

    mpi.mpi_op = timed


if "TIME_WAITS" in os.environ:
    time_waits()


class Paced(gym.Wrapper):
    """Connects to speed.py at its first step, so test environments, never stepped, do not."""

    connection, left = None, 0

    def step(self, a):
        if self.left == 0:
            self.end_window()
        self.left -= 1
        self.actions.append(a)
        return self.env.step(a)

    def end_window(self):
        """Report the window that ends here, if any, and wait for the next."""
        end = time.perf_counter()
        if self.connection is None:
            self.connection = Client(os.environ["PACE"])
        else:
            actions, waits = np.array(self.actions), dict(WAITS)
            self.connection.send((self.start, end, actions, resident_bytes(), waits))
        self.left, self.actions = self.connection.recv(), []
        WAITS.update(skew=0.0, exchange=0.0)
        self.start = time.perf_counter()


class Blank(gym.Env):
    """Hopper's spaces with nothing behind them, to measure the cost of the scripts alone."""

    observation_space = Box(-np.inf, np.inf, (11,), np.float64)
    action_space = Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(11), {}

    def step(self, a):
        return np.zeros(11), 1.0, False, False, {}


def resident_bytes():
    """Return how much memory this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def paced(env_id):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a newer version
        # Gymnasium will add its wrappers around this one, so remove the inner ones.
        return Paced(gym.make(env_id).unwrapped)


for env_id in ("Hopper-v4", "HalfCheetah-v4"):
    gym.register(
        f"Paced{env_id}", entry_point=lambda env_id=env_id: paced(env_id), max_episode_steps=1000
    )
for length in (10, 100, 1000):
    gym.register(
        f"PacedBlank{length}-v0", entry_point=lambda: Paced(Blank()), max_episode_steps=length
    )
