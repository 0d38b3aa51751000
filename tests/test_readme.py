"""Every command in the README works, and it is short enough to be read."""

import re
import shlex
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
    assert len(README.splitlines()) < 120


@pytest.mark.parametrize("command", [c for c in COMMANDS if "python " in c and "pytest" not in c])
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
