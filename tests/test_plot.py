"""plot.py: what it reads, what it draws, compared number by number, and what it says."""

import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from helpers import ROOT, start
from matplotlib.colors import to_hex
from scipy.stats import bootstrap

import plot
from common import errors
from common.errors import SidespinError

MEAN = "mean of last 10% of epochs"
SPINNING_UP_PROGRESS = """\
Epoch	AverageEpRet	StdEpRet	AverageTestEpRet	TotalEnvInteracts	Time
0	-1281.5	30.25	-1350.5	5000	21.5
1	-1100.0	41.5	-990.25	10000	43.0
"""
SPINNING_UP_CONFIG = """{
    "ac_kwargs": {"hidden_sizes": [64, 64]},
    "actor_critic": "MLPActorCritic",
    "env_fn": "<function <lambda> at 0x7f2d3c>",
    "exp_name": "sac-bench",
    "gamma": 0.99,
    "logger": {"<spinup.utils.logx.EpochLogger object at 0x7f2d>": {"epoch_dict": {}, "x": NaN}},
    "seed": %d
}"""


@pytest.fixture(autouse=True)
def no_screen(monkeypatch, tmp_path):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", plot.__file__, raising=False)
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    yield
    plt.close("all")


def write_run(name, seed, ret, steps=None, data_dir="runs", config=True, env_id=None, **columns):
    """Write a run as the scripts do and return its table."""
    folder = plot.Path(data_dir, name, f"{name}_s{seed}")
    folder.mkdir(parents=True)
    steps = 1000 * np.arange(1, len(ret) + 1) if steps is None else steps
    columns = {"AverageEpRet": ret, "TotalEnvInteracts": steps, **columns}
    table = pd.DataFrame({"Epoch": np.arange(len(ret)), **columns})
    table.to_csv(folder / "progress.txt", sep="\t", index=False, na_rep="nan")
    if config:
        config = {"exp_name": name, "seed": seed} | ({"env_id": env_id} if env_id else {})
        (folder / "config.json").write_text(json.dumps(config))
    return table


def write_seeds(name, n, epochs=12, **kwargs):
    rng = np.random.default_rng([len(name), n])
    rets = np.cumsum(rng.normal(5, 20, (n, epochs)), 1)
    return [write_run(name, seed, ret, **kwargs) for seed, ret in enumerate(rets)]


def titles(*args, **kwargs):
    """Return {title: number of runs} of what plot.load() finds."""
    data = plot.load(*args, **kwargs)
    return data.groupby("experiment", sort=False).folder.nunique().to_dict()


def curves(fig, panel=0):
    """Return {label: line} of a panel."""
    lines = fig.axes[panel].lines
    return {line.get_label(): line for line in lines if not line.get_label().startswith("_child")}


def legend(fig):
    return [text.get_text() for text in fig.legends[0].get_texts()]


def band(fig):
    """Return x, lower and upper edge of the only band in a figure."""
    (collection,) = fig.axes[0].collections
    x, y = np.concatenate([path.vertices for path in collection.get_paths()]).T
    edges = pd.DataFrame({"x": x, "y": y}).groupby("x").y.agg(["min", "max"])
    return edges.index.to_numpy(), edges["min"].to_numpy(), edges["max"].to_numpy()


def by_steps(tables, column="AverageEpRet"):
    return pd.concat(tables).groupby("TotalEnvInteracts")[column]


def fails(monkeypatch, *argv):
    """Call plot.py as the command line does; return the sentence it ends with."""
    monkeypatch.setattr(errors, "command_line", True)
    with pytest.raises(SidespinError) as end:
        plot.main([*argv])
    assert end.value.exit_code == 2
    return str(end.value)


