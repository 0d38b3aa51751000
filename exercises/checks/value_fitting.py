"""Checks exercise 2.1 against the curves in exercises/data, and by exact computations."""

from pathlib import Path

import numpy as np

from . import Open, Wrong, exercise

TABLE = Path(__file__).parents[1] / "data" / "trpo_value_fitting.csv"
GAMMA, LAM = 0.99, 0.97  # the script's defaults


def read_table():
    return np.genfromtxt(TABLE, delimiter=",", names=True)


def show(table, columns=("AverageEpRet", "LossV")):
    """Print the means over the last ten epochs of each run."""
    print("  TRPO on Hopper-v4, means over epochs 41 to 50 of each run:\n")
    print("    train_v_iters  seed" + "".join(f"{column:>14}" for column in columns))
    for iters in (0, 80):
        for seed in range(5):
            rows = runs(table, iters, seed)[-10:]
            means = "".join(f"{rows[column].mean():14.2f}" for column in columns)
            print(f"    {iters:13d}  {seed:4d}{means}")
    print()


def runs(table, iters, seed):
    return table[(table["train_v_iters"] == iters) & (table["seed"] == seed)]


def first_advantage(r, v, lam):
    """Return the advantage of the first step of a path that terminated, from the definition."""
    delta = np.array(r) + GAMMA * np.append(v[1:], 0) - v
    return sum((GAMMA * lam) ** k * x for k, x in enumerate(delta))


def advantage_gaps(lam):
    """Return how much better the better of two actions looks, with V = 0 and with the true V.

    Both are equally likely; one leads to a reward of 1 two steps later, the other to none.
    """
    good, bad = np.array([0, 0, 1.0]), np.zeros(3)
    v_good, v_bad = np.array([GAMMA**2 / 2, GAMMA, 1]), np.array([GAMMA**2 / 2, 0, 0])
    untrained = first_advantage(good, bad, lam) - first_advantage(bad, bad, lam)
    return untrained, first_advantage(good, v_good, lam) - first_advantage(bad, v_bad, lam)


def number(name, value):
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Wrong(f'"{name}" should be a number, got {value!r}') from None


@exercise("2.1: value fitting in TRPO")
def check(framework, answers):
    table = read_table()
    show(table)

    def given(name):
        if answers[name] is None:
            raise Open(f'the answer to "{name}" is still None')
        return answers[name]

    columns = table.dtype.names[4:]
    column = given("stays")
    if column not in columns:
        raise Wrong(f'"stays" should be one of {", ".join(columns)}, got {column!r}')
    spread = [np.mean([runs(table, i, s)[column].std() for s in range(5)]) for i in (0, 80)]
    if spread[0] > 0.01 * spread[1]:
        first, last = runs(table, 0, 0)[column][[0, -1]]
        raise Wrong(f"without training V, {column} of seed 0 goes from {first:g} to {last:g}")
    yield "what stays"

    x = number("x", given("x"))
    expected, found = first_advantage(np.ones(30), np.zeros(30), LAM), sum(x**k for k in range(30))
    if abs(found - expected) > 0.01:
        wanted = f"the script computes {expected:.3f}, with your x it is {found:.3f}"
        raise Wrong(f"for the first of 30 steps with reward 1 and V = 0, {wanted}")
    yield "the discount of the untrained advantage"

    horizon = number("horizon", given("horizon"))
    if abs(horizon * (1 - x) - 1) > 0.05:
        raise Wrong(f"1 / (1 - x) is not {horizon:g} steps")
    yield "how far it looks"

    if given("changes") not in ("variance", "both"):
        raise Wrong(f'"changes" should be "variance" or "both", got {given("changes")!r}')
    for lam, claim in (LAM, given("changes")), (number("lam", given("lam")), "variance"):
        untrained, trained = advantage_gaps(lam)
        if (abs(untrained - trained) < 1e-6) != (claim == "variance"):
            measured = f"{untrained:.4f} with V = 0, and by {trained:.4f} with the true V"
            raise Wrong(
                "of two equally likely actions, one leads to a reward of 1 two steps later; with "
                f"lam = {lam:g},\ntheir expected advantages differ by {measured}"
            )
    yield "what training V changes, and the lam that makes the difference"

    ends = {i: [runs(table, i, s)["AverageEpRet"][-10:].mean() for s in range(5)] for i in (0, 80)}
    seed = given("odd_seed")
    if seed != int(np.argmin(ends[80])):
        if seed not in range(5):
            raise Wrong(f'"odd_seed" should be a seed from 0 to 4, got {seed!r}')
        low, high = min(ends[0]), max(ends[0])
        others = f"those with 0 iterations end between {low:.0f} and {high:.0f}"
        raise Wrong(f"with 80 iterations, seed {seed} ends at {ends[80][seed]:.0f}; {others}")
    column = given("odd_column")
    if column not in columns:
        raise Wrong(f'"odd_column" should be one of {", ".join(columns)}, got {column!r}')
    odd = runs(table, 80, seed)[column][-10:].mean()
    others = [runs(table, 80, s)[column][-10:].mean() for s in range(5) if s != seed]
    if column == "AverageEpRet":
        raise Wrong("AverageEpRet shows that this run is odd; look for a column that shows why")
    if not abs(odd) < 0.01 * min(map(abs, others)):
        similar = f"{odd:.4g} in this run and {min(others):.4g} to {max(others):.4g} in the others"
        raise Wrong(f"{column} is {similar}: look for a column that shows what V cannot do here")
    yield "the odd run"
