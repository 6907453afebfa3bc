"""Our environments inside verl: tasks as rows of parquet, the reward of a one-turn task, episodes of many turns.

`task_row` and `write_tasks` export; the rest runs inside verl's processes, which find it by name: `compute_score` as custom
reward function, `TextEnvLoop` as agent loop. A row says which Gymnasium environment it belongs to.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium

from common.algo import AlgoConfig
from common.files import strict_json, write_atomic, write_json
from common.tokenizers import encode_feedback, encode_prompt

AGENT = "text_env"


def open_env(env: str, kwargs: Mapping[str, Any]) -> gymnasium.Env:
    """The environment `module:Id` with its arguments; the module's import registers the id."""
    return gymnasium.make(env, disable_env_checker=True, **kwargs)


def task_row(
    experiment: str, split: str, index: int, task: Mapping[str, Any], env: str, env_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """A task as a row of verl's data format; the prompt is the environment's own first observation.

    task: options of the environment's reset, as JSON values. env: `module:Id` of a registered Gymnasium environment.
    """
    made = open_env(env, env_kwargs)
    observation, _ = made.reset(seed=task.get("seed"), options=dict(task))
    made.close()
    return {
        "data_source": experiment,
        "prompt": [{"role": "user", "content": observation}],
        "ability": experiment,
        "reward_model": {"style": "rule", "ground_truth": strict_json(task)},
        "extra_info": {"split": split, "index": index, "env": env, "env_kwargs": strict_json(env_kwargs)},
    }


def write_tasks(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows of `task_row` as a parquet file, in their order. ValueError when there are none."""
    import pyarrow
    import pyarrow.parquet

    if not rows:
        raise ValueError(f"{path} would hold no task")
    write_atomic(path, lambda handle: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), handle))


def write_agent(path: Path, algo: AlgoConfig, rollouts: Path | None = None) -> None:
    """The file that names our agent loop to verl (JSON, which its YAML reader takes)."""
    loop = {"name": AGENT, "_target_": f"{__name__}.TextEnvLoop", "max_turns": algo.max_turns}
    loop |= {"max_new_tokens": algo.max_new_tokens, "rollouts": str(rollouts) if rollouts else None}
    write_json(path, [loop])


def _from_row(ground_truth: str, extra_info: Mapping[str, Any]) -> tuple[gymnasium.Env, dict[str, Any], str]:
    """Environment, task and first observation of an exported row."""
    task = json.loads(ground_truth)
    env = open_env(extra_info["env"], json.loads(extra_info["env_kwargs"]))
    observation, _ = env.reset(seed=task.get("seed"), options=dict(task))
    return env, task, observation


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any], **_: Any
) -> dict[str, float]:
    """verl's custom reward function: the environment's reward for one answer (score), and its verdict 1 or 0 (acc).

    ground_truth: the task as JSON, the options of the environment's reset. Raises ValueError if the environment goes on
    after the answer: such a task needs the agent loop.
    """
    env, task, _observation = _from_row(ground_truth, extra_info)
    _, reward, terminated, truncated, info = env.step(solution_str)
    env.close()
    if not (terminated or truncated):
        raise ValueError(f"{extra_info['env']} goes on after one answer to {task}: play it with algo.max_turns above 1")
    return {"score": float(reward), "acc": float(bool(info["success"]))}


@dataclass
class Played:
    """One episode as verl wants it: what follows the prompt, with mask 1 on the policy's tokens."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    success: bool = False

    def append(self, ids: list[int], logps: list[float] | None) -> None:
        """Adds tokens of the policy (with logps) or of the environment (None)."""
        self.response_ids += ids
        self.mask += [int(logps is not None)] * len(ids)
        self.logps += logps if logps is not None else [0.0] * len(ids)


Generate = Callable[[list[int]], Awaitable[tuple[list[int], list[float]]]]


async def play(
    generate: Generate, tokenizer: Any, env: gymnasium.Env, observation: str, max_turns: int, max_new_tokens: int, limit: int
) -> Played:
    """One episode: `generate` maps all ids so far to the ids it wrote and their log-probabilities.

    Token ids are only ever appended, as in common.episodes: nothing is decoded and encoded again. The episode ends when
    the environment ends it, after max_turns turns, or when another reply and answer might not fit into `limit` tokens.
    """
    episode = Played(encode_prompt(tokenizer, observation))
    for turn in range(max_turns):
        ids, logps = await generate(episode.prompt_ids + episode.response_ids)
        episode.append(ids, logps)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        # In a thread: a slow verifier must not hold up the other episodes of this process.
        observation, reward, terminated, truncated, info = await asyncio.to_thread(env.step, text)
        episode.texts.append(text)
        episode.rewards.append(float(reward))
        episode.success = bool(info["success"])
        if terminated or truncated or turn + 1 == max_turns:
            break
        reply = encode_feedback(tokenizer, observation, bool(ids) and ids[-1] == tokenizer.eos_token_id)
        if len(episode.response_ids) + len(reply) + max_new_tokens > limit:
            break
        episode.append(reply, None)
    return episode


class TextEnvLoop:
    """verl's agent loop over a text environment; one instance plays one episode.

    It has the interface of verl.experimental.agent_loop.AgentLoopBase without deriving from it: that class tokenises the
    conversation by the chat template of the model's family, while here prompt and feedback become ids as in the native
    loops. max_turns, max_new_tokens: per episode and per answer. rollouts: folder for one JSON line per episode, or None.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        max_turns: int,
        max_new_tokens: int,
        rollouts: str | None = None,
        **_: Any,
    ) -> None:
        self.limit = int(trainer_config.config.actor_rollout_ref.rollout.response_length)
        self.server, self.tokenizer, self.rollouts = server_manager, tokenizer, rollouts
        self.max_turns, self.max_new_tokens = max_turns, max_new_tokens

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """Plays the row's task and returns verl's AgentLoopOutput, whose reward is the sum over turns."""
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        env, task, observation = _from_row(row["reward_model"]["ground_truth"], row["extra_info"])
        params = {**sampling_params, "max_tokens": self.max_new_tokens}
        session, start, waited = os.urandom(16).hex(), time.perf_counter(), 0.0
        versions: list[Any] = []

        async def generate(ids: list[int]) -> tuple[list[int], list[float]]:
            nonlocal waited
            begun = time.perf_counter()
            output = await self.server.generate(request_id=session, prompt_ids=ids, sampling_params=params)
            waited += time.perf_counter() - begun
            versions.append(output.extra_fields.get("global_steps"))
            return list(output.token_ids), list(output.log_probs)

        episode = await play(generate, self.tokenizer, env, observation, self.max_turns, self.max_new_tokens, self.limit)
        env.close()
        if self.rollouts is not None:
            self._write({"task": task, "step": versions[0], **asdict(episode)})
        return AgentLoopOutput(
            prompt_ids=episode.prompt_ids,
            response_ids=episode.response_ids,
            response_mask=episode.mask,
            response_logprobs=episode.logps,
            reward_score=sum(episode.rewards),
            num_turns=2 * len(episode.texts),
            metrics={"generate_sequences": waited, "tool_calls": time.perf_counter() - start - waited},
            extra_fields={
                "min_global_steps": versions[0],
                "max_global_steps": versions[-1],
                "turn_scores": episode.rewards,
                "tool_rewards": [],
                "reward_extra_info": {"score": sum(episode.rewards), "acc": float(episode.success)},
            },
        )

    def _write(self, line: dict[str, Any]) -> None:
        file = Path(str(self.rollouts)) / f"{os.getpid()}.jsonl"  # a file per process: no two write into one
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as handle:
            handle.write(strict_json(line) + "\n")
