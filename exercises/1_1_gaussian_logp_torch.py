"""Exercise 1.1: the log-likelihood of a diagonal Gaussian, in PyTorch.

VPG, PPO and TRPO need log pi(a|o) for every step of an epoch. For continuous actions, pi(.|o) is a
Gaussian with a mean and a standard deviation for each action dimension, all independent of each
other. Write its log-density for a whole batch, with tensor operations and no loops. Derive it on
paper; calling torch.distributions would teach you little.

Fill the gap, then run this file to check it:

    python exercises/1_1_gaussian_logp_torch.py
"""

import numpy as np
import torch
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
    check("torch", gaussian_logp)
