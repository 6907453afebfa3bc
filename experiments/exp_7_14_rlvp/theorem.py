"""Theorems as an environment: the state is a list of goals, an action is a tactic, the end is checked by the kernel.

    env = gymnasium.make("Theorems-v0")
    prompt, info = env.reset(seed=3)      # A->B:h1 A:h2 a=b:h3 |-B/\\f(a)=f(b)
    env.step("split"); env.step("apply h1"); env.step("exact h2"); env.step("rewrite h3"); env.step("refl")

A theorem is a conjunction of parts that each follow from the premises. Progress is the share of the goals raised so far
that are closed: reachable where the parts are many and short (`wide`), and where there is one long part (`deep`) as good
as the outcome itself, for nothing is closed before the end. Success is a proof that `logic.check` accepts. With
`repeat_failure` as its only rule, the environment is there for progress, not for rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import gymnasium

from common.schema import within
from common.seeding import python_random
from experiments.exp_7_14_rlvp.calls import Call, Tool
from experiments.exp_7_14_rlvp.env import Reply, Rule, ToolEnv, repeat_failure
from experiments.exp_7_14_rlvp.logic import Formula, Proof, Sequent, check, premises, show

ENV_ID = "Theorems-v0"
ATOMS, VARIABLES = tuple("ABCDEFGH"), tuple("abcdmnpq")  # f is the function
PARTS = ("chain", "equal", "either", "both")
MOST_PARTS, LONGEST_PART = 4, 6
NAMES = tuple(f"h{number}" for number in range(1, 21))

_NAME = "h[0-9]{1,2}"
TOOLS = (
    Tool("intro", "intro"),
    Tool("split", "split"),
    Tool("left", "left"),
    Tool("right", "right"),
    Tool("reflexivity", "refl"),
    Tool("exact", "exact", (("name", _NAME),)),
    Tool("apply", "apply", (("name", _NAME),)),
    Tool("destruct", "destruct", (("name", _NAME),)),
    Tool("rewrite", "rewrite", (("name", _NAME),)),
    Tool("rewrite_back", "rewrite_back", (("name", _NAME),)),
)


class Theorem:
    """An open proof: the goals that are left, the first one current, and what was done so far.

    A tactic names no fresh hypothesis; `fresh` does.
    """

    def __init__(self, statement: Sequent) -> None:
        self.statement = statement
        self.goals: list[tuple[int, Sequent]] = [(0, statement)]
        self.done: dict[int, tuple[str, tuple[str, ...], list[int]]] = {}
        self.raised = 1

    def apply(self, call: Call) -> bool:
        """Does the tactic on the current goal; False where it does not apply, and then nothing changed."""
        if not self.goals:
            return False
        number, sequent = self.goals[0]
        rule, args = self.inference(sequent, call)
        left = premises(sequent, rule, args)
        if left is None:
            return False
        numbers = list(range(self.raised, self.raised + len(left)))
        self.done[number] = (rule, args, numbers)
        self.raised += len(left)
        self.goals[:1] = list(zip(numbers, left, strict=True))
        return True

    def inference(self, sequent: Sequent, call: Call) -> tuple[str, tuple[str, ...]]:
        """The kernel's rule and arguments behind a tactic."""
        if call.tool == "rewrite":
            return "rewrite", (*call.args, "->")
        if call.tool == "rewrite_back":
            return "rewrite", (*call.args, "<-")
        if call.tool == "intro":
            return "intro", tuple(fresh(sequent, 1))
        if call.tool == "destruct":
            used = sequent.find(call.args[0])
            return "destruct", (*call.args, *fresh(sequent, 2 if used is not None and used[0] == "and" else 1))
        return call.tool, call.args

    def proof(self, number: int = 0) -> Proof | None:
        """The tree of what was done; None while a goal is open."""
        if self.goals:
            return None
        rule, args, children = self.done[number]
        return Proof(rule, args, tuple(self.proof(child) for child in children))


def fresh(sequent: Sequent, count: int) -> list[str]:
    """The first names that no hypothesis has."""
    return [name for name in NAMES if sequent.find(name) is None][:count]


def leaves(theorem: Theorem) -> tuple[int, int]:
    """(closed, all) goals at which the proof does not branch on: those closed by a tactic, and those still open."""
    closed = sum(not children for _, _, children in theorem.done.values())
    return closed, closed + len(theorem.goals)


def conjunction(parts: list[Formula]) -> Formula:
    """A /\\ (B /\\ C) of the parts."""
    return parts[0] if len(parts) == 1 else ("and", parts[0], conjunction(parts[1:]))


