"""What `scripts.cluster_check` asserts of a finished run of verl; each check says what it saw.

The strict ones: every recorded reward is our environment's on the same answer; verl's first gradient is ours on the same
tokens; the mask covers the policy's tokens alone. The statistical ones fail beyond four standard errors.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pyarrow.parquet
import torch

from common import advantages, grpo, losses
from common.algo import AlgoConfig
from common.backends import verl
from common.backends.verl_worker import open_env
from common.checkpoints import load_model
from common.episodes import Episode, run_episodes, token_logprobs
from common.files import read_json_lines
from common.loop import to_batch
from common.runlog import RunLog
from common.seeding import generator
from common.tokenizers import encode_feedback
from experiments.exp_7_11_general_points import run
from experiments.exp_7_11_general_points.evaluate import Evaluator
from experiments.exp_7_11_general_points.settings import Settings

SMALLEST_DIFFERENCE = 1e-5  # of two rewards: verl keeps them in float32
LARGEST_MEAN_GAP = 1e-4  # between a token's probability in sampler and trainer: float32 in both
GRADIENT_TOLERANCE = 0.001  # relative; both compute in float32, and our std_eps is 1e-4 where theirs is 1e-6
STANDARD_ERRORS = 4.0
OWN_SAMPLES = 4  # times verl's answers, for a smaller error on our side
EVALUATED = 32  # tasks of each rule


class Verdict:
    """Collects the checks and prints each as it is known."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.count = 0

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Notes one check; `detail` says what was seen."""
        self.count += 1
        self.failed += [] if passed else [name]
        print(f"  {'pass' if passed else 'FAIL'}  {name}{': ' if detail else ''}{detail}", flush=True)


def judge(settings: Settings, job: verl.Job, algo: AlgoConfig, start: Path, teacher: Path | None, verdict: Verdict) -> None:
    """All checks of a run that ended well; start: the folder of the model it began from, teacher: of one it distilled."""
    check_metrics(job, algo, teacher is not None, verdict)
    check_rewards(job, algo, verdict)
    check_sampler(job, algo, start, verdict)
    if algo.max_turns > 1:
        check_masks(job, algo, start, verdict)
        check_gradient(job, algo, start, teacher, verdict)
    check_model(settings, job, algo, start, teacher is None, verdict)


# What verl wrote -------------------------------------------------------------------------------------------------------


def metrics_of(job: verl.Job) -> list[dict[str, Any]]:
    return [row["data"] for row in read_json_lines(job.folder / "metrics.jsonl")]


def answers_of(job: verl.Job) -> list[dict[str, Any]]:
    """One row per episode as verl recorded it: input, output, gts (the task), score, step."""
    return [row for file in sorted((job.folder / "rollouts").glob("*.jsonl")) for row in read_json_lines(file)]


def episodes_of(job: verl.Job) -> list[dict[str, Any]]:
    """One row per episode of many turns as our agent loop recorded it, with all token ids."""
    return [row for file in sorted((job.folder / "episodes").glob("*.jsonl")) for row in read_json_lines(file)]


def exported(job: verl.Job) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(job.train_file).to_pylist()
    return rows


def env_of(job: verl.Job) -> Callable[[], gymnasium.Env]:
    info = exported(job)[0]["extra_info"]
    return lambda: open_env(info["env"], json.loads(info["env_kwargs"]))


def replay(job: verl.Job, task: dict[str, Any], texts: Sequence[str]) -> tuple[list[float], list[str]]:
    """Rewards and replies of our environment for the same answers."""
    env = env_of(job)()
    env.reset(options=dict(task))
    played = [env.step(text) for text in texts]
    return [float(step[1]) for step in played], [str(step[0]) for step in played]


# Checks ---------------------------------------------------------------------------------------------------------------


def check_metrics(job: verl.Job, algo: AlgoConfig, distills: bool, verdict: Verdict) -> None:
    """All steps were done, losses and norms are finite, the sampler has the trainer's weights."""
    rows = metrics_of(job)
    wanted = ["actor/distillation/loss" if distills else "actor/pg_loss", "actor/grad_norm", "critic/score/mean"]
    wanted += ["critic/vf_loss"] if algo.name == "ppo" else []
    wanted += ["actor/kl_loss"] if algo.kl_coef > 0 else []
    values = {key: [math.nan if row.get(key) is None else row[key] for row in rows] for key in wanted}
    finite = len(rows) == job.steps and all(math.isfinite(value) for series in values.values() for value in series)
    shown = ", ".join(f"{key} {' '.join(f'{value:.3g}' for value in series)}" for key, series in values.items())
    verdict.check(f"{job.arm}: losses of {job.steps} steps are finite", finite, shown)
    worst = max((row.get("training/rollout_probs_diff_mean", math.inf) for row in rows), default=math.inf)
    verdict.check(f"{job.arm}: sampler and trainer agree", worst < LARGEST_MEAN_GAP, f"mean gap in probability {worst:.2g}")


