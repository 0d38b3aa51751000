"""play.py against each script's own evaluation, and what it says when it cannot play."""

import ctypes.util
import functools
import importlib
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from gymnasium.wrappers import ClipAction, NormalizeReward
from helpers import OFF_POLICY_SCRIPTS, ROOT, SCRIPTS, files_in, progress, refusal, start, train

import play
from common.env import Replayable
from common.errors import SidespinError

TINY = dict(env_id="Pendulum-v1", epochs=3, steps_per_epoch=120, hidden_sizes=(8,), max_ep_len=40)
TINY_ON_POLICY = dict(train_v_iters=1)
TINY_OFF_POLICY = dict(start_steps=60, update_after=60, num_test_episodes=3, replay_size=500)


@pytest.fixture(autouse=True)
def each_test_is_warned():
    play.warn_once.cache_clear()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a script, once, and returns the run's folder."""

    @functools.cache
    def trained(script, **settings):
        tiny = TINY_OFF_POLICY if script in OFF_POLICY_SCRIPTS else TINY_ON_POLICY
        settings = {**TINY, **tiny, "keep_models": True, **settings}
        return train(script, tmp_path_factory.mktemp(script), **settings)

    return trained


def copy_of(folder, place, **config):
    """Copy a run and change its config.json."""
    shutil.copytree(folder, place)
    config = {**json.loads((folder / "config.json").read_text()), **config}
    (place / "config.json").write_text(json.dumps(config))
    return place


def returns(folder, **kwargs):
    """Play one run and return the returns."""
    kwargs = {"episodes": 2, **kwargs}
    return list(play.main(play.Args(str(folder), **kwargs))[folder][0])


@pytest.mark.parametrize("script", SCRIPTS)
def test_returns_are_those_of_the_script(script, trained, monkeypatch, capsys):
    seeds = []
    monkeypatch.setattr(
        Replayable,
        "reset",
        lambda self, seed=None, reset=Replayable.reset, **kwargs: (
            seeds.append(seed) or reset(self, seed=seed, **kwargs)
        ),
    )
    folder = trained(script)
    if script in OFF_POLICY_SCRIPTS:
        tests = [seed for seed in seeds if seed is not None][-3:]
        own = [returns(folder, seed=seed, episodes=1)[0] for seed in tests]
        last = progress(folder).iloc[-1]
        assert np.mean(own) == last["AverageTestEpRet"]
        assert (min(own), max(own)) == (last["MinTestEpRet"], last["MaxTestEpRet"])
    capsys.readouterr()
    played = play.main(play.Args(str(folder), episodes=3))
    values, lengths = played[folder]
    assert list(lengths) == [40, 40, 40]
    assert seeds[-3:] == [1_000_000, 1_000_001, 1_000_002]
    assert not {1_000_000, 1_000_001, 1_000_002} & set(seeds[:-3]), "none of them in training"
    policy = play.load_policy(folder)
    env = gym.make("Pendulum-v1", max_episode_steps=40)
    for i, expected in enumerate(values):
        o, total, over = env.reset(seed=1_000_000 + i)[0], 0.0, False
        while not over:
            a = policy(o)
            assert env.action_space.contains(a)
            o, r, _, over, _ = env.step(a)
            total += r
        assert total == expected
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == "environment run episodes return std min max length".split()
    assert row.split()[:3] == ["Pendulum-v1", folder.name, "3"]
    numbers = [values.mean(), values.std(), values.min(), values.max(), 40]
    np.testing.assert_allclose([float(x) for x in row.split()[3:]], numbers, atol=0.006)


@pytest.mark.parametrize("script", ["ppo_torch", "td3_torch", "sac_tf1"])
def test_a_drawn_policy_and_earlier_epochs(script, trained):
    folder = trained(script)
    assert returns(folder, itr=2) == returns(folder)
    first = trained(script, epochs=2)
    assert returns(folder, itr=1) == returns(first) != returns(folder)
    drawn = returns(folder, stochastic=True)
    assert drawn != returns(folder)
    assert drawn == returns(folder, stochastic=True)
    assert drawn != returns(folder, stochastic=True, seed=1)

    module = importlib.import_module(script)
    rng, o = np.random.default_rng(5), np.ones(3, np.float32)
    noise = [0.1] if script == "td3_torch" else []
    policy = module.GaussianPolicy if script == "ppo_torch" else module.Policy
    params = play.TrainedRun(folder).load_params()
    expected = policy.act(params, o, rng, *noise).clip(-2, 2)
    np.testing.assert_array_equal(play.load_policy(folder, stochastic=True, seed=5)(o), expected)


