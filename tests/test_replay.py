"""The replay buffer, what goes into it, and when it is sampled."""

import functools
import importlib

import numpy as np
import pytest
import scipy.stats
from helpers import OFF_POLICY_SCRIPTS, progress, scratch
from record import record

LOW, HIGH = np.array([-1, 0.5]), np.array([3, 0.75])  # of the actions of envs:Mixed-v0
TINY = dict(env_id="envs:Mixed-v0", hidden_sizes=(5,), batch_size=16, num_test_episodes=1)


@functools.cache
def run(script):
    """Record 800 steps, of which 400 are random; count the actions that the policy drew."""
    module = importlib.import_module(script)
    act, drawn = module.Policy.act, []

    def act_and_count(params, o, rng=None, *noise):
        drawn.append(rng is not None)
        return act(params, o, rng, *noise)

    # Far out and often: the policy's actions have to be clipped
    own = dict(alpha=10.0) if "sac" in script else dict(act_noise=1.0)
    own |= dict(epochs=2, steps_per_epoch=400, start_steps=400, update_after=200, update_every=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.Policy, "act", staticmethod(act_and_count))
        kept = record(script, scratch() / "replay", replay_size=800, **TINY, **own)
    kept.drawn = sum(drawn)
    return kept


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_counters(script):
    kept = run(script)
    assert kept.drawn == 800 - 400, "exactly start_steps random actions"
    assert len(kept.batches) == 700, "bursts of 100 after steps 200, 300, ..., 800"
    assert list(progress(kept.folder)["TotalEnvInteracts"]) == [400, 800]


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_actions_stay_inside_their_bounds_and_reach_them(script):
    buffer = run(script).buffer
    for a in (buffer.a[:400], buffer.a[400:]):  # random ones, the policy's own
        assert (a >= LOW).all()
        assert (a <= HIGH).all()
        assert (a.min(0) < LOW + 0.05 * (HIGH - LOW)).all()
        assert (a.max(0) > HIGH - 0.05 * (HIGH - LOW)).all()


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_only_a_termination_is_stored_as_one(script):
    buffer = run(script).buffer  # episodes of five steps, every other one runs out of time
    np.testing.assert_array_equal(np.flatnonzero(buffer.d), np.arange(9, 800, 10))
    follows = np.arange(799) % 5 != 4  # within an episode, o2 is the next step's o
    np.testing.assert_array_equal(buffer.o2[:-1][follows], buffer.o[1:][follows])
    assert not np.any(buffer.o2[:-1][~follows] == buffer.o[1:][~follows])


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_no_update_yet_is_nan(script, tmp_path):
    late = dict(epochs=2, steps_per_epoch=60, start_steps=30, update_after=10**6)
    table = progress(record(script, tmp_path, **TINY, **late).folder)
    assert table[["LossQ", "LossPi", "AverageQ1Vals"]].isna().to_numpy().all()
    assert table["AverageTestEpRet"].notna().all()


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


def test_a_large_buffer_takes_no_memory_until_it_fills():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module = importlib.import_module("sac_torch")
    buf = module.ReplayBuffer(1000, 10, 1_000_000)  # eight gigabytes, if touched
    buf.store(np.ones(1000), np.ones(10), 1, np.ones(1000), 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