def check_rewards(job: verl.Job, algo: AlgoConfig, verdict: Verdict) -> None:
    """The rewards that verl recorded against our environment's on the same answers."""
    rows = answers_of(job)
    expected = job.steps * algo.prompts_per_step * algo.group_size
    if algo.max_turns > 1:
        episodes = episodes_of(job)
        differences = [abs(sum(e["rewards"]) - sum(replay(job, e["task"], e["texts"])[0])) for e in episodes]
        same = sorted(round(row["score"], 4) for row in rows) == sorted(round(sum(e["rewards"]), 4) for e in episodes)
        differences += [] if same else [math.inf]
    else:
        differences = [abs(row["score"] - sum(replay(job, json.loads(row["gts"]), [row["output"]])[0])) for row in rows]
    worst = max(differences, default=math.inf)
    values = sorted({round(row["score"], 3) for row in rows})
    detail = f"{len(rows)} of {expected} answers, largest difference {worst:.2g}, rewards {values}"
    verdict.check(f"{job.arm}: rewards are ours", len(rows) == expected and worst < SMALLEST_DIFFERENCE, detail)


def check_sampler(job: verl.Job, algo: AlgoConfig, start: Path, verdict: Verdict) -> None:
    """The first step's answers, all by the start model, earn what our own sampler's do on the same tasks."""
    rows = answers_of(job)
    first = [row["score"] for row in rows if row["step"] == min(row["step"] for row in rows)]
    tasks = [json.loads(row["reward_model"]["ground_truth"]) for row in exported(job)[: algo.prompts_per_step]]
    model, tokenizer = load_model(start)
    own = run_episodes(
        model,
        tokenizer,
        env_of(job),
        tasks,
        group_size=algo.group_size * OWN_SAMPLES,
        max_turns=algo.max_turns,
        max_new_tokens=algo.max_new_tokens,
        temperature=algo.temperature,
        generator=generator(job.seed, "cluster-check"),
    )
    ours = [episode.reward for episode in own]
    gap = statistics.fmean(first) - statistics.fmean(ours)
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(ours) / len(ours))
    detail = f"{statistics.fmean(first):.2f} over {len(first)} against {statistics.fmean(ours):.2f}, error {error:.2f}"
    spread = len(set(first)) > 1  # else nothing is compared, and nothing could be learnt
    verdict.check(f"{job.arm}: the start earns what it earns here", spread and abs(gap) < STANDARD_ERRORS * error, detail)


def check_masks(job: verl.Job, algo: AlgoConfig, start: Path, verdict: Verdict) -> None:
    """Masks of many-turn episodes: 1 exactly on what the policy wrote, 0 on the replies, token for token."""
    _, tokenizer = load_model(start)
    episodes = episodes_of(job)
    wrong = 0
    for episode in episodes:
        pieces: list[tuple[int, list[int]]] = []
        for token, mask in zip(episode["response_ids"], episode["mask"], strict=True):
            if not pieces or pieces[-1][0] != mask:
                pieces.append((mask, []))
            pieces[-1][1].append(token)
        own, others = ([ids for kind, ids in pieces if kind == mask] for mask in (1, 0))
        wrong += [tokenizer.decode(ids, skip_special_tokens=True) for ids in own] != episode["texts"]
        wrong += max(map(len, own)) > algo.max_new_tokens  # it would hold the stop token of the reply to a cut answer
        replies = replay(job, episode["task"], episode["texts"])[1]
        ended = [ids[-1] == tokenizer.eos_token_id for ids in own]
        wrong += others != [encode_feedback(tokenizer, text, end) for text, end in zip(replies[:-1], ended[:-1])]
    turns = [len(episode["texts"]) for episode in episodes]
    detail = f"{len(episodes)} episodes of {min(turns, default=0)} to {max(turns, default=0)} turns, {wrong} wrong"
    right = bool(episodes) and not wrong and max(turns) > 1
    verdict.check(f"{job.arm}: masks cover the policy's tokens alone", right, detail)


def check_gradient(job: verl.Job, algo: AlgoConfig, start: Path, teacher: Path | None, verdict: Verdict) -> None:
    """The norm of verl's first gradient against that of the native loss on the same episodes (one update a step).

    A KL term against the start has no gradient yet.
    """
    rows = episodes_of(job)
    first = [row for row in rows if row["step"] == min(row["step"] for row in rows)]
    theirs, ours = metrics_of(job)[0]["actor/grad_norm"], native_gradient(first, algo, start, teacher)
    close = abs(theirs - ours) < GRADIENT_TOLERANCE * ours
    verdict.check(f"{job.arm}: the first gradient is ours", close, f"norm {theirs:.5g} against {ours:.5g}")


