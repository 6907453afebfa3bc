"""Any model behind an OpenAI-compatible server plays the same world:

    TEACHER_BASE_URL=http://localhost:8000/v1 TEACHER_MODEL=Qwen/Qwen3-4B \\
        python -m experiments.exp_7_16_aworld.play [questions=30] [world=600]

Each turn asks for one completion of the whole transcript (common.teacher_server), so that any chat model will do. Episodes
run side by side, as many as the server's configuration has workers. Prints each episode, then the numbers of the report.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.episodes import Episode
from common.schema import ConfigError
from common.teacher import Ask
from common.teacher_server import ServerConfig, ServerTeacher
from experiments.exp_7_16_aworld import data
from experiments.exp_7_16_aworld.env import Envs
from experiments.exp_7_16_aworld.evaluate import call_metrics, episode_metrics
from experiments.exp_7_16_aworld.hub import Bridge, ServerHub
from experiments.exp_7_16_aworld.world import make_world, world_folder, write_world

WORLDS = Path("runs/7-16/worlds")
Answer = Callable[[str, str], str | None]


def play(answer: Answer, make_env: Envs, task: dict) -> Episode:
    """One episode; `answer` maps a key and a transcript to the next turn, or None where the model gave none.

    The episode has texts, infos and reward; its lists of tokens stay empty.
    """
    env = make_env()
    observation, _ = env.reset(options=dict(task))
    episode, transcript = Episode([], [], [], [], prompt_length=0, task=task, group=0), observation
    while not (episode.terminated or episode.truncated):
        text = answer(f"{task['world']}-{task['question']}-{len(episode.texts)}", transcript) or ""
        observation, reward, episode.terminated, episode.truncated, info = env.step(text)
        episode.texts.append(text)
        episode.turn_rewards.append(reward)
        episode.infos.append(info)
        transcript += f"\n\nYou wrote:\n{text}\n\nReply:\n{observation}\n\nYour next turn:"
    env.close()
    episode.reward, episode.success = sum(episode.turn_rewards), bool(episode.infos[-1]["success"])
    return episode


def tally(episodes: Sequence[Episode]) -> dict[str, float]:
    """The numbers of the report as far as these episodes define them."""
    found = {name: sum(values) / len(values) for name, values in episode_metrics(episodes).items()}
    return found | {name: value for name, (value, _) in call_metrics(episodes).items() if value is not None}


def main(words: Sequence[str]) -> None:
    """Plays the first questions of a world."""
    given = dict(word.split("=", 1) for word in words)
    if not given.keys() <= {"questions", "world"} or not all(value.isdigit() for value in given.values()):
        raise ConfigError(f"{' '.join(words)}: allowed are questions=NUMBER and world=NUMBER.")
    count, world = int(given.get("questions", 30)), int(given.get("world", data.SPLITS["test"][0]))
    teacher = ServerTeacher.from_environment(ServerConfig(max_tokens=4096))
    write_world(make_world(world), world_folder(WORLDS, world))

    def answer(key: str, transcript: str) -> str | None:
        return teacher.ask(Ask(key, transcript)).text

    with Bridge(ServerHub(WORLDS)) as bridge, ThreadPoolExecutor(teacher.config.workers) as pool:
        make_env = Envs(bridge, WORLDS, syntax="json", limit=32)
        tasks = [{"world": world, "question": number} for number in range(count)]
        episodes = list(pool.map(lambda task: play(answer, make_env, task), tasks))
    for episode in episodes:
        print(f"question {episode.task['question']}: {episode.infos[-1]['reason']} after {len(episode.texts)} turns")
    for name, value in tally(episodes).items():
        print(f"{name}: {value:.3f}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
