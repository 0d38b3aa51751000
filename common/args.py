"""The command line: read once for all ranks, and checked before anything is written."""

import contextlib
import dataclasses
import io
import os
import re
import sys

import tyro

from common.mpi import check_launcher, end_together, fail, num_procs, proc_id

AT_LEAST_ONE = """epochs steps_per_epoch max_ep_len cpu threads save_freq train_pi_iters cg_iters
    backtrack_iters replay_size batch_size update_every policy_delay""".split()
AT_LEAST_ZERO = """seed train_v_iters start_steps update_after num_test_episodes pi_lr vf_lr q_lr lr
    clip_ratio target_kl damping_coeff act_noise target_noise noise_clip alpha""".split()
FRACTIONS = "gamma lam polyak".split()


def parse_args(dataclass, doc):
    """Read the command line into the dataclass; of several ranks one prints help and errors."""
    end_together()
    what, *_, examples = doc.strip().split("\n\n")
    description = f"{what}\n\n{examples}"
    error = io.StringIO()
    try:
        output = io.StringIO() if proc_id() else sys.stdout
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
            config = [tyro.conf.FlagCreatePairsOff]
            return tyro.cli(dataclass, description=description, config=config)
    except SystemExit as ended:
        if ended.code:
            fail(_sentence(error.getvalue()))
        raise


def _sentence(box):
    """Turn tyro's box of an error, its explanation and its hints into one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]  # below the title
    rule = re.compile("[─-]+")
    parts = re.split("\0+", " ".join("\0" if rule.fullmatch(line) else line for line in lines))
    error, *others = (" ".join(part.split()) for part in parts if part.strip())
    similar = [part for part in others if part.startswith("Perhaps you meant")]
    hint = [f"did you mean {' or '.join(re.findall('--[a-z-]+', part))}?" for part in similar]
    error = error.split(" Got errors:")[0].rstrip(".")
    return "; ".join([error, *hint, "--help explains all flags"])


def check_args(args, ranks=None):
    """Stop, with a sentence, at a value that no run could use, on so many ranks or on these."""
    check_launcher()
    for name, value in dataclasses.asdict(args).items():
        flag = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, tuple) else [value]
        numbers = [x for x in values if isinstance(x, int | float)]
        if not all(isinstance(x, int) or abs(x) < 2.0**127 for x in numbers):
            fail(f"{flag} {value} is not a finite number (of 32 bits)")
        if name in (*AT_LEAST_ONE, "hidden_sizes") and any(x < 1 for x in numbers):
            fail(f"{flag} must be at least 1, not {value}")
        if name in (*AT_LEAST_ONE, "hidden_sizes") and any(x >= 2**31 for x in numbers):
            fail(f"{flag} {value} is too large")
        if name in AT_LEAST_ZERO and any(x < 0 for x in numbers):
            fail(f"{flag} must not be negative, as {value} is")
        if name in FRACTIONS and not 0 <= value <= 1:
            fail(f"{flag} must lie between 0 and 1, where {value} does not")
        if name in ("delta", "backtrack_coeff") and value <= 0:
            fail(f"{flag} must be positive, not {value}")
    if args.threads > os.cpu_count():
        fail(f"--threads {args.threads} is more than the {os.cpu_count()} cores of this machine")
    if args.resume and args.overwrite:
        fail("--resume keeps a run and --overwrite replaces it: choose one")
    layers = sum(n * m for n, m in zip(args.hidden_sizes, args.hidden_sizes[1:]))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 16 * layers > memory:  # each weight with its gradient and two moments, 4 bytes each
        fail(f"--hidden-sizes {args.hidden_sizes} need more than the {memory / 2**30:.0f} GiB here")
    if hasattr(args, "replay_size"):
        _check_replay(args, ranks or num_procs())
    if args.exp_name is not None and (args.exp_name != os.path.basename(args.exp_name)):
        fail(f"--exp-name {args.exp_name} must be a name, without folders")
    if args.exp_name in ("", ".", ".."):
        fail("--exp-name must be the name of a folder")


def _check_replay(args, ranks):
    steps = args.epochs * args.steps_per_epoch
    if args.start_steps > steps:
        fail(
            f"--start-steps {args.start_steps} is beyond the run, which has {steps} steps "
            "(--epochs times --steps-per-epoch)"
        )
    # Bursts of updates are at every update_every-th step of a rank
    bursts = -(-max(args.update_after, 1) // (args.update_every * ranks))
    most = min(bursts * args.update_every, args.replay_size)
    if args.batch_size > most:
        fail(
            f"--batch-size {args.batch_size} is more than the {most} transitions that a rank has "
            "at its first update (--update-after, --update-every, --replay-size)"
        )
