"""Vanilla Policy Gradient (VPG), in PyTorch.

The idea: make actions that did better than expected more likely, with one gradient step per epoch:

    loss_pi = -mean( log pi(a|o) A )
    loss_v  =  mean( (V(o) - R)^2 )

A is the GAE-lambda advantage, normalised over the steps of all ranks. R is the discounted
reward-to-go (with --vf-lam < 1, a lambda-return), bootstrapped with V where a path is cut short.

Schulman et al. 2015, High-Dimensional Continuous Control Using Generalized Advantage Estimation,
https://arxiv.org/abs/1506.02438

    mpirun -np 4 python vpg_torch.py --env-id Hopper-v4
"""

import signal
from dataclasses import dataclass

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the slow imports: no traceback

import numpy as np
import torch
from gymnasium.spaces import Discrete
from torch import nn

from common.args import Fraction, NonNegative, NonNegativeInt, PositiveInt
from common.checkpoint import Checkpoint
from common.env import make_env
from common.errors import SidespinError
from common.launch import launch
from common.logger import EpochLogger
from common.mpi import mpi_statistics_scalar, num_procs, proc_id
from common.run import Run
from common.torch_utils import (
    Adam,
    Linear,
    Normalizer,
    State,
    Tanh,
    init_orthogonal,
    mpi_avg_grads,
    save_model,
    sync_params,
)


@dataclass
class Args:
    env_id: str = "Hopper-v4"  # Gymnasium id; module:Name-v0 imports the module first
    seed: NonNegativeInt = 0  # seed for the weights, the noise and the environment
    epochs: PositiveInt = 50  # number of epochs
    steps_per_epoch: PositiveInt = 4000  # environment steps per epoch, over all ranks
    max_ep_len: PositiveInt | None = None  # maximum episode length; None: the environment's own
    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)  # units per hidden layer
    gamma: Fraction = 0.99  # discount factor
    cpu: PositiveInt = 1  # number of ranks; N > 1 restarts the script under mpirun -np N
    threads: PositiveInt = 1  # threads per rank
    data_dir: str = "runs"  # save the run to <data-dir>/<exp-name>/<exp-name>_s<seed>
    exp_name: str | None = None  # name of the experiment; None: <script>_<env-id>
    save_freq: PositiveInt = 1  # save the model and a checkpoint every N epochs, and at the end
    resume: bool = False  # continue the existing run, bit for bit, from its last checkpoint
    overwrite: bool = False  # replace the existing run
    keep_models: bool = False  # keep every saved model, for play.py --itr
    norm: bool = False  # normalise observations and returns by their running mean and std
    ortho: bool = False  # orthogonal initial weights; the policy's last layer starts near 0
    lam: Fraction = 0.97  # GAE-lambda; lower values trust V more: less variance, more bias
    vf_lam: Fraction = 1.0  # lambda of the returns that V is fitted to; 1: rewards-to-go
    pi_lr: NonNegative = 3e-4  # learning rate of the policy
    vf_lr: NonNegative = 1e-3  # learning rate of the value function
    decay: bool = False  # decay the learning rates linearly to 0; this fixes --epochs
    train_v_iters: NonNegativeInt = 80  # passes over the epoch's steps to train the value function
    batch_size: PositiveInt | None = None  # steps per gradient step on V, over all ranks; None: all


def mlp(sizes, rng):
    """Linear layers with tanh between them; weights and biases from U(-1, 1) / sqrt(fan_in)."""
    layers = []
    for n_in, n_out in zip(sizes, sizes[1:]):
        layers += [Linear(n_in, n_out), Tanh()]
        for p in layers[-2].parameters():
            p.data.copy_(torch.as_tensor(rng.uniform(-1, 1, p.shape) / np.sqrt(n_in)))
    return nn.Sequential(*layers[:-1])


