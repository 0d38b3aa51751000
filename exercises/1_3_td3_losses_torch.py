"""Exercise 1.3: the maths of TD3, in PyTorch.

From one batch of transitions, compute what an update of TD3 needs: the target of both Q-functions,
their loss, and the loss of the policy. Three ideas set it apart from DDPG: blur the target action
with clipped noise, believe the lower of two Q-functions, and (not here) update the policy less
often. Read the docstring of td3_torch.py or sections 4 and 5 of https://arxiv.org/abs/1802.09477;
look at the rest of the script only when you are done.

- Noise is in units of each action's half-range, which is half the distance from low to high.
- The target is a constant: no loss may train the target networks.
- The policy's loss uses the first Q-function only.

Fill the gap, then run this file to check it:

    python exercises/1_3_td3_losses_torch.py
"""

import numpy as np
import torch
from checks.td3 import check


def td3_losses(nets, batch, noise2, low, high, args):
    """Return backup [B], and the scalars loss_q (the sum of both Q-functions' losses) and loss_pi.

    nets       six functions: pi(o) and pi_targ(o) return actions [B, n] within the bounds;
               q1, q2, q1_targ and q2_targ take (o, a) and return values [B]
    batch      o [B, obs_dim], a [B, n], r [B], o2 [B, obs_dim], d [B]; d is 1 where the episode
               terminated, and 0 elsewhere
    noise2     [B, n], drawn from the standard normal distribution
    low, high  [n], bounds of the actions
    args       gamma, target_noise, noise_clip
    """
    pi, q1, q2, pi_targ, q1_targ, q2_targ = nets
    o, a, r, o2, d = batch
    # ---- your code: from here
    raise NotImplementedError("fill this gap")
    # ---- to here


if __name__ == "__main__":
    check("torch", td3_losses)
