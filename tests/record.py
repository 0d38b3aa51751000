"""Run a script and keep what its ranks computed: python record.py SCRIPT OUT [--join FILE...] ARGS

OUT.<rank>.npz gets this rank's first batch, the averaged gradients and the final parameters. With
--join the batch is the given files' batches one behind the other instead of the script's own.
"""

import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.mpi import proc_id


def record(script, args, join=(), module=None):
    """Train and return what was seen on the way:

    batches   what the buffer gave for each update
    rngs      copies of the generator as it was right after that, to draw the same noise again
    snapshots all parameters before each update (off-policy)
    grads     flat gradients after averaging, in order
    stored    what went to the logger, a dict a call
    params    all parameters by name: first those at the start, then those at the end
    model     torch: the module, TF1: the session
    folder    the run's folder
    """
    module = module or importlib.import_module(script)
    framework = importlib.import_module(f"common.{script.split('_')[-1]}_utils")
    kept = SimpleNamespace(batches=[], rngs=[], snapshots=[], grads=[], stored=[], params=[])
    patched, model, targets = [], [], []

    def patch(owner, name, wrapper):
        original = getattr(owner, name)
        patched.append((owner, name, original))
        setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def all_params():
        if script.endswith("torch"):
            named = dict(model[0].named_parameters())
            named |= {f"targ.{k}": p for net in targets for k, p in net.named_parameters()}
            return {k: p.detach().numpy().copy() for k, p in named.items()}
        variables = model[0].graph.get_collection("trainable_variables")
        values = model[0].run(variables)
        return {v.op.name: value for v, value in zip(variables, values)}

    def get(original, self, value):
        batch = original(self, value)
        if join:
            parts = [np.load(file) for file in join]
            batch = [np.concatenate([part[f"batch{i}"] for part in parts]) for i in range(5)]
        kept.batches.append([np.array(x) for x in batch])
        return batch

    def sample_batch(original, self, batch_size, rng):
        batch = original(self, batch_size, rng)
        kept.batches.append(batch)
        kept.rngs.append(copy.deepcopy(rng))
        kept.snapshots.append(all_params())
        kept.buffer = self
        return batch

    def average(original, x):
        y = original(x)
        if np.ndim(x) == 1 and np.size(x) > 8:
            kept.grads.append(np.array(y))
        return y

    def store(original, self, **numbers):
        kept.stored.append({k: np.asarray(v).astype(float) for k, v in numbers.items()})
        original(self, **numbers)

    def setup(original, *args):
        model.append(args[0])
        out = original(*args)
        kept.params.append(all_params())
        return out

    def deepcopy(x):
        targets.append(copy.deepcopy(x))
        return targets[-1]

    if hasattr(module, "GAEBuffer"):
        patch(module.GAEBuffer, "get", get)
    else:
        patch(module.ReplayBuffer, "sample_batch", sample_batch)
    patch(framework, "mpi_avg", average)
    if hasattr(module, "mpi_avg"):
        patch(module, "mpi_avg", average)
    patch(framework, "num_procs", lambda original: 2)  # one rank has nothing to average
    patch(module.EpochLogger, "store", store)
    patch(module, "sync_params" if script.endswith("torch") else "Model", setup)
    if hasattr(module, "copy"):
        patched.append((module, "copy", copy))
        module.copy = SimpleNamespace(deepcopy=deepcopy)
    try:
        kept.folder = module.main(args)
        kept.params.append(all_params())
        kept.model = model[0]
    finally:
        for owner, name, original in reversed(patched):
            setattr(owner, name, original)
    return kept


if __name__ == "__main__":
    script, out, *argv = sys.argv[1:]
    join = []
    if argv and argv[0] == "--join":
        n = next(i for i, a in enumerate(argv[1:], 1) if a.startswith("--"))
        join, argv = argv[1:n], argv[n:]
    kept = record(script, tyro.cli(importlib.import_module(script).Args, args=argv), join)
    arrays = {f"batch{i}": x for i, x in enumerate(kept.batches[0])}
    arrays |= {f"grad{i}": x for i, x in enumerate(kept.grads)}
    arrays |= {f"param {name}": x for name, x in kept.params[-1].items()}
    np.savez(f"{out}.{proc_id()}.npz", **arrays)
