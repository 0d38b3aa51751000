"""Every command in the README works, and it is short enough to be read."""

import re
import shlex
import shutil
import subprocess

import pytest
from helpers import OFF_POLICY_SCRIPTS, ROOT, SCRIPTS, start

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()
]
FEW_STEPS = "--epochs 1 --steps-per-epoch 400".split()


def test_quick_start_is_two_lines():
    assert COMMANDS[:2] == [
        ". ./setup.sh && mpirun -np 4 python ppo_torch.py --env-id Hopper-v4",
        ". ./setup.sh && python -m pytest",
    ]


def test_it_names_every_script():
    assert all(f"`{script}.py`" in README for script in SCRIPTS)
    assert len(README.splitlines()) < 150


TOOLS = ("plot.py", "play.py", "grid.py")


def is_training(command):
    return "python " in command and not any(x in command for x in ("pytest", "--resume", *TOOLS))


@pytest.mark.parametrize("command", list(filter(is_training, COMMANDS)))
def test_commands(command, tmp_path):
    """As printed, but for a few steps only and into another folder."""
    words = shlex.split(command.removeprefix(". ./setup.sh && "))
    ranks = 1
    if words[0] == "mpirun":
        ranks, words = int(words[2]), words[3:]
    off_policy = words[1].removesuffix(".py") in OFF_POLICY_SCRIPTS
    few = FEW_STEPS + ["--start-steps", "400"] * off_policy
    run = start(*words[1:], *few, "--data-dir", tmp_path, ranks=ranks)
    assert run.returncode == 0, run.stderr
    assert "--help" in words or list(tmp_path.glob("*/*/progress.txt"))


def test_resuming_and_tools(tmp_path):
    """As printed and in this order, in a folder with a few short runs."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    for name in ("ppo_torch.py", "vpg_tf1.py", *TOOLS):
        shutil.copy(ROOT / name, tmp_path)
    few = ["--steps-per-epoch", "400"]
    for command in COMMANDS:
        words = shlex.split(command)
        if "--resume" in words:
            first, second = COMMANDS[COMMANDS.index(command) - 1 :][:2]
            for line in (first, second):
                done = start(*shlex.split(line)[1:], *few, cwd=tmp_path)
                assert done.returncode == 0, done.stderr
            assert "going on with epoch 20" in done.stdout
            vpg = "vpg_tf1.py --env-id CartPole-v1 --epochs 2".split()
            assert start(*vpg, *few, cwd=tmp_path).returncode == 0
        elif words[1:2] and words[1] in TOOLS:
            dry_run = ["--dry-run"] * (words[1] == "grid.py")  # all of it would take hours
            done = start(*words[1:], *dry_run, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert not dry_run or done.stdout.count("python ppo_torch.py --env-id") == 12
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "cartpole.mp4").stat().st_size > 1000


def test_tensorboard_command():
    assert "tensorboard --logdir runs" in COMMANDS
    assert start("-m", "tensorboard.main", "--version", timeout=120).returncode == 0


def test_python_snippet(tmp_path):
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.S)
    snippet = snippet.replace("epochs=10", f"epochs=1, data_dir={str(tmp_path)!r}")
    run = start("-c", f"{snippet}\nprint(folder)")
    assert run.returncode == 0, run.stderr
    assert (
        run.stdout.splitlines()[-1] == f"{tmp_path}/ppo_torch_CartPole-v1/ppo_torch_CartPole-v1_s0"
    )


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_setup_reuses_an_environment(shell, tmp_path):
    """With an environment that has all packages, setup.sh only enters it."""
    (tmp_path / "requirements.txt").write_text("")
    (tmp_path / "setup.sh").write_text((ROOT / "setup.sh").read_text())
    for _ in range(2):
        line = ". ./setup.sh && python -c 'import sys; print(sys.prefix)'"
        run = subprocess.run([shell, "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.splitlines()[-1] == str(tmp_path / ".venv")
    assert "Requirement" not in run.stdout
