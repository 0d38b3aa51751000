"""The command line: read once for all ranks, and checked before anything is written."""

import contextlib
import dataclasses
import math
import os
import sys

import tyro

from common.mpi import fail, proc_id

AT_LEAST_ONE = """epochs steps_per_epoch max_ep_len cpu threads save_freq train_pi_iters cg_iters
    backtrack_iters replay_size batch_size update_every policy_delay""".split()
AT_LEAST_ZERO = """seed train_v_iters start_steps update_after num_test_episodes pi_lr vf_lr q_lr lr
    clip_ratio target_kl damping_coeff act_noise target_noise noise_clip alpha""".split()
FRACTIONS = "gamma lam polyak".split()


def parse_args(dataclass, doc):
    """Read the command line into the dataclass; of several ranks one prints help and errors."""
    with open(os.devnull, "w") as null:
        out, err = (null, null) if proc_id() else (sys.stdout, sys.stderr)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            config = [tyro.conf.FlagCreatePairsOff]
            return tyro.cli(dataclass, description=doc.splitlines()[0], config=config)


def check_args(args):
    """Stop, with a sentence, at a value that no run could use."""
    for name, value in dataclasses.asdict(args).items():
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, tuple) else [value]
        numbers = [x for x in values if isinstance(x, int | float)]
        if not all(math.isfinite(x) for x in numbers):
            fail(f"{flag} {value} is not a finite number")
        if name in (*AT_LEAST_ONE, "hidden_sizes") and any(x < 1 for x in numbers):
            fail(f"{flag} must be at least 1, not {value}")
        if name in AT_LEAST_ZERO and any(x < 0 for x in numbers):
            fail(f"{flag} must not be negative, as {value} is")
        if name in FRACTIONS and not 0 <= value <= 1:
            fail(f"{flag} must lie between 0 and 1, where {value} does not")
        if name in ("delta", "backtrack_coeff") and value <= 0:
            fail(f"{flag} must be positive, not {value}")
    if args.exp_name is not None and (args.exp_name != os.path.basename(args.exp_name)):
        fail(f"--exp-name {args.exp_name} must be a name, without folders")
    if args.exp_name in ("", ".", ".."):
        fail("--exp-name must be the name of a folder")
