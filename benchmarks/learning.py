"""Learning curves of all scripts: train, collect, tabulate, draw.

learning.csv holds the results. runs.csv says where each run comes from: settings, commit, machine,
date and versions; it also has the largest KL of an epoch, and what the policy of a finished run
returns without noise, on average over ten episodes. A part is a script with one setting, such as
ppo_torch-strong; a part that does not exist is an error that lists all of them.

    python benchmarks/learning.py run
        train all parts but the trials, in days on two cores; repeat it to resume
    python benchmarks/learning.py run --parts ppo_torch-strong --seeds 0 1
        train a part, and only two of its seeds
    python benchmarks/learning.py collect
        add all runs to the data, as far as they got; those that are there already remain, unless
        a longer one has the same script, setting, environment and seed
    python benchmarks/learning.py tables
        print the tables of docs/results.md and docs/trials.md
    python benchmarks/learning.py pages
        replace the tables on these pages by those of the data
    python benchmarks/learning.py figures
        draw the figures of docs/results.md
    python benchmarks/learning.py unpack --folder FOLDER
        write the data as folders of runs, for plot.py
    python benchmarks/learning.py export --parts sac_torch-default --seeds 0
        copy what play.py needs of these runs to pretrained/
"""

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import tyro

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import play  # noqa: E402
from common.args import NonNegativeInt, PositiveInt  # noqa: E402
from common.errors import SidespinError, plural  # noqa: E402
from common.launch import launch  # noqa: E402
from common.run import find_runs, model_path, read_config  # noqa: E402
from plot import iqm  # noqa: E402

NOT_SETTINGS = "env_id seed data_dir exp_name resume overwrite".split()
KEY = ["script", "setting", "env_id", "seed"]
PAGES = ("results.md", "trials.md")
POINTS = 50  # per run; each is the mean over a window of epochs
TASKS = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"]
# Only with run --tasks; nothing was chosen by these
MORE_TASKS = ["Ant-v4", "Humanoid-v4", "InvertedDoublePendulum-v4", "Swimmer-v4"]
SETTINGS = ("default", "strong")
ON_POLICY, OFF_POLICY = ("ppo", "trpo", "vpg"), ("sac", "td3", "ddpg")

# The settings that README recommends
ON_POLICY_STRONG = "--norm --ortho --decay --steps-per-epoch 2000 --epochs 500"
ON_POLICY_STRONG += " --batch-size 64 --train-v-iters 10"
LOOK_AHEAD = "--gamma 0.995 --lam 0.9 --vf-lam 0.9"
STRONG = {
    "vpg": f"{ON_POLICY_STRONG} --pi-lr 3e-3 --vf-lr 3e-4 --lam 0.95 --vf-lam 0.95",
    "ppo": f"{ON_POLICY_STRONG} --train-pi-iters 10 --target-kl 1 {LOOK_AHEAD}",
    "trpo": f"{ON_POLICY_STRONG} --vf-lr 3e-4 --lam 0.95 --vf-lam 0.95",
}


def part(script, setting, flags, seeds):
    """Return a part's name, the words of its grid over all tasks, and its seeds."""
    name = f"{script}-{setting}"
    return name, [script, "--exp-name", name, *shlex.split(flags)], seeds


# On-policy a million steps, off-policy 200,000: extend these with `run --epochs 250 --parts ...`.
PARTS = [part(f"{algo}_torch", "strong", STRONG[algo], range(5)) for algo in ON_POLICY]
PARTS += [part(f"{algo}_torch", "default", "--epochs 250", range(5)) for algo in ON_POLICY]
PARTS += [part(f"{algo}_tf1", "strong", STRONG[algo], range(8)) for algo in ON_POLICY]
PARTS += [part(f"{algo}_tf1", "default", "--epochs 250", range(3)) for algo in ON_POLICY]
PARTS += [part(f"{algo}_torch", "default", "--epochs 50", range(3)) for algo in OFF_POLICY]
PARTS += [part(f"{algo}_tf1", "default", "--epochs 50", range(3)) for algo in OFF_POLICY]

