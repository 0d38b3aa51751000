"""The README's commands work in the order printed, its recipes work, and its diff is the diff."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import MPIRUN, ROOT, SCRIPTS, progress, python, start

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()
]
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
WRAP, RELU, CLIP, NOTEBOOK = SNIPPETS
# The shell that the commands are typed into. It shortens what would take hours, and nothing else.
SHELL = """
set -e
python() {
    case "$*" in
        *pytest*) ;;
        grid.py*) command python "$@" --dry-run ;;
        *CartPole-v1*--epochs*|*first-try) command python "$@" --steps-per-epoch 200 ;;
        *_torch.py*|*_tf1.py*) command python "$@" --epochs 1 --steps-per-epoch 400 ;;
        *) command python "$@" ;;
    esac
}
mpirun() { command mpirun "$@" --epochs 1 --steps-per-epoch 400; }
"""


def copy_project(folder, *names):
    """Copy scripts and common/ as a user would."""
    shutil.copytree(ROOT / "common", folder / "common")
    for name in names:
        shutil.copy(ROOT / name, folder)


def test_quick_start_is_two_commands():
    assert COMMANDS[:2] == [
        ". ./setup.sh && mpirun -np 4 python ppo_torch.py --env-id Hopper-v4",
        ". ./setup.sh && python -m pytest",
    ]


def test_it_links_every_script_and_nothing_that_is_not_there():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert {f"{script}.py" for script in SCRIPTS} < set(links)
    assert all((ROOT / link).exists() for link in links)
    assert len(README.splitlines()) <= 190, "a landing page"


def warm_python(path):
    """Write a `python` that starts scripts from a process that has imported their framework."""
    cases = [f'*_{f}.py) exec {shlex.join(python(warm=f))} "$@" ;;' for f in ("torch", "tf1")]
    other = f'*) exec {sys.executable} "$@" ;;'
    path.parent.mkdir()
    path.write_text("\n".join(["#!/bin/sh", 'case "$1" in', *cases, other, "esac", ""]))
    path.chmod(0o755)


def test_commands_typed_in_order_into_one_shell(tmp_path):
    copy_project(tmp_path, *(path.name for path in ROOT.glob("*.py")))
    shutil.copytree(ROOT / "pretrained", tmp_path / "pretrained")
    warm_python(tmp_path / "bin" / "python")
    (tmp_path / "setup.sh").write_text(f'PATH="{tmp_path}/bin:{Path(MPIRUN).parent}:$PATH"\n')
    typed = "\n".join(f"echo '>>> {line}'\n{line}" for line in COMMANDS)
    shell = ["bash", "-c", SHELL + typed]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    printed = dict(part.split("\n", 1) for part in done.stdout.split(">>> ")[1:])
    assert set(printed) == set(COMMANDS)
    runs = {path.parent.name for path in tmp_path.glob("runs/*/*/progress.txt")}
    assert len(runs) == sum(
        line.startswith(("python", ". ./")) for line in COMMANDS if is_run(line)
    )
    resumed = tmp_path / "runs/ppo_torch_CartPole-v1/ppo_torch_CartPole-v1_s0"
    assert len(progress(resumed)) == 20
    assert "resuming after 10 epochs" in done.stdout
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "cartpole.mp4").stat().st_size > 1000
    (sweep,) = [text for line, text in printed.items() if "grid.py" in line]
    assert sweep.count("python ppo_torch.py --env-id") == 12


def is_run(line):
    """Tell whether a command starts a run of its own."""
    return bool(re.search(r"_(torch|tf1)\.py", line)) and not re.search("--help|--resume", line)


def test_the_first_run_prints_what_is_shown(tmp_path):
    (shown,) = re.findall(r"```\n(runs/ppo_torch.*?)```", README, re.S)
    words = "ppo_torch.py --env-id CartPole-v1 --epochs 10 --steps-per-epoch 100".split()
    copy_project(tmp_path, "ppo_torch.py")
    run = start(*words, cwd=tmp_path, warm=True)
    assert run.returncode == 0, run.stderr

    def without_numbers(line):
        return re.sub(r"[\d,.]+ \|$", "|", line).replace(" ", "")

    printed = {without_numbers(line) for line in run.stdout.splitlines()}
    for line in shown.splitlines():
        assert line == "..." or without_numbers(line) in printed, line


def test_the_diff_is_the_diff():
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    before = "".join(line[1:] + "\n" for line in diff.splitlines() if line[0] == " ")
    after = "".join(line[1:] + "\n" for line in diff.splitlines())
    assert diff.count("\n+") >= 5
    assert before in (ROOT / "ddpg_torch.py").read_text()
    assert after in (ROOT / "td3_torch.py").read_text()


def edit(folder, script, *edits):
    """Copy a script with its lines replaced: each edit is a pair of an old and a new text."""
    text = (ROOT / script).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy_project(folder)
    (folder / script).write_text(text)


FEW = "--env-id Pendulum-v1 --steps-per-epoch 250 --hidden-sizes 8 --train-v-iters 2".split()


def run_and_resume(folder, script="ppo_torch.py"):
    """Train three epochs, two of them in one go and after a resume; return both tables."""
    for words in (
        ["--epochs", "3", "--exp-name", "whole"],
        ["--epochs", "2", "--exp-name", "parts"],
        ["--epochs", "3", "--exp-name", "parts", "--resume"],
    ):
        run = start(script, *FEW, *words, cwd=folder, warm=True)
        assert run.returncode == 0, run.stderr
        assert run.stderr == ""
    tables = [progress(only_run(folder / "runs" / name)) for name in ("whole", "parts")]
    return [table.drop(columns=["Time", "StepsPerSec"]) for table in tables]


def only_run(folder):
    (config,) = folder.glob("*/config.json")
    return config.parent


def test_recipe_wrapper(tmp_path):
    line = "    env = make_env(args.env_id, args.max_ep_len)\n"
    imports, wrapped = WRAP.split("\n\n")
    assert line.strip() in wrapped.replace("NormalizeReward(", "").replace("))", ")")
    edit(
        tmp_path, "ppo_torch.py", (line, wrapped), ("import torch\n", f"import torch\n{imports}\n")
    )
    whole, parts = run_and_resume(tmp_path)
    assert whole.equals(parts)
    assert whole["MinEpRet"].min() > -150, "rewards are scaled: Pendulum pays down to -1600"


def test_recipe_relu(tmp_path):
    network, numpy = (line.split("  #")[0] for line in RELU.splitlines())
    edits = [("layers += [Linear(n_in, n_out), Tanh()]", network)]
    edits.append(("x = np.tanh(w @ x + b)", numpy))
    edit(tmp_path, "ppo_torch.py", *edits)
    run = start("ppo_torch.py", *FEW, "--epochs", "1", cwd=tmp_path, warm=True)
    assert run.returncode == 0, run.stderr
    for forgotten in edits:
        folder = tmp_path / "half" / str(edits.index(forgotten))
        edit(folder, "ppo_torch.py", forgotten)
        run = start("ppo_torch.py", *FEW, "--epochs", "1", cwd=folder, warm=True)
        assert run.returncode == 2
        assert "mlp_numpy or dist_numpy differs from mlp or dist: change both" in run.stderr


def test_recipe_gradient_clipping(tmp_path):
    old = "".join(line + "\n" for line in CLIP.splitlines() if "clip_grad" not in line)
    tiny = CLIP.replace("0.5)", "1e-12)")  # a clip that nobody can overlook
    edit(tmp_path / "clip", "ppo_torch.py", (old, CLIP))
    edit(tmp_path / "tiny", "ppo_torch.py", (old, tiny))
    tables = [run_and_resume(tmp_path / name) for name in ("clip", "tiny")]
    for whole, parts in tables:
        assert whole.equals(parts)
    assert (tables[0][0]["KL"].abs() > 1e-6).all()
    assert tables[1][0]["KL"].abs().max() < tables[0][0]["KL"].abs().min()


def test_recipe_renamed_script(tmp_path):
    copy_project(tmp_path, "play.py", "grid.py", "plot.py")
    shutil.copy(ROOT / "ppo_torch.py", tmp_path / "my_idea.py")
    run = start("my_idea.py", *FEW, "--epochs", "1", cwd=tmp_path, warm=True)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "runs" / "my_idea_Pendulum-v1" / "my_idea_Pendulum-v1_s0").is_dir()
    run = start("play.py", "runs", "--episodes", "1", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "my_idea_Pendulum-v1_s0" in run.stdout
    run = start("grid.py", "my_idea", "--seed", "0", "1", "--dry-run", cwd=tmp_path)
    assert run.stdout.count("python my_idea.py") == 2


def test_recipe_notebook(tmp_path):
    snippet = NOTEBOOK.replace("epochs=10", f"epochs=1, data_dir={str(tmp_path)!r}")
    run = start("-c", f"{snippet}\nprint(folder)")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"{tmp_path}/notebook/notebook_s0"


def test_tensorboard_command():
    assert "`tensorboard --logdir runs`" in README
    assert start("-m", "tensorboard.main", "--version", timeout=120).returncode == 0


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_setup_creates_and_reuses_an_environment(shell, tmp_path):
    (tmp_path / "requirements.txt").write_text("")
    shutil.copy(ROOT / "setup.sh", tmp_path)

    def run(line, cwd=tmp_path):
        return subprocess.run([shell, "-c", line], cwd=cwd, capture_output=True, text=True)

    prefix = "python -c 'import sys; print(sys.prefix)'"
    for _ in range(2):
        done = run(f". ./setup.sh && {prefix}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(tmp_path / ".venv")
    assert done.stdout.count("\n") == 1, "the second time it only enters"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run(f". {tmp_path}/setup.sh && {prefix}", cwd=elsewhere)
    if shell == "bash":
        assert done.stdout.splitlines()[-1] == str(tmp_path / ".venv")
    else:
        assert "go to its folder first" in done.stderr
    assert not list(elsewhere.iterdir())
    executed = subprocess.run([shell, "setup.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert "To enter the environment, source this file:  . ./setup.sh" in executed.stdout
