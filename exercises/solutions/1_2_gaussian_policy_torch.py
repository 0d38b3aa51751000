"""Solution of exercise 1.2.

log_std must be a Parameter, or no optimizer would see it. It comes first in state_dict(), before
the network, because it is an attribute of the policy itself; dist_numpy relies on that order. The
script's own policy has more in its state_dict(): the units of the observations, for --norm.

The entropy of a Gaussian is log(std) + 1/2 log(2 pi e) per dimension. It is the same for each row,
but has to be [B] like logp. Noise in float32 keeps the action in float32.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

import numpy as np
import torch
from checks.gaussian_policy import check
from torch import nn

from ppo_torch import mlp, mlp_numpy


class GaussianPolicy(nn.Module):
    """pi(a|o) over continuous actions: a Gaussian; mean from an MLP, std independent of o."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, rng):
        """Make the network, with weights drawn from rng, and log_std [n], which starts at -0.5."""
        super().__init__()
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))
        self.net = mlp([obs_dim, *hidden_sizes, act_dim], rng)

    def dist(self, o):
        """Return mu [B, n] and log_std [n] for observations [B, obs_dim]."""
        return self.net(o), self.log_std

    def logp(self, dist, a):
        """Return log pi(a|o) [B] for actions [B, n]; dist is what dist(o) returned."""
        mu, log_std = dist
        z = (a - mu) / log_std.exp()
        return -(0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi)).sum(1)  # [B]

    def entropy(self, dist):
        """Return the entropy of pi(.|o) [B]; for a Gaussian it does not depend on the mean."""
        mu, log_std = dist
        entropy = (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)
        return entropy.expand(len(mu))  # [B]

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
    check("torch", GaussianPolicy)