# Variations of the strong settings, on the seeds that chose them; --parts must name them
VARIATIONS = {
    "ppo_tf1": {
        "on the seeds that chose it": STRONG["ppo"],
        "gamma 0.99": STRONG["ppo"].replace("--gamma 0.995 ", ""),
        "lam 0.95": STRONG["ppo"].replace("lam 0.9", "lam 0.95"),
        "vf-lr 3e-4": STRONG["ppo"] + " --vf-lr 3e-4",
        "hidden-sizes 128 128": STRONG["ppo"] + " --hidden-sizes '128 128'",
    },
    "vpg_tf1": {
        "on the seeds that chose it": STRONG["vpg"],
        "pi-lr 3e-4": STRONG["vpg"].replace("pi-lr 3e-3", "pi-lr 3e-4"),
        "pi-lr 1e-2": STRONG["vpg"].replace("pi-lr 3e-3", "pi-lr 1e-2"),
    },
}
TRIALS = [
    part(script, f"strong, {x}", flags, range(10, 15))
    for script, variations in VARIATIONS.items()
    for x, flags in variations.items()
]
AUTOTUNE = "--autotune --lr 3e-4 --batch-size 256 --epochs 50"  # as in most libraries
TRIALS.append(part("sac_tf1", "autotune, lr 3e-4, batch-size 256", AUTOTUNE, range(3)))

# What each flag of PPO's strong settings is worth, on seeds that chose nothing
MINIBATCHES = " --batch-size 64 --train-v-iters 10 --train-pi-iters 10 --target-kl 1"
WITHOUT = {
    "--norm": STRONG["ppo"].replace("--norm ", ""),
    "--ortho": STRONG["ppo"].replace("--ortho ", ""),
    "--decay": STRONG["ppo"].replace("--decay ", ""),
    "--vf-lam": STRONG["ppo"].replace(" --vf-lam 0.9", ""),
    "--batch-size": STRONG["ppo"].replace(MINIBATCHES, ""),  # 80 passes, as by default
}
ABLATION = [part("ppo_tf1", f"strong, without {x}", WITHOUT[x], range(3)) for x in WITHOUT]

# Stable-Baselines3 with its own defaults, by sb3.py, if it is installed: algorithm and steps
PEERS = {"sb3_ppo-default": ("ppo", 1_000_000), "sb3_trpo-default": ("trpo", 1_000_000)}
PEERS |= {"sb3_sac-default": ("sac", 200_000)}

# Returns after a million steps that others have published, in the order of TASKS
PUBLISHED = {
    "vpg": {"Spinning Up": (-49, 391, 293)},
    "ppo": {
        "Spinning Up": (1733, 1770, 1211),
        "CleanRL": (1443, 2383, 2288),
        "Tianshou": (5784, 2609, 3589),
    },
    "trpo": {"Spinning Up": (689, 1161, 549), "Tianshou": (4471, 2046, 3827)},
    "ddpg": {"Spinning Up": (10117, 1736, None), "Tianshou": (11719, 2197, 1401)},
    "td3": {"Spinning Up": (9755, 2859, None), "Tianshou": (10201, 3472, 3982)},
    "sac": {"Spinning Up": (11460, 3535, None), "Tianshou": (12139, 3542, 5007)},
}
PUBLISHED_MORE = {  # on MORE_TASKS
    "Tianshou's PPO": (3258, 787, 9231, 67),
    "Tianshou's TRPO": (2867, 810, 8435, 41),
}


@dataclass
class Args:
    command: Annotated[
        Literal["run", "collect", "tables", "pages", "figures", "unpack", "export"],
        tyro.conf.Positional,
    ]
    parts: tuple[str, ...] = ()  # run, export: parts, such as ppo_torch-strong; none: all
    seeds: tuple[NonNegativeInt, ...] = ()  # run, export: only these seeds; none: all of a part
    tasks: tuple[str, ...] = ()  # only these environments; none: all, but for run only TASKS
    epochs: PositiveInt | None = None  # run: train for this many epochs; None: the part's own
    workers: PositiveInt | None = None  # run: number of parallel runs; None: as many as fit
    data_dir: str = "runs/learning"  # where the runs are
    results: str = str(Path(__file__).parent)  # where learning.csv and runs.csv are
    folder: str | None = None  # where to write; None: runs/published, pretrained or docs


