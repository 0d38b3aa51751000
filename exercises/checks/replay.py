"""Checks exercise 1.7 by storing numbered transitions, and on parameters with known values."""

import numpy as np
import scipy.stats

from . import Wrong, exercise, expect_close, listed

OBS_DIM, ACT_DIM = 3, 2
NAMES = ("o", "a", "r", "o2", "d")


def transition(k):
    """Return a transition whose numbers all tell that it was the k-th."""
    o, a, o2 = np.full(OBS_DIM, k), np.full(ACT_DIM, 2 * k), np.full(OBS_DIM, 4 * k + 1)
    return o, a, 3.0 * k, o2, k % 2


def fill(buffer_class, size, n):
    """Store n transitions, in arrays that are used again, as some environments do."""
    buf = buffer_class(OBS_DIM, ACT_DIM, size)
    o, a, o2 = np.zeros(OBS_DIM), np.zeros(ACT_DIM), np.zeros(OBS_DIM)
    for k in range(1, n + 1):
        o[:], a[:], r, o2[:], d = transition(k)
        buf.store(o, a, r, o2, bool(d))
    return buf


def sample(buf, batch_size, rng):
    """Return the numbers of the transitions in a batch; check that each row is one transition."""
    batch = buf.sample_batch(batch_size, rng)
    if not isinstance(batch, tuple | list) or len(batch) != 5:
        raise Wrong(f"sample_batch should return o, a, r, o2, d, got {type(batch).__name__}")
    shapes = [(batch_size, OBS_DIM), (batch_size, ACT_DIM), (batch_size,)]
    shapes += [(batch_size, OBS_DIM), (batch_size,)]
    for name, x, shape in zip(NAMES, batch, shapes):
        if not isinstance(x, np.ndarray) or x.shape != shape or x.dtype != np.float32:
            got = f"{list(np.shape(x))} of {getattr(x, 'dtype', type(x).__name__)}"
            wanted = f"{name} of a batch of {batch_size} should be {list(shape)} of float32"
            raise Wrong(f"{wanted}, got {got}")
    numbers = np.rint(batch[0][:, 0]).astype(int)
    stored = [np.stack(xs) for xs in zip(*map(transition, numbers))]
    off = [np.reshape(x != y, (batch_size, -1)).any(1) for x, y in zip(batch, stored)]
    if np.any(off):
        row = np.argmax(np.any(off, 0))
        found, right = (
            ", ".join(f"{name} = {listed(x[row])}" for name, x in zip(NAMES, xs))
            for xs in (batch, stored)
        )
        near = f"; transition {numbers[row]} is {right}" if numbers[row] > 0 else ""
        raise Wrong(f"a batch has a row {found}\nwhich was never stored{near}")
    for x in batch:
        x += 100  # what the caller does to a batch must not reach the buffer
    return numbers


def check_contents(buffer_class, size, n):
    """Store n transitions in a buffer of this size; expect the last ones, each equally often."""
    rng = np.random.default_rng(0)
    buf, oldest = fill(buffer_class, size, n), max(1, n - size + 1)
    given = f"in a buffer of size {size}, after {n} transitions were stored"
    numbers = np.concatenate([sample(buf, 64, rng) for _ in range(60)])
    kept = np.arange(oldest, n + 1)
    counts = np.array([np.sum(numbers == k) for k in kept])
    for what, wrong in ("contain", np.setdiff1d(numbers, kept)), ("lack", kept[counts == 0]):
        if len(wrong):
            belong = f"they should contain {oldest} to {n}"
            raise Wrong(f"batches {what} transition {wrong[0]}, but {belong}\n{given}")
    if len(kept) > 1 and scipy.stats.chisquare(counts).pvalue < 1e-6:
        raise Wrong(f"transitions {oldest} to {n} were drawn {counts.tolist()} times\n{given}")


def polyak_step(framework, update_targets, targets, params, polyak, times):
    """Return the values of targets and networks after some updates, and of the targets later on."""
    if framework.name == "torch":
        torch = framework.torch
        nets = [torch.nn.Parameter(torch.tensor(x)) for x in params]
        targs = [torch.nn.Parameter(torch.tensor(x)) for x in targets]
        for _ in range(times):
            update_targets(targs, nets, polyak)
        if any(x.grad_fn is not None or not x.requires_grad for x in targs + nets):
            raise Wrong("after update_targets, a parameter is no longer a plain parameter")
        after = [[x.detach().numpy().copy() for x in xs] for xs in (targs, nets)]
        for x in nets:
            x.data.add_(100)
        return *after, [x.detach().numpy() for x in targs]
    tf = framework.tf
    with tf.Graph().as_default() as graph, tf.Session() as sess:
        nets, targs = ([tf.Variable(x) for x in xs] for xs in (params, targets))
        op = update_targets(targs, nets, polyak)
        if op is None:
            raise Wrong("update_targets should return what a session can run, got None")
        sess.run(tf.global_variables_initializer())
        if any(not np.array_equal(x, y) for x, y in zip(sess.run(targs), targets)):
            raise Wrong("the targets have changed before the session ran what you returned")
        graph.finalize()
        for _ in range(times):
            sess.run(op)
        return *sess.run((targs, nets)), sess.run(targs)


@exercise("1.7: the replay buffer and Polyak averaging")
def check(framework, buffer_class, update_targets):
    rng = np.random.default_rng(0)
    for batch_size in (1, 5):
        sample(fill(buffer_class, 10, 3), batch_size, rng)
    sample(fill(buffer_class, 10, 1), 4, rng)
    yield "store and sample_batch: shapes, float32, rows are transitions; batches may be larger"

    for size, n in (10, 1), (10, 2), (10, 7), (10, 9):
        check_contents(buffer_class, size, n)
    yield "a buffer that is not full"

    for size, n in (10, 10), (10, 11), (10, 13), (10, 20), (10, 47), (1, 5), (2, 5):
        check_contents(buffer_class, size, n)
    yield "a full buffer keeps the most recent transitions"

    buf = fill(buffer_class, 50, 40)
    one, two, three = (sample(buf, 30, np.random.default_rng(seed)) for seed in (1, 1, 2))
    if not np.array_equal(one, two) or np.array_equal(one, three):
        raise Wrong("the same generator should give the same batch, and another a different one")
    yield "all randomness comes from rng"

    shapes = [(4, 3), (4,), (1, 1)]
    targets, params = ([rng.standard_normal(s).astype(np.float32) for s in shapes] for _ in "12")
    for polyak, times in (0.9, 1), (0.995, 1), (0.0, 1), (1.0, 1), (0.9, 3), (0.995, 100):
        found = polyak_step(framework, update_targets, targets, params, polyak, times)
        share = polyak**times
        right = [share * x + (1 - share) * y for x, y in zip(targets, params)]
        given = f"polyak = {polyak}, {times} update{'s' * (times > 1)}"
        for i, (x, y) in enumerate(zip(found[0], right)):

            def where(*index, i=i, given=given):
                return f"{given}, targ = {targets[i][index]:.6g}, net = {params[i][index]:.6g}"

            expect_close("targ", x, y, where)
        if any(not np.array_equal(x, y) for x, y in zip(found[1], params)):
            raise Wrong(f"update_targets changes the networks themselves\nfor {given}")
        if any(not np.array_equal(x, y) for x, y in zip(found[0], found[2])):
            raise Wrong(f"after update_targets, the targets change with the networks\nfor {given}")
    yield "update_targets"
