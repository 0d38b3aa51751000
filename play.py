"""Evaluate trained policies, watch them, film them.

The policy is act() in the script that trained it, on the weights that the run saved, so a script
with a changed network works, too. Episodes use seeds that training did not use: see --seed.

The environment comes from make_env() in the script. If you define your own make_env() there, with
more wrappers, play.py uses it. It does not see wrappers that train() adds, and wrappers that learn,
such as NormalizeObservation, start from scratch, because the model does not hold their statistics.

    python play.py runs/ppo_torch_Hopper-v4 --episodes 20
    python play.py runs/ppo_torch_Hopper-v4 --video hopper.mp4
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import re
import sys
import typing
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.spaces import Discrete

import common.env
from common.args import NonNegativeInt, PositiveInt, mismatch
from common.errors import SidespinError, flag, plural, warn
from common.launch import launch
from common.run import KEPT_MODELS, find_runs, model_path, print_out, read_config

SCRIPTS = Path(__file__).parent
SEED = 1_000_000
NO_OPENGL = """MuJoCo renders off-screen through EGL (on Debian and Ubuntu: apt install libegl1) or,
    with MUJOCO_GL=osmesa, through OSMesa (apt install libosmesa6)"""
Folder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]


@dataclass
class Args:
    folder: Folder  # a run's folder, or a folder of runs, at any depth
    episodes: PositiveInt = 10  # episodes per run
    stochastic: bool = False  # sample actions as in training; otherwise the policy's mean or mode
    seed: NonNegativeInt = SEED  # episode i starts from seed + i; training uses other seeds
    max_ep_len: PositiveInt | None = None  # maximum episode length; None: as in training
    env_id: str | None = None  # another environment with the same spaces; None: as in training
    itr: NonNegativeInt | None = None  # epoch of a model kept by --keep-models; None: the last
    render: bool = False  # open a window
    video: str | None = None  # film all episodes, off-screen, into this .mp4 or .gif
    verbose: bool = False  # print one line per episode


class CannotRender(SidespinError):
    pass


def load_policy(folder, itr=None, stochastic=False, seed=SEED):
    """Return a function from observations of the run's environment to actions.

    Observations of any shape are flattened; discrete actions count from 0.
    """
    run = TrainedRun(folder)
    env = run.make_env()
    env.close()
    return run.policy(env, itr, stochastic, seed)


class TrainedRun:
    """A run's folder, and the script that trained it."""

    def __init__(self, folder):
        self.folder, self.config = Path(folder), read_config(folder)
        if not self.config:
            inside = [run for run in find_runs(folder) if run != self.folder]
            if inside:
                number = plural(len(inside), "run")
                raise SidespinError(f"{folder} holds {number}: name the folder of one")
            raise SidespinError(f"{folder} has no readable config.json")
        for key in ("script", "env_id", "max_ep_len", "steps_per_epoch"):
            if key not in self.config:
                raise SidespinError(f"{folder} is not a run of these scripts: it has no {key}")
        self.script_name = f"{Path(self.config['script']).name}.py"
        self.path = self.find_script()
        self.script = import_script(self.path)

    def find_script(self):
        """Return the script next to this file, or else the copy in the run's folder."""
        path, copy = SCRIPTS / self.script_name, self.folder / "script.py"
        if path.exists():
            if copy.exists() and differ(path.read_text(), copy.read_text()):
                warn_once(f"{path.name} has changed since training, see script.py in the run")
            return path
        if not copy.exists():
            raise SidespinError(f"{path.name} is not next to play.py, and there is no {copy}")
        warn_once(f"{path.name} is not next to play.py: using script.py, the run's copy")
        return copy

    def make_env(self, env_id=None, max_ep_len=None, **kwargs):
        """Make the training environment, or another one, as the script does."""
        make_env = getattr(self.script, "make_env", common.env.make_env)
        wrappers = re.findall(r"\b([A-Z]\w*)\([\w.]*env(?=[,()])", self.path.read_text())
        if make_env is not common.env.make_env:  # the script's own, which adds the wrappers
            wrappers = [name for name in wrappers if "Normalize" in name]
        if wrappers:
            names = ", ".join(dict.fromkeys(wrappers))
            lost = f"{names}, which play.py cannot restore: returns may be wrong"
            warn_once(f"{self.script_name} wraps its environment in {lost}")
        max_ep_len = max_ep_len or self.config["max_ep_len"]
        return make_env(env_id or self.config["env_id"], max_ep_len, **kwargs)

    def policy(self, env, itr=None, stochastic=False, seed=SEED):
        """Return a function from observations to actions of the environment."""
        space, params = env.action_space, self.load_params(itr)
        discrete = isinstance(space, Discrete)
        names = ("Policy", "CategoricalPolicy" if discrete else "GaussianPolicy")
        act = next((getattr(self.script, x).act for x in names if hasattr(self.script, x)), None)
        if act is None:
            raise SidespinError(f"{self.path} has no {' or '.join(names)}")
        problem = misfit(act, params, env)
        if problem:
            raise SidespinError(f"the policy does not fit {env.spec.id}: {problem}")
        noise = [np.random.default_rng(seed)] if stochastic else []
        if stochastic and "act_noise" in inspect.signature(act).parameters:
            noise.append(self.config["act_noise"])

        def policy(o):
            a = act(params, np.ravel(o).astype(np.float32), *noise)
            return a if discrete else a.clip(space.low, space.high)

        policy.observation_space, policy.action_space = env.observation_space, space
        return policy

    def load_params(self, itr=None):
        """Return the policy's weights in the order that act() expects."""
        path, framework = model_path(self.folder, itr)
        if not path.exists():
            kept = self.folder.glob(KEPT_MODELS[framework].format("*"))
            kept = sorted(int(x) for path in kept for x in re.findall(r"_(\d+)", path.name))
            kept = f"; the kept epochs are {kept or 'none'}" if itr is not None else " yet"
            raise SidespinError(f"{self.folder} has no {path.name}{kept}")
        model = importlib.import_module(f"common.{framework}_utils").load_model(path)
        return [x for name, x in model.items() if re.match("pi[./]", name)]


