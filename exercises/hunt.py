"""Find the bug: a copy of a script that runs and logs, but computes something else.

Write a broken copy, get a hint, and check whether the maths is right again:

    python exercises/hunt.py ppo
    python exercises/hunt.py ppo --hint
    python exercises/hunt.py ppo --check my_ppo.py
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from common.args import PositiveInt
from common.errors import SidespinError
from common.launch import launch
from common.run import print_out

MEMORY = ROOT / "exercises" / ".hunt.json"  # by script: the bug at large, hints given, bugs solved
PATIENCE = 300  # seconds for a check, which takes about ten
FIRST_RUN = dict.fromkeys(("vpg", "ppo", "trpo"), "--env-id CartPole-v1 --epochs 10")
FIRST_RUN |= dict.fromkeys(("ddpg", "td3", "sac"), "--env-id Pendulum-v1 --epochs 5")
Algo = Literal["vpg", "ppo", "trpo", "ddpg", "td3", "sac"]


@dataclass
class Args:
    algo: Annotated[
        Algo, tyro.conf.Positional, tyro.conf.arg(metavar="ALGO")
    ]  # vpg, ppo, trpo, ddpg, td3, sac
    framework: Literal["torch", "tf1"] = "torch"  # break the PyTorch script or its TF1 twin
    bug: PositiveInt | None = None  # number of the bug; None: the first that you have not solved
    hint: bool = False  # one more hint on the bug that you are after
    check: str | None = None  # a file: is its maths right?
    overwrite: bool = False  # replace the copy and all that you changed in it


def bugs(algo, framework):
    """Return the bugs of a script; each has a title, a patch and hints."""
    with open(ROOT / "exercises" / "bugs" / f"{algo}.toml", "rb") as file:
        found = tomllib.load(file)["bug"]
    for bug in found:
        bug["patch"] = bug.get("both") or bug.get(framework)
    return [bug for bug in found if bug["patch"]]


def broken(algo, framework, bug):
    """Return the text of a script with a bug in it.

    A patch is a diff: lines to remove (-), to add (+) and to keep; @@ begins another place.
    """
    text = (ROOT / f"{algo}_{framework}.py").read_text()
    for hunk in bug["patch"].split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(x[1:] for x in lines if x[0] in kind) for kind in (" -", " +"))
        if text.count(f"\n{old}") != 1:
            raise SidespinError(f"not one place in {algo}_{framework}.py reads {old.strip()!r}")
        text = text.replace(f"\n{old}", f"\n{new}")
    return text


def main(args):
    """Write a broken copy, give a hint, or check a file."""
    memory = json.loads(MEMORY.read_text()) if MEMORY.exists() else {}
    if args.check and Path(args.check).stem.endswith("tf1"):
        args.framework = "tf1"
    script = f"{args.algo}_{args.framework}"
    mine = memory.setdefault(script, {"bug": None, "hints": 0, "solved": []})
    known = bugs(args.algo, args.framework)
    copy = ROOT / f"my_{args.algo}{'' if args.framework == 'torch' else '_tf1'}.py"
    if args.check:
        passed = check(args, copy, known, mine)
    elif args.hint:
        give_hint(args, known, mine)
    else:
        hide_bug(args, copy, known, mine)
    MEMORY.write_text(json.dumps(memory))
    if args.check and not passed:
        raise SystemExit(1)


def command(args, *words):
    """Return a command for the user to type where they are."""
    framework = ["--framework", "tf1"] if args.framework == "tf1" else []
    program = os.path.relpath(ROOT / "exercises" / "hunt.py")
    return " ".join(["python", program, args.algo, *framework, *words])


def hide_bug(args, copy, known, mine):
    """Write a broken copy and say what to do with it."""
    open_bugs = [n for n in range(1, len(known) + 1) if n not in mine["solved"]]
    number = min(open_bugs, default=1) if args.bug is None else args.bug
    name, script = os.path.relpath(copy), f"{args.algo}_{args.framework}.py"
    if not 1 <= number <= len(known):
        raise SidespinError(f"{script} has bugs 1 to {len(known)}, there is no bug {number}")
    if copy.exists() and not args.overwrite:
        raise SidespinError(f"{name} exists: go on with it, or start afresh with --overwrite")
    copy.write_text(broken(args.algo, args.framework, known[number - 1]))
    mine |= {"bug": number, "hints": 0}
    print_out(f"""{name} is {script} with bug {number} of {len(known)}. It runs, but is wrong:
    python {name} {FIRST_RUN[args.algo]}
Find the bug and mend it in {name}. Is the maths right again?
    {command(args, "--check", name)}
Stuck?
    {command(args, "--hint")}""")


def give_hint(args, known, mine):
    """Print one more hint, after those that were given before."""
    if not mine["bug"]:
        raise SidespinError(f"there is no bug to give a hint on yet: {command(args)} hides one")
    hints = known[mine["bug"] - 1]["hints"]
    mine["hints"] = min(mine["hints"] + 1, len(hints))
    for i, hint in enumerate(hints[: mine["hints"]]):
        print_out(f"hint {i + 1} of {len(hints)}: {hint}")


def check(args, copy, known, mine):
    """Print what is wrong with a file; if it is the copy and all is right, say what the bug was."""
    problems = ask_oracles(args.algo, args.check)
    lines = [f"{args.check}: {'not right yet' if problems else 'the maths is right'}"]
    lines += [f"  - {problem}" for problem in problems]
    if not problems and mine["bug"] and Path(args.check).resolve() == copy:
        mine["solved"] = sorted({*mine["solved"], mine["bug"]})
        lines.append(f"The bug was: {known[mine['bug'] - 1]['title']}.")
        if len(mine["solved"]) < len(known):
            lines.append(f"The next one: {command(args, '--overwrite')}")
        else:
            lines.append(f"You have found all {len(known)} bugs of this script.")
    print_out("\n".join(lines))
    return not problems


def ask_oracles(algo, path):
    """Return what is wrong with a file. Two ranks look at it, since some bugs need two to show."""
    if not Path(path).is_file():
        raise SidespinError(f"there is no file {path}")
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    if mpirun is None:
        raise SidespinError("--check needs mpirun: install the packages in requirements.txt")
    words = [mpirun, "-np", "2", sys.executable, ROOT / "exercises" / "oracles.py", algo, path]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, error = process.communicate(timeout=PATIENCE)
        except BaseException as error:
            process.terminate()  # mpirun ends its ranks
            if isinstance(error, subprocess.TimeoutExpired):
                return [
                    f"it takes longer than {PATIENCE} seconds: do the ranks wait for each other?"
                ]
            raise
    try:
        answer = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        if b"MPI" in error:
            return [
                "two ranks fail together: do both make the same calls, with arrays of one size?"
            ]
        raise SidespinError(f"the check failed: {error.decode().strip()}", 1) from None
    if answer["mistake"]:
        raise SidespinError(answer["mistake"])
    return answer["problems"]


if __name__ == "__main__":
    launch(main, Args)