def run(args):
    """Train, by one grid per part; note on which machine and at which commit."""
    names = [*(name for name, _, _ in PARTS + ABLATION + TRIALS), *PEERS]
    for name in args.parts:
        if name not in names:
            raise SidespinError(f"there is no part {name}: choose from {'; '.join(names)}")
    chosen = PARTS + ABLATION
    if args.parts:
        chosen = [x for x in chosen + TRIALS if x[0] in args.parts]
    fixed = [name for name, words, _ in chosen if "--decay" in words]
    if args.epochs and fixed:
        raise SidespinError(f"--decay fixes the epochs of {'; '.join(fixed)}: leave these out")
    own = [seed for _, _, seeds in chosen for seed in seeds]
    if chosen and args.seeds and not set(args.seeds) & set(own):
        raise SidespinError(f"these parts have the seeds {min(own)} to {max(own)} only")
    for name, words, seeds in chosen:
        seeds = [seed for seed in seeds if not args.seeds or seed in args.seeds]
        if not seeds:
            continue
        tasks = args.tasks or TASKS
        note_origin(args, name, tasks, seeds)
        grid = [sys.executable, ROOT / "grid.py", *words, "--data-dir", args.data_dir]
        grid += ["--env-id", *tasks, "--seed", *map(str, seeds)]
        grid += ["--workers", str(args.workers)] if args.workers else []
        if args.epochs:
            grid[grid.index("--epochs") + 1] = str(args.epochs)
        if subprocess.run(grid).returncode:
            raise SidespinError(f"{name} did not finish: repeat the command to resume", 1)
    installed = find_spec("stable_baselines3") and find_spec("sb3_contrib")
    for name in PEERS if args.parts or installed else ():
        if not args.parts or name in args.parts:
            run_peer(args, name)


def run_peer(args, name):
    """Train with Stable-Baselines3, one run after another, unless it is there already."""
    algo, steps = PEERS[name]
    for task in args.tasks or TASKS[:2]:
        for seed in args.seeds or range(3):
            if (Path(args.data_dir) / f"{name}_{task}" / f"{name}_{task}_s{seed}").exists():
                continue  # one that was cut stays as it is: it cannot be resumed
            note_origin(args, name, [task], [seed])
            words = [algo, "--env-id", task, "--seed", seed, "--steps", steps]
            words = [sys.executable, ROOT / "benchmarks" / "sb3.py", *map(str, words)]
            if subprocess.run([*words, "--data-dir", args.data_dir]).returncode:
                raise SidespinError(f"{name} on {task} with seed {seed} failed", 1)


def note_origin(args, name, tasks, seeds):
    Path(args.data_dir).mkdir(parents=True, exist_ok=True)
    with open(Path(args.data_dir) / "origins.jsonl", "a") as file:
        runs = {"part": name, "tasks": list(tasks), "seeds": list(seeds)}
        print(json.dumps({**runs, **origin()}), file=file)


