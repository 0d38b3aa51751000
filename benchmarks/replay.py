"""Print the bytes that a full replay buffer of a million Hopper transitions and its arrays take.

python replay.py ours
"""

import sys
from pathlib import Path

import numpy as np
from gymnasium.spaces import Box
from paced import resident_bytes

SIZE, OBS_DIM, ACT_DIM = 1_000_000, 11, 3


def make(package):
    if package == "sb3":
        sys.modules["tensorflow"] = None  # SB3 would import it if it is installed
        from stable_baselines3.common.buffers import ReplayBuffer

        box = Box(-np.inf, np.inf, (OBS_DIM,), np.float64)  # like Hopper's
        return lambda: ReplayBuffer(SIZE, box, Box(-1, 1, (ACT_DIM,), np.float32), "cpu")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from sac_torch import ReplayBuffer

    return lambda: ReplayBuffer(OBS_DIM, ACT_DIM, SIZE)


if __name__ == "__main__":
    buffer = make(sys.argv[1])
    before = resident_bytes()
    buf = buffer()
    arrays = [x for x in vars(buf).values() if isinstance(x, np.ndarray)]
    for x in arrays:
        x[:] = 1  # a page of zeros takes no memory until it is written to
    print(resident_bytes() - before, sum(x.nbytes for x in arrays))
