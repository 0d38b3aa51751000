"""Soft Actor-Critic (SAC), in TensorFlow 1 style.

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

    python sac_tf1.py --env-id HalfCheetah-v4
"""

from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Box

from common.quiet import quiet

with quiet(onednn=True):  # TensorFlow talks when it is imported
    import tensorflow.compat.v1 as tf

from common.args import check_args, parse_args
from common.checkpoint import Checkpoint
from common.env import make_env
from common.logger import EpochLogger
from common.mpi import fail, mpi_fork, num_procs, per_rank, proc_id
from common.tf1_utils import Model, MpiAdamOptimizer, make_session, save_model, sync_all_params


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


class Policy:
    """pi(a|o): a Gaussian from an MLP, its tanh stretched to the bounds of each action."""

    def __init__(self, name, obs_dim, action_space, hidden_sizes, rng):
        low, high = action_space.low, action_space.high
        self.center = tf.get_variable(f"{name}/center", initializer=(high + low) / 2)
        self.half_range = tf.get_variable(f"{name}/half_range", initializer=(high - low) / 2)
        self.net = MLP(name, [obs_dim, *hidden_sizes, 2 * len(low)], rng)
        self.params = [self.center, self.half_range, *self.net.params]

    def dist(self, o):
        mu, log_std = tf.split(self.net(o), 2, -1)
        return mu, tf.clip_by_value(log_std, -20, 2)  # both [B, n]

    def __call__(self, o, noise):
        mu, log_std = self.dist(o)
        u = mu + tf.exp(log_std) * noise
        # log N(u; mu, std) - log(1 - tanh(u)^2), the latter in a form that stays finite
        logp = -(0.5 * noise**2 + log_std + 0.5 * np.log(2 * np.pi))
        logp = logp - 2 * (np.log(2) - u - tf.nn.softplus(-2 * u))
        return self.center + self.half_range * tf.tanh(u), tf.reduce_sum(logp, 1)  # [B, n] and [B]


class QFunction:
    """Q(o, a): the return to expect after action a."""

    def __init__(self, name, obs_dim, action_space, hidden_sizes, rng):
        self.net = MLP(name, [obs_dim + action_space.shape[0], *hidden_sizes, 1], rng)
        self.params = self.net.params

    def __call__(self, o, a):
        q = self.net(tf.concat([o, a], 1))
        return tf.squeeze(q, 1)  # [B]: a [B, 1] minus a [B] is a [B, B]


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
    tf.reset_default_graph()
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
    pi = Policy("pi", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q1 = QFunction("q1", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q2 = QFunction("q2", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q1_targ = QFunction("q1_targ", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q2_targ = QFunction("q2_targ", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    pairs = list(zip(q1_targ.params + q2_targ.params, q1.params + q2.params))
    log_alpha = tf.get_variable("log_alpha", initializer=tf.math.log(float(args.alpha)))
    buf = ReplayBuffer(obs_dim, act_dim, args.replay_size)

    # Losses
    o_ph, o2_ph = (tf.placeholder(tf.float32, [None, obs_dim]) for _ in range(2))
    r_ph, d_ph = (tf.placeholder(tf.float32, [None]) for _ in range(2))
    a_ph, noise_ph, noise2_ph = (tf.placeholder(tf.float32, [None, act_dim]) for _ in range(3))

    alpha = tf.exp(log_alpha)
    a2, logp2 = pi(o2_ph, noise2_ph)
    q_targ = tf.minimum(q1_targ(o2_ph, a2), q2_targ(o2_ph, a2))
    backup = r_ph + args.gamma * (1 - d_ph) * (q_targ - alpha * logp2)
    q1_vals, q2_vals = q1(o_ph, a_ph), q2(o_ph, a_ph)
    loss_q = tf.reduce_mean((q1_vals - backup) ** 2) + tf.reduce_mean((q2_vals - backup) ** 2)
    q_info = {"Q1Vals": q1_vals, "Q2Vals": q2_vals}

    # Update: the whole of it is one run of the session, its parts in this order
    train_q = MpiAdamOptimizer(args.lr).minimize(loss_q, q1.params + q2.params)

    with tf.control_dependencies([train_q]):
        a, logp = pi(o_ph, noise_ph)
        q_pi = tf.minimum(q1(o_ph, a), q2(o_ph, a))
        loss_pi = tf.reduce_mean(alpha * logp - q_pi)
        train_pi = MpiAdamOptimizer(args.lr).minimize(loss_pi, pi.net.params)
    pi_info = {"LogPi": logp, "Alpha": alpha}

    with tf.control_dependencies([train_pi]):
        loss_alpha = -tf.reduce_mean(log_alpha * (logp - act_dim))
        train_alpha = MpiAdamOptimizer(args.lr).minimize(loss_alpha, [log_alpha])

    with tf.control_dependencies([train_pi]):
        update_targets = [t.assign_add((1 - args.polyak) * (p - t)) for t, p in pairs]

    mode = pi(o_ph, tf.zeros([1, act_dim]))[0]
    sess = make_session(args.threads)
    sess.run(sync_all_params())
    sess.run([t.assign(p) for t, p in pairs])
    model = Model(sess, {"x": o_ph, "a": a_ph}, {"pi": mode, "q1": q1_vals, "q2": q2_vals})

    def update():
        o, a, r, o2, d = buf.sample_batch(args.batch_size, rng)
        noise, noise2 = rng.standard_normal((2, *a.shape), np.float32)
        inputs = {o_ph: o, a_ph: a, r_ph: r, o2_ph: o2, d_ph: d}
        inputs |= {noise_ph: noise, noise2_ph: noise2}
        ops = {"LossQ": loss_q, **q_info, "LossPi": loss_pi, **pi_info}
        train = [update_targets, train_alpha] if args.autotune else update_targets
        logger.store(**sess.run([ops, train], inputs)[0])

    # Act in NumPy, on a copy of the network's parameters, taken after each update
    pi_params = sess.run(pi.params)
    o = weights_rng.standard_normal(obs_dim, np.float32)
    for x, y in zip(dist_numpy(pi_params, o), sess.run(pi.dist(o[None])), strict=True):
        if not np.allclose(x, y, atol=1e-4):
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
    checkpoint = Checkpoint(logger, model, rng, env, buf)

    # Loop
    o, ep_ret, ep_len = env.reset(seed=int(rng.integers(2**31)))[0], 0.0, 0
    first_epoch, o, ep_ret, ep_len = checkpoint.restore(o, ep_ret, ep_len)
    pi_params = sess.run(pi.params)
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
                pi_params = sess.run(pi.params)
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