def native_gradient(rows: list[dict[str, Any]], algo: AlgoConfig, start: Path, teacher: Path | None) -> float:
    """Norm of the native gradient on recorded episodes of one step; with a teacher, that of on-policy distillation."""
    model, tokenizer = load_model(start)
    tasks = [json.dumps(row["task"], sort_keys=True) for row in rows]
    episodes = []
    for row, task in zip(rows, tasks, strict=True):
        ids, mask = row["prompt_ids"] + row["response_ids"], [0] * len(row["prompt_ids"]) + row["mask"]
        logps = [0.0] * len(row["prompt_ids"]) + row["logps"]
        turns = [own - 1 for own in mask]  # which turn plays no part here
        reward = sum(row["rewards"])
        episodes.append(Episode(ids, mask, logps, turns, len(row["prompt_ids"]), row["task"], tasks.index(task), reward))
    batch = to_batch(episodes, tokenizer, model)
    if teacher is None:
        rewards_B = torch.tensor([episode.reward for episode in episodes], dtype=torch.float64)
        group_B = torch.tensor([episode.group for episode in episodes])
        advantages_B = advantages.outcome_advantages(algo.advantage, rewards_B, group_B, ddof=algo.std_ddof, eps=algo.std_eps)
        advantages_BT = advantages_B[:, None] * batch.mask_BT
    else:
        with torch.no_grad():
            own_BT, other_BT = (
                token_logprobs(judge, batch.ids_BT, batch.attention_BT, mask_BT=batch.mask_BT)[0]
                for judge in (model, load_model(teacher)[0])
            )
        advantages_BT = other_BT - own_BT
    constant = algo.max_new_tokens * algo.max_turns
    weight_B = losses.sequence_weights(batch.mask_BT.sum(1), algo.loss_agg, constant=constant)
    grpo.accumulate(model, batch, torch.arange(len(episodes)), advantages_BT, weight_B, None, algo, defaultdict(float))
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def check_model(settings: Settings, job: verl.Job, algo: AlgoConfig, start: Path, by_reward: bool, verdict: Verdict) -> None:
    """verl's checkpoint becomes an HF folder that plain transformers loads; its weights moved; our evaluator plays it.

    by_reward: it was trained for reward, so that it must not earn less.
    """
    from transformers import AutoModelForCausalLM

    folder = job.folder / "model"
    verl.to_hf_folder(job.folder / "checkpoints" / f"global_step_{job.steps}" / "actor", folder)
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (start, folder))
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    verdict.check(f"{job.arm}: the checkpoint loads in plain transformers", finite and before.keys() == after.keys())
    largest = max(float((after[key].float() - before[key].float()).abs().max()) for key in before)
    bound = 3 * algo.lr * job.steps * algo.minibatches * algo.epochs  # Adam moves a weight by about its rate per update
    verdict.check(f"{job.arm}: the weights moved", 0 < largest < bound, f"by at most {largest:.2g}")
    start_rewards = evaluate(settings, job, algo, start, "start")
    rewards = evaluate(settings, job, algo, folder, "end")
    gaps = [new - old for new, old in zip(rewards, start_rewards, strict=True)]
    error = math.sqrt(statistics.variance(gaps) / len(gaps))
    detail = f"{len(gaps)} tasks, mean reward {statistics.fmean(rewards):.2f}, before {statistics.fmean(start_rewards):.2f}"
    kept = all(math.isfinite(gap) for gap in gaps) and not (by_reward and statistics.fmean(gaps) < -STANDARD_ERRORS * error)
    verdict.check(
        f"{job.arm}: evaluated by ours{', no worse' if by_reward else ''}",
        kept,
        f"{detail}, error of the difference {error:.2f}",
    )


def evaluate(settings: Settings, job: verl.Job, algo: AlgoConfig, folder: Path, name: str) -> list[float]:
    """Rewards of a model on the evaluation tasks of both rules, always with the same random numbers."""
    model, tokenizer = load_model(folder)
    labels = {"experiment": run.NUMBER, "scale": settings.scale, "variant": None, "arm": job.arm, "seed": job.seed}
    with RunLog(job.folder / "evaluation" / name, labels) as log:
        evaluator = Evaluator(settings, tokenizer, log, job.seed, job.seed, algo.max_turns, leak=False)
        played = [episode for split in ("id", "ood") for episode in evaluator.play(model, split, 1, limit=EVALUATED)[0]]
    return [episode.reward for episode in played]
