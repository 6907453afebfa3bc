"""The same proofs in Coq, where `coqtop` is installed: an independent judge of the kernel in `logic`.

Nothing but the parity test needs it. A statement becomes a lemma whose premises are named binders, each inference one
tactic with explicit names, so that both sides walk through the same goals.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from experiments.exp_7_14_rlvp.logic import Formula, Proof, Sequent, premises

SIGNS = {"imp": "->", "and": "/\\", "or": "\\/"}
SECONDS = 20


def formula_text(formula: Formula) -> str:
    """A formula or term in Coq's syntax, every compound part in brackets."""
    kind = formula[0]
    if kind in ("atom", "var"):
        return str(formula[1])
    if kind == "fun":
        return f"({formula[1]} {formula_text(formula[2])})"
    sign = "=" if kind == "eq" else SIGNS[kind]
    return f"({formula_text(formula[1])} {sign} {formula_text(formula[2])})"


def names(formula: Formula, kind: str) -> set[str]:
    """Names of the leaves of a kind: atom, var, or fun for the functions."""
    if formula[0] in ("atom", "var"):
        return {formula[1]} if formula[0] == kind else set()
    parts = formula[2:] if formula[0] == "fun" else formula[1:]
    own = {formula[1]} if formula[0] == kind == "fun" else set()
    return own.union(*(names(part, kind) for part in parts))


def tactics(sequent: Sequent, proof: Proof) -> list[str]:
    """One Coq tactic per inference, in the order in which Coq shows the goals."""
    rule, args, children = proof
    texts = {"reflexivity": "reflexivity", "split": "split", "left": "left", "right": "right"}
    if rule == "rewrite":
        text = f"rewrite {args[1]} {args[0]}"
    elif rule == "destruct":
        fresh = f"{args[1]} {args[2]}" if len(args) == 3 else f"{args[1]} | {args[1]}"
        text = f"destruct {args[0]} as [{fresh}]"
    else:
        text = texts.get(rule) or f"{rule} {args[0]}"
    found = [f"{text}."]
    for goal, child in zip(premises(sequent, rule, args) or [], children, strict=True):
        found += tactics(goal, child)
    return found


def script(statement: Sequent, proof: Proof, name: str = "t") -> str:
    """A complete Coq file with one lemma; several can be joined if their names differ."""
    everything = [*(formula for _, formula in statement.hyps), statement.goal]
    lines = ["Section T.", "Variable U : Type."]
    for kind, typed in (("atom", "Prop"), ("var", "U"), ("fun", "U -> U")):
        found = sorted(set().union(*(names(formula, kind) for formula in everything)))
        lines += [f"Variables {' '.join(found)} : {typed}."] if found else []
    binders = "".join(f" ({own} : {formula_text(formula)})" for own, formula in statement.hyps)
    lines += [
        f"Lemma {name}{binders} : {formula_text(statement.goal)}.",
        "Proof.",
        *tactics(statement, proof),
        "Qed.",
        "End T.",
    ]
    return "\n".join(lines) + "\n"


def available() -> bool:
    """Whether this machine has Coq."""
    return shutil.which("coqtop") is not None


def accepts(text: str) -> bool:
    """Whether coqtop reads the file without an error. FileNotFoundError where Coq is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.v"
        path.write_text(text, encoding="utf-8")
        command = ["coqtop", "-q", "-batch", "-load-vernac-source", str(path)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.returncode == 0 and "Error" not in done.stdout + done.stderr
