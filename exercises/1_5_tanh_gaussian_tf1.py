"""Exercise 1.5: the log-probability of a squashed Gaussian, in TensorFlow 1 style.

SAC draws u from a Gaussian and acts with a = tanh(u), which lies between -1 and 1. It needs the
log-density of a, not of u: where tanh is flat, many u become nearly the same a, so a is denser than
u. Write the log-density of a = tanh(u), given u.

In float32, tanh(u) is exactly 1 for u > 9, and policies do go there. Your answer must be right for
such u, too, and so must its gradient. Neither clipping nor adding a small number will do.

Fill the gap, then run this file to check it:

    python exercises/1_5_tanh_gaussian_tf1.py
"""

import os

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf
from checks.tanh_gaussian import check


def tanh_gaussian_logp(u, mu, log_std):
    """Return the log-density of a = tanh(u), where u ~ N(mu, std^2), for each row: float32, [B].

    u        [B, n]     what was drawn from the Gaussian, before tanh
    mu       [B, n]     means of the Gaussian
    log_std  [B, n]     logarithms of its standard deviations
    """
    # ---- your code: from here
    raise NotImplementedError("fill this gap")
    # ---- to here


if __name__ == "__main__":
    check("tf1", tanh_gaussian_logp)
