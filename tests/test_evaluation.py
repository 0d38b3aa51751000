"""The test episodes of the off-policy scripts: how long they are, and which."""

import numpy as np
import pytest
from helpers import OFF_POLICY_SCRIPTS, as_flags, only_run, progress, start, train

# All actions are random and nothing is learned: tests differ by their seeds alone
RUN = dict(env_id="Pendulum-v1", hidden_sizes=(8,), epochs=2, steps_per_epoch=60)
RUN |= dict(start_steps=120, update_after=1000)


def test_they_have_the_environments_own_length(tmp_path):
    assert list(progress(train("ddpg_torch", tmp_path, **RUN))["TestEpLen"]) == [200, 200]
    short = dict(max_ep_len=70, exp_name="short")
    assert list(progress(train("ddpg_torch", tmp_path, **RUN, **short))["TestEpLen"]) == [70, 70]


def test_an_endless_one_is_cut(tmp_path):
    folder = train("ddpg_torch", tmp_path, **{**RUN, "env_id": "envs:Endless-v0"})
    assert list(progress(folder)["TestEpLen"]) == [60, 60]


def test_they_are_the_same_on_any_number_of_ranks(tmp_path):
    words = as_flags(**RUN, num_test_episodes=5, data_dir=tmp_path / "two")
    run = start("ddpg_torch.py", *words, ranks=2, warm=True)
    assert run.returncode == 0, run.stderr
    train("ddpg_torch", tmp_path / "one", num_test_episodes=5, **RUN)
    one, two = (progress(only_run(tmp_path / name)) for name in ("one", "two"))
    columns = [column for column in one if "Test" in column]
    np.testing.assert_allclose(one[columns], two[columns], rtol=1e-12)


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_their_seeds_differ_between_epochs_and_between_runs(script, tmp_path, monkeypatch):
    from common.env import Replayable

    reset, seeds = Replayable.reset, []

    def reset_and_keep(self, *, seed=None, **kwargs):
        seeds.append(seed)
        return reset(self, seed=seed, **kwargs)

    monkeypatch.setattr(Replayable, "reset", reset_and_keep)
    for seed in (0, 1):
        train(script, tmp_path, seed=seed, num_test_episodes=3, **RUN)
    seeds = [seed for seed in seeds if seed is not None]
    assert len(seeds) == 2 * (1 + 2 * 3), "once to train, and in two epochs three times to test"
    assert len(set(seeds)) == len(seeds)
