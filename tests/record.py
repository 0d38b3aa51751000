"""Train with a script and keep what it saw and logged; read its checkpoints.

    python record.py ppo_tf1 OUT '{"epochs": 1, ...}'

does so in a process of its own, or under mpirun on several ranks. OUT.<rank>.npz holds the result.
"""

import copy
import functools
import importlib
import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from helpers import ROOT, STATISTICS, scratch, start

from common.checkpoint import unpack
from common.mpi import comm, proc_id

# The optimizers of each script, in order
ADAMS = {"vpg": "pi v", "ppo": "pi v", "trpo": "v", "ddpg": "pi q", "td3": "pi q"}
ADAMS["sac"] = "pi q alpha"


def record(script, data_dir, module=None, plain=False, join=(), **settings):
    """Train and return what was seen on the way.

    batches  what the buffer gave for each update
    rngs     off-policy: copies of the generator right after that, to draw the same noise again
    rows     on-policy: the steps in each minibatch, one array per call of minibatches()
    calls    what went to the logger, one dictionary per call
    logged   the same numbers by name, in order
    buffer   the buffer
    folder   the run's folder

    With plain=True a TF1 script builds the graph that it has on several ranks, without XLA. With
    join, the first batch is replaced by what these files of other runs hold.
    """
    module = module or importlib.import_module(script)
    args = module.Args(data_dir=str(data_dir), **settings)
    kept = SimpleNamespace(args=args, batches=[], rngs=[], rows=[], calls=[], logged={})
    on_policy = hasattr(module, "GAEBuffer")
    owner, name = (module.GAEBuffer, "get") if on_policy else (module.ReplayBuffer, "sample_batch")
    sample, store = getattr(owner, name), module.EpochLogger.store

    def sample_and_keep(self, *args):
        batch = sample(self, *args)
        if join and not kept.batches:
            parts = [load(file).batches[0] for file in join]
            batch = [np.concatenate(arrays) for arrays in zip(*parts)]
        kept.batches.append([np.array(x) for x in batch])
        if not on_policy:
            kept.rngs.append(copy.deepcopy(args[-1]))
        kept.buffer = self
        return batch

    def split_and_keep(self, *args):
        kept.rows.append(split(self, *args))
        return kept.rows[-1]

    def store_and_keep(self, **numbers):
        store(self, **numbers)
        kept.calls.append({key: self.stored[key][-1].astype(float) for key in numbers})
        for key, x in kept.calls[-1].items():
            kept.logged[key] = np.append(kept.logged.get(key, []), x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, sample_and_keep)
        if on_policy:
            split = module.GAEBuffer.minibatches
            patch.setattr(module.GAEBuffer, "minibatches", split_and_keep)
        patch.setattr(module.EpochLogger, "store", store_and_keep)
        if plain:
            patch.setattr("common.tf1_utils.num_procs", lambda: 2)
        kept.folder = module.main(args)
    return kept


@functools.cache
def recorded(script, plain=False, **settings):
    """Do the same once for all tests that ask for the same run."""
    return record(script, tempfile.mkdtemp(dir=scratch()), plain=plain, **settings)


def record_apart(script, ranks=1, **settings):
    """Do the same on several ranks, or with XLA as users have it; return one result per rank."""
    out = tempfile.mkdtemp(dir=scratch())
    env = {key: x for key, x in os.environ.items() if key != "XLA_FLAGS"}
    command = ROOT / "tests" / "record.py", script, out, json.dumps(settings)
    done = start(*command, ranks=ranks, warm=script.split("_")[1], env=env)
    assert done.returncode == 0, done.stderr
    return [load(f"{out}.{rank}.npz") for rank in range(ranks)]


def save(kept, file):
    arrays = {f"{i} {j}": x for i, batch in enumerate(kept.batches) for j, x in enumerate(batch)}
    np.savez(file, **arrays, **kept.logged, folder=str(kept.folder))


def load(file):
    """Read back batches, logged, and folder."""
    with np.load(file) as arrays:
        kept = SimpleNamespace(file=str(file), batches=[], logged={})
        for key, x in arrays.items():
            if key == "folder":
                kept.folder = Path(x.item())
            elif " " not in key:
                kept.logged[key] = x
            elif key.endswith(" 0"):
                kept.batches.append([x])
            else:
                kept.batches[-1].append(x)
    return kept


def state_of(folder, epoch, rank=0):
    """Return a rank's networks and optimizers as a checkpoint has them."""
    path = Path(folder) / "checkpoint" / f"epoch{epoch}.rank{rank}.npz"
    with np.load(path) as arrays:
        return unpack(dict(arrays))["state"]


def checkpoint(folder, epoch, rank=0):
    """Return a rank's part of a checkpoint.

    nets   arrays by network, layer by layer: pi, v, q1, q2, targ.pi, targ.q1, targ.q2, log_alpha
    adam   by name (pi, v, q, alpha): t, and the moments m and v as flat vectors
    units  running statistics by name: pi.obs.mean, v.returns.std, ...
    """
    state = state_of(folder, epoch, rank)
    script = json.loads((Path(folder) / "config.json").read_text())["script"]
    names = ADAMS[script.split("_")[0]].split()
    named = state if isinstance(state, dict) else state[0]
    units = {re.sub("[/_]", ".", name): x for name, x in named.items() if STATISTICS.search(name)}
    if isinstance(state, dict):  # TF1: variables by name; those of Adam have none of their own
        nets, adam = by_network(state), []
        for x in (x for name, x in state.items() if name.startswith("Variable")):
            if x.dtype == np.int64:
                adam.append((x, []))
            else:
                adam[-1][1].append(x)
        adam = [(t, xs[: len(xs) // 2], xs[len(xs) // 2 :]) for t, xs in adam]
    else:  # torch: state_dicts
        modules = [part for part in state if "param_groups" not in part]
        prefixes = "", "targ.", "log_alpha."
        nets = by_network({p + k: x for p, part in zip(prefixes, modules) for k, x in part.items()})
        adam = []
        for part in state[len(modules) :]:
            states = list(part["state"].values())  # of each parameter; none before the first step
            t = states[0]["step"] if states else 0
            adam.append((t, *([x[key] for x in states] for key in ("exp_avg", "exp_avg_sq"))))
    adam = {
        name: SimpleNamespace(t=int(t), m=flat(m), v=flat(v))
        for name, (t, m, v) in zip(names, adam, strict=True)
    }
    return SimpleNamespace(nets=nets, adam=adam, units=units)


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
        of_net = re.match(r"(targ\.)?(pi|v|q1|q2)(_targ)?[./]", name)
        if name.startswith("log_alpha"):
            nets["log_alpha"] = [x]
        elif of_net and not STATISTICS.search(name):
            target = "targ." if of_net[1] or of_net[3] else ""
            nets.setdefault(target + of_net[2], []).append(x)
    return nets


def flat(xs):
    """Join arrays into one flat vector of float64."""
    return np.concatenate([np.empty(0), *(np.ravel(x) for x in xs)])


if __name__ == "__main__":
    script, out, settings = sys.argv[1:]
    try:
        save(record(script, out, **json.loads(settings)), f"{out}.{proc_id()}.npz")
    except BaseException:
        traceback.print_exc()
        comm().Abort(1)  # the other ranks would wait for this one