def test_the_table_is_by_environment_and_experiment(trained, tmp_path, capsys):
    """A run that cannot be played is left out, and the others are not."""
    cartpole = dict(env_id="CartPole-v1", steps_per_epoch=100)
    for seed in range(2):
        source = trained("vpg_torch", seed=seed, **cartpole)
        shutil.copytree(source, tmp_path / "b" / source.name)
    source = trained("vpg_torch")
    shutil.copytree(source, tmp_path / "a" / source.name)
    other = copy_of(trained("vpg_torch", **cartpole), tmp_path / "c" / "c_s0", exp_name="c")
    capsys.readouterr()
    played = play.main(play.Args(str(tmp_path), episodes=4, verbose=True))
    shown = capsys.readouterr().out.splitlines()
    assert sum("episode" in line and "return" in line for line in shown[:16]) == 16
    names = ["vpg_torch_CartPole-v1_s0", "vpg_torch_CartPole-v1_s1"]
    both = np.concatenate([played[tmp_path / "b" / name][0] for name in names])
    rows = [re.split(r"  +", row.strip()) for row in shown[17:]]
    assert [row[:2] for row in rows] == [
        ["CartPole-v1", "c_s0"],
        *(["CartPole-v1", name] for name in names),
        ["CartPole-v1", "vpg_torch_CartPole-v1, 2 runs"],
        ["Pendulum-v1", "vpg_torch_Pendulum-v1_s0"],
    ]
    assert rows[3][2:4] == ["8", f"{both.mean():.2f}"]

    (other / "model.pt").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(SidespinError, match="2 of 5 runs cannot be played") as error:
        play.main(play.Args(str(tmp_path), episodes=1))
    assert error.value.exit_code == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 5
    assert len(shown.err.splitlines()) == 2
    assert re.search("cannot play .*c_s0: cannot read .*model.pt as a file of tensors", shown.err)
    assert re.search("cannot play .*empty: it has no readable config.json", shown.err)
    with pytest.raises(SidespinError, match=r"films one environment, but the runs have .*, Pend"):
        play.main(play.Args(str(tmp_path), video="x.mp4"))


def test_from_python_mistakes_are_exceptions(trained, tmp_path):
    folder = trained("vpg_torch", env_id="CartPole-v1", steps_per_epoch=100)
    with pytest.raises(SidespinError, match=r"holds 1 run: name the folder of one"):
        play.load_policy(folder.parent)
    with pytest.raises(SidespinError, match=r"has no readable config.json"):
        play.load_policy(tmp_path)
    with pytest.raises(SidespinError, match=r"has no model_7.pt; the kept epochs are \[0, 1, 2\]"):
        play.load_policy(folder, itr=7)
    with pytest.raises(SidespinError, match=r"^episodes must be a whole number"):
        play.main(play.Args(str(folder), episodes=0))
    policy = play.load_policy(folder)
    assert policy.action_space == Discrete(2)
    assert {int(policy(o)) for o in np.eye(4)} <= {0, 1}


def test_actions_stay_within_bounds(trained, tmp_path):
    import torch

    folder = copy_of(trained("vpg_torch"), tmp_path / "large")
    state = torch.load(folder / "model.pt", weights_only=True)
    torch.save({name: 1000 * x for name, x in state.items()}, folder / "model.pt")
    assert abs(play.load_policy(folder)(np.ones(3))) == 2.0


