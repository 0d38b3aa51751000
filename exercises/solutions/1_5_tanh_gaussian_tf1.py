"""Solution of exercise 1.5.

For a = tanh(u), da/du = 1 - tanh(u)^2. Probability is conserved, p(a) |da| = p(u) |du|, so

    log p(a) = log N(u; mu, std^2) - log(1 - tanh(u)^2)

summed over the dimensions. Far out, 1 - tanh(u)^2 is 1 - 1 = 0 in float32 and its logarithm is
lost. With tanh written in exponentials,

    1 - tanh(u)^2 = 4 / (exp(u) + exp(-u))^2 = 4 exp(-2u) / (1 + exp(-2u))^2
    log(1 - tanh(u)^2) = 2 ( log 2 - u - softplus(-2u) ),   softplus(x) = log(1 + exp(x))

and frameworks compute softplus, and its gradient, without overflow.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

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
    z = (u - mu) / tf.exp(log_std)
    logp = -(0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi))
    logp = logp - 2 * (np.log(2) - u - tf.nn.softplus(-2 * u))
    return tf.reduce_sum(logp, 1)  # [B]


if __name__ == "__main__":
    check("tf1", tanh_gaussian_logp)