def mlp_numpy(params, x):
    """Evaluate the MLP on one observation in NumPy, eight times faster than PyTorch."""
    *hidden, w_out, b_out = params
    for w, b in zip(hidden[::2], hidden[1::2]):
        x = np.tanh(w @ x + b)
    return w_out @ x + b_out


class CategoricalPolicy(nn.Module):
    """pi(a|o) over discrete actions: the softmax of an MLP."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, rng):
        super().__init__()
        self.obs = Normalizer(obs_dim)  # changes nothing without --norm
        self.net = mlp([obs_dim, *hidden_sizes, act_dim], rng)

    def dist(self, o):
        return (self.net(self.obs(o)),)  # logits [B, n]

    def logp(self, dist, a):
        return torch.log_softmax(dist[0], 1).gather(1, a[:, None]).squeeze(1)  # [B]

    def entropy(self, dist):
        logp = torch.log_softmax(dist[0], 1)
        return -(logp.exp() * logp).sum(1)  # [B]

    @staticmethod
    def dist_numpy(params, o):
        mean, std, _, *layers = params
        return (mlp_numpy(layers, (o - mean) / std),)

    @classmethod
    def act(cls, params, o, rng=None):
        """Draw an action in NumPy; without rng, take the most likely one."""
        (logits,) = cls.dist_numpy(params, o)
        # The Gumbel-max trick: argmax(logits + Gumbel noise) is a sample from softmax(logits)
        return np.argmax(logits if rng is None else logits + rng.gumbel(size=logits.size))


class GaussianPolicy(nn.Module):
    """pi(a|o) over continuous actions: a Gaussian; mean from an MLP, std independent of o."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, rng):
        super().__init__()
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))
        self.obs = Normalizer(obs_dim)  # changes nothing without --norm
        self.net = mlp([obs_dim, *hidden_sizes, act_dim], rng)

    def dist(self, o):
        return self.net(self.obs(o)), self.log_std  # mean [B, n], log of the standard deviation [n]

    def logp(self, dist, a):
        mu, log_std = dist
        z = (a - mu) / log_std.exp()
        return -(0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi)).sum(1)  # [B]

    def entropy(self, dist):
        mu, log_std = dist
        entropy = (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)
        return entropy.expand(len(mu))  # [B]

    @staticmethod
    def dist_numpy(params, o):
        log_std, mean, std, _, *layers = params
        return mlp_numpy(layers, (o - mean) / std), log_std

    @classmethod
    def act(cls, params, o, rng=None):
        """Draw an action in NumPy; without rng, take the mean."""
        mu, log_std = cls.dist_numpy(params, o)
        noise = 0 if rng is None else rng.standard_normal(mu.size, np.float32)
        return mu + np.exp(log_std) * noise


class ValueFunction(nn.Module):
    """V(o): the expected discounted return from o on."""

    def __init__(self, obs_dim, hidden_sizes, rng):
        super().__init__()
        self.obs, self.returns = Normalizer(obs_dim), Normalizer()
        self.net = mlp([obs_dim, *hidden_sizes, 1], rng)

    def forward(self, o):
        v = self.net(self.obs(o)).squeeze(1)  # [B]: a [B, 1] minus a [B] is a [B, B]
        return self.returns.mean + self.returns.std * v