def origin():
    """Return when, where and from which commit runs are started now."""
    git = ["git", "-C", ROOT, "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    cpu = Path("/proc/cpuinfo")
    cpu = dict(re.findall(r"(.+?)\s*: (.+)", cpu.read_text())) if cpu.exists() else {}
    names = {"model name": "", "cpu family": "family ", "model": "model "}
    machine = [platform.system(), *(f"{names[x]}{cpu[x]}" for x in names if x in cpu)]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started": when, "commit": commit, "machine": ", ".join(machine)}


def collect(args):
    """Add what the runs have logged to the data."""
    folders = find_runs(args.data_dir)
    if not folders:
        raise SidespinError(f"there are no runs in {args.data_dir}")
    notes = Path(args.data_dir) / "origins.jsonl"
    origins = [json.loads(x) for x in open(notes)] if notes.exists() else []
    curves, runs = [], []
    for folder in folders:
        config, progress = read_config(folder), read_progress(folder)
        if progress is None:
            continue
        name = folder.parent.name.removesuffix(f"_{config['env_id']}")
        setting = name.removeprefix(f"{config['script']}-")
        key = dict(zip(KEY, (config["script"], setting, config["env_id"], config["seed"])))
        windows = np.array_split(np.arange(len(progress)), min(POINTS, len(progress)))
        for window in windows:
            rows = progress.iloc[window]
            point = {"step": rows["step"].iloc[-1], "return": rows["return"].mean().round(1)}
            curves.append({**key, **point, "seconds": round(rows["Time"].iloc[-1])})
        own = [x for x in origins if x["part"] == name]
        own = [x for x in own if config["env_id"] in x["tasks"] and config["seed"] in x["seeds"]]
        last = (folder / "progress.txt").stat().st_mtime  # later commands did not train it
        own = [x for x in own if datetime.fromisoformat(x["started"]).timestamp() <= last]
        versions = " ".join(f"{k} {v}" for k, v in config["versions"].items() if v)
        runs.append({**key, "steps": progress["step"].iloc[-1], "flags": flags(config)})
        if "KL" in progress:
            runs[-1]["max_kl"] = progress["KL"].max().round(2)
        if len(progress) == config["epochs"] and model_path(folder)[0].exists():
            returns, _ = play.play(folder, play.Args(str(folder)))
            runs[-1]["test_return"] = returns.mean().round(1)
        runs[-1] |= {k: " | ".join(dict.fromkeys(x[k] for x in own)) for k in ("machine", "commit")}
        runs[-1] |= {"started": own[0]["started"] if own else "", "versions": versions}
    steps = pd.DataFrame(runs).set_index(KEY)["steps"]
    if steps.index.has_duplicates:
        twice = " ".join(map(str, steps.index[steps.index.duplicated()][0]))
        raise SidespinError(f"{args.data_dir} has two runs of {twice}")
    file = Path(args.results) / "runs.csv"
    if file.exists():  # only a longer run replaces another: who repeats one gets no second chance
        before = pd.read_csv(file).set_index(KEY)["steps"]
        steps = steps[steps > before.reindex(steps.index).fillna(0)]
    for name, new in ("learning.csv", curves), ("runs.csv", runs):
        file, new = Path(args.results) / name, pd.DataFrame(new).set_index(KEY)
        new = new[new.index.isin(steps.index)].reset_index()
        if file.exists():
            old = pd.read_csv(file).set_index(KEY)
            new = pd.concat([old[~old.index.isin(steps.index)].reset_index(), new])
        order = [*KEY, "step"] if "step" in new else KEY
        new.sort_values(order).to_csv(file, index=False)
        print(f"{file.name}: {len(new)} rows, {len(new[KEY].drop_duplicates())} runs")


def flags(config):
    """Return what a run's settings change in the defaults of its script, as flags."""
    if config["script"] not in {words[0] for _, words, _ in PARTS}:
        return ""  # not one of ours
    words = []
    for field in dataclasses.fields(importlib.import_module(config["script"]).Args):
        value, default = config.get(field.name, field.default), field.default
        default = list(default) if isinstance(default, tuple) else default
        if value != default and field.name not in NOT_SETTINGS:
            words.append(f"--{field.name.replace('_', '-')}")
            values = value if isinstance(value, list) else [value]
            words += [str(x) for x in values if x is not True]
    return " ".join(words)


def read_progress(folder):
    """Read a run's table with its columns step and return; None if it has no epoch yet."""
    try:
        table = pd.read_csv(folder / "progress.txt", sep="\t")
    except (OSError, pd.errors.EmptyDataError):
        return None
    column = "AverageTestEpRet" if "AverageTestEpRet" in table else "AverageEpRet"
    return (
        table.rename(columns={"TotalEnvInteracts": "step", column: "return"})
        if len(table)
        else None
    )


def final_returns(curves):
    """Return the mean over the last tenth of every run, and its number of steps, by run."""
    steps = curves.groupby(KEY)["step"]
    last = curves[curves["step"] > 0.9 * steps.transform("max")]
    return last.groupby(KEY)["return"].mean(), steps.max()


def returns_at(n, curves):
    """Return the mean over the last tenth of the first n steps, and the steps up to there."""
    finals, steps = final_returns(curves[curves["step"] <= n])
    # A run that went on may have no point at exactly n, but it was not cut there.
    return finals, steps.mask(curves.groupby(KEY)["step"].max().reindex(steps.index) >= n, n)


def up_to(steps, curves):
    """Return the curves of the runs that reached this many steps, up to there."""
    reached = curves.groupby(KEY)["step"].transform("max") >= steps
    return curves[reached & (curves["step"] <= steps)]


def interval(scores, statistic=np.mean, samples=10_000):
    """Return a bootstrap 95% confidence interval; seeds are drawn within each array of scores."""
    rng = np.random.default_rng(0)
    drawn = [rng.choice(x, (samples, len(x))) for x in scores]
    return np.percentile(statistic(np.concatenate(drawn, axis=1), axis=1), [2.5, 97.5])


def tables(args):
    """Print final returns with their intervals, and what others have published."""
    curves = pd.read_csv(Path(args.results) / "learning.csv")
    finals, steps = final_returns(curves)
    settings = list(dict.fromkeys(curves["setting"].sort_values()))
    for algo, published in PUBLISHED.items():
        scripts = [f"{algo}_torch", f"{algo}_tf1", f"sb3_{algo}"]
        lengths = (200_000, 1_000_000) if algo in OFF_POLICY else (1_000_000,)
        rows = [x for y in scripts for z in SETTINGS for x in rows_of(y, z, curves, lengths)]
        for source, returns in published.items():
            numbers = ["-" if x is None else f"{x:,}" for x in returns]
            rows.append([source, "1,000,000", *numbers])
        print_table(algo.upper(), rows, len(published))
    scripts = sorted({key[0] for key in finals.index})
    ablated = [name.partition("-")[2] for name, _, _ in ABLATION]
    others = [x for x in settings if x not in (*SETTINGS, *ablated)]
    more = [(script, x) for script in scripts for x in SETTINGS]
    rows = [row(*x, finals, steps, MORE_TASKS) for x in more]
    for source, returns in PUBLISHED_MORE.items():
        rows.append([source, "1,000,000", *(f"{x:,}" for x in returns)])
    print_table("Other tasks", rows, len(PUBLISHED_MORE), MORE_TASKS)
    print_without_noise(args)
    print_twins(curves)
    print_normalised(finals, steps)
    compared = ("strong", *ablated)
    same = on_common_seeds("ppo_tf1", compared, finals)
    rows = [row("ppo_tf1", x, finals[same], steps[same]) for x in compared]
    print_table("What each flag is worth", rows)
    print_table("Variations", [row(s, x, finals, steps) for s in scripts for x in others])


def on_common_seeds(script, settings, finals):
    """Tell of each run whether its seed has as many of these settings as any of its task."""
    keys = finals.index.to_frame(index=False)
    own = (keys["script"] == script) & keys["setting"].isin(settings)
    found = keys[own].groupby(["env_id", "seed"])["setting"].transform("size")
    most = found.groupby(keys["env_id"]).transform("max")
    return (found == most).reindex(keys.index, fill_value=False).to_numpy()


def print_without_noise(args):
    """Print what the policies at the end of the on-policy runs return without noise."""
    file = Path(args.results) / "runs.csv"
    runs = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=[*KEY, "steps"])
    runs = runs.reindex(columns=[*KEY, "steps", "test_return"]).dropna().set_index(KEY)
    settings = [(f"{a}_{x}", y) for a in ON_POLICY for x in ("torch", "tf1") for y in SETTINGS]
    rows = [row(*x, runs["test_return"], runs["steps"]) for x in settings]
    best = [f"{x:,}" for x in PUBLISHED["ppo"]["Tianshou"]]
    print_table("Without exploration noise", [*rows, ["Tianshou's PPO", "1,000,000", *best]], 1)


