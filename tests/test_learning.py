"""Every script learns, to a level that no random or inverted policy reaches."""

import pytest
from helpers import OFF_POLICY_SCRIPTS, ON_POLICY_SCRIPTS, progress, train

SETTINGS = {
    "vpg": dict(pi_lr=2e-2, steps_per_epoch=1000, epochs=30, train_v_iters=40),
    "ppo": dict(pi_lr=1e-3, steps_per_epoch=1000, epochs=20, train_pi_iters=40, train_v_iters=40),
    "trpo": dict(steps_per_epoch=1000, epochs=20, train_v_iters=40),
}


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_cartpole(script, tmp_path):
    settings = SETTINGS[script.split("_")[0]]
    folder = train(script, tmp_path, env_id="CartPole-v1", hidden_sizes=(32,), **settings)
    table = progress(folder)
    assert table["AverageEpRet"][0] < 40  # a random policy's 20 or so
    assert table["AverageEpRet"][-3:].mean() > 120


@pytest.mark.parametrize("script", [s for s in ON_POLICY_SCRIPTS if "vpg" not in s])
def test_a_continuous_task(script, tmp_path):
    settings = SETTINGS[script.split("_")[0]]
    folder = train(script, tmp_path, env_id="InvertedPendulum-v4", hidden_sizes=(32,), **settings)
    table = progress(folder)
    assert table["AverageEpRet"][0] < 20
    assert table["AverageEpRet"][-3:].mean() > 60


@pytest.mark.parametrize("script", ["trpo_torch", "trpo_tf1"])
def test_the_line_search_keeps_the_kl_limit(script, tmp_path):
    """With two CG steps and no damping the full step often breaks the limit."""
    settings = dict(
        env_id="Hopper-v4", steps_per_epoch=500, epochs=12, delta=0.05, damping_coeff=1e-3
    )
    table = progress(train(script, tmp_path, **settings))
    assert (table["KL"] <= 0.05).all()
    assert (table["DeltaLossPi"] >= 0).all()
    assert (table["BacktrackIters"] > 0).any()
    npg = progress(train(script, tmp_path, algo="npg", exp_name="npg", **settings))
    assert (npg["KL"] > 0.05).any()
    assert (npg["BacktrackIters"] == 0).all()


PENDULUM = dict(env_id="Pendulum-v1", gamma=0.98, steps_per_epoch=2000, epochs=5)
PENDULUM |= dict(hidden_sizes=(32, 32), batch_size=32, update_after=500, start_steps=1000)


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_pendulum(script, tmp_path):
    table = progress(train(script, tmp_path, **PENDULUM))
    assert table["AverageTestEpRet"].iloc[0] < -600
    assert table["AverageTestEpRet"].max() > -300
