"""Every script learns, to a level that no random or inverted policy reaches."""

import pytest
from helpers import OFF_POLICY_SCRIPTS, ON_POLICY_SCRIPTS, progress, train

SETTINGS = {
    "vpg": dict(pi_lr=2e-2, epochs=14),
    "ppo": dict(pi_lr=3e-3, epochs=12, train_pi_iters=40, target_kl=0.03, vf_lr=5e-3),
    "trpo": dict(epochs=12, delta=0.04, vf_lr=5e-3),
}


def returns(script, data_dir, **settings):
    settings |= SETTINGS[script.split("_")[0]]
    settings |= dict(hidden_sizes=(32,), steps_per_epoch=1000, train_v_iters=40)
    return progress(train(script, data_dir, xla=True, **settings))["AverageEpRet"]


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_cartpole(script, tmp_path):
    found = returns(script, tmp_path, env_id="CartPole-v1")
    assert found[0] < 40  # a random policy's 20 or so
    assert found[-3:].mean() > 120


@pytest.mark.parametrize("script", [s for s in ON_POLICY_SCRIPTS if "vpg" not in s])
def test_a_continuous_task(script, tmp_path):
    found = returns(script, tmp_path, env_id="InvertedPendulum-v4")
    assert found[0] < 20
    assert found[-3:].mean() > 60


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_badly_scaled_numbers_need_the_normaliser(script, tmp_path):
    """CartPole again, with observations and rewards from 1e-4 to 1e4."""
    cartpole = dict(env_id="envs:BadUnits-v0", max_ep_len=500)
    assert returns(script, tmp_path / "as it is", **cartpole)[-3:].mean() < 60_000
    assert returns(script, tmp_path / "normalised", **cartpole, norm=True)[-3:].mean() > 120_000


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_pendulum(script, tmp_path):
    settings = dict(env_id="Pendulum-v1", gamma=0.9, polyak=0.98, epochs=3, steps_per_epoch=1000)
    settings |= dict(hidden_sizes=(32, 32), batch_size=64, start_steps=1000, update_after=800)
    settings |= dict(lr=4e-3) if "sac" in script else dict(pi_lr=4e-3, q_lr=4e-3)
    found = progress(train(script, tmp_path, xla=True, **settings))["AverageTestEpRet"]
    assert found[0] < -600
    assert found.max() > -300