def print_twins(curves):
    """Print by how much PyTorch's mean exceeds TF1's, where both have at least three seeds."""
    rows, rng = [], np.random.default_rng(0)
    for algo, setting in itertools.product(ON_POLICY + OFF_POLICY, SETTINGS):
        length = 200_000 if algo in OFF_POLICY else 1_000_000
        finals, _ = final_returns(up_to(length, curves))
        cells = []
        for task in TASKS:
            keys = [(f"{algo}_{x}", setting, task) for x in ("torch", "tf1")]
            found = [finals[x].to_numpy() for x in keys if x in finals.index.droplevel("seed")]
            seeds = [len(x) for x in found]
            if len(found) < 2 or min(seeds) < 3:
                cells.append("-")
                continue
            torch, tf1 = (rng.choice(x, (10_000, len(x))).mean(axis=1) for x in found)
            low, high = np.percentile(torch - tf1, [2.5, 97.5])
            difference = f"{found[0].mean() - found[1].mean():+,.0f} ({low:+,.0f} to {high:+,.0f})"
            cells.append(f"{difference}, {seeds[0]} and {seeds[1]} seeds")
        if any(x != "-" for x in cells):
            rows.append([f"{algo.upper()}, {setting}", f"{length:,}", *cells])
    print_table("PyTorch minus TF1", rows)


