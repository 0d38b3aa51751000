"""The bug hunt: every bug applies, runs and is caught; every original and every mend passes."""

import ast
import json
import shutil

import hunt
import numpy as np
import oracles
import pytest
from helpers import ROOT, SCRIPTS, as_flags, brief, only_run, progress, start
from watch import NotThisScript

from common.errors import SidespinError
from common.launch import parse_args

BUGS = [
    (script, number)
    for script in SCRIPTS
    for number in range(1, 1 + len(hunt.bugs(*script.split("_"))))
]


def broken_copy(script, number, folder, *edits):
    """Write a script with a bug to a folder; an edit replaces a text that has to be there."""
    algo, framework = script.split("_")
    text = hunt.broken(algo, framework, hunt.bugs(algo, framework)[number - 1])
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"my_{script}.py"
    path.write_text(text)
    return path


def verdict_of_two_ranks(path, algo):
    """Do what --check does, from a process that has imported the framework already."""
    oracles = ROOT / "exercises" / "oracles.py"
    done = start(oracles, algo, path, ranks=2, warm=path.stem.split("_")[-1])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert not answer["mistake"]
    return answer["problems"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_patches_apply_and_say_nothing_of_the_bug(script):
    algo, framework = script.split("_")
    bugs, original = hunt.bugs(algo, framework), (ROOT / f"{script}.py").read_text()
    assert len(bugs) >= 4
    for bug in bugs:
        text = hunt.broken(algo, framework, bug)
        ast.parse(text)
        old, new = set(original.splitlines()), set(text.splitlines())
        assert 0 < len(old ^ new) <= 5, "a small patch"
        assert "bug" not in "".join(new - old).lower()
        assert len(bug["hints"]) == len(set(bug["hints"])) == 3


def test_the_page_counts_the_bugs():
    assert f"{len(BUGS)} broken scripts" in (ROOT / "docs" / "bug_hunt.md").read_text()


@pytest.mark.parametrize(("script", "number"), BUGS)
def test_every_bug_is_silent_and_caught(script, number, tmp_path):
    algo, framework = script.split("_")
    path = broken_copy(script, number, tmp_path)
    if hunt.bugs(algo, framework)[number - 1].get("ranks"):
        assert oracles.check(path, algo) == [], "one rank does not show it"
        problems = verdict_of_two_ranks(path, algo)
    else:
        problems = oracles.check(path, algo)
    assert problems
    assert not any(problem.startswith("it stops") for problem in problems), "a silent bug"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_original_is_right(script):
    assert verdict_of_two_ranks(ROOT / f"{script}.py", script.split("_")[0]) == []


@pytest.mark.parametrize(
    ("script", "number", "wrong", "mended"),
    [
        (
            "ddpg_torch",
            1,
            "backup = r + args.gamma * q_targ",
            "backup = torch.where(d > 0, r, r + args.gamma * q_targ)",
        ),
        (
            "sac_torch",
            2,
            "        return self.center + self.half_range * torch.tanh(u), logp.sum(1)",
            "        y = torch.tanh(u)\n        logp = logp - torch.log(1 - y**2 + 1e-6)\n"
            "        return self.center + self.half_range * y, logp.sum(1)",
        ),
        (
            "ppo_torch",
            2,
            "-torch.max(ratio * adv, clipped * adv).mean()",
            "-torch.where(adv > 0, ratio.clamp(max=1 + args.clip_ratio),"
            " ratio.clamp(min=1 - args.clip_ratio)).mul(adv).mean()",
        ),
        (
            "trpo_tf1",
            1,
            "step = tf.sqrt(2 * args.delta / (dot(x, hvp(x)) + 1e-8)) * x",
            "step = -x / tf.sqrt(dot(x, hvp(x)) / (2 * args.delta))",
        ),
    ],
)
def test_a_bug_may_be_mended_in_other_words(script, number, wrong, mended, tmp_path):
    path = broken_copy(script, number, tmp_path, (wrong, mended))
    assert oracles.check(path, script.split("_")[0]) == []


@pytest.mark.parametrize(
    ("script", "right", "wrong"),
    [
        ("vpg_torch", "mu + np.exp(log_std) * noise", "mu + log_std * noise"),
        ("vpg_torch", "self.gamma * self.lam * next_adv", "self.lam * next_adv"),
        ("ppo_torch", "1 - args.clip_ratio, 1 + args.clip_ratio", "0, 1 + args.clip_ratio"),
        ("trpo_torch", "p = r + rr / rr_old * p", "p = r"),
        ("ddpg_torch", "targets = copy.deepcopy(model)", "targets = model"),
        (
            "ddpg_torch",
            "Adam(pi.parameters(), lr=args.pi_lr)",
            "Adam(pi.parameters(), lr=args.q_lr)",
        ),
        ("td3_torch", "if n % args.policy_delay:", "if n % args.policy_delay == 0:"),
        ("sac_torch", "q_pi = torch.min(q1(o, a), q2(o, a))", "q_pi = q1(o, a)"),
    ],
)
def test_mistakes_that_are_not_of_the_hunt_are_caught_too(script, right, wrong, tmp_path):
    text = (ROOT / f"{script}.py").read_text()
    assert text.count(right) == 1
    path = tmp_path / "my_script.py"
    path.write_text(text.replace(right, wrong))
    assert oracles.check(path, script.split("_")[0])


@pytest.mark.parametrize(
    ("script", "number", "what"),
    [
        ("ddpg_torch", 1, "target of a terminated step should be its reward"),
        ("ddpg_torch", 2, "the gradient of the policy's loss has the opposite direction"),
        ("ddpg_torch", 3, "should go 0.1 of the way to the networks in an update, but go 0.9"),
        ("ddpg_torch", 4, "returns d = 1 for a step that ran out of time"),
        ("ppo_torch", 1, "in an update, but makes 10"),
        ("trpo_torch", 5, "0.707 times the right length"),
        ("vpg_torch", 1, "of a path that runs out of time should be"),
    ],
)
def test_the_verdict_speaks_of_behaviour(script, number, what, tmp_path):
    problems = oracles.check(broken_copy(script, number, tmp_path), script.split("_")[0])
    assert what in " ".join(problems)


def test_both_qs_are_the_lower_one_at_times():
    """Or the oracles could not tell min from max, or one target network from two."""
    from watch import load, watch

    for algo in ("td3", "sac"):
        seen = watch(load(ROOT / f"{algo}_torch.py"), on_policy=False, **oracles.runs(algo)[0])
        o, a = (np.concatenate([u.batch[i] for u in seen.updates]) for i in range(2))
        q1, q2 = (oracles.q_value(seen.now.nets[f"targ.{name}"], o, a) for name in ("q1", "q2"))
        assert 0.1 < np.mean(q1 < q2) < 0.9
        assert sum(np.sum(u.batch[4]) for u in seen.updates) > 20, "terminated steps"


def test_from_a_broken_copy_to_a_mended_bug(tmp_path):
    for name in ("common", "exercises"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pyc*", ".*"))
    shutil.copy(ROOT / "ppo_torch.py", tmp_path)

    def type_in(*words, code=0):
        done = start("exercises/hunt.py", *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (code, "")
        return done.stdout

    printed = type_in("ppo")
    copy = tmp_path / "my_ppo.py"
    assert "bug 1 of" in printed
    assert "python exercises/hunt.py ppo --check my_ppo.py" in printed

    flags = as_flags(**brief("ppo_torch"))
    assert start("my_ppo.py", *flags, cwd=tmp_path, warm="torch").returncode == 0
    assert np.isfinite(progress(only_run(tmp_path / "runs"))).all(axis=None)

    hints = hunt.bugs("ppo", "torch")[0]["hints"]
    for given in (1, 2, 3, 3):
        lines = [f"hint {i + 1} of 3: {hint}" for i, hint in enumerate(hints[:given])]
        assert type_in("ppo", "--hint").splitlines() == lines

    printed = type_in("ppo", "--check", "my_ppo.py", code=1)
    assert "not right yet\n  - " in printed
    text = copy.read_text()
    copy.write_text(text.replace("(logp - logp_old).mean()", "torch.mean(logp_old - logp)"))
    printed = type_in("ppo", "--check", "my_ppo.py")
    assert "the maths is right" in printed
    assert hunt.bugs("ppo", "torch")[0]["title"] in printed
    assert "bug 2 of" in type_in("ppo", "--overwrite")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Let hunt.py write to a folder of its own."""
    shutil.copytree(ROOT / "exercises" / "bugs", tmp_path / "exercises" / "bugs")
    shutil.copy(ROOT / "sac_tf1.py", tmp_path)
    monkeypatch.setattr(hunt, "ROOT", tmp_path)
    monkeypatch.setattr(hunt, "MEMORY", tmp_path / "exercises" / ".hunt.json")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a2c"], "must be one of vpg, ppo, trpo, ddpg, td3, sac, got a2c"),
        ([], "missing ALGO"),
        (["sac", "--bug", "x"], "--bug must be a whole number from 1"),
        (["sac", "--bug", "0"], "sac_torch.py has bugs 1 to 5, there is no bug 0"),
        (["sac", "--framework", "tf1", "--bug", "99"], "there is no bug 99"),
        (["sac", "--hint"], "there is no bug to give a hint on yet: python "),
        (["sac", "--check", "nowhere.py"], "there is no file nowhere.py"),
        (["sac", "--framework", "tf1"], "exists: go on with it, or start afresh with --overwrite"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, project, monkeypatch):
    (project / "my_sac_tf1.py").write_text("# hours of work\n")
    monkeypatch.setattr("common.errors.command_line", True)
    monkeypatch.setattr("sys.argv", ["hunt.py", *words])
    with pytest.raises(SidespinError) as error:
        hunt.main(parse_args(hunt.Args, hunt.__doc__))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert (project / "my_sac_tf1.py").read_text() == "# hours of work\n"


@pytest.mark.parametrize(("script", "algo"), [("ppo_torch", "ddpg"), ("ddpg_torch", "td3")])
def test_another_algorithms_script_is_refused(script, algo):
    with pytest.raises(NotThisScript, match=f"{script}.py .*another algorithm's script"):
        oracles.check(ROOT / f"{script}.py", algo)


def test_a_script_that_fails_is_told_with_its_line(tmp_path):
    line = "        ratio = torch.exp(logp - logp.detach())\n"
    path = broken_copy("ppo_torch", 3, tmp_path, (line, "        ratio = logp - nothing\n"))
    number = 1 + path.read_text().splitlines().index("        ratio = logp - nothing")
    (problem,) = oracles.check(path, "ppo")
    assert problem.startswith(f"it stops in line {number} with NameError")
