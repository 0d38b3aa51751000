"""Learning curves from any number of runs, ours or Spinning Up's, finished or still going on.

    python plot.py runs/ppo_torch_Hopper-v4 runs/sac_torch_Hopper-v4 --out hopper.png

A run is a folder with a progress.txt, found at any depth. Runs of one experiment (exp_name in
config.json, else the folder's name without _s<seed>) make one curve, whatever their lengths and
spacing: between its rows a run is a straight line, before and after them it does not count. Where
some seeds of a curve do not count, it is faint.
"""

import argparse
import io
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

EXAMPLES = """examples:
  python plot.py runs                                   all experiments in runs, in a window
  python plot.py runs/ppo -s 10 --out ppo.svg           all that start with runs/ppo, smoothed
  python plot.py runs/a runs/b -l PPO SAC --out ab.pdf  two experiments under better names
  python plot.py runs -y Performance EpLen --count      two panels, each seed its own line
  python plot.py runs --table                           what each experiment came to
"""
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
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "savefig.dpi": 180,
    "pdf.fonttype": 42,  # TrueType: conferences refuse matplotlib's default
}
BANDS = {"ci": ", 95% CI", "std": " ± std", "minmax": ", min to max", "none": ""}
FAINT = 0.35
MAX_POINTS = 500  # of a curve: more than a figure can show, and each one has its bootstrap
LAST_ROWS = 10  # of a run: what the table averages


@dataclass
class Run:
    folder: Path
    data: pd.DataFrame  # progress.txt, and Performance
    experiment: str
    home: Path  # the folder that holds the experiment
    env_id: str | None


def iqm(y, axis=0):
    """Return the mean of the middle half; of less than four values, of all."""
    from scipy.stats import trim_mean  # here, since importing it takes a second

    return trim_mean(y, 0.25, axis=axis)


ESTIMATORS = {"mean": np.mean, "max": np.max, "min": np.min, "iqm": iqm}


def notice(message):
    print(f"plot.py: {message}", file=sys.stderr, flush=True)


