"""The benchmark runs and counts what it says; how fast anything is, it alone may tell."""

import json
import re
import shutil
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch
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
    assert (sb3 != "-") == (find_spec("stable_baselines3") is not None)
    arrays = 4 * (2 * 11 + 3 + 2)  # bytes of a transition: o and o2, a, r and d
    resident, bytes_of_arrays = re.search(r"\| ours \| (\d+) \| (\d+) \|", run.stdout).groups()
    assert (int(bytes_of_arrays), abs(int(resident) - arrays) < 5) == (arrays, True)


def learning(*words):
    run = start("benchmarks/learning.py", *words)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_learning_runs_and_is_collected(tmp_path):
    where = "--data-dir", tmp_path / "runs"
    learning("run", "--parts", "vpg_torch-default", "--seeds", 3, "--epochs", 1, *where)
    stay = "vpg_torch,default,Hopper-v4,0,4000,12.3,5"  # another machine's
    (tmp_path / "learning.csv").write_text(
        f"script,setting,env_id,seed,step,return,seconds\n{stay}\n"
    )
    notes = tmp_path / "runs" / "origins.jsonl"
    later = {"started": "2100-01-01T00:00:00+00:00", "commit": "later"}  # it trained nothing
    later = json.loads(notes.read_text()) | later
    notes.write_text(notes.read_text() + json.dumps(later) + "\n")
    learning("collect", *where, "--results", tmp_path)
    rows = (tmp_path / "learning.csv").read_text().splitlines()
    assert stay in rows
    curves = pd.read_csv(tmp_path / "learning.csv").set_index(["env_id", "seed"])
    assert set(curves.index) == {(f"{x}-v4", 3) for x in ("HalfCheetah", "Hopper", "Walker2d")} | {
        ("Hopper-v4", 0)
    }
    (table,) = tmp_path.glob("runs/*Hopper*/*_s3/progress.txt")
    logged = pd.read_csv(table, sep="\t").iloc[-1]
    point = curves.loc["Hopper-v4", 3]
    assert (point["step"].item(), point["return"].item()) == (
        4000,
        round(logged["AverageEpRet"], 1),
    )
    runs = pd.read_csv(tmp_path / "runs.csv")
    assert list(runs["flags"]) == ["--epochs 1"] * 3  # as they ran, whatever the part says
    assert runs["commit"].str.len().min() > 6
    assert not runs["commit"].str.contains("later").any()
    assert runs["versions"].str.contains("torch 2").all()
    played = start("play.py", table.parent).stdout.splitlines()[-1].split()[3]
    assert runs.set_index("env_id")["test_return"]["Hopper-v4"] == round(float(played), 1)
    row = f"| `vpg_torch.py`, default | 4,000 | .* | {float(played):.0f}, 1 seed | .* |"
    assert re.search(row.replace("|", r"\|"), learning("tables", "--results", tmp_path))
    longer = "vpg_torch,default,Hopper-v4,3,8000,45.6,9"  # the same seed, by another machine
    with open(tmp_path / "learning.csv", "a") as file:
        file.write(longer + "\n")
    (tmp_path / "runs.csv").write_text(runs.assign(steps=[4000, 8000, 4000]).to_csv(index=False))
    learning("collect", *where, "--results", tmp_path)
    assert longer in (tmp_path / "learning.csv").read_text().splitlines()
    kept = pd.read_csv(tmp_path / "runs.csv")
    assert (list(kept["env_id"]), list(kept["steps"])) == (list(runs["env_id"]), [4000, 8000, 4000])
    notes.unlink()
    shutil.copytree(table.parent.parent, tmp_path / "runs" / "again" / table.parent.parent.name)
    twice = start("benchmarks/learning.py", "collect", *where, "--results", tmp_path / "nowhere")
    assert (twice.returncode, "has two runs of vpg_torch default Hopper-v4 3" in twice.stderr) == (
        2,
        True,
    )


