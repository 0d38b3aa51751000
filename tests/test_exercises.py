"""Exercises: an open gap is told apart, solutions pass, and plausible wrong answers are caught."""

import contextlib
import difflib
import io
import os
import re

import pytest
from helpers import ROOT, start

FOLDER = ROOT / "exercises"
FRAMEWORKS = ("torch", "tf1")
CORRECTION = "2 * (np.log(2) - u - F.softplus(-2 * u))"
STABLE = f"{CORRECTION} | {CORRECTION.replace('F.', 'tf.nn.')}"
# By exercise: edits of its solution, each a wrong answer, and a part of what the check then says.
# Where frameworks differ, "torch text | tf1 text".
WRONG = {
    "1_1_gaussian_logp": [
        ("0.5 * np.log(2 * np.pi)", "np.log(2 * np.pi)", "logp[0] should be -0.918939, got"),
        ("0.5 * z**2 + log_std", "0.5 * z**2 - log_std", "logp["),
        ("-(0.5 * z**2 + log_std", "(0.5 * z**2 - log_std", "logp["),
        ("0.5 * z**2", "0.5 * z", "logp["),
        ("sum(logp, 1) | reduce_sum(logp, 1)", "mean(logp, 1) | reduce_mean(logp, 1)", "logp["),
        (
            "torch.sum(logp, 1) | tf.reduce_sum(logp, 1)",
            "logp",
            "should have shape [5], got [5, 3]",
        ),
        ("sum(logp, 1)", "sum(logp)", "should have shape [5], got []"),
        ("sum(logp, 1)", "sum(logp, 1, True)", "should have shape [5], got [5, 1]"),
        ("+ log_std +", "+ log_std[0] +", "logp["),
        ("exp(log_std)", "exp(log_std[0])", "logp["),
        (
            "/ torch.exp(log_std) | / tf.exp(log_std)",
            "/ (torch.exp(log_std) + 1e-8) | / (tf.exp(log_std) + 1e-8)",
            "logp[",
        ),
        (
            "torch.sum(logp, 1) | tf.reduce_sum(logp, 1)",
            "torch.log(torch.prod(torch.exp(logp), 1)) | tf.log(tf.reduce_prod(tf.exp(logp), 1))",
            "got -inf",
        ),
        (
            "(a - mu)",
            "(a - mu.detach()) | (a - tf.stop_gradient(mu))",
            "no gradient of logp reaches mu",
        ),
        ("return torch.sum | return tf.reduce_sum", "torch.sum | tf.reduce_sum", "got NoneType"),
        (
            "sum(logp, 1)",
            "sum(logp, 1).double() | sum(tf.cast(logp, tf.float64), 1)",
            "dtype float32",
        ),
    ],
    "1_2_gaussian_policy": [
        (
            'self.net = mlp([obs_dim, *hidden_sizes | self.net = MLP("pi", [obs_dim, *hidden_sizes',
            'self.net = mlp([obs_dim | self.net = MLP("pi", [obs_dim',
            "numbers to train",
        ),
        ("act_dim], rng)", "act_dim], np.random.default_rng())", "the same rng"),
        (
            "return self.net(o)",
            "return torch.tanh(self.net(o)) | return tf.tanh(self.net(o))",
            "mu is linear in o",
        ),
        ("return self.net(o), self.log_std", "return self.net(o)", "should return mu and log_std"),
        (
            "nn.Parameter(torch | self.state = [self.log_std, *",
            "(torch | self.state = [*",
            "numbers to train",
        ),
        ("0.5 * np.log(2 * np.pi)", "np.log(2 * np.pi)", "logp["),
        ("2 * np.pi * np.e", "2 * np.pi", "entropy["),
        (
            "return entropy.expand(len(mu)) | return tf.broadcast_to(entropy, tf.shape(mu)[:1])",
            "return entropy",
            "entropy should have shape [6], got []",
        ),
        (
            "return mlp_numpy(layers, o), log_std",
            "return np.tanh(mlp_numpy(layers, o)), log_std",
            "dist_numpy",
        ),
        ("np.exp(log_std) * noise", "noise", "actions should be Gaussian with"),
        ("np.exp(log_std) * noise", "np.exp(2 * log_std) * noise", "actions should be Gaussian"),
        ("np.exp(log_std) * noise", "np.exp(log_std).mean() * noise", "actions should be Gaussian"),
        (
            "rng.standard_normal(mu.size, np.float32)",
            "rng.standard_normal(1, np.float32)",
            "correlation",
        ),
        (
            "rng.standard_normal(mu.size, np.float32)",
            "np.random.standard_normal(mu.size)",
            "float32",
        ),
        (
            "rng.standard_normal(mu.size, np.float32)",
            "np.float32(np.random.standard_normal(mu.size))",
            "the same rng should give the same action",
        ),
    ],
    "1_3_td3_losses": [
        (
            "q2_targ(o2, a2)",
            "q1_targ(o2, a2)",
            "backup[",
        ),
        ("torch.min( | tf.minimum(", "torch.max( | tf.maximum(", "backup["),
        ("(1 - d) * ", "", "d = 1"),
        ("(1 - d) * ", "d * ", "backup["),
        ("r + args.gamma", "args.gamma", "backup["),
        ("(high - low) / 2 * noise2", "noise2", "backup["),
        ("(high - low) / 2 * noise2", "(high - low) * noise2", "backup["),
        (
            "-args.noise_clip, args.noise_clip",
            "-100.0, 100.0",
            "backup[",
        ),
        (".clamp(low, high) | , low, high)", " | , low - 1, high + 1)", "backup["),
        ("pi_targ(o2) +", "pi(o2) +", "backup["),
        ("with torch.no_grad(): | tf.stop_gradient(", "if True: | (", "loss_q must not train"),
        ("(q2(o, a) - backup)", "(q1(o, a) - backup)", "loss_q should be"),
        ("loss_pi = -", "loss_pi = ", "loss_pi should be"),
        ("q1(o, pi(o))", "q1(o, a)", "loss_pi should be"),
        (
            "q1(o, pi(o))",
            "q1(o, pi(o).detach()) | q1(o, tf.stop_gradient(pi(o)))",
            "no gradient of loss_pi reaches the weights of pi",
        ),
        ("return backup, loss_q, loss_pi", "return backup, loss_q", "got tuple of length 2"),
    ],
    "1_4_gae": [
        (
            "np.where(d, 0, last_v) | np.where(d, 0, v(np.float32(last_o)))",
            "last_v | v(np.float32(last_o))",
            "(terminated)",
        ),
        ("np.where(d, 0, | np.where(d, 0,", "np.where(True, 0, | np.where(True, 0,", "(cut short)"),
        ("next_adv, next_ret = 0, v2", "next_adv, next_ret = 0, 0", "ret["),
        ("next_adv, next_ret = 0, v2", "next_adv, next_ret = v2, v2", "adv["),
        ("gamma * lam * next_adv", "gamma * next_adv", "adv["),
        ("gamma * lam * next_adv", "lam * next_adv", "adv["),
        ("r[t] + gamma * next_ret", "r[t] + gamma * lam * next_ret", "ret["),
        ("            v2 = values[t]\n", "", "adv["),
        ("- values[t]", "", "adv["),
        ("return adv, ret", "return (adv - adv.mean()) / (adv.std() + 1e-8), ret", "adv["),
        ("return adv, ret", "return adv.astype(float), ret", "float32"),
        (
            "for start, end, v2 in zip((0, *ends), ends, last_v):",
            "for start, end, v2 in [(0, len(r), last_v[-1])]:",
            "11 (cut short)",
        ),
    ],
    "1_5_tanh_gaussian": [
        (
            "    logp = logp - 2 * (np.log(2) - u - F.softplus(-2 * u))\n | "
            "    logp = logp - 2 * (np.log(2) - u - tf.nn.softplus(-2 * u))\n",
            "",
            "integrated over a",
        ),
        ("logp = logp - 2", "logp = logp + 2", "integrated over a"),
        ("logp = logp - 2 * (", "logp = logp - (", "integrated over a"),
        (
            STABLE,
            "torch.log(1 - torch.tanh(u) ** 2) | tf.log(1 - tf.tanh(u) ** 2)",
            "for u =",
        ),
        (
            STABLE,
            "torch.log(1 - torch.tanh(u) ** 2 + 1e-6) | tf.log(1 - tf.tanh(u) ** 2 + 1e-6)",
            "for u =",
        ),
        (
            "F.softplus(-2 * u) | tf.nn.softplus(-2 * u)",
            "torch.log(1 + torch.exp(-2 * u)) | tf.log(1 + tf.exp(-2 * u))",
            "for u =",
        ),
        ("sum(logp, 1)", "sum(logp)", "should have shape [5], got []"),
        ("+ log_std +", "+", "integrated over a"),
        (
            "F.softplus(-2 * u) | tf.nn.softplus(-2 * u)",
            "F.softplus(-2 * u.detach()) | tf.nn.softplus(-2 * tf.stop_gradient(u))",
            "d logp / d u",
        ),
    ],
    "1_6_conjugate_gradient": [
        (" + damping * p", "", "damping"),
        (" + damping * p", " - damping * p", "damping"),
        (
            "        p = r + rr / rr_old * p\n | p = r + tf.div_no_nan(rr, rr_old) * p",
            " | p = p",
            "x[",
        ),
        ("p = r + rr / rr_old * p | p = r + tf.div_no_nan(rr, rr_old) * p", "p = r", "x["),
        (
            "rr / rr_old * p | tf.div_no_nan(rr, rr_old) * p",
            "rr_old / rr * p | tf.div_no_nan(rr_old, rr) * p",
            "x[",
        ),
        ("x = x + alpha * p", "x = x - alpha * p", "x["),
        ("r = r - alpha * hp", "r = r + alpha * hp", "x["),
        ("for _ in range(iters)", "for _ in range(iters + 1)", "fewer|x["),
        (
            "if rr <= 1e-12 * (g @ g): | tf.div_no_nan(rr, dot(p, hp))",
            "if False: | rr / dot(p, hp)",
            "nan",
        ),
        (
            "create_graph=True | p = tf.stop_gradient(p)",
            "create_graph=False | p = tf.identity(p)",
            "error|nan",
        ),
        ("return x\n", "return x[:2]\n", "should have shape"),
        ("return x\n", "return x * 2\n", "x["),
    ],
    "1_7_replay_and_polyak": [
        ("(self.ptr + 1) % self.max_size", "min(self.ptr + 1, self.max_size - 1)", "transition"),
        ("(self.ptr + 1) % self.max_size", "self.ptr + 1", "IndexError"),
        ("min(self.size + 1, self.max_size)", "self.size + 1", "IndexError"),
        ("min(self.size + 1, self.max_size)", "self.max_size", "never stored"),
        ("rng.integers(self.size", "rng.integers(max(1, self.size - 1)", "lack transition"),
        ("rng.integers(self.size", "np.random.randint(self.size", "the same generator"),
        (
            "rng.integers(self.size, size=batch_size)",
            "rng.choice(self.size, batch_size, replace=False)",
            "ValueError",
        ),
        (
            "rng.integers(self.size, size=batch_size)",
            "np.sort(rng.integers(self.size, size=batch_size) // 2)",
            "lack transition",
        ),
        ("self.o2[i], self.d[i]", "self.o2[rng.permutation(i)], self.d[i]", "never stored"),
        ("self.o2[self.ptr], self.d[self.ptr] = o2, d", "self.d[self.ptr] = d", "never stored"),
        ("self.r[i],", "self.r[i][:, None],", "should be [1] of float32, got [1, 1]"),
        ("1 - polyak", "polyak", "targ["),
        (
            "x_targ.lerp_(x, 1 - polyak) | x_targ.assign_add((1 - polyak) * (x - x_targ))",
            "x_targ.lerp(x, 1 - polyak) | x_targ + (1 - polyak) * (x - x_targ)",
            "targ[",
        ),
        (
            "x_targ.lerp_(x, 1 - polyak) | x_targ.assign_add((1 - polyak) * (x - x_targ))",
            "x.lerp_(x_targ, polyak) | x.assign_sub(polyak * (x - x_targ))",
            "targ[",
        ),
        ("with torch.no_grad(): | tf.group(", "if True: | print(", "RuntimeError|got None"),
    ],
    "2_1_value_fitting": [
        ('"stays": "AverageVVals"', '"stays": "LossV"', "LossV of seed 0 goes from"),
        ('"stays": "AverageVVals"', '"stays": "V"', "should be one of"),
        ('"x": 0.99 * 0.97', '"x": 0.99', "the script computes 17.7"),
        ('"x": 0.99 * 0.97', '"x": "gamma"', "should be a number"),
        ('"horizon": 25', '"horizon": 100', "not 100 steps"),
        ('"changes": "both"', '"changes": "variance"', "expected advantages differ by 0.9222"),
        ('"lam": 1.0', '"lam": 0.0', "with lam = 0"),
        ('"odd_seed": 2', '"odd_seed": 4', "seed 4 ends at 601"),
        ('"odd_column": "StdVVals"', '"odd_column": "LossV"', "LossV is 1806 in this run"),
        ('"odd_column": "StdVVals"', '"odd_column": "AverageEpRet"', "shows why"),
        ('"odd_column": "StdVVals"', '"odd_column": None', "still None"),
    ],
    "2_2_silent_shape": [
        ('"column": "StdQ1Vals"', '"column": "AverageQ1Vals"', "AverageQ1Vals does not say"),
        ('"shape": (64, 64)', '"shape": (64, 1)', "does not have shape (64, 1)"),
        ('"pulled_to": 8', '"pulled_to": 6', "still has a slope"),
        ('"pulled_to": 8', '"pulled_to": 10', "still has a slope"),
        ('"floor": "r"', '"floor": "a"', "another part of a transition"),
        ('"floor": "r"', '"floor": None', "still None"),
    ],
}
CASES = [
    pytest.param(name, framework, edit, id=f"{name[:3]}-{framework}-{i}")
    for name, edits in WRONG.items()
    for i, edit in enumerate(edits)
    for framework in FRAMEWORKS
]
LEARNS = "solutions/1_2_gaussian_policy_tf1"  # it compiles and trains: in a process of its own
EXERCISES = [(name, framework) for name in WRONG for framework in FRAMEWORKS]


