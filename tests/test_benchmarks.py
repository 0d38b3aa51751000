"""The benchmark runs and counts what it says; how fast anything is, it alone may tell."""

import importlib.metadata
import re

import pytest
from helpers import OFF_POLICY, ROOT, start, train
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("algo", OFF_POLICY)
def test_the_limit_has_the_products_of_the_updates(algo, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from limits import linear, products_of_update

    def flops(products):
        return sum(2 * n * k * m for n, k, m in products)

    kwargs = dict(env_id="Pendulum-v1", epochs=1, steps_per_epoch=20, num_test_episodes=0)
    kwargs |= dict(hidden_sizes=(32, 16), batch_size=20, update_after=10, update_every=10)
    with FlopCounterMode(display=False) as counter:
        train(f"{algo}_torch", tmp_path, **kwargs)
    two_updates = products_of_update(algo, 20, (32, 16), obs_dim=3, act_dim=1)
    # The script compares its NumPy policy with the network, once; there are 20 updates.
    check = linear(1, [3, 32, 16, 2 if algo == "sac" else 1])
    assert counter.get_total_flops() == 10 * flops(two_updates) + flops(check)


def test_a_part_of_it():
    words = "--sections off-policy memory --algos ddpg --batch-sizes 100".split()
    words += "--off-policy-rounds 1 --off-policy-window 50".split()
    run = start("benchmarks/speed.py", *words)
    assert run.returncode == 0, run.stderr
    rows = [line.strip("| ").split(" | ") for line in run.stdout.splitlines() if line[:3] == "| D"]
    assert [row[0] for row in rows] == ["DDPG, batch 100"]
    _, torch, tf1, sb3, *_, limit = rows[0][:7]
    assert min(int(x.replace(",", "")) for x in (torch, tf1, limit)) > 0
    with_peers = any(d.name == "stable-baselines3" for d in importlib.metadata.distributions())
    assert (sb3 != "-") == with_peers
    arrays = 4 * (2 * 11 + 3 + 2)  # bytes of a transition: o and o2, a, r and d
    resident, bytes_of_arrays = re.search(r"\| ours \| (\d+) \| (\d+) \|", run.stdout).groups()
    assert (int(bytes_of_arrays), abs(int(resident) - arrays) < 5) == (arrays, True)
