"""Starting the scripts as users do, and reading what they leave."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).parent.parent
ON_POLICY = ["vpg", "ppo", "trpo"]
TORCH = [f"{algo}_torch" for algo in ON_POLICY]
TF1 = [f"{algo}_tf1" for algo in ON_POLICY]
SCRIPTS = TORCH + TF1
MPIRUN = str(Path(sys.executable).parent / "mpirun")


def start(*command, cwd=ROOT, ranks=1, timeout=300):
    """Run `python command` under the launcher; test environments are importable as envs:Name-v0."""
    launcher = [MPIRUN, "-np", str(ranks)] if ranks > 1 else []
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(
        [*launcher, sys.executable, *map(str, command)],
        cwd=cwd,
        env=env,
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def train(script, data_dir, **kwargs):
    """Call main(Args(...)) of a script in this process; return the run's folder."""
    module = importlib.import_module(script)
    return module.main(module.Args(data_dir=str(data_dir), **kwargs))


def progress(folder):
    """Read progress.txt as a table."""
    return pd.read_csv(Path(folder) / "progress.txt", sep="\t")


def only_run(data_dir):
    """Return the folder of the only run below data_dir."""
    (config,) = Path(data_dir).glob("*/*/config.json")
    return config.parent


def params_of(folder):
    """Read the saved policy and value function: two lists of arrays, layer by layer."""
    folder = Path(folder)
    if (folder / "model.pt").exists():
        import torch

        state = torch.load(folder / "model.pt", weights_only=True)
        state = {name: x.numpy() for name, x in state.items()}
    else:
        import tensorflow.compat.v1 as tf

        reader = tf.train.load_checkpoint(str(folder / "tf1_save" / "variables" / "variables"))
        layer = {"log_std": -1}
        names = sorted(
            reader.get_variable_to_shape_map(),
            key=lambda n: (layer.get(n.split("/")[1], n[-1]) != -1, n[-1], "b" in n.split("/")[1]),
        )
        state = {name.replace("/", "."): reader.get_tensor(name) for name in names}
    return [[x for name, x in state.items() if name.startswith(net)] for net in ("pi.", "v.")]


def relative_distance(x, y):
    """Return |x - y| / |y| of two arrays or lists of arrays."""
    x, y = (np.concatenate([np.ravel(part) for part in z]).astype(np.float64) for z in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)
