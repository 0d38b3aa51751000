"""Whatever is typed or passed, a script either trains or says in one sentence what is wrong."""

import dataclasses
import importlib
import re
import tempfile
from pathlib import Path

import pytest
from helpers import ROOT, SCRIPTS, as_flags, brief, refusal, start, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import SidespinError
from common.launch import is_memory_error, parse_args

# A run for a moment, of which an example changes some arguments
TINY = dict(epochs=1, steps_per_epoch=20, max_ep_len=10, hidden_sizes=(4,))
TINY_ON_POLICY = dict(train_v_iters=1)
TINY_OFF_POLICY = dict(start_steps=10, update_after=10, update_every=5, batch_size=4)
BRIEFLY = """epochs steps_per_epoch train_pi_iters train_v_iters cg_iters backtrack_iters
    num_test_episodes""".split()  # large ones take long, and are not wrong
WORDS = ["", "x", "None", "1e3", "1_0", "0x10", "-1", "--", "nan", "inf", "-inf", "1.5", "ü", "a b"]
ENV_IDS = """Pendulum-v1 CartPole-v1 Pendulum Pendulum-v99 pendulum-v1 Hoper-v4 nowhere:Thing-v0
    : :: a:b:c envs: envs:Nothing-v0 envs:MultiDiscreteAction-v0 ../x Pendulum-v1/ -v1""".split()
WARNING = "warning: --start-steps covers the whole run: all actions are random\n"


