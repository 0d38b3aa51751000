"""What a person sees on a terminal: mistakes, the progress line, Ctrl-C."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, python, start

PROGRESS = r"epoch (\d+)/\d+, (\S+)( \S+)?.* ([\d,]+) steps/s(.*)"


class Screen:
    """A terminal of unlimited height: text, CR, LF, backspace, cursor up, erase; no colours."""

    def __init__(self, columns):
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0
        self.frames = []  # what each line was before it was overwritten
        self.wrapped = []  # lines that did not fit
        self.escapes = []

    def feed(self, text):
        for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\x1b.|.", text, re.S):
            self.put(part)

    def put(self, part):
        if part == "\r":
            self.frames.append(self.lines[self.row])
            self.column = 0
        elif part == "\n":
            self.down()
        elif part == "\b":
            self.column = max(0, self.column - 1)
        elif part == "\x1b[K":
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif part == "\x1b[A":
            self.row = max(0, self.row - 1)
        elif part.startswith("\x1b"):
            self.escapes.append(part)
        else:
            if self.column == self.columns:
                self.wrapped.append(self.lines[self.row])
                self.down()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
            self.column += 1

    def down(self):
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def shown(self):
        """Return the lines that are left, without those that are blank."""
        return [line.rstrip() for line in self.lines if line.strip()]


def on_terminal(*words, columns=80, cwd=ROOT, when=None):
    """Run a command on a terminal of its own; return the screen, the exit code and the seconds.

    when maps texts to what is typed as soon as they appear.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        words,
        **dict.fromkeys(("stdin", "stdout", "stderr"), follower),
        cwd=cwd,
        env=env,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY),
    )
    os.close(follower)
    began, typed, output = time.time(), dict(when or {}), b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:  # the other side is closed
            break
        output += chunk
        for text in [text for text in typed if re.search(text.encode(), output)]:
            os.write(leader, typed.pop(text).encode())
        if not chunk:
            break
    code = process.wait(timeout=60)
    os.close(leader)
    screen = Screen(columns)
    screen.feed(output.decode())
    return SimpleNamespace(screen=screen, code=code, seconds=time.time() - began, raw=output)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "ppo_torch.py --hiden-sizes 3 --epoch 2",
            r"unrecognized options: --hiden-sizes \(did you mean --hidden-sizes\?\), 3, "
            r"--epoch \(did you mean --epochs\?\), 2; --help explains all flags",
        ),
        ("ppo_torch.py --epochs x", "--epochs must be a whole number .*, got x; --help .*"),
        ("trpo_torch.py --algo x", "--algo must be one of trpo, npg, got x; --help .*"),
        ("ppo_torch.py --epochs", "--epochs needs a value; --help .*"),
        ("ppo_torch.py --gamma 2", "--gamma must be between 0 and 1, got 2.0"),
        ("ppo_torch.py --env-id Hoper-v4", "cannot make the environment Hoper-v4: .*"),
    ],
)
def test_a_mistake_is_one_line_without_boxes_or_colours(words, sentence, tmp_path):
    words = [*words.split(), "--data-dir", tmp_path / "x"]
    seen = on_terminal(*python(*words, warm=True), columns=1000)
    assert seen.code == 2
    (line,) = seen.screen.shown()
    assert re.fullmatch(rf"{words[0]}: error: {sentence}", line)
    assert b"\x1b" not in seen.raw
    assert not re.search("[│╭╮╰╯─]", line)


def test_a_mistake_under_mpirun_is_one_line(tmp_path):
    words = python("ppo_torch.py", "--epoch", "2", ranks=2, warm=True)
    seen = on_terminal(*words, columns=1000)
    assert seen.code == 2
    assert [line for line in seen.screen.shown() if "error" in line] == [
        "ppo_torch.py: error: unrecognized options: --epoch (did you mean --epochs?), 2; "
        "--help explains all flags"
    ]
    assert b"\x1b" not in seen.raw


PPO = """ppo_torch.py --env-id Pendulum-v1 --epochs 3 --steps-per-epoch 24000 --train-pi-iters 3
    --train-v-iters 3 --hidden-sizes 8 --exp-name x --data-dir r""".split()
SAC = """sac_torch.py --env-id Pendulum-v1 --epochs 2 --steps-per-epoch 40000 --hidden-sizes 8
    --start-steps 100 --update-after 100000 --num-test-episodes 3 --exp-name x
    --data-dir r""".split()


