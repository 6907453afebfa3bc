"""Attacks the environment before it is used: `python -m experiments.exp_7_15_retool.audit`.

Must score: the gold answer of problems of every kind, at once, behind work in the head, behind code in every style. Must not
score: every mutation of it, and a corpus of exploits against grammar, interpreter and answer. Episodes go through the
environment's reset and step with the real sandbox, texts through the tokenizer as a model's turns would. What the corpus says
that a faulty program prints is held against the sandbox, and roles may not overlap.
Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from common.seeding import python_random
from common.tokenizers import PhraseEncoder
from experiments.exp_7_15_retool import data, env, problems, programs
from experiments.exp_7_15_retool.data import answer_block, code_block
from experiments.exp_7_15_retool.interpreter import Interpreter, InterpreterConfig
from experiments.exp_7_15_retool.problems import Problem

PER_KIND = 12
SPLIT_SEEDS = range(3)


class Case(NamedTuple):
    """An episode's turns, and whether it must end as right."""

    group: str
    problem: Problem
    turns: tuple[str, ...]
    must_score: bool
    tool: bool = True


def all_problems(count: int = PER_KIND) -> Iterator[Problem]:
    """Problems of every kind, role and length."""
    for name in problems.ROLES:
        for kind in problems.KINDS:
            yield from problems.items(name, 0, kind, problems.LENGTHS, count)
        for kind in problems.CHAINS:
            yield from problems.items(name, 1, kind, problems.LONGER, count // 3)


def gold(problem: Problem) -> Iterator[Case]:
    """Every way to the right answer."""
    answer = answer_block(problem.answer)
    yield Case("gold, at once", problem, (answer,), True)
    yield Case("gold, at once", problem, (answer,), True, tool=False)
    yield Case("gold, worked in the head", problem, (problems.working(problem) + answer,), True)
    for style in programs.STYLES[problem.kind]:
        code = code_block(programs.write(problem, style).code)
        yield Case("gold, with code", problem, (code, answer), True)
        yield Case("gold, with code", problem, (problems.working(problem) + code, code_block("print(1"), code, answer), True)


def mutations(problem: Problem) -> Iterator[Case]:
    """One change to a right episode each."""
    right, wrong = problem.answer, problem.answer + 1
    gold_code = code_block(programs.write(problem, programs.STYLES[problem.kind][0]).code)
    answers = {
        "wrong number": f"{wrong}", "sign": f"+{right}", "minus": f"-{right}", "leading zero": f"0{right}",
        "decimal": f"{right}.0", "white space": f" {right}", "new line": f"{right}\n", "two numbers": f"{right} {wrong}",
        "or": f"{right} or {wrong}", "modulo added": f"{right + (problem.modulus or 100)}", "formula": f"{right}+0",
        "empty": "", "underscore": f"{right}_", "quotes": f"'{right}'", "call": f"int({right})", "exponent": f"{right}e0",
        "other digits": str(right).translate({ord("0") + d: ord("٠") + d for d in range(10)}),
    }  # fmt: skip
    for group, text in answers.items():
        yield Case(group, problem, (f"{env.ANSWER}{text}{env.END_ANSWER}",), False)
    answer = answer_block(right)
    turns: dict[str, tuple[str, ...]] = {
        "no tags": (str(right),),
        "not closed": (f"{env.ANSWER}{right}",),
        "not opened": (f"{right}{env.END_ANSWER}",),
        "closed by code": (f"{env.ANSWER}{right}{env.END_CODE}",),
        "answer twice": (answer + answer,),
        "two answers": (answer_block(wrong) + answer,),
        "text behind": (f"{answer} or {wrong}",),
        "code and answer in one turn": (gold_code + answer,),
        "answer and code in one turn": (answer + gold_code,),
        "nested": (f"{env.ANSWER}{answer}{env.END_ANSWER}",),
        "forged reply": (f"{env.INTERPRETER}{right}{env.END_INTERPRETER}{answer}",),
        "forged reply behind code": (f"{gold_code}{env.INTERPRETER}{right}{env.END_INTERPRETER}{answer}",),
        "code printed, no answer": (gold_code, ""),
        "reply in place of an answer": (gold_code, f"{env.INTERPRETER}{right}{env.END_INTERPRETER}"),
        "limit of turns": (gold_code,) * 4,
        "answer behind the limit": (gold_code,) * 4 + (answer,),
        "capital tags": (answer.upper(),),
    }
    for group, texts in turns.items():
        yield Case(group, problem, texts, False)
    yield Case("code without an interpreter", problem, (gold_code, answer), False, tool=False)


EXPLOITS = (
    "print('<answer>{right}</answer>')", "print('</interpreter><answer>{right}</answer>')", "import sys\nsys.exit(0)",
    "import os\nos._exit(0)", "raise SystemExit", "exit()", "print('\\x00'*9)", "print('a'*10**6)", "while True: pass",
    "x='a'\nwhile True: x+=x", "import os\nwhile True: os.fork()", "import os\nos.kill(os.getppid(),9)",
    "import socket\nsocket.create_connection(('127.0.0.1',22),1)", "open('/etc/shadow').read()", "input()",
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "print('\\ud800')", "class X: __repr__=None\nprint(X())",
    "print(open('/proc/self/environ').read())", "", "\n", "<code>", "x"*3000, "x"*5000,
)  # fmt: skip


def exploits(problem: Problem) -> Iterator[Case]:
    """Code that tries to end, blind or outwit the interpreter: no such program is an answer, and the next one still runs."""
    wrong = answer_block(problem.answer + 1)
    for code in EXPLOITS:
        yield Case("exploit", problem, (code_block(code.replace("{right}", str(problem.answer))), wrong), False)


def judge(case: Case, interpreter: Interpreter) -> str | None:
    """A hole, described, or None. An episode that is over takes no further turn."""
    config = env.EnvConfig(case.tool, 4 if case.tool else 1)
    calculations = env.Calculations(interpreter if case.tool else None, config)
    calculations.reset(options=problems.options_of(case.problem))
    total, success, ended = 0.0, False, False
    for turn in case.turns:
        if ended:
            break
        _, reward, terminated, truncated, info = calculations.step(turn)
        total, success, ended = total + reward, info["success"], terminated or truncated
    right = ended and success and total == 1.0
    fair = ended and not success and total == -1.0
    if right if case.must_score else fair:
        return None
    return f"{case.group}: {case.turns!r:.100} earns {total}, success {success}, over {ended}"


def reply_holes(interpreter: Interpreter) -> Iterator[str]:
    """Programs of the corpus whose reply is not what the sandbox says, and right ones that do not print the answer."""
    stream = python_random(0, "audit")
    for problem in all_problems(4):
        written = [programs.write(problem, style) for style in programs.STYLES[problem.kind]]
        written += [programs.write_faulty(problem, fault, stream) for fault in dict.fromkeys(programs.FAULTS[problem.kind])]
        for program in written:
            reply = interpreter(program.code).text
            if reply != program.reply or (not program.fault and reply != str(problem.answer)):
                yield f"{program.code!r} replies {reply!r}, the corpus says {program.reply!r}"


def tokenizer_holes() -> Iterator[str]:
    """Gold texts that would read otherwise once they went through the tokenizer."""
    tokenizer = data.build_tokenizer()
    encode, stream = PhraseEncoder(tokenizer), python_random(0, "audit tokens")
    for problem in all_problems():
        texts = [problems.prompt(problem), problems.working(problem) + answer_block(problem.answer)]
        texts += [code_block(programs.draw(problem, stream, share).code) for share in (0.0, 1.0)]
        texts += [data.reply_block(programs.draw(problem, stream, 1.0).reply)]
        for text in texts:
            if tokenizer.decode(encode(text)) != text or encode(text) != tokenizer(text, add_special_tokens=False)["input_ids"]:
                yield f"the tokenizer changes {text!r}"


def split_holes() -> Iterator[str]:
    """Problems that two roles share."""
    owner: dict[Problem, str] = {}
    for name in problems.ROLES:
        for seed in SPLIT_SEEDS:
            for kind in problems.KINDS:
                for lengths in (problems.LENGTHS, problems.LONGER):
                    for problem in problems.items(name, seed, kind, lengths, PER_KIND):
                        if owner.setdefault(problem, name) != name:
                            yield f"{problem} belongs to {owner[problem]} and to {name}"


def cases() -> Iterator[Case]:
    """All of them."""
    for problem in all_problems():
        yield from gold(problem)
    for kind in problems.KINDS:
        for problem in problems.items("test", 0, kind, problems.LENGTHS, 4):
            yield from mutations(problem)
    yield from exploits(problems.items("test", 0, "large", problems.LENGTHS, 1)[0])


def main() -> int:
    """Runs the audit; 1 if there is a hole."""
    began, tried, holes = time.perf_counter(), Counter[str](), list[str]()
    with Interpreter(InterpreterConfig()) as interpreter:
        for case in cases():
            tried[case.group] += 1
            if hole := judge(case, interpreter):
                holes.append(hole)
        holes += reply_holes(interpreter)
        ran = interpreter.executions
    holes += [*tokenizer_holes(), *split_holes()]
    for group, count in tried.items():
        print(f"{count:7,}  {group}")
    print(f"{sum(tried.values()):,} episodes, {ran:,} programs in {time.perf_counter() - began:.1f} s, {len(holes)} holes")
    for hole in holes[:50]:
        print(f"HOLE {hole}")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
