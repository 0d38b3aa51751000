"""Exercise 1.2: a Gaussian policy that makes PPO learn, in TensorFlow 1 style.

Write the policy of PPO for continuous actions: a Gaussian whose mean is the output of a network.
Its standard deviations are parameters of their own, one per action dimension, the same for all
observations. The script uses it in two ways. The update calls dist, logp and entropy on batches of
tensors, and differentiates logp. The loop calls act for one observation at a time, in NumPy, which
is faster; params are then the values of the variables in self.state, in its order.

The check tests each method, then puts your class into ppo_tf1.py and trains on
InvertedPendulum-v4. That takes less than a minute.

Fill the gap, which is the body of the class, then run this file to check it:

    python exercises/1_2_gaussian_policy_tf1.py
"""

import os

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf
from checks.gaussian_policy import check

from ppo_tf1 import MLP, mlp_numpy  # MLP(name, sizes, rng), and the same network in NumPy


class GaussianPolicy:
    """pi(a|o) over continuous actions: a Gaussian; mean from an MLP, std independent of o."""

    # ---- your code: from here
    def __init__(self, obs_dim, act_dim, hidden_sizes, rng):
        """Make the network, with weights drawn from rng, and log_std [n], which starts at -0.5.

        Set self.params to the variables to train, and self.state to those that NumPy needs: here,
        both are the same list. The variables of the network are its params.
        """
        raise NotImplementedError("fill this gap")

    def dist(self, o):
        """Return mu [B, n] and log_std [n] for observations [B, obs_dim]."""
        raise NotImplementedError("fill this gap")

    def logp(self, dist, a):
        """Return log pi(a|o) [B] for actions [B, n]; dist is what dist(o) returned."""
        raise NotImplementedError("fill this gap")

    def entropy(self, dist):
        """Return the entropy of pi(.|o) [B]; for a Gaussian it does not depend on the mean."""
        raise NotImplementedError("fill this gap")

    @staticmethod
    def dist_numpy(params, o):
        """Return mu [n] and log_std [n] for one observation [obs_dim], in NumPy."""
        raise NotImplementedError("fill this gap")

    @classmethod
    def act(cls, params, o, rng=None):
        """Draw an action [n] in NumPy, float32; without rng, take the mean."""
        raise NotImplementedError("fill this gap")

    # ---- to here


if __name__ == "__main__":
    check("tf1", GaussianPolicy)
