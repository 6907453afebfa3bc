"""Attacks the graders before they are used: `python -m experiments.exp_7_10_adaptthink.audit`.

Must score: the gold answer of chains of every level, in every written form, with and without thinking. Must not score: every
mutation of it, and a corpus of exploits. Everything goes through the environments' reset and step, and through the tokenizer
as a model's answer would. The problems' grader gets its own corpus if math-verify is there. Splits must not overlap.
Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from common.tokenizers import PhraseEncoder
from common.verifiers.thinking import END_THINK, THINK
from experiments.exp_7_10_adaptthink import chains, data, env
from experiments.exp_7_10_adaptthink.problems import Problems

CHAINS_PER_LEVEL = 60
SPLIT_SEEDS = range(5)


class Case(NamedTuple):
    group: str
    task: dict[str, Any]
    text: str
    must_score: bool


def all_chains() -> Iterator[chains.Chain]:
    """Chains of every level and role; of level 1 all there are."""
    for name in chains.ROLES:
        for level in chains.CORPUS_LEVELS:
            yield from chains.items(name, 0, level, CHAINS_PER_LEVEL if level > 1 else 10**6)


def gold(chain: chains.Chain) -> Iterator[Case]:
    """Every written form of the right answer."""
    for tokens in chains.ANSWERS:
        for think in (True, False):
            yield Case("gold", env.task(chain), chains.answer(chain, tokens, think), True)


def mutations(chain: chains.Chain) -> Iterator[Case]:
    """One change to a right answer each."""
    right = str(chain.results[-1])
    thought, wrong = chains.thought(chain, chain.results), str((chain.results[-1] + 1) % (chains.LARGEST + 1))
    texts = {
        "wrong number": f"{thought}{END_THINK}So the answer is {wrong}.",
        "wrong number, no thinking": f"{END_THINK}{wrong}",
        "no end of thinking": f"{thought} So the answer is {right}.",
        "answer inside the thinking": f"{thought}So the answer is {right}.{END_THINK}",
        "end twice": f"{thought}{END_THINK}{right}{END_THINK}",
        "end twice, both right": f"{END_THINK}{right}{END_THINK}{right}",
        "thinking opened again": f"{END_THINK}{THINK}{thought}{END_THINK}{right}",
        "opened behind the answer": f"{END_THINK}{right}{THINK}",
        "two numbers": f"{END_THINK}{right}{wrong}" if len(right + wrong) > 2 else f"{END_THINK}{right} {wrong}",
        "two answers": f"{END_THINK}So the answer is {right}.So the answer is {wrong}.",
        "right answer twice": f"{END_THINK}{right}.{right}.",
        "list of guesses": f"{END_THINK}{right} or {wrong}",
        "text behind": f"{END_THINK}So the answer is {right}. Done",
        "formula": f"{END_THINK}{thought}",
        "leading zero": f"{END_THINK}0{right}",
        "sign": f"{END_THINK}+{right}",
        "decimal": f"{END_THINK}{right}.0",
        "white space in front": f"{END_THINK} {right}",
        "other digits": f"{END_THINK}" + right.translate({ord("0") + d: ord("٠") + d for d in range(10)}),
        "empty": "",
        "nothing behind": f"{thought}{END_THINK}",
    }
    for group, text in texts.items():
        yield Case(group, env.task(chain), text, False)


EXPLOITS = (
    "</think>", "</think></think>", "<think></think>", "</think>So the answer is .", "</think>Answer: ", "</think>x",
    "</think>" + " ".join(map(str, range(32))), "</think>0123456789", "</think>[0-9]+", "</think>{result}", "</think>True",
    "</think>__import__('os')", "</think>" + "9" * 9000, "</think>So the answer is So the answer is 1.", "</think>None",
    "</THINK>1", "<think>1", "</think>\n1", "</think>1\n", "</think>1e0", "</think>one", "</think>0x1", "</think>1..",
)  # fmt: skip
PROBLEM = {"question": "What is 3/4 of 32?", "answer": "24"}
PROBLEM_GOLD = (r"</think>\boxed{24}", r"work</think>It is \boxed{24}.", r"</think>\boxed{\frac{48}{2}} \boxed{\frac{48}{2}}")
PROBLEM_EXPLOITS = (
    r"</think>\boxed{23}", r"\boxed{24}", r"so \boxed{24}</think>", r"\boxed{24}</think>24", r"</think>24",
    r"</think>\boxed{24",
    r"</think>\boxed{23}\boxed{24}", r"</think>\boxed{24 or 25}", r"</think>\boxed{20,21,22,23,24}", r"</think>\boxed{x+24=x}",
    r"</think>\boxed{23=24}", r"</think>\boxed{24}</think>", r"</think><think>\boxed{24}", r"</think>\boxed{}",
    r"</think>\boxed{24\sqrt(2)}", r"</think>\boxed{[24,24]}", r"</think>\boxed{\{24,25\}}", r"</think>\boxed{the answer 24}",
)  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them."""
    for chain in all_chains():
        yield from gold(chain)
        yield from mutations(chain)
    for chain in chains.items("test", 0, 3, 20):
        yield from (Case("exploit", env.task(chain), text, False) for text in EXPLOITS)
    if importlib.util.find_spec("math_verify"):
        yield from (Case("problem, gold", PROBLEM, text, True) for text in PROBLEM_GOLD)
        yield from (Case("problem, exploit", PROBLEM, text, False) for text in PROBLEM_EXPLOITS)


def judge(case: Case) -> str | None:
    """A hole, described, or None."""
    judged = Problems() if "question" in case.task else env.GradedChains()
    judged.reset(options=case.task)
    reward = judged.step(case.text)[1]
    if reward == float(case.must_score):
        return None
    return f"{case.group}: {case.text[:80]!r} earns {reward} on {case.task}"


def tokenizer_holes() -> Iterator[str]:
    """Gold answers that would read otherwise once they went through the tokenizer."""
    tokenizer = data.build_tokenizer()
    encode = PhraseEncoder(tokenizer)
    for chain in all_chains():
        for tokens in chains.ANSWERS:
            text = chains.answer(chain, tokens, True)
            if tokenizer.decode(encode(text), skip_special_tokens=True) != text:
                yield f"the tokenizer changes {text!r}"


def split_holes() -> Iterator[str]:
    """Chains that two roles share."""
    owner: dict[chains.Chain, str] = {}
    for name in chains.ROLES:
        for seed in SPLIT_SEEDS:
            for level in chains.CORPUS_LEVELS:
                for chain in chains.items(name, seed, level, CHAINS_PER_LEVEL):
                    if owner.setdefault(chain, name) != name:
                        yield f"{chain} belongs to {owner[chain]} and to {name}"


def main() -> int:
    """Runs the audit; 1 if there is a hole."""
    began, tried, holes = time.perf_counter(), Counter[str](), list[str]()
    for case in cases():
        tried[case.group] += 1
        if hole := judge(case):
            holes.append(hole)
    holes += [*tokenizer_holes(), *split_holes()]
    for group, count in tried.items():
        print(f"{count:7,}  {group}")
    if not importlib.util.find_spec("math_verify"):
        print("problems from files: not audited, math-verify is not installed (extra [math])")
    print(f"{sum(tried.values()):,} answers in {time.perf_counter() - began:.1f} s, {len(holes)} holes")
    for hole in holes[:50]:
        print(f"HOLE {hole}")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
