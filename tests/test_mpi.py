"""Several ranks: the same training as on one, and an end when one of them fails."""

import time

import numpy as np
import pytest
from helpers import (
    OFF_POLICY_SCRIPTS,
    ON_POLICY_SCRIPTS,
    ROOT,
    only_run,
    progress,
    relative_distance,
    start,
)
from record import checkpoint, flat, record, record_apart


def assert_one_policy(run):
    """Assert that both ranks hold the same networks and optimizers, to the bit."""
    mine, other = (checkpoint(run.folder, 1, rank) for rank in (0, 1))
    for net in mine.nets:
        np.testing.assert_array_equal(flat(mine.nets[net]), flat(other.nets[net]))
    for name, adam in mine.adam.items():
        np.testing.assert_array_equal(adam.m, other.adam[name].m)
        np.testing.assert_array_equal(adam.v, other.adam[name].v)


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_two_ranks_are_one_with_twice_the_data(script, tmp_path):
    settings = dict(env_id="Hopper-v4", epochs=1, steps_per_epoch=1000, train_v_iters=1)
    settings |= dict(norm=True, vf_lam=0.9, ortho=True)
    settings |= dict(train_pi_iters=1) if "ppo" in script else {}
    mine, other = record_apart(script, ranks=2, **settings)
    assert not np.array_equal(mine.batches[0][0], other.batches[0][0]), "the same observations"
    adv = np.concatenate([mine.batches[0][2], other.batches[0][2]])
    assert abs(adv.mean()) < 1e-6
    assert abs(adv.std() - 1) < 1e-3
    assert_one_policy(mine)

    one = record(script, tmp_path, join=[mine.file, other.file], **settings)
    two_ranks, one_rank = (checkpoint(run.folder, 1) for run in (mine, one))
    for name, adam in one_rank.adam.items():  # after one step the moment is a tenth of the gradient
        assert adam.t == 1
        assert relative_distance([two_ranks.adam[name].m], [adam.m]) < 1e-5
    a, b = (progress(run.folder).iloc[0] for run in (mine, one))
    np.testing.assert_allclose(a["LossV"], b["LossV"], rtol=1e-5)
    np.testing.assert_allclose(a["KL"], b["KL"], rtol=1e-3)
    for net, params in one_rank.nets.items():
        assert relative_distance(two_ranks.nets[net], params) < 1e-5
    for name, x in one_rank.units.items():
        np.testing.assert_allclose(two_ranks.units[name], x, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_two_ranks_hold_one_policy_and_their_own_transitions(script):
    settings = dict(env_id="envs:Mixed-v0", hidden_sizes=(8,), epochs=1, steps_per_epoch=400)
    settings |= dict(batch_size=16, start_steps=100, update_after=100, update_every=10)
    mine, other = record_apart(script, ranks=2, num_test_episodes=3, **settings)
    assert len(mine.batches) == len(other.batches) == 160, "half as many updates as on one rank"
    for x, y in zip(mine.batches[0], other.batches[0], strict=True):
        assert not np.array_equal(x, y)
    assert_one_policy(mine)
    assert len(mine.logged["TestEpRet"]) + len(other.logged["TestEpRet"]) == 3


def test_ppo_stops_early_on_all_ranks():
    settings = dict(env_id="envs:Mixed-v0", hidden_sizes=(5,), epochs=1, steps_per_epoch=80)
    settings |= dict(pi_lr=0.02, train_pi_iters=10, target_kl=0.02, train_v_iters=2)
    stops = []
    for script in ("ppo_torch", "ppo_tf1"):
        ranks = record_apart(script, ranks=2, **settings)
        stops += [run.logged["StopIter"].item() for run in ranks]
        kl = [run.logged["KL"].item() for run in ranks]
        assert kl[0] != kl[1]
        assert np.mean(kl) > 1.5 * 0.02
        assert checkpoint(ranks[0].folder, 1).adam["pi"].t == stops[-1]
        assert_one_policy(ranks[0])
    assert 0 < stops[0] < 9
    assert len(set(stops)) == 1


def start_code(code, path):
    """Run a few lines on two ranks."""
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}")
    run = start(path, ranks=2, warm=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_a_parameter_without_a_gradient_on_one_rank(tmp_path):
    code = """
import torch
from common.mpi import proc_id
from common.torch_utils import mpi_avg_grads

always, sometimes = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
optimizer = torch.optim.Adam([always, sometimes])
loss = 4 * always.sum()
if proc_id() == 1:
    loss = loss + 6 * sometimes.sum()
loss.backward()
mpi_avg_grads(optimizer)
print(always.grad.tolist(), sometimes.grad.tolist())
"""
    assert start_code(code, tmp_path / "torch.py") == 2 * ["[4.0, 4.0] [3.0, 3.0]"]


def test_averages_in_a_graph_come_in_one_order_on_all_ranks(tmp_path):
    """Two loops have nothing to do with each other, and what they average is late on one rank."""
    code = """
import time
import numpy as np
import tensorflow.compat.v1 as tf
from common.mpi import proc_id
from common.tf1_utils import compiled, make_session, mpi_avg

def late(x, rank):
    def wait(x):
        time.sleep(0.2 if proc_id() == rank else 0.0)
        return x + np.float32(rank == proc_id())
    return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape)

with tf.Graph().as_default():
    x = tf.get_variable("x", initializer=np.zeros(2, np.float32))
    y = tf.get_variable("y", initializer=np.zeros(3, np.float32))
    sess = make_session(threads=2)

    @compiled
    def update():
        for _ in tf.range(2):
            x.assign(mpi_avg(late(tf.identity(x), 0)))
        for _ in tf.range(2):
            y.assign(mpi_avg(late(tf.identity(y), 1)))
        return tf.identity(x), tf.identity(y)

    x, y = sess.run(update())
    print(x.tolist(), y.tolist())
"""
    assert start_code(code, tmp_path / "tf1.py") == 2 * ["[1.0, 1.0] [1.0, 1.0, 1.0]"]


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1"])
def test_more_ranks_than_cores_and_no_episode_ends(script, tmp_path):
    command = f"{script}.py --env-id envs:Endless-v0 --epochs 2 --steps-per-epoch 40".split()
    run = start(*command, "--data-dir", tmp_path, ranks=4, warm=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    table = progress(only_run(tmp_path))
    assert list(table["TotalEnvInteracts"]) == [40, 80]
    of_episodes = ["AverageEpRet", "StdEpRet", "MaxEpRet", "MinEpRet", "EpLen"]
    assert table[of_episodes].isna().to_numpy().all()
    assert table.drop(columns=of_episodes).notna().to_numpy().all()


def test_episodes_go_on_across_epochs(tmp_path):
    command = "ppo_torch.py --env-id envs:DictObs-v0 --epochs 6 --steps-per-epoch 30".split()
    run = start(*command, "--data-dir", tmp_path, ranks=2, warm=True)
    assert run.returncode == 0, run.stderr
    table = progress(only_run(tmp_path))  # 15 steps per epoch and rank, 20 steps per episode
    assert np.isnan(table["EpLen"][0])
    assert list(table["EpLen"][[1, 2, 3, 5]]) == [20, 20, 20, 20]
    assert np.isnan(table["EpLen"][4])


def test_indivisible_steps_are_an_error_printed_once(tmp_path):
    run = start("ppo_torch.py", "--data-dir", tmp_path, ranks=3, warm=True)
    assert run.returncode == 2
    error = "ppo_torch.py: error: --steps-per-epoch 4000 cannot be divided evenly among 3 ranks\n"
    assert run.stderr.count(error) == 1
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


def test_an_environment_that_one_rank_lacks_is_an_error_on_all(tmp_path):
    command = ["ppo_torch.py", "--env-id", "envs:MissingOnOne-v0", "--data-dir", tmp_path / "runs"]
    run = start(*command, ranks=2, warm=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.count("this machine lacks the simulator") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1"])
def test_one_rank_raising_ends_the_job(script, tmp_path):
    command = [f"{script}.py", "--env-id", "envs:Raises-v0", "--steps-per-epoch", "200"]
    began = time.time()
    run = start(*command, "--data-dir", tmp_path, ranks=2, warm=True, timeout=60)
    assert time.time() - began < 50
    assert run.returncode != 0
    assert "rank 1 of 2 failed" in run.stderr, run.stderr
    assert "RuntimeError: the simulator of rank 1 blew up" in run.stderr, run.stderr


def test_cpu_starts_the_ranks_by_itself(tmp_path):
    command = "ppo_torch.py --env-id CartPole-v1 --epochs 1 --steps-per-epoch 400 --cpu 2".split()
    run = start(*command, "--data-dir", tmp_path)
    assert run.returncode == 0, run.stderr
    assert "2 ranks" in run.stdout
    assert run.stdout.count("AverageEpRet") == 1
    run = start(*command, "--data-dir", tmp_path / "inside", ranks=2, warm=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("2 ranks") == 1
