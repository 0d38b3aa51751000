"""Solution of exercise 1.1.

The density of one dimension is exp(-z^2 / 2) / (std sqrt(2 pi)) with z = (a - mu) / std. Its
logarithm is taken on paper: exp(-z^2 / 2) underflows beyond |z| = 14 in float32. Independent
dimensions multiply, so their log-densities add up.

Parameterising by log_std keeps the standard deviation positive without a constraint. Adding a small
number to it against division by zero would be wrong for tiny ones, and is not needed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

import numpy as np
import torch
from checks.gaussian_logp import check


def gaussian_logp(a, mu, log_std):
    """Return log N(a; mu, std^2) for each row: float32, [B].

    a        [B, n]            actions
    mu       [B, n]            means
    log_std  [n] or [B, n]     logarithms of the standard deviations
    """
    z = (a - mu) / torch.exp(log_std)
    logp = -(0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi))
    return torch.sum(logp, 1)  # [B]


if __name__ == "__main__":
    check("torch", gaussian_logp)
