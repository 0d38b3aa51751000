"""play.py against each script's own evaluation, and what it says when it cannot play."""

import ctypes.util
import importlib
import json
import re
import shutil

import gymnasium as gym
import numpy as np
import pytest
from helpers import OFF_POLICY_SCRIPTS, SCRIPTS, progress, refusal, start, train

import play

TINY = dict(env_id="Pendulum-v1", epochs=2, steps_per_epoch=200, hidden_sizes=(8,), max_ep_len=60)
TINY_OFF_POLICY = dict(start_steps=100, update_after=100, num_test_episodes=3)


@pytest.mark.parametrize("script", SCRIPTS)
def test_returns_are_those_of_the_script(script, tmp_path, capsys):
    off_policy = script in OFF_POLICY_SCRIPTS
    folder = train(script, tmp_path, **TINY, **(TINY_OFF_POLICY if off_policy else {}))
    capsys.readouterr()
    played = play.main(play.Args(str(folder), episodes=3))
    returns, lengths = played[folder]
    assert list(lengths) == [60, 60, 60]
    if off_policy:
        last = progress(folder).iloc[-1]
        assert returns.mean() == last["AverageTestEpRet"]
        assert (returns.min(), returns.max()) == (last["MinTestEpRet"], last["MaxTestEpRet"])
    policy = play.load_policy(folder)
    env = gym.make("Pendulum-v1", max_episode_steps=60)
    for seed, expected in enumerate(returns):
        o, total, over = env.reset(seed=seed)[0], 0.0, False
        while not over:
            a = policy(o)
            assert env.action_space.contains(a)
            o, r, _, over, _ = env.step(a)
            total += r
        assert total == expected
    table = capsys.readouterr().out.splitlines()
    row = [3, returns.mean(), returns.std(), returns.min(), returns.max(), 60]
    np.testing.assert_allclose([float(x) for x in table[1].split()[1:]], row, atol=0.006)


@pytest.mark.parametrize("script", ["ppo_torch", "td3_torch", "sac_tf1"])
def test_a_drawn_policy_and_earlier_epochs(script, tmp_path, capsys):
    own = TINY_OFF_POLICY if script in OFF_POLICY_SCRIPTS else dict(train_v_iters=1)
    folder = train(script, tmp_path, keep_models=True, **{**TINY, "epochs": 3}, **own)
    first = train(script, tmp_path / "first", **{**TINY, "epochs": 2}, **own)

    def returns(folder, **kwargs):
        return list(play.main(play.Args(str(folder), episodes=2, **kwargs))[folder][0])

    assert returns(folder, itr=2) == returns(folder)
    assert returns(folder, itr=1) == returns(first) != returns(folder)
    with pytest.raises(SystemExit):
        returns(folder, itr=7)
    assert "of its epochs it kept 0, 1, 2\n" in capsys.readouterr().err
    drawn = returns(folder, stochastic=True)
    assert drawn != returns(folder)
    assert drawn == returns(folder, stochastic=True)
    assert drawn != returns(folder, stochastic=True, seed=1)

    module = importlib.import_module(script)
    rng, o = np.random.default_rng(5), np.ones(3, np.float32)
    noise = [0.1] if script == "td3_torch" else []
    params = play.load_params(folder, script, None)
    expected = module.act(params, o, rng, *noise).clip(-2, 2)
    np.testing.assert_array_equal(play.load_policy(folder, stochastic=True, seed=5)(o), expected)


def test_discrete_actions_and_several_seeds(tmp_path, capsys):
    settings = dict(env_id="CartPole-v1", epochs=1, steps_per_epoch=300)
    folders = [train("vpg_torch", tmp_path, seed=seed, **settings) for seed in range(2)]
    capsys.readouterr()
    played = play.main(play.Args(str(folders[0].parent), episodes=4, verbose=True))
    assert list(played) == folders
    shown = capsys.readouterr().out.splitlines()
    assert sum("episode" in line and "return" in line for line in shown[:8]) == 8
    returns = np.concatenate([returns for returns, _ in played.values()])
    assert shown[-1].split()[:5] == ["all", "2", "runs", "8", f"{returns.mean():.2f}"]
    for folder, sentence in ((folders[0].parent, "holds 2 run(s): name the"), ("x", "no run in x")):
        with pytest.raises(SystemExit):
            play.load_policy(folder)
        assert sentence in capsys.readouterr().err
    policy = play.load_policy(folders[1])
    assert {int(policy(o)) for o in np.eye(4)} <= {0, 1}


