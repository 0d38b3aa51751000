"""What the checks share: running an answer in its framework, and saying what was measured.

Do not read the other files in this folder before you have solved an exercise: they compute the
right numbers.
"""

import functools
import importlib
import os
import sys
import traceback
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that exercises may import the scripts, from any folder
GAP = "fill this gap"


class Wrong(Exception):
    """An answer is wrong; the message says what was measured, and on which input."""

    label = "wrong"


class Open(Wrong):
    """An answer is missing."""

    label = "open"


def exercise(title):
    """Turn a generator into a check: it yields a line for each part that is right."""

    def decorate(steps):
        @functools.wraps(steps)
        def check(framework, *answers):
            print(f"Exercise {title}, {FRAMEWORKS[framework].title}\n", flush=True)
            try:
                for right in steps(FRAMEWORKS[framework](), *answers):
                    print(f"  ok     {right}", flush=True)
            except Exception as error:
                print("\n".join(explain(error)))
                print("\nNot yet. Change your code and run this file again.")
                sys.exit(1)
            print("\nAll correct.")

        check.steps = steps
        return check

    return decorate


def explain(error):
    """Return the lines that tell a learner what is wrong."""
    if isinstance(error, Wrong):
        first, *rest = str(error).splitlines()
        return [f"  {error.label:5}  {first}", *(f"         {line}" for line in rest)]
    if isinstance(error, NotImplementedError) and str(error) == GAP:
        where = learner_frame(error)
        return [f"  open   {where.name} is still empty: {place(where)}"]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    message = lines[-1] if lines[0] == "in user code:" else lines[0]  # TensorFlow adds a traceback
    shown = [f"  error  your code raised {type(error).__name__}: {message}"]
    where = learner_frame(error)
    if where:
        shown.append(f"         {place(where)}: {where.line}")
    return shown


def learner_frame(error):
    """Return the innermost place of a traceback that is neither ours nor a package's."""
    ours = (str(ROOT / "common"), os.path.dirname(__file__), sys.prefix, sys.base_prefix)
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if os.path.isfile(frame.filename)]  # compiled code has none
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    return theirs[-1] if theirs else None


def place(frame):
    return f"line {frame.lineno} of {min(frame.filename, os.path.relpath(frame.filename), key=len)}"


def listed(x):
    """Write a number, or the numbers of an array, as short text."""
    if np.ndim(x) == 0:
        return f"{x:.6g}"
    return "[" + ", ".join(listed(y) if np.ndim(y) else f"{y:.4g}" for y in x) + "]"


def expect_shape(what, found, shape, given):
    if np.shape(found) != tuple(shape):
        measured = f"{what} should have shape {list(shape)}, got {list(np.shape(found))}"
        raise Wrong(f"{measured}\nfor {given}")


def expect_close(what, found, expected, given, rtol=1e-4, atol=1e-5):
    """Compare entry by entry; given(*i) describes the input of the entry at index i."""
    found, expected = np.asarray(found), np.asarray(expected)
    expect_shape(what, found, expected.shape, given(*(0,) * expected.ndim))
    with np.errstate(all="ignore"):
        off = np.abs(found - expected) / (atol + rtol * np.abs(expected))
    off = np.where(np.isfinite(found), off, np.inf)
    if np.all(off <= 1):
        return
    i = np.unravel_index(np.argmax(off), off.shape)
    entry = f"{what}[{', '.join(map(str, i))}]" if i else what
    measured = f"{entry} should be {listed(expected[i])}, got {listed(found[i])}"
    others = f" ({np.sum(off > 1)} of {off.size} entries are wrong)" if off.size > 1 else ""
    raise Wrong(f"{measured}{others}\nfor {given(*i)}")


def expect_gradients(what, names, found, expected, given, **tolerance):
    """Compare gradients with respect to several inputs, in turn."""
    for name, x, y in zip(names, found, expected):
        if x is None and np.any(y):
            raise Wrong(f"no gradient of {what} reaches {name}")
        x = np.zeros_like(y) if x is None else x
        expect_close(f"d {what} / d {name}", x, y, given, **tolerance)


def numerical_gradients(f, *arrays, h=1e-5):
    """Differentiate f, a number, with respect to each array, in float64."""
    arrays, grads = [np.array(x, np.float64) for x in arrays], []
    for x in arrays:
        grads.append(np.zeros_like(x))
        for i in np.ndindex(x.shape):
            old, sides = x[i], []
            for x[i] in (old + h, old - h):
                sides.append(f(*arrays))
            x[i] = old
            grads[-1][i] = (sides[0] - sides[1]) / (2 * h)
    return grads


