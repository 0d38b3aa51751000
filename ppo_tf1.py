"""Proximal Policy Optimization (PPO-clip), in TensorFlow 1 style.

The idea: take many gradient steps on one batch, but clip the objective, so that there is nothing to
gain from moving the probability ratio rho = pi(a|o) / pi_old(a|o) further than clip_ratio from one:

    loss_pi = -mean( min( rho A, clip(rho, 1 - clip_ratio, 1 + clip_ratio) A ) )
    loss_v  =  mean( (V(o) - R)^2 )

A is the GAE-lambda advantage, normalised over the steps of all ranks. R is the discounted
reward-to-go (with --vf-lam < 1, a lambda-return), bootstrapped with V where a path is cut short.
Policy updates stop early when the mean KL(pi_old || pi), estimated as mean( log pi_old - log pi ),
exceeds 1.5 target_kl.

Schulman et al. 2017, Proximal Policy Optimization Algorithms, https://arxiv.org/abs/1707.06347

    mpirun -np 4 python ppo_tf1.py --env-id Hopper-v4
"""

import os
import signal
from dataclasses import dataclass

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the slow imports: no traceback

import numpy as np
from gymnasium.spaces import Discrete

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf

from common.args import Fraction, NonNegative, NonNegativeInt, PositiveInt
from common.checkpoint import Checkpoint
from common.env import make_env
from common.errors import SidespinError
from common.launch import launch
from common.logger import EpochLogger
from common.mpi import mpi_statistics_scalar, num_procs, proc_id
from common.run import Run
from common.tf1_utils import (
    Model,
    MpiAdamOptimizer,
    Normalizer,
    State,
    compiled,
    init_orthogonal,
    load,
    make_session,
    mpi_avg,
    save_model,
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
    train_pi_iters: PositiveInt = 80  # maximum passes over the epoch's steps to train the policy
    train_v_iters: NonNegativeInt = 80  # passes over the epoch's steps to train the value function
    batch_size: PositiveInt | None = None  # steps per gradient step, over all ranks; None: all
    clip_ratio: NonNegative = 0.2  # clip pi(a|o) / pi_old(a|o) to within this distance of 1
    target_kl: NonNegative = 0.01  # stop policy updates when the mean KL exceeds 1.5 times this


class MLP:
    """Linear layers with tanh between them; weights and biases from U(-1, 1) / sqrt(fan_in)."""

    def __init__(self, name, sizes, rng):
        self.params = []
        for i, (n_in, n_out) in enumerate(zip(sizes, sizes[1:])):
            for kind, shape in ("w", (n_out, n_in)), ("b", (n_out,)):
                init = (rng.uniform(-1, 1, shape) / np.sqrt(n_in)).astype(np.float32)
                self.params.append(tf.get_variable(f"{name}/{kind}{i}", initializer=init))

    def __call__(self, x):
        *hidden, w_out, b_out = self.params
        for w, b in zip(hidden[::2], hidden[1::2]):
            x = tf.tanh(tf.matmul(x, w, transpose_b=True) + b)
        return tf.matmul(x, w_out, transpose_b=True) + b_out


def mlp_numpy(params, x):
    """Evaluate the MLP on one observation in NumPy, thirty times faster than a session."""
    *hidden, w_out, b_out = params
    for w, b in zip(hidden[::2], hidden[1::2]):
        x = np.tanh(w @ x + b)
    return w_out @ x + b_out


class CategoricalPolicy:
    """pi(a|o) over discrete actions: the softmax of an MLP."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, rng):
        self.obs = Normalizer("pi/obs", obs_dim)  # changes nothing without --norm
        self.net = MLP("pi", [obs_dim, *hidden_sizes, act_dim], rng)
        self.params = self.net.params
        self.state = [*self.obs.state, *self.params]

    def dist(self, o):
        return (self.net(self.obs(o)),)  # logits [B, n]

    def logp(self, dist, a):
        return tf.gather(tf.nn.log_softmax(dist[0]), a, batch_dims=1)  # [B]

    def entropy(self, dist):
        logp = tf.nn.log_softmax(dist[0])
        return -tf.reduce_sum(tf.exp(logp) * logp, 1)  # [B]

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


class GaussianPolicy:
    """pi(a|o) over continuous actions: a Gaussian; mean from an MLP, std independent of o."""

    def __init__(self, obs_dim, act_dim, hidden_sizes, rng):
        init = np.full(act_dim, -0.5, np.float32)
        self.log_std = tf.get_variable("pi/log_std", initializer=init)
        self.obs = Normalizer("pi/obs", obs_dim)  # changes nothing without --norm
        self.net = MLP("pi", [obs_dim, *hidden_sizes, act_dim], rng)
        self.params = [self.log_std, *self.net.params]
        self.state = [self.log_std, *self.obs.state, *self.net.params]

    def dist(self, o):
        return self.net(self.obs(o)), self.log_std  # mean [B, n], log of the standard deviation [n]

    def logp(self, dist, a):
        mu, log_std = dist
        z = (a - mu) / tf.exp(log_std)
        return -tf.reduce_sum(0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi), 1)  # [B]

    def entropy(self, dist):
        mu, log_std = dist
        entropy = tf.reduce_sum(log_std + 0.5 * np.log(2 * np.pi * np.e), -1)
        return tf.broadcast_to(entropy, tf.shape(mu)[:1])  # [B]

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


class ValueFunction:
    """V(o): the expected discounted return from o on."""

    def __init__(self, obs_dim, hidden_sizes, rng):
        self.obs, self.returns = Normalizer("v/obs", obs_dim), Normalizer("v/returns")
        self.net = MLP("v", [obs_dim, *hidden_sizes, 1], rng)
        self.params = self.net.params

    def __call__(self, o):
        v = tf.squeeze(self.net(self.obs(o)), 1)  # [B]: a [B, 1] minus a [B] is a [B, B]
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
    decayed = tf.get_variable("decayed", initializer=0.0, trainable=False)  # for how many epochs
    factor = 1 - decayed / args.epochs
    pi_optimizer = MpiAdamOptimizer(pi.params, factor * args.pi_lr)
    v_optimizer = MpiAdamOptimizer(v.params, factor * args.vf_lr)
    sess = make_session(args.threads)
    if args.ortho:
        init_orthogonal(pi.net.params, 0.01, weights_rng, sess)
        init_orthogonal(v.net.params, 1.0, weights_rng, sess)
    if args.norm:
        load(v.returns.std, 0.0, sess)  # V is 0 until it has units of its own
    buf = GAEBuffer(obs_dim, env.action_space, local_steps, args.gamma, args.lam, args.vf_lam)

    # Losses
    def compute_loss_pi(o, a, adv, logp_old):
        dist = pi.dist(o)
        logp = pi.logp(dist, a)
        ratio = tf.exp(logp - logp_old)
        clipped = tf.clip_by_value(ratio, 1 - args.clip_ratio, 1 + args.clip_ratio)
        loss_pi = -tf.reduce_mean(tf.minimum(ratio * adv, clipped * adv))
        info = {"kl": tf.reduce_mean(logp_old - logp), "ent": tf.reduce_mean(pi.entropy(dist))}
        info["clip_frac"] = tf.reduce_mean(tf.cast(tf.not_equal(ratio, clipped), tf.float32))
        return loss_pi, info

    def compute_loss_v(o, ret):
        return tf.reduce_mean((v(o) - ret) ** 2)

    def take(b, *xs):
        """Return the steps b of each tensor; without --batch-size, that is all of them."""
        return xs if local_batch == local_steps else [tf.gather(x, b) for x in xs]

    # Update: runs as one graph
    @compiled
    def update(o, a, adv, ret, pi_batches, v_batches):
        logp_old = tf.stop_gradient(pi.logp(pi.dist(o), a))
        loss_pi_old, info_old = compute_loss_pi(o, a, adv, logp_old)
        loss_v_old = compute_loss_v(o, ret)

        i, n, kl = 0, local_steps // local_batch, 0.0
        for i in tf.range(len(pi_batches)):
            loss_pi, info = compute_loss_pi(*take(pi_batches[i], o, a, adv, logp_old))
            kl = (1 - 1 / n) * kl + mpi_avg(info["kl"]) / n  # averaged over one pass
            if kl > 1.5 * args.target_kl:
                break
            pi_optimizer.minimize(loss_pi)

        if args.norm:  # from now on, V's units are those of all epochs so far
            v.obs.update(o)
            v.returns.update(ret)
        for b in v_batches if args.train_v_iters else ():  # XLA cannot slice [0, B]
            loss_v = compute_loss_v(*take(b, o, ret)) / v.returns.std**2  # in V's own units
            v_optimizer.minimize(loss_v)

        loss_pi, info = compute_loss_pi(o, a, adv, logp_old)
        loss_v = compute_loss_v(o, ret)
        stats = {"Entropy": info_old["ent"], "KL": info["kl"]}
        stats |= {"LossPi": loss_pi_old, "DeltaLossPi": loss_pi_old - loss_pi}
        stats |= {"LossV": loss_v_old, "DeltaLossV": loss_v_old - loss_v}
        stats |= {"ClipFrac": info["clip_frac"], "StopIter": i}
        if args.norm:  # pi's only now: up to here it had to be the policy that acted
            pi.obs.update(o)
        if args.decay:
            decayed.assign_add(1.0)
        return stats

    # Session: placeholders for one epoch's batch, and what is computed from them
    o = tf.placeholder(tf.float32, [None, obs_dim])
    a = tf.placeholder(env.action_space.dtype, [None, *env.action_space.shape])
    adv, ret = (tf.placeholder(tf.float32, [None]) for _ in range(2))
    dist = pi.dist(o)
    mode = tf.argmax(dist[0], 1) if discrete else dist[0]
    outputs = {"pi": mode, "v": v(o), "logp": pi.logp(dist, a)}
    model = Model(sess, {"x": o, "a": a}, outputs)
    value = sess.make_callable(outputs["v"], [o])
    pi_batches = tf.placeholder(tf.int64, [None, local_batch])
    v_batches = tf.placeholder(tf.int64, [None, local_batch])
    batch = [o, a, adv, ret, pi_batches, v_batches]
    run_update = sess.make_callable(update(*batch), batch)

    # Act in NumPy, on a copy of the policy's parameters
    def get_pi_params():
        return sess.run(pi.state)

    # The NumPy policy must be the same function as the network
    low, high = (None, None) if discrete else (env.action_space.low, env.action_space.high)
    o = weights_rng.standard_normal(obs_dim, np.float32)
    for x, y in zip(pi.dist_numpy(get_pi_params(), o), sess.run(pi.dist(o[None])), strict=True):
        if not np.allclose(x, y, atol=1e-4):
            raise SidespinError("mlp_numpy or dist_numpy differs from mlp or dist: change both")

    # Logs and checkpoints
    columns = "EpRet* EpLen VVals* LossPi LossV DeltaLossPi DeltaLossV Entropy KL ClipFrac StopIter"
    logger = EpochLogger(run, columns)
    checkpoint = Checkpoint(run, State(sess), rng, env)

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

        *batch, values = buf.get(value)
        batch.append(buf.minibatches(args.train_pi_iters, local_batch, rng))
        batch.append(buf.minibatches(args.train_v_iters, local_batch, rng))
        logger.store(VVals=values, **run_update(*batch))
        pi_params = get_pi_params()

        logger.dump(epoch)
        if (epoch + 1) % args.save_freq == 0 or epoch + 1 == args.epochs:
            save_model(run, model, epoch)
            checkpoint.save(epoch + 1, o, ep_ret, ep_len)


def main(args):
    """Train and return the run's folder."""
    with tf.Graph().as_default(), Run(args, __file__) as run:
        train(args, run)
    return run.folder


if __name__ == "__main__":
    launch(main, Args)
