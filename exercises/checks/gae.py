"""Checks exercise 1.4 against the definitions: sums over all later steps of a path, in float64."""

import numpy as np

from . import Wrong, exercise, expect_close, listed

RETURNS = ("adv", "ret")
OBS_DIM = 3


def expected(values, r, paths, last_values, gamma, lam):
    """Return advantages and rewards-to-go; last_values are V of each path's final observation."""
    adv, ret, start = np.zeros(len(r)), np.zeros(len(r)), 0
    for (end, _, d), last in zip(paths, last_values):
        v = [*values[start:end], 0.0 if d else last]
        for t in range(start, end):
            for s in range(t, end):
                delta = r[s] + gamma * v[s - start + 1] - v[s - start]
                adv[t] += (gamma * lam) ** (s - t) * delta
                ret[t] += gamma ** (s - t) * r[s]
            ret[t] += gamma ** (end - t) * v[-1]
        start = end
    return adv, ret


def value_function(framework, w):
    """Return V(o) = o.w, as VPG has it: a module in PyTorch, a callable on arrays in TF1."""
    if framework.name == "torch":
        v = framework.torch.nn.Linear(OBS_DIM, 1, bias=False)
        v.weight.data.copy_(framework.torch.as_tensor(w)[None])
        return lambda o: v(o).squeeze(1)
    tf = framework.tf
    with tf.Graph().as_default():
        o = tf.placeholder(tf.float32, [None, OBS_DIM])
        return tf.Session().make_callable(tf.linalg.matvec(o, w), [o])


@exercise("1.4: generalized advantage estimation")
def check(framework, gae):
    rng = np.random.default_rng(0)

    def compare(ends, gamma, lam, scale=1.0, parts=RETURNS):
        """Compare on an epoch of paths; ends maps the end of each to whether it terminated."""
        n, w = max(ends), rng.standard_normal(OBS_DIM).astype(np.float32)
        o = rng.standard_normal((n, OBS_DIM)).astype(np.float32)
        r = (scale * rng.standard_normal(n)).astype(np.float32)
        o2 = rng.standard_normal((len(ends), OBS_DIM)).astype(np.float32) + w  # V(o2) is not 0
        paths = [(end, o2[i], d) for i, (end, d) in enumerate(ends.items())]
        before = o.copy(), r.copy()
        found = gae(value_function(framework, w), o, r, paths, gamma, lam)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Wrong(f"your code should return adv and ret, got {type(found).__name__}")
        for name, x in zip(RETURNS, found):
            if not isinstance(x, np.ndarray) or x.dtype != np.float32:
                kind = f" of {x.dtype}" if hasattr(x, "dtype") else ""
                got = f"got {type(x).__name__}{kind}"
                raise Wrong(f"{name} should be a NumPy array of float32, {got}")
        if not all(np.array_equal(x, y) for x, y in zip((o, r), before)):
            raise Wrong("your code changes o or r")
        o, w = o.astype(np.float64), w.astype(np.float64)
        last = o2.astype(np.float64) @ w
        right = expected(o @ w, r.astype(np.float64), paths, last, gamma, lam)
        how = [f"{end} ({'terminated' if d else 'cut short'})" for end, d in ends.items()]

        def given(t):
            text = f"gamma = {gamma}, lam = {lam}, and paths that end before step {', '.join(how)}"
            if n <= 4:
                text += f"\nr = {listed(r)}, V(o) = {listed(o @ w)}, "
                text += f"V of the final observation = {listed(last)}"
            return text

        for name, x, y in zip(RETURNS, found, right):
            if name in parts:
                expect_close(name, x, y, given, rtol=1e-3, atol=1e-3)

    compare({1: True}, 0.9, 0.7, parts=("ret",))
    compare({3: True}, 0.9, 0.7, parts=("ret",))
    compare({1: True}, 0.9, 0.7)
    compare({3: True}, 0.9, 0.7)
    yield "one path that terminated"

    compare({1: False}, 0.9, 0.7)
    compare({3: False}, 0.9, 0.7)
    yield "one path that was cut short"

    compare({4: True, 9: False, 10: True, 11: False, 20: False}, 0.9, 0.7)
    compare({2: False, 4: False, 5: True, 6: True, 12: True}, 0.9, 0.7)
    yield "an epoch of several paths, one after the other"

    for gamma, lam in (0.9, 0.0), (0.9, 1.0), (1.0, 1.0), (1.0, 0.5), (0.0, 0.5):
        compare({4: True, 9: False, 20: False}, gamma, lam)
    yield "gamma and lam from 0 to 1"

    compare({150: False, 151: True, 400: True}, 0.99, 0.97, scale=10.0)
    yield "long paths"
