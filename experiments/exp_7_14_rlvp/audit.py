"""Attacks rules, rewards and the proof kernel before they are used: `python -m experiments.exp_7_14_rlvp.audit`.

The loophole suite; perfect scripts must score and be clean, scripts that obey and fail must not score; nothing that is no
call may have an effect; forged proofs must be refused and nothing false be proved; the splits must share no task.
Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import product

from common.sandbox import isolation
from common.seeding import python_random
from experiments.exp_7_14_rlvp import data, theorem
from experiments.exp_7_14_rlvp.calls import Call
from experiments.exp_7_14_rlvp.csops import CSOps
from experiments.exp_7_14_rlvp.data import DOMAINS, SPLITS
from experiments.exp_7_14_rlvp.env import ToolEnv
from experiments.exp_7_14_rlvp.fileops import FileOps
from experiments.exp_7_14_rlvp.logic import Formula, Proof, Sequent, atoms, check, holds
from experiments.exp_7_14_rlvp.loopholes import cases, failures
from experiments.exp_7_14_rlvp.scripts import FAILING, PERFECT, Mix, script

WORLDS = (
    ("fileops", {"stages": 1}), ("fileops", {"stages": 3}), ("csops", {}),
    ("theorems", {"parts": 3, "length": 2}), ("theorems", {"parts": 1, "length": 6}),
)  # fmt: skip
TASKS = 200
SHELL_TASKS = 10  # a command takes some milliseconds
TACTICS = [tool for tool in theorem.TOOLS for _ in range(5 if tool.name in ("intro", "exact") else 1)]
NO_CALLS = (
    "", " ", "submit ", " submit", "SUBMIT", "submit\nsubmit", "test; submit", "resolve", "call", "exact", "list", "read",
    "rewrite h1 h2", "exact h1 ", "exact h1\n", "delete s1/*", "write s1/web.cfg", "write s1/web.cfg port=10",
    'Action: submit {}', "s" * 20_000,
)  # fmt: skip


def attacked() -> list[tuple[str, dict]]:
    """The worlds; the terminal where the sandbox isolates."""
    return [*WORLDS, *([("terminal", {})] if isolation().strong else [])]


def play(env: ToolEnv, options: dict, mix: Mix) -> tuple[bool, int]:
    """(success, violations) of a scripted episode; one that does not end fails."""
    env.reset(options=dict(options))
    violations = 0
    for text in script(env.world, mix, python_random("audit", options["task"])):
        _, _, terminated, truncated, info = env.step(text)
        violations += len(info["violations"])
        if terminated or truncated:
            return bool(info["success"]), violations
    return False, violations


def scripted() -> Iterator[str]:
    """Perfect scripts score and are clean; failing ones are clean and do not score."""
    for domain, options in attacked():
        env = DOMAINS[domain].make_env()
        count = (SHELL_TASKS if domain == "terminal" else TASKS) // 2
        for task in data.tasks("train", options, count) + data.tasks("test", options, count):
            if play(env, task, PERFECT) != (True, 0):
                yield f"{domain} {task}: a perfect script does not score, or breaks a rule"
            if domain != "theorems" and play(env, task, FAILING) != (False, 0):
                yield f"{domain} {task}: a script that obeys and fails scores, or breaks a rule"


def no_calls() -> Iterator[str]:
    """What is no call changes nothing, ends nothing and pays nothing; ending at once does not score."""
    for domain, options in attacked():
        env = DOMAINS[domain].make_env()
        for text in NO_CALLS:
            env.reset(options={"task": 1, **options})
            before = env.world.state()
            _, reward, terminated, _, info = env.step(text)
            if reward or terminated or info["credits"] or info["violations"] or env.world.state() != before:
                yield f"{domain}: {text[:40]!r} has an effect"
            if not info["parts"]["malformed"] and not info["failed"]:
                yield f"{domain}: {text[:40]!r} is read as a call"
    for kind, end in ((FileOps, "submit"), (CSOps, "resolve refund")):
        for number in range(30):
            env = kind()
            env.reset(options={"task": number})
            if env.step(end)[1]:
                yield f"{kind.__name__} task {number}: {end} at once scores"


def random_formula(stream: random.Random, depth: int) -> Formula:
    """A formula over three atoms."""
    if depth == 0 or stream.random() < 0.3:
        return ("atom", stream.choice("ABC"))
    return (stream.choice(("imp", "and", "or")), random_formula(stream, depth - 1), random_formula(stream, depth - 1))


def is_tautology(formula: Formula) -> bool:
    """True in every classical world."""
    names = sorted(atoms(formula))
    worlds = ({name for name, there in zip(names, row, strict=True) if there} for row in product((0, 1), repeat=len(names)))
    return all(holds(formula, world) for world in worlds)


def random_call(stream: random.Random) -> Call:
    """A tactic with some name; the two that most proofs need come more often."""
    tool = stream.choice(TACTICS)
    return Call(tool.name, tuple(stream.choice(theorem.NAMES[:4]) for _ in tool.params))


def random_proofs(statements: int, tries: int = 30) -> Iterator[tuple[Sequent, Proof]]:
    """Random statements that random tactics happened to prove, with the proofs."""
    stream = python_random("audit", "proofs")
    for _ in range(statements):
        trial = theorem.Theorem(Sequent((), random_formula(stream, 2)))
        for _ in range(tries):
            trial.apply(random_call(stream))
        proof = trial.proof()
        if proof is not None:
            yield trial.statement, proof


def proofs(statements: int = 2000) -> Iterator[str]:
    """Random tactics never prove what is not a tautology, and what they close the kernel accepts; forgeries are refused."""
    proved = 0
    for statement, proof in random_proofs(statements):
        proved += 1
        if not check(statement, proof):
            yield f"{statement.goal}: closed by tactics, refused by the kernel"
        if not is_tautology(statement.goal):
            yield f"{statement.goal}: proved, and false"
        more = Sequent((), ("and", statement.goal, ("atom", "Z")))
        if any(check(more, forged) for forged in (proof, Proof("split", (), (proof, proof)), Proof("split", (), (proof,)))):
            yield f"{statement.goal}: a forged proof of more is accepted"
    if proved < statements // 40:
        yield f"only {proved} of {statements} random statements were proved: the check says little"


def overlaps() -> Iterator[str]:
    """No two splits share a task, by number or by what it says."""
    for domain, options in attacked():
        env, owner = DOMAINS[domain].make_env(), dict[str, str]()
        for split, numbers in SPLITS.items():
            for number in numbers[:1000]:
                world = env.make_world(number, options)
                text = world.prompt() + world.state() + str(getattr(world, "number", ""))
                if owner.setdefault(text, split) != split:
                    yield f"{domain} {options}: task {number} of {split} is also one of {owner[text]}"


def main() -> int:
    """Runs every attack; 1 if one succeeded."""
    suite = cases()
    holes = [hole for case in suite for hole in failures(case)]
    print(f"loophole suite: {len(suite)} trajectories")
    if not isolation().strong:
        print(f"the terminal is left out: {isolation().why}")
    for name, attack in (("scripts", scripted), ("no calls", no_calls), ("proofs", proofs), ("splits", overlaps)):
        found = list(attack())
        print(f"{name}: {len(found)} holes")
        holes += found
    for hole in holes[:50]:
        print(f"HOLE {hole}")
    print("no hole found" if not holes else f"{len(holes)} holes")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
