"""Attacks the scorer, the protocol and the constraints before they are used: `python -m experiments.exp_7_16_aworld.audit`.

Shortest plans must score within their budget, on every level; answers of other questions, lists of guesses and decorated
guesses must not; what is no turn must have no effect; an answer without any call, or every constraint broken, must not pay;
no two splits may share a world. Prints what was tried, lists each hole, and exits 1 if there is one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.verifiers.expressions import parse_formula
from experiments.exp_7_16_aworld import data
from experiments.exp_7_16_aworld.env import AWorldEnv
from experiments.exp_7_16_aworld.hub import Bridge, LocalHub
from experiments.exp_7_16_aworld.protocol import write
from experiments.exp_7_16_aworld.questions import question
from experiments.exp_7_16_aworld.scorer import score
from experiments.exp_7_16_aworld.servers import TOOLS
from experiments.exp_7_16_aworld.world import make_world, world_folder, write_world

WORLDS = (0, 600)
QUESTIONS = 150
NO_TURNS = (
    "", " ", "papers.top ", " papers.top", "papers.top\n", "PAPERS.TOP", "papers.top papers.top", "top", "search.find",
    "tables.lookup staff.csv", "archive.open x y", "<answer>", "</answer>", "<answer>1</answer><answer>2</answer>",
    "answer 43", "43", "x" * 30_000,
)  # fmt: skip


def guesses(world: int) -> list[str]:
    """Every answer that some question of the world has."""
    return sorted({question(make_world(world), number).answer for number in range(QUESTIONS)})


def plans(bridge: Bridge, root: Path) -> Iterator[str]:
    """The shortest plan and the answer score; an answer that another question has does not."""
    for world in WORLDS:
        env = AWorldEnv(bridge, root)
        for number in range(QUESTIONS):
            env.reset(options={"world": world, "question": number})
            asked = question(make_world(world), number)
            outcomes = [env.step(write(call))[4]["outcome"] for call in asked.plan]
            last = env.step(f"<answer>{asked.answer}</answer>")
            if set(outcomes) != {"answered"} or last[1] != 1.0:
                yield f"world {world} question {number}: the shortest plan ends with {outcomes} and reward {last[1]}"


def answers() -> Iterator[str]:
    """No wrong guess scores, however it is written; of several guesses at once none does."""
    for world in WORLDS:
        every = guesses(world)
        for number in range(QUESTIONS):
            true = question(make_world(world), number).answer
            wrong = [guess for guess in every if guess != true]
            texts = [*wrong, ", ".join(every), "; ".join(every), " ".join(every), f"{true} or {wrong[0]}", f"not {true}", ""]
            texts += [f"{true}{true}", f"-{true}", f"{true}e0", f"{true}/1"] if true.isdigit() else [f"{true} {true}"]
            for text in texts:
                if score(text, true):
                    yield f"world {world} question {number}: {text[:60]!r} scores for {true!r}"
            if parse_formula(f"{true}+0").value is not None and score(f"{true}+0", true):
                yield f"question {number}: a formula scores as its value"


def turns(bridge: Bridge, root: Path) -> Iterator[str]:
    """What is no turn ends nothing, pays nothing and costs nothing; refused calls neither."""
    env = AWorldEnv(bridge, root)
    constrained = [tool for tool in TOOLS.values() if tool.needs]
    words = {"int": "1", "str": "p1"}
    calls = [" ".join([tool.full, *(words[kind] for _, kind in tool.params)]) for tool in constrained]
    for text in [*NO_TURNS, *calls]:
        env.reset(options={"world": 0, "question": 5})
        left = env.left
        _, reward, terminated, truncated, info = env.step(text)
        if reward or terminated or truncated or env.left != left or info["outcome"] not in ("malformed", "needs"):
            yield f"{text[:40]!r} has an effect"


def overlaps() -> Iterator[str]:
    """No two splits share a world, by number or by what it holds."""
    owner: dict[str, str] = {}
    for split, numbers in data.SPLITS.items():
        for number in numbers[:200]:
            if owner.setdefault(make_world(number).digest, split) != split:
                yield f"world {number} of {split} is also one of {owner[make_world(number).digest]}"


def main() -> int:
    """Runs every attack; 1 if one succeeded."""
    holes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for world in WORLDS:
            write_world(make_world(world), world_folder(root, world))
        with Bridge(LocalHub(root)) as bridge:
            attacks = {
                "shortest plans": plans(bridge, root), "wrong answers": answers(), "no turns": turns(bridge, root),
                "splits": overlaps(),
            }  # fmt: skip
            for name, attack in attacks.items():
                found = list(attack)
                print(f"{name}: {len(found)} holes")
                holes += found
    for hole in holes[:50]:
        print(f"HOLE {hole}")
    print("no hole found" if not holes else f"{len(holes)} holes")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
