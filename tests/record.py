"""Train with a script and keep what it saw and logged; read its checkpoints.

Started on its own, under mpirun, it runs several scripts one after the other in one process:

    mpirun -np 2 python tests/record.py JOBS.json OUT

JOBS.json maps names to {"script": ..., settings}. OUT/<name> is the run's data_dir, and
OUT/<name>.<rank>.npz holds the batch of that rank's first update.
"""

import contextlib
import copy
import functools
import importlib
import io
import json
import re
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.checkpoint import unpack
from common.mpi import comm, proc_id

ADAMS = {"vpg": "pi v", "ppo": "pi v", "trpo": "v", "ddpg": "pi q", "td3": "pi q"}
ADAMS["sac"] = "pi q alpha"  # a script's optimizers, in order


def record(script, data_dir, join=(), module=None, plain=False, **settings):
    """Train and return what was seen on the way.

    batches  what the buffer gave for each update; with join, the first is replaced by these files'
    rngs     off-policy: copies of the generator right after that, to draw the same noise again
    stored   what went to the logger, one dictionary per call
    buffer   the buffer
    folder   the run's folder

    With plain=True a TF1 script builds the graph that it has on several ranks, without XLA.
    """
    module = module or importlib.import_module(script)
    kept = SimpleNamespace(script=script, batches=[], rngs=[], stored=[])
    kept.args = module.Args(data_dir=str(data_dir), **settings)
    on_policy = hasattr(module, "GAEBuffer")
    owner, name = (module.GAEBuffer, "get") if on_policy else (module.ReplayBuffer, "sample_batch")
    sample, store = getattr(owner, name), module.EpochLogger.store

    def sample_and_keep(self, *args):
        batch = sample(self, *args)
        if join and not kept.batches:
            batch = [np.concatenate(parts) for parts in zip(*map(load_batch, join))]
        kept.batches.append([np.array(x) for x in batch])
        if not on_policy:
            kept.rngs.append(copy.deepcopy(args[-1]))
        kept.buffer = self
        return batch

    def store_and_keep(self, **numbers):
        store(self, **numbers)
        kept.stored.append({key: self.stored[key][-1].astype(float) for key in numbers})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, sample_and_keep)
        patch.setattr(module.EpochLogger, "store", store_and_keep)
        if plain:
            patch.setattr("common.tf1_utils.num_procs", lambda: 2)
        kept.folder = module.main(kept.args)
    return kept


@functools.cache
def recorded(script, plain=False, **settings):
    """Do the same once for all tests that ask for the same run."""
    return record(script, tempfile.mkdtemp(dir=scratch()), plain=plain, **settings)


@functools.cache
def scratch():
    folder = tempfile.TemporaryDirectory(prefix="sidespin")
    scratch.owner = folder  # deleted when Python ends
    return folder.name


def logged(kept, key):
    """Return all numbers that a run logged under a name, in order."""
    return np.concatenate([numbers[key] for numbers in kept.stored if key in numbers])


def load_batch(file):
    with np.load(file) as arrays:
        return [arrays[f"batch{i}"] for i in range(len(arrays))]


def checkpoint(folder, epoch, rank=0):
    """Return a rank's part of a checkpoint.

    nets  arrays by network, layer by layer: pi, v, q1, q2, targ.pi, targ.q1, targ.q2, log_alpha
    adam  by name (pi, v, q, alpha): t, and the moments m and v as flat vectors
    """
    path = Path(folder) / "checkpoint" / f"epoch{epoch}.rank{rank}.npz"
    with np.load(path) as arrays:
        state = unpack(dict(arrays))["state"]
    script = json.loads((Path(folder) / "config.json").read_text())["script"]
    names = ADAMS[script.split("_")[0]].split()
    if isinstance(state, dict):  # TF1: variables by name, those of Adam without one
        adam = []
        for x in (x for name, x in state.items() if name.startswith("Variable")):
            if x.dtype == np.int64:
                adam.append((x, []))
            else:
                adam[-1][1].append(x)
        adam = [(t, xs[: len(xs) // 2], xs[len(xs) // 2 :]) for t, xs in adam]
        nets = by_network(state)
    else:  # torch: state_dicts
        modules = [part for part in state if "param_groups" not in part]
        prefixes = "", "targ.", "log_alpha."
        nets = by_network({p + k: x for p, part in zip(prefixes, modules) for k, x in part.items()})
        adam = []
        for part in state[len(modules) :]:
            steps = list(part["state"].values())
            t = steps[0]["step"] if steps else 0
            adam.append((t, *([s[key] for s in steps] for key in ("exp_avg", "exp_avg_sq"))))
    adam = {
        name: SimpleNamespace(t=int(t), m=flat(m), v=flat(v))
        for name, (t, m, v) in zip(names, adam, strict=True)
    }
    return SimpleNamespace(nets=nets, adam=adam)


def kept_model(folder, epoch):
    """Return the networks that --keep-models kept, in the same form."""
    if (Path(folder) / "model.pt").exists():
        from common.torch_utils import load_model

        return by_network(load_model(Path(folder) / f"model_{epoch}.pt"))
    from common.tf1_utils import load_model

    return by_network(load_model(Path(folder) / f"tf1_save_{epoch}"))


def by_network(arrays):
    """Group arrays by network; names are q1.net.0.weight, targ.q1.net.0.weight or q1_targ/w0."""
    nets = {}
    for name, x in arrays.items():
        of_net = re.match(r"(targ\.)?([a-z0-9]+)(_targ)?[./]", name)
        if name.startswith("log_alpha"):
            nets["log_alpha"] = [x]
        elif of_net and not name.endswith(("center", "half_range")):
            target = "targ." if of_net[1] or of_net[3] else ""
            nets.setdefault(target + of_net[2], []).append(x)
    return nets


def flat(xs):
    """Join arrays into one flat vector of float64."""
    return np.concatenate([np.empty(0), *(np.ravel(x) for x in xs)])


def main(jobs, out):
    for name, settings in json.loads(Path(jobs).read_text()).items():
        with contextlib.redirect_stdout(io.StringIO()):
            kept = record(data_dir=Path(out) / name, **settings)
        arrays = {f"batch{i}": x for i, x in enumerate(kept.batches[0])}
        np.savez(Path(out) / f"{name}.{proc_id()}.npz", **arrays)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        comm().Abort(1)  # the other ranks would wait for this one