def test_a_script_of_ones_own(trained, tmp_path):
    """It has another network and a name that does not tell the framework."""
    shutil.copytree(ROOT / "common", tmp_path / "common")
    shutil.copy(ROOT / "play.py", tmp_path)
    source = (ROOT / "vpg_torch.py").read_text()
    changed = source.replace(", Tanh()]", ", nn.ReLU()]").replace("np.tanh(w @", "abs(0.5 * w @")
    changed = changed.replace("abs(0.5 * w @ x + b)", "(w @ x + b).clip(0)")
    assert changed.count(".clip(0)") == 1
    (tmp_path / "my_idea.py").write_text(changed)
    few = "--env-id Pendulum-v1 --epochs 1 --steps-per-epoch 300".split()
    run = start("my_idea.py", *few, cwd=tmp_path, warm=True)
    assert run.returncode == 0, run.stderr
    run = start("play.py", "runs", "--episodes", "1", cwd=tmp_path, warm=True)
    assert (run.returncode, run.stderr) == (0, "")
    expected = re.search(r"my_idea_Pendulum-v1_s0 +1 +-\d+\.\d+", run.stdout)[0]

    (tmp_path / "my_idea.py").write_text(f"# a comment is no change\n{changed}")
    run = start("play.py", "runs", "--episodes", "1", cwd=tmp_path, warm=True)
    assert (run.returncode, run.stderr) == (0, "")
    (tmp_path / "my_idea.py").write_text(source)
    run = start("play.py", "runs", "--episodes", "1", cwd=tmp_path, warm=True)
    assert run.returncode == 0
    warning = "my_idea.py has changed since training, see script.py in the run"
    assert run.stderr == f"play.py: warning: {warning}\n"
    assert expected not in run.stdout, "tanh instead of ReLU"

    (tmp_path / "my_idea.py").unlink()
    run = start("play.py", "runs", "--episodes", "1", cwd=tmp_path, warm=True)
    assert run.returncode == 0
    warning = "my_idea.py is not next to play.py: using script.py, the run's copy"
    assert run.stderr == f"play.py: warning: {warning}\n"
    assert expected in run.stdout
    next(tmp_path.glob("runs/*/*/script.py")).unlink()
    run = start("play.py", "runs", cwd=tmp_path, warm=True)
    assert run.returncode == 2
    sentence = "my_idea.py is not next to play.py, and there is no .*"
    assert re.fullmatch(f"play.py: error: {sentence}\n", run.stderr)


def test_wrappers_of_the_environment(trained, tmp_path, capsys):
    """Those of a make_env() in the script are used; play.py says what it cannot know."""
    source = (ROOT / "vpg_torch.py").read_text()
    folder = copy_of(trained("vpg_torch"), tmp_path / "a" / "run", script="wrapped")
    own = "def make_env(*args, **kwargs):\n    from gymnasium.wrappers import ClipAction\n"
    own += "    return ClipAction(common.env.make_env(*args, **kwargs))\n\n\n"
    changed = source.replace("@dataclass\n", f"import common.env\n\n\n{own}@dataclass\n", 1)
    (folder / "script.py").write_text(changed)
    assert isinstance(play.TrainedRun(folder).make_env(), ClipAction)
    (line,) = capsys.readouterr().err.splitlines()
    assert "using script.py, the run's copy" in line
    (folder / "script.py").write_text(changed.replace("ClipAction", "NormalizeReward"))
    assert isinstance(play.TrainedRun(folder).make_env(), NormalizeReward)
    warning = "wrapped.py wraps its environment in NormalizeReward, which play.py cannot restore"
    assert warning in capsys.readouterr().err

    line = "    env = make_env(args.env_id, args.max_ep_len)\n"
    assert line in source
    wrapped = source.replace(line, f"{line}    env = TimeAwareObservation(env)\n")
    (folder / "script.py").write_text(wrapped)
    play.load_policy(folder)
    assert "wraps its environment in TimeAwareObservation" in capsys.readouterr().err
    wider = trained("vpg_torch", env_id="envs:DictObs-v0")
    folder = copy_of(wider, tmp_path / "wider", env_id="Pendulum-v1")
    with pytest.raises(SidespinError, match="it expects 7 numbers, but an observation has 3"):
        play.load_policy(folder)


