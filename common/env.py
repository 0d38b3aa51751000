"""Environments as the scripts see them: 1-D float32 observations, Discrete or 1-D Box actions.

They also record the current episode, so that a checkpoint can restore it by replaying it.
"""

import collections
import contextlib
import copy
import json
import traceback
import warnings

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FlattenObservation, TransformAction, TransformObservation

from common.errors import SidespinError
from common.mpi import first_problem

LARGEST = float(np.finfo(np.float32).max)  # buffers are float32


def make_env(env_id, max_ep_len=None, bounded_actions=False, **kwargs):
    """Make a Gymnasium environment; max_ep_len, unless None, overrides its own time limit."""
    env, problem = None, None
    try:
        with warnings.catch_warnings():
            # Published results use the older MuJoCo tasks: no need to warn on every run.
            warnings.filterwarnings("ignore", message=".*is out of date.*")
            env = gym.make(env_id, max_episode_steps=max_ep_len, **kwargs)
    except Exception as error:
        problem = f"cannot make the environment {env_id}: {' '.join(str(error).split())}"
        if not isinstance(error, gym.error.Error | ImportError):  # a bug in the environment
            *_, (file, line, _, _) = traceback.extract_tb(error.__traceback__)
            problem += f" ({type(error).__name__} in {file}, line {line})"
    problem = first_problem(problem)  # any rank's: one machine may lack a package
    if problem:
        raise SidespinError(problem)
    # Spaces may be class attributes, which all environments of the class would share.
    for name in ("observation_space", "action_space"):
        setattr(env.unwrapped, name, copy.deepcopy(getattr(env.unwrapped, name)))

    space = env.observation_space
    if not isinstance(space, Box) or len(space.shape) != 1:
        if not space.is_np_flattenable:
            raise SidespinError(f"the observations of {env_id}, {space}, cannot be flattened")
        env = FlattenObservation(env)
    # Always copy: some environments return the same array each time and change it in place.
    box = _float32_box(env.observation_space.low, env.observation_space.high)
    env = TransformObservation(env, lambda o: np.array(o, np.float32), box)

    space = env.action_space
    is_box = isinstance(space, Box) and space.dtype.kind == "f"
    if bounded_actions and not (is_box and np.isfinite(space.high - space.low).all()):
        problem = "this script needs bounded continuous actions"
        raise SidespinError(f"{problem}, but {env_id} has {space}")
    if not is_box and not isinstance(space, Discrete):
        problem = "the scripts need Discrete actions or a Box of floats"
        raise SidespinError(f"{problem}, but {env_id} has {space}")
    if isinstance(space, Discrete) and (space.start != 0 or space.dtype != np.int64):
        env = TransformAction(
            env, lambda a: space.dtype.type(a + space.start), Discrete(int(space.n))
        )
    elif isinstance(space, Box) and (len(space.shape) != 1 or space.dtype != np.float32):
        box = _float32_box(space.low.ravel(), space.high.ravel())
        # A bound rounded to float32 may lie outside the space, so clip to the exact bounds.
        env = TransformAction(
            env,
            lambda a: a.reshape(space.shape).astype(space.dtype).clip(space.low, space.high),
            box,
        )
    return Replayable(env)