class GAEBuffer:
    """One epoch of steps; values, advantages and returns are computed at its end, all at once."""

    def __init__(self, obs_dim, action_space, size, gamma, lam, vf_lam):
        self.o = np.zeros((size, obs_dim), np.float32)
        self.a = np.zeros((size, *action_space.shape), action_space.dtype)
        self.r = np.zeros(size, np.float32)
        self.gamma, self.lam, self.vf_lam = gamma, lam, vf_lam
        self.ptr, self.paths = 0, []

    def store(self, o, a, r):
        self.o[self.ptr], self.a[self.ptr], self.r[self.ptr] = o, a, r
        self.ptr += 1

    def finish_path(self, o2, d):
        """Mark the end of a path at o2: terminated if d, otherwise only cut short."""
        self.paths.append((self.ptr, o2, d))

    def get(self, value):
        """Return the epoch's o, a, adv, ret and values, and empty the buffer."""
        ends, last_o, d = zip(*self.paths)
        # After a terminal state the return is 0; a path cut short is bootstrapped with V(last_o).
        last_v = dict(zip(ends, np.where(d, 0.0, value(np.float32(last_o))).tolist()))
        values = value(self.o)
        adv, ret = np.zeros_like(self.r), np.zeros_like(self.r)
        r, v = self.r.tolist(), values.tolist()
        for t in reversed(range(self.ptr)):
            if t + 1 in last_v:
                v2, next_adv, next_ret = last_v[t + 1], 0.0, last_v[t + 1]
            delta = r[t] + self.gamma * v2 - v[t]
            adv[t] = next_adv = delta + self.gamma * self.lam * next_adv
            next_ret = (1 - self.vf_lam) * v2 + self.vf_lam * next_ret
            ret[t] = next_ret = r[t] + self.gamma * next_ret
            v2 = v[t]
        mean, std = mpi_statistics_scalar(adv)
        self.ptr, self.paths = 0, []
        return self.o, self.a, ((adv - mean) / (std + 1e-8)).astype(np.float32), ret, values

    def minibatches(self, passes, batch_size, rng):
        """Return the steps of each minibatch, one row each; every pass has a new random order."""
        steps, n = len(self.r), len(self.r) // batch_size
        order = np.tile(np.arange(steps), (passes, 1))
        if batch_size < steps:
            rng.permuted(order, axis=1, out=order)
        return order[:, : n * batch_size].reshape(passes * n, batch_size)