def check_progress(seen, steps, phase):
    """Assert that there was a progress line, in its place, of which nothing is left."""
    screen = seen.screen
    assert seen.code == 0
    frames = [frame.rstrip() for frame in screen.frames if "steps/s" in frame]
    drawn = [re.fullmatch(PROGRESS, frame) for frame in frames]
    assert all(drawn), [frame for frame, match in zip(frames, drawn) if not match]
    assert max(map(len, frames)) < screen.columns
    assert not [line for line in screen.wrapped if "epoch " in line]
    assert len(frames) > 3
    assert len(frames) < 5.5 * seen.seconds + 10, "five times per second"
    epochs = [int(match[1]) for match in drawn]
    assert epochs == sorted(epochs)
    assert {match[2] for match in drawn} == {"return", phase}
    assert re.fullmatch(r" -\d[\d.]*", next(m[3] for m in drawn if m[2] == "return"))
    if screen.columns >= 80:  # on a narrower one, something has to give
        assert all(re.fullmatch(r", (\d+:)?\d\d:\d\d left", match[5]) for match in drawn)
        assert all("|" in frame for frame in frames), "there is a bar"
    rates = [int(match[4].replace(",", "")) for match in drawn]
    assert max(rates) < 20 * steps / seen.seconds + 20_000, "also the first one"
    left = screen.shown()
    assert not [line for line in left if "steps/s" in line or "epoch " in line]
    rest = [line for line in left if not re.fullmatch(r"-+|\| +\w+ \| +\S+ \|", line)]
    assert [line.split(": ")[0] for line in rest] == ["r/x/x_s0", "r/x/x_s0"], "start and end"


def here(script, folder):
    """Make a script runnable in a folder, where names are short enough for a narrow terminal."""
    for name in (script, "common"):
        os.symlink(ROOT / name, folder / name)


@pytest.mark.parametrize("columns", [80, 50])
def test_the_progress_line(columns, tmp_path):
    here("ppo_torch.py", tmp_path)
    seen = on_terminal(*python(*PPO, warm=True), columns=columns, cwd=tmp_path)
    check_progress(seen, 72_000, "updating")


def test_the_progress_line_says_testing(tmp_path):
    here("sac_torch.py", tmp_path)
    seen = on_terminal(*python(*SAC, warm=True), columns=80, cwd=tmp_path)
    check_progress(seen, 80_000, "testing")


def test_the_progress_line_under_mpirun(tmp_path):
    here("ppo_torch.py", tmp_path)
    seen = on_terminal(*python(*PPO, ranks=2), columns=80, cwd=tmp_path)
    check_progress(seen, 72_000, "updating")


def test_no_progress_line_in_a_pipe(tmp_path):
    for ranks in (1, 2):
        words = [*PPO[:-1], tmp_path / str(ranks)]
        run = start(*words, ranks=ranks, warm=True)
        assert (run.returncode, run.stderr) == (0, "")
        assert "steps/s" not in run.stdout
        assert not re.search("[\r\x1b]", run.stdout)


@pytest.mark.parametrize("columns", [80, 300])
def test_ctrl_c_leaves_a_clean_line(columns, tmp_path):
    words = python("ppo_torch.py", "--env-id", "Pendulum-v1", "--data-dir", tmp_path, warm=True)
    seen = on_terminal(*words, columns=columns, when={"steps/s.*steps/s": "\x03"})
    assert seen.code == 128 + signal.SIGINT
    lines = seen.screen.shown()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("ppo_torch.py: interrupted ")]
    said = "".join(lines[first:]).replace(" ", "")  # wherever it was wrapped
    expected = f"--env-id Pendulum-v1 --data-dir {tmp_path} --resume".replace(" ", "")
    assert re.fullmatch(rf".*after\d+epochs?;toresume:pythonppo_torch\.py{expected}", said)
    assert not [line for line in lines if "steps/s" in line]
    assert seen.raw.endswith(b"\n")


def test_ctrl_c_under_mpirun_leaves_a_clean_line(tmp_path):
    words = python("ppo_torch.py", "--env-id", "Pendulum-v1", "--data-dir", tmp_path, ranks=2)
    seen = on_terminal(*words, columns=1000, when={"steps/s.*steps/s": "\x03"})
    assert seen.code == 128 + signal.SIGINT
    lines = seen.screen.shown()
    assert all("^C[" in line for line in lines if "steps/s" in line), "[mpiexec] speaks at once"
    (said,) = [line for line in lines if "interrupted" in line]
    assert re.match(
        r"ppo_torch\.py: interrupted after \d+ epochs?; to resume: mpirun -np 2 python .*", said
    )
    assert b"Traceback" not in seen.raw


def test_ctrl_c_while_libraries_are_imported(tmp_path):
    """It ends at once, without a traceback."""
    words = python("ppo_torch.py", "--data-dir", tmp_path / "x")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        words,
        **dict.fromkeys(("stdin", "stdout", "stderr"), follower),
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY),
    )
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    os.write(leader, b"\x03")
    assert process.wait(timeout=10) == -signal.SIGINT
    os.close(follower)
    os.set_blocking(leader, False)
    assert b"Traceback" not in os.read(leader, 4096)
    os.close(leader)
