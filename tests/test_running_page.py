"""docs/code/running.md explains every column and argument; its commands and snippets work."""

import dataclasses
import importlib
import re
import shlex
import sys

import matplotlib
import pytest
from helpers import ROOT, SCRIPTS, brief, progress, train, trained

import grid
import plot
from common.errors import SidespinError, flag
from common.launch import parse_args
from common.run import MAY_DIFFER

PAGE = (ROOT / "docs" / "code" / "running.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
COMMANDS += re.findall(r"`((?:mpirun|python) [^`\n]+)`", PAGE)
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
TRAINING = [line for line in COMMANDS if re.search(r"_(torch|tf1)\.py", line)]
TOOLS = [line for line in COMMANDS if line not in TRAINING and "--video" not in line]


def rows(header):
    """Return the cells of the table that begins with this header."""
    table = PAGE.split(f"| {header} |")[1].split("\n\n")[0]
    return [[x.strip() for x in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def code(cell):
    return re.findall("`([^`]+)`", cell)


def explained(algo):
    """Return the columns that the page explains for an algorithm."""
    for cell, algos, meaning in rows("column"):
        assert meaning
        if algos == "all" or algo.upper() in algos.split(", "):
            name, *more = code(cell)
            stem = name.removeprefix("Average")
            yield from [name, *(x + stem if x in ("Std", "Max", "Min") else x for x in more)]


def logged(script):
    """Return the columns of a script, from the text that it hands to its logger."""
    (columns,) = re.findall(r'"(EpRet\*[^"]*)"', (ROOT / f"{script}.py").read_text())
    for column in columns.split():
        kinds = ("Average", "Std", "Max", "Min") if column.endswith("*") else ("",)
        yield from [kind + column.rstrip("*") for kind in kinds]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_column_is_explained_for_the_algorithms_that_have_it(script):
    columns = list(explained(script.split("_")[0]))
    own = ["Epoch", "TotalEnvInteracts", *logged(script), "Time", "StepsPerSec"]
    assert sorted(columns) == sorted(own)
    if script in ("ppo_torch", "sac_torch"):
        assert list(progress(trained(script))) == own


def test_every_shared_argument_is_explained(monkeypatch):
    monkeypatch.setattr("common.errors.command_line", True)
    fields = [
        {f.name for f in dataclasses.fields(importlib.import_module(script).Args)}
        for script in SCRIPTS
    ]
    flags = {}
    for cell, fixed, meaning in rows("flag"):
        assert meaning
        flags |= dict.fromkeys(code(cell), fixed == "yes")
    shared = set.intersection(*fields) - {"batch_size"}  # which differs on- and off-policy
    assert set(flags) == set(map(flag, shared))
    assert {name for name, fixed in flags.items() if not fixed} == set(map(flag, MAY_DIFFER))


def test_every_file_of_a_run_is_explained():
    shown = {name.strip("/") for cell, *_ in rows("file") for name in code(cell)}
    files = {re.sub(r"(tfevents)\..*", r"\1.*", x.name) for x in trained("ppo_torch").iterdir()}
    assert shown == files | {"tf1_save", "log.txt"}


def test_a_run_resumes_without_the_files_that_may_be_deleted(tmp_path):
    folder = train("ppo_torch", tmp_path, **brief("ppo_torch"))
    for name in ("config.json", "script.py", "model.pt"):
        (folder / name).unlink()
    next(folder.glob("events*")).unlink()
    train("ppo_torch", tmp_path, resume=True, **brief("ppo_torch", epochs=3))
    assert next(folder.glob("events*")).stat().st_size > 2000
    assert len(progress(folder)) == 3
    for name in ("progress.txt", "checkpoint"):
        (folder / name).rename(tmp_path / name)
        with pytest.raises(SidespinError, match="use overwrite to start over"):
            train("ppo_torch", tmp_path, resume=True, **brief("ppo_torch", epochs=4))
        if name == "progress.txt":
            (tmp_path / name).rename(folder / name)
    (run,) = grid_of(folder)
    assert run.look_at_folder() is None
    assert run.state == "waiting"


def grid_of(folder):
    """Return the run of a grid that would have this folder."""
    one = grid.ExperimentGrid(folder.parent.name)
    for key, value in brief("ppo_torch", epochs=3).items():
        one.add(key, [value])
    return one.runs("ppo_torch", data_dir=folder.parent.parent)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with the runs that the page speaks of, but brief ones."""
    folder = tmp_path_factory.mktemp("home")
    for script in ("ppo_torch", "ppo_tf1"):
        train(script, folder / "runs", env_id="CartPole-v1", epochs=1, steps_per_epoch=200)
    return folder


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setattr("common.errors.command_line", True)
    return home


def type_in(line, monkeypatch):
    """Do what a command does, in this process; training is left at its arguments."""
    words = shlex.split(line)
    script, *flags = words[words.index("python") + 1 :]
    monkeypatch.setattr(sys, "argv", [script, *flags])
    if script == "plot.py":
        return plot.main(flags)
    module = importlib.import_module(script.removesuffix(".py"))
    if script == "grid.py":
        sys.argv[1:] = grid.own_options_first([*flags, *["--dry-run"] * ("--dry-run" not in line)])
    args = parse_args(module.Args, module.__doc__)
    return args if script.endswith(("_torch.py", "_tf1.py")) else module.main(args)


@pytest.mark.parametrize("line", TRAINING)
def test_arguments_of_training(line, here, monkeypatch):
    args = type_in(line, monkeypatch)
    assert f"--env-id {args.env_id}" in line


@pytest.mark.parametrize("line", TOOLS)
def test_plot_play_and_grid(line, here, monkeypatch, capsys):
    type_in(line, monkeypatch)
    shown = capsys.readouterr()
    assert shown.err == ""
    for file in re.findall(r"--out (\S+)", line):
        assert (here / file).stat().st_size > 10_000
    if "grid.py" in line:
        names = ["cli0-1", "cli0-2"] if "clip-ratio" in line else ["h64-64", "h32"]
        found = set(re.findall(r"--exp-name ppo_torch_CartPole-v1_(\S+)", shown.out))
        assert found == set(names)
        assert shown.out.count("python ") == (6 if "clip-ratio" in line else 2)
    elif "--out" not in line:
        assert "CartPole-v1" in shown.out


def test_snippets_typed_in_order(here, monkeypatch, capsys):
    monkeypatch.setattr("common.errors.command_line", False)
    with matplotlib.rc_context({"backend": "agg"}):
        cells = {}
        for snippet in SNIPPETS:
            exec(compile(snippet, "running.md", "exec"), cells)
    assert len(cells["progress"]) == 4
    assert set(cells["data"].experiment) >= {"notebook", "ppo_torch", "ppo_tf1"}
    assert cells["policy"]([0.0] * 4) in (0, 1)
    assert len(cells["runs"]) == 6
    assert cells["v"](cells["o"]).shape == (1,)
    assert capsys.readouterr().out.count("ppo_CartPole-v1_h64-64_s0") == 2  # name and folder