def draw_part(stream: Any, kind: str, length: int, atoms: list[str], terms: list[str]) -> tuple[list[Formula], Formula]:
    """(premises, what follows from them); takes its atoms or variables off the lists, so that parts do not help each other."""
    if kind == "equal":
        names = [("var", terms.pop()) for _ in range(length + 1)]
        wrap = stream.random() < 0.5
        ends = (("fun", "f", names[0]), ("fun", "f", names[-1])) if wrap else (names[0], names[-1])
        return [("eq", old, new) for old, new in pairwise(names)], ("eq", *ends)
    if kind == "chain":
        names = [("atom", atoms.pop()) for _ in range(length + 1)]
        return [names[0], *(("imp", old, new) for old, new in pairwise(names))], names[-1]
    first, second = (("atom", atoms.pop()) for _ in range(2))
    if kind == "either":
        return [first], ("or", first, second) if stream.random() < 0.5 else ("or", second, first)
    return [("and", first, second)], first if stream.random() < 0.5 else second


def draw_statement(task: int, parts: int, length: int) -> Sequent:
    """The theorem of a task: `parts` parts of at most `length` steps; one part alone has exactly that many."""
    stream = python_random("theorem", task, parts, length)
    atoms, terms = stream.sample(ATOMS, len(ATOMS)), stream.sample(VARIABLES, len(VARIABLES))
    hyps: list[Formula] = []
    wanted: list[Formula] = []
    for _ in range(parts):
        steps = length if parts == 1 else stream.randint(1, length)
        kinds = [kind for kind, need, left in (
            ("equal", steps + 1, terms), ("chain", steps + 1, atoms), ("either", 2, atoms), ("both", 2, atoms)
        ) if need <= len(left) and (parts > 1 or kind in PARTS[:2])]  # fmt: skip
        if not kinds:
            break
        given, goal = draw_part(stream, stream.choice(kinds), steps, atoms, terms)
        hyps += given
        wanted.append(goal)
    stream.shuffle(hyps)
    return Sequent(tuple(zip(NAMES, hyps, strict=False)), conjunction(wanted))


class TheoremWorld:
    """A theorem to prove, and its proof so far."""

    def __init__(self, task: int, parts: int, length: int) -> None:
        within("parts", parts, 1, MOST_PARTS)
        within("length", length, 1, LONGEST_PART)
        self.theorem = Theorem(draw_statement(task, parts, length))
        self.limit = 4 + parts * (length + 1)
        self.errors: Counter[Call] = Counter()
        self.shown = self.theorem.statement.hyps

    def prompt(self) -> str:
        return self.display(self.theorem.statement, self.shown)

    def display(self, sequent: Sequent, hyps: tuple) -> str:
        return "".join(f"{show(formula)}:{name} " for name, formula in hyps) + f"|-{show(sequent.goal)} "

    def state(self) -> str:
        return "; ".join(self.display(sequent, sequent.hyps) for _, sequent in self.theorem.goals)

    def success(self) -> bool:
        """A closed proof that the kernel accepts."""
        proof = self.theorem.proof()
        return proof is not None and check(self.theorem.statement, proof)

    def progress(self) -> float:
        closed, total = leaves(self.theorem)
        return closed / total

    def credits(self, call: Call) -> list[str]:
        return []

    def unused_credits(self) -> int:
        return 0

    def apply(self, call: Call) -> Reply:
        """Does the tactic and shows the current goal; its hypotheses only where they are not those shown last."""
        if not self.theorem.apply(call):
            return Reply("error", failed=True)
        if not self.theorem.goals:
            return Reply("", mutated=True, done=True)
        current = self.theorem.goals[0][1]
        new = () if current.hyps == self.shown else current.hyps
        self.shown = current.hyps
        return Reply(f"{len(self.theorem.goals)} {self.display(current, new)}", mutated=True)


class Theorems(ToolEnv):
    """Options beside ToolEnv's: `parts` of the conjunction, and `length`, the most steps of a part."""

    tools = TOOLS
    rules: ClassVar[Mapping[str, Rule]] = {"repeat_failure": repeat_failure}
    rules_text = "never repeat a failed call. "
    world_options = ("parts", "length")

    def make_world(self, task: int, options: Mapping[str, Any]) -> TheoremWorld:
        return TheoremWorld(task, int(options.get("parts", 3)), int(options.get("length", 2)))


if ENV_ID not in gymnasium.registry:
    gymnasium.register(id=ENV_ID, entry_point="experiments.exp_7_14_rlvp.theorem:Theorems")
