"""The limit of any script's speed: the environment's steps and the matrix products of updates.

The products are computed by torch, NumPy or XLA, whichever is fastest on this machine.

    python limits.py Hopper-v4 sac 100 256 256

speed.py starts and paces it, and sends it the actions that a script took in its window.
"""

import os
import sys
import time
import warnings
from multiprocessing.connection import Client

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}

import gymnasium as gym
import numpy as np
import torch


def linear(batch_size, sizes, weight_grads=False, input_grads=False):
    """Return the products of an MLP on a batch as (rows, inner, columns): forward, backward.

    The gradient of a layer's input is needed only by the layers below, so not for the first layer,
    unless input_grads asks for the gradient of the network's input (such as an action, through Q).
    """
    products = []
    for i, (n_in, n_out) in enumerate(zip(sizes, sizes[1:])):
        products.append((batch_size, n_in, n_out))
        if weight_grads:
            products.append((n_out, batch_size, n_in))
        if input_grads or (weight_grads and i > 0):
            products.append((batch_size, n_out, n_in))
    return products


def products_of_update(algo, batch_size, hidden_sizes, obs_dim, act_dim):
    """Return the products of two updates, because TD3 updates its policy in only one of them."""
    q_sizes = [obs_dim + act_dim, *hidden_sizes, 1]
    pi_sizes = [obs_dim, *hidden_sizes, act_dim * (2 if algo == "sac" else 1)]
    qs = 1 if algo == "ddpg" else 2
    update_q = linear(batch_size, pi_sizes)  # the next action
    update_q += qs * linear(batch_size, q_sizes)  # its value, from the target networks
    update_q += qs * linear(batch_size, q_sizes, weight_grads=True)
    update_pi = linear(batch_size, pi_sizes, weight_grads=True)
    update_pi += (qs if algo == "sac" else 1) * linear(batch_size, q_sizes, input_grads=True)
    return 2 * update_q + (1 if algo == "td3" else 2) * update_pi


def by_torch(products):
    jobs = [(torch.randn(n, k), torch.randn(k, m), torch.empty(n, m)) for n, k, m in products]

    def compute(times):
        for x, y, out in times * jobs:
            torch.mm(x, y, out=out)

    return compute


def by_numpy(products):
    jobs = [[x.numpy() for x in map(torch.randn, ((n, k), (k, m), (n, m)))] for n, k, m in products]

    def compute(times):
        for x, y, out in times * jobs:
            np.matmul(x, y, out=out)

    return compute


def by_xla(products):
    import tensorflow as tf

    jobs = [(tf.random.normal((n, k)), tf.random.normal((k, m))) for n, k, m in products]

    @tf.function(jit_compile=True)
    def compute(times):
        def body(i, _):
            # What does not depend on i, XLA would compute once, before the loop.
            return i + 1, [(x + 1e-9 * tf.cast(i, x.dtype)) @ y for x, y in jobs]

        zeros = [tf.zeros((n, m)) for n, _, m in products]
        _, results = tf.while_loop(lambda i, _: i < times, body, (0, zeros))
        return tf.add_n([x[0, 0] for x in results])

    return lambda times: compute(tf.constant(times))


def fastest(products, times=25, rounds=5):
    """Return a function that computes all products in the fastest way, and that way's name."""
    ways = {"torch": by_torch, "numpy": by_numpy, "xla": by_xla} if products else {}
    ways = {name: way(products) for name, way in ways.items()}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, compute in ways.items():
            start = time.perf_counter()
            compute(times)
            best[name] = min(best[name], time.perf_counter() - start)
    name = min(best, key=best.get, default=None)
    return ways.get(name), name


def main(env_id, algo=None, batch_size=0, *hidden_sizes):
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a newer version
        env = gym.make(env_id)
    env.reset(seed=0)
    spaces = env.observation_space.shape[0], env.action_space.shape[0]
    sizes = int(batch_size), [int(n) for n in hidden_sizes]
    two_updates, way = fastest(products_of_update(algo, *sizes, *spaces) if algo else [])
    connection = Client(os.environ["PACE"])
    while True:
        actions = connection.recv()
        start = time.perf_counter()
        for a in actions:
            _, _, terminated, truncated, _ = env.step(a)
            if terminated or truncated:
                env.reset()
        if two_updates:
            two_updates(len(actions) // 2)
        connection.send((start, time.perf_counter(), way, 0, {}))


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
