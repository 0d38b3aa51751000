"""Run a script and keep what its ranks computed: python record.py SCRIPT OUT [--join FILE...] ARGS

OUT.<rank>.npz gets this rank's batch, the gradients after averaging and the final parameters.
With --join the batch is the given files' batches one behind the other instead of the script's own.
"""

import importlib
import sys
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
from common.mpi import proc_id


def record(script, args, join=()):
    """Train; return the batches, the averaged flat gradients in order, and the final parameters."""
    module = importlib.import_module(script)
    framework = importlib.import_module(f"common.{script.split('_')[1]}_utils")
    kept = {"batches": [], "grads": [], "model": None}
    patched = []

    def patch(owner, name, wrap):
        patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrap(getattr(owner, name)))

    def keep_batch(get):
        def wrapped(self, value):
            batch = get(self, value)
            if join:
                parts = [np.load(file) for file in join]
                batch = [np.concatenate([part[f"batch{i}"] for part in parts]) for i in range(5)]
            kept["batches"].append([np.array(x) for x in batch])
            return batch

        return wrapped

    def keep_grad(mpi_avg):
        def wrapped(x):
            y = mpi_avg(x)
            if np.ndim(x) == 1 and np.size(x) > 8:
                kept["grads"].append(np.array(y))
            return y

        return wrapped

    def keep_model(function):
        def wrapped(*args):
            kept["model"] = args[0]
            return function(*args)

        return wrapped

    patch(module.GAEBuffer, "get", keep_batch)
    patch(framework, "mpi_avg", keep_grad)
    if hasattr(module, "mpi_avg"):
        patch(module, "mpi_avg", keep_grad)
    # One rank has nothing to average and would not pass by.
    patch(framework, "num_procs", lambda num_procs: lambda: 2)
    patch(module, "sync_params" if script.endswith("torch") else "Model", keep_model)
    try:
        kept["folder"] = module.main(args)
    finally:
        for owner, name, original in reversed(patched):
            setattr(owner, name, original)
    if script.endswith("torch"):
        kept["params"] = [p.detach().numpy() for p in kept["model"].parameters()]
    else:
        with kept["model"].graph.as_default():
            variables = importlib.import_module("tensorflow.compat.v1").trainable_variables()
            kept["params"] = kept["model"].run(variables)
    return kept


if __name__ == "__main__":
    script, out, *argv = sys.argv[1:]
    join = []
    if argv and argv[0] == "--join":
        n = next(i for i, a in enumerate(argv[1:], 1) if a.startswith("--"))
        join, argv = argv[1:n], argv[n:]
    kept = record(script, tyro.cli(importlib.import_module(script).Args, args=argv), join)
    arrays = {f"batch{i}": x for i, x in enumerate(kept["batches"][0])}
    arrays |= {f"grad{i}": x for i, x in enumerate(kept["grads"])}
    arrays |= {f"param{i}": x for i, x in enumerate(kept["params"])}
    np.savez(f"{out}.{proc_id()}.npz", **arrays)