class Replayable(gym.Wrapper):
    """Keeps the environment's state before the last reset, and the actions since.

    Also stops the run if a reward or an observation is not finite: it would corrupt the buffer.
    """

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # an environment may sample from its spaces
            self.unwrapped.observation_space.seed(seed)
            self.unwrapped.action_space.seed(seed)
        self.seed, self.before, self.actions = seed, get_state(self.env), []
        self.o, info = self.env.reset(seed=seed, options=options)
        self._check_finite(0.0)
        return self.o, info

    def step(self, a):
        self.actions.append(np.array(a))
        self.o, r, d, truncated, info = self.env.step(a)
        r = float(r.item() if hasattr(r, "item") else r)  # a sum of small floats would be inexact
        self._check_finite(r)
        return self.o, r, d, truncated, info

    def episode(self):
        """Return what replay() needs."""
        states = {"before": self.before, "after": get_state(self.env)}
        return {"seed": self.seed, **states, "o": self.o, "actions": np.array(self.actions)}

    def replay(self, episode):
        """Replay a saved episode; return whether the environment reached the same state."""
        with contextlib.suppress(Exception):  # an environment may fail where it did not before
            set_state(self.env, episode["before"])
            self.reset(seed=episode["seed"])
            self.before = episode["before"]  # before its first reset, an environment may hold less
            for a in episode["actions"]:
                self.step(a)
            there = self.o.tobytes() == episode["o"].tobytes()
            if there and _text(get_state(self.unwrapped)) == _text(episode["after"][-1:]):
                return True
        set_state(self.env, episode["after"])
        return False

    def _check_finite(self, r):
        fine = np.isfinite(self.o)
        if abs(r) <= LARGEST and fine.all():  # also catches NaN
            return
        a = self.actions[-1] if self.actions else np.zeros(1)
        if not np.isfinite(a).all():
            i = np.argmin(np.isfinite(a))
            raise SidespinError(f"training diverged: number {i} of the action is {a[i]}", 1)
        if not fine.all():
            i = np.argmin(fine)
            raise SidespinError(f"number {i} of the environment's observation is {self.o[i]}", 1)
        raise SidespinError(f"the environment's reward is {r}", 1)


def get_state(env, until=None):
    """Return the state that survives a reset, from the outermost wrapper inwards.

    For a wrapper, that is every number and array it holds, such as running statistics; for the
    environment itself, the NumPy generators that it and its spaces draw from.
    """
    layers = []
    while env is not until:
        if not isinstance(env, gym.Wrapper):
            owners = (env, env.observation_space, env.action_space)
            return [*layers, [_variables(owner, generators_only=True) for owner in owners]]
        layers.append(_variables(env))
        env = env.env
    return layers


def set_state(env, layers):
    """Restore what get_state() returned."""
    for layer in layers:
        if not isinstance(env, gym.Wrapper):
            for owner, state in zip((env, env.observation_space, env.action_space), layer):
                _set_variables(owner, state)
            return
        _set_variables(env, layer)
        env = env.env


def _variables(owner, generators_only=False):
    found = {}
    for name, x in vars(owner).items():
        if isinstance(x, np.random.Generator | np.random.RandomState):
            found[name] = _bit_generator(x).state
        elif generators_only:
            continue
        elif isinstance(x, collections.deque) and all(map(_is_plain, x)):
            found[name] = [np.array(item) for item in x]
        elif _is_plain(x):
            found[name] = np.array(x) if isinstance(x, np.ndarray) else x
        elif hasattr(x, "__dict__") and vars(x) and all(map(_is_plain, vars(x).values())):
            found[name] = _variables(x)  # such as Gymnasium's RunningMeanStd
    return found


def _set_variables(owner, state):
    for name, value in state.items():
        x = getattr(owner, name, None)
        if isinstance(x, np.random.Generator | np.random.RandomState):
            _bit_generator(x).state = value
        elif isinstance(x, collections.deque):
            x.clear()
            x.extend(value)
        elif isinstance(value, dict):
            _set_variables(x, value)
        else:
            setattr(owner, name, value)


def _text(state):
    return json.dumps(state, default=np.ndarray.tolist)


def _is_plain(x):
    if isinstance(x, np.ndarray):
        return not x.dtype.hasobject  # an object array could only be pickled
    return isinstance(x, bool | int | float | np.number)


def _bit_generator(x):
    return getattr(x, "bit_generator", None) or x._bit_generator


def _float32_box(low, high):
    with np.errstate(over="ignore"):  # values too large for float32 become infinite
        return Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
