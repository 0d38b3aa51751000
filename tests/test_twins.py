"""A torch script and its TF1 twin, one seed: the same numbers until rounding tells them apart."""

import importlib

import numpy as np
import pytest
from helpers import ON_POLICY, params_of, progress, relative_distance
from record import record

EXACT = ["AverageEpRet", "StdEpRet", "MaxEpRet", "MinEpRet", "EpLen", "TotalEnvInteracts"]
BEFORE = ["AverageVVals", "StdVVals", "MaxVVals", "MinVVals", "LossV", "Entropy"]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v4"])
@pytest.mark.parametrize("algo", ON_POLICY)
def test_twins_agree(algo, env_id, tmp_path):
    runs = []
    for script in (f"{algo}_torch", f"{algo}_tf1"):
        module = importlib.import_module(script)
        args = module.Args(env_id=env_id, epochs=1, seed=3, data_dir=str(tmp_path))
        runs.append(record(script, args))
    torch_run, tf1_run = runs
    a, b = (progress(run.folder).iloc[0] for run in runs)

    for x, y in zip(torch_run.batches[0][:2], tf1_run.batches[0][:2]):
        np.testing.assert_array_equal(x, y)  # observations and actions, to the bit
    assert list(a[EXACT]) == list(b[EXACT])
    np.testing.assert_allclose(list(a[BEFORE]), list(b[BEFORE]), rtol=1e-5)
    assert abs(a["LossPi"] - b["LossPi"]) < 1e-5

    sizes = [sum(x.size for x in net) for net in params_of(torch_run.folder).values()]
    assert sizes[0] != sizes[1]
    for size in sizes:  # the first gradient of the policy, and of the value function
        g, h = (next(g for g in run.grads if g.size == size) for run in runs)
        assert relative_distance([g], [h]) < 1e-5

    np.testing.assert_allclose(a["KL"], b["KL"], rtol=0.05)
    x, y = params_of(torch_run.folder), params_of(tf1_run.folder)
    for net in ("pi", "v"):
        assert [p.shape for p in x[net]] == [p.shape for p in y[net]]
        assert relative_distance(x[net], y[net]) < 0.01


@pytest.mark.parametrize("algo", ON_POLICY)
def test_weights_start_alike_and_as_torch_would_draw_them(algo, tmp_path):
    runs = []
    for script in (f"{algo}_torch", f"{algo}_tf1"):
        module = importlib.import_module(script)
        args = module.Args(env_id="Pendulum-v1", epochs=1, steps_per_epoch=10, train_v_iters=0)
        args.data_dir = str(tmp_path)
        runs.append(params_of(record(script, args).folder)["v"])
    for p, q in zip(*runs):
        np.testing.assert_array_equal(p, q)
    for w, b in zip(runs[0][::2], runs[0][1::2]):
        bound = w.shape[1] ** -0.5
        assert 0.5 * bound < np.abs(w).max() <= bound
        assert np.abs(b).max() <= bound
