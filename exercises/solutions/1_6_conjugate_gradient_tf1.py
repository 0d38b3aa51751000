"""Solution of exercise 1.6.

stop_gradient makes p a constant: from the second iteration on, p itself depends on the parameters,
by way of H. The damping belongs to the matrix, so it is part of every product.

alpha is the minimum along p. The new direction is the residual plus the right amount of the last
one, rr / rr_old, which makes it conjugate to all directions before. In exact arithmetic, P
iterations solve the system; TRPO makes do with ten. Once the residual is zero, alpha is 0 / 0;
div_no_nan turns it into 0.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # else it depends on the CPU, with a message
import tensorflow.compat.v1 as tf
from checks.conjugate_gradient import check

from trpo_tf1 import dot, flat_grad  # flat_grad(f, params): the gradient of f as a flat vector


def solve(kl, params, g, iters, damping):
    """Return x after iters iterations on (H + damping I) x = g: float32, [P].

    kl      a scalar tensor that depends on the parameters; H is its Hessian
    params  a list of tensors with P numbers in all
    g       [P]

    Stop early, or do no harm, when the residual has become zero. Leave the parameters alone.
    """
    grad_kl = flat_grad(kl, params)

    def hvp(p):
        p = tf.stop_gradient(p)
        return flat_grad(dot(grad_kl, p), params) + damping * p

    x, r, p = tf.zeros_like(g), g, g
    rr = dot(r, r)
    for _ in range(iters):
        hp = hvp(p)
        alpha = tf.div_no_nan(rr, dot(p, hp))
        x = x + alpha * p
        r = r - alpha * hp
        rr_old, rr = rr, dot(r, r)
        p = r + tf.div_no_nan(rr, rr_old) * p
    return x


if __name__ == "__main__":
    check("tf1", solve)
