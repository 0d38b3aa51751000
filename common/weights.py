"""Orthogonal initial weights, the same in both frameworks."""

import numpy as np


def orthogonal(shape, gain, rng):
    """Return a random matrix; its rows or columns, whichever are fewer, are gain * orthonormal."""
    q, r = np.linalg.qr(rng.standard_normal((max(shape), min(shape))))
    q = gain * q * np.sign(np.diag(r))  # the signs make all orthogonal matrices equally likely
    return (q if q.shape == tuple(shape) else q.T).astype(np.float32)


def orthogonal_layers(shapes, last_gain, rng):
    """Return the weights of an MLP's layers: with gain sqrt(2), but the last with last_gain."""
    gains = [np.sqrt(2)] * (len(shapes) - 1) + [last_gain]
    return [orthogonal(shape, gain, rng) for shape, gain in zip(shapes, gains)]