@pytest.mark.parametrize("name", ["film.gif", "film.mp4"])
def test_films(name, trained, tmp_path, monkeypatch):
    import imageio.v2 as imageio

    for variable in ("MUJOCO_GL", "SDL_VIDEODRIVER", "PYGAME_HIDE_SUPPORT_PROMPT"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "films" / name
    words = ["--episodes", "2", "--max-ep-len", "10", "--seed", "0", "--video", file]
    run = start("play.py", trained("vpg_torch"), *words, warm=True)
    assert (run.returncode, run.stderr) == (0, "")
    frames = imageio.mimread(file, memtest=False)
    assert len(frames) == (10 if name == "film.gif" else 20), "gifs get half of 30 frames a second"
    assert frames[0].shape[:2] == (500, 500)
    assert np.ptp(frames[0]) > 0, "something is to be seen"


@pytest.mark.parametrize(
    ("script", "gl"),
    [("vpg_torch", None), ("vpg_tf1", None), ("vpg_torch", "nonsense")],
    ids=["torch", "tf1", "no-library"],
)
def test_a_film_of_mujoco(script, gl, trained, tmp_path, monkeypatch):
    """Also where both TensorFlow and the renderer bring an LLVM, as with Debian's Mesa."""
    folder = trained(script, env_id="Hopper-v4")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if gl:
        monkeypatch.setenv("MUJOCO_GL", gl)
    words = ["--episodes", "1", "--max-ep-len", "10", "--video", tmp_path / "hopper.mp4"]
    run = start("play.py", folder, *words)  # not warm: mujoco reads MUJOCO_GL when imported
    if ctypes.util.find_library("EGL") and not gl:
        assert run.returncode == 0, run.stderr
        assert (tmp_path / "hopper.mp4").stat().st_size > 5000
    else:
        assert run.returncode == 2
        sentence = r"play.py: error: cannot render Hopper-v4: .*apt install libegl1.*\n"
        assert re.fullmatch(sentence, run.stderr)


@pytest.mark.skipif(not ctypes.util.find_library("EGL"), reason="needs EGL: apt install libegl1")
def test_the_camera_follows_the_robot(tmp_path):
    import imageio.v2 as imageio

    words = ["--episodes", "1", "--max-ep-len", "250", "--video", tmp_path / "walker.gif"]
    run = start("play.py", ROOT / "pretrained" / "ppo_torch_Walker2d-v4", *words)
    assert (run.returncode, run.stderr) == (0, "")
    *_, last = imageio.mimread(tmp_path / "walker.gif", memtest=False)
    red, green, blue = np.moveaxis(last[..., :3].astype(int), -1, 0)
    assert ((red > green + 40) & (blue > green + 20)).sum() > 200, "no purple leg is to be seen"


@pytest.mark.parametrize(("platform", "gl"), [("linux", "egl"), ("darwin", None)])
def test_mujoco_gets_egl_on_linux_alone(platform, gl, trained, tmp_path, monkeypatch):
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(sys, "platform", platform)
    film, filters = tmp_path / "film.gif", list(warnings.filters)
    returns(trained("vpg_torch"), episodes=1, max_ep_len=2, video=str(film))
    assert film.exists()
    assert warnings.filters == filters, "they are as before"
    assert play.os.environ.get("MUJOCO_GL") == gl
    monkeypatch.delenv("MUJOCO_GL", raising=False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{tmp}/nowhere"], "there are no runs in .*nowhere"),
        (["{run}", "--itr", "7"], r"has no model_7.pt; the kept epochs are \[0, 1, 2\]"),
        (["{run}", "--itr", "-1"], "--itr must be a whole number of at least 0"),
        (["{run}", "--env-id", "CartPole-v1"], "fit CartPole-v1: it expects 3 numbers, .* has 4"),
        (["{cartpole}", "--env-id", "Acrobot-v1"], "it expects 4 numbers, but an obs.* has 6"),
        (["{run}", "--env-id", "envs:Float64Obs-v0"], "it has 1 action, but the env.* has 2"),
        (["{run}", "--env-id", "envs:ScalarObs-v0"], "it expects 3 numbers, but an obs.* has 1"),
        (["{discrete}", "--env-id", "TwoActions-v0"], "it has 3 actions, but the .* has 2"),
        (["{run}", "--env-id", "envs:DiscreteStart-v0"], "does not fit DiscreteStart-v0: "),
        (["{run}", "--env-id", "Hoper-v4"], "cannot make the environment Hoper-v4"),
        (["{run}", "--env-id", "Hoper-v4", "--video", "x.gif"], "^cannot make the environment"),
        (["{run}", "--video", "x.avi"], "--video x.avi must end in .mp4 or .gif"),
        (["{run}", "--video", "{tmp}/file/x.gif"], "cannot write .*/file/x.gif: "),
        (["{run}", "--video", "x.mp4", "--render"], r"choose --render \(a window\) or --video"),
        (["{run}", "--episodes", "0"], "--episodes must be a whole number from 1"),
        (["{run}", "--max-ep-len", "0"], "--max-ep-len must be a whole number from 1"),
        (["{run}", "--seed", "-1"], "--seed must be a whole number of at least 0"),
        (["{run}", "--rendr"], r"--rendr \(did you mean --render\?\)"),
        (["{run}", "--render"], "no screen to open a window on: use --video"),
        (["{hostile}"], "cannot read .*model.pt as a file of tensors"),
        (["{foreign}"], "os.py is not next to play.py, and there is no"),
        (["{tool}"], "plot.py has no Policy or GaussianPolicy"),
        (["{empty}"], "is not a run of these scripts: it has no script"),
        (["{damaged}"], "has no readable config.json"),
    ],
)
def test_errors_are_one_sentence(words, sentence, trained, tmp_path, monkeypatch, capsys):
    folder = trained("vpg_torch")
    cartpole = trained("vpg_torch", env_id="CartPole-v1", steps_per_epoch=100)
    places = {"run": folder, "tmp": tmp_path, "cartpole": cartpole}
    scripts = {"hostile": "vpg_torch", "foreign": "os", "tool": "plot"}
    for name in ("hostile", "foreign", "tool", "empty", "damaged"):
        places[name] = copy_of(folder, tmp_path / name, script=scripts.get(name))
        (places[name] / "script.py").unlink()
    (places["hostile"] / "model.pt").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    (places["empty"] / "config.json").write_text('{"a": 1}')
    (places["damaged"] / "config.json").write_text('{"a": ')
    (tmp_path / "file").write_text("in the way")
    if "{discrete}" in words:
        places["discrete"] = trained("vpg_torch", env_id="envs:DiscreteStart-v0")
        space = dict(action_space=Discrete(2))
        gym.register("TwoActions-v0", entry_point="envs:Odd", kwargs=space)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    words = [word.format(**places) for word in words]
    assert re.search(sentence, refusal("play", words, monkeypatch, capsys))
    assert not (tmp_path / "executed").exists()


