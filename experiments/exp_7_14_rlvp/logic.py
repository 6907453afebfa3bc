"""Formulas, sequents and the kernel that checks proofs: the part of the theorem environment that has to be right.

Formulas are nested tuples: ("atom", "A"), ("imp", p, q), ("and", p, q), ("or", p, q), ("eq", s, t); terms are ("var", "a")
and ("fun", "f", t). A proof is a tree (rule, arguments, children); `check` reads it against the sequent without any help
from the tactics that made it. The rules are those of intuitionistic sequent calculus, and rewriting with an equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Formula = tuple[Any, ...]
Term = tuple[Any, ...]
SIGNS = {"imp": "->", "and": "/\\", "or": "\\/"}


class Sequent(NamedTuple):
    """Named hypotheses, in order, and the conclusion."""

    hyps: tuple[tuple[str, Formula], ...]
    goal: Formula

    def find(self, name: str) -> Formula | None:
        """The hypothesis of that name."""
        return next((formula for own, formula in self.hyps if own == name), None)

    def with_hyps(self, *new: tuple[str, Formula], without: str | None = None) -> Sequent:
        """The sequent with further hypotheses, and without one."""
        return Sequent((*(hyp for hyp in self.hyps if hyp[0] != without), *new), self.goal)


class Proof(NamedTuple):
    """One inference: its rule, the rule's arguments (names, directions) and the proofs of its premises."""

    rule: str
    args: tuple[str, ...] = ()
    children: tuple[Any, ...] = ()


def show(formula: Formula) -> str:
    """Formula or term as text, with brackets around each compound part."""
    kind = formula[0]
    if kind in ("atom", "var"):
        return str(formula[1])
    if kind == "fun":
        return f"{formula[1]}({show(formula[2])})"
    if kind == "eq":
        return f"{show(formula[1])}={show(formula[2])}"
    left, right = (f"({show(part)})" if part[0] in SIGNS else show(part) for part in formula[1:])
    return f"{left}{SIGNS[kind]}{right}"


def replace(thing: Formula, old: Term, new: Term) -> Formula:
    """Formula or term with every occurrence of the term `old` replaced by `new`."""
    if thing == old:
        return new
    if thing[0] in ("atom", "var"):
        return thing
    if thing[0] == "fun":
        return ("fun", thing[1], replace(thing[2], old, new))
    return (thing[0], *(replace(part, old, new) for part in thing[1:]))


def premises_of(formula: Formula, goal: Formula) -> list[Formula] | None:
    """[A1, .., An] where the formula reads A1 -> .. -> An -> goal; None where it does not end in the goal."""
    found = []
    while formula != goal:
        if formula[0] != "imp":
            return None
        found.append(formula[1])
        formula = formula[2]
    return found


def premises(sequent: Sequent, rule: str, args: Sequence[str]) -> list[Sequent] | None:
    """What is left to prove once the rule was applied to the sequent; None where it does not apply."""
    hyps, goal = sequent
    if rule == "exact":
        return [] if len(args) == 1 and sequent.find(args[0]) == goal else None
    if rule == "reflexivity":
        return [] if not args and goal[0] == "eq" and goal[1] == goal[2] else None
    if rule == "intro":
        if len(args) != 1 or goal[0] != "imp" or sequent.find(args[0]) is not None:
            return None
        return [Sequent(hyps, goal[2]).with_hyps((args[0], goal[1]))]
    if rule == "split":
        return [Sequent(hyps, part) for part in goal[1:]] if not args and goal[0] == "and" else None
    if rule in ("left", "right"):
        return [Sequent(hyps, goal[1 if rule == "left" else 2])] if not args and goal[0] == "or" else None
    used = sequent.find(args[0]) if args else None
    if used is None:
        return None
    if rule == "apply":
        found = premises_of(used, goal) if len(args) == 1 and used != goal else None
        return None if found is None else [Sequent(hyps, formula) for formula in found]
    if rule == "destruct":
        return destructed(sequent, used, args)
    if rule == "rewrite" and len(args) == 2 and args[1] in ("->", "<-") and used[0] == "eq":
        old, new = used[1:] if args[1] == "->" else used[:0:-1]
        changed = replace(goal, old, new)
        return None if changed == goal else [Sequent(hyps, changed)]
    return None


def destructed(sequent: Sequent, used: Formula, args: Sequence[str]) -> list[Sequent] | None:
    """Premises of taking a conjunction or a disjunction apart, the hypothesis args[0], under the fresh names that follow."""
    name, *fresh = args
    if len(set(fresh)) < len(fresh) or any(sequent.find(other) is not None for other in fresh):
        return None
    if used[0] == "and" and len(fresh) == 2:
        return [sequent.with_hyps((fresh[0], used[1]), (fresh[1], used[2]), without=name)]
    if used[0] == "or" and len(fresh) == 1:
        return [sequent.with_hyps((fresh[0], part), without=name) for part in used[1:]]
    return None


def check(sequent: Sequent, proof: Any) -> bool:
    """The kernel: whether the tree proves the sequent. Anything that is not a proof is False, never an exception."""
    try:
        pending = [(sequent, proof)]
        while pending:
            current, tree = pending.pop()
            if not isinstance(tree, Proof):
                return False
            needed = premises(current, tree.rule, tree.args)
            if needed is None or len(needed) != len(tree.children):
                return False
            pending += list(zip(needed, tree.children, strict=True))
    except (TypeError, ValueError, IndexError, RecursionError):
        return False
    return True


def atoms(formula: Formula) -> set[str]:
    """Names of the propositional atoms."""
    return {formula[1]} if formula[0] == "atom" else {name for part in formula[1:] for name in atoms(part)}


def holds(formula: Formula, world: set[str]) -> bool:
    """Classical truth where exactly the atoms of `world` are true (no equations)."""
    kind, *parts = formula
    if kind == "atom":
        return parts[0] in world
    left, right = (holds(part, world) for part in parts)
    return {"imp": not left or right, "and": left and right, "or": left or right}[kind]
