"""Soft Actor-Critic (SAC), in TensorFlow 1 style.

The idea: reward the policy for being random, so that it keeps exploring and Q stays smooth. The
policy is a Gaussian squashed by tanh; alpha is the reward per nat of entropy:

    a2      ~ pi(.|o2)
    backup  = r + gamma (1 - d) ( min( Q1_targ(o2, a2), Q2_targ(o2, a2) ) - alpha log pi(a2|o2) )
    loss_q  = mean( (Q1(o, a) - backup)^2 ) + mean( (Q2(o, a) - backup)^2 )
    loss_pi = mean( alpha log pi(a|o) - min( Q1(o, a), Q2(o, a) ) ),   a = f(o, noise) ~ pi(.|o)

With --autotune, alpha is learned so that the entropy stays near -|A|, where |A| is the number of
action dimensions:

    loss_alpha = -log alpha mean( log pi(a|o) - |A| )

Transitions come from a replay buffer. d is 1 only where an episode terminated, not where a time
limit truncated it. log pi is the log-density of actions in units of their half-range. Target
networks follow slowly: targ = polyak targ + (1 - polyak) net.

Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications,
https://arxiv.org/abs/1812.05905

    python sac_tf1.py --env-id HalfCheetah-v4
"""

import os
import signal
from dataclasses import dataclass

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the slow imports: no traceback

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf

from common.args import Fraction, NonNegative, NonNegativeInt, PositiveInt
from common.checkpoint import Checkpoint
from common.env import make_env
from common.errors import SidespinError, flag, warn
from common.launch import launch
from common.logger import EpochLogger
from common.mpi import num_procs, proc_id
from common.run import Run
from common.tf1_utils import (
    Model,
    MpiAdamOptimizer,
    State,
    compiled_loop,
    make_session,
    save_model,
)


@dataclass
class Args:
    env_id: str = "Hopper-v4"  # Gymnasium id; module:Name-v0 imports the module first
    seed: NonNegativeInt = 0  # seed for the weights, the noise and the environment
    epochs: PositiveInt = 50  # number of epochs
    steps_per_epoch: PositiveInt = 4000  # environment steps per epoch, over all ranks
    max_ep_len: PositiveInt | None = None  # maximum episode length; None: the environment's own
    hidden_sizes: tuple[PositiveInt, ...] = (256, 256)  # units per hidden layer
    gamma: Fraction = 0.99  # discount factor
    cpu: PositiveInt = 1  # number of ranks; N > 1 restarts the script under mpirun -np N
    threads: PositiveInt = 1  # threads per rank
    data_dir: str = "runs"  # save the run to <data-dir>/<exp-name>/<exp-name>_s<seed>
    exp_name: str | None = None  # name of the experiment; None: <script>_<env-id>
    save_freq: PositiveInt = 1  # save the model and a checkpoint every N epochs, and at the end
    resume: bool = False  # continue the existing run, bit for bit, from its last checkpoint
    overwrite: bool = False  # replace the existing run
    keep_models: bool = False  # keep every saved model, for play.py --itr
    replay_size: PositiveInt = 1_000_000  # transitions in the replay buffer, per rank
    polyak: Fraction = 0.995  # targ = polyak * targ + (1 - polyak) * net
    lr: NonNegative = 1e-3  # learning rate of the policy, Q and alpha
    batch_size: PositiveInt = 100  # transitions per gradient step, per rank
    start_steps: NonNegativeInt = 10_000  # steps of random actions at the start, over all ranks
    update_after: NonNegativeInt = 1000  # steps before the first update, over all ranks
    update_every: PositiveInt = 50  # every N steps per rank, N updates (two ranks: half as many)
    num_test_episodes: NonNegativeInt = 10  # test episodes after each epoch, without noise
    alpha: NonNegative = 0.2  # reward per nat of entropy; with --autotune, its initial value
    autotune: bool = False  # learn alpha: keep the entropy near -(number of action dimensions)


class MLP:
    """Linear layers with ReLU between them; weights and biases from U(-1, 1) / sqrt(fan_in)."""

    def __init__(self, name, sizes, rng):
        self.params = []
        for i, (n_in, n_out) in enumerate(zip(sizes, sizes[1:])):
            for kind, shape in ("w", (n_out, n_in)), ("b", (n_out,)):
                init = (rng.uniform(-1, 1, shape) / np.sqrt(n_in)).astype(np.float32)
                self.params.append(tf.get_variable(f"{name}/{kind}{i}", initializer=init))

    def __call__(self, x):
        *hidden, w_out, b_out = self.params
        for w, b in zip(hidden[::2], hidden[1::2]):
            x = tf.nn.relu(tf.matmul(x, w, transpose_b=True) + b)
        return tf.matmul(x, w_out, transpose_b=True) + b_out


