"""Exercise 1.1: the log-likelihood of a diagonal Gaussian, in TensorFlow 1 style.

VPG, PPO and TRPO need log pi(a|o) for every step of an epoch. For continuous actions, pi(.|o) is a
Gaussian with a mean and a standard deviation for each action dimension, all independent of each
other. Write its log-density for a whole batch, with tensor operations and no loops. Derive it on
paper; calling tf.distributions would teach you little.

Fill the gap, then run this file to check it:

    python exercises/1_1_gaussian_logp_tf1.py
"""

import os

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf
from checks.gaussian_logp import check


def gaussian_logp(a, mu, log_std):
    """Return log N(a; mu, std^2) for each row: float32, [B].

    a        [B, n]            actions
    mu       [B, n]            means
    log_std  [n] or [B, n]     logarithms of the standard deviations
    """
    # ---- your code: from here
    raise NotImplementedError("fill this gap")
    # ---- to here


if __name__ == "__main__":
    check("tf1", gaussian_logp)