def test_a_changed_network_plays(tmp_path):
    for name in ("common", "play.py"):
        copy = shutil.copytree if name == "common" else shutil.copy
        copy(play.SCRIPTS / name, tmp_path / name)
    source = (play.SCRIPTS / "vpg_torch.py").read_text()
    changed = source.replace(", Tanh()]", ", nn.ReLU()]").replace(
        "np.tanh(w @ o + b)", "(w @ o + b).clip(0)"
    )
    assert changed.count("clip(0)") == 1
    (tmp_path / "mine_torch.py").write_text(changed)
    few = "--env-id Pendulum-v1 --epochs 1 --steps-per-epoch 300".split()
    run = start("mine_torch.py", *few, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    run = start("play.py", "runs", "--episodes", "1", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert re.search(r"mine_torch_Pendulum-v1_s0 +1 +-\d+\.\d+", run.stdout)


@pytest.mark.parametrize("name", ["film.gif", "film.mp4"])
def test_films(name, tmp_path):
    import imageio.v2 as imageio

    folder = train("vpg_torch", tmp_path, **{**TINY, "epochs": 1})
    file = tmp_path / "films" / name
    words = ["play.py", folder, "--episodes", "2", "--max-ep-len", "10", "--video", file]
    run = start(*words)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    frames = imageio.mimread(file, memtest=False)
    assert len(frames) == (10 if name == "film.gif" else 20), "gifs get half of 30 frames a second"
    assert frames[0].shape[:2] == (500, 500)
    assert np.ptp(frames[0]) > 0, "something is to be seen"


def test_a_film_of_mujoco(tmp_path):
    folder = train("vpg_torch", tmp_path, **{**TINY, "env_id": "Hopper-v4", "epochs": 1})
    run = start("play.py", folder, "--episodes", "1", "--video", tmp_path / "hopper.mp4")
    if ctypes.util.find_library("EGL"):
        assert run.returncode == 0, run.stderr
        assert (tmp_path / "hopper.mp4").stat().st_size > 5000
    else:
        assert run.returncode == 2
        assert "apt install libegl1" in run.stderr


def test_without_opengl_it_says_what_to_install(tmp_path, monkeypatch):
    folder = train("vpg_torch", tmp_path, **{**TINY, "env_id": "Hopper-v4", "epochs": 1})
    monkeypatch.setenv("MUJOCO_GL", "nonsense")  # as good as a missing library
    run = start("play.py", folder, "--episodes", "1", "--video", tmp_path / "hopper.mp4")
    assert run.returncode == 2
    assert re.fullmatch(
        r"play.py: error: cannot render Hopper-v4: .*apt install libegl1.*\n", run.stderr
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{tmp}/nowhere"], "there is no run in .*nowhere"),
        (["{run}", "--itr", "7"], "has no model_7.pt; of its epochs it kept none"),
        (
            ["{run}", "--env-id", "CartPole-v1"],
            "the observation_space of CartPole-v1 is Box of 4, .* Box of 3",
        ),
        (["{run}", "--env-id", "Hoper-v4"], "cannot make the environment Hoper-v4"),
        (["{run}", "--video", "x.avi"], "--video x.avi must end in .mp4 or .gif"),
        (["{run}", "--video", "x.mp4", "--render"], "choose one"),
        (["{run}", "--episodes", "0"], "--episodes and --max-ep-len must be at least 1"),
        (["{run}", "--render"], "there is no screen"),
        (["{hostile}"], "cannot read .*model.pt as a file of tensors"),
        (["{foreign}"], "is a run of os.py, which is not beside play.py"),
        (["{empty}"], "is not that of a run of these scripts"),
    ],
)
def test_errors_are_one_sentence(words, sentence, tmp_path, monkeypatch, capsys):
    folder = train("vpg_torch", tmp_path, **{**TINY, "epochs": 1})
    places = {"run": folder, "tmp": tmp_path}
    for name in ("hostile", "foreign", "empty"):
        places[name] = tmp_path / name
        shutil.copytree(folder, places[name])
    (places["hostile"] / "model.pt").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    config = json.loads((folder / "config.json").read_text())
    (places["foreign"] / "config.json").write_text(json.dumps({**config, "script": "os"}))
    (places["empty"] / "config.json").write_text("{}")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    words = [word.format(**places) for word in words]
    assert re.search(sentence, refusal("play", words, monkeypatch, capsys))
    assert not (tmp_path / "executed").exists()