def fail(message):
    print(f"plot.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def as_list(x):
    return [] if x is None else [x] if isinstance(x, str | Path) else list(x)


def find_folders(logdir):
    """Return the folders of all runs in a folder, or in all folders whose paths start so."""
    path = Path(logdir)
    beside = (p for p in path.parent.glob("*") if p.name.startswith(path.name))
    roots = [path] if path.is_dir() else beside
    return sorted(file.parent for root in roots for file in root.rglob("progress.txt"))


def read_progress(file):
    """Return the complete rows of a progress.txt, and how many are not complete."""
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
    """Return the run in a folder, or None, with a notice, if it has nothing to plot."""
    try:
        data, torn = read_progress(folder / "progress.txt")
    except (OSError, ValueError) as error:
        return notice(f"left out {folder}, which cannot be read: {str(error).splitlines()[0]}")
    if not data.notna().any(axis=None):
        return notice(f"left out {folder}, which has no complete row of numbers yet")
    if torn:
        notice(f"left out {torn} incomplete row(s) of {folder}")
    for column in ("AverageTestEpRet", "AverageEpRet"):
        if column in data and "Performance" not in data:
            data["Performance"] = data[column]

    try:
        config = dict(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError):
        config = {}
    texts = {key: value for key, value in config.items() if isinstance(value, str)}
    folder_name, parent = folder.resolve().name, folder.resolve().parent
    name = texts.get("exp_name") or re.sub(r"_s\d+$", "", without_date(folder_name))
    home = parent.parent if without_date(parent.name) == name else parent
    return Run(folder, data, name, home, texts.get("env_id"))


def without_date(name):
    """Remove what Spinning Up's datestamp puts in front of a folder's name."""
    return re.sub(r"^\d{4}-\d\d-\d\d_(\d\d-\d\d-\d\d-)?", "", name)


def load(logdirs, legend=None, select=None, exclude=None):
    """Return {title: the runs of one curve}, in the order of the arguments."""
    logdirs, legend, select, exclude = map(as_list, (logdirs, legend, select, exclude))
    if legend and len(legend) != len(logdirs):
        fail(f"--legend has {len(legend)} title(s) for {len(logdirs)} logdir(s)")
    runs, seen = [], set()
    for logdir, title in zip(logdirs, legend or [None] * len(logdirs)):
        folders = find_folders(logdir)
        if not folders:
            fail(f"there is no run in {logdir}, nor in a folder whose path starts so")
        for folder in folders:
            path, key = str(folder), (folder.resolve(), title)
            chosen = all(x in path for x in select) and not any(x in path for x in exclude)
            if chosen and key not in seen and (run := read_run(folder)):
                runs.append((run, title))
            seen.add(key)
    if not runs:
        filtered = "--select and --exclude leave no run to plot"
        fail(filtered if select or exclude else "no run has a complete row yet")

    groups = {}
    for run, title in runs:
        if title is None:
            # The same name in different folders is not the same experiment
            homes = {other.home for other, _ in runs if other.experiment == run.experiment}
            path = os.path.relpath(run.home, os.path.commonpath(homes))
            title = str(Path(path, run.experiment))
        groups.setdefault(title, []).append(run)
    for title, group in groups.items():
        names = "\n".join(run.folder.resolve().name for run in group)
        seeds = re.findall(r"_s(\d+)$", names, re.MULTILINE)
        if len(set(seeds)) < len(seeds):
            notice(f"{title} has several runs of one seed, which may not be independent")
    return groups


def check_columns(groups, columns):
    there = {column: None for group in groups.values() for run in group for column in run.data}
    for column in columns:
        if column not in there:
            fail(f"no run has a column {column}: there are {', '.join(there)}")


def note_missing(title, runs, there, what):
    if there < runs:
        notice(f"left out {runs - there} of {runs} run(s) of {title}: no {what}")


def curve(run, xaxis, value, smooth=1):
    """Return x and y of the rows that have both, y averaged over a window of rows."""
    if not {xaxis, value} <= set(run.data):
        return np.empty((2, 0))
    points = pd.DataFrame({"x": run.data[xaxis], "y": run.data[value]}).dropna(subset="x")
    # Of an epoch that was logged twice, before and after an interruption, the later one counts
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

    # Percentiles, since the default, BCa, is NaN where all seeds agree
    options = dict(n_resamples=2000, batch=100, method="percentile", rng=np.random.default_rng(0))
    return bootstrap((y,), ESTIMATORS[est], axis=0, vectorized=True, **options).confidence_interval


def summarise(ys, est, band):
    """Return the estimate over those curves that are there, and the edges of its band."""
    middle, low, high = np.full((3, ys.shape[1]), np.nan)
    there = ~np.isnan(ys)
    for some in np.unique(there, axis=1).T:
        at = (there == some[:, None]).all(0)
        y = ys[np.ix_(some, at)]
        middle[at] = ESTIMATORS[est](y, axis=0)
        if len(y) > 1 and band != "none":
            low[at], high[at] = edges(y, middle[at], est, band)
    return middle, low, high


def draw(ax, curves, look, est, band, count):
    """Draw one experiment and return a line for the legend."""
    if all(x.size == 1 for x, _ in curves):
        look = {**look, "marker": "o"}  # a line through one point cannot be seen
    if count:
        lines = [ax.plot(*xy, **look, alpha=0.8) for xy in curves]
        return lines[0][0]
    x, ys = align(curves)
    y, low, high = summarise(ys, est, band)
    all_there = ~np.isnan(ys).any(0)
    if not all_there.all():
        ax.plot(x, y, **look, alpha=FAINT)
    if not np.isnan(low).all():
        ax.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    return ax.plot(x, np.where(all_there, y, np.nan), **look)[0]


def shorten_big_numbers(axis):
    """Write 0.5M and 1.0M, or 20k, where an axis goes that far."""
    largest = np.abs(axis.get_view_interval()).max()
    if 1e6 <= largest < 1e9:
        axis.set_major_formatter(lambda x, _: re.sub(r"(\.\d+?)0+$", r"\1", f"{x / 1e6:.3f}") + "M")
    elif 1e4 <= largest < 1e6:
        axis.set_major_formatter(lambda x, _: f"{x / 1e3:g}k")


def add_legend(fig, lines, title):
    """Put the legend below the panels, where it hides no curve, and make room for it."""
    width, height = fig.get_size_inches()
    entry = 0.45 + 0.067 * max(map(len, lines))  # its width in inches, about
    rows = math.ceil(len(lines) / max(int(width / entry), 1))
    fig.set_size_inches(width, height + 0.2 * (rows + bool(title)))
    columns = math.ceil(len(lines) / rows)
    where = dict(loc="outside lower center", ncols=columns, columnspacing=1.5)
    fig.legend(lines.values(), lines.keys(), title=title, **where)


def make_plots(
    logdirs,  # as on the command line, or what load() returned
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
    """Draw what the command line draws and return the matplotlib figure."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    if smooth < 1:
        fail(f"--smooth must be at least 1, not {smooth}")
    groups = logdirs if isinstance(logdirs, dict) else load(logdirs, legend, select, exclude)
    values = as_list(value)
    check_columns(groups, [xaxis, *values])
    band = band or ("ci" if est in ("mean", "iqm") else "none")  # seeds say little on extremes
    across = 2 if len(values) == 4 else min(len(values), 3)
    down = math.ceil(len(values) / across)
    size = (4 * across + 1, 3 * down)
    lines = {}
    thin = count or len(groups) > len(COLORS)
    with plt.rc_context({**STYLE, "lines.linewidth": 0.9 if thin else 1.5}):
        fig, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        for ax in axes.flat[len(values) :]:
            ax.remove()
        for ax, column in zip(axes.flat, values):
            for i, (title, group) in enumerate(groups.items()):
                curves = [xy for run in group if (xy := curve(run, xaxis, column, smooth)).size]
                note_missing(title, len(group), len(curves), f"{column} over {xaxis}")
                if curves:
                    label = f"{title} ({len(curves)} seed{'s' * (len(curves) > 1)})"
                    lines[label] = draw(ax, curves, LOOKS[i % len(LOOKS)], est, band, count)
                    lines[label].set_label(label)
            ax.set(xlabel=LABELS.get(xaxis, xaxis), ylabel=LABELS.get(column, column))
            ax.margins(x=0.02)
            shorten_big_numbers(ax.xaxis)
            shorten_big_numbers(ax.yaxis)
        if not lines:
            plt.close(fig)
            fail(f"no run has {', '.join(values)} over {xaxis} yet")
        if any(line.get_alpha() == FAINT for ax in fig.axes for line in ax.lines):
            lines["fewer seeds"] = Line2D([], [], color="black", alpha=FAINT)
        env_ids = {run.env_id for group in groups.values() for run in group}
        if len(env_ids) == 1:
            fig.suptitle(env_ids.pop())
        several = any(len(group) > 1 for group in groups.values()) and not count
        add_legend(fig, lines, est.replace("iqm", "IQM") + BANDS[band] if several else None)
        try:
            if out:
                Path(out).parent.mkdir(parents=True, exist_ok=True)
                fig.savefig(out)
        except (OSError, ValueError) as error:  # ValueError: a title with a bad formula
            fail(f"cannot write {out}: {str(error).splitlines()[-1]}")
    return fig


def make_table(groups, value="Performance"):
    """Return what each experiment of load() came to, by the mean of each run's last rows."""
    check_columns(groups, as_list(value))
    rows = []
    for title, group in groups.items():
        for column in as_list(value):
            runs = [run.data.reindex(columns=[column, "TotalEnvInteracts"]) for run in group]
            last = [(data[column].tail(LAST_ROWS).mean(), data.iloc[:, 1].max()) for data in runs]
            last = pd.DataFrame(last, columns=["y", "steps"]).dropna(subset="y")
            note_missing(title, len(group), len(last), f"{column} in the last {LAST_ROWS} rows")
            if last.empty:
                continue
            if last.steps.nunique() > 1:
                ends = f"{last.steps.min():,.0f} and {last.steps.max():,.0f}"
                notice(f"the runs of {title} end between {ends} steps: the lower is in the table")
            row = {"experiment": title, "value": column, "mean": last.y.mean(), "std": last.y.std()}
            row |= {"iqm": iqm(last.y), "seeds": len(last), "steps": last.steps.min()}
            rows.append(row)
    if not rows:
        fail(f"no run has {', '.join(as_list(value))} in its last {LAST_ROWS} rows")
    return pd.DataFrame(rows).round({"steps": 0}).astype({"steps": "Int64"})


def as_markdown(table):
    def cell(x):
        if isinstance(x, str) or pd.isna(x):
            return "" if pd.isna(x) else x.replace("|", r"\|")
        return format(x, "," if isinstance(x, int) else ",.1f" if abs(x) >= 100 else ".4g")

    cells = [[cell(x) for x in row] for row in table.astype(object).itertuples(index=False)]
    cells = [list(table), ["---", "---", *["---:"] * 5], *cells]
    widths = [max(map(len, column)) for column in zip(*cells)]
    rows = [[x.ljust(width) for x, width in zip(row, widths)] for row in cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def parse_args(argv):
    parser = argparse.ArgumentParser(
        usage="%(prog)s logdir [logdir ...] [options]",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail
    add, several = parser.add_argument, dict(nargs="+", action="extend")
    add("logdirs", metavar="logdir", nargs="*", help="a folder of runs, or how its path starts")
    legend = "a title for each logdir, whose runs make one curve; the same title joins logdirs"
    add("-l", "--legend", metavar="TITLE", **several, help=legend)
    xaxis = "column of progress.txt along the x-axis (%(default)s)"
    add("-x", "--xaxis", metavar="COLUMN", default="TotalEnvInteracts", help=xaxis)
    value = "columns to plot, a panel each (Performance: AverageTestEpRet, else AverageEpRet)"
    add("-y", "--value", metavar="COLUMN", **several, help=value)
    smooth = "average over a window of so many rows (%(default)s)"
    add("-s", "--smooth", metavar="ROWS", type=int, default=1, help=smooth)
    add("--count", action="store_true", help="draw each seed as a line of its own")
    add("--select", metavar="TEXT", **several, help="only runs with all of these in their path")
    add("--exclude", metavar="TEXT", **several, help="no run with any of these in its path")
    est = "the curve over the seeds; iqm: the mean of their middle half (%(default)s)"
    add("--est", choices=list(ESTIMATORS), default="mean", help=est)
    band = """95%% confidence interval of the curve by bootstrap over the seeds, ± standard
        deviation, range, or nothing (ci; none for --est max and min)"""
    add("--band", choices=list(BANDS), help=band)
    add("--out", metavar="FILE", help="write a .png, .svg or .pdf instead of opening a window")
    table = f"print each experiment's mean over the last {LAST_ROWS} rows of its runs (md)"
    add("--table", nargs="?", choices=["md", "csv"], help=table)
    pairs = zip(argv, [*argv[1:], None])  # a logdir behind --table is not its value
    argv = ["--table=md" if x == "--table" and y not in ("md", "csv") else x for x, y in pairs]
    args = parser.parse_intermixed_args(argv)
    args.value = args.value or ["Performance"]
    return args


def main(argv):
    args = parse_args(argv)
    if not args.logdirs:
        fail("say which folders to plot, in front of the options (see --help)")
    if args.out and Path(args.out).suffix.lower() not in (".png", ".svg", ".pdf"):
        fail(f"--out {args.out} must end in .png, .svg or .pdf")
    groups = load(args.logdirs, args.legend, args.select, args.exclude)
    if args.out or not args.table:
        import matplotlib.pyplot as plt

        if args.out:
            plt.switch_backend("agg")
        names = "xaxis value count smooth est band out".split()
        make_plots(groups, **{name: getattr(args, name) for name in names})
    if args.table:
        table = make_table(groups, args.value)
        print(as_markdown(table) if args.table == "md" else table.to_csv(index=False), end="")
    elif not args.out:
        if plt.get_backend().lower() == "agg":  # what matplotlib falls back to
            fail("there is no screen to show the figure on: use --out FILE, or --table")
        plt.show()


if __name__ == "__main__":
    main(sys.argv[1:])