def mlp_numpy(params, x):
    """Evaluate the MLP on one observation in NumPy, twenty times faster than a session."""
    *hidden, w_out, b_out = params
    for w, b in zip(hidden[::2], hidden[1::2]):
        x = np.maximum(w @ x + b, 0)
    return w_out @ x + b_out


class Policy:
    """pi(a|o): a Gaussian from an MLP, squashed by tanh and scaled to each action's bounds."""

    def __init__(self, name, obs_dim, action_space, hidden_sizes, rng):
        low, high = action_space.low, action_space.high
        self.center = tf.get_variable(f"{name}/center", initializer=(high + low) / 2)
        self.half_range = tf.get_variable(f"{name}/half_range", initializer=(high - low) / 2)
        self.net = MLP(name, [obs_dim, *hidden_sizes, 2 * len(low)], rng)
        self.params = [self.center, self.half_range, *self.net.params]

    def dist(self, o):
        mu, log_std = tf.split(self.net(o), 2, axis=1)
        return mu, tf.clip_by_value(log_std, -20, 2)  # both [B, n]

    def __call__(self, o, noise):
        mu, log_std = self.dist(o)
        u = mu + tf.exp(log_std) * noise
        # log N(u; mu, std) - log(1 - tanh(u)^2), the second term in a form that stays finite
        logp = -(0.5 * noise**2 + log_std + 0.5 * np.log(2 * np.pi))
        logp = logp - 2 * (np.log(2) - u - tf.nn.softplus(-2 * u))
        logp = tf.reduce_sum(logp, 1)
        return self.center + self.half_range * tf.tanh(u), logp  # [B, n] and [B]

    @staticmethod
    def dist_numpy(params, o):
        _, _, *layers = params
        mu, log_std = np.split(mlp_numpy(layers, o), 2)
        return mu, log_std.clip(-20, 2)

    @classmethod
    def act(cls, params, o, rng=None):
        """Draw an action in NumPy; without rng, take the squashed mean."""
        (u, log_std), (center, half_range) = cls.dist_numpy(params, o), params[:2]
        if rng is not None:
            u = u + np.exp(log_std) * rng.standard_normal(u.size, np.float32)
        return center + half_range * np.tanh(u)


class QFunction:
    """Q(o, a): the expected discounted return after taking a in o."""

    def __init__(self, name, obs_dim, action_space, hidden_sizes, rng):
        self.net = MLP(name, [obs_dim + action_space.shape[0], *hidden_sizes, 1], rng)
        self.params = self.net.params

    def __call__(self, o, a):
        q = self.net(tf.concat([o, a], 1))
        return tf.squeeze(q, 1)  # [B]: a [B, 1] minus a [B] is a [B, B]


class ReplayBuffer:
    """The most recent transitions; the buffer takes up memory only as it fills."""

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


