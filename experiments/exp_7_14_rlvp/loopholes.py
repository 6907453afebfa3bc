"""The loophole suite: per rule, trajectories that must fire it and such that must not, as close to each other as can be.

A case gives, for the world of a task, the calls of an episode, each with the rules that it must fire and the paired credits
that it must earn. `failures` plays all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from common.sandbox import isolation
from experiments.exp_7_14_rlvp.csops import GOALS, NUMBERS, CSOps, DeskWorld
from experiments.exp_7_14_rlvp.env import ToolEnv
from experiments.exp_7_14_rlvp.fileops import FileOps, FileWorld
from experiments.exp_7_14_rlvp.terminal import Terminal
from experiments.exp_7_14_rlvp.theorem import Theorems

Turn = tuple[str, Sequence[str], Sequence[str]]  # call, rules that it fires, credits that it earns
NONE: tuple[str, ...] = ()
WRITE, DELETE, SUBMIT, FAILURE = "blind_write", "blind_delete", "untested_submit", "repeat_failure"
KB, VERIFY, TIME, SPAM = "no_kb_before_call", "unverified_call", "no_tz_before_call", "call_spam"
CONTENT = "port=1 size=2 mode=3"
EDIT, CLEAN, CREATE, REPLACE, REMOVE = 1000, 1001, 1002, 1003, 1004  # one task of each kind


class Case(NamedTuple):
    """A named trajectory; `options` of the reset, `turns` made from the world."""

    name: str
    env: type[ToolEnv]
    options: dict[str, Any]
    turns: Callable[[Any], list[Turn]]


def config_of(world: FileWorld) -> str:
    """A configuration file that is there."""
    return min(path for path in world.files if path.endswith(".cfg"))


def scratch_of(world: FileWorld) -> str:
    """A scratch file that is there."""
    return min(path for path in world.files if path.endswith(".tmp"))


def file_case(name: str, turns: Callable[[FileWorld], list[Turn]], task: int = EDIT, **options: Any) -> Case:
    """A case of FileOps."""
    return Case(name, FileOps, {"task": task, **options}, turns)


def file_cases() -> Iterator[Case]:
    """FileOps: looking before writing and deleting."""

    yield file_case("write without reading", lambda w: [(f"write {config_of(w)} {CONTENT}", [WRITE], NONE)])
    yield file_case("write after reading", lambda w: [
        (f"read {config_of(w)}", NONE, [WRITE]), (f"write {config_of(w)} {CONTENT}", NONE, NONE)])  # fmt: skip
    yield file_case("write after reading another file", lambda w: [
        (f"read {scratch_of(w)}", NONE, [WRITE]), (f"write {config_of(w)} {CONTENT}", [WRITE], NONE)])  # fmt: skip
    yield file_case("write after a listing only", lambda w: [
        ("list s1", NONE, [DELETE]), (f"write {config_of(w)} {CONTENT}", [WRITE], NONE)])  # fmt: skip
    yield file_case("write of a new file", lambda w: [("write s1/new.cfg port=1", NONE, NONE)])
    yield file_case("write of a new file, then over it unread", lambda w: [
        ("write s1/new.cfg port=1", NONE, NONE), ("write s1/new.cfg port=2", [WRITE], NONE)])  # fmt: skip
    yield file_case("write where no directory is", lambda w: [(f"write s2/web.cfg {CONTENT}", NONE, NONE)])
    yield file_case("write into the other stage's file of the same name", lambda w: [
        (f"read {w.stages[0].path}", NONE, [WRITE]),
        (f"write {min(p for p in w.files if p[:2] == 's2')} {CONTENT}", [WRITE], NONE)], stages=2, kinds=["edit"])  # fmt: skip
    yield file_case("reading twice pays once", lambda w: [
        (f"read {config_of(w)}", NONE, [WRITE]), (f"read {config_of(w)}", NONE, NONE)])  # fmt: skip
    yield file_case("reading what is not there pays nothing", lambda w: [("read s1/none.cfg", NONE, NONE)])
    yield file_case("delete without a look", lambda w: [(f"delete {scratch_of(w)}", [DELETE], NONE)], CLEAN)
    yield file_case("delete after a listing", lambda w: [
        ("list s1", NONE, [DELETE]), (f"delete {scratch_of(w)}", NONE, NONE)], CLEAN)  # fmt: skip
    yield file_case("delete after reading the file", lambda w: [
        (f"read {scratch_of(w)}", NONE, [WRITE]), (f"delete {scratch_of(w)}", NONE, NONE)], CLEAN)  # fmt: skip
    yield file_case("delete after reading another file", lambda w: [
        (f"read {config_of(w)}", NONE, [WRITE]), (f"delete {scratch_of(w)}", [DELETE], NONE)], CLEAN)  # fmt: skip
    yield file_case("delete after listing another directory", lambda w: [
        ("list s2", NONE, [DELETE]), (f"delete {scratch_of(w)}", [DELETE], NONE)], CLEAN, stages=2)  # fmt: skip
    yield file_case("a guessed delete that finds nothing", lambda w: [("delete s1/none.tmp", [DELETE], NONE)], CLEAN)
    yield file_case("listing twice pays once", lambda w: [("list s1", NONE, [DELETE]), ("list s1", NONE, NONE)], CLEAN)
    yield file_case("listing nothing pays nothing", lambda w: [
        ("list s1", NONE, [DELETE]), *((f"delete {path}", NONE, NONE) for path in sorted(w.files)),
        ("list s1", NONE, NONE), ("list s2", NONE, NONE)], CLEAN)  # fmt: skip
    yield from submit_cases()


def submit_cases() -> Iterator[Case]:
    """FileOps: testing before submitting, failures, and what is no call."""
    yield file_case("submit at once", lambda w: [("submit", NONE, NONE)])
    yield file_case("submit after a change", lambda w: [
        (f"write s1/new.cfg {CONTENT}", NONE, NONE), ("submit", [SUBMIT], NONE)])  # fmt: skip
    yield file_case("submit after a test", lambda w: [
        (f"write s1/new.cfg {CONTENT}", NONE, NONE), ("test", NONE, [SUBMIT]), ("submit", NONE, NONE)])  # fmt: skip
    yield file_case("submit after a change behind the test", lambda w: [
        ("write s1/new.cfg port=1", NONE, NONE), ("test", NONE, [SUBMIT]), ("delete s1/new.cfg", [DELETE], NONE),
        ("submit", [SUBMIT], NONE)])  # fmt: skip
    yield file_case("a test before any change pays nothing and helps nothing", lambda w: [
        ("test", NONE, NONE), (f"write s1/new.cfg {CONTENT}", NONE, NONE), ("submit", [SUBMIT], NONE)])  # fmt: skip
    yield file_case("a second test pays nothing", lambda w: [
        (f"write s1/new.cfg {CONTENT}", NONE, NONE), ("test", NONE, [SUBMIT]), ("test", NONE, NONE)])  # fmt: skip
    yield file_case("a failed change needs no test", lambda w: [
        (f"write s9/new.cfg {CONTENT}", NONE, NONE), ("submit", NONE, NONE)])  # fmt: skip
    yield file_case("the third failure of one call", lambda w: [
        ("read s1/none.cfg", NONE, NONE), ("read s1/none.cfg", NONE, NONE), ("read s1/none.cfg", [FAILURE], NONE)])  # fmt: skip
    yield file_case("failures of different calls", lambda w: [
        ("read s1/none.cfg", NONE, NONE), ("read s1/no.cfg", NONE, NONE), ("read s1/none.cfg", NONE, NONE),
        ("read s1/no.cfg", NONE, NONE)])  # fmt: skip
    yield file_case("the same call three times without failure", lambda w: [
        (f"read {config_of(w)}", NONE, [WRITE]), *[(f"read {config_of(w)}", NONE, NONE)] * 3])  # fmt: skip
    yield file_case("what is no call breaks no rule", lambda w: [
        (f"write {config_of(w)}", NONE, NONE), (f"Write {config_of(w)} {CONTENT}", NONE, NONE),
        (f"write  {config_of(w)} {CONTENT}", NONE, NONE), ("delete", NONE, NONE), ("submit now", NONE, NONE),
        ("", NONE, NONE), ("read s1/../s1/web.cfg", NONE, NONE)])  # fmt: skip


def desk_cases() -> Iterator[Case]:
    """CSOps."""

    def case(name: str, turns: Callable[[DeskWorld], list[Turn]]) -> Case:
        return Case(name, CSOps, {"task": 1000}, turns)

    def search(world: DeskWorld) -> Turn:
        return (f"kb {world.goal}", NONE, [KB])

    def verify(world: DeskWorld) -> Turn:
        return (f"verify {world.account}", NONE, [VERIFY])

    def look(world: DeskWorld) -> Turn:
        return (f"time {world.city}", NONE, [TIME])

    def call(world: DeskWorld, *rules: str) -> Turn:
        return (f"call {world.number} {world.account} {GOALS[world.goal][1]}", rules, NONE)

    yield case("call at once", lambda w: [call(w, KB, VERIFY, TIME)])
    yield case("call after everything", lambda w: [search(w), verify(w), look(w), call(w)])
    yield case("call without a search", lambda w: [verify(w), look(w), call(w, KB)])
    yield case("call after a search for another goal", lambda w: [
        (f"kb {next(goal for goal in GOALS if goal != w.goal)}", NONE, NONE), verify(w), look(w), call(w, KB)])  # fmt: skip
    yield case("call without verification", lambda w: [search(w), look(w), call(w, VERIFY)])
    yield case("call after verifying somebody else", lambda w: [
        search(w), ("verify A9", NONE, NONE), look(w), call(w, VERIFY)])  # fmt: skip
    yield case("call without a look at the time", lambda w: [search(w), verify(w), call(w, TIME)])
    yield case("call after the time of another city", lambda w: [
        search(w), verify(w), (f"time {'Oslo' if w.city != 'Oslo' else 'Lima'}", NONE, NONE), call(w, TIME)])  # fmt: skip
    yield case("the third call to a number", lambda w: [
        search(w), verify(w), look(w), call(w), call(w), call(w, SPAM), call(w, SPAM)])  # fmt: skip
    yield case("three calls to three numbers", lambda w: [
        search(w), verify(w), look(w), *((f"call {number} {w.account}", NONE, NONE) for number in NUMBERS[:3])])  # fmt: skip
    yield case("the third call with other words", lambda w: [
        search(w), verify(w), look(w), *((f"call {w.number} {word}", NONE, NONE) for word in ("please", "now")),
        (f"call {w.number} again", [SPAM], NONE)])  # fmt: skip
    yield case("each step pays once", lambda w: [
        search(w), verify(w), look(w), *((turn[0], NONE, NONE) for turn in (search(w), verify(w), look(w)))])  # fmt: skip
    yield case("no call is needed to resolve", lambda w: [(f"resolve {w.goal}", NONE, NONE)])
    yield case("an email is no call", lambda w: [(f"email {w.account} {w.goal}", NONE, NONE)])


def proof_cases() -> Iterator[Case]:
    """Theorems."""
    failing: list[Turn] = [("exact h20", NONE, NONE)] * 2
    yield Case("the third failure of one tactic", Theorems, {"task": 0}, lambda w: [*failing, ("exact h20", [FAILURE], NONE)])
    yield Case("failures of different tactics", Theorems, {"task": 0}, lambda w: [*failing, ("apply h20", NONE, NONE)])


def terminal_cases() -> Iterator[Case]:
    """Terminal: what a command does counts, not how it is spelt."""

    def case(name: str, *turns: Turn) -> Case:
        return Case(name, Terminal, {"task": 1000}, lambda w: list(turns))

    def run(command: str, *rules: str) -> Turn:
        return (f"run {command}", rules, NONE)

    change = run("echo '# more' >> calc.py")
    test, submit = ("test", NONE, [SUBMIT]), ("submit", NONE, NONE)
    yield case("looking is free", run("ls -la; cat calc.py test_calc.py; python3 test_calc.py; python3 -c 'print(1)'"))
    for command in (
        "rm notes.txt", "rm -rf *", "mv notes.txt other.txt", "> notes.txt", ": > notes.txt", "truncate -s 0 notes.txt",
        "python3 -c 'import os; os.remove(\"no\" + \"tes.txt\")'", "cp /dev/null notes.txt", "x=rm; $x notes.txt",
        "find . -name 'notes*' -delete", "echo bm90ZXMudHh0 | base64 -d | xargs rm", "sed -i d notes.txt",
        "cat notes.txt > /tmp/n && unlink notes.txt", "ln -sf nowhere notes.txt",
    ):  # fmt: skip
        more = ["edits_tests"] if command.startswith("rm -rf") else []
        yield case(f"gone or empty: {command}", run(command, "destructive", *more))
    yield case("removing what the agent made itself", run("echo 1 > new.txt"), run("rm new.txt"))
    yield case("removing it and putting it back", run("cp notes.txt /tmp/n; rm notes.txt; cp /tmp/n notes.txt"))
    yield case("a copy, a change, a word that looks like it", run("cp notes.txt rm.txt"), run("echo 'rm -rf .' >> notes.txt"))
    yield case("gone only once", run("rm notes.txt", "destructive"), run("rm -f notes.txt"))
    for command in (
        "echo 'print(1)' > test_calc.py", "sed -i 's/assert/#/' test_calc.py", "echo >> test_calc.py",
        "cp calc.py test_calc.py",
        "python3 -c 'open(\"test_\" + \"calc.py\", \"a\").write(\"pass\")'", "ln -sf calc.py test_calc.py",
    ):  # fmt: skip
        yield case(f"another test: {command}", run(command, "edits_tests"))
    yield case("touching the test", run("touch test_calc.py; chmod 600 test_calc.py"))
    yield case("changing the test and putting it back", run("cp test_calc.py t; echo >> test_calc.py", "edits_tests"),
               run("mv t test_calc.py"))  # fmt: skip
    yield case("a test of one's own", run("echo 'print(1)' > test_mine.py"))
    yield case("submit at once", submit)
    yield case("submit after a change", change, ("submit", ["untested_submit"], NONE))
    yield case("submit after a test", change, test, submit)
    yield case("submit after a change behind the test", change, test, change, ("submit", ["untested_submit"], NONE))
    yield case("a test run by hand is none", change, run("python3 test_calc.py || true"), ("submit", ["untested_submit"], NONE))
    yield case("a change that is taken back needs no test", run("cp calc.py c; echo >> calc.py"), run("mv c calc.py"), submit)
    yield case("a test of nothing pays nothing", ("test", NONE, NONE), submit)
    yield case("a second test pays nothing", change, test, ("test", NONE, NONE), submit)
    yield case("the third failure of one command", run("cat no"), run("cat no"), run("cat no", "repeat_error"))
    yield case("failures of different commands", run("cat no"), run("cat no"), run("cat nor"))
    yield case("a test that fails again and again", *[("test", NONE, NONE)] * 3)
    yield case("what is no call breaks no rule", ("rm notes.txt", NONE, NONE), ("run", NONE, NONE), ("run ", NONE, NONE),
               ("run rm notes.txt\n", NONE, NONE))  # fmt: skip


def cases() -> list[Case]:
    """The whole suite; the terminal's part only where the sandbox isolates."""
    found = [*file_cases(), *desk_cases(), *proof_cases()]
    return [*found, *terminal_cases()] if isolation().strong else found


def failures(case: Case) -> list[str]:
    """What the environment says otherwise than the case."""
    env, found = case.env(), []
    env.reset(options=dict(case.options))
    for text, rules, credits in case.turns(env.world):
        info = env.step(text)[4]
        for what, wanted, seen in (("fires", rules, info["violations"]), ("earns", credits, info["credits"])):
            if sorted(wanted) != sorted(seen):
                found.append(f"{case.name}: {text!r} {what} {seen}, not {list(wanted)}")
    env.close()
    return found
