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
OFF_POLICY = ["ddpg", "td3", "sac"]
TORCH = [f"{algo}_torch" for algo in ON_POLICY + OFF_POLICY]
TF1 = [f"{algo}_tf1" for algo in ON_POLICY + OFF_POLICY]
SCRIPTS = TORCH + TF1
ON_POLICY_SCRIPTS = [f"{algo}_{framework}" for framework in ("torch", "tf1") for algo in ON_POLICY]
OFF_POLICY_SCRIPTS = [
    f"{algo}_{framework}" for framework in ("torch", "tf1") for algo in OFF_POLICY
]
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
    args = module.Args(data_dir=str(data_dir), **kwargs)
    if script in OFF_POLICY_SCRIPTS:  # a short run may be all random
        args.start_steps = min(args.start_steps, args.epochs * args.steps_per_epoch)
    return module.main(args)


def refusal(script, words, monkeypatch, capsys):
    """Call a script in this process with a wrong command line; return the sentence it ends with."""
    module = importlib.import_module(script)
    monkeypatch.setattr("common.args.end_together", lambda: None)  # signals are pytest's here
    monkeypatch.setattr("sys.argv", [f"{script}.py", *words])
    try:
        module.main(module.parse_args(module.Args, module.__doc__))
    except SystemExit as ended:
        shown = capsys.readouterr()
        assert (ended.code, shown.out, shown.err.count("\n")) == (2, "", 1), shown.err
        return shown.err.removeprefix(f"{script}.py: error: ")
    raise AssertionError(f"{script} took {words}")


def progress(folder):
    """Read progress.txt as a table."""
    return pd.read_csv(Path(folder) / "progress.txt", sep="\t")


def only_run(data_dir):
    """Return the folder of the only run below data_dir."""
    (config,) = Path(data_dir).glob("*/*/config.json")
    return config.parent


def params_of(folder):
    """Read the saved networks: {"pi": arrays, "v" or "q1", "q2": arrays}, layer by layer."""
    folder = Path(folder)
    if (folder / "model.pt").exists():
        import torch

        state = torch.load(folder / "model.pt", weights_only=True)
        arrays = [(name.split(".")[0], x.numpy()) for name, x in state.items()]
    else:
        import tensorflow.compat.v1 as tf

        reader = tf.train.load_checkpoint(str(folder / "tf1_save" / "variables" / "variables"))
        names = [name for name in reader.get_variable_to_shape_map() if "/" in name]
        names.sort(key=layer)
        arrays = [(name.split("/")[0], reader.get_tensor(name)) for name in names]
    nets = dict.fromkeys(net for net, _ in arrays if not net.endswith("_targ"))
    return {net: [x for owner, x in arrays if owner == net] for net in nets}


def layer(name):
    """Order pi/center, pi/half_range, pi/log_std, pi/w0, pi/b0, pi/w1, ... as torch does."""
    leaf, first = name.split("/")[1], ["center", "half_range", "log_std"]
    return (first.index(leaf), 0) if leaf in first else (3 + int(leaf[1:]), leaf[0] == "b")


def relative_distance(x, y):
    """Return |x - y| / |y| of two arrays or lists of arrays."""
    x, y = (np.concatenate([np.ravel(part) for part in z]).astype(np.float64) for z in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)
