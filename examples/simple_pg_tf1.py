"""The simplest policy gradient, in TensorFlow 1 style: make the actions of good episodes likelier.

    loss_pi = -mean( log pi(a|o) R )

R is the return of the whole episode, the same for all of its steps.

    python examples/simple_pg_tf1.py
"""

import os
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import tyro

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium id of an environment with discrete actions
    seed: int = 0  # seed for the weights, the actions and the environment
    epochs: int = 50  # number of epochs, each with one gradient step
    steps_per_epoch: int = 5000  # environment steps per epoch; the last episode is completed
    hidden_size: int = 32  # units in the hidden layer
    lr: float = 1e-2  # learning rate


def mlp(x, sizes, rng):
    """Linear layers with tanh between them; weights and biases from U(-1, 1) / sqrt(fan_in)."""
    for i, (n_in, n_out) in enumerate(zip(sizes, sizes[1:])):
        w = tf.Variable(np.float32(rng.uniform(-1, 1, (n_out, n_in)) / np.sqrt(n_in)))
        b = tf.Variable(np.float32(rng.uniform(-1, 1, (n_out,)) / np.sqrt(n_in)))
        x = tf.matmul(x, w, transpose_b=True) + b
        x = tf.tanh(x) if i < len(sizes) - 2 else x
    return x


def main(args):
    env = gym.make(args.env_id)
    rng = np.random.default_rng(args.seed)
    obs_dim, n_actions = env.observation_space.shape[0], int(env.action_space.n)
    with tf.Graph().as_default():
        o_ph = tf.placeholder(tf.float32, [None, obs_dim])
        a_ph = tf.placeholder(tf.int64, [None])
        weights_ph = tf.placeholder(tf.float32, [None])
        logits = mlp(o_ph, [obs_dim, args.hidden_size, n_actions], rng)
        logp = tf.gather(tf.nn.log_softmax(logits), a_ph, batch_dims=1)  # [B]
        loss = -tf.reduce_mean(logp * weights_ph)
        train = tf.train.AdamOptimizer(args.lr).minimize(loss)
        sess = tf.Session()
        sess.run(tf.global_variables_initializer())
    env.reset(seed=args.seed)
    history = []
    for epoch in range(args.epochs):
        batch, returns = [], []
        while len(batch) < args.steps_per_epoch:
            episode, over, o = [], False, np.float32(env.reset()[0])
            while not over:
                scores = sess.run(logits, {o_ph: o[None]})[0]
                # argmax(logits + Gumbel noise) is a sample from softmax(logits)
                a = np.argmax(scores + rng.gumbel(size=n_actions))
                o2, r, terminated, truncated, _ = env.step(a)
                episode.append((o, a, r))
                o, over = np.float32(o2), terminated or truncated
            returns.append(sum(r for _, _, r in episode))
            weights = [returns[-1]] * len(episode)
            batch += [(o, a, np.float32(w)) for (o, a, _), w in zip(episode, weights)]

        o, a, weights = (np.array(x) for x in zip(*batch))
        loss_pi, _ = sess.run([loss, train], {o_ph: o, a_ph: a, weights_ph: weights})
        history.append(np.mean(returns))
        print(f"epoch {epoch:3d}  return {history[-1]:7.2f}  loss_pi {loss_pi:9.4f}", flush=True)
    return history


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
