"""Trust Region Policy Optimization (TRPO) and natural policy gradient, in TensorFlow 1 style.

The idea: limit how far the policy itself moves, rather than its parameters. Among all steps whose
mean KL(pi_old || pi) is at most delta, take the one that lowers the loss most, to first order:

    loss_pi = -mean( pi(a|o) / pi_old(a|o) A )
    step    = -sqrt( 2 delta / (x^T H x) ) x,   H x = g

where g is the gradient of loss_pi and H the Hessian of that mean KL at pi_old, plus damping. The
conjugate gradient method finds x using only products of H with vectors. A line search then shortens
the step until the KL is within delta and the loss is no higher than before; --algo npg skips it.

A is the GAE-lambda advantage, normalised over the steps of all ranks. R is the discounted
reward-to-go (with --vf-lam < 1, a lambda-return), bootstrapped with V where a path is cut short;
loss_v = mean( (V(o) - R)^2 ).

Schulman et al. 2015, Trust Region Policy Optimization, https://arxiv.org/abs/1502.05477
Kakade 2001, A Natural Policy Gradient

    mpirun -np 4 python trpo_tf1.py --env-id Hopper-v4
"""

import os
import signal
from dataclasses import dataclass
from typing import Literal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the slow imports: no traceback

import numpy as np
from gymnasium.spaces import Discrete

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf

from common.args import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt
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
    flat_concat,
    init_orthogonal,
    load,
    make_session,
    mpi_avg,
    save_model,
    split_flat,
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
    vf_lr: NonNegative = 1e-3  # learning rate of the value function
    decay: bool = False  # decay the learning rate linearly to 0; this fixes --epochs
    train_v_iters: NonNegativeInt = 80  # passes over the epoch's steps to train the value function
    batch_size: PositiveInt | None = None  # steps per gradient step on V, over all ranks; None: all
    algo: Literal["trpo", "npg"] = "trpo"  # npg takes the full step, without the line search
    delta: Positive = 0.01  # limit on the mean KL(pi_old || pi)
    damping_coeff: NonNegative = 0.1  # added to the diagonal of H
    cg_iters: PositiveInt = 10  # conjugate gradient iterations
    backtrack_iters: PositiveInt = 10  # maximum number of steps that the line search tries
    backtrack_coeff: Fraction = 0.8  # the line search shortens the step by this factor each time


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

    def kl(self, dist_old, dist):
        logp_old, logp = tf.nn.log_softmax(dist_old[0]), tf.nn.log_softmax(dist[0])
        return tf.reduce_sum(tf.exp(logp_old) * (logp_old - logp), 1)  # [B]

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

    def kl(self, dist_old, dist):
        (mu_old, log_std_old), (mu, log_std) = dist_old, dist
        second_moment = tf.exp(2 * log_std_old) + (mu_old - mu) ** 2
        kl = log_std - log_std_old + 0.5 * second_moment / tf.exp(2 * log_std) - 0.5
        return tf.reduce_sum(kl, 1)  # [B]

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


def flat_grad(f, params):
    """Return the gradient of f as one flat vector."""
    return flat_concat(tf.gradients(f, params))


def set_params(params, flat):
    """Overwrite the parameters with the pieces of one flat vector."""
    for p, x in zip(params, split_flat(tf.cast(flat, tf.float32), params)):
        p.assign(x)


def dot(x, y):
    return tf.reduce_sum(x * y)