def values(field):
    """Return a strategy for what may be typed behind a flag."""
    if field.name == "env_id":
        known = st.sampled_from(ENV_IDS)
    elif field.name == "exp_name":
        known = st.sampled_from(["a", "a/b", "/", "..", ".", "~", "a b", "x" * 300, "\n", "-"])
    elif field.name in BRIEFLY:
        known = st.integers(-3, 40)
    elif field.name in ("hidden_sizes", "batch_size", "replay_size", "update_every"):
        known = st.integers(-3, 70) | st.sampled_from([10**5, 10**12, 10**30])
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
    tiny = as_flags(**brief(script, **TINY, **own))
    monkeypatch.setattr("common.errors.command_line", True)
    trained, refused = [], []

    @settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(command_lines(module.Args))
    def check(words):
        with tempfile.TemporaryDirectory() as folder:
            argv = [f"{script}.py", *tiny, "--data-dir", f"{folder}/x", *words]
            monkeypatch.setattr("sys.argv", argv)
            capsys.readouterr()
            try:
                module.main(parse_args(module.Args, module.__doc__))
            except SidespinError as error:
                refused.append(words)
                assert error.exit_code == 2, (words, error)
                assert re.fullmatch(".+", str(error)), "one line"
                assert capsys.readouterr().out == ""
                assert not list(Path(folder).iterdir())
            except (MemoryError, RuntimeError) as error:
                assert is_memory_error(error), (words, error)  # see below
            else:
                trained.append(words)
                assert re.fullmatch(f"(.*: {WARNING})?", capsys.readouterr().err)

    check()
    assert min(len(trained), len(refused)) >= 5, "some lines are right, some wrong"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_argument(script, monkeypatch, capsys):
    module = importlib.import_module(script)
    monkeypatch.setattr("sys.argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        parse_args(module.Args, module.__doc__)
    assert ended.value.code == 0
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    source = (ROOT / f"{script}.py").read_text()
    for field in dataclasses.fields(module.Args):
        comment = re.search(rf"^    {field.name}: .*  # (.*)$", source, re.M).group(1)
        flag = "--" + field.name.replace("_", "-")
        assert re.search(rf"{flag} .*?{re.escape(comment)}", text), flag


WRONG = {
    # command line, what the sentence says, and the same from Python if it can be said there
    "--foo 3": "unrecognized options: --foo, 3; --help explains all flags",
    "--hiden-sizes 3 --epoch 2": "unrecognized options: --hiden-sizes (did you mean "
    "--hidden-sizes?), 3, --epoch (did you mean --epochs?), 2; --help explains all flags",
    "--epochs x": "--epochs must be a whole number from 1 to 2^31 - 1, got x; --help",
    "--epochs": "--epochs needs a value; --help explains all flags",
    "--resume --overwrite": "--resume keeps a run and --overwrite replaces it: choose one",
    "--threads 100000": "--threads 100000 is more than the ",
    "--seed -1": "--seed must be a whole number of at least 0, got -1",
    "--epochs 0": "--epochs must be a whole number from 1 to 2^31 - 1, got 0",
    "--max-ep-len 0": "--max-ep-len must be a whole number from 1 to 2^31 - 1 or None, got 0",
    "--hidden-sizes 64 0": "--hidden-sizes must be a tuple of numbers, each a whole number from 1 "
    "to 2^31 - 1, got (64, 0)",
    "--gamma 1.5": "--gamma must be between 0 and 1, got 1.5",
    "--polyak 1.1": "--polyak must be between 0 and 1, got 1.1",
    "--lr nan": "--lr must be a number of at least 0, got nan",
    "--lr -1": "--lr must be a number of at least 0, got -1.0",
    "--alpha inf": "--alpha must be a number of at least 0, got inf",
    "--autotune --alpha 0": "--autotune learns log(alpha): this alpha is too close to 0",
    "--autotune --alpha 1e-40": "--autotune learns log(alpha): this alpha is too close to 0",
    "--exp-name a/b": "--exp-name must be a plain name, not a path, got 'a/b'",
    "--exp-name ..": "--exp-name must be a plain name, not a path, got '..'",
    "--data-dir /proc/nowhere": "cannot write to /proc/nowhere",
}


@pytest.mark.parametrize("words", WRONG)
def test_mistakes_are_one_sentence(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sentence = refusal("sac_torch", words.split(), monkeypatch, capsys)
    assert WRONG[words] in sentence
    assert "\n" not in sentence
    assert not list(tmp_path.iterdir())


def test_from_python_arguments_are_spelled_as_in_python(tmp_path):
    for arguments, sentence in (
        (dict(clip_ratio=-1), "clip_ratio must be a number of at least 0, got -1"),
        (dict(gamma="0.9"), "gamma must be between 0 and 1, got 0.9"),
        (dict(epochs=2.0), "epochs must be a whole number from 1 to 2^31 - 1, got 2.0"),
        (dict(epochs=True), "epochs must be a whole number from 1 to 2^31 - 1, got True"),
        (dict(resume=1), "resume must be bool, got 1"),
        (dict(resume=True, overwrite=True), "resume keeps a run and overwrite replaces it: choose"),
        (dict(exp_name=""), "exp_name must be a plain name, not a path, got ''"),
        (dict(env_id=None), "env_id must be str, got None"),
    ):
        with pytest.raises(SidespinError) as refused:
            train("ppo_torch", tmp_path / "x", **arguments)
        assert sentence in str(refused.value)
    with pytest.raises(SidespinError) as refused:
        train("trpo_torch", tmp_path / "x", algo="ppo")
    assert str(refused.value) == "algo must be one of trpo, npg, got ppo"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_checks_its_arguments(script, tmp_path):
    with pytest.raises(SidespinError, match=r"^gamma must be between 0 and 1, got 2$"):
        train(script, tmp_path / "x", gamma=2)
    with pytest.raises(SidespinError, match=r"^steps_per_epoch must be .* got 0$"):
        train(script, tmp_path / "x", steps_per_epoch=0)
    assert not list(tmp_path.iterdir())


def test_a_wrong_command_line_is_one_line_and_exit_code_2(tmp_path):
    for script, words in (
        ("ppo_torch", "--hiden-sizes 3 --epoch 2"),
        ("sac_tf1", "--autotune --alpha 0"),
        ("td3_tf1", "--env-id Hoper-v4"),
    ):
        run = start(f"{script}.py", *words.split(), "--data-dir", tmp_path / "x", warm=True)
        assert (run.returncode, run.stdout) == (2, "")
        assert re.fullmatch(rf"{script}\.py: error: .+\n", run.stderr), run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["--replay-size 2000000000", "--hidden-sizes 2000000000"])
@pytest.mark.parametrize("script", ["ddpg_torch", "ddpg_tf1"])
def test_too_little_memory_is_one_sentence(script, words, tmp_path):
    run = start(f"{script}.py", "--data-dir", tmp_path / "x", *words.split(), warm=True)
    assert run.returncode == 2
    assert re.fullmatch(f"{script}.py: error: not enough memory: .*\n", run.stderr), run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["--foo", "--env-id Hoper-v4", "--gamma 2"])
def test_mistakes_on_two_ranks_are_printed_once(words, tmp_path):
    run = start("ppo_torch.py", "--data-dir", tmp_path / "x", *words.split(), ranks=2, warm=True)
    assert run.returncode == 2
    errors = [line for line in run.stderr.splitlines() if line.startswith("ppo_torch.py: ")]
    assert len(errors) == 1
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


def test_help_under_mpirun_is_printed_once():
    run = start("ppo_torch.py", "--help", ranks=2, warm=True)
    assert run.returncode == 0
    assert run.stdout.count("--clip-ratio") == 1


def test_start_steps_as_long_as_the_run_are_a_warning(tmp_path, capsys):
    """As are batches larger than the first buffer: they are drawn with replacement."""
    short = brief("sac_torch", epochs=1, update_after=0, batch_size=200)
    train("sac_torch", tmp_path, **{**short, "start_steps": 100})
    assert WARNING.replace("--start-steps", "start_steps") in capsys.readouterr().err
    train("sac_torch", tmp_path / "b", **{**short, "start_steps": 99})
    assert capsys.readouterr().err == ""
