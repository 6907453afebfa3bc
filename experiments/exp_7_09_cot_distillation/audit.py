"""Attacks the verifier before it is used: `python -m experiments.exp_7_09_cot_distillation.audit`.

Must score: right solutions of every one-step problem and of many longer ones, in every style and with slips that were
taken back. Must not score: every other number, and a corpus of exploits. Everything goes through the environment's reset
and step, and must end at once. The splits must not overlap. Prints what was tried, lists each hole, and exits 1 if there
is one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator

from common.seeding import python_random
from common.statistics import overlaps
from experiments.exp_7_09_cot_distillation import problems, traces
from experiments.exp_7_09_cot_distillation.env import StatedSums
from experiments.exp_7_09_cot_distillation.problems import Problem

Case = tuple[str, Problem, str, bool]  # group, problem, completion, must score
MAX_SECONDS_PER_CASE = 0.5
LONGER = 150  # problems of each length
EXPLOITED = 40  # problems that the exploits are tried on
SPLIT_SEEDS = range(10)


def some_problems() -> Iterator[Problem]:
    """Every problem of one step, and LONGER of each further length."""
    for start in range(1, problems.LARGEST + 1):
        for op in problems.INVERSE:
            for operand in range(1, problems.OPERANDS + 1):
                if 0 <= problems.apply(start, op, operand) <= problems.LARGEST:
                    yield Problem(start, ((op, operand),))
    stream = python_random("audit")
    for length in problems.CORPUS_LENGTHS[1:]:
        yield from (problems.random_problem(stream, length) for _ in range(LONGER))


def gold(problem: Problem, index: int) -> Iterator[Case]:
    """Right solutions in every style, and those of the teacher's documents whose work ends right."""
    for style in traces.STYLES:
        yield f"gold: {style}", problem, traces.write(problem, style), True
    slipping = traces.write(problem, "text", traces.Habits(slip=0.3, check=1.0), python_random("audit", index))
    yield "gold or wrong: text with slips", problem, slipping, traces.stated(slipping) == problem.results[-1]
    right = problem.results[-1]
    yield "gold: words before the last line", problem, f"<think></think>The sum is {right}.\nFinal answer: {right}", True
    yield "gold: white space around", problem, f"\n  Final answer: {right} \n", True


def mutated(problem: Problem) -> Iterator[Case]:
    """Every other number of two digits behind the right work, and the right number behind broken forms."""
    right, solved = problem.results[-1], traces.write(problem, "text").rpartition(traces.ANSWER)[0]
    for number in range(100):
        if number != right:
            yield "another number", problem, f"{solved}{traces.ANSWER}{number}", False
    for form in (f"0{right}", f"+{right}", f"-{right}", f"{right}.0", f"{right}.", f"{right}0", f"{right} ", f"{right}e0"):
        yield "form of the number", problem, f"{solved}{traces.ANSWER}{form}", form == f"{right} "
    yield "form of the number", problem, f"{solved}{traces.ANSWER}{chr(0xFF10 + right % 10)}", False


def exploits(problem: Problem) -> Iterator[Case]:
    """Ways to earn credit without stating one right answer."""
    right = problem.results[-1]
    wrong = (right + 1) % 50
    said, miss = f"Final answer: {right}", f"Final answer: {wrong}"
    texts = [
        "", f"{right}", f"The answer is {right}.", f"<think>{said}</think>", f"<think>{said}", f"{said}</think>",
        f"<think>{said}</think>{miss}", f"<think></think>{said} or {wrong}", f"<think></think>{said}\n{miss}",
        f"<think></think>{miss}\n{said}", f"{said}\n{said}", f"{said}. Checked.", f"{said}\nI am sure.", f"{miss} {right}",
        f"<think>a</think><think>b</think>{said}", f"<think>a</think>{said}</think>", f"x <think>a</think>{said}",
        f"final answer: {right}", f"Final answer:{right}", f"Final answer: **{right}**", f"**{said}**",
        f"Final answer: {{{right}}}",
        f"Final answer: {right} {right}", f"Final answer: {right}/1", f"Final answer: {right}+0",
        f"Final answer: int('{right}')",
        "Final answer: [x for x in range(99)]", "Final answer: " + " ".join(map(str, range(50))),
        f"#### {right}", f"\\boxed{{{right}}}",
        *(f"Final answer: {number}\n" * 2 for number in (right, wrong)), "Final answer: " + "9" * 100_000, "<think>" * 50_000,
        f"{problem.prompt}Final answer: ", "Final answer: \u0661", "Final answer: None", "Final answer: nan", "\x00" + said,
    ]  # fmt: skip
    return (("exploit", problem, text, False) for text in texts)


def cases() -> Iterator[Case]:
    """All of them."""
    for index, problem in enumerate(some_problems()):
        yield from gold(problem, index)
        if index % 10 == 0:
            yield from mutated(problem)
    stream = python_random("exploits")
    for _ in range(EXPLOITED):
        yield from exploits(problems.random_problem(stream, 3))


def main() -> int:
    """Number of holes, at most 1."""
    holes, tried, env = list[str](), Counter[str](), StatedSums()
    for group, problem, text, must_score in cases():
        began = time.perf_counter()
        env.reset(options=problem.task)
        _, reward, terminated, _, info = env.step(text)
        seconds = time.perf_counter() - began
        tried[f"{group}, {'must' if must_score else 'must not'} score"] += 1
        if (reward, info["success"]) != (float(must_score), must_score) or not terminated:
            holes.append(f"{group}: reward {reward} for {text[:120]!r} on {problem.prompt.strip()!r}")
        if seconds > MAX_SECONDS_PER_CASE:
            holes.append(f"{group}: {seconds:.1f} s for {text[:60]!r}")
    for seed in SPLIT_SEEDS:
        lengths = {"train": problems.ID_LENGTHS, "validation": problems.ID_LENGTHS, "test": problems.ID_LENGTHS}
        sets = {name: problems.items(name, seed, some, 300) for name, some in lengths.items()}
        sets["corpus"] = problems.items("corpus", seed, problems.CORPUS_LENGTHS, 2000)
        for pair, shared in overlaps(sets).items():
            tried["pairs of splits"] += 1
            if shared:
                holes.append(f"splits {pair} share {shared} problems under seed {seed}")
    for group, number in tried.items():
        print(f"{number:7,}  {group}")
    for hole in holes[:50]:
        print(f"HOLE: {hole}")
    print(f"{sum(tried.values()):,} tried, {len(holes)} holes")
    return min(1, len(holes))


if __name__ == "__main__":
    sys.exit(main())