def test_importing_play_changes_nothing():
    """Neither the warnings' filters nor the environment variables."""
    code = "import os, sys, warnings; sys.path.insert(0, '.'); import gymnasium, tyro\n"
    code += "before = list(warnings.filters), dict(os.environ); import play\n"
    code += "sys.exit(before != (list(warnings.filters), dict(os.environ)))"
    assert start("-c", code).returncode == 0


def test_model_files_tell_the_framework(trained, tmp_path):
    folder = trained("ppo_torch")
    place = copy_of(folder, tmp_path / "run", script="ppo_tf1_or_so")
    assert Path(play.TrainedRun(place).path).name == "script.py"
    assert returns(place) == returns(folder)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("ppo_torch_HalfCheetah-v4", 5000),
        ("ppo_torch_Hopper-v4", 3000),
        ("ppo_torch_Walker2d-v4", 3500),
        ("sac_tf1_HalfCheetah-v4", 10_000),
    ],
)
def test_the_policies_that_come_with_it_walk(name, least):
    run = start("play.py", f"pretrained/{name}", "--episodes", 2)
    assert (run.returncode, run.stderr) == (0, "")
    assert float(run.stdout.splitlines()[-1].split()[3]) > least
    assert sum(len(x) for x in files_in(ROOT / "pretrained").values()) < 2_000_000
