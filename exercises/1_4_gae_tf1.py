"""Exercise 1.4: generalized advantage estimation, in TensorFlow 1 style.

After an epoch, VPG, PPO and TRPO compute for each step t

    delta_t = r_t + gamma V(o_{t+1}) - V(o_t)
    adv_t   = sum over k of (gamma lam)^k delta_{t+k}
    ret_t   = sum over k of gamma^k r_{t+k}

where the sums end with the path. How a path ended decides what comes after its last step. If the
episode terminated, nothing follows, and nothing is worth 0. If the path was only cut short, by a
time limit or by the end of the epoch, the rewards go on unseen, and V of the final observation
stands in for them, in adv and in ret.

Rewards and results are NumPy arrays, as in the scripts; V is a network. Do not normalise adv.

Fill the gap, then run this file to check it:

    python exercises/1_4_gae_tf1.py
"""

import numpy as np
from checks.gae import check


def gae(v, o, r, paths, gamma, lam):
    """Return adv and ret, the advantage and the reward-to-go of each step: NumPy float32, [T].

    v      the value function, a callable of the session: takes a NumPy array of observations
           [B, obs_dim], returns a NumPy array [B]
    o      [T, obs_dim], NumPy: the observations of an epoch, path after path
    r      [T], NumPy: the rewards
    paths  a list of (end, o2, d), one per path: its last step is end - 1, o2 [obs_dim] is the
           observation after that step, and d tells whether the episode terminated there
    """
    # ---- your code: from here
    raise NotImplementedError("fill this gap")
    # ---- to here


if __name__ == "__main__":
    check("tf1", gae)