def on_a_terminal(*command, columns=80, **kwargs):
    """Run a command on a pseudo-terminal of this width; return its exit code and what it shows."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {key: x for key, x in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    env |= {"TERM": "xterm-256color", "FORCE_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=slave, stderr=slave, env=env, **kwargs
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # how Linux says that the other end is closed
            part = b""
        if not part:
            break
        shown += part
    os.close(master)
    return process.wait(), shown.decode().replace("\r\n", "\n")


# What is drawn


@pytest.mark.parametrize("est", ["mean", "max", "min"])
def test_curve_over_the_seeds(est):
    tables = write_seeds("ppo", 3)
    fig = plot.make_plots("runs", est=est)
    (label, line), *others = curves(fig).items()
    expected = by_steps(tables).agg(est)
    assert label == "ppo (3 seeds)" and not others
    np.testing.assert_array_equal(line.get_xdata(), expected.index)
    np.testing.assert_allclose(line.get_ydata(), expected)
    assert fig.axes[0].get_xlabel() == "Environment steps"
    assert fig.axes[0].get_ylabel() == "Average episode return"
    assert legend(fig) == ["ppo (3 seeds)"]
    assert len(fig.axes[0].collections) == (est == "mean")  # seeds say little on extremes
    title = fig.legends[0].get_title().get_text()
    assert title == {"mean": "mean, 95% CI"}.get(est, est)


def test_interquartile_mean_is_of_the_middle_half():
    tables = write_seeds("ppo", 8)
    (line,) = curves(plot.make_plots("runs", est="iqm")).values()
    middle = by_steps(tables).apply(lambda y: np.sort(y)[2:6].mean())
    np.testing.assert_allclose(line.get_ydata(), middle)
    assert not np.allclose(middle, by_steps(tables).mean())


@pytest.mark.parametrize("est", ["mean", "iqm"])
def test_confidence_interval_is_the_bootstrap_of_the_estimator(est):
    tables = write_seeds("ppo", 5)
    x, low, high = band(plot.make_plots("runs", est=est, band="ci"))
    statistic = {"mean": np.mean, "iqm": lambda y: np.sort(y)[1:-1].mean()}[est]
    for i, (steps, y) in enumerate(by_steps(tables)):
        one = dict(n_resamples=2000, method="percentile", rng=np.random.default_rng(0))
        interval = bootstrap((y.to_numpy(),), statistic, **one).confidence_interval
        assert x[i] == steps
        np.testing.assert_allclose([low[i], high[i]], interval)


def test_other_bands():
    y = by_steps(write_seeds("ppo", 4))
    _, low, high = band(plot.make_plots("runs", band="std"))
    np.testing.assert_allclose([low, high], [y.mean() - y.std(), y.mean() + y.std()])
    _, low, high = band(plot.make_plots("runs", band="minmax", est="iqm"))
    np.testing.assert_allclose([low, high], [y.min(), y.max()])
    assert not plot.make_plots("runs", band="none").axes[0].collections


def test_where_all_seeds_agree_the_interval_is_a_point():
    for seed in range(3):
        write_run("ppo", seed, [100.0, 500.0 + seed, 500.0])
    _, low, high = band(plot.make_plots("runs"))
    assert list(low[[0, 2]]) == list(high[[0, 2]]) == [100, 500]
    assert low[1] < high[1]


def test_one_seed_has_no_band():
    write_seeds("ppo", 1)
    fig = plot.make_plots("runs")
    assert legend(fig) == ["ppo (1 seed)"] and not fig.axes[0].collections


def test_runs_of_different_length_and_spacing():
    long_x, short_x = np.arange(100, 1001, 100), np.array([250, 500, 750])
    long_y, short_y = long_x / 10.0 + 7, np.array([-10.0, 40.0, -30.0])
    write_run("ppo", 0, long_y, long_x)
    write_run("ppo", 1, short_y, short_x)
    fig = plot.make_plots("runs", band="minmax")
    faint, solid = fig.axes[0].lines
    x = np.unique([*long_x, *short_x])
    both = (x >= 250) & (x <= 750)
    on_long = np.interp(x, long_x, long_y)
    expected = np.where(both, (on_long + np.interp(x, short_x, short_y)) / 2, on_long)
    np.testing.assert_array_equal(faint.get_xdata(), x)
    np.testing.assert_allclose(faint.get_ydata(), expected)
    np.testing.assert_allclose(solid.get_ydata(), np.where(both, expected, np.nan))
    assert faint.get_alpha() < 0.5 and faint.get_color() == solid.get_color()
    assert legend(fig) == ["ppo (2 seeds)", "fewer seeds"]
    edges_x, _, high = band(fig)
    assert edges_x.min() == 250 and edges_x.max() == 750  # of one run there is no spread
    np.testing.assert_allclose(high, np.maximum(on_long, np.interp(x, short_x, short_y))[both])


def test_long_runs_are_drawn_at_as_many_points_as_can_be_seen():
    rng = np.random.default_rng(0)
    steps = [np.arange(1, 3001) * 100 + rng.integers(0, 50, 3000) for _ in range(2)]
    for seed in range(2):
        steps[seed][[0, -1]] = 100, 300000
        write_run("ppo", seed, np.sin(steps[seed] / 3e4) + seed, steps[seed])
    (line,) = curves(plot.make_plots("runs")).values()
    x, y = line.get_data()
    assert len(x) == 500 and x[0] == 100 and x[-1] == 300000
    np.testing.assert_allclose(y, np.sin(x / 3e4) + 0.5, atol=1e-5)


def test_epochs_without_a_number_are_bridged_but_no_end_is_made_up():
    write_run("ppo", 0, [np.nan, 2.0, np.nan, 6.0, np.inf])
    write_run("ppo", 1, [0.0, 0.0, 0.0, 0.0, 0.0])
    faint, solid = plot.make_plots("runs", band="none").axes[0].lines
    np.testing.assert_allclose(faint.get_ydata(), [0, 1, 2, 3, 0])
    np.testing.assert_allclose(solid.get_ydata(), [np.nan, 1, 2, 3, np.nan])


@pytest.mark.parametrize("window", [1, 2, 3, 5, 40])
def test_smoothing_averages_the_part_of_the_window_that_exists(window):
    y = np.random.default_rng(0).normal(100, 30, 9)
    y[4] = np.nan
    write_run("ppo", 0, y)
    (line,) = curves(plot.make_plots("runs", smooth=window)).values()
    around = [y[max(i - window // 2, 0) : i + (window + 1) // 2] for i in range(9)]
    expected = [np.nanmean(part) for i, part in enumerate(around) if i != 4]
    np.testing.assert_allclose(line.get_ydata(), expected)
    np.testing.assert_array_equal(line.get_xdata(), 1000 * np.delete(np.arange(1, 10), 4))


def test_each_seed_its_own_line():
    tables = write_seeds("ppo", 3) + write_seeds("sac", 2, epochs=30)
    fig = plot.make_plots("runs", count=True)
    assert len(fig.axes[0].lines) == 5 and not fig.axes[0].collections
    for line, table in zip(fig.axes[0].lines, tables):
        np.testing.assert_array_equal(line.get_xdata(), table.TotalEnvInteracts)
        np.testing.assert_allclose(line.get_ydata(), table.AverageEpRet)
    assert legend(fig) == ["ppo (3 seeds)", "sac (2 seeds)"]
    assert len({line.get_color() for line in fig.axes[0].lines}) == 2


def test_several_values_are_several_panels_over_any_column():
    times = [1.5, 3.0, 7.0]
    write_run("ppo", 0, [1.0, 2.0, 3.0], EpLen=[10.0, 20.0, 30.0], Time=times)
    fig = plot.make_plots("runs", value=["AverageEpRet", "EpLen"], xaxis="Time")
    for panel, y in enumerate([[1, 2, 3], [10, 20, 30]]):
        np.testing.assert_array_equal(curves(fig, panel)["ppo (1 seed)"].get_data(), [times, y])
    labels = [(ax.get_xlabel(), ax.get_ylabel()) for ax in fig.axes]
    assert labels == [
        ("Time (s)", "Average episode return"),
        ("Time (s)", "Episode length (steps)"),
    ]
    five = ["AverageEpRet", "EpLen", "Time", "Epoch", "Performance"]
    assert len(plot.make_plots("runs", value=five).axes) == 5


def test_performance_is_the_test_return_where_there_is_one():
    write_run("ppo", 0, [1.0, 2.0])
    write_run("sac", 0, [3.0, 4.0], AverageTestEpRet=[30.0, 40.0])
    lines = curves(plot.make_plots("runs"))
    np.testing.assert_array_equal(lines["ppo (1 seed)"].get_ydata(), [1, 2])
    np.testing.assert_array_equal(lines["sac (1 seed)"].get_ydata(), [30, 40])


def test_experiments_without_the_column_are_named_and_left_out(capsys):
    write_run("ppo", 0, [1.0, 2.0], KL=[0.1, 0.2])
    write_run("sac", 0, [3.0, 4.0])
    assert list(curves(plot.make_plots("runs", value="KL"))) == ["ppo (1 seed)"]
    notice = "plot.py: skipping 1 of 1 run of sac: no KL over TotalEnvInteracts\n"
    assert capsys.readouterr().err == notice


@pytest.mark.parametrize(
    "last, expected",
    [(1e6, ["0", "0.5M", "1.0M"]), (4e4, ["0", "20k", "40k"]), (5000, ["2000", "4000"])],
)
def test_big_numbers_are_short(last, expected):
    write_run("ppo", 0, np.linspace(0, 1, 11), np.linspace(0, last, 11).astype(int))
    fig = plot.make_plots("runs")
    fig.axes[0].set_xticks([0, last / 2, last] if last == 1e6 else [*range(0, int(last) + 1, 2000)])
    fig.draw_without_rendering()
    assert set(expected) <= {tick.get_text() for tick in fig.axes[0].get_xticklabels()}


def test_forty_experiments_look_different():
    for i in range(40):
        write_run(f"lr{i:02}", 0, np.arange(3) + i)
    fig = plot.make_plots("runs")
    looks = {(to_hex(x.get_color()), str(x._dash_pattern)) for x in fig.axes[0].lines}
    assert len(looks) == 40 and len(legend(fig)) == 40
    fig.draw_without_rendering()
    box = fig.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= fig.bbox.width and box.y1 < fig.axes[0].bbox.y0


@pytest.mark.parametrize("length", [10, 60, 150])
def test_names_of_any_length_fit_into_the_legend(length):
    for i in range(3):
        write_run(f"{'x' * length}{i}", 0, [1.0, 2.0])
    fig = plot.make_plots("runs")
    fig.draw_without_rendering()
    box = fig.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= fig.bbox.width and box.y0 >= 0
    assert box.y1 < fig.axes[0].get_tightbbox().y0
    assert fig.axes[0].bbox.height > 150


# Environments


def panels(fig):
    """Return {title: {label: line}} of all panels."""
    return {ax.get_title(): curves(fig, i) for i, ax in enumerate(fig.axes)}


def write_environments(names, env_ids, epochs=4, **kwargs):
    for i, env_id in enumerate(env_ids):
        for j, name in enumerate(names):
            ret = 1000.0 * i + 10 * j + np.arange(epochs)
            write_run(f"{name}_{env_id}", 0, ret, env_id=env_id, **kwargs)


def test_environments_never_share_a_panel():
    for seed in range(3):
        write_run("ppo", seed, [30.0, 31.0], data_dir="a", env_id="CartPole-v1")
        write_run("ppo", seed, [-500.0, -499.0], data_dir="b", env_id="Acrobot-v1")
    write_run("sac", 0, [-490.0, -480.0], data_dir="b", env_id="Acrobot-v1")
    fig = plot.make_plots(["a", "b"])
    shown = panels(fig)
    assert {env_id: list(lines) for env_id, lines in shown.items()} == {
        "CartPole-v1": ["ppo (3 seeds)"],
        "Acrobot-v1": ["ppo (3 seeds)", "sac (1 seed)"],
    }
    ppo = [lines["ppo (3 seeds)"] for lines in shown.values()]
    assert [list(line.get_ydata()) for line in ppo] == [[30, 31], [-500, -499]]
    assert (
        ppo[0].get_color() == ppo[1].get_color() != shown["Acrobot-v1"]["sac (1 seed)"].get_color()
    )
    assert legend(fig) == ["ppo (3 seeds)", "sac (1 seed)"]
    assert fig.axes[0].get_ylim()[0] > 0 > fig.axes[1].get_ylim()[1]


def test_one_environment_is_the_title_of_its_panel():
    write_run("ppo", 0, [1.0, 2.0])
    assert plot.make_plots("runs").axes[0].get_title() == ""
    for name in ("a", "b"):
        write_run(name, 0, [1.0, 2.0], data_dir="cartpole", env_id="CartPole-v1")
    (panel,) = plot.make_plots("cartpole").axes
    assert panel.get_title() == "CartPole-v1" and len(panel.lines) == 2


def test_runs_on_an_unknown_environment_have_their_own_panel():
    write_run("ppo", 0, [1.0, 2.0], env_id="Hopper-v4")
    write_run("theirs", 0, [3.0, 4.0])
    shown = panels(plot.make_plots("runs"))
    assert {env_id: list(lines) for env_id, lines in shown.items()} == {
        "Hopper-v4": ["ppo (1 seed)"],
        "unknown environment": ["theirs (1 seed)"],
    }


@pytest.mark.parametrize("key", ["env_id", "env_name", "env"])
def test_other_names_for_the_environment_in_config(key):
    write_run("ppo", 0, [1.0, 2.0])
    config = plot.Path("runs/ppo/ppo_s0/config.json")
    config.write_text(json.dumps({key: "Hopper-v2"}))
    assert plot.make_plots("runs").axes[0].get_title() == "Hopper-v2"
    for not_a_name in ({"<TimeLimit>": {}}, None, 3, ""):
        config.write_text(json.dumps({key: not_a_name}))
        assert plot.make_plots("runs").axes[0].get_title() == ""


def test_the_environment_is_cut_from_names_so_that_panels_share_colors():
    write_environments(["ppo_torch", "vpg_tf1"], ["Hopper-v4", "Ant-v4"], data_dir="scripts")
    fig = plot.make_plots("scripts")
    assert legend(fig) == ["ppo_torch (1 seed)", "vpg_tf1 (1 seed)"]
    colors = [[line.get_color() for line in lines.values()] for lines in panels(fig).values()]
    assert colors[0] == colors[1] and len(set(colors[0])) == 2
    for env_id in ("Hopper-v4", "envs:Point-v0"):  # as grid.py names them
        for clip in ("0-1", "0-2"):
            name = f"ppo_torch_env{env_id.lower().replace(':', '-')}_cli{clip}"
            write_run(name, 0, [1.0, 2.0], data_dir="grid", env_id=env_id)
    assert titles("grid") == {"ppo_torch_cli0-1": 2, "ppo_torch_cli0-2": 2}
    assert titles("grid", legend=["all"]) == {"all": 4}


def test_names_are_not_cut_where_that_would_join_experiments():
    write_run("ppo_Ant-v4", 0, [1.0, 2.0], env_id="Ant-v4")
    assert titles("runs") == {"ppo": 1}
    write_run("ppo", 0, [5.0, 6.0], env_id="Ant-v4")
    assert titles("runs") == {"ppo": 1, "ppo_Ant-v4": 1}
    write_run("ppo_Ant-v4-old", 0, [5.0, 6.0], env_id="Ant-v4", data_dir="other")
    assert titles("other") == {"ppo_Ant-v4-old": 1}


def test_different_numbers_of_seeds_are_a_range():
    for seed in range(3):
        write_run("ppo_A-v0", seed, [1.0, 2.0], env_id="A-v0")
    for env_id in ("B-v0", "C-v0"):
        for seed in range(5 if env_id == "B-v0" else 4):
            write_run(f"ppo_{env_id}", seed, [1.0, 2.0], env_id=env_id)
    assert legend(plot.make_plots("runs")) == ["ppo (3-5 seeds)"]


@pytest.mark.parametrize(
    "environments, values, rows",
    [
        (1, 1, [1]),
        (3, 1, [3]),
        (4, 1, [2, 2]),
        (5, 1, [3, 2]),
        (6, 1, [3, 3]),
        (1, 4, [2, 2]),
        (3, 2, [3, 3]),
        (5, 2, [3, 2, 3, 2]),
    ],
)
def test_panels_form_a_tidy_grid(environments, values, rows):
    env_ids = [f"Env{i:02}-v0" for i in range(environments)]
    columns = {f"V{i}": np.arange(4) for i in range(values)}
    write_environments(["ppo", "sac"], env_ids, **columns)
    fig = plot.make_plots("runs", value=list(columns))
    fig.draw_without_rendering()
    assert [ax.get_title() for ax in fig.axes] == env_ids * values
    boxes = [ax.get_tightbbox() for ax in fig.axes]
    for i, a in enumerate(boxes):
        assert not any(a.overlaps(b) for b in boxes[i + 1 :])
        assert a.x0 >= 0 and a.x1 <= fig.bbox.width and a.y1 <= fig.bbox.height
    grid = {}  # {row: columns, from the left}
    for ax in fig.axes:
        spec = ax.get_subplotspec()
        grid.setdefault(spec.rowspan.start, {})[spec.colspan.start] = ax
    assert [len(row) for row in grid.values()] == rows
    for i, row in grid.items():
        for j, ax in row.items():
            is_lowest = not any(j in grid[below] for below in grid if below > i)
            assert ax.get_xlabel() == ("Environment steps" if is_lowest else "")
            assert bool(ax.get_ylabel()) == (j == 0 or environments == 1)
    assert len({ax.get_position().width.round(3) for ax in fig.axes}) == 1


def test_values_that_an_environment_lacks_leave_a_gap(capsys):
    write_run("a", 0, [1.0, 2.0], env_id="A-v0", KL=[1.0, 2.0])
    write_run("b", 0, [1.0, 2.0], env_id="B-v0")
    fig = plot.make_plots("runs", value=["AverageEpRet", "KL"])
    shown = [(ax.get_title(), ax.get_ylabel(), ax.get_xlabel()) for ax in fig.axes]
    assert shown == [
        ("A-v0", "Average episode return", ""),
        ("B-v0", "", "Environment steps"),
        ("A-v0", "KL", "Environment steps"),
    ]
    notice = "plot.py: skipping 1 of 1 run of b on B-v0: no KL over TotalEnvInteracts\n"
    assert capsys.readouterr().err == notice


# What is found and how it is grouped


def test_folders_and_prefixes():
    for name in ("ppo", "ppo-big", "sac"):
        write_seeds(name, 2)

    def names(*logdirs, **kwargs):
        return list(titles(logdirs, **kwargs))

    assert names("runs") == ["ppo", "ppo-big", "sac"]
    assert names("runs/pp") == ["ppo", "ppo-big"]
    assert names("runs/ppo") == names("runs/ppo/") == ["ppo"]  # a folder's name is no prefix
    assert names("runs/sac", "runs/ppo") == ["sac", "ppo"]
    assert names("ru") == names(".") == ["ppo", "ppo-big", "sac"]
    assert titles(["runs", "runs/ppo"]) == {"ppo": 2, "ppo-big": 2, "sac": 2}
    assert names("runs", select=["ppo", "big"]) == ["ppo-big"]
    assert names("runs", exclude=["big", "sac"]) == ["ppo"]
    data = plot.load("runs", select="ppo", exclude=["_s1", "big"])
    assert list(data.folder.unique()) == ["runs/ppo/ppo_s0"]


def test_one_name_in_two_data_dirs_is_two_experiments():
    write_run("ppo", 0, [1.0, 1.0], data_dir="old")
    write_run("ppo", 0, [2.0, 2.0], data_dir="new")
    for logdirs in (["old", "new"], ["old/ppo/ppo_s0", "new/ppo"], ["."]):
        lines = curves(plot.make_plots(logdirs))
        assert lines["old/ppo (1 seed)"].get_ydata()[0] == 1
        assert lines["new/ppo (1 seed)"].get_ydata()[0] == 2


def test_without_config_the_folder_names_the_experiment():
    write_run("ppo", 0, [1.0, 2.0], config=False)
    write_run("ppo", 12, [1.0, 2.0], config=False)
    write_run("sac_s5", 1, [1.0, 2.0])
    for broken in ('{"exp_name": "pp', "[1]", "null", '{"exp_name": null}', '{"exp_name": {}}'):
        plot.Path("runs/ppo/ppo_s0/config.json").write_text(broken)
        assert titles("runs") == {"ppo": 2, "sac_s5": 1}


def test_spinning_ups_own_runs():
    for seed, day in enumerate(["2018-11-08", "2018-11-09"]):  # begun before midnight
        folder = plot.Path("data", f"{day}_sac-bench", f"{day}_23-59-0{seed}-sac-bench_s{seed}")
        folder.mkdir(parents=True)
        (folder / "progress.txt").write_text(SPINNING_UP_PROGRESS)
        (folder / "config.json").write_text(SPINNING_UP_CONFIG % seed)
    fig = plot.make_plots("data")
    x, y = curves(fig)["sac-bench (2 seeds)"].get_data()
    np.testing.assert_array_equal(x, [5000, 10000])
    np.testing.assert_array_equal(y, [-1350.5, -990.25])
    for config in plot.Path("data").rglob("config.json"):
        config.unlink()
    assert legend(plot.make_plots("data")) == ["sac-bench (2 seeds)"]


def test_legend_titles_belong_to_arguments():
    for name in ("ppo-a", "ppo-b", "sac"):
        write_seeds(name, 2)
    fig = plot.make_plots(["runs/sac", "runs/ppo"], legend=["_SAC", "PPO"])
    assert legend(fig) == ["_SAC (2 seeds)", "PPO (4 seeds)"]
    assert legend(plot.make_plots(["runs/sac", "runs/ppo"], legend=["all"] * 2)) == [
        "all (6 seeds)"
    ]


def test_runs_of_one_seed_are_noticed(capsys):
    write_seeds("a", 2), write_seeds("b", 1)
    plot.load("runs")
    assert capsys.readouterr().err == ""
    plot.load("runs", legend=["both"])
    notice = "plot.py: both has several runs with the same seed, which may not be independent\n"
    assert capsys.readouterr().err == notice


# Runs that go on, or went wrong


def test_half_written_rows_are_left_out(capsys):
    (table,) = write_seeds("ppo", 1, epochs=4)
    file = plot.Path("runs/ppo/ppo_s0/progress.txt")
    whole = file.read_text()
    for rest in ("4", "4\t12.5\t50", "4\t12.5\t"):
        file.write_text(whole + rest)
        (line,) = curves(plot.make_plots("runs")).values()
        np.testing.assert_allclose(line.get_ydata(), table.AverageEpRet)
        notice = f"plot.py: skipping 1 incomplete row of {file.parent}\n"
        assert capsys.readouterr().err == notice
    file.write_text(whole.replace("\n1\t", "\n1\n1\t"))  # torn in the middle
    (line,) = curves(plot.make_plots("runs")).values()
    np.testing.assert_allclose(line.get_ydata(), table.AverageEpRet)


def test_runs_with_nothing_to_plot_are_left_out_with_a_line_each(capsys):
    write_run("ppo", 0, [1.0, 2.0])
    for name, content in [
        ("empty", b""),
        ("header", b"Epoch\tAverageEpRet\tTotalEnvInteracts\n"),
        ("half-header", b"Epoch\tAvera"),
        ("first-row", b"Epoch\tAverageEpRet\tTotalEnvInteracts\n0\t5.0"),
        ("binary", b"\x00\xff\xfe\n\x80\n"),
        ("words", b"no numbers\nat all\n"),
    ]:
        write_run(name, 0, [])
        plot.Path("runs", name, f"{name}_s0", "progress.txt").write_bytes(content)
    assert legend(plot.make_plots("runs")) == ["ppo (1 seed)"]
    notices = capsys.readouterr().err.splitlines()
    assert len(notices) == 6 and all(x.startswith("plot.py: skipping runs/") for x in notices)


def test_of_an_epoch_logged_twice_the_later_counts():
    write_run("ppo", 0, [1.0, 2.0, -3.0, 3.0, 4.0], [1000, 2000, 3000, 3000, 4000])
    (line,) = curves(plot.make_plots("runs")).values()
    np.testing.assert_array_equal(line.get_data(), [[1000, 2000, 3000, 4000], [1, 2, 3, 4]])


def test_a_single_row_is_a_dot():
    write_run("ppo", 0, [1.0])
    (line,) = curves(plot.make_plots("runs")).values()
    assert line.get_marker() == "o"


# The table


def test_table(capsys):
    finals = [table.AverageEpRet[-2:].mean() for table in write_seeds("ppo|x", 5, epochs=25)]
    plot.main(["runs", "--table", "csv"])
    out, err = capsys.readouterr()
    (row,) = pd.read_csv(io.StringIO(out), keep_default_na=False).to_dict("records")
    expected = {"experiment": "ppo|x", "environment": "", "value": "Performance"}
    expected |= {"seeds": 5, "steps": 25000}
    expected |= {MEAN: np.mean(finals), "std": np.std(finals, ddof=1)}
    expected |= {"iqm": np.sort(finals)[1:4].mean()}
    assert row == pytest.approx(expected) and err == ""

    plot.main(["--table", "runs"])
    header, rule, line, *others = capsys.readouterr().out.splitlines()
    assert not others and [x.strip() for x in header.strip("|").split("|")] == list(row)
    assert rule.count("-:") == 5 and len(header) == len(rule) == len(line)
    cells = [x.strip() for x in line.replace(r"\|", "/").strip("|").split("|")]
    assert cells[0] == "ppo/x" and cells[-2:] == ["5", "25,000"]
    assert [float(x) for x in cells[3:6]] == pytest.approx(
        [row[MEAN], row["std"], row["iqm"]], rel=1e-3
    )


@pytest.mark.parametrize("epochs, averaged", [(1, 1), (8, 1), (19, 1), (20, 2), (50, 5), (300, 30)])
def test_table_averages_the_last_tenth_of_a_run(epochs, averaged):
    ret = np.random.default_rng(0).normal(0, 100, epochs)
    write_run("ppo", 0, ret)
    assert plot.make_table(plot.load("runs"))[MEAN][0] == pytest.approx(ret[-averaged:].mean())


def test_table_has_one_row_per_experiment_and_environment(capsys):
    write_environments(["ppo", "sac"], ["A-v0", "B-v0"])
    write_run("theirs", 0, [7.0])
    table = plot.make_table(plot.load("runs"))
    rows = {(row.experiment, row.environment): row[MEAN] for _, row in table.iterrows()}
    assert rows == {
        ("ppo", "A-v0"): 3,
        ("ppo", "B-v0"): 1003,
        ("sac", "A-v0"): 13,
        ("sac", "B-v0"): 1013,
        ("theirs", ""): 7,
    }
    assert capsys.readouterr().err == ""


def test_iqm_is_shown_where_it_can_differ_from_the_mean(capsys):
    write_seeds("three", 3)
    assert list(plot.make_table(plot.load("runs"))) == [
        *("experiment", "environment", "value", MEAN, "std", "seeds", "steps")
    ]
    write_seeds("two", 2), write_seeds("vier", 4)
    table = plot.make_table(plot.load("runs")).set_index("experiment")
    assert list(table.iqm.notna()) == [False, False, True]
    assert list(table.seeds) == [3, 2, 4]
    plot.main(["runs", "--table"])
    assert "nan" not in capsys.readouterr().out.lower()


def test_table_of_unequal_runs(capsys):
    write_run("ppo", 0, [1.0, 2.0, np.inf], KL=[1.0, 2.0, 3.0])
    write_run("ppo", 1, [1.0] * 20)
    write_run("sac", 0, [np.nan])
    plot.main(["runs", "--table", "csv", "-y", "Performance", "KL"])
    out, err = capsys.readouterr()
    rows = pd.read_csv(io.StringIO(out)).to_dict("records")
    assert [(r["experiment"], r["value"], r[MEAN], r["seeds"], r["steps"]) for r in rows] == [
        ("ppo", "Performance", 1.5, 2, 3000),
        ("ppo", "KL", 3.0, 1, 3000),
    ]
    assert math.isnan(rows[1]["std"])
    assert "the runs of ppo end between 3,000 and 20,000 steps" in err
    assert "skipping 1 of 1 run of sac: no Performance" in err


def test_table_without_steps():
    folder = plot.Path("runs/a/a_s0")
    folder.mkdir(parents=True)
    (folder / "progress.txt").write_text("Loss\n1\n2\n")
    (row,) = plot.make_table(plot.load("runs"), "Loss").to_dict("records")
    assert row[MEAN] == 2 and pd.isna(row["steps"])


# The command line


def test_errors_are_one_sentence(monkeypatch):
    write_run("ppo", 0, [1.0, 2.0])
    write_run("empty", 0, [])
    write_run("nan", 0, [np.nan])
    plot.Path("nothing").mkdir()
    out = ["--out", "x.png"]
    no_run = "no runs in {}, nor in folders whose path starts with it"
    columns = "no run has a column AvgEpRet, only Epoch, AverageEpRet, TotalEnvInteracts, "
    whole = "--smooth must be a whole number of at least 1, got "
    folders = "name the folders to plot, before the options (see --help)"
    for argv, sentence in [
        (["rums", *out], no_run.format("rums")),
        (["no/such", *out], no_run.format("no/such")),
        (["nothing", *out], no_run.format("nothing")),
        (["runs", "rums", *out], no_run.format("rums")),
        (["runs/empty", *out], "no run has a complete row yet"),
        (["runs/nan", *out], "no run has Performance over TotalEnvInteracts yet"),
        (["runs/nan", "--table"], "no run has Performance yet"),
        (["runs", "--select", "sac", *out], "--select and --exclude leave no runs to plot"),
        (["runs/ppo", "-y", "AvgEpRet", *out], columns + "Performance"),
        (["runs/ppo", "-x", "AvgEpRet", *out], columns + "Performance"),
        (["runs/ppo", "--table", "-y", "AvgEpRet"], columns + "Performance"),
        (["runs/ppo", "-l", "A", "B", *out], "--legend has 2 titles for 1 logdir"),
        (["runs", "--out", "x.jpeg"], "--out x.jpeg must end in .png, .svg or .pdf"),
        (["runs", "--out", "x"], "--out x must end in .png, .svg or .pdf"),
        (["runs/ppo", "-s", "0", *out], whole + "0"),
        (["runs/ppo", "-s", "-3", *out], whole + "-3"),
        (["runs/ppo", "-s", "few", *out], whole + "few"),
        (["runs", "--est", "median"], "--est must be one of mean, max, min, iqm, got median"),
        (["runs", "--band", "iqr"], "--band must be one of ci, std, minmax, none, got iqr"),
        (["runs", "--out"], "--out: expected one argument"),
        (["runs", "-l"], "-l/--legend: expected at least one argument"),
        (["runs", "--smoth", "3", *out], "unrecognized option --smoth (did you mean --smooth?)"),
        (["runs", "--smooth-it", *out], "unrecognized option --smooth-it (did you mean --smooth?)"),
        (["runs", "--sel", "x"], "unrecognized option --sel (did you mean --select?)"),
        (["runs", "--outt=x.png"], "unrecognized option --outt=x.png (did you mean --out?)"),
        (["runs", "-z", *out], "unrecognized option -z"),
        ([], folders),
        (["-y", "KL", "runs"], folders),
    ]:
        assert fails(monkeypatch, *argv) == sentence
    assert "--table: invalid choice: 'tex'" in fails(monkeypatch, "runs", "--table=tex")
    problem = fails(monkeypatch, "runs/ppo", "--out", "/dev/null/x.png")
    assert problem.startswith("cannot write /dev/null/x.png: ")
    problem = fails(monkeypatch, "runs/ppo", "-l", r"$\nonsense$", *out)
    assert problem.startswith("cannot write x.png: ") and "\n" not in problem
    assert not plot.Path("x.png").exists()


def test_python_calls_raise_and_speak_python():
    write_run("ppo", 0, [1.0, 2.0])
    for call, sentence in [
        (lambda: plot.load("rums"), "no runs in rums, nor in folders whose path starts with it"),
        (lambda: plot.load("runs", legend=["a", "b"]), "legend has 2 titles for 1 logdir"),
        (lambda: plot.load("runs", select="x"), "select and exclude leave no runs to plot"),
        (lambda: plot.make_plots("runs", smooth=1.5), "smooth must be a whole number of at least"),
        (lambda: plot.make_plots("runs", est="median"), "est must be one of mean, max, min, iqm"),
        (lambda: plot.make_plots("runs", band=3), "band must be one of ci, std, minmax, none"),
        (lambda: plot.make_plots("runs", value="KL"), "no run has a column KL"),
        (lambda: plot.make_plots("runs", value="folder"), "no run has a column folder"),
        (lambda: plot.make_plots("runs", legend=r"$\no$"), "cannot draw the legend: "),
        (lambda: plot.make_plots("runs", out="x.what"), "cannot write x.what: "),
        (lambda: plot.make_table(plot.load("runs"), "KL"), "no run has a column KL"),
    ]:
        with pytest.raises(SidespinError, match=f"^{re.escape(sentence)}"):
            call()


def test_on_a_terminal_an_error_is_one_plain_line(tmp_path):
    write_run("ppo", 0, [1.0, 2.0])
    for argv, sentence in [
        (["runs", "--smoth", "3"], "unrecognized option --smoth (did you mean --smooth?)"),
        (["runs", "-s", "0"], "--smooth must be a whole number of at least 1, got 0"),
        (["rums", "--table"], "no runs in rums, nor in folders whose path starts with it"),
    ]:
        code, shown = on_a_terminal(plot.__file__, *argv, cwd=tmp_path)
        assert (code, shown) == (2, f"plot.py: error: {sentence}\n")


def test_a_reader_who_leaves_is_no_error(tmp_path):
    write_run("ppo", 0, [1.0, 2.0])
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    with subprocess.Popen([sys.executable, plot.__file__, "runs", "--table"], **pipes) as process:
        process.stdout.close()  # as `| head` may
        assert process.stderr.read() == b"" and process.wait() == 141


def test_a_figure_without_a_screen(tmp_path):
    write_seeds("ppo", 2)
    for ending, start_of_file in [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]:
        plot.main(["runs", "--out", f"new/figure.{ending}"])
        assert plot.Path(f"new/figure.{ending}").read_bytes().startswith(start_of_file)
    run = start(plot.__file__, "runs", "--out", "figure.png", cwd=tmp_path)
    line = "wrote figure.png (1 panel)\n"
    assert (run.returncode, run.stdout, run.stderr) == (0, line, "")
    assert plot.Path("figure.png").exists()
    run = start(plot.__file__, "runs", cwd=tmp_path)
    sentence = "no screen to show the figure on: use --out FILE or --table"
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == f"plot.py: error: {sentence}\n"


def test_options_in_any_order_and_a_figure_with_its_table(capsys, monkeypatch):
    write_seeds("ppo", 2)
    write_seeds("sac", 2)
    figures, make_plots = [], plot.make_plots
    monkeypatch.setattr(
        plot, "make_plots", lambda *a, **k: figures.append(make_plots(*a, **k)) or figures[0]
    )
    plot.main(
        ["--table", "runs/sac", "-s", "3", "runs/ppo", "-l", "S", "--out", "x.png", "-l", "P"]
    )
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()[2:]] == ["S", "P"]
    assert err == "plot.py: wrote x.png (1 panel)\n"  # stdout may be redirected into a file
    assert plot.Path("x.png").exists()
    assert list(curves(figures[0])) == ["S (2 seeds)", "P (2 seeds)"]


def test_with_a_screen_it_shows(tmp_path, monkeypatch):
    (tmp_path / "screen.py").write_text(
        "from matplotlib.backends.backend_agg import FigureCanvas, FigureManager\n"
        "import matplotlib.pyplot as plt\n"
        "shown = []\n"
        "def show(*args, **kwargs): shown.extend(map(plt.figure, plt.get_fignums()))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plt.switch_backend("module://screen")
    write_seeds("ppo", 2)
    plot.main(["runs"])
    import screen

    (fig,) = screen.shown
    assert list(curves(fig)) == ["ppo (2 seeds)"] and not list(tmp_path.glob("*.png"))


def test_it_needs_no_framework(tmp_path):
    write_seeds("ppo", 2)
    code = f"""
