"""The verdict of `make cluster-check` can fail: each check goes red on the fault it is there for. No verl, no Ray."""

import json
from pathlib import Path

import pytest
import torch

from common.algo import load_algo
from common.backends import verl
from common.checkpoints import load_model, save_model
from common.config import compose
from common.episodes import run_episodes
from common.models import DecoderConfig, build_decoder
from common.seeding import generator
from experiments.exp_7_11_general_points import cluster, data
from experiments.exp_7_11_general_points.settings import Settings
from scripts import cluster_judge as judge
from scripts.cluster_check import _options
from scripts.cluster_judge import Verdict

CHANGES = {"prompts_per_step": 2, "group_size": 3, "max_turns": 2, "max_new_tokens": 8, "drop_zero_variance": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A start model and a teacher."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = data.build_tokenizer()
    shape = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=16)
    for seed, name in enumerate(("start", "teacher")):
        save_model(build_decoder(shape, tokenizer, seed), tokenizer, folder / name)
    return folder / "start", folder / "teacher"


@pytest.fixture
def job(tmp_path, models):
    """A finished run of one step, as verl and our agent loop would have left it; rewards are made to differ."""
    algo = load_algo("grpo", CHANGES)
    job = verl.Job("7-11", "grpo", str(models[0]), tmp_path, 1, 0, prompt_tokens=32, feedback_tokens=16)
    settings = compose("7-11", Settings, ["scale=smoke", "seeds=1", "first_seed=0", "evaluation.curve_hands=8"])
    branch = settings.branches["iterations_5"]
    cluster.export(settings, branch, algo, job, split_seed=0)
    model, tokenizer = load_model(models[0])
    tasks = [json.loads(row["reward_model"]["ground_truth"]) for row in judge.exported(job)]
    keys = {"group_size": 3, "max_turns": 2, "max_new_tokens": 8, "temperature": 1.0, "generator": generator(0, "test")}
    episodes, answers = [], []
    for played in run_episodes(model, tokenizer, judge.env_of(job), tasks, **keys):
        cut = played.prompt_length
        row = {"task": played.task, "step": 0, "prompt_ids": played.ids[:cut], "response_ids": played.ids[cut:]}
        row |= {"mask": played.mask[cut:], "logps": played.logps[cut:], "texts": played.texts, "rewards": played.turn_rewards}
        episodes.append(row)
        answers.append({"score": played.reward, "step": 1})
    write_rows(tmp_path / "episodes" / "1.jsonl", episodes)
    write_rows(tmp_path / "rollouts" / "1.jsonl", answers)
    metrics = {"actor/pg_loss": 0.0, "actor/grad_norm": 1.0, "critic/score/mean": 0.0}
    write_rows(tmp_path / "metrics.jsonl", [{"data": metrics | {"training/rollout_probs_diff_mean": 1e-6}}])
    return job


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def change(path: Path, edit) -> None:
    """Rewrites the first row of a file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    edit(rows[0])
    write_rows(path, rows)


def failed(check, *arguments) -> bool:
    verdict = Verdict()
    check(*arguments, verdict)
    assert verdict.count
    return bool(verdict.failed)


@pytest.mark.parametrize("fault", [None, "loss", "steps", "gap"])
def test_metrics(job, fault):
    algo = load_algo("grpo", CHANGES)
    if fault == "loss":
        change(job.folder / "metrics.jsonl", lambda row: row["data"].update({"actor/grad_norm": None}))
    if fault == "gap":
        change(job.folder / "metrics.jsonl", lambda row: row["data"].update({"training/rollout_probs_diff_mean": 1e-3}))
    if fault == "steps":
        write_rows(job.folder / "metrics.jsonl", judge.read_json_lines(job.folder / "metrics.jsonl") * 2)
    assert failed(judge.check_metrics, job, algo, False) == (fault is not None)


@pytest.mark.parametrize("fault", [None, "verl's", "the loop's", "missing"])
def test_rewards(job, fault):
    algo = load_algo("grpo", CHANGES)
    if fault == "verl's":
        change(job.folder / "rollouts" / "1.jsonl", lambda row: row.update(score=row["score"] + 0.001))
    if fault == "the loop's":
        change(job.folder / "episodes" / "1.jsonl", lambda row: row["rewards"].__setitem__(0, row["rewards"][0] + 0.001))
    if fault == "missing":
        write_rows(job.folder / "rollouts" / "1.jsonl", judge.answers_of(job)[1:])
    assert failed(judge.check_rewards, job, algo) == (fault is not None)


@pytest.mark.parametrize("fault", [None, "environment counts", "policy left out"])
def test_masks(job, models, fault):
    def flip(row):
        at = row["mask"].index(0) if fault == "environment counts" else 0
        row["mask"][at] = 1 - row["mask"][at]

    if fault:
        change(job.folder / "episodes" / "1.jsonl", flip)
    assert failed(judge.check_masks, job, load_algo("grpo", CHANGES), models[0]) == (fault is not None)


@pytest.mark.parametrize("distills", [False, True])
def test_the_gradient_sees_mask_reward_and_teacher(job, models, distills):
    algo, (start, teacher) = load_algo("grpo", CHANGES), models
    rows = judge.episodes_of(job)
    for index, row in enumerate(rows):
        row["rewards"] = [float(index % 3 == 0)]
    write_rows(job.folder / "episodes" / "1.jsonl", rows)
    norm = judge.native_gradient(rows, algo, start, teacher if distills else None)
    assert norm > 0
    change(job.folder / "metrics.jsonl", lambda row: row["data"].update({"actor/grad_norm": norm * 1.0005}))
    arguments = (job, algo, start, teacher if distills else None)
    assert not failed(judge.check_gradient, *arguments)
    change(job.folder / "metrics.jsonl", lambda row: row["data"].update({"actor/grad_norm": norm * 1.002}))
    assert failed(judge.check_gradient, *arguments)
    for row in rows:
        row["mask"] = [1] * len(row["mask"])
    assert judge.native_gradient(rows, algo, start, arguments[3]) != pytest.approx(norm, rel=judge.GRADIENT_TOLERANCE)


def test_the_native_gradient_by_hand(job, models):
    algo, rows = load_algo("grpo", {**CHANGES, "loss_agg": "seq_mean"}), judge.episodes_of(job)[:2]
    for row, reward in zip(rows, (1.0, 0.0)):
        row.update(rewards=[reward], task=rows[0]["task"])
    model, _ = load_model(models[0])
    advantage = 0.5 / (0.5**0.5 + algo.std_eps)  # one of two answers is right: the sample deviation is sqrt(1/2)
    loss = 0.0
    for row, sign in zip(rows, (1, -1)):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        logp_T = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        own_T = torch.tensor([0] * (len(row["prompt_ids"]) - 1) + row["mask"])
        loss = loss - sign * advantage * (logp_T * own_T).sum() / own_T.sum() / 2
    loss.backward()
    norm = sum(float(parameter.grad.square().sum()) for parameter in model.parameters()) ** 0.5
    assert judge.native_gradient(rows, algo, models[0], None) == pytest.approx(norm, rel=1e-4)


def test_options():
    names, limit, folder = _options([])
    assert (names, limit) == (["grpo", "ppo"], 900) and folder.name == "cluster-check"
    with pytest.raises(judge.verl.ConfigError, match="runs=grp: allowed are"):
        _options(["runs=grp"])
    with pytest.raises(judge.verl.ConfigError, match="limit_s=soon: must be a number"):
        _options(["limit_s=soon"])
