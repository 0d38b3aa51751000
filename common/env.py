"""Environments as the scripts see them: 1-D float32 observations, Discrete or 1-D Box actions.

And with a memory of how the episode under way came about, which is how a checkpoint keeps it.
"""

import contextlib
import json
import traceback
import warnings

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FlattenObservation, TransformAction, TransformObservation

from common.mpi import Stopped, comm, fail

LARGEST = float(np.finfo(np.float32).max)  # buffers are float32


def make_env(env_id, max_ep_len, action_spaces, **kwargs):
    """Make a Gymnasium environment; max_ep_len, unless None, overrides its own time limit."""
    env, problem = None, None
    try:
        with warnings.catch_warnings():
            # The published results are on the older MuJoCo tasks: no need to say so on every run.
            warnings.filterwarnings("ignore", message=".*is out of date.*")
            env = gym.make(env_id, max_episode_steps=max_ep_len, **kwargs)
    except Exception as error:
        problem = f"cannot make the environment {env_id}: {' '.join(str(error).split())}"
        if not isinstance(error, gym.error.Error | ImportError):  # a fault in its own code
            *_, (file, line, _, _) = traceback.extract_tb(error.__traceback__)
            problem += f" ({type(error).__name__} in {file}, line {line})"
    problem = next(filter(None, comm.allgather(problem)), None)  # one machine may lack a package
    if problem:
        fail(problem)

    space = env.observation_space
    if not isinstance(space, Box) or len(space.shape) != 1:
        if not space.is_np_flattenable:
            fail(f"{env_id} has observations {space}, which cannot be flattened into a vector")
        env = FlattenObservation(env)
    # Always a copy: some environments return one array of their own and change it in place.
    box = _float32_box(env.observation_space.low, env.observation_space.high)
    env = TransformObservation(env, lambda o: np.array(o, np.float32), box)

    space = env.action_space
    if not isinstance(space, action_spaces) or (isinstance(space, Box) and space.dtype.kind != "f"):
        names = " or ".join(kind.__name__ for kind in action_spaces)
        fail(f"{env_id} has actions {space}, where this script needs {names} (of floats)")
    if isinstance(space, Discrete) and (space.start != 0 or space.dtype != np.int64):
        env = TransformAction(
            env, lambda a: space.dtype.type(a + space.start), Discrete(int(space.n))
        )
    elif isinstance(space, Box) and (len(space.shape) != 1 or space.dtype != np.float32):
        box = _float32_box(space.low.ravel(), space.high.ravel())
        # Rounded to float32 a bound may lie outside of the space, so clip to the real ones.
        env = TransformAction(
            env,
            lambda a: a.reshape(space.shape).astype(space.dtype).clip(space.low, space.high),
            box,
        )
    return Replayable(env)


class Replayable(gym.Wrapper):
    """Keeps the generators' state before the last reset and the actions since.

    Also ends the run where a reward or an observation is not finite: it would spoil the buffer.
    """

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # an environment may draw from its spaces
            self.unwrapped.observation_space.seed(seed)
            self.unwrapped.action_space.seed(seed)
        self.seed, self.generators, self.actions, self.ep_ret = seed, self._states(), [], 0.0
        self.o, info = self.env.reset(seed=seed, options=options)
        self._check_finite(0.0)
        return self.o, info

    def step(self, a):
        self.actions.append(np.array(a))
        self.o, r, d, truncated, info = self.env.step(a)
        r = r.item() if isinstance(r, np.ndarray) else r
        self.ep_ret = self.ep_ret + r
        self._check_finite(r)
        return self.o, r, d, truncated, info

    def episode(self):
        """Return what replay needs: what goes into JSON, and arrays."""
        facts = {"seed": self.seed, "before": self.generators, "after": self._states()}
        facts |= {"ep_ret": float(self.ep_ret), "ep_len": len(self.actions)}
        return facts, {"o": self.o, "actions": np.array(self.actions)}

    def replay(self, episode):
        """Step to where an episode was; return o, ep_ret and ep_len, or None if it goes astray."""
        with contextlib.suppress(Exception):  # an environment may not like what it once did
            self._set_states(episode["before"])
            self.reset(seed=episode["seed"])
            self.generators = episode["before"]  # before a seeded reset there may have been none
            for a in episode["actions"]:
                self.step(a)
            now, _ = self.episode()
            if self.o.tobytes() == episode["o"].tobytes() and now == {k: episode[k] for k in now}:
                return self.o, self.ep_ret, len(self.actions)
        self._set_states(episode["after"])
        return None

    def _bit_generators(self):
        """Return those that the environment and its spaces draw from, as far as can be seen."""
        env = self.unwrapped
        return {
            f"{i} {name}": getattr(x, "bit_generator", None) or x._bit_generator
            for i, owner in enumerate((env, env.observation_space, env.action_space))
            for name, x in vars(owner).items()
            if isinstance(x, np.random.Generator | np.random.RandomState)
        }

    def _states(self):
        states = {name: x.state for name, x in self._bit_generators().items()}
        return json.loads(json.dumps(states, default=np.ndarray.tolist))

    def _set_states(self, states):
        for name, x in self._bit_generators().items():
            if name in states:
                x.state = states[name]

    def _check_finite(self, r):
        if not abs(r) <= LARGEST:  # which is false for NaN, too
            raise Stopped(f"the environment's reward is {r}")
        if not np.isfinite(self.o).all():
            i = np.argmin(np.isfinite(self.o))
            raise Stopped(f"number {i} of the environment's observation is {self.o[i]}")


def _float32_box(low, high):
    with np.errstate(over="ignore"):  # what is too large for float32 is infinite
        return Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