def rows_of(script, setting, curves, lengths):
    """Return a row for each length that runs have reached; shorter runs go with the first."""
    own = curves[(curves["script"] == script) & (curves["setting"] == setting)]
    longest = own.groupby(KEY)["step"].transform("max")
    chosen = [own[(longest >= n) | (n == lengths[0])] for n in lengths]
    return [row(script, setting, *returns_at(n, x)) for n, x in zip(lengths, chosen)]


def row(script, setting, finals, steps, tasks=TASKS):
    """Return the cells of one script and setting, or None if there is no run of it.

    The longest runs of a cell count; it says how many others were cut.
    """
    lengths = steps[[key[:2] == (script, setting) and key[2] in tasks for key in steps.index]]
    cells = []
    for task in tasks:
        key = (script, setting, task)
        if key not in finals.index.droplevel("seed"):
            cells.append("-")
            continue
        longest = steps[key] == steps[key].max()
        found = finals[key][longest].to_numpy()
        low, high = interval([found])
        spread = f" ({low:,.0f} to {high:,.0f})" if len(found) > 2 else ""
        cells.append(f"{found.mean():,.0f}{spread}, {plural(len(found), 'seed')}")
        if steps[key].max() < lengths.max():
            cells[-1] += f" at {steps[key].max():,} steps"
        if not longest.all():
            cells[-1] += f", {(~longest).sum()} cut"
    if not len(lengths):
        return None
    title = "Stable-Baselines3" if script.startswith("sb3_") else f"`{script}.py`"
    return [f"{title}, {setting}", f"{lengths.max():,}", *cells]


def print_table(title, rows, references=0, tasks=TASKS):
    rows = [x for x in rows if x]
    if len(rows) > references:
        head = ["", "steps", *short(tasks)]
        print(f"\n### {title}\n\n{markdown([head, *rows])}")


def short(tasks):
    return [task.removesuffix("-v4") for task in tasks]


def print_normalised(finals, steps):
    """Print the interquartile mean over tasks and seeds of returns divided by Tianshou's PPO."""
    rows = [["", "interquartile mean", "95% interval", *short(TASKS), "seeds"]]
    for script, setting in dict.fromkeys(key[:2] for key in finals.index if key[1] in SETTINGS):
        scores = []
        for task, best in zip(TASKS, PUBLISHED["ppo"]["Tianshou"]):
            key = (script, setting, task)
            if key in finals.index.droplevel("seed"):
                done = steps[key] >= 1_000_000
                scores.append(finals[key][done].to_numpy() / best)
        if len(scores) == len(TASKS) and min(map(len, scores)) >= 5:
            low, high = interval(scores, iqm)
            rows.append([f"`{script}.py`, {setting}", f"{iqm(np.concatenate(scores)):.2f}"])
            rows[-1] += [f"{low:.2f} to {high:.2f}", *(f"{x.mean():.2f}" for x in scores)]
            rows[-1] += [", ".join(dict.fromkeys(f"{len(x)}" for x in scores))]
    if len(rows) > 1:
        print("\n### All tasks, in units of Tianshou's PPO\n")
        print(markdown(rows))


def markdown(rows):
    """Format the first row as the head of a table, the others as its body."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def pages(args):
    """Replace each table of the pages by that of the data under the same heading."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        tables(args)
    paths = [Path(args.folder or ROOT / "docs") / page for page in PAGES]
    new = {path: path.read_text() for path in paths}
    for title, table in re.findall(r"^### (.*)\n\n((?:\|.*\n)+)", printed.getvalue(), re.MULTILINE):
        old = re.compile(rf"^(#+ {re.escape(title)}\n\n)(?:\|.*\n)+", re.MULTILINE)
        if not any(map(old.search, new.values())):
            raise SidespinError(f"no page has a table under the heading {title}: write one there")
        new = {path: old.sub(rf"\g<1>{table}", text) for path, text in new.items()}
    for path, text in new.items():
        path.write_text(text)


def unpack(args):
    """Write the data as folders of runs."""
    for key, curve in pd.read_csv(Path(args.results) / "learning.csv").groupby(KEY):
        config = dict(zip(KEY, key))
        script, setting, env_id, seed = key
        if args.tasks and env_id not in args.tasks:
            continue
        name = f"{script}-{setting}_{env_id}"
        folder = Path(args.folder or "runs/published") / name / f"{name}_s{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        config["exp_name"] = name
        (folder / "config.json").write_text(json.dumps(config))
        table = curve[["step", "return", "seconds"]].reset_index(drop=True)
        returns = "TestEpRet" if re.search("sac|td3|ddpg", script) else "EpRet"
        table.columns = ["TotalEnvInteracts", f"Average{returns}", "Time"]
        table.to_csv(folder / "progress.txt", sep="\t", index_label="Epoch")


