"""Draw learning curves from any number of runs.

usage: python plot.py LOGDIR [LOGDIR ...] [options]

One panel per environment, one curve per experiment: the
mean over its seeds with a 95% confidence interval. A LOGDIR
is a folder of runs, at any depth, or the start of its path.
Unfinished runs and Spinning Up's own runs work as well.

Runs of one experiment may differ in length and spacing:
each is interpolated between its rows, not beyond them.
Where some of its seeds are missing, a curve is faint.

options:
  -l, --legend TITLE ...  one title per LOGDIR; runs with
                          the same title form one curve
  -x, --xaxis COLUMN      column of progress.txt to plot
                          over (TotalEnvInteracts)
  -y, --value COLUMN ...  columns to plot, one panel per
                          column (Performance, which is
                          AverageTestEpRet if a run has it,
                          else AverageEpRet)
  -s, --smooth ROWS       average over a window of rows (1)
  --count                 draw one line per seed
  --select TEXT ...       only runs with all of these in
                          their path
  --exclude TEXT ...      no runs with any of these in their
                          path
  --est ESTIMATOR         mean, max or min over the seeds;
                          iqm: the mean of their middle half
                          (mean)
  --band BAND             ci: 95% confidence interval by
                          bootstrap; std: standard
                          deviation; minmax: range; or none
                          (ci; with --est max or min, none)
  --out FILE              write a .png, .svg or .pdf instead
                          of opening a window
  --table [md|csv]        print a table: the mean of the
                          last 10% of each run's epochs (md)
  -h, --help              print this text

examples:
  python plot.py runs
  python plot.py runs/ppo -s 10 --out ppo.svg
  python plot.py runs/a runs/b -l PPO SAC --out ab.pdf
  python plot.py runs -y Performance EpLen --count
  python plot.py runs --table
"""  # noqa: D405, D413 (this is the text of --help)

import argparse
import io
import itertools
import math
import os
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from common import errors
from common.errors import SidespinError, flag, plural, print_line
from common.launch import exit_code, say_why, suggest
from common.run import print_out, read_config

LABELS = {
    "TotalEnvInteracts": "Environment steps",
    "Time": "Time (s)",
    "StepsPerSec": "Environment steps per second",
    "Performance": "Average episode return",
    "AverageEpRet": "Average episode return",
    "AverageTestEpRet": "Average test episode return",
    "EpLen": "Episode length (steps)",
    "TestEpLen": "Test episode length (steps)",
}
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000".split()  # Okabe and Ito's
DASHES = ["-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 4))]
LOOKS = [{"color": color, "linestyle": dashes} for dashes in DASHES for color in COLORS]
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.grid": True,
    "figure.constrained_layout.hspace": 0.05,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "savefig.dpi": 180,
    "pdf.fonttype": 42,  # TrueType: many conferences reject matplotlib's default, Type 3
}
CURVE = ["experiment", "environment"]  # runs that share both form one curve
BANDS = {"ci": ", 95% CI", "std": " ± std", "minmax": ", min to max", "none": ""}
FAINT = 0.35
MAX_POINTS = 500  # per curve: more than a figure can show, and each one is bootstrapped


class NotebookFigure(Figure):
    """A figure that notebooks show only once, because pyplot does not know about it."""

    def _repr_png_(self):
        png = io.BytesIO()
        self.savefig(png)
        return png.getvalue()


def iqm(y, axis=0):
    """Return the mean of the middle half; with fewer than four values, of all."""
    from scipy.stats import trim_mean  # imported here because it takes a second

    return trim_mean(y, 0.25, axis=axis)


ESTIMATORS = {"mean": np.mean, "max": np.max, "min": np.min, "iqm": iqm}


def as_list(x):
    return [] if x is None else [x] if isinstance(x, str | Path) else list(x)


def find_folders(logdir):
    """Return the folders of all runs in a folder, or in all folders whose paths start with it."""
    path = Path(logdir)
    siblings = (p for p in path.parent.glob("*") if p.name.startswith(path.name))
    roots = [path] if path.is_dir() else siblings
    return sorted(file.parent for root in roots for file in root.rglob("progress.txt"))


def read_progress(file):
    """Return the complete rows of progress.txt, and the number of incomplete ones."""
    with file.open() as text:
        lines = [line for line in text if line.strip()]
    tabs = lines[0].count("\t") if lines else 0
    complete = [line for line in lines if line.endswith("\n") and line.count("\t") == tabs]
    if len(complete) < 2:
        return pd.DataFrame(), 0
    data = pd.read_csv(io.StringIO("".join(complete)), sep="\t")
    data = data.apply(pd.to_numeric, errors="coerce").astype(float)
    return data.where(np.isfinite(data)), len(lines) - len(complete)


