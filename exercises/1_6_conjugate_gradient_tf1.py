"""Exercise 1.6: conjugate gradient with Hessian-vector products, in TensorFlow 1 style.

TRPO's step is x = H^-1 g: g is the gradient of the policy's loss, H the Hessian of the mean KL
between old and new policy. A policy of 5,000 parameters has a Hessian of 25 million entries, which
is never formed. Two ideas avoid it:

- For a vector p, H p is the gradient of (grad KL . p), where p is a constant: two gradients, no H.
- The conjugate gradient method solves H x = g using such products alone. It starts from x = 0 with
  the residual r = g and the direction p = g. Each iteration goes along p to the minimum of
  1/2 x^T H x - g^T x, then chooses the next direction so that it is conjugate to all before it.

H is close to singular, so damping times the identity is added to it. Look up the method, for
instance in Appendix C of https://arxiv.org/abs/1502.05477 or in any textbook on numerical methods.

Fill the gap, then run this file to check it:

    python exercises/1_6_conjugate_gradient_tf1.py
"""

import os

import numpy as np

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
    # ---- your code: from here
    raise NotImplementedError("fill this gap")
    # ---- to here


if __name__ == "__main__":
    check("tf1", solve)
