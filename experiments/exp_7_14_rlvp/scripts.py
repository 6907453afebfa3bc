"""Scripted episodes: experts that know the world, and scripts of mixed quality that the start model learns from.

A script is the list of compact calls of one episode; it is planned from the world as it is at the start, and the
environment's replies to it are always the true ones. All qualities are probabilities of `Mix`: `PERFECT` never fails,
`FAILING` obeys every rule and misses the task.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

from common.schema import within
from experiments.exp_7_14_rlvp import csops, fileops, terminal, theorem
from experiments.exp_7_14_rlvp.calls import Call, write
from experiments.exp_7_14_rlvp.logic import premises


@dataclass(frozen=True)
class Mix:
    """Probabilities: `needed` and `neutral` looks are taken, the content is `wrong`, a stage is `skip`ped, a call is `junk`.

    needed: without the look the task can only be guessed. neutral: only a rule asks for it.
    """

    needed: float = 0.8
    neutral: float = 0.2
    wrong: float = 0.25
    skip: float = 0.05
    junk: float = 0.2

    def __post_init__(self) -> None:
        for item in fields(self):
            within(f"mix.{item.name}", getattr(self, item.name), 0, 1)


PERFECT = Mix(1.0, 1.0, 0.0, 0.0, 0.0)
FAILING = Mix(1.0, 1.0, 1.0, 0.0, 0.0)


def script(world: object, mix: Mix, stream: random.Random) -> list[str]:
    """The calls of an episode in this world, as compact text. The world is not changed."""
    if isinstance(world, fileops.FileWorld):
        return [write(call, fileops.TOOLS) for call in file_script(world, mix, stream)]
    if isinstance(world, csops.DeskWorld):
        return [write(call, csops.TOOLS) for call in desk_script(world, mix, stream)]
    if isinstance(world, theorem.TheoremWorld):
        return [write(call, theorem.TOOLS) for call in proof_script(world, mix, stream)]
    if isinstance(world, terminal.TerminalWorld):
        return [write(call, terminal.TOOLS) for call in terminal_script(world, mix, stream)]
    raise TypeError(f"no scripts for {type(world).__name__}")


# FileOps ---------------------------------------------------------------------------------------------------------------


def file_script(world: fileops.FileWorld, mix: Mix, stream: random.Random) -> list[Call]:
    """Stage by stage, then the test and the end."""
    found: list[Call] = []
    for stage in world.stages:
        if stream.random() >= mix.skip:
            found += stage_calls(world, stage, mix, stream)
        if stream.random() < mix.junk:
            found.append(junk_call(world, stage, stream))
    if stream.random() < mix.neutral:
        found.append(Call("run_tests"))
    return [*found, Call("submit")]


def stage_calls(world: fileops.FileWorld, stage: fileops.Stage, mix: Mix, stream: random.Random) -> list[Call]:
    """The looks and the changes of one stage."""
    wrong, neutral = stream.random() < mix.wrong, stream.random() < mix.neutral
    needed = stream.random() < mix.needed
    if stage.kind == "clean":
        return clean_calls(world, stage, needed, wrong, stream)
    if stage.kind == "remove":
        look = [Call("list_dir", (stage.directory,))] if neutral else []
        others = [path for path in world.files if path.split("/")[0] == stage.directory and path != stage.path]
        return [*look, Call("delete", (stream.choice(others) if wrong else stage.path,))]
    reading = needed if stage.kind == "edit" else neutral and stage.kind == "replace"
    look = [Call("read_file", (stage.path,))] if reading else []
    right = world.wanted[stage.directory][stage.path]
    guess = stage.kind == "edit" and not needed
    content = fileops.with_setting(random_content(stream), stage.content) if guess else right
    if wrong:
        content = next(other for other in iter(lambda: random_content(stream), None) if other != right)
    return [*look, Call("write_file", (stage.path, content))]


def clean_calls(world: fileops.FileWorld, stage: fileops.Stage, needed: bool, wrong: bool, stream: random.Random) -> list[Call]:
    """Deletes the scratch files that a listing showed, or guessed ones; a wrong script misses one or takes one too many."""
    scratch = [path for path in world.files if path.startswith(f"{stage.directory}/") and path.endswith(".tmp")]
    if not needed:
        scratch = [f"{stage.directory}/{name}" for name in sorted(stream.sample(fileops.SCRATCH, stream.randint(1, 3)))]
    if wrong and len(scratch) > 1:
        scratch.remove(stream.choice(scratch))
    elif wrong:
        scratch.append(next(path for path in world.files if path.startswith(f"{stage.directory}/") and path not in scratch))
    look = [Call("list_dir", (stage.directory,))] if needed else []
    return look + [Call("delete", (path,)) for path in scratch]


def junk_call(world: fileops.FileWorld, stage: fileops.Stage, stream: random.Random) -> Call:
    """A call that the task does not ask for: a look at some file, a listing, a test."""
    paths = sorted(path for path in world.files if path.split("/")[0] == stage.directory)
    looks = [Call("read_file", (stream.choice(paths),)), Call("list_dir", (stage.directory,)), Call("run_tests")]
    return stream.choice(looks)


def random_content(stream: random.Random) -> str:
    return fileops.render({key: stream.randrange(10) for key in fileops.KEYS})


# CSOps -----------------------------------------------------------------------------------------------------------------


def desk_script(world: csops.DeskWorld, mix: Mix, stream: random.Random) -> list[Call]:
    """Search, verification and look at the time, each or not; then calls until one could succeed."""
    code = csops.GOALS[world.goal][1]
    searched, verified = (stream.random() < mix.needed for _ in range(2))
    found = [Call("search_kb", (world.goal,))] if searched else []
    found += [Call("verify_identity", (world.account,))] if verified else []
    found += [Call("check_timezone", (world.city,))] if stream.random() < mix.neutral else []
    number = world.number if searched else stream.choice(csops.NUMBERS)
    if stream.random() < mix.wrong:
        code = stream.choice([other for _, other in csops.GOALS.values() if other != code])
    call = Call("place_call", (number, world.account, code))
    found.append(call)
    while stream.random() < mix.junk:  # calls again, as if it could help
        found.append(call)
    if not verified and stream.random() < mix.needed:
        found += [Call("verify_identity", (world.account,)), call]
    if stream.random() < mix.junk:
        found.append(Call("send_email", (world.account, world.goal)))
    end = Call("submit_resolution", (world.goal,))
    return [end] if stream.random() < mix.skip else [*found, end]


# Theorems --------------------------------------------------------------------------------------------------------------


def proof_script(world: theorem.TheoremWorld, mix: Mix, stream: random.Random) -> list[Call]:
    """The expert's proof; with probability `wrong` a step is replaced by another tactic on some hypothesis."""
    names = [name for name, _ in world.theorem.statement.hyps]
    found: list[Call] = []
    trial = theorem.Theorem(world.theorem.statement)
    while trial.goals and len(found) < world.limit:
        call = expert_tactic(trial)
        if stream.random() < mix.wrong:
            call = Call(stream.choice(("exact", "apply", "rewrite", "destruct")), (stream.choice(names),))
        trial.apply(call)
        found.append(call)
    return found