def read_run(folder):
    """Return a run's rows with its experiment and environment; if there are none, say so."""
    try:
        rows, torn = read_progress(folder / "progress.txt")
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        return print_line(f"skipping {folder}, which cannot be read: {reason}")
    if not rows.notna().any(axis=None):
        return print_line(f"skipping {folder}, which has no complete row of numbers yet")
    if torn:
        print_line(f"skipping {plural(torn, 'incomplete row')} of {folder}")
    for column in ("AverageTestEpRet", "AverageEpRet"):
        if column in rows and "Performance" not in rows:
            rows["Performance"] = rows[column]

    config = {key: x for key, x in read_config(folder).items() if x and isinstance(x, str)}
    folder_name, parent = folder.resolve().name, folder.resolve().parent
    name = config.get("exp_name") or re.sub(r"_s\d+$", "", without_date(folder_name))
    home = parent.parent if without_date(parent.name) == name else parent
    # Spinning Up does not save the environment, but code derived from it may
    env_id = config.get("env_id") or config.get("env_name") or config.get("env") or ""
    return rows.assign(folder=str(folder), home=str(home), experiment=name, environment=env_id)


def without_date(name):
    """Remove the date that --datestamp puts at the start of a folder's name."""
    return re.sub(r"^\d{4}-\d\d-\d\d_(\d\d-\d\d-\d\d-)?", "", name)


def without_env_id(name, env_id):
    """Shorten ppo_torch_Ant-v4_cli0-1 to ppo_torch_cli0-1: the panel names the environment."""
    env_in_name = r"\W+".join(re.findall(r"\w+", env_id))
    return re.sub(rf"_(env)?{env_in_name}(?=_|$)", "", name, flags=re.I) if env_id else name


def load(logdirs, legend=None, select=None, exclude=None):
    """Return the rows of all runs, with the columns experiment, environment and folder."""
    logdirs, legend, select, exclude = map(as_list, (logdirs, legend, select, exclude))
    if legend and len(legend) != len(logdirs):
        counts = f"{plural(len(legend), 'title')} for {plural(len(logdirs), 'logdir')}"
        raise SidespinError(f"{flag('legend')} has {counts}")
    runs = {}  # {(folder, title): run}
    for logdir, title in zip(logdirs, legend or [None] * len(logdirs)):
        folders = find_folders(logdir)
        if not folders:
            raise SidespinError(f"no runs in {logdir}, nor in folders whose path starts with it")
        for folder in folders:
            path, key = str(folder), (folder.resolve(), title)
            chosen = all(x in path for x in select) and not any(x in path for x in exclude)
            if chosen and key not in runs:
                runs[key] = read_run(folder)
    runs = {key: run for key, run in runs.items() if run is not None}
    if not runs:
        filtered = f"{flag('select')} and {flag('exclude')} leave no runs to plot"
        raise SidespinError(filtered if select or exclude else "no run has a complete row yet")

    titles = [title for _, title in runs] if legend else find_titles(runs.values())
    data = pd.concat(run.assign(experiment=x) for run, x in zip(runs.values(), titles))
    for names, rows in data.groupby(CURVE, sort=False):
        seeds = re.findall(r"_s(\d+)$", "\n".join(rows.folder.unique()), re.MULTILINE)
        if len(set(seeds)) < len(seeds):
            problem = "has several runs with the same seed, which may not be independent"
            print_line(f"{' on '.join(filter(None, names))} {problem}")
    return data


def find_titles(runs):
    """Return each run's experiment, as short a name as tells them apart."""
    full = [tuple(run[["home", "experiment", "environment"]].iloc[0]) for run in runs]
    short = [(home, without_env_id(name, env_id), env_id) for home, name, env_id in full]
    names = short if len(set(short)) == len(set(full)) else full
    if len({name[1:] for name in names}) == len(set(names)):
        return [name for _, name, _ in names]
    # The same name in different folders is not the same experiment
    homes = {name: {home for home, other, _ in names if other == name} for _, name, _ in names}
    starts = {name: os.path.commonpath(some) for name, some in homes.items()}
    return [str(Path(os.path.relpath(home, starts[name]), name)) for home, name, _ in names]


def check_columns(data, columns):
    known = [column for column in data if column not in ("folder", "home", *CURVE)]
    for column in columns:
        if column not in known:
            raise SidespinError(f"no run has a column {column}, only {', '.join(known)}")


