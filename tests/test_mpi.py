"""Several ranks: the same training as on one, and an end when one of them fails."""

import time

import numpy as np
import pytest
from helpers import ON_POLICY_SCRIPTS, ROOT, only_run, progress, relative_distance, start

RECORD = ROOT / "tests" / "record.py"
SHORT = ["--env-id", "Hopper-v4", "--epochs", "1", "--steps-per-epoch", "1000"]


def load(path, prefix):
    with np.load(path) as arrays:
        return [arrays[k] for k in sorted(arrays, key=lambda k: (len(k), k)) if prefix in k]


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_two_ranks_are_one_with_twice_the_data(script, tmp_path):
    out = tmp_path / "two"
    run = start(RECORD, script, out, *SHORT, "--data-dir", tmp_path / "a", cwd=ROOT, ranks=2)
    assert run.returncode == 0, run.stderr
    files = [f"{out}.{rank}.npz" for rank in (0, 1)]

    mine, other = (load(file, "batch") for file in files)
    assert not np.array_equal(mine[0], other[0]), "the ranks saw the same observations"
    joined_adv = np.concatenate([mine[2], other[2]])
    assert abs(joined_adv.mean()) < 1e-6
    assert abs(joined_adv.std() - 1) < 1e-3

    for mine, other in zip(*(load(file, "param") for file in files), strict=True):
        np.testing.assert_array_equal(mine, other)

    one = tmp_path / "one"
    run = start(RECORD, script, one, "--join", *files, *SHORT, "--data-dir", tmp_path / "b")
    assert run.returncode == 0, run.stderr
    two_grads, one_grads = load(files[0], "grad"), load(f"{one}.0.npz", "grad")
    for size in {g.size for g in one_grads}:  # the first gradient of policy and value function
        g, h = (next(g for g in grads if g.size == size) for grads in (two_grads, one_grads))
        assert relative_distance([g], [h]) < 1e-5
    a, b = (progress(only_run(tmp_path / name)).iloc[0] for name in "ab")
    np.testing.assert_allclose(a["LossV"], b["LossV"], rtol=1e-5)
    np.testing.assert_allclose(a["KL"], b["KL"], rtol=0.05)


@pytest.mark.parametrize("script", ["ppo_torch", "trpo_tf1"])
def test_more_ranks_than_cores_and_no_episode_ends(script, tmp_path):
    command = f"{script}.py --env-id envs:Endless-v0 --epochs 2 --steps-per-epoch 40".split()
    run = start(*command, "--data-dir", tmp_path, ranks=4)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    table = progress(only_run(tmp_path))
    assert list(table["TotalEnvInteracts"]) == [40, 80]
    of_episodes = ["AverageEpRet", "StdEpRet", "MaxEpRet", "MinEpRet", "EpLen"]
    assert table[of_episodes].isna().to_numpy().all()
    assert table.drop(columns=of_episodes).notna().to_numpy().all()


def test_episodes_go_on_across_epochs(tmp_path):
    command = "ppo_torch.py --env-id envs:DictObs-v0 --epochs 6 --steps-per-epoch 30".split()
    run = start(*command, "--data-dir", tmp_path, ranks=2)
    assert run.returncode == 0, run.stderr
    table = progress(only_run(tmp_path))  # 15 steps an epoch and rank, 20 steps an episode
    assert np.isnan(table["EpLen"][0])
    assert list(table["EpLen"][[1, 2, 3, 5]]) == [20, 20, 20, 20]
    assert np.isnan(table["EpLen"][4])


def test_indivisible_steps_are_an_error_printed_once(tmp_path):
    run = start("ppo_torch.py", "--data-dir", tmp_path, ranks=3)
    assert run.returncode == 2
    error = "ppo_torch.py: error: --steps-per-epoch 4000 cannot be divided among 3 ranks\n"
    assert run.stderr.count(error) == 1
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


def test_an_environment_that_one_rank_lacks_is_an_error_on_all(tmp_path):
    command = ["ppo_torch.py", "--env-id", "envs:MissingOnOne-v0", "--data-dir", tmp_path]
    run = start(*command, ranks=2, timeout=60)
    assert run.returncode == 2
    assert run.stderr.count("this machine lacks the simulator") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1"])
def test_one_rank_raising_ends_the_job(script, tmp_path):
    command = [f"{script}.py", "--env-id", "envs:Raises-v0", "--steps-per-epoch", "200"]
    began = time.time()
    run = start(*command, "--data-dir", tmp_path, ranks=2, timeout=60)
    assert time.time() - began < 50
    assert run.returncode != 0
    assert "rank 1 of 2 failed" in run.stderr, run.stderr
    assert "RuntimeError: the simulator of rank 1 blew up" in run.stderr, run.stderr


def test_cpu_starts_the_ranks_by_itself(tmp_path):
    command = "ppo_torch.py --env-id CartPole-v1 --epochs 1 --steps-per-epoch 400 --cpu 2".split()
    run = start(*command, "--data-dir", tmp_path)
    assert run.returncode == 0, run.stderr
    assert "2 rank(s)" in run.stdout
    assert run.stdout.count("AverageEpRet") == 1
    run = start(*command, "--data-dir", tmp_path / "inside", ranks=2)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("2 rank(s)") == 1