class Framework:
    """Calls an answer on tensors; what goes in and comes out is NumPy.

    run() returns what the answer returns. gradients() returns the gradients of its sum with respect
    to each array, or None where there is none. The first arrays, batch in number, have B rows.
    """

    def script(self, algo):
        return importlib.import_module(f"{algo}_{self.name}")

    def check_type(self, found, returns):
        """Return the tensors that an answer returned, as a list; stop if they are something else.

        With a tuple of names, the answer has to return as many tensors.
        """
        names = returns if isinstance(returns, tuple) else (returns,)
        if isinstance(returns, tuple):
            if not isinstance(found, tuple | list) or len(found) != len(names):
                count = f" of length {len(found)}" if isinstance(found, tuple | list) else ""
                got = f"got {type(found).__name__}{count}"
                raise Wrong(f"your code should return {', '.join(names)}, {got}")
        else:
            found = (found,)
        for name, x in zip(names, found):
            if not self.is_tensor(x):
                raise Wrong(f"{name} should be a {self.tensor_name}, got {type(x).__name__}")
            if "float32" not in str(x.dtype):
                raise Wrong(f"{name} should have dtype float32, got {x.dtype}")
        return list(found)


class Torch(Framework):
    name, title, tensor_name = "torch", "PyTorch", "torch.Tensor"

    @functools.cached_property
    def torch(self):
        import torch

        return torch

    def is_tensor(self, x):
        return isinstance(x, self.torch.Tensor)

    def constant(self, x):
        return self.torch.as_tensor(x)

    def exp(self, x):
        return self.torch.exp(x)

    def tanh(self, x):
        return self.torch.tanh(x)

    def sum(self, x, axis):
        return self.torch.sum(x, axis)

    def concat(self, xs):
        return self.torch.cat(xs, 1)

    def run(self, function, *arrays, returns, batch):
        tensors = [self.torch.tensor(x) for x in arrays]
        found = function(*tensors)
        for i, (tensor, array) in enumerate(zip(tensors, arrays)):
            if not np.array_equal(tensor.numpy(), array):
                raise Wrong(f"your code changes one of its inputs, of shape {list(array.shape)}")
        found = [x.detach().numpy() for x in self.check_type(found, returns)]
        return found if isinstance(returns, tuple) else found[0]

    def gradients(self, function, *arrays, batch):
        tensors = [self.torch.tensor(x, requires_grad=True) for x in arrays]
        found = function(*tensors).sum()
        if not found.requires_grad:
            return [None] * len(arrays)
        grads = self.torch.autograd.grad(found, tensors, allow_unused=True)
        return [None if g is None else g.numpy() for g in grads]


class TF1(Framework):
    name, title, tensor_name = "tf1", "TF1", "tf.Tensor"

    @functools.cached_property
    def tf(self):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # as in the scripts
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
        import tensorflow.compat.v1 as tf

        return tf

    def is_tensor(self, x):
        return isinstance(x, self.tf.Tensor)

    def constant(self, x):
        return self.tf.constant(x)

    def exp(self, x):
        return self.tf.exp(x)

    def tanh(self, x):
        return self.tf.tanh(x)

    def sum(self, x, axis):
        return self.tf.reduce_sum(x, axis)

    def concat(self, xs):
        return self.tf.concat(xs, 1)

    def run(self, function, *arrays, returns, batch):
        with self.tf.Graph().as_default(), self.tf.Session() as sess:
            tensors = self.placeholders(arrays, batch)
            found = self.check_type(function(*tensors), returns)
            found = sess.run(found, dict(zip(tensors, arrays)))
        return found if isinstance(returns, tuple) else found[0]

    def gradients(self, function, *arrays, batch):
        with self.tf.Graph().as_default(), self.tf.Session() as sess:
            tensors = self.placeholders(arrays, batch)
            grads = self.tf.gradients(self.tf.reduce_sum(function(*tensors)), tensors)
            reached = [i for i, g in enumerate(grads) if g is not None]
            values = sess.run([grads[i] for i in reached], dict(zip(tensors, arrays)))
        return [values[reached.index(i)] if i in reached else None for i in range(len(arrays))]

    def placeholders(self, arrays, batch):
        """As in the scripts, the number of rows is unknown while the graph is built."""
        return [
            self.tf.placeholder(x.dtype, [None, *x.shape[1:]] if i < batch else x.shape)
            for i, x in enumerate(arrays)
        ]


FRAMEWORKS = {"torch": Torch, "tf1": TF1}