def note_missing(names, runs, found, what):
    if found < runs:
        curve = " on ".join(filter(None, names))
        print_line(f"skipping {runs - found} of {plural(runs, 'run')} of {curve}: no {what}")


def curve(run, xaxis, value, smooth=1):
    """Return x and y of the rows that have both, y averaged over a window of rows."""
    points = pd.DataFrame({"x": run[xaxis], "y": run[value]}).dropna(subset="x")
    # If an epoch was logged twice, before and after an interruption, use the later row
    points = points.drop_duplicates("x", keep="last").sort_values("x")
    average = points.y.rolling(smooth, center=True, min_periods=1).mean()
    return points.assign(y=average.where(points.y.notna())).dropna().to_numpy().T


def align(curves):
    """Return a common x [points] and y of the curves [curves, points], NaN beyond their ends."""
    x = np.unique(np.concatenate([x for x, _ in curves]))
    if len(x) > MAX_POINTS:
        x = x[np.linspace(0, len(x) - 1, MAX_POINTS).astype(int)]
    return x, np.array([np.interp(x, *xy, left=np.nan, right=np.nan) for xy in curves])


def edges(y, middle, est, band):
    """Return the lower and upper edge of the band around the estimate of y [curves, points]."""
    if band == "minmax":
        return y.min(0), y.max(0)
    if band == "std":
        return middle - y.std(0, ddof=1), middle + y.std(0, ddof=1)
    from scipy.stats import bootstrap

    # Percentiles, because the default, BCa, is NaN where all seeds agree
    options = dict(n_resamples=2000, batch=100, method="percentile", rng=np.random.default_rng(0))
    return bootstrap((y,), ESTIMATORS[est], axis=0, vectorized=True, **options).confidence_interval


def summarise(ys, est, band):
    """Return the estimate over the curves that exist at each point, and the edges of its band."""
    middle, low, high = np.full((3, ys.shape[1]), np.nan)
    exists = ~np.isnan(ys)
    for some in np.unique(exists, axis=1).T:
        at = (exists == some[:, None]).all(0)
        y = ys[np.ix_(some, at)]
        middle[at] = ESTIMATORS[est](y, axis=0)
        if len(y) > 1 and band != "none":
            low[at], high[at] = edges(y, middle[at], est, band)
    return middle, low, high


def draw(ax, curves, look, est, band, count):
    """Draw one experiment and return a line for the legend."""
    if all(x.size == 1 for x, _ in curves):
        look = {**look, "marker": "o"}  # a line through one point is invisible
    if count:
        lines = [ax.plot(*xy, **look, alpha=0.8) for xy in curves]
        return lines[0][0]
    x, ys = align(curves)
    y, low, high = summarise(ys, est, band)
    complete = ~np.isnan(ys).any(0)
    if not complete.all():
        ax.plot(x, y, **look, alpha=FAINT)
    if not np.isnan(low).all():
        ax.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    return ax.plot(x, np.where(complete, y, np.nan), **look)[0]


def shorten_big_numbers(ax):
    """Write 0.5M, 1.0M or 20k where the numbers of an axis are that large."""
    for axis in (ax.xaxis, ax.yaxis):
        largest = np.abs(axis.get_view_interval()).max()
        if 1e6 <= largest < 1e9:
            axis.set_major_formatter(lambda x, _: f"{round(x / 1e6, 3)}M" if x else "0")
        elif 1e4 <= largest < 1e6:
            axis.set_major_formatter(lambda x, _: f"{x / 1e3:g}k" if x else "0")


def make_panels(panels, xaxis):
    """Return a figure and {(value, environment): axes}, in a grid that is close to square."""
    values, env_ids = (list(dict.fromkeys(names)) for names in zip(*panels))
    n = len(env_ids) if len(env_ids) > 1 else len(values)
    across = n if n <= 3 else min(math.ceil(math.sqrt(n)), 4)
    gaps = [None] * (-len(env_ids) % across if len(env_ids) > 1 else 0)  # each value starts a row
    places = [(value, env_id) for value in values for env_id in env_ids + gaps]
    down = math.ceil(len(places) / across)
    fig = NotebookFigure(figsize=(2.5 + 2.5 * across, 0.8 + 2.2 * down), layout="constrained")
    axes = {}
    for i, ax in enumerate(fig.subplots(down, across, squeeze=False).flat):
        if i >= len(places) or places[i] not in panels:
            ax.remove()
            continue
        axes[places[i]] = ax
        value, env_id = places[i]
        ax.set_title(env_id or ("unknown environment" if len(env_ids) > 1 else ""))
        ax.margins(x=0.02)
        if not any(below in panels for below in places[i + across :: across]):
            ax.set_xlabel(LABELS.get(xaxis, xaxis))
        if i % across == 0 or places[i - 1][0] != value:
            ax.set_ylabel(LABELS.get(value, value))
    return fig, axes