import sys
class NotInstalled:
    def find_spec(name, path, target):
        if name.split(".")[0] in ("torch", "tensorflow", "mpi4py"):
            raise ImportError(name)
sys.meta_path.insert(0, NotInstalled)
sys.path.insert(0, {str(ROOT)!r})
import plot
plot.make_plots("runs", out="x.png")
print(*sys.modules)
"""
    run = start("-c", code, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert not {"torch", "tensorflow", "mpi4py"} & set(run.stdout.split())


def test_importing_it_changes_nothing(tmp_path):
    code = f"""
import os, signal, sys, warnings, matplotlib.figure, pandas
sys.path.insert(0, {str(ROOT)!r})
def state():
    handlers = [signal.getsignal(x) for x in signal.valid_signals()]
    hooks = sys.excepthook, sys.displayhook, sys.stdout, sys.stderr
    style = {{key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}}
    return handlers, hooks, dict(os.environ), [*warnings.filters], style
before = state()
import plot
assert state() == before
assert not {{"mpi4py", "matplotlib.pyplot", "tyro", "scipy.stats"}} & set(sys.modules)
assert plot.errors.command_line is False
"""
    run = start("-c", code, cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


# Notebooks


def test_pyplot_does_not_know_the_figure_and_it_shows_itself():
    """Or a notebook shows it twice: as the value of the cell, and as a figure that is open."""
    write_seeds("ppo", 2)
    fig = plot.make_plots("runs", out="x.png")
    assert plt.get_fignums() == []
    assert fig._repr_png_().startswith(b"\x89PNG")


def test_a_notebook_shows_the_figure_once(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    write_seeds("ppo", 2)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport plot\nplot.make_plots('runs')"
    for first in ("", "%matplotlib inline\n", "import matplotlib.pyplot as plt; plt.figure()\n"):
        cells = [nbformat.v4.new_code_cell(x) for x in (f"{first}1", code)]
        notebook = nbformat.v4.new_notebook(cells=cells)
        nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
        (shown,) = cells[1].outputs
        assert shown.output_type == "execute_result" and "image/png" in shown.data


# The help


@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits_the_terminal(columns, tmp_path):
    code, shown = on_a_terminal(plot.__file__, "--help", columns=columns, cwd=tmp_path)
    assert code == 0 and "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    words = set(re.findall(r"[\w-]+", shown))
    assert {"TotalEnvInteracts", "AverageTestEpRet", "AverageEpRet", "Performance"} <= words


def test_help_has_every_option_and_no_other():
    text = plot.__doc__[plot.__doc__.index("options:") : plot.__doc__.index("examples:")]
    explained = set(re.findall(r"^  (?:-\w, )?--(\w+)", text, re.MULTILINE))
    assert explained == {*vars(plot.parse_args(["runs"])), "help"} - {"logdirs"}
    for name, choices in [("est", plot.ESTIMATORS), ("band", plot.BANDS)]:
        (explanation,) = re.findall(rf"  --{name} (.*?)\n  -", text, re.DOTALL)
        assert set(choices) <= set(re.findall(r"\w+", explanation))


def test_the_examples_of_the_help_work():
    for name in ("a", "b", "ppo-1"):
        write_seeds(name, 2, EpLen=np.arange(12))
    examples = plot.__doc__.split("examples:\n")[1].splitlines()
    assert len(examples) == 5
    for words in map(str.split, examples):
        assert words[:2] == ["python", "plot.py"]
        extra = [] if {"--out", "--table"} & set(words) else ["--out", "x.png"]
        plot.main([*words[2:], *extra])
