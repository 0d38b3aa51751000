"""The replay buffer, when transitions enter it, when updates are made, and test episodes."""

import importlib
import resource

import numpy as np
import pytest
import scipy.stats
from helpers import OFF_POLICY_SCRIPTS, only_run, progress, start, train

TINY = dict(env_id="envs:Mixed-v0", hidden_sizes=(5,), batch_size=16, epochs=1, replay_size=200)
TINY |= dict(steps_per_epoch=60, start_steps=30, update_after=60, num_test_episodes=1)
LOW, HIGH = np.array([-1, 0.5]), np.array([3, 0.75])  # of the actions of envs:Mixed-v0
HALF_RANGE = (HIGH - LOW) / 2


@pytest.fixture
def buffer(monkeypatch):
    """Return a list that each new replay buffer of a script is appended to."""
    made = []

    def watch(script):
        module = importlib.import_module(script)
        kind = module.ReplayBuffer

        class Watched(kind):
            def __init__(self, *args):
                super().__init__(*args)
                self.samples = 0
                made.append(self)

            def sample_batch(self, batch_size, rng):
                self.samples += 1
                return super().sample_batch(batch_size, rng)

        monkeypatch.setattr(module, "ReplayBuffer", Watched)
        return made

    return watch


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_ring_buffer(script):
    module = importlib.import_module(script)
    buf = module.ReplayBuffer(2, 1, 10)
    rng = np.random.default_rng(0)
    for i in range(13):
        buf.store([i, -i], [2 * i], 3 * i, [i + 1, -i - 1], i % 2)
        o, *_ = buf.sample_batch(50, rng)
        assert set(o[:, 0]) <= set(range(max(0, i - 9), i + 1))
    o, a, r, o2, d = buf.sample_batch(20000, rng)
    i = o[:, 0]
    np.testing.assert_array_equal(a[:, 0], 2 * i)
    np.testing.assert_array_equal(r, 3 * i)
    np.testing.assert_array_equal(o2[:, 0], i + 1)
    np.testing.assert_array_equal(d, i % 2)
    counts = np.bincount(i.astype(int), minlength=13)
    assert (counts[:3] == 0).all(), "the three oldest are gone"
    assert scipy.stats.chisquare(counts[3:]).pvalue > 1e-3
    assert r.shape == d.shape == (20000,)
    assert all(x.dtype == np.float32 for x in (o, a, r, o2, d))


def test_a_large_buffer_uses_no_memory_until_it_fills():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module = importlib.import_module("sac_torch")
    buf = module.ReplayBuffer(1000, 10, 1_000_000)  # eight gigabytes, if touched
    buf.store(np.ones(1000), np.ones(10), 1, np.ones(1000), 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


@pytest.mark.parametrize("script", ["ddpg_torch", "sac_tf1"])
def test_counters(script, tmp_path, monkeypatch, buffer):
    buffers, policy = buffer(script), importlib.import_module(script).Policy
    drawn, act = [], policy.act

    def counting(params, o, rng=None, *noise):
        drawn.append(rng is not None)
        return act(params, o, rng, *noise)

    monkeypatch.setattr(policy, "act", staticmethod(counting))
    settings = dict(steps_per_epoch=100, epochs=2, start_steps=70, update_after=100)
    folder = train(script, tmp_path, **{**TINY, **settings, "update_every": 25})
    assert sum(drawn) == 200 - 70, "exactly start_steps random actions"
    assert buffers[0].samples == 25 * 5, "bursts at steps 100, 125, 150, 175 and 200"
    assert buffers[0].d[:200].sum() == 20, "of forty ends half are terminations, half time limits"
    assert list(progress(folder)["TotalEnvInteracts"]) == [100, 200]


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_actions_stay_inside_their_bounds_and_reach_them(script, tmp_path, buffer):
    buffers = buffer(script)
    settings = {**TINY, "steps_per_epoch": 800, "start_steps": 400, "replay_size": 800}
    kwargs = dict(alpha=10.0) if "sac" in script else dict(act_noise=1.0)  # far out and often
    train(script, tmp_path, **{**settings, "update_every": 60}, **kwargs)
    for a in (buffers[0].a[:400], buffers[0].a[400:]):  # random ones, the policy's own
        assert (a >= LOW).all()
        assert (a <= HIGH).all()
        assert (a.min(0) < LOW + 0.1 * HALF_RANGE).all()
        assert (a.max(0) > HIGH - 0.1 * HALF_RANGE).all()


@pytest.mark.parametrize("script", ["ddpg_torch", "td3_tf1", "sac_torch"])
def test_no_update_yet_is_nan(script, tmp_path):
    table = progress(train(script, tmp_path, **{**TINY, "update_after": 10**6, "epochs": 2}))
    assert table[["LossQ", "LossPi", "AverageQ1Vals"]].isna().to_numpy().all()
    assert table["AverageTestEpRet"].notna().all()


def test_test_episodes_are_the_same_on_any_number_of_ranks_and_differ_otherwise(tmp_path):
    argv = "ddpg_torch.py --env-id Pendulum-v1 --hidden-sizes 8 --epochs 2 --steps-per-epoch 300"
    argv = [*argv.split(), "--start-steps", "600", "--num-test-episodes", "5"]
    columns = ["AverageTestEpRet", "StdTestEpRet", "MaxTestEpRet", "MinTestEpRet", "TestEpLen"]
    tables = []
    for ranks, seed in ((1, 0), (2, 0), (1, 1)):
        data_dir = tmp_path / f"{ranks} {seed}"
        done = start(*argv, "--seed", seed, "--data-dir", data_dir, ranks=ranks)
        assert done.returncode == 0, done.stderr
        tables.append(progress(only_run(data_dir))[columns])
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-12)
    assert tables[0]["AverageTestEpRet"].nunique() == 2, "other episodes in another epoch"
    assert tables[0]["AverageTestEpRet"][0] != tables[2]["AverageTestEpRet"][0]


def test_test_episodes_have_the_environments_own_length(tmp_path):
    settings = {**TINY, "env_id": "Pendulum-v1"}
    assert list(progress(train("ddpg_torch", tmp_path, **settings))["TestEpLen"]) == [200]
    settings |= dict(max_ep_len=70, exp_name="short")
    assert list(progress(train("ddpg_torch", tmp_path, **settings))["TestEpLen"]) == [70]


def test_an_endless_test_episode_is_cut(tmp_path):
    folder = train("ddpg_torch", tmp_path, **{**TINY, "env_id": "envs:Endless-v0"})
    assert list(progress(folder)["TestEpLen"]) == [60]
