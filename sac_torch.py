"""Soft Actor-Critic (SAC), in PyTorch.

The idea: reward the policy for being random, so that it keeps exploring and Q stays smooth. The
policy is a Gaussian squashed by tanh; alpha is what a nat of entropy is worth in reward:

    a2      ~ pi(.|o2)
    backup  = r + gamma (1 - d) ( min( Q1_targ(o2, a2), Q2_targ(o2, a2) ) - alpha log pi(a2|o2) )
    loss_q  = mean( (Q1(o, a) - backup)^2 ) + mean( (Q2(o, a) - backup)^2 )
    loss_pi = mean( alpha log pi(a|o) - min( Q1(o, a), Q2(o, a) ) ),   a = f(o, noise) ~ pi(.|o)

With --autotune, alpha is learned so that the entropy stays near -|A|:

    loss_alpha = -log alpha mean( log pi(a|o) - |A| )

Transitions come from a replay buffer, d marks termination alone, log pi is the density of actions
in units of their half-range, and targets follow slowly: targ = polyak targ + (1 - polyak) net.

Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications,
https://arxiv.org/abs/1812.05905

    python sac_torch.py --env-id HalfCheetah-v4
"""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn
from torch.nn import functional as F

from common.args import check_args, parse_args
from common.checkpoint import Checkpoint
from common.env import make_env
from common.logger import EpochLogger
from common.mpi import fail, mpi_fork, num_procs, per_rank, proc_id
from common.torch_utils import (
    State,
    flat_params,
    mpi_avg_grads,
    save_model,
    setup_pytorch_for_mpi,
    sync_params,
)


@dataclass
class Args:
    env_id: str = "Hopper-v4"  # Gymnasium id; module:Name-v0 imports the module first
    seed: int = 0  # seed of the weights, the noise and the environment
    epochs: int = 50  # number of epochs
    steps_per_epoch: int = 4000  # environment steps an epoch, over all ranks together
    max_ep_len: int | None = None  # cut episodes at this length; None: the environment's own limit
    hidden_sizes: tuple[int, ...] = (256, 256)  # units of each hidden layer
    gamma: float = 0.99  # discount factor
    cpu: int = 1  # start the script under mpirun with this many ranks
    threads: int = 1  # threads a rank
    data_dir: str = "runs"  # the run goes to <data-dir>/<exp-name>/<exp-name>_s<seed>
    exp_name: str | None = None  # name of the experiment; None: <script>_<env-id>
    save_freq: int = 1  # write model and checkpoint every so many epochs, and at the end
    resume: bool = False  # go on with the run in the folder, bit for bit, from its last checkpoint
    overwrite: bool = False  # replace a run that is already in the folder
    keep_models: bool = False  # keep the model of every save, for play.py --itr
    replay_size: int = 1_000_000  # transitions that the replay buffer of a rank holds
    polyak: float = 0.995  # how much of itself a target network keeps in an update
    lr: float = 1e-3  # learning rate of the policy, Q and alpha
    batch_size: int = 100  # transitions a rank samples for an update
    start_steps: int = 10_000  # steps of uniformly random actions at first, over all ranks
    update_after: int = 1000  # steps before the first update, over all ranks
    update_every: int = 50  # steps of a rank between bursts of as many updates
    num_test_episodes: int = 10  # episodes without noise to test the policy after each epoch
    alpha: float = 0.2  # what a nat of entropy is worth; with --autotune, at the start
    autotune: bool = False  # learn alpha, so that the entropy stays near -|A|


def mlp(sizes, rng):
    """Linear layers with ReLU between them; weights and biases from U(-1, 1) / sqrt(fan_in)."""
    layers = []
    for n_in, n_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(n_in, n_out), nn.ReLU(inplace=True)]
        for p in layers[-2].parameters():
            p.data.copy_(torch.as_tensor(rng.uniform(-1, 1, p.shape) / np.sqrt(n_in)))
    return nn.Sequential(*layers[:-1])


class Policy(nn.Module):
    """pi(a|o): a Gaussian from an MLP, its tanh stretched to the bounds of each action."""

    def __init__(self, obs_dim, action_space, hidden_sizes, rng):
        super().__init__()
        low, high = torch.as_tensor(action_space.low), torch.as_tensor(action_space.high)
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("half_range", (high - low) / 2)
        self.net = mlp([obs_dim, *hidden_sizes, 2 * len(low)], rng)

    def dist(self, o):
        mu, log_std = self.net(o).chunk(2, -1)
        return mu, log_std.clamp(-20, 2)  # both [B, n]

    def forward(self, o, noise):
        mu, log_std = self.dist(o)
        u = mu + log_std.exp() * noise
        # log N(u; mu, std) - log(1 - tanh(u)^2), the latter in a form that stays finite
        logp = -(0.5 * noise**2 + log_std + 0.5 * np.log(2 * np.pi))
        logp = logp - 2 * (np.log(2) - u - F.softplus(-2 * u))
        return self.center + self.half_range * torch.tanh(u), logp.sum(1)  # [B, n] and [B]