def expert_tactic(trial: theorem.Theorem) -> Call:
    """A step that brings the current goal nearer to its end, for theorems as `draw_statement` makes them."""
    sequent = trial.goals[0][1]
    goal = sequent.goal
    if goal[0] == "and":
        return Call("split")
    for name, formula in sequent.hyps:
        if formula == goal:
            return Call("exact", (name,))
    if goal[0] == "eq":
        if goal[1] == goal[2]:
            return Call("reflexivity")
        inner = goal[1][2] if goal[1][0] == "fun" else goal[1]
        return Call("rewrite", (next(name for name, formula in sequent.hyps if formula[0] == "eq" and formula[1] == inner),))
    if goal[0] == "or":
        known = [formula for _, formula in sequent.hyps]
        return Call("left" if goal[1] in known else "right")
    for name, formula in sequent.hyps:
        if formula[0] == "and" and goal in formula[1:]:
            return Call("destruct", (name,))
    return Call("apply", (next(name for name, _ in sequent.hyps if premises(sequent, "apply", (name,)) is not None),))


# Terminal --------------------------------------------------------------------------------------------------------------


def terminal_script(world: terminal.TerminalWorld, mix: Mix, stream: random.Random) -> list[Call]:
    """Looks at the code, writes it anew, right or wrong, and tests."""
    found = [Call("shell", (f"cat {terminal.CODE}",))] if stream.random() < mix.needed else []
    if stream.random() < mix.junk:
        found.append(Call("shell", ("ls",)))
    if stream.random() >= mix.skip:
        text = world.source(right=stream.random() >= mix.wrong).decode().strip()
        found.append(Call("shell", (f"echo '{text}  # mended' > {terminal.CODE}",)))
    if stream.random() < mix.neutral:
        found.append(Call("run_tests"))
    return [*found, Call("submit")]
