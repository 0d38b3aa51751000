"""Solution of exercise 2.2.

QFunction returns [B, 1] instead of [B], because the last layer has one output and nothing removes
that dimension. Broadcasting does the rest, without an error: r + gamma (1 - d) q_targ adds a [B] to
a [B, 1] and is a [B, B]: its entry i, j has r and d of transition j, and q_targ of transition i.

1. StdQ1Vals falls to about 1, where that of the right script grows to about 30.
2. (64, 64): each Q is compared with the targets of all transitions.
3. The mean of its row: (0 + 6 + 3 + 6 + 9 + 0) / 3 = 8. Q learns the mean reward of the batch,
   whatever the action, so the policy has nothing to climb.
4. r: within a row, the targets differ only by r, which Q cannot follow. The best it can do is the
   mean, and what remains is the variance.

Remove the dimension where it arises: in QFunction, so that all callers are right. A script may also
assert shapes; the comment "# [B]" at the end of such a line is the least it should have.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

from checks.silent_shape import check

ANSWERS = {
    "column": "StdQ1Vals",
    "shape": (64, 64),
    "pulled_to": 8,
    "floor": "r",
}

# In my_2_2_ddpg_tf1.py, in QFunction.__call__:
#     return tf.squeeze(q, 1)

if __name__ == "__main__":
    check("tf1", ANSWERS)
