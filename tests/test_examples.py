"""The examples learn, twins begin alike, and each needs nothing but its own file."""

import importlib.util

import numpy as np
import pytest
from helpers import ROOT, start

NAMES = ("simple_pg", "rtg_pg", "baseline_pg")
SHORT = dict(steps_per_epoch=300, epochs=3)


def train(name, framework, **settings):
    path = ROOT / "examples" / f"{name}_{framework}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(module.Args(**settings))


@pytest.mark.parametrize("framework", ["torch", "tf1"])
def test_siblings_differ_only_in_the_idea(framework):
    simple, rtg, baseline = (
        (ROOT / "examples" / f"{name}_{framework}.py").read_text().split('"""\n', 2)[-1]
        for name in NAMES
    )
    changed = [x for x in simple.splitlines() if x not in rtg.splitlines()]
    assert [x.strip() for x in changed] == ["weights = [returns[-1]] * len(episode)"]
    assert len([x for x in rtg.splitlines() if x not in baseline.splitlines()]) <= 8


@pytest.mark.parametrize("name", NAMES)
def test_twins_begin_alike(name, capsys):
    """And then Adam, whose epsilon TensorFlow adds elsewhere, and rounding separate them."""
    history, lines = [], []
    for framework in ("torch", "tf1"):
        history.append(train(name, framework, **SHORT))
        lines.append(capsys.readouterr().out.splitlines())
    assert history[0][:2] == history[1][:2]
    losses = [[float(line.split()[-1]) for line in shown[:2]] for shown in lines]
    np.testing.assert_allclose(*losses, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_cartpole(name):
    history = train(name, "torch", epochs=25, steps_per_epoch=2000, seed=1)
    assert history[0] < 40
    assert np.mean(history[-3:]) > 60


def test_reward_to_go():
    path = ROOT / "examples" / "rtg_pg_torch.py"
    spec = importlib.util.spec_from_file_location("rtg_pg_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.reward_to_go([1.0, 2.0, 4.0]).tolist() == [7.0, 6.0, 4.0]


@pytest.mark.parametrize("framework", ["torch", "tf1"])
def test_alone_in_a_folder(framework, tmp_path):
    file = tmp_path / f"baseline_pg_{framework}.py"
    file.write_text((ROOT / "examples" / file.name).read_text())
    run = start(file.name, "--epochs", "2", "--steps-per-epoch", "100", cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert [line.split()[:2] for line in run.stdout.splitlines()] == [
        ["epoch", "0"],
        ["epoch", "1"],
    ]
