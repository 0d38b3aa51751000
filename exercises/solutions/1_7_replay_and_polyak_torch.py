"""Solution of exercise 1.7.

The ring needs two numbers: where to write next, modulo the size, and how many rows are filled.
Until the buffer is full, only these may be drawn: the rest are zeros. One vector of indices serves
all five arrays, so that the parts of a transition stay together. Indexing with it makes a copy.

The targets are updated in place, because the target networks hold these very tensors. no_grad keeps
the updates out of the graph; without it, PyTorch refuses to change a parameter. lerp_ is
targ + weight (net - targ), in one pass over memory.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

import numpy as np
import torch
from checks.replay import check


class ReplayBuffer:
    """The most recent transitions, at most as many as size."""

    def __init__(self, obs_dim, act_dim, size):
        self.o, self.o2 = np.zeros((2, size, obs_dim), np.float32)
        self.a = np.zeros((size, act_dim), np.float32)
        self.r, self.d = np.zeros((2, size), np.float32)
        self.ptr, self.size, self.max_size = 0, 0, size  # where to write next; how many are stored

    def store(self, o, a, r, o2, d):
        """Keep a transition; if the buffer is full, in place of the oldest one."""
        self.o[self.ptr], self.a[self.ptr], self.r[self.ptr] = o, a, r
        self.o2[self.ptr], self.d[self.ptr] = o2, d
        self.ptr = (self.ptr + 1) % self.max_size
        self.size = min(self.size + 1, self.max_size)

    def sample_batch(self, batch_size, rng):
        """Return o [B, obs_dim], a [B, act_dim], r [B], o2 [B, obs_dim], d [B], drawn with rng.

        rng is a NumPy generator, and the only source of randomness.
        """
        i = rng.integers(self.size, size=batch_size)
        return self.o[i], self.a[i], self.r[i], self.o2[i], self.d[i]


def update_targets(target_params, params, polyak):
    """Move each target one step towards its network, in place; both are lists of parameters."""
    with torch.no_grad():
        for x_targ, x in zip(target_params, params):
            x_targ.lerp_(x, 1 - polyak)


if __name__ == "__main__":
    check("torch", ReplayBuffer, update_targets)