def add_legend(fig, lines, title):
    """Put the legend below the panels, where it hides no curve, and make room for it."""
    width, height = fig.get_size_inches()
    for columns in range(8, 0, -1):
        rows = math.ceil(len(lines) / columns)
        where = dict(loc="outside lower center", ncols=math.ceil(len(lines) / rows))
        legend = fig.legend(lines.values(), lines.keys(), title=title, columnspacing=1.5, **where)
        box = legend.get_window_extent().transformed(fig.dpi_scale_trans.inverted())
        if box.width <= max(width, 6.5) or columns == 1:
            break
        legend.remove()
    fig.set_size_inches(max(width, box.width + 0.1), height + box.height)


def make_plots(
    logdirs,  # folders as on the command line, or what load() returns
    legend=None,
    xaxis="TotalEnvInteracts",
    value="Performance",
    count=False,
    smooth=1,
    select=None,
    exclude=None,
    est="mean",
    band=None,
    out=None,
):
    """Draw the same as the command line and return the matplotlib figure."""
    band = band or ("ci" if est in ("mean", "iqm") else "none")  # seeds say little about extremes
    for name, choice, known in [("est", est, ESTIMATORS), ("band", band, BANDS)]:
        if choice not in known:
            raise SidespinError(f"{flag(name)} must be one of {', '.join(known)}, got {choice}")
    if not isinstance(smooth, int | np.integer) or smooth < 1:
        expected = "a whole number of at least 1"
        raise SidespinError(f"{flag('smooth')} must be {expected}, got {smooth}")
    data = logdirs if isinstance(logdirs, pd.DataFrame) else load(logdirs, legend, select, exclude)
    check_columns(data, [xaxis, *as_list(value)])
    panels = {}  # {(value, environment): {title: curves}}
    for column in as_list(value):
        for names, rows in data.groupby(CURVE, sort=False):
            runs = [run for _, run in rows.groupby("folder", sort=False)]
            curves = [xy for run in runs if (xy := curve(run, xaxis, column, smooth)).size]
            note_missing(names, len(runs), len(curves), f"{column} over {xaxis}")
            if curves:
                panels.setdefault((column, names[1]), {})[names[0]] = curves
    if not panels:
        raise SidespinError(f"no run has {' or '.join(as_list(value))} over {xaxis} yet")

    titles = data.experiment.unique()
    thin = count or len(titles) > len(COLORS)
    with matplotlib.rc_context({**STYLE, "lines.linewidth": 0.9 if thin else 1.5}):
        fig, axes = make_panels(panels, xaxis)
        lines = {}
        for title, look in zip(titles, itertools.cycle(LOOKS)):
            drawn = {panel: curves[title] for panel, curves in panels.items() if title in curves}
            seeds = sorted({len(curves) for curves in drawn.values()})
            seeds = "-".join(map(str, seeds[:: max(len(seeds) - 1, 1)]))  # fewest and most
            for panel, curves in drawn.items():
                line = draw(axes[panel], curves, look, est, band, count)
                line.set_label(f"{title} ({plural(seeds, 'seed')})")
                lines[line.get_label()] = line
        if any(line.get_alpha() == FAINT for ax in fig.axes for line in ax.lines):
            lines["fewer seeds"] = Line2D([], [], color="black", alpha=FAINT)
        for ax in fig.axes:
            shorten_big_numbers(ax)
        several = any(len(x) > 1 for curves in panels.values() for x in curves.values())
        how = est.replace("iqm", "IQM") + BANDS[band] if several and not count else None
        try:
            add_legend(fig, lines, how)
            if out:
                Path(out).parent.mkdir(parents=True, exist_ok=True)
                fig.savefig(out)
        except (OSError, ValueError) as error:  # ValueError: a title with a bad formula
            problem = f"write {out}" if out else "draw the legend"
            raise SidespinError(f"cannot {problem}: {str(error).splitlines()[-1]}") from error
    return fig


