"""Attacks the grader of all three kinds before it is used: `python -m experiments.exp_7_opsd_self_distillation.audit`.

Must score: the worked answer of every search, of all codes and of all steps of up to ENUMERATED steps and of many longer
ones; for some of them with results put again behind a wait. Must not score: for some of them every other result, move and
start at each place, steps left out or doubled, waits that end on a wrong result, the answer to another question or of another
world, what a teacher is shown instead of an answer, and a corpus of exploits. Everything goes through the environment's
reset and step. What a student reads must not tell its answer: the question of codes and search is the same in every world,
and no question holds a hint. Gold answers must survive the tokenizer, and splits must not overlap.
Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import gymnasium

from common.tokenizers import PhraseEncoder
from experiments.exp_7_opsd_self_distillation import data, tasks
from experiments.exp_7_opsd_self_distillation.tasks import Task

WORLDS = (0, 100)
ENUMERATED = {"steps": 3, "codes": 3, "search": 1}  # steps of a task
LONGER = {"steps": range(4, 9), "codes": range(4, 6), "search": range(0)}
SAMPLED = 60  # tasks of each further length and role
MUTATED_EVERY = 23  # of the tasks
WAITED_EVERY = 5
EXPLOITED = 60  # tasks that see the whole corpus
SPLIT_SEEDS = (0, 100, 101, 102, 103)


class Case(NamedTuple):
    group: str
    task: Task
    text: str
    must_score: bool


def enumerated(kind: str, world: int) -> Iterator[Task]:
    """Every task of a kind of up to ENUMERATED steps whose results are numbers 0..19."""
    choices = {"steps": tasks.DIGITS, "codes": range(len(tasks.LETTERS)), "search": range(tasks.SIZE)}[kind]
    for length in range(1, ENUMERATED[kind] + 1):
        for start, moves in product(range(tasks.SIZE), product(choices, repeat=length)):
            task = Task(kind, world, start, moves)
            if all(0 <= number < tasks.SIZE for number in tasks.results(task)):
                yield task


def all_tasks() -> list[Task]:
    """The enumerated tasks, and tasks of every further length and role; steps are the same in every world."""
    found: list[Task] = []
    for kind in tasks.KINDS:
        for world in WORLDS[: 1 if kind == "steps" else None]:
            found += enumerated(kind, world)
            for role, length in product(tasks.ROLES, LONGER[kind]):
                found += tasks.items(role, 0, kind, world, (length,), SAMPLED)
    return found


def parts_of(task: Task) -> list[str]:
    """The worked answer in pieces: start, then move and result of each step; of a search its one number."""
    if task.kind == "search":
        return [tasks.solution(task)]
    steps = zip(tasks.written(task), tasks.results(task), strict=True)
    return [str(task.start), *(text for move, result in steps for text in (move, f"={result}"))]


def waited(task: Task) -> Iterator[tuple[str, str]]:
    """(group, text): the worked answer with waits that end on the right result."""
    parts = parts_of(task)
    if task.kind == "search":
        return
    for place in range(2, len(parts), 2):
        right, wrong = parts[place], f"={(int(parts[place][1:]) + 1) % tasks.SIZE}"
        for kind, put in (("checked", right), ("mended", wrong), ("mended twice", f"{wrong}{tasks.WAIT}{wrong}")):
            yield f"gold, {kind}", "".join([*parts[:place], put, tasks.WAIT, right, *parts[place + 1 :]])
    if len(parts[-1]) == 2:
        yield "gold, a leading zero", "".join(parts[:-1]) + f"=0{parts[-1][1:]}"


def mutations(task: Task, other: Task) -> Iterator[tuple[str, str]]:
    """(group, text) of one change each to the worked answer."""
    parts = parts_of(task)
    for place, piece in enumerate(parts):
        moved = task.kind != "search" and place % 2 == 1
        for changed in other_moves(task, piece) if moved else other_numbers(piece):
            yield f"mutation: another {'move' if moved else 'number'}", "".join([*parts[:place], changed, *parts[place + 1 :]])
    if task.kind != "search":
        yield from step_mutations(task, parts)
    for shown in tasks.SHOWN:
        yield "mutation: what is read, written as the answer", tasks.prompt(task, shown)
        if shown == "solution":
            yield "mutation: the question behind the answer", f"{tasks.solution(task)}{tasks.prompt(task)}"
    if tasks.solution(other) != tasks.solution(task):
        yield "mutation: another question's answer", tasks.solution(other)
    elsewhere = task._replace(world=task.world + 1)
    if task.kind != "steps" and tasks.solution(elsewhere) != tasks.solution(task):
        yield "mutation: another world's answer", tasks.solution(elsewhere)


def other_numbers(piece: str) -> Iterator[str]:
    """A start or a result with every other number and in broken forms."""
    sign, number = ("=", piece[1:]) if piece.startswith("=") else ("", piece)
    yield from (f"{sign}{n}" for n in (*range(tasks.SIZE + 1), 99) if str(n) != number)
    yield from (f"{sign}{form}" for form in (f"00{number}", f"-{number}", f"+{number}", f"{number}.0", f"{number} ", ""))


def other_moves(task: Task, piece: str) -> Iterator[str]:
    """A move with every other digit or letter, without its sign, and twice."""
    letter, digit = piece[:-2], piece[-2:]
    yield from (f"{letter}{other:+d}" for other in tasks.DIGITS if f"{other:+d}" != digit)
    yield from (f" {other}{digit}" for other in tasks.LETTERS if f" {other}" != letter)
    yield from (f"{letter}{digit[1]}", f"{piece}{piece}", f"{letter}{digit[0]}0", f"{letter} {digit}", digit if letter else "")


def step_mutations(task: Task, parts: list[str]) -> Iterator[tuple[str, str]]:
    """Steps left out, doubled and without result, waits that end wrong, and more behind the end."""
    for place in range(1, len(parts), 2):
        before, step, behind = parts[:place], parts[place : place + 2], parts[place + 2 :]
        wrong = f"={(int(step[1][1:]) + 1) % tasks.SIZE}"
        yield "mutation: a step left out", "".join(before + behind)
        yield "mutation: a step twice", "".join(before + step + step + behind)
        yield "mutation: a step without its result", "".join([*before, step[0], *behind])
        yield "mutation: a wait without a number", "".join([*before, *step, tasks.WAIT, *behind])
        yield "mutation: a wait instead of the result", "".join([*before, step[0], tasks.WAIT, step[1], *behind])
        for ends in (wrong, f"{step[1]}{tasks.WAIT}{wrong}"):
            yield "mutation: a wait that ends on a wrong number", "".join([*before, *step, tasks.WAIT, ends, *behind])
        yield "mutation: two results without a wait", "".join([*before, step[0], wrong, step[1], *behind])
    for more in ("+1", parts[-1], f"+1={tasks.results(task)[-1] + 1}", " or", f" {parts[-1]}", f"{tasks.WAIT}="):
        yield "mutation: more behind it", "".join([*parts, more])


def exploits(task: Task) -> Iterator[str]:
    """Answers that name the end without the work, name several, or attack the search for the steps."""
    gold, end = tasks.solution(task), tasks.results(task)[-1]
    wide = gold.translate(str.maketrans("0123456789+-=", "０１２３４５６７８９＋－＝"))
    arabic = gold.translate({ord("0") + d: ord("٠") + d for d in range(10)})
    yield from ("", " ", str(end), f"known answer {end}", f"answer {end}", "right", tasks.WAIT, "wait", "True", "None", ".*")
    yield from (f"={end}=", f"=={end}", f"={end}{tasks.WAIT}={end}", f"={end}={end}", f"{task.start}={end}", "=" + "9" * 99_999)
    yield from (f" {gold}", f"{gold} ", f"{gold}\n", f"\n{gold}", f"{gold}\x00", f"{gold}\u200b", f"{gold}.", f"({gold})")
    yield from (f"{gold}<eos>", f"<bos>{gold}", f"{gold}{gold}", f"{gold}\n{gold}", f"{gold};", f"x{gold}", f"{gold} ", wide)
    yield from (arabic, gold.replace("=", " = "), gold.replace("=", "=+"), f"+{gold}", f"{gold}e0", gold.upper() + "\r")
    yield from ("".join(f"={n}" for n in range(20)), "".join(f"{tasks.WAIT}={n}" for n in range(20)))
    yield from (tasks.WAIT.join(f"={n}" for n in range(20)), "__import__('os')", "{result}", "%s", "[0-9]+", "1" * 100_000)
    yield "7" + "+1=8" * 30_000


def cases() -> Iterator[Case]:
    """All of them."""
    found = all_tasks()
    for place, task in enumerate(found):
        yield Case(f"{task.kind}, gold", task, tasks.solution(task), True)
        if place % WAITED_EVERY == 0:
            yield from (Case(f"{task.kind}, {group}", task, text, True) for group, text in waited(task))
        if place % MUTATED_EVERY == 0:
            others = mutations(task, found[place - 1])
            yield from (Case(f"{task.kind}, {group}", task, text, False) for group, text in others)
    for task in found[:: max(1, len(found) // EXPLOITED)]:
        yield from (Case(f"{task.kind}, exploit", task, text, False) for text in exploits(task))


def judge(case: Case) -> str | None:
    """A hole, described, or None. The episode must end with its one answer; any exception is a hole."""
    env: Any = tasks.PrivilegedTasks()
    try:
        shown, _ = env.reset(options=tasks.options_of(case.task))
        _, reward, terminated, _, info = env.step(case.text)
    except Exception as error:  # report it and go on with the next case
        return f"{case.group}: {case.text[:80]!r} raises {type(error).__name__}: {error} on {case.task}"
    if shown != tasks.prompt(case.task) or not terminated or (reward == 1.0) != info["success"]:
        return f"{case.group}: reward {reward}, success {info['success']}, end {terminated} on {case.task}"
    try:
        env.step(case.text)
        return f"{case.group}: the episode goes on behind its end on {case.task}"
    except gymnasium.error.ResetNeeded:
        pass
    if reward == float(case.must_score):
        return None
    return f"{case.group}: {case.text[:80]!r} earns {reward} on {case.task}"


def question_holes() -> Iterator[str]:
    """Questions that tell what a student has to know or find, and teachers that are shown something else than said."""
    for task in all_tasks():
        question = tasks.prompt(task)
        if question != tasks.prompt(task._replace(world=task.world + 1)):
            yield f"the question {question!r} depends on the world"
        if any(hint in question for hint in (tasks.ANSWER, tasks.SOLUTION, tasks.TABLE, "=")):
            yield f"the question {question!r} holds a hint"
        if not tasks.prompt(task, "answer").endswith(f"{tasks.ANSWER}{tasks.results(task)[-1]}{tasks.END}"):
            yield f"a teacher of {task} is shown another answer"
        if not tasks.prompt(task, "solution").endswith(f"{tasks.SOLUTION}{tasks.solution(task)}{tasks.END}"):
            yield f"a teacher of {task} is shown another solution"


def tokenizer_holes() -> Iterator[str]:
    """Gold answers that would read otherwise once they went through the tokenizer."""
    tokenizer = data.build_tokenizer()
    encode = PhraseEncoder(tokenizer)
    names = {token: text for text, token in encode.ids.items()}
    for task in all_tasks():
        text = tasks.solution(task)
        if "".join(names[token] for token in encode(text)) != text:
            yield f"the tokenizer changes {text!r}"


def split_holes() -> Iterator[str]:
    """Questions that two roles share, under any seed and in any world."""
    owner: dict[tuple, str] = {}
    for kind, role, seed in product(tasks.KINDS, tasks.ROLES, SPLIT_SEEDS):
        for lengths in {tasks.TRAINED[kind], tasks.LONGER[kind]}:
            for task in tasks.items(role, seed, kind, seed, lengths, SAMPLED):
                question = (kind, *task[2:])
                if owner.setdefault(question, role) != role:
                    yield f"{question} belongs to {owner[question]} and to {role}"


def main() -> int:
    """Runs the audit; 1 if there is a hole."""
    began, tried, holes = time.perf_counter(), Counter[str](), list[str]()
    for case in cases():
        tried[case.group] += 1
        if hole := judge(case):
            holes.append(hole)
    holes += [*question_holes(), *tokenizer_holes(), *split_holes()]
    for group, count in tried.items():
        print(f"{count:9,}  {group}")
    print(f"{tried.total():,} answers in {time.perf_counter() - began:.1f} s, {len(holes)} holes")
    for hole in holes[:50]:
        print(f"HOLE {hole}")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