def misfit(act, params, env):
    """Return why a policy cannot act in an environment, or None."""
    o, space = np.zeros(env.observation_space.shape, np.float32), env.action_space
    n = next((x.shape[1] for x in params if x.ndim == 2), o.size)
    sizes = f"it expects {n} numbers, but an observation has {o.size}"
    if o.size == 1 < n:  # NumPy would stretch it to the size of the running mean
        return sizes
    try:
        a = act(params, o)
    except Exception as error:
        return sizes if n != o.size else f"{type(error).__name__}: {error}"
    discrete = isinstance(space, Discrete)
    n, size = (len(params[-1]), space.n) if discrete else (np.size(a), space.shape[0])
    return f"it has {plural(n, 'action')}, but the environment has {size}" if n != size else None


def import_script(path):
    """Import a script by its path; return the module."""
    name = str(path.resolve())
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SidespinError(f"cannot import {path}: {type(error).__name__}: {error}") from error
    return module


def differ(source, other):
    """Tell whether two scripts differ in more than comments and layout."""
    try:
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(other))
    except SyntaxError:
        return True


warn_once = functools.cache(warn)  # the seeds of an experiment share their script


def play(folder, args, film=None):
    """Play a run's policy; return the episodes' returns and lengths, each [episodes]."""
    run = TrainedRun(folder)
    mode = "human" if args.render else "rgb_array" if film else None
    with rendering(args.env_id or run.config["env_id"]) if mode else contextlib.nullcontext():
        kwargs = {"render_mode": mode} if mode else {}
        env = run.make_env(args.env_id, args.max_ep_len, **kwargs)
    with contextlib.suppress(AttributeError, KeyError):  # not of MuJoCo, or it has no such camera
        # Gymnasium's default camera stays where it is, and the robot walks out of the picture.
        env.unwrapped.mujoco_renderer.camera_id = env.unwrapped.model.camera("track").id
    policy = run.policy(env, args.itr, args.stochastic, args.seed)
    limit = env.spec.max_episode_steps or run.config["steps_per_epoch"]  # an episode may never end
    returns, lengths = [], []
    for i in range(args.episodes):
        o, ep_ret, ep_len, over = env.reset(seed=args.seed + i)[0], 0.0, 0, False
        while not over:
            if film:
                film.add_frame(env)
            o, r, d, truncated, _ = env.step(policy(o))
            ep_ret, ep_len = ep_ret + r, ep_len + 1
            over = d or truncated or ep_len == limit
        returns.append(ep_ret)
        lengths.append(ep_len)
        if args.verbose:
            print_out(f"{folder} episode {i}: return {ep_ret:.2f}, length {ep_len}")
    env.close()
    return np.array(returns), np.array(lengths)


@contextlib.contextmanager
def rendering(env_id):
    """Turn any exception of a renderer into a sentence that says what it may need."""
    try:
        yield
    except Exception as error:
        if env_id.split(":")[-1] not in gym.registry:
            raise
        reason = str(error).removeprefix(f"cannot make the environment {env_id}: ")
        hint = " ".join(NO_OPENGL.split())
        raise CannotRender(f"cannot render {env_id}: {reason}; {hint}") from error