@pytest.mark.parametrize("script", ["sac_torch", "sac_tf1", "vpg_tf1"])
def test_an_exported_policy_plays_as_before(script, tmp_path):
    kwargs = dict(epochs=1, exp_name=f"{script}-default_Pendulum-v1", steps_per_epoch=200)
    kwargs |= dict(hidden_sizes=(32,))
    for seed in (4, 3):
        run = train(script, tmp_path / "runs", env_id="Pendulum-v1", seed=seed, **kwargs)
    where = "--data-dir", tmp_path / "runs", "--folder", tmp_path / "exported"
    learning("export", "--parts", f"{script}-default", "--seeds", 3, *where)
    (copy,) = (tmp_path / "exported").iterdir()
    assert copy.name == f"{script}_Pendulum-v1"
    assert str(tmp_path) not in (copy / "config.json").read_text()
    played = [start("play.py", x).stdout.splitlines()[-1].split()[2:] for x in (run, copy)]
    assert played[0] == played[1]
    for words in [], ["--seeds", 5]:  # both seeds, or none
        assert start("benchmarks/learning.py", "export", *words, *where).returncode == 2
    if script == "sac_torch":
        assert {x.split(".")[0] for x in torch.load(copy / "model.pt")} == {"pi"}
    else:  # no value functions, and a graph that computes what the whole one computes
        import tensorflow.compat.v1 as tf  # only now: the script set it up

        from common.tf1_utils import load_model, restore_tf_graph

        assert {x.split("/")[0] for x in load_model(copy / "tf1_save")} == {"pi"}
        x = np.random.default_rng(0).standard_normal((5, 3))
        actions = []
        for folder in (run, copy):
            with tf.Graph().as_default(), tf.Session() as sess:
                tensors = restore_tf_graph(sess, folder / "tf1_save")
                actions.append(sess.run(tensors["pi"], {tensors["x"]: x}))
        np.testing.assert_array_equal(*actions)


def test_learning_refuses_what_cannot_be_trained():
    for words, sentence in (
        ("--parts ppo_torch-strange", "there is no part ppo_torch-strange: choose from ppo_torch"),
        ("--parts ppo_torch-strong --epochs 9", "--decay fixes the epochs of ppo_torch-strong"),
        ("--parts ppo_torch-strong --seeds 7", "these parts have the seeds 0 to 4 only"),
    ):
        refused = start("benchmarks/learning.py", "run", *words.split())
        assert (refused.returncode, refused.stdout) == (2, "")
        assert sentence in refused.stderr