def source(name, framework, folder="."):
    return (FOLDER / folder / f"{name}_{framework}.py").read_text()


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs a text as a program; it returns the exit code and the output."""
    monkeypatch.syspath_prepend(FOLDER)
    from checks import silent_shape

    monkeypatch.setattr(silent_shape, "FOLDER", tmp_path)

    def run_text(text, name="exercise.py"):
        path, out, code = tmp_path / name, io.StringIO(), 0
        path.write_text(text)
        with contextlib.redirect_stdout(out):
            try:
                exec(compile(text, path, "exec"), {"__name__": "__main__", "__file__": str(path)})
            except SystemExit as end:
                code = end.code
        return code, out.getvalue()

    return run_text


def edited(name, framework, old, new):
    """Return a solution with one change, for both or for this framework."""
    side = FRAMEWORKS.index(framework)
    old, new = (x.split(" | ")[side] if " | " in x else x for x in (old, new))
    _, code = source(name, framework, "solutions").split('"""\n', 1)
    assert old in code
    return code.replace(old, new)


@pytest.mark.parametrize(("name", "framework"), EXERCISES)
def test_an_open_gap_is_told(name, framework, run):
    code, out = run(source(name, framework))
    assert code == 1
    assert out.startswith(f"Exercise {name[0]}.{name[2]}: ")
    said = re.findall("^  open   .*", out, re.M)
    assert said
    assert "is still" in said[0]
    assert out.endswith("\nNot yet. Change your code and run this file again.\n")
    assert "Traceback" not in out


