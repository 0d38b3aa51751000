"""Deep Deterministic Policy Gradient (DDPG), in TensorFlow 1 style.

The idea: Q-learning where actions are continuous. Learn Q from the Bellman equation, and a policy
that climbs it, for the maximum over actions that cannot be searched:

    backup  = r + gamma (1 - d) Q1_targ(o2, pi_targ(o2))
    loss_q  = mean( (Q1(o, a) - backup)^2 )
    loss_pi = -mean( Q1(o, pi(o)) )

Transitions come from a replay buffer, d marks termination alone, noise is in units of each action's
half-range, and targets follow slowly: targ = polyak targ + (1 - polyak) net.

Lillicrap et al. 2015, Continuous Control with Deep Reinforcement Learning,
https://arxiv.org/abs/1509.02971

    python ddpg_tf1.py --env-id HalfCheetah-v4
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
    pi_lr: float = 1e-3  # learning rate of the policy
    q_lr: float = 1e-3  # learning rate of Q
    batch_size: int = 100  # transitions a rank samples for an update
    start_steps: int = 10_000  # steps of uniformly random actions at first, over all ranks
    update_after: int = 1000  # steps before the first update, over all ranks
    update_every: int = 50  # steps of a rank between bursts of as many updates
    num_test_episodes: int = 10  # episodes without noise to test the policy after each epoch
    act_noise: float = 0.1  # std of the exploration noise, in half-ranges of the action


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
    """pi(o): an MLP, its tanh stretched to the bounds of each action."""

    def __init__(self, name, obs_dim, action_space, hidden_sizes, rng):
        low, high = action_space.low, action_space.high
        self.center = tf.get_variable(f"{name}/center", initializer=(high + low) / 2)
        self.half_range = tf.get_variable(f"{name}/half_range", initializer=(high - low) / 2)
        self.net = MLP(name, [obs_dim, *hidden_sizes, len(low)], rng)
        self.params = [self.center, self.half_range, *self.net.params]

    def __call__(self, o):
        return self.center + self.half_range * tf.tanh(self.net(o))  # [B, n]


class QFunction:
    """Q(o, a): the return to expect after action a."""

    def __init__(self, name, obs_dim, action_space, hidden_sizes, rng):
        self.net = MLP(name, [obs_dim + action_space.shape[0], *hidden_sizes, 1], rng)
        self.params = self.net.params

    def __call__(self, o, a):
        q = self.net(tf.concat([o, a], 1))
        return tf.squeeze(q, 1)  # [B]: a [B, 1] minus a [B] is a [B, B]


def pi_numpy(params, o):
    """Compute pi for one observation in NumPy: much faster than through a framework."""
    center, half_range, *layers = params
    for w, b in zip(layers[:-2:2], layers[1:-2:2]):
        o = np.maximum(w @ o + b, 0)
    return center + half_range * np.tanh(layers[-2] @ o + layers[-1])


def act(params, o, rng=None, act_noise=0.0):
    """Take the policy's action in NumPy, plus noise if there is an rng."""
    a, half_range = pi_numpy(params, o), params[1]
    if rng is not None:
        a = a + act_noise * half_range * rng.standard_normal(a.size, np.float32)
    return a


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
    pi_targ = Policy("pi_targ", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    q1_targ = QFunction("q1_targ", obs_dim, env.action_space, args.hidden_sizes, weights_rng)
    pairs = list(zip(pi_targ.params + q1_targ.params, pi.params + q1.params))
    buf = ReplayBuffer(obs_dim, act_dim, args.replay_size)

    # Losses
    o_ph, o2_ph = (tf.placeholder(tf.float32, [None, obs_dim]) for _ in range(2))
    r_ph, d_ph = (tf.placeholder(tf.float32, [None]) for _ in range(2))
    a_ph = tf.placeholder(tf.float32, [None, act_dim])

    a2 = pi_targ(o2_ph)
    q_targ = q1_targ(o2_ph, a2)
    backup = r_ph + args.gamma * (1 - d_ph) * q_targ
    q1_vals = q1(o_ph, a_ph)
    loss_q = tf.reduce_mean((q1_vals - backup) ** 2)
    q_info = {"Q1Vals": q1_vals}

    # Update: the whole of it is one run of the session, its parts in this order
    train_q = MpiAdamOptimizer(args.q_lr).minimize(loss_q, q1.params)

    with tf.control_dependencies([train_q]):
        loss_pi = -tf.reduce_mean(q1(o_ph, pi(o_ph)))
        train_pi = MpiAdamOptimizer(args.pi_lr).minimize(loss_pi, pi.net.params)

    with tf.control_dependencies([train_pi]):
        update_targets = [t.assign_add((1 - args.polyak) * (p - t)) for t, p in pairs]

    mode = pi(o_ph)
    sess = make_session(args.threads)
    sess.run(sync_all_params())
    sess.run([t.assign(p) for t, p in pairs])
    model = Model(sess, {"x": o_ph, "a": a_ph}, {"pi": mode, "q1": q1_vals})

    def update():
        o, a, r, o2, d = buf.sample_batch(args.batch_size, rng)
        inputs = {o_ph: o, a_ph: a, r_ph: r, o2_ph: o2, d_ph: d}
        ops = {"LossQ": loss_q, **q_info, "LossPi": loss_pi}
        logger.store(**sess.run([ops, update_targets], inputs)[0])

    # Act in NumPy, on a copy of the network's parameters, taken after each update
    pi_params = sess.run(pi.params)
    o = weights_rng.standard_normal(obs_dim, np.float32)
    if not np.allclose(pi_numpy(pi_params, o), sess.run(mode, {o_ph: o[None]}), atol=1e-4):
        fail("pi_numpy and pi disagree: change pi_numpy as the network was changed")

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
                a = act(pi_params, o, rng, args.act_noise).clip(low, high)
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
