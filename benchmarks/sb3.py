"""Train Stable-Baselines3 with its own defaults, into a folder that learning.py and plot.py read.

    pip install -r benchmarks/requirements.txt
    python benchmarks/sb3.py ppo --env-id Hopper-v4 --seed 0

The table has one row per 4000 steps, like those of our scripts: on-policy, the mean return of the
training episodes that ended in them; for SAC, that of ten test episodes without noise.
"""

import importlib
import json
import sys
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro

sys.modules["tensorflow"] = None  # SB3 would import it for its own logger
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402

PACKAGES = {"ppo": "stable_baselines3", "trpo": "sb3_contrib", "sac": "stable_baselines3"}
VERSIONS = "numpy torch gymnasium mujoco stable-baselines3 sb3-contrib".split()


@dataclass
class Args:
    algo: Annotated[Literal["ppo", "trpo", "sac"], tyro.conf.Positional]
    env_id: str = "Hopper-v4"  # Gymnasium id
    seed: int = 0  # seed for everything
    steps: int = 1_000_000  # environment steps
    data_dir: str = "runs/learning"  # write to <data-dir>/sb3_<algo>-default_<env-id>/


class Table(BaseCallback):
    """Write progress.txt, one row per 4000 steps."""

    def __init__(self, file, test_env):
        super().__init__()
        self.file, self.test_env = file, test_env
        self.start, self.returns = time.time(), []
        returns = "AverageTestEpRet" if test_env else "AverageEpRet"
        self.write("Epoch", "TotalEnvInteracts", returns, "Time")

    def write(self, *cells):
        print(*cells, sep="\t", file=self.file, flush=True)

    def _on_step(self):
        self.returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        if self.num_timesteps % 4000 == 0:
            if self.test_env:
                self.returns, _ = evaluate_policy(
                    self.model, self.test_env, 10, return_episode_rewards=True
                )
            mean = np.mean(self.returns) if self.returns else float("nan")
            epoch = self.num_timesteps // 4000 - 1
            self.write(epoch, self.num_timesteps, mean, time.time() - self.start)
            self.returns = []
        return True


def main(args):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that there are newer environments
    name = f"sb3_{args.algo}-default_{args.env_id}"
    folder = Path(args.data_dir) / name / f"{name}_s{args.seed}"
    folder.mkdir(parents=True)  # a run that is there already is never overwritten
    config = {"script": f"sb3_{args.algo}", "env_id": args.env_id, "seed": args.seed}
    config |= {"exp_name": name, "epochs": args.steps // 4000}
    config["versions"] = {x: version(x) for x in VERSIONS if find_spec(x.replace("-", "_"))}
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    kind = getattr(importlib.import_module(PACKAGES[args.algo]), args.algo.upper())
    model = kind("MlpPolicy", gym.make(args.env_id), device="cpu", seed=args.seed)
    test_env = Monitor(gym.make(args.env_id)) if args.algo == "sac" else None
    if test_env:
        test_env.reset(seed=args.seed)
    with open(folder / "progress.txt", "w") as file:
        model.learn(args.steps, callback=Table(file, test_env))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