def export(args):
    """Copy trained policies, without the value functions: play.py needs none."""
    written = {}
    for run in find_runs(args.data_dir):
        config, (model, framework) = read_config(run), model_path(run)
        part = config["exp_name"].removesuffix(f"_{config['env_id']}")
        wanted = (args.parts, part), (args.tasks, config["env_id"]), (args.seeds, config["seed"])
        if not model.exists() or any(chosen and own not in chosen for chosen, own in wanted):
            continue
        name = f"{config['script']}_{config['env_id']}"
        folder = Path(args.folder or ROOT / "pretrained") / name
        if folder in written:
            raise SidespinError(f"{written[folder]} and {run} have one name: choose one seed")
        written[folder] = run
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config["data_dir"] = Args.data_dir  # the path on this machine is nobody else's
        (folder / "config.json").write_text(json.dumps(config, indent=4))
        if framework == "torch":
            import torch

            weights = torch.load(model, weights_only=True)
            policy = {key: x for key, x in weights.items() if key.startswith("pi.")}
            torch.save(policy, folder / model.name)
        else:
            copy_policy_tf1(model, folder / model.name)
        print(f"{folder}: from {run}")
    if not written:
        raise SidespinError(f"{args.data_dir} has no such run with a model")


def copy_policy_tf1(model, copy):
    """Copy a tf1_save/ with the variables and operations of the policy only."""
    import tensorflow.compat.v1 as tf

    from common.tf1_utils import Model, load, load_model, restore_tf_graph

    values = {k: x for k, x in load_model(model).items() if k.startswith("pi/")}
    with tf.Graph().as_default(), tf.Session() as sess:
        names = {k: x.name for k, x in restore_tf_graph(sess, model).items()}
        graph = tf.graph_util.extract_sub_graph(sess.graph_def, [names["pi"].split(":")[0]])
    with tf.Graph().as_default(), tf.Session() as sess:
        pi = {k: tf.get_variable(k, initializer=tf.zeros(x.shape)) for k, x in values.items()}
        for k, x in values.items():
            load(pi[k], x, sess)
        used = {node.name for node in graph.node}  # pi's mean does not need its std
        handles = {f"{k}:0": variable.handle for k, variable in pi.items() if k in used}
        x, a = tf.import_graph_def(graph, handles, [names["x"], names["pi"]], name="policy")
        slim = Model(sess, {"x": x}, {"pi": a})
        (copy / "variables").mkdir(parents=True)
        (copy / "saved_model.pb").write_bytes(slim.graph)
        path = str(copy / "variables" / "variables")
        slim.saver.save(sess, path, write_meta_graph=False, write_state=False)


FIGURES = {
    "on_policy.png": [
        (f"{algo}_tf1-{setting}", f"{algo.upper()}, {setting}")
        for algo in ON_POLICY
        for setting in ("strong", "default")
    ],
    "off_policy.png": [(f"{algo}_tf1-default", algo.upper()) for algo in OFF_POLICY],
    "twins.png": [(f"ppo_{x}-strong", f"PPO {x}") for x in ("torch", "tf1")],
}


def figures(args):
    """Draw the figures of docs/results.md by plot.py, from the runs that the tables count."""
    curves = pd.read_csv(Path(args.results) / "learning.csv")
    longest = curves.groupby(KEY)["step"].transform("max")
    counted = longest == curves.groupby(KEY[:-1])["step"].transform("max")
    with tempfile.TemporaryDirectory() as folder:
        curves[counted].to_csv(Path(folder) / "learning.csv")
        unpack(Args("unpack", results=folder, folder=folder, tasks=tuple(TASKS)))
        for file, curves in FIGURES.items():
            found = [(x, title) for x, title in curves if list(Path(folder).glob(f"{x}_*"))]
            if found:
                logdirs, titles = zip(*((f"{folder}/{x}_", title) for x, title in found))
                words = [*logdirs, "-l", *titles, "--out", ROOT / "docs" / "figures" / file]
                subprocess.run([sys.executable, ROOT / "plot.py", *words], check=True)


def main(args):
    globals()[args.command](args)


if __name__ == "__main__":
    launch(main, Args)
