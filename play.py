"""See what was learned: evaluate a trained policy, watch it, film it.

The policy acts through act() of the script that trained it, on the weights that the run saved, so
that a changed network plays, too. Of a folder with several runs, all are played and summed up.

    python play.py runs/ppo_torch_Hopper-v4 --episodes 20
    python play.py runs/ppo_torch_Hopper-v4/ppo_torch_Hopper-v4_s0 --video hopper.mp4
"""

import contextlib
import importlib
import inspect
import json
import math
import os
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.spaces import Box, Discrete

from common.args import parse_args
from common.env import make_env
from common.mpi import fail

SCRIPTS = Path(__file__).parent
LATEST = {"torch": "model.pt", "tf1": "tf1_save"}
KEPT = {"torch": "model_{}.pt", "tf1": "tf1_save_{}"}  # with --keep-models, by epoch
NO_OPENGL = """cannot render {}: {}; off-screen, MuJoCo needs EGL (on Debian and Ubuntu: apt install
    libegl1) or, with MUJOCO_GL=osmesa, OSMesa (apt install libosmesa6)"""
Folder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]


@dataclass
class Args:
    folder: Folder  # a run's folder, or one with several runs in it
    episodes: int = 10  # how many to play with each policy
    stochastic: bool = False  # draw actions as in training; else take the likeliest
    seed: int = 0  # episodes are reset with this seed, the next one, and so on
    max_ep_len: int | None = None  # cut episodes at this length; None: as in training
    env_id: str | None = None  # play elsewhere, if the spaces fit; None: where it was trained
    itr: int | None = None  # the epoch whose weights to play, of a run with --keep-models
    render: bool = False  # open a window
    video: str | None = None  # film all episodes, off-screen, into this .mp4 or .gif
    verbose: bool = False  # print a line for each episode


def load_policy(folder, itr=None, stochastic=False, seed=0):
    """Return a function from an observation of the run's environment to an action.

    The environment is the one of make_env(): flat observations, discrete actions from 0 on.
    """
    config = read_config(folder)
    script = importlib.import_module(config["script"])
    params = load_params(folder, config["script"], itr)
    env = make_env(config["env_id"], config["max_ep_len"], (Discrete, Box))
    env.close()
    discrete = isinstance(env.action_space, Discrete)
    noise = [np.random.default_rng(seed)] if stochastic else []
    if stochastic and "act_noise" in inspect.signature(script.act).parameters:
        noise.append(config["act_noise"])

    def policy(o):
        a = script.act(params, np.ravel(o).astype(np.float32), *noise)
        return a if discrete else a.clip(env.action_space.low, env.action_space.high)

    policy.observation_space, policy.action_space = env.observation_space, env.action_space
    return policy


def find_runs(folder):
    """Return the folders of all runs in a folder, or stop if there are none."""
    runs = sorted(path.parent for path in Path(folder).rglob("config.json"))
    return runs or fail(f"there is no run in {folder}")


def read_config(folder):
    """Return the config.json of a run of one of the scripts beside this file."""
    path = Path(folder) / "config.json"
    if not path.exists():
        runs = len(find_runs(folder))
        fail(f"{folder} holds {runs} run(s): name the folder of one")
    try:
        config = dict(json.loads(path.read_text()))
        script, _, _, _ = (config[k] for k in "script env_id max_ep_len steps_per_epoch".split())
        known = re.fullmatch(r"\w+_(torch|tf1)", script) and (SCRIPTS / f"{script}.py").exists()
    except (OSError, ValueError, TypeError, KeyError):
        fail(f"{path} is not that of a run of these scripts")
    if not known:
        fail(f"{folder} is a run of {script}.py, which is not beside play.py")
    return config


def load_params(folder, script, itr):
    """Return the policy's weights in the order in which act() of the script takes them."""
    framework = script.split("_")[-1]
    path = Path(folder) / (LATEST[framework] if itr is None else KEPT[framework].format(itr))
    if not path.exists():
        names = " ".join(p.name for p in Path(folder).glob(KEPT[framework].format("*")))
        kept = sorted(re.findall(r"_(\d+)", names), key=int)
        kept = f"; of its epochs it kept {', '.join(kept) or 'none'}"
        fail(f"{folder} has no {path.name}{kept if itr is not None else ' yet'}")
    model = importlib.import_module(f"common.{framework}_utils").load_model(path)
    return [x for name, x in model.items() if re.match("pi[./]", name)]