class QFunction(nn.Module):
    """Q(o, a): the return to expect after action a."""

    def __init__(self, obs_dim, action_space, hidden_sizes, rng):
        super().__init__()
        self.net = mlp([obs_dim + action_space.shape[0], *hidden_sizes, 1], rng)

    def forward(self, o, a):
        return self.net(torch.cat([o, a], 1)).squeeze(1)  # [B]: a [B, 1] minus a [B] is a [B, B]


def dist_numpy(params, o):
    """Compute pi.dist for one observation in NumPy: much faster than through a framework."""
    _, _, *layers = params
    for w, b in zip(layers[:-2:2], layers[1:-2:2]):
        o = np.maximum(w @ o + b, 0)
    mu, log_std = np.split(layers[-2] @ o + layers[-1], 2)
    return mu, log_std.clip(-20, 2)


def act(params, o, rng=None):
    """Draw an action in NumPy; without rng, take the squashed mean."""
    (u, log_std), (center, half_range) = dist_numpy(params, o), params[:2]
    if rng is not None:
        u = u + np.exp(log_std) * rng.standard_normal(u.size, np.float32)
    return center + half_range * np.tanh(u)


class ReplayBuffer:
    """The last transitions, as many as fit; memory is taken only as they come in."""

    def __init__(self, obs_dim, act_dim, size):
        self.o, self.o2 = np.zeros((2, size, obs_dim), np.float32)
        self.a = np.zeros((size, act_dim), np.float32)
        self.r, self.d = np.zeros((2, size), np.float32)
        self.ptr, self.size, self.max_size = 0, 0, size

    def store(self, o, a, r, o2, d):
        self.o[self.ptr], self.a[self.ptr], self.r[self.ptr] = o, a, r
        self.o2[self.ptr], self.d[self.ptr] = o2, d
        self.ptr = (self.ptr + 1) % self.max_size
        self.size = min(self.size + 1, self.max_size)

    def sample_batch(self, batch_size, rng):
        i = rng.integers(self.size, size=batch_size)
        return self.o[i], self.a[i], self.r[i], self.o2[i], self.d[i]


