"""Starting the scripts as users do, and reading what they leave."""

import contextlib
import fcntl
import functools
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

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
TIMES = ["Time", "StepsPerSec"]  # columns that no two runs share
# Saved beside the weights, but not trained: bounds of actions, running statistics
STATISTICS = re.compile(r"(center|half_range|(obs|returns)[._](mean|std|batches))$")


def start(*command, timeout=300, **how):
    """Run `python command` to its end; see popen()."""
    process = popen(*command, **how)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def popen(*command, cwd=ROOT, ranks=1, warm=False, **kwargs):
    """Start `python command` under the launcher; test environments are importable as envs:Name-v0.

    With warm="torch" or "tf1" the command begins with a script, which starts at once: see warm.py;
    warm=True tells the framework by the script's name.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    env.pop("PYTHONUNBUFFERED", None)  # most users do not have it
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    words = python(*command, ranks=ranks, warm=warm)
    return subprocess.Popen(words, cwd=cwd, **{"env": env, **streams, **kwargs})


def python(*command, ranks=1, warm=False):
    """Return the words of `mpirun -np ranks python command`."""
    launcher = [MPIRUN, "-np", str(ranks)] if ranks > 1 else []
    words = [*launcher, sys.executable]
    if warm and sys.platform == "linux":
        if warm is True:
            warm = "tf1" if "tf1" in Path(command[0]).name else "torch"
        words += ["-IS", str(ROOT / "tests" / "warm.py"), warm_server(warm)]
    return [*words, *map(str, command)]


@functools.cache
def warm_server(framework):
    """Return the address of a process that forks scripts; it is started once per session."""
    address = str(session_folder() / f"{framework}.socket")
    with once(address) as needed:
        if needed:
            command = [sys.executable, ROOT / "tests" / "warm.py", address, framework]
            server = subprocess.Popen([*command, str(session_pid())], stdout=subprocess.PIPE)
            assert server.stdout.readline() == b"ready\n"
    return address


def session_pid():
    """Return the id of the process that pytest was started as."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def session_folder():
    """Return a folder that all processes of a session share; it is deleted at the end."""
    folder = Path(tempfile.gettempdir()) / f"sidespin-{session_pid()}"
    folder.mkdir(exist_ok=True)
    return folder


def scratch():
    """Return a folder of this process alone; it is deleted at the end of the session."""
    folder = session_folder() / str(os.getpid())
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def once(path):
    """Tell whether this is the first process of the session to make a file, the others wait."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not os.path.exists(path)


def as_flags(**settings):
    """Write settings as a command line."""
    words = []
    for key, value in settings.items():
        values = value if isinstance(value, tuple) else [value]
        words += ["--" + key.replace("_", "-"), *(str(x) for x in values if x is not True)]
    return words


def train(script, data_dir, xla=False, **settings):
    """Call main(Args(...)) of a script in this process; return the run's folder.

    Compiling takes as long as all the rest of a brief run, so TF1 scripts run the plain graph that
    they have on several ranks; with xla=True they run as in a process of their own.
    """
    module = importlib.import_module(script)
    args = module.Args(data_dir=str(data_dir), **settings)
    with pytest.MonkeyPatch.context() as patch:
        if script in TF1 and not xla:
            for owner in (script, "common.tf1_utils"):
                patch.setattr(f"{owner}.compiled", module.tf.function, raising=False)
        return module.main(args)


def refusal(script, words, monkeypatch, capsys):
    """Give a script a wrong command line, in this process; return the sentence that it raises."""
    from common.errors import SidespinError
    from common.launch import parse_args

    module = importlib.import_module(script)
    monkeypatch.setattr("common.errors.command_line", True)
    monkeypatch.setattr("sys.argv", [f"{script}.py", *words])
    try:
        module.main(parse_args(module.Args, module.__doc__))
    except SidespinError as error:
        shown = capsys.readouterr()
        assert (error.exit_code, shown.out, shown.err) == (2, "", "")
        return str(error)
    raise AssertionError(f"{script} took {words}")


def progress(folder):
    """Read progress.txt as a table."""
    return pd.read_csv(Path(folder) / "progress.txt", sep="\t")


def only_run(data_dir):
    """Return the folder of the only run below data_dir."""
    (config,) = Path(data_dir).glob("*/*/config.json")
    return config.parent


def files_in(folder):
    """Return the content of every file in a folder."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def outcome(folder):
    """Return all that two equal runs have in common, to the byte: table, checkpoints and model."""
    folder = Path(folder)
    lines = [line.split("\t") for line in (folder / "progress.txt").read_text().splitlines()]
    kept = [i for i, key in enumerate(lines[0]) if key not in TIMES]
    rows = [[line[i] for i in kept] for line in lines]
    assert [row[0] for row in rows] == ["Epoch", *map(str, range(len(rows) - 1))], "each once"
    model = [folder / "model.pt", *(folder / "tf1_save" / "variables").glob("*.data*")]
    paths = [*folder.glob("checkpoint/*"), *filter(Path.exists, model)]
    return {"rows": rows, **{path.name: path.read_bytes() for path in paths}}


def assert_same(folder, other):
    """Assert that two runs have the same outcome."""
    one, two = outcome(folder), outcome(other)
    assert one.keys() == two.keys()
    assert [key for key in one if one[key] != two[key]] == []


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
    """Order pi/log_std, pi/obs_mean, ..., pi/w0, pi/b0, pi/w1, ... as torch does."""
    leaf, first = name.split("/")[1], ["center", "half_range", "log_std"]
    first += [f"{x}_{y}" for x in ("obs", "returns") for y in ("mean", "std", "batches")]
    return (first.index(leaf), 0) if leaf in first else (len(first) + int(leaf[1:]), leaf[0] == "b")


def relative_distance(x, y):
    """Return |x - y| / |y| of two arrays or lists of arrays."""
    x, y = (np.concatenate([np.ravel(part) for part in z]).astype(np.float64) for z in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


def brief(script, **settings):
    """Return the settings of a run that takes a moment, with updates in each of its two epochs."""
    run = dict(env_id="Pendulum-v1", seed=7, epochs=2, steps_per_epoch=100, max_ep_len=50)
    run |= dict(hidden_sizes=(8,))
    if script in OFF_POLICY_SCRIPTS:
        run |= dict(start_steps=40, update_after=60, update_every=20, batch_size=16)
        run |= dict(replay_size=150, num_test_episodes=2)
    else:
        run |= dict(train_v_iters=2)
    return {**run, **settings}


@functools.cache
def trained(script):
    """Return the folder of a run of brief() settings, made once for all tests that only read it."""
    name = f"{script}_Pendulum-v1"
    folder = session_folder() / name / f"{name}_s7"
    with once(session_folder() / f"{name}.done") as needed:
        if needed:
            assert train(script, session_folder(), xla=True, **brief(script)) == folder
            (session_folder() / f"{name}.done").touch()
    return folder
