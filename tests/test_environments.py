"""Environments: any spaces, any length, errors that name them, episodes that can be replayed."""

import copy
import importlib

import numpy as np
import pytest
from helpers import (
    ON_POLICY_SCRIPTS,
    SCRIPTS,
    TF1,
    assert_same,
    brief,
    progress,
    train,
)

from common.checkpoint import pack, unpack
from common.env import make_env
from common.errors import SidespinError

OBSERVATIONS = "DictObs TupleObs DiscreteObs ImageObs ScalarObs Float64Obs WideObs".split()
ACTIONS = "MatrixAction Float64Action AsymmetricAction".split()
ON_POLICY_ACTIONS = "DiscreteStart SmallDiscrete UnboundedAction".split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_odd_spaces(script, tmp_path):
    names = ["DictObs", "AsymmetricAction"]
    if script in ("ppo_torch", "sac_torch"):  # all share the code that makes environments
        names = OBSERVATIONS + ACTIONS
    if script in TF1:
        names = ["DictAsymmetric"]
    if script in ON_POLICY_SCRIPTS:
        names += ON_POLICY_ACTIONS[:1] if script in TF1 else ON_POLICY_ACTIONS
    for name in names:
        settings = brief(script, env_id=f"envs:{name}-v0", steps_per_epoch=80, max_ep_len=None)
        table = progress(train(script, tmp_path, **settings))
        assert list(table["EpLen"]) == [20, 20]
        assert np.isfinite(table.to_numpy()).all()


@pytest.mark.parametrize("name", ["HalfPrecisionReward", "ArrayReward"])
def test_returns_add_up_whatever_the_type_of_rewards(name, tmp_path):
    settings = brief("ppo_torch", env_id=f"envs:{name}-v0", steps_per_epoch=80, max_ep_len=None)
    table = progress(train("ppo_torch", tmp_path, **settings))
    assert list(table["AverageEpRet"]) == [20 * 1001] * 2


@pytest.mark.parametrize(
    ("script", "env_id", "sentence"),
    [
        ("vpg_torch", "Hoper-v4", r"cannot make the environment Hoper-v4: .*Hopper"),
        (
            "vpg_torch",
            "nowhere:Thing-v0",
            r"cannot make the environment nowhere:Thing-v0: .*nowhere",
        ),
        (
            "vpg_torch",
            "envs:MultiDiscreteAction-v0",
            r"the scripts need Discrete actions or a Box of floats, but .* has MultiDiscrete\(.*\)",
        ),
        ("vpg_torch", "envs:IntegerAction-v0", r"need Discrete .* but .* has Box\(.*int64\)"),
        ("vpg_torch", "envs:SequenceObs-v0", r"the observations of .* cannot be flattened"),
        (
            "vpg_torch",
            "envs:Faulty-v0",
            r"cannot make .*: division by zero \(ZeroDiv.*envs.py, li",
        ),
        (
            "ddpg_torch",
            "CartPole-v1",
            r"this script needs bounded continuous actions, but CartPole-v1 has Discrete\(2\)",
        ),
        ("sac_tf1", "envs:UnboundedAction-v0", r"needs bounded .* but .* has Box\(-inf, inf"),
    ],
)
def test_environments_that_do_not_fit(script, env_id, sentence, tmp_path):
    with pytest.raises(SidespinError, match=sentence) as refused:
        train(script, tmp_path / "x", env_id=env_id)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_an_empty_data_dir_survives_a_mistake(tmp_path):
    """A run that fails before its first step removes what it made, and nothing else."""
    for data_dir in (tmp_path / "mine", tmp_path / "mine" / "ppo"):
        data_dir.mkdir()
        with pytest.raises(SidespinError, match="cannot make the environment"):
            train("ppo_torch", data_dir, env_id="Hoper-v4")
        assert data_dir.exists()
        assert not list(data_dir.iterdir())
    folder = tmp_path / "mine" / "x" / "x_s0"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("not of the run")
    with pytest.raises(SidespinError, match="cannot make the environment"):
        train("ppo_torch", tmp_path / "mine", env_id="Hoper-v4", exp_name="x")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_observations_changed_in_place_are_kept(tmp_path, monkeypatch):
    module = importlib.import_module("vpg_torch")
    get, seen = module.GAEBuffer.get, []

    def get_and_keep(self, value):
        seen.append(self.o.copy())
        return get(self, value)

    monkeypatch.setattr(module.GAEBuffer, "get", get_and_keep)
    train("vpg_torch", tmp_path, env_id="envs:InPlace-v0", epochs=1, steps_per_epoch=20)
    np.testing.assert_array_equal(seen[0][:, 0], [*range(10), *range(10)])


def test_max_ep_len_overrides_the_environments_own(tmp_path):
    settings = brief("ppo_torch", epochs=1, steps_per_epoch=900)
    for max_ep_len, expected in ((50, 50), (400, 400), (None, 200)):
        settings |= dict(max_ep_len=max_ep_len, exp_name=str(max_ep_len))
        assert progress(train("ppo_torch", tmp_path, **settings))["EpLen"][0] == expected


@pytest.mark.parametrize(
    "env_id",
    """Hopper-v4 HalfCheetah-v4 Ant-v4 Walker2d-v4 Pendulum-v1 CartPole-v1 Acrobot-v1
    MountainCarContinuous-v0 envs:Mixed-v0 envs:Private-v0
    envs:DiscreteStart-v0 envs:MatrixAction-v0""".split(),
)
def test_environments_replay_to_the_bit(env_id):
    rng = np.random.default_rng(0)
    env, fresh = (make_env(env_id) for _ in range(2))
    actions = copy.deepcopy(env.action_space)  # with a generator that is not the environment's
    actions.seed(0)
    fresh.reset(seed=5)  # a resumed run resets, too, before it looks for a checkpoint
    env.reset(seed=3)
    for episode in range(3):
        for _ in range(rng.integers(2, 15)):
            _, _, d, truncated, _ = env.step(actions.sample())
            if d or truncated:
                break
        saved = unpack(pack(env.episode()))
        assert fresh.replay(saved)
        assert fresh.o.tobytes() == env.o.tobytes()
        assert len(fresh.actions) == len(env.actions)
        a = actions.sample()
        for x, y in zip(env.step(a)[:4], fresh.step(a)[:4], strict=True):
            np.testing.assert_array_equal(x, y)
        assert env.reset()[0].tobytes() == fresh.reset()[0].tobytes()
    saved["o"] = saved["o"] + 1
    assert not fresh.replay(saved)


@pytest.mark.parametrize("script", ["ppo_torch", "sac_torch"])
def test_environments_with_a_generator_of_their_own(script, tmp_path, capsys):
    settings = brief(script, env_id="envs:Private-v0", epochs=6)
    unbroken = train(script, tmp_path / "a", **settings)
    for epochs in (2, 5, 6):
        folder = train(script, tmp_path / "b", resume=True, **{**settings, "epochs": epochs})
    assert_same(unbroken, folder)
    assert capsys.readouterr().err == ""