def train(args, run):
    # Set-up
    torch.set_num_threads(args.threads)
    env = make_env(args.env_id, args.max_ep_len)
    local_steps = args.steps_per_epoch // num_procs()
    local_batch = np.clip((args.batch_size or args.steps_per_epoch) // num_procs(), 1, local_steps)

    # All randomness: one generator per rank, and one for the weights, the same on all ranks
    rng = np.random.default_rng([args.seed, proc_id()])
    weights_rng = np.random.default_rng([args.seed, 0, 1])

    # Networks
    discrete = isinstance(env.action_space, Discrete)
    obs_dim = env.observation_space.shape[0]
    act_dim = int(env.action_space.n) if discrete else env.action_space.shape[0]
    policy = CategoricalPolicy if discrete else GaussianPolicy
    pi = policy(obs_dim, act_dim, args.hidden_sizes, weights_rng)
    v = ValueFunction(obs_dim, args.hidden_sizes, weights_rng)
    if args.ortho:
        init_orthogonal(pi.net, 0.01, weights_rng)
        init_orthogonal(v.net, 1.0, weights_rng)
    if args.norm:
        v.returns.std.zero_()  # V is 0 until it has units of its own
    model = nn.ModuleDict({"pi": pi, "v": v})
    sync_params(model)
    pi_optimizer = Adam(pi.parameters(), lr=args.pi_lr)
    v_optimizer = Adam(v.parameters(), lr=args.vf_lr)
    buf = GAEBuffer(obs_dim, env.action_space, local_steps, args.gamma, args.lam, args.vf_lam)

    # Losses
    def compute_loss_pi(o, a, adv, logp_old):
        dist = pi.dist(o)
        logp = pi.logp(dist, a)
        loss_pi = -(logp * adv).mean()
        info = {"kl": (logp_old - logp).mean(), "ent": pi.entropy(dist).mean()}
        return loss_pi, info

    def compute_loss_v(o, ret):
        return ((v(o) - ret) ** 2).mean()

    def take(b, *xs):
        """Return the steps b of each tensor; without --batch-size, that is all of them."""
        return xs if local_batch == local_steps else [x[torch.as_tensor(b)] for x in xs]

    @torch.no_grad()
    def value(o):
        return v(torch.as_tensor(o)).numpy()

    # Update
    def update():
        o, a, adv, ret, values = map(torch.as_tensor, buf.get(value))
        with torch.no_grad():
            logp_old = pi.logp(pi.dist(o), a)
            loss_v_old = compute_loss_v(o, ret)

        loss_pi_old, info_old = compute_loss_pi(o, a, adv, logp_old)
        pi_optimizer.zero_grad()
        loss_pi_old.backward()
        mpi_avg_grads(pi_optimizer)
        pi_optimizer.step()

        if args.norm:  # from now on, V's units are those of all epochs so far
            v.obs.update(o)
            v.returns.update(ret)
        for b in buf.minibatches(args.train_v_iters, local_batch, rng):
            loss_v = compute_loss_v(*take(b, o, ret)) / v.returns.std**2  # in V's own units
            v_optimizer.zero_grad()
            loss_v.backward()
            mpi_avg_grads(v_optimizer)
            v_optimizer.step()

        with torch.no_grad():
            loss_pi, info = compute_loss_pi(o, a, adv, logp_old)
            loss_v = compute_loss_v(o, ret)
        logger.store(VVals=values, Entropy=info_old["ent"], KL=info["kl"])
        logger.store(LossPi=loss_pi_old, DeltaLossPi=loss_pi_old - loss_pi)
        logger.store(LossV=loss_v_old, DeltaLossV=loss_v_old - loss_v)
        if args.norm:  # pi's only now: up to here it had to be the policy that acted
            pi.obs.update(o)
        if args.decay:
            for group in pi_optimizer.param_groups + v_optimizer.param_groups:
                group["lr"] *= 1 - 1 / (args.epochs - epoch)  # linearly, to 0 after the last epoch

    # Act in NumPy, on arrays that share memory with the policy's parameters
    def get_pi_params():
        return [x.numpy() for x in pi.state_dict().values()]

    # The NumPy policy must be the same function as the network
    low, high = (None, None) if discrete else (env.action_space.low, env.action_space.high)
    o = weights_rng.standard_normal(obs_dim, np.float32)
    for x, y in zip(pi.dist_numpy(get_pi_params(), o), pi.dist(torch.as_tensor(o)), strict=True):
        if not np.allclose(x, y.detach().numpy(), atol=1e-4):
            raise SidespinError("mlp_numpy or dist_numpy differs from mlp or dist: change both")

    # Logs and checkpoints
    columns = "EpRet* EpLen VVals* LossPi LossV DeltaLossPi DeltaLossV Entropy KL"
    logger = EpochLogger(run, columns)
    state = State(model, pi_optimizer, v_optimizer)
    checkpoint = Checkpoint(run, state, rng, env)

    # Loop
    o, ep_ret, ep_len = env.reset(seed=int(rng.integers(2**31)))[0], 0.0, 0
    first_epoch, o, ep_ret, ep_len = checkpoint.restore(o, ep_ret, ep_len)
    pi_params = get_pi_params()
    for epoch in range(first_epoch, args.epochs):
        for t in range(local_steps):
            a = pi.act(pi_params, o, rng)
            o2, r, d, truncated, _ = env.step(a if discrete else a.clip(low, high))
            buf.store(o, a, r)
            o, ep_ret, ep_len = o2, ep_ret + r, ep_len + 1
            if d or truncated or t == local_steps - 1:
                buf.finish_path(o2, d)
            if d or truncated:
                logger.store(EpRet=ep_ret, EpLen=ep_len)
                o, ep_ret, ep_len = env.reset()[0], 0.0, 0
            logger.progress(epoch, t, local_steps)

        update()
        pi_params = get_pi_params()

        logger.dump(epoch)
        if (epoch + 1) % args.save_freq == 0 or epoch + 1 == args.epochs:
            save_model(run, model, epoch)
            checkpoint.save(epoch + 1, o, ep_ret, ep_len)


def main(args):
    """Train and return the run's folder."""
    with Run(args, __file__) as run:
        train(args, run)
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
