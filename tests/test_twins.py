"""A torch script and its TF1 twin, one seed: the same numbers until rounding tells them apart.

The TF1 twins run in processes of their own, compiled by XLA as it is set up for users.
"""

import numpy as np
import pytest
from helpers import OFF_POLICY, ON_POLICY, progress, relative_distance
from record import checkpoint, record_apart, recorded

EXACT = ["AverageEpRet", "StdEpRet", "MaxEpRet", "MinEpRet", "EpLen", "TotalEnvInteracts"]
BEFORE = ["AverageVVals", "StdVVals", "MaxVVals", "MinVVals", "LossV", "Entropy"]


def twins(algo, **settings):
    """Run both twins; a run has its batches, what it logged, and its last checkpoint."""
    runs = recorded(f"{algo}_torch", **settings), record_apart(f"{algo}_tf1", **settings)[0]
    for run in runs:
        run.last = checkpoint(run.folder, settings["epochs"])
    return runs


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v4"])
@pytest.mark.parametrize("algo", ON_POLICY)
def test_an_epoch_on_policy(algo, env_id):
    torch_run, tf1_run = twins(algo, env_id=env_id, epochs=1, seed=3)
    for x, y in zip(torch_run.batches[0][:2], tf1_run.batches[0][:2], strict=True):
        np.testing.assert_array_equal(x, y)  # observations and actions, to the bit
    a, b = (progress(run.folder).iloc[0] for run in (torch_run, tf1_run))
    assert list(a[EXACT]) == list(b[EXACT])
    np.testing.assert_allclose(list(a[BEFORE]), list(b[BEFORE]), rtol=1e-5)
    assert abs(a["LossPi"] - b["LossPi"]) < 1e-5
    np.testing.assert_allclose(a["KL"], b["KL"], rtol=0.05)
    x, y = torch_run.last.nets, tf1_run.last.nets
    for net in ("pi", "v"):
        assert [p.shape for p in x[net]] == [p.shape for p in y[net]]
        assert relative_distance(x[net], y[net]) < 0.01


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Hopper-v4"])
@pytest.mark.parametrize("algo", ON_POLICY)
def test_first_gradients_on_policy(algo, env_id):
    one_step = dict(train_v_iters=1)
    if algo == "ppo":
        one_step |= dict(train_pi_iters=1)
    if algo == "trpo":  # with one step of conjugate gradient the direction is that of the gradient
        one_step |= dict(algo="npg", cg_iters=1, delta=1.0)
    runs = twins(algo, env_id=env_id, epochs=1, seed=3, **one_step)
    assert all(run.last.adam["v"].t == 1 for run in runs)
    # Adam's first moment after one step is a tenth of the gradient
    gradients = [{name: adam.m for name, adam in run.last.adam.items()} for run in runs]
    if algo == "trpo":
        (start,) = {
            recorded("vpg_torch", env_id=env_id, epochs=1, steps_per_epoch=10, seed=3, pi_lr=0.0)
        }
    for name, g in gradients[0].items():
        assert relative_distance([g], [gradients[1][name]]) < 1e-5


TINY = dict(env_id="envs:Mixed-v0", hidden_sizes=(5,), batch_size=16, gamma=0.9, epochs=1)
TINY |= dict(steps_per_epoch=80, start_steps=30, update_after=60, num_test_episodes=1)


@pytest.mark.parametrize("algo", OFF_POLICY)
def test_updates_off_policy(algo):
    own = dict(policy_delay=3) if algo == "td3" else {}
    torch_run, tf1_run = twins(algo, **TINY, update_every=10, **own)
    print(torch_run.logged.keys())
