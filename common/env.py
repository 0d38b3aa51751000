"""Environments as the scripts see them: 1-D float32 observations, Discrete or 1-D Box actions."""

import warnings

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FlattenObservation, TransformAction, TransformObservation

from common.mpi import comm, fail


def make_env(env_id, max_ep_len, action_spaces):
    """Make a Gymnasium environment; max_ep_len, unless None, overrides its own time limit."""
    env, problem = None, None
    try:
        with warnings.catch_warnings():
            # The published results are on the older MuJoCo tasks: no need to say so on every run.
            warnings.filterwarnings("ignore", message=".*is out of date.*")
            env = gym.make(env_id, max_episode_steps=max_ep_len)
    except (gym.error.Error, ImportError) as error:
        problem = f"cannot make the environment {env_id}: {' '.join(str(error).split())}"
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
    return env


def _float32_box(low, high):
    with np.errstate(over="ignore"):  # what is too large for float32 is infinite
        return Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
