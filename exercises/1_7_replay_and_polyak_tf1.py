"""Exercise 1.7: the replay buffer and Polyak averaging, in TensorFlow 1 style.

DDPG, TD3 and SAC learn from stored transitions. The replay buffer is a ring: when it is full, each
new transition replaces the oldest one. A batch is drawn from what is stored, uniformly and with
replacement, so it may be larger than the buffer.

The same algorithms compute targets with slow copies of their networks, which follow by

    targ = polyak targ + (1 - polyak) net

Fill the gap, which holds two methods and a function, then run this file to check it:

    python exercises/1_7_replay_and_polyak_tf1.py
"""

import os

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf
from checks.replay import check


class ReplayBuffer:
    """The most recent transitions, at most as many as size."""

    def __init__(self, obs_dim, act_dim, size):
        self.o, self.o2 = np.zeros((2, size, obs_dim), np.float32)
        self.a = np.zeros((size, act_dim), np.float32)
        self.r, self.d = np.zeros((2, size), np.float32)
        self.ptr, self.size, self.max_size = 0, 0, size  # where to write next; how many are stored

    # ---- your code: from here
    def store(self, o, a, r, o2, d):
        """Keep a transition; if the buffer is full, in place of the oldest one."""
        raise NotImplementedError("fill this gap")

    def sample_batch(self, batch_size, rng):
        """Return o [B, obs_dim], a [B, act_dim], r [B], o2 [B, obs_dim], d [B], drawn with rng.

        rng is a NumPy generator, and the only source of randomness.
        """
        raise NotImplementedError("fill this gap")


def update_targets(targets, params, polyak):
    """Return what moves each target one step towards its network when a session runs it.

    Both are lists of variables.
    """
    raise NotImplementedError("fill this gap")
    # ---- to here


if __name__ == "__main__":
    check("tf1", ReplayBuffer, update_targets)
