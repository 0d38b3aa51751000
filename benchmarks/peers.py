"""Train with Stable-Baselines3, sb3-contrib or SBX, matched to our scripts; speed.py runs this.

python peers.py sb3 sac Hopper-v4 '{"batch_size": 100, "hidden_sizes": [256, 256], "burst": 1}'
"""

import importlib
import json
import sys

import gymnasium as gym
import numpy as np
import torch

sys.modules["tensorflow"] = None  # if SBX finds TensorFlow, it also wants a second Keras
from stable_baselines3.common.noise import NormalActionNoise  # noqa: E402

MODULES = {"sb3": "stable_baselines3", "sb3-contrib": "sb3_contrib", "sbx": "sbx"}


def on_policy(algo, steps, iters, hidden_sizes):
    """Return settings for one batch of all steps, used `iters` times."""
    networks = {"pi": hidden_sizes, "vf": hidden_sizes}
    settings = {"n_steps": steps, "batch_size": steps, "gamma": 0.99, "gae_lambda": 0.97}
    if algo == "trpo":
        settings |= {"n_critic_updates": iters, "cg_max_steps": 10, "cg_damping": 0.1}
        settings |= {"line_search_max_iter": 10, "target_kl": 0.01}
    else:
        settings |= {"n_epochs": iters}
    return {**settings, "policy_kwargs": {"net_arch": networks}}


def off_policy(algo, batch_size, hidden_sizes, burst):
    """Return settings for `burst` updates after every `burst` steps."""
    settings = {"batch_size": batch_size, "buffer_size": 1_000_000, "learning_starts": 1000}
    settings |= {
        "train_freq": burst,
        "gradient_steps": burst,
        "policy_kwargs": {"net_arch": hidden_sizes},
    }
    if algo == "sac":
        settings["ent_coef"] = 0.2
    else:
        settings["action_noise"] = NormalActionNoise(np.zeros(3), 0.1 * np.ones(3))
    return settings


if __name__ == "__main__":
    package, algo, env_id, settings = *sys.argv[1:4], json.loads(sys.argv[4])
    library = importlib.import_module(MODULES[package])
    torch.set_num_threads(1)
    settings = (on_policy if "steps" in settings else off_policy)(algo, **settings)
    env = gym.make(env_id)
    kind = getattr(library, algo.upper())
    kind("MlpPolicy", env, device="cpu", seed=0, **settings).learn(10**9)
