"""Whatever is typed, a script either trains or says in one sentence what is wrong with it."""

import dataclasses
import importlib
import re
import tempfile
from pathlib import Path

import pytest
from helpers import ROOT, SCRIPTS, refusal, start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# A run for a moment, of which an example changes some arguments
TINY = "--env-id Pendulum-v1 --epochs 1 --steps-per-epoch 20 --hidden-sizes 4".split()
TINY_ON_POLICY = "--train-v-iters 1".split()
TINY_OFF_POLICY = """--start-steps 10 --update-after 10 --update-every 5 --batch-size 4
    --replay-size 50 --num-test-episodes 1 --max-ep-len 10""".split()
BRIEFLY = """epochs steps_per_epoch train_pi_iters train_v_iters cg_iters backtrack_iters
    num_test_episodes""".split()  # large ones take long, and are not wrong
WORDS = ["", "x", "None", "1e3", "1_0", "0x10", "-1", "--", "nan", "inf", "-inf", "1.5", "ü", "a b"]
ENV_IDS = """Pendulum-v1 CartPole-v1 Pendulum Pendulum-v99 pendulum-v1 Hoper-v4 nowhere:Thing-v0
    : :: a:b:c envs: envs:Nothing-v0 envs:MultiDiscreteAction-v0 ../x Pendulum-v1/ -v1""".split()


def values(field):
    """Return a strategy for what may be typed behind a flag."""
    if field.name == "env_id":
        known = st.sampled_from(ENV_IDS)
    elif field.name == "exp_name":
        known = st.sampled_from(["a", "a/b", "/", "..", ".", "~", "a b", "x" * 300, "\n", "-"])
    elif field.name in BRIEFLY:
        known = st.integers(-3, 40)
    elif field.name in ("hidden_sizes", "batch_size", "replay_size", "update_every"):
        known = st.integers(-3, 70) | st.sampled_from([10**6, 10**12, 10**30])
    elif field.name.endswith("lr"):
        known = st.floats(-1, 1)
    elif "float" in str(field.type):
        known = st.floats(-0.5, 1.5) | st.sampled_from([1e300, -1e300])
    else:
        known = st.integers(-3, 40) | st.integers()
    several = st.lists(known, max_size=3) if field.name == "hidden_sizes" else st.tuples(known)
    return several.map(lambda xs: [str(x) for x in xs]) | st.lists(
        st.sampled_from(WORDS), max_size=2
    )


def command_lines(dataclass):
    # --cpu starts other processes, --data-dir is where this test looks
    fields = [f for f in dataclasses.fields(dataclass) if f.name not in ("cpu", "data_dir")]

    def flag(field):
        name = "--" + field.name.replace("_", "-")
        return values(field).map(lambda words: [name, *words])

    typed = st.one_of(*map(flag, fields)) | st.sampled_from([["--foo"], ["bar"], ["-e", "3"]])
    return st.lists(typed, max_size=3).map(lambda flags: [word for f in flags for word in f])


@pytest.mark.parametrize("script", ["ppo_torch", "trpo_torch", "td3_torch", "sac_torch"])
def test_any_arguments(script, monkeypatch, capsys):
    module = importlib.import_module(script)
    own = TINY_OFF_POLICY if hasattr(module, "ReplayBuffer") else TINY_ON_POLICY
    monkeypatch.setattr("common.args.end_together", lambda: None)
    trained = []

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(command_lines(module.Args))
    def check(words):
        with tempfile.TemporaryDirectory() as folder:
            argv = [f"{script}.py", *TINY, *own, "--data-dir", folder, *words]
            monkeypatch.setattr("sys.argv", argv)
            capsys.readouterr()
            try:
                module.main(module.parse_args(module.Args, module.__doc__))
                trained.append(words)
                assert capsys.readouterr().err == ""
            except (MemoryError, RuntimeError) as error:
                assert "allocate" in str(error)  # which a script tells in one sentence, see below
            except SystemExit as ended:
                shown = capsys.readouterr()
                assert ended.code == 2, (words, shown.err)
                assert re.fullmatch(rf"{script}\.py: error: .+\n", shown.err), (words, shown.err)
                assert shown.out == ""
                assert not list(Path(folder).iterdir())

    check()
    assert 10 < len(trained) < 140, "some lines are right, some wrong"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--foo 3", "Unrecognized options: --foo, 3"),
        ("--hiden-sizes 3", "Unrecognized options: --hiden-sizes, 3; did you mean --hidden-sizes?"),
        ("--epochs x", "Error parsing --epochs: .*'x'"),
        ("--epochs", "Missing value for argument '--epochs'"),
        ("--threads 100000", r"--threads 100000 is more than the \d+ cores of this machine"),
        ("--resume --overwrite", "--resume keeps a run and --overwrite replaces it: choose one"),
        ("--hidden-sizes 1000000 1000000", r"--hidden-sizes .* need more than the \d+ GiB here"),
        ("--start-steps 8001", "--start-steps 8001 is beyond the run, which has 8000 steps"),
        ("--batch-size 1001", "--batch-size 1001 is more than the 1000 transitions"),
        ("--batch-size 60 --replay-size 50", "--batch-size 60 is more than the 50 transitions"),
        ("--update-after 0 --batch-size 51", "--batch-size 51 is more than the 50 transitions"),
        ("--polyak 1.1", "--polyak must lie between 0 and 1, where 1.1 does not"),
    ],
)
def test_errors_are_one_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    few = ["--data-dir", str(tmp_path), "--epochs", "2", "--start-steps", "0"]
    shown = refusal("sac_torch", [*few, *words.split()], monkeypatch, capsys)
    assert re.match(sentence, shown)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["--replay-size 2000000000", "--hidden-sizes 2000000000"])
@pytest.mark.parametrize("script", ["ddpg_torch", "ddpg_tf1"])
def test_too_little_memory_is_one_sentence(script, words, tmp_path):
    run = start(f"{script}.py", "--data-dir", tmp_path, *words.split())
    assert run.returncode == 2
    assert re.fullmatch(f"{script}.py: error: not enough memory: .*\n", run.stderr), run.stderr
    assert not list(tmp_path.iterdir())


def test_errors_on_two_ranks_are_printed_once(tmp_path):
    for words in (["--foo"], ["--env-id", "Hoper-v4"], ["--gamma", "2"]):
        run = start("ppo_torch.py", "--data-dir", tmp_path, *words, ranks=2)
        assert run.returncode == 2
        errors = [line for line in run.stderr.splitlines() if line.startswith("ppo_torch.py: ")]
        assert len(errors) == 1
        assert "Traceback" not in run.stderr
        assert not list(tmp_path.iterdir())


def test_every_script_checks_its_arguments():
    for script in SCRIPTS:
        text = (ROOT / f"{script}.py").read_text()
        first_line = text.split("    # Set-up\n")[1].split("\n")[0]
        assert first_line == "    check_args(args)"
