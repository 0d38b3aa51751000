"""A torch script and its TF1 twin, one seed: the same numbers until rounding tells them apart.

The TF1 twins run in processes of their own, compiled by XLA as it is set up for users.
"""

import numpy as np
import pytest
from helpers import OFF_POLICY, progress, relative_distance
from record import checkpoint, flat, kept_model, record_apart, recorded

EXACT = ["AverageEpRet", "StdEpRet", "MaxEpRet", "MinEpRet", "EpLen", "TotalEnvInteracts"]
BEFORE = ["AverageVVals", "StdVVals", "MaxVVals", "MinVVals", "LossV", "Entropy"]

STRONG = dict(norm=True, ortho=True, decay=True, vf_lam=0.9)  # all flags that Spinning Up lacks


def twins(script, **settings):
    """Run both twins; a run has its batches, what it logged, and its last checkpoint."""
    runs = recorded(f"{script}_torch", **settings), record_apart(f"{script}_tf1", **settings)[0]
    for run in runs:
        run.last = checkpoint(run.folder, settings["epochs"])
    return runs


# Whatever takes a single step shows its first gradient, in Adam's moment; the rest takes all 80.
@pytest.mark.parametrize(
    ("script", "env_id", "settings"),
    [
        ("vpg", "CartPole-v1", dict()),
        ("vpg", "Hopper-v4", dict(train_v_iters=1)),
        ("ppo", "CartPole-v1", dict(train_v_iters=1)),
        ("ppo", "Hopper-v4", dict(train_pi_iters=1)),
        ("ppo", "Hopper-v4", dict(**STRONG, batch_size=1000, train_pi_iters=2, train_v_iters=5)),
        ("trpo", "CartPole-v1", dict(**STRONG)),
        # One iteration of conjugate gradient gives a step along the gradient
        ("trpo", "Hopper-v4", dict(algo="npg", cg_iters=1, delta=1.0, train_v_iters=1)),
    ],
)
def test_on_policy(script, env_id, settings):
    settings = dict(env_id=env_id, epochs=1, seed=3, **settings)
    torch_run, tf1_run = twins(script, **settings)
    for x, y in zip(torch_run.batches[0][:2], tf1_run.batches[0][:2], strict=True):
        np.testing.assert_array_equal(x, y)  # observations and actions, to the bit
    a, b = (progress(run.folder).iloc[0] for run in (torch_run, tf1_run))
    assert list(a[EXACT]) == list(b[EXACT])
    np.testing.assert_allclose(list(a[BEFORE]), list(b[BEFORE]), rtol=1e-5)
    assert abs(a["LossPi"] - b["LossPi"]) < 1e-5

    for name, adam in torch_run.last.adam.items():
        assert adam.t == tf1_run.last.adam[name].t
        if adam.t == 1:  # m is a tenth of the gradient
            assert relative_distance([adam.m], [tf1_run.last.adam[name].m]) < 1e-5
    if "cg_iters" in settings:
        unmoved = dict(env_id=env_id, epochs=1, seed=3, steps_per_epoch=10, pi_lr=0.0)
        start = flat(checkpoint(recorded("vpg_torch", **unmoved).folder, 1).nets["pi"])
        g, h = (flat(run.last.nets["pi"]) - start for run in (torch_run, tf1_run))
        assert relative_distance([g], [h]) < 1e-5

    for name, x in torch_run.last.units.items():
        np.testing.assert_allclose(x, tf1_run.last.units[name], rtol=1e-5, err_msg=name)

    np.testing.assert_allclose(a["KL"], b["KL"], rtol=0.05)
    x, y = torch_run.last.nets, tf1_run.last.nets
    for net in ("pi", "v"):
        assert [p.shape for p in x[net]] == [p.shape for p in y[net]]
        assert relative_distance(x[net], y[net]) < 0.01


@pytest.mark.parametrize("script", OFF_POLICY)
def test_off_policy(script):
    settings = dict(env_id="envs:Mixed-v0", hidden_sizes=(5,), batch_size=16, gamma=0.9, epochs=8)
    settings |= dict(steps_per_epoch=10, start_steps=30, num_test_episodes=1, keep_models=True)
    settings |= dict(update_after=60, update_every=10)  # three bursts of ten
    settings |= dict(policy_delay=3) if script == "td3" else {}
    torch_run, tf1_run = twins(script, **settings)
    for x, y in zip(torch_run.batches[0], tf1_run.batches[0], strict=True):
        np.testing.assert_array_equal(x, y)  # what the buffer holds before the first update
    x, y = (kept_model(run.folder, 0) for run in (torch_run, tf1_run))
    for net in x:
        np.testing.assert_array_equal(flat(x[net]), flat(y[net]))

    for key in ("LossQ", "LossPi"):
        x, y = (run.logged[key] for run in (torch_run, tf1_run))
        assert len(x) == len(y) == (10 if key == "LossPi" and script == "td3" else 30)
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(x[0], y[0], rtol=1e-5, atol=1e-6)
    x, y = torch_run.last, tf1_run.last
    for name in ("pi", "q"):  # the moments are means over the gradients of all updates
        assert x.adam[name].t == y.adam[name].t
        assert relative_distance([x.adam[name].m], [y.adam[name].m]) < 1e-5
    for net in x.nets:
        assert relative_distance(x.nets[net], y.nets[net]) < 1e-5
    a, b = (progress(run.folder)["AverageTestEpRet"] for run in (torch_run, tf1_run))
    np.testing.assert_allclose(a, b, rtol=1e-5)
