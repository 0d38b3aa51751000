"""Solution of exercise 1.2.

log_std must be in params, or no optimizer would see it. In state it comes first, before the
network; dist_numpy relies on that order. The script's own policy has more in its state: the units
of the observations, for --norm.

The entropy of a Gaussian is log(std) + 1/2 log(2 pi e) per dimension. It is the same for each row,
but has to be [B] like logp. Noise in float32 keeps the action in float32.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf
from checks.gaussian_policy import check

from ppo_tf1 import MLP, mlp_numpy


class GaussianPolicy:
    """pi(a|o) over continuous actions: a Gaussian; mean from an MLP, std independent of o."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, rng):
        """Make the network, with weights drawn from rng, and log_std [n], which starts at -0.5.

        Set self.params to the variables to train, and self.state to those that NumPy needs: here,
        both are the same list. The variables of the network are its params.
        """
        init = np.full(act_dim, -0.5, np.float32)
        self.log_std = tf.get_variable("pi/log_std", initializer=init)
        self.net = MLP("pi", [obs_dim, *hidden_sizes, act_dim], rng)
        self.params = self.state = [self.log_std, *self.net.params]

    def dist(self, o):
        """Return mu [B, n] and log_std [n] for observations [B, obs_dim]."""
        return self.net(o), self.log_std

    def logp(self, dist, a):
        """Return log pi(a|o) [B] for actions [B, n]; dist is what dist(o) returned."""
        mu, log_std = dist
        z = (a - mu) / tf.exp(log_std)
        return -tf.reduce_sum(0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi), 1)  # [B]

    def entropy(self, dist):
        """Return the entropy of pi(.|o) [B]; for a Gaussian it does not depend on the mean."""
        mu, log_std = dist
        entropy = tf.reduce_sum(log_std + 0.5 * np.log(2 * np.pi * np.e), -1)
        return tf.broadcast_to(entropy, tf.shape(mu)[:1])  # [B]

    @staticmethod
    def dist_numpy(params, o):
        """Return mu [n] and log_std [n] for one observation [obs_dim], in NumPy."""
        log_std, *layers = params
        return mlp_numpy(layers, o), log_std

    @classmethod
    def act(cls, params, o, rng=None):
        """Draw an action [n] in NumPy, float32; without rng, take the mean."""
        mu, log_std = cls.dist_numpy(params, o)
        noise = 0 if rng is None else rng.standard_normal(mu.size, np.float32)
        return mu + np.exp(log_std) * noise


if __name__ == "__main__":
    check("tf1", GaussianPolicy)