@pytest.mark.parametrize(("name", "framework"), [x for x in EXERCISES if "_".join(x) not in LEARNS])
def test_a_solution_passes(name, framework, run, tmp_path):
    script = ROOT / f"ddpg_{framework}.py"
    (tmp_path / f"my_2_2_{script.name}").write_text(script.read_text())
    code, out = run(source(name, framework, "solutions"))
    assert (code, out.splitlines()[-1]) == (0, "All correct."), out
    assert len(re.findall("^  ok ", out, re.M)) >= 5


@pytest.mark.parametrize(("name", "framework", "edit"), CASES)
def test_a_wrong_answer_is_caught(name, framework, edit, run):
    old, new, said = edit
    code, out = run(edited(name, framework, old, new))
    assert code == 1
    assert any(part in out for part in said.split("|")), out
    assert "Traceback" not in out


def test_learning_is_checked(run, monkeypatch):
    from checks import gaussian_policy

    monkeypatch.setattr(gaussian_policy, "EPOCHS", 2)
    code, out = run(source("1_2_gaussian_policy", "torch", "solutions"))
    assert code == 1
    assert "wrong  PPO should reach an average return of 300 by the end, got 1" in out


BACKUP = "r + args.gamma * (1 - d) * q_targ"
MENDS = {  # by what was changed in the broken copy: is it right?
    "nothing": ("", "", False),
    "r alone": (BACKUP, "r[:, None] + args.gamma * (1 - d) * q_targ", False),
    "r and d": (BACKUP, "r[:, None] + args.gamma * (1 - d[:, None]) * q_targ", True),
    "Q alone": ("q1_vals = q1(o, a)", "q1_vals = q1(o, a)[:, 0]", False),
    "Q and its target": (
        "q1(o, a)\n|q1_targ(o2, a2)\n",
        "q1(o, a)[:, 0]\n|q1_targ(o2, a2)[:, 0]\n",
        True,
    ),
    "one transition": (
        "update_after: NonNegativeInt = 1000",
        "update_after: NonNegativeInt = 1",
        False,
    ),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("mend", MENDS)
def test_a_mended_copy_is_judged_by_its_numbers(mend, framework, run, tmp_path, monkeypatch):
    from checks import silent_shape

    if framework == "tf1":  # compiling takes longer than the rest: run the plain graph
        import common.tf1_utils

        monkeypatch.setattr(common.tf1_utils, "compiled", common.tf1_utils.tf.function)
    old, new, right = MENDS[mend]
    text = silent_shape.broken(framework)
    for part, other in zip(old.split("|"), new.split("|")):
        assert part in text
        text = text.replace(part, other)
    (tmp_path / f"my_2_2_ddpg_{framework}.py").write_text(text)
    code, out = run(source("2_2_silent_shape", framework, "solutions"))
    assert code == (0 if right else 1), out
    assert right or f"wrong  my_2_2_ddpg_{framework}.py: " in out


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_broken_copy_is_written_once(framework, run, tmp_path):
    copy = tmp_path / f"my_2_2_ddpg_{framework}.py"
    _, out = run(source("2_2_silent_shape", framework))
    assert f"Wrote {copy.name}" in out
    lines, script = copy.read_text().splitlines(), (ROOT / f"ddpg_{framework}.py").read_text()
    assert len([line for line in lines if line not in script.splitlines()]) == 1
    copy.write_text("mine")
    _, out = run(source("2_2_silent_shape", framework))
    assert (copy.read_text(), "Wrote" in out) == ("mine", False)


@pytest.mark.parametrize(("name", "framework"), EXERCISES)
def test_a_solution_only_fills_the_gap(name, framework):
    exercise, solution = source(name, framework), source(name, framework, "solutions")
    gap = re.compile(r" *# ---- your code: from here\n.*# ---- to here\n", re.S)
    assert len(gap.findall(exercise)) == 1
    begin = re.search("^(def |class |ANSWERS =)", exercise, re.M).start()
    for part in gap.split(exercise[begin:]):
        missing = set(part.splitlines()) - set(solution.splitlines())
        assert not missing


@pytest.mark.parametrize("folder", [".", "solutions"])
@pytest.mark.parametrize("name", WRONG)
def test_siblings_differ_only_where_the_frameworks_do(name, folder):
    torch, tf1 = (source(name, x, folder).splitlines() for x in FRAMEWORKS)
    shared = difflib.SequenceMatcher(None, torch, tf1, autojunk=False).get_matching_blocks()
    assert len(torch) - sum(block.size for block in shared) <= 18


@pytest.mark.parametrize(("file", "code"), [(f"{LEARNS}.py", 0), ("1_4_gae_torch.py", 1)])
def test_it_runs_from_any_folder(file, code, tmp_path):
    env = {**os.environ, "XLA_FLAGS": ""}  # the suite compiles without optimising, which is slower
    run = start(FOLDER / file, cwd=tmp_path, env=env)
    assert (run.returncode, run.stderr) == (code, "")
    assert "wrong" not in run.stdout