def play(folder, args, film=None):
    """Play a run's policy; return the episodes' returns and lengths, [episodes] each."""
    config = read_config(folder)
    env_id, max_ep_len = args.env_id or config["env_id"], args.max_ep_len or config["max_ep_len"]
    render_mode = {}
    if args.render or args.video:
        render_mode["render_mode"] = "human" if args.render else "rgb_array"
        with no_opengl_means(env_id):
            gym.make(env_id, **render_mode).close()
    policy = load_policy(folder, args.itr, args.stochastic, args.seed)
    env = make_env(env_id, max_ep_len, (Discrete, Box), **render_mode)
    for kind in ("observation_space", "action_space"):
        known, given = _size(getattr(policy, kind)), _size(getattr(env, kind))
        if known != given:
            fail(f"the {kind} of {env_id} is {given}, that of the policy {known}")
    limit = env.spec.max_episode_steps or config["steps_per_epoch"]  # an episode may not end
    returns, lengths = [], []
    for i in range(args.episodes):
        o, ep_ret, ep_len, over = env.reset(seed=args.seed + i)[0], 0.0, 0, False
        while not over:
            if film:
                film(env)
            o, r, d, truncated, _ = env.step(policy(o))
            ep_ret, ep_len = ep_ret + r, ep_len + 1
            over = d or truncated or ep_len == limit
        returns.append(ep_ret)
        lengths.append(ep_len)
        if args.verbose:
            print(f"{folder} episode {i}: return {ep_ret:.2f}, length {ep_len}", flush=True)
    env.close()
    return np.array(returns), np.array(lengths)


def _size(space):
    return f"Discrete({space.n})" if isinstance(space, Discrete) else f"Box of {space.shape[0]}"


@contextlib.contextmanager
def no_opengl_means(env_id):
    """Turn whatever a renderer raises into a sentence on what it may need."""
    try:
        yield
    except gym.error.UnregisteredEnv as error:
        fail(f"cannot make the environment {env_id}: {error}")
    except Exception as error:
        fail(" ".join(NO_OPENGL.format(env_id, error).split()))


class Film:
    """Writes what an environment shows into a file."""

    def __init__(self, path):
        self.path, self.frames, self.writer = path, 0, None

    def __call__(self, env):
        with no_opengl_means(env.spec.id):
            frame = env.render()
        if self.writer is None:
            self._open(env.metadata.get("render_fps", 30))
        if self.frames % self.every == 0:
            self.writer.append_data(frame)
        self.frames += 1

    def _open(self, fps):
        import imageio.v2 as imageio

        gif = self.path.suffix == ".gif"
        self.every = math.ceil(fps / 25) if gif else 1  # viewers slow down gifs of more frames
        if gif:
            options = dict(duration=1000 * self.every / fps, loop=0)
        else:
            options = dict(fps=fps, macro_block_size=2)  # by default it resizes to multiples of 16
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = imageio.get_writer(self.path, **options)
        except OSError as error:
            fail(f"cannot write {self.path}: {error.strerror or error}")

    def close(self):
        self.writer.close()
        print(f"{self.path}: {math.ceil(self.frames / self.every)} frames")


def main(args):
    """Play all runs of a folder, print a table, return {run: (returns, lengths)}."""
    if args.episodes < 1 or (args.max_ep_len or 1) < 1 or args.seed < 0:
        fail("--episodes and --max-ep-len must be at least 1, --seed at least 0")
    if args.render and args.video:
        fail("--render shows and --video films: choose one")
    if args.video and Path(args.video).suffix not in (".mp4", ".gif"):
        fail(f"--video {args.video} must end in .mp4 or .gif")
    screen = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    if args.render and not screen:
        fail("there is no screen to open a window on: use --video out.mp4")
    if args.video:
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    warnings.simplefilter("ignore")  # those of the renderers; what matters comes as an error
    runs = find_runs(args.folder)
    film = Film(Path(args.video)) if args.video else None
    played = {folder: play(folder, args, film) for folder in runs}
    if film:
        film.close()
    rows = [(folder.name, *results) for folder, results in played.items()]
    if len(rows) > 1:
        _, returns, lengths = zip(*rows)
        rows.append((f"all {len(runs)} runs", np.concatenate(returns), np.concatenate(lengths)))
    width = max(len(name) for name, _, _ in rows)
    print(f"{'run':<{width}}  episodes  {'return':>9} {'std':>9} {'min':>9} {'max':>9}  length")
    for name, returns, lengths in rows:
        numbers = (returns.mean(), returns.std(), returns.min(), returns.max())
        numbers = " ".join(f"{x:9.2f}" for x in numbers)
        print(f"{name:<{width}}  {len(returns):8}  {numbers}  {lengths.mean():6.1f}")
    return played


if __name__ == "__main__":
    main(parse_args(Args, __doc__))