def make_table(data, value="Performance"):
    """Summarise what load() returned: one row per experiment, environment and value."""
    check_columns(data, as_list(value))
    table = []
    for names, rows in data.groupby(CURVE, sort=False):
        runs = rows.groupby("folder", sort=False)
        steps = runs["TotalEnvInteracts"].max() if "TotalEnvInteracts" in data else np.nan
        for column in as_list(value):
            final = pd.DataFrame({"y": runs[column].apply(final_mean), "steps": steps})
            final = final.dropna(subset="y")
            note_missing(names, runs.ngroups, len(final), column)
            if final.empty:
                continue
            first, last = final.steps.min(), final.steps.max()
            if first < last:
                ends = f"{first:,.0f} and {last:,.0f} steps"
                print_line(f"the runs of {names[0]} end between {ends}; the table shows the least")
            row = dict(zip(CURVE, names), value=column)
            row |= {"mean of last 10% of epochs": final.y.mean(), "std": final.y.std()}
            row |= {"iqm": iqm(final.y) if len(final) >= 4 else np.nan}  # for fewer, it is the mean
            table.append({**row, "seeds": len(final), "steps": first})
    if not table:
        raise SidespinError(f"no run has {' or '.join(as_list(value))} yet")
    table = pd.DataFrame(table).round({"steps": 0}).astype({"steps": "Int64"})
    return table.drop(columns="iqm") if table.iqm.isna().all() else table


def final_mean(y):
    """Return the mean of the last 10% of the epochs that have a value, but at least of one."""
    y = y.dropna()
    return y.tail(max(len(y) // 10, 1)).mean()


def as_markdown(table):
    def cell(x):
        if isinstance(x, str) or pd.isna(x):
            return "" if pd.isna(x) else x.replace("|", r"\|")
        return format(x, "," if isinstance(x, int) else ",.1f" if abs(x) >= 100 else ".4g")

    columns = []
    for i, name in enumerate(table):
        cells = [name, *map(cell, table[name].astype(object))]
        width = max(map(len, cells))
        cells = [x.rjust(width) if i > 2 else x.ljust(width) for x in cells]
        columns.append([cells[0], f"{'-' * (width - 1)}{':' if i > 2 else '-'}", *cells[1:]])
    return "".join(f"| {' | '.join(row)} |\n" for row in zip(*columns))


def parse_args(argv):
    def refuse(sentence):
        raise SidespinError(sentence.removeprefix("argument "))

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.format_help, parser.error = lambda: __doc__, refuse
    add, several = parser.add_argument, dict(nargs="+", action="extend")
    add("logdirs", nargs="*")
    add("-l", "--legend", **several)
    add("-x", "--xaxis", default="TotalEnvInteracts")
    add("-y", "--value", **several)
    add("-s", "--smooth", type=lambda text: int(text) if text.isdecimal() else text, default=1)
    add("--count", action="store_true")
    add("--select", **several)
    add("--exclude", **several)
    add("--est", default="mean")
    add("--band")
    add("--out")
    add("--table", choices=["md", "csv"])
    pairs = zip(argv, [*argv[1:], None])  # a logdir after --table is not its value
    argv = ["--table=md" if x == "--table" and y not in ("md", "csv") else x for x, y in pairs]
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        known = [f"--{name}" for name in vars(args)]
        refuse(f"unrecognized option {suggest(unknown[0], known)}")
    if not args.logdirs:
        refuse("name the folders to plot, before the options (see --help)")
    if args.out and Path(args.out).suffix.lower() not in (".png", ".svg", ".pdf"):
        refuse(f"--out {args.out} must end in .png, .svg or .pdf")
    args.value = args.value or ["Performance"]
    return args


def main(argv):
    args = parse_args(argv)
    data = load(args.logdirs, args.legend, args.select, args.exclude)
    if args.out or not args.table:
        names = "xaxis value count smooth est band out".split()
        fig = make_plots(data, **{name: getattr(args, name) for name in names})
    if args.out:
        say = print_line if args.table else print_out  # stdout belongs to the table
        say(f"wrote {args.out} ({plural(len(fig.axes), 'panel')})")
    if args.table:
        table = make_table(data, args.value)
        print_out(as_markdown(table) if args.table == "md" else table.to_csv(index=False), end="")
    elif not args.out:
        import matplotlib.pyplot as plt

        if plt.get_backend().lower() == "agg":  # matplotlib's fallback
            raise SidespinError("no screen to show the figure on: use --out FILE or --table")
        plt.figure(fig)  # give it a window
        plt.show()


if __name__ == "__main__":
    errors.command_line = True
    try:
        main(sys.argv[1:])
    except (SidespinError, BrokenPipeError) as error:  # BrokenPipeError: as in `| head`
        say_why(error)
        sys.exit(exit_code(error))