def test_learning_of_a_peer_is_collected(tmp_path):
    """Skipped in CI, which does not install benchmarks/requirements.txt."""
    pytest.importorskip("stable_baselines3")
    script = ROOT / "benchmarks" / "sb3.py"
    words = ["ppo", "--env-id", "Hopper-v4", "--seed", 3, "--steps", 4000]
    done = start(script, *words, "--data-dir", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    (tmp_path / "runs" / "origins.jsonl").write_text("")
    learning("collect", "--data-dir", tmp_path / "runs", "--results", tmp_path)
    (row,) = pd.read_csv(tmp_path / "learning.csv").to_dict("records")
    assert (row["script"], row["setting"], row["step"]) == ("sb3_ppo", "default", 4000)
    assert 5 < row["return"] < 200
    tables = learning("tables", "--results", tmp_path)
    assert f"| Stable-Baselines3, default | 4,000 | - | {row['return']:.0f}, 1 seed | - |" in tables


def test_learning_tables_are_those_of_the_data(tmp_path):
    """The last tenth of a run counts; runs that were extended count at both lengths.

    Of runs that were cut, the table has their number, or how far the longest of them went.
    """
    rows = ["script,setting,env_id,seed,step,return,seconds"]
    for seed, last in enumerate((100, 200, 600)):
        rows += [f"ppo_torch,strong,Hopper-v4,{seed},{20_000 * i},7,1" for i in range(1, 46)]
        rows += [f"ppo_torch,strong,Hopper-v4,{seed},{20_000 * i},{last},1" for i in range(46, 51)]
        rows += [f"ppo_tf1,strong,Hopper-v4,{seed},{20_000 * i},50,1" for i in range(1, 51)]
    ablated = '"strong, without --norm"'
    rows += [f"ppo_tf1,{ablated},Hopper-v4,{x},1000000,30,1" for x in (1, 2)]
    for task, seed, points in ("Hopper", 0, 50), ("Hopper", 1, 19), ("Walker2d", 0, 30):
        run = f"trpo_torch,strong,{task}-v4,{seed}"
        rows += [f"{run},{20_000 * i},{100 * seed + 8},1" for i in range(1, points + 1)]
    for seed, epochs, value in (0, 50, 1), (1, 50, 2), (2, 250, 6), (3, 137, 3):  # 4000 steps each
        points = [4000 * (epochs * i // 50) for i in range(1, 51)]
        returns = [value if 180_000 < x <= 200_000 else 9 for x in points]
        rows += [f"td3_tf1,default,Hopper-v4,{seed},{x},{y},1" for x, y in zip(points, returns)]
    (tmp_path / "learning.csv").write_text("\n".join(rows))
    table = learning("tables", "--results", tmp_path)
    extended = [line for line in table.splitlines() if "`td3_tf1.py`" in line]
    assert extended == [
        "| `td3_tf1.py`, default | 200,000 | - | 3 (2 to 5), 4 seeds | - |",
        "| `td3_tf1.py`, default | 1,000,000 | - | 9, 1 seed | - |",
    ]
    (row,) = [line for line in table.splitlines() if "`ppo_torch.py`" in line]
    assert row == "| `ppo_torch.py`, strong | 1,000,000 | - | 300 (100 to 600), 3 seeds | - |"
    (row,) = [line for line in table.splitlines() if "`trpo_torch.py`" in line]
    cut = "8, 1 seed, 1 cut | 8, 1 seed at 600,000 steps"
    assert row == f"| `trpo_torch.py`, strong | 1,000,000 | - | {cut} |"
    compared = table.split("### What each flag is worth")[1]
    assert "| `ppo_tf1.py`, strong | 1,000,000 | - | 50, 2 seeds | - |" in compared
    assert "| `ppo_tf1.py`, strong, without --norm | 1,000,000 | - | 30, 2 seeds | - |" in compared
    twins = "| PPO, strong | 1,000,000 | - | +250 (+50 to +550), 3 and 3 seeds | - |"
    assert twins in table.split("### PyTorch minus TF1")[1]
    assert "| Tianshou | 1,000,000 | 5,784 | 2,609 | 3,589 |" in table
    learning("unpack", "--results", tmp_path, "--folder", tmp_path / "runs")
    shown = start("plot.py", tmp_path / "runs", "--table").stdout
    assert re.search(r"ppo_torch-strong .* Hopper-v4 .* 300.0 .* 3 \| 1,000,000 \|", shown), shown


def test_pages_take_their_tables_from_the_data(tmp_path):
    pages = {x: (ROOT / "docs" / x).read_text() for x in ("results.md", "trials.md")}
    for name, text in pages.items():
        outdated = re.sub(r"^(\| `\w+\.py`, .*) \|$", r"\1, outdated |", text, flags=re.MULTILINE)
        (tmp_path / name).write_text(outdated)
        assert outdated != text
    learning("pages", "--folder", tmp_path)
    assert {name: (tmp_path / name).read_text() for name in pages} == pages
    (tmp_path / "trials.md").write_text(pages["trials.md"].replace("## Variations", "## Others"))
    run = start("benchmarks/learning.py", "pages", "--folder", tmp_path)
    assert (run.returncode, "under the heading Variations" in run.stderr) == (2, True)


def test_the_plan_for_clusters_starts_from_the_measured_speed():
    pages, program = ((ROOT / "benchmarks" / x).read_text() for x in ("README.md", "network.py"))
    ranks = pages[pages.index("skew") :]
    rates = re.findall(r"^(PPO|SAC) = \d+ / (\d+)", program, re.MULTILINE)
    assert len(rates) == 2
    for algo, rate in rates:
        assert f"\n| {algo}, torch | {int(rate):,} |" in ranks


def test_the_pages_recommend_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from learning import STRONG

    page, readme = ((ROOT / x).read_text() for x in ("docs/results.md", "README.md"))
    assert f"python ppo_tf1.py --env-id HalfCheetah-v4 {STRONG['ppo']}\n" in readme
    for algo, flags in STRONG.items():
        assert f"| {algo.upper()} | `{flags}` |" in page


def test_the_pages_and_the_readme_have_the_tables_of_the_committed_data():
    page = "".join((ROOT / "docs" / x).read_text() for x in ("results.md", "trials.md"))
    tables = learning("tables")
    assert tables.count("|") > 20
    for line in tables.splitlines():
        assert line.lstrip("# ") in page
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(
        r"\| `(\w+).py`, (?:\[(strong) settings\].*?|(default) settings), (.*)", readme
    )
    assert len(shown) == 3
    by_algorithm = tables.split("### Other tasks")[0]
    for script, strong, default, rest in shown:
        (row,) = re.findall(
            rf"`{script}.py`, {strong or default} \| 1,000,000 \| (.*) \|", by_algorithm
        )
        returns, seeds = zip(
            *(re.match(r"(\S+).*?, (\d+) seed", x).groups() for x in row.split(" | "))
        )
        low, high = min(map(int, seeds)), max(map(int, seeds))
        count = f"{high}" if low == high else f"{low} to {high}"
        assert rest == f"{count} seeds | {' | '.join(x.rstrip(',') for x in returns)} |"