def train(args, run):
    # Set-up
    env, test_env = (make_env(args.env_id, args.max_ep_len, bounded_actions=True) for _ in range(2))
    low, high = env.action_space.low, env.action_space.high
    local_steps = args.steps_per_epoch // num_procs()
    if args.start_steps >= args.epochs * args.steps_per_epoch:
        warn(f"{flag('start_steps')} covers the whole run: all actions are random")
    if args.autotune and args.alpha < np.finfo(np.float32).tiny:
        raise SidespinError(f"{flag('autotune')} learns log(alpha): this alpha is too close to 0")

    # All randomness: one generator per rank, and one for the weights, the same on all ranks
    rng = np.random.default_rng([args.seed, proc_id()])
    weights_rng = np.random.default_rng([args.seed, 0, 1])

    # Networks
    obs_dim, act_dim = env.observation_space.shape[0], env.action_space.shape[0]
    pi = Policy("pi", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q1 = QFunction("q1", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q2 = QFunction("q2", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q1_targ = QFunction("q1_targ", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q2_targ = QFunction("q2_targ", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    params, targets = q1.params + q2.params, q1_targ.params + q2_targ.params
    log_alpha = tf.get_variable("log_alpha", initializer=tf.log(float(args.alpha)))
    pi_optimizer = MpiAdamOptimizer(pi.net.params, args.lr)
    q_optimizer = MpiAdamOptimizer(q1.params + q2.params, args.lr)
    alpha_optimizer = MpiAdamOptimizer([log_alpha], args.lr)
    sess = make_session(args.threads)
    sess.run([x_targ.assign(x) for x_targ, x in zip(targets, params)])
    buf = ReplayBuffer(obs_dim, act_dim, args.replay_size)

    # Update: one batch; a burst of updates runs as one graph
    def update(o, a, r, o2, d, noise, noise2):
        alpha = tf.exp(log_alpha)
        a2, logp2 = pi(o2, noise2)
        q_targ = q1_targ(o2, a2)
        q_targ = tf.minimum(q_targ, q2_targ(o2, a2))
        backup = tf.stop_gradient(r + args.gamma * (1 - d) * (q_targ - alpha * logp2))

        q1_vals = q1(o, a)
        loss_q = tf.reduce_mean((q1_vals - backup) ** 2)
        q2_vals = q2(o, a)
        loss_q = loss_q + tf.reduce_mean((q2_vals - backup) ** 2)
        q_optimizer.minimize(loss_q)

        a, logp = pi(o, noise)
        q_pi = tf.minimum(q1(o, a), q2(o, a))
        loss_pi = tf.reduce_mean(alpha * logp - q_pi)
        pi_optimizer.minimize(loss_pi)

        if args.autotune:
            loss_alpha = -tf.reduce_mean(log_alpha * (tf.stop_gradient(logp) - act_dim))
            alpha_optimizer.minimize(loss_alpha)

        for x_targ, x in zip(targets, params):
            x_targ.assign_add((1 - args.polyak) * (x - x_targ))
        stats = {"LossQ": loss_q, "Q1Vals": q1_vals, "LossPi": loss_pi, "Q2Vals": q2_vals}
        return stats | {"LogPi": logp, "Alpha": alpha}

    # Session: placeholders for the model and for a burst of batches, [n, B, ...]
    x = tf.placeholder(tf.float32, [None, obs_dim])
    a = tf.placeholder(tf.float32, [None, act_dim])
    outputs = {"pi": pi(x, tf.zeros([1, act_dim]))[0], "q1": q1(x, a), "q2": q2(x, a)}
    model = Model(sess, {"x": x, "a": a}, outputs)
    o, o2 = (tf.placeholder(tf.float32, [None, args.batch_size, obs_dim]) for _ in range(2))
    r, d = (tf.placeholder(tf.float32, [None, args.batch_size]) for _ in range(2))
    a, noise, noise2 = (
        tf.placeholder(tf.float32, [None, args.batch_size, act_dim]) for _ in range(3)
    )
    batch = [o, a, r, o2, d, noise, noise2]
    burst = sess.make_callable(compiled_loop(update, *batch), batch)

    def update_burst():
        batches = []
        for _ in range(args.update_every):
            batch = buf.sample_batch(args.batch_size, rng)
            noise, noise2 = rng.standard_normal((2, *batch[1].shape), np.float32)
            batches.append((*batch, noise, noise2))
        stats = burst(*map(np.stack, zip(*batches)))
        logger.store(**stats)

    # Act in NumPy, on a copy of the policy's parameters
    def get_pi_params():
        return sess.run(pi.params)

    # The NumPy policy must be the same function as the network
    o = weights_rng.standard_normal(obs_dim, np.float32)
    for x, y in zip(pi.dist_numpy(get_pi_params(), o), sess.run(pi.dist(o[None])), strict=True):
        if not np.allclose(x, y, atol=1e-4):
            raise SidespinError("mlp_numpy or dist_numpy differs from mlp or dist: change both")

    # Test without noise
    test_limit = test_env.spec.max_episode_steps or args.steps_per_epoch  # an episode may never end

    def test_agent(epoch):
        for i in range(proc_id(), args.num_test_episodes, num_procs()):
            seed = int(np.random.default_rng([args.seed, 0, 2, epoch, i]).integers(2**31))
            o, ep_ret, ep_len, over = test_env.reset(seed=seed)[0], 0.0, 0, False
            while not over:
                o, r, d, truncated, _ = test_env.step(pi.act(pi_params, o).clip(low, high))
                ep_ret, ep_len = ep_ret + r, ep_len + 1
                over = d or truncated or ep_len == test_limit
            logger.store(TestEpRet=ep_ret, TestEpLen=ep_len)

    # Logs and checkpoints
    logger = EpochLogger(
        run, "EpRet* TestEpRet* EpLen TestEpLen Q1Vals* Q2Vals* LogPi* Alpha LossPi LossQ"
    )
    checkpoint = Checkpoint(run, State(sess), rng, env, buf, test_env)

    # Loop
    o, ep_ret, ep_len = env.reset(seed=int(rng.integers(2**31)))[0], 0.0, 0
    first_epoch, o, ep_ret, ep_len = checkpoint.restore(o, ep_ret, ep_len)
    pi_params = get_pi_params()
    for epoch in range(first_epoch, args.epochs):
        for t in range(local_steps):
            steps = epoch * local_steps + t + 1  # on this rank, including the current one
            if steps * num_procs() <= args.start_steps:
                a = rng.uniform(low, high).astype(np.float32)
            else:
                a = pi.act(pi_params, o, rng).clip(low, high)
            o2, r, d, truncated, _ = env.step(a)
            buf.store(o, a, r, o2, d)
            o, ep_ret, ep_len = o2, ep_ret + r, ep_len + 1
            if d or truncated:
                logger.store(EpRet=ep_ret, EpLen=ep_len)
                o, ep_ret, ep_len = env.reset()[0], 0.0, 0
            if steps * num_procs() >= args.update_after and steps % args.update_every == 0:
                update_burst()
                pi_params = get_pi_params()
            logger.progress(epoch, t, local_steps)

        test_agent(epoch)

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
