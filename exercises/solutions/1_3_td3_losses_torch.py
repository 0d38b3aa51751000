"""Solution of exercise 1.3.

The noise is clipped before it is scaled to the action, the action after the noise is added. (1 - d)
removes the bootstrap where the episode terminated: nothing follows, so the return is r alone. The
lower Q is chosen per transition, not per batch. Without no_grad, loss_q would also have a gradient
in the target networks.

loss_pi has a gradient in q1, too. It is not used: only the policy's optimizer takes a step on it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

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
    with torch.no_grad():
        noise2 = (args.target_noise * noise2).clamp(-args.noise_clip, args.noise_clip)
        a2 = (pi_targ(o2) + (high - low) / 2 * noise2).clamp(low, high)
        q_targ = torch.min(q1_targ(o2, a2), q2_targ(o2, a2))
        backup = r + args.gamma * (1 - d) * q_targ  # [B]

    loss_q = ((q1(o, a) - backup) ** 2).mean() + ((q2(o, a) - backup) ** 2).mean()
    loss_pi = -q1(o, pi(o)).mean()
    return backup, loss_q, loss_pi


if __name__ == "__main__":
    check("torch", td3_losses)