def conjugate_gradient(hvp, b, iters):
    """Solve H x = b for x; hvp(p) returns H p."""
    b = tf.cast(b, tf.float64)
    x, r, p = tf.zeros_like(b), b, b
    rr = dot(r, r)
    for _ in tf.range(iters):
        if rr <= 1e-12 * dot(b, b):  # solved to float32 precision; also avoids 0 / 0 if b = 0
            break
        hp = hvp(p)
        alpha = rr / dot(p, hp)
        x += alpha * p
        r -= alpha * hp
        rr_old, rr = rr, dot(r, r)
        p = r + rr / rr_old * p
    return x


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
    v_optimizer = MpiAdamOptimizer(v.params, factor * args.vf_lr)
    sess = make_session(args.threads)
    if args.ortho:
        init_orthogonal(pi.net.params, 0.01, weights_rng, sess)
        init_orthogonal(v.net.params, 1.0, weights_rng, sess)
    if args.norm:
        load(v.returns.std, 0.0, sess)  # V is 0 until it has units of its own
    buf = GAEBuffer(obs_dim, env.action_space, local_steps, args.gamma, args.lam, args.vf_lam)

    # Losses
    def compute_loss_pi(o, a, adv, logp_old, dist_old):
        dist = pi.dist(o)
        logp = pi.logp(dist, a)
        ratio = tf.exp(logp - logp_old)
        loss_pi = -tf.reduce_mean(ratio * adv)
        kl = tf.reduce_mean(pi.kl(dist_old, dist))
        info = {"kl": kl, "ent": tf.reduce_mean(pi.entropy(dist))}
        return loss_pi, info

    def compute_loss_v(o, ret):
        return tf.reduce_mean((v(o) - ret) ** 2)

    def take(b, *xs):
        """Return the steps b of each tensor; without --batch-size, that is all of them."""
        return xs if local_batch == local_steps else [tf.gather(x, b) for x in xs]

    # Update: runs as one graph
    @compiled
    def update(o, a, adv, ret, v_batches):
        dist_old = [tf.stop_gradient(x) for x in pi.dist(o)]
        logp_old = pi.logp(dist_old, a)
        loss_v_old = compute_loss_v(o, ret)

        # The direction of the step: x = H^-1 g
        loss_pi_old, info_old = compute_loss_pi(o, a, adv, logp_old, dist_old)
        g = mpi_avg(flat_grad(loss_pi_old, pi.params))

        def hvp(x):
            x = tf.stop_gradient(tf.cast(x, tf.float32))
            grad_kl = flat_grad(tf.reduce_mean(pi.kl(dist_old, pi.dist(o))), pi.params)
            hx = flat_grad(dot(grad_kl, x), pi.params) + args.damping_coeff * x
            return tf.cast(mpi_avg(hx), tf.float64)

        x = conjugate_gradient(hvp, g, args.cg_iters)

        # The length of the step: to second order, its KL is 1/2 step^T H step; make that delta
        step = -tf.sqrt(2 * args.delta / (dot(x, hvp(x)) + 1e-8)) * x

        # Line search: all ranks compare the same averages, so all make the same decision
        old_params = tf.cast(flat_concat(pi.params), tf.float64)
        loss_pi_old = mpi_avg(loss_pi_old)
        j, loss_pi, kl, accepted = 0, loss_pi_old, 0.0, False
        for j in tf.range(args.backtrack_iters):
            shorter = args.backtrack_coeff ** tf.cast(j, tf.float64)
            set_params(pi.params, old_params + shorter * step)
            loss_pi, info = compute_loss_pi(o, a, adv, logp_old, dist_old)
            loss_pi, kl = mpi_avg(loss_pi), mpi_avg(info["kl"])
            accepted = args.algo == "npg" or (kl <= args.delta and loss_pi <= loss_pi_old)
            if accepted:
                break
        if not accepted:
            set_params(pi.params, old_params)
            j, loss_pi, kl = args.backtrack_iters, loss_pi_old, 0.0

        if args.norm:  # from now on, V's units are those of all epochs so far
            v.obs.update(o)
            v.returns.update(ret)
        for b in v_batches if args.train_v_iters else ():  # XLA cannot slice [0, B]
            loss_v = compute_loss_v(*take(b, o, ret)) / v.returns.std**2  # in V's own units
            v_optimizer.minimize(loss_v)

        loss_v = compute_loss_v(o, ret)
        stats = {"Entropy": info_old["ent"], "KL": kl}
        stats |= {"LossPi": loss_pi_old, "DeltaLossPi": loss_pi_old - loss_pi}
        stats |= {"LossV": loss_v_old, "DeltaLossV": loss_v_old - loss_v}
        stats |= {"BacktrackIters": j}
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
    v_batches = tf.placeholder(tf.int64, [None, local_batch])
    batch = [o, a, adv, ret, v_batches]
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
    columns = "EpRet* EpLen VVals* LossPi LossV DeltaLossPi DeltaLossV Entropy KL BacktrackIters"
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