class Film:
    """Writes rendered frames to a file."""

    def __init__(self, path):
        self.path, self.steps, self.frames, self.writer = path, 0, 0, None

    def add_frame(self, env):
        fps, gif = env.metadata.get("render_fps", 30), self.path.suffix == ".gif"
        every = math.ceil(fps / 25) if gif else 1  # many viewers slow down faster GIFs
        if self.steps % every == 0:
            with rendering(env.spec.id):
                frame = env.render()
            if self.writer is None:
                self._open(fps / every, gif)
            self.writer.append_data(frame)
            self.frames += 1
        self.steps += 1

    def _open(self, fps, gif):
        import imageio.v2 as imageio

        mp4 = dict(fps=fps, macro_block_size=2)  # the default resizes to multiples of 16
        options = dict(duration=1000 / fps, loop=0) if gif else mp4
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = imageio.get_writer(self.path, **options)
        except OSError as error:
            raise CannotRender(f"cannot write {self.path}: {error.strerror or error}") from error

    def close(self):
        if self.writer:
            self.writer.close()
            print_out(f"{self.path}: {self.frames} frames")


def check_args(args):
    """Raise an error if an argument is out of range or two of them conflict."""
    for name, kind in typing.get_type_hints(Args, include_extras=True).items():
        expected = mismatch(kind, value := getattr(args, name))
        if expected:
            raise SidespinError(f"{flag(name)} must be {expected}, got {value}")
    if args.render and args.video:
        raise SidespinError(f"choose {flag('render')} (a window) or {flag('video')} (a file)")
    if args.video and Path(args.video).suffix not in (".mp4", ".gif"):
        raise SidespinError(f"{flag('video')} {args.video} must end in .mp4 or .gif")
    has_screen = sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    if args.render and not has_screen:
        raise SidespinError(f"no screen to open a window on: use {flag('video')} out.mp4")


def print_table(played, env_ids):
    """Print one row per run, by environment, and one for all runs of each experiment."""
    groups = {}
    for folder, results in played.items():
        experiment = read_config(folder).get("exp_name") or folder.parent.name
        groups.setdefault((env_ids[folder], experiment, folder.parent), {})[folder.name] = results
    rows = [("environment", "run", "episodes", "return", "std", "min", "max", "length")]
    for (env_id, experiment, _), runs in sorted(groups.items()):
        if len(runs) > 1:
            runs[f"{experiment}, {len(runs)} runs"] = map(np.concatenate, zip(*runs.values()))
        for name, (returns, lengths) in runs.items():
            numbers = (returns.mean(), returns.std(), returns.min(), returns.max())
            numbers = [f"{x:.2f}" for x in numbers]
            rows.append((env_id, name, str(len(returns)), *numbers, f"{lengths.mean():.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [x.rjust(w) if i > 1 else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths))]
        print_out("  ".join(cells))


def main(args):
    """Play all runs of a folder, print a table, return {run: (returns, lengths)}."""
    check_args(args)
    if args.video:
        if sys.platform == "linux":
            os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if args.video or args.render:
        # TensorFlow and Mesa's renderer each bring an LLVM. Without this module, TensorFlow
        # keeps its own to itself; with it, Mesa would call that one and crash.
        sys.modules.setdefault("tensorflow.python.pywrap_dlopen_global_flags", None)
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    runs = find_runs(args.folder)
    if not runs:
        raise SidespinError(f"there are no runs in {args.folder}")
    env_ids = {folder: args.env_id or read_config(folder).get("env_id") for folder in runs}
    if args.video and len(set(env_ids.values())) > 1:
        several = ", ".join(sorted(map(str, set(env_ids.values()))))
        raise SidespinError(f"{flag('video')} films one environment, but the runs have {several}")
    film = Film(Path(args.video)) if args.video else None
    played = {}
    with warnings.catch_warnings(), contextlib.closing(film) if film else contextlib.nullcontext():
        warnings.simplefilter("ignore")  # from renderers; what matters is raised as an error
        for folder in runs:
            try:
                played[folder] = play(folder, args, film)
            except Exception as error:
                if len(runs) == 1 or isinstance(error, CannotRender | BrokenPipeError):
                    raise
                kind = "" if isinstance(error, SidespinError) else f"{type(error).__name__}: "
                warn(f"cannot play {folder}: {kind}{error}".replace(f": {folder}", ": it"))
    if played:
        print_table(played, env_ids)
    if len(played) < len(runs):
        raise SidespinError(f"{len(runs) - len(played)} of {len(runs)} runs cannot be played", 1)
    return played


if __name__ == "__main__":
    launch(main, Args)
