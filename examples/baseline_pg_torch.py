"""Policy gradient with a learned baseline, in PyTorch: was it better than expected?

    loss_pi = -mean( log pi(a|o) (R - V(o)) )
    loss_v  =  mean( (V(o) - R)^2 )

R is the reward-to-go: the sum of the rewards from this step on.

    python examples/baseline_pg_torch.py
"""

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium id of an environment with discrete actions
    seed: int = 0  # seed for the weights, the actions and the environment
    epochs: int = 50  # number of epochs, each with one gradient step
    steps_per_epoch: int = 5000  # environment steps per epoch; the last episode is completed
    hidden_size: int = 32  # units in the hidden layer
    lr: float = 1e-2  # learning rate of the policy and of the baseline
    train_v_iters: int = 40  # gradient steps on the baseline per epoch


def mlp(sizes, rng):
    """Linear layers with tanh between them; weights and biases from U(-1, 1) / sqrt(fan_in)."""
    layers = []
    for n_in, n_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(n_in, n_out), nn.Tanh()]
        for p in layers[-2].parameters():
            p.data.copy_(torch.as_tensor(rng.uniform(-1, 1, p.shape) / np.sqrt(n_in)))
    return nn.Sequential(*layers[:-1])


def reward_to_go(rewards):
    """Return for each step the sum of its reward and all later ones."""
    return np.cumsum(rewards[::-1])[::-1]


def main(args):
    env = gym.make(args.env_id)
    rng = np.random.default_rng(args.seed)
    obs_dim, n_actions = env.observation_space.shape[0], int(env.action_space.n)
    logits = mlp([obs_dim, args.hidden_size, n_actions], rng)
    v = mlp([obs_dim, args.hidden_size, 1], rng)
    optimizer = torch.optim.Adam(logits.parameters(), lr=args.lr)
    v_optimizer = torch.optim.Adam(v.parameters(), lr=args.lr)
    env.reset(seed=args.seed)
    history = []
    for epoch in range(args.epochs):
        batch, returns = [], []
        while len(batch) < args.steps_per_epoch:
            episode, over, o = [], False, np.float32(env.reset()[0])
            while not over:
                with torch.no_grad():
                    scores = logits(torch.as_tensor(o)).numpy()
                # argmax(logits + Gumbel noise) is a sample from softmax(logits)
                a = np.argmax(scores + rng.gumbel(size=n_actions))
                o2, r, terminated, truncated, _ = env.step(a)
                episode.append((o, a, r))
                o, over = np.float32(o2), terminated or truncated
            returns.append(sum(r for _, _, r in episode))
            ret = reward_to_go([r for _, _, r in episode])
            batch += [(o, a, np.float32(x)) for (o, a, _), x in zip(episode, ret)]

        o, a, ret = (torch.as_tensor(np.array(x)) for x in zip(*batch))
        with torch.no_grad():
            weights = ret - v(o).squeeze(1)  # [B]: a [B] minus a [B, 1] is a [B, B]
        logp = torch.log_softmax(logits(o), 1).gather(1, a[:, None]).squeeze(1)  # [B]
        loss_pi = -(logp * weights).mean()
        optimizer.zero_grad()
        loss_pi.backward()
        optimizer.step()
        for _ in range(args.train_v_iters):
            loss_v = ((v(o).squeeze(1) - ret) ** 2).mean()
            v_optimizer.zero_grad()
            loss_v.backward()
            v_optimizer.step()
        history.append(np.mean(returns))
        print(f"epoch {epoch:3d}  return {history[-1]:7.2f}  loss_pi {loss_pi:9.4f}", flush=True)
    return history


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