def main(args):
    """Train and return the run's folder."""
    # Set-up
    check_args(args)
    setup_pytorch_for_mpi(args.threads)
    env, test_env = (make_env(args.env_id, args.max_ep_len, (Box,)) for _ in range(2))
    local_steps = per_rank(args.steps_per_epoch)
    low, high = env.action_space.low, env.action_space.high
    if not np.isfinite(high - low).all():
        fail(f"{args.env_id} has actions {env.action_space}, where this script needs finite bounds")

    # The only randomness: one generator a rank, and one for the weights that all ranks seed alike
    rng = np.random.default_rng([args.seed, proc_id()])
    weights_rng = np.random.default_rng([args.seed, 0, 1])

    # Networks
    obs_dim, act_dim = env.observation_space.shape[0], env.action_space.shape[0]
    pi = Policy(obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q1 = QFunction(obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q2 = QFunction(obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q = nn.ModuleDict({"q1": q1, "q2": q2})
    model = nn.ModuleDict({"pi": pi, **q})
    sync_params(model)
    targets = copy.deepcopy(q)
    q1_targ, q2_targ = targets.values()
    log_alpha = nn.ParameterList([torch.tensor(float(args.alpha)).log()])
    flat_pi, flat_q, flat_alpha = map(flat_params, (pi, q, log_alpha))
    flat_targ = flat_params(targets)
    pi_optimizer = torch.optim.Adam([flat_pi], args.lr, fused=True)
    q_optimizer = torch.optim.Adam([flat_q], args.lr, fused=True)
    alpha_optimizer = torch.optim.Adam([flat_alpha], args.lr, fused=True)
    buf = ReplayBuffer(obs_dim, act_dim, args.replay_size)

    # Losses
    def compute_loss_q(o, a, r, o2, d, noise2):
        with torch.no_grad():
            a2, logp2 = pi(o2, noise2)
            q_targ = torch.min(q1_targ(o2, a2), q2_targ(o2, a2))
            backup = r + args.gamma * (1 - d) * (q_targ - log_alpha[0].exp() * logp2)
        q1_vals, q2_vals = q1(o, a), q2(o, a)
        loss_q = ((q1_vals - backup) ** 2).mean() + ((q2_vals - backup) ** 2).mean()
        return loss_q, {"Q1Vals": q1_vals.detach(), "Q2Vals": q2_vals.detach()}

    def compute_loss_pi(o, noise):
        a, logp = pi(o, noise)
        q_pi = torch.min(q1(o, a), q2(o, a))
        alpha = log_alpha[0].exp().detach()
        return (alpha * logp - q_pi).mean(), {"LogPi": logp.detach(), "Alpha": alpha}

    # Update
    def update_q(o, a, r, o2, d, noise2):
        loss_q, info = compute_loss_q(o, a, r, o2, d, noise2)
        flat_q.grad.zero_()
        loss_q.backward()
        mpi_avg_grads(flat_q)
        q_optimizer.step()
        logger.store(LossQ=loss_q.item(), **info)

    def update_pi(o, noise):
        loss_pi, info = compute_loss_pi(o, noise)
        flat_pi.grad.zero_()
        loss_pi.backward(inputs=list(pi.parameters()))  # no work for gradients of Q's parameters
        mpi_avg_grads(flat_pi)
        pi_optimizer.step()
        logger.store(LossPi=loss_pi.item(), **info)
        return info["LogPi"]

    def update_alpha(logp):
        loss_alpha = -(log_alpha[0] * (logp - act_dim)).mean()
        flat_alpha.grad.zero_()
        loss_alpha.backward()
        mpi_avg_grads(flat_alpha)
        alpha_optimizer.step()

    @torch.no_grad()
    def update_targets():
        flat_targ.lerp_(flat_q, 1 - args.polyak)

    def update():
        o, a, r, o2, d = map(torch.as_tensor, buf.sample_batch(args.batch_size, rng))
        noise, noise2 = torch.as_tensor(rng.standard_normal((2, *a.shape), np.float32))
        update_q(o, a, r, o2, d, noise2)
        logp = update_pi(o, noise)
        if args.autotune:
            update_alpha(logp)
        update_targets()

    # Act in NumPy, on arrays that share the memory of the network's parameters
    pi_params = [x.numpy() for x in pi.state_dict().values()]
    o = weights_rng.standard_normal(obs_dim, np.float32)
    for x, y in zip(dist_numpy(pi_params, o), pi.dist(torch.as_tensor(o)), strict=True):
        if not np.allclose(x, y.detach(), atol=1e-4):
            fail("dist_numpy and pi.dist disagree: change dist_numpy as the network was changed")

    test_limit = test_env.spec.max_episode_steps or args.steps_per_epoch  # an episode may not end

    def test_agent():
        for i in range(proc_id(), args.num_test_episodes, num_procs()):
            o, ep_ret, ep_len, over = test_env.reset(seed=i)[0], 0.0, 0, False
            while not over:
                o, r, d, truncated, _ = test_env.step(act(pi_params, o).clip(low, high))
                ep_ret, ep_len = ep_ret + r, ep_len + 1
                over = d or truncated or ep_len == test_limit
            logger.store(TestEpRet=ep_ret, TestEpLen=ep_len)

    # All that --resume needs
    logger = EpochLogger(args, __file__)
    state = State(model, targets, log_alpha, pi_optimizer, q_optimizer, alpha_optimizer)
    checkpoint = Checkpoint(logger, state, rng, env, buf)

    # Loop
    o, ep_ret, ep_len = env.reset(seed=int(rng.integers(2**31)))[0], 0.0, 0
    first_epoch, o, ep_ret, ep_len = checkpoint.restore(o, ep_ret, ep_len)
    for epoch in range(first_epoch, args.epochs):
        for t in range(local_steps):
            steps = epoch * local_steps + t + 1  # of this rank, with the one to come
            if steps * num_procs() <= args.start_steps:
                a = rng.uniform(low, high).astype(np.float32)
            else:
                a = act(pi_params, o, rng).clip(low, high)
            o2, r, d, truncated, _ = env.step(a)
            buf.store(o, a, r, o2, d)
            o, ep_ret, ep_len = o2, ep_ret + r, ep_len + 1
            if d or truncated:
                logger.store(EpRet=ep_ret, EpLen=ep_len)
                o, ep_ret, ep_len = env.reset()[0], 0.0, 0
            if steps * num_procs() >= args.update_after and steps % args.update_every == 0:
                for _ in range(args.update_every):
                    update()
            logger.progress(epoch, t, local_steps)

        test_agent()

        logger.log_tabular("Epoch", epoch)
        logger.log_tabular("EpRet", with_min_and_max=True)
        logger.log_tabular("TestEpRet", with_min_and_max=True)
        logger.log_tabular("EpLen", average_only=True)
        logger.log_tabular("TestEpLen", average_only=True)
        logger.log_tabular("TotalEnvInteracts", (epoch + 1) * args.steps_per_epoch)
        logger.log_tabular("Q1Vals", with_min_and_max=True)
        logger.log_tabular("Q2Vals", with_min_and_max=True)
        logger.log_tabular("LogPi", with_min_and_max=True)
        logger.log_tabular("Alpha", average_only=True)
        logger.log_tabular("LossPi", average_only=True)
        logger.log_tabular("LossQ", average_only=True)
        logger.dump_tabular()
        if (epoch + 1) % args.save_freq == 0 or epoch + 1 == args.epochs:
            save_model(logger.folder, model, epoch if args.keep_models else None)
            checkpoint.save(epoch + 1)
    return logger.folder


if __name__ == "__main__":
    args = parse_args(Args, __doc__)
    mpi_fork(args.cpu)
    main(args)
