"""Solution of exercise 1.4.

Both sums obey a recursion, adv_t = delta_t + gamma lam adv_{t+1} and ret_t = r_t + gamma ret_{t+1},
so one pass from the end of each path to its start computes them in T steps instead of T^2. At the
end of a path, V of what follows is 0 or V(o2), the next advantage is 0, and the next reward-to-go
is the same V.

V is called once for all steps, and without gradients: the policy's loss needs constants.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

import numpy as np
import torch
from checks.gae import check


def gae(v, o, r, paths, gamma, lam):
    """Return adv and ret, the advantage and the reward-to-go of each step: NumPy float32, [T].

    v      the value function: takes a tensor of observations [B, obs_dim], returns a tensor [B]
    o      [T, obs_dim], NumPy: the observations of an epoch, path after path
    r      [T], NumPy: the rewards
    paths  a list of (end, o2, d), one per path: its last step is end - 1, o2 [obs_dim] is the
           observation after that step, and d tells whether the episode terminated there
    """
    ends, last_o, d = zip(*paths)
    with torch.no_grad():
        values = v(torch.as_tensor(o)).numpy()
        last_v = v(torch.as_tensor(np.float32(last_o))).numpy()
    last_v = np.where(d, 0, last_v)
    adv, ret = np.zeros_like(r), np.zeros_like(r)
    for start, end, v2 in zip((0, *ends), ends, last_v):
        next_adv, next_ret = 0, v2
        for t in reversed(range(start, end)):
            delta = r[t] + gamma * v2 - values[t]
            adv[t] = next_adv = delta + gamma * lam * next_adv
            ret[t] = next_ret = r[t] + gamma * next_ret
            v2 = values[t]
    return adv, ret


if __name__ == "__main__":
    check("torch", gae)
