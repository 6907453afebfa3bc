"""On-policy distillation at cluster scale: plans, what is refused, exported tasks; no verl and no GPU needed."""

import json
from dataclasses import replace

import pyarrow.parquet
import pytest

from common.config import ConfigError, compose
from experiments.exp_7_opd_distillation import chains, cluster, data, dial, stages
from experiments.exp_7_opd_distillation.settings import Settings

NUMBER = "7-opd"


def settings_with(*changes):
    return compose(NUMBER, Settings, ["scale=cluster", "dry=true", *changes])


def test_the_dry_run_prints_plans_and_submissions_and_starts_nothing(tmp_path, capsys):
    settings = settings_with(f"runs_dir={tmp_path}")
    assert cluster.main(settings) == 0 and not list(tmp_path.iterdir())
    shown = capsys.readouterr().out
    assert shown.count("ray job submit --address http://127.0.0.1:8265") == 2
    assert "512 prompts x 4 answers = 2048 episodes a step" in shown and "256 prompts x 8 answers" in shown
    assert "distillation.teacher_models.teacher_model.model_path=/models/chain-teacher" in shown
    assert "distillation.distillation_loss.loss_mode=k1" in shown and shown.count("the teacher's scoring") == 1


def test_the_teachers_pass_is_part_of_the_budget():
    grpo, opd = (cluster.plan(settings_with(), arm, 100) for arm in ("chain_grpo", "chain_opd_sampled"))
    row = 64 + 96
    sampled, answers = 512 * 64 + 2048 * 96, 2048 * row
    own = 8.19e9 * (2 * sampled + 2 * answers + 6 * answers)
    assert opd.estimate.flops == pytest.approx(own + 2 * 32.8e9 * answers)
    assert opd.estimate.tokens["judged"] == answers and "judged" not in grpo.estimate.tokens
    assert opd.job.steps == int(8e18 // opd.estimate.flops) and opd.keys["trainer.total_training_steps"] == opd.job.steps
    assert opd.keys["actor_rollout_ref.actor.optim.lr"] == 1e-4 and opd.keys["distillation.nnodes"] == 1


def test_the_dial_is_played_by_the_agent_loop():
    planned = cluster.plan(settings_with("arms=[dial_opd_sampled]"), "dial_opd_sampled", 100)
    assert planned.keys["actor_rollout_ref.rollout.agent.default_agent_loop"] != "single_turn_agent"
    assert planned.keys["data.max_response_length"] == 12 * 4 + 11 * 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("arms=[chain_opd]", "distill.objective=reverse_kl: verl cannot do it"),
        ("arms=[chain_opd_masked]", "chain_opd_masked has method=distill credit=until_fault; allowed are"),
        ("arms=[chain_sft]", "chain_sft has method=sft"),
        ("chain.branch_flops=4e16", "one step takes .* FLOPs with the teacher's"),
        ("judge.tensor_parallel=3", "teacher.tensor_parallel=3: must divide"),
        ("cluster.gpus_per_node=6", "must be a multiple of the 6 GPUs"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(change, words):
    changes = [change] if change.startswith("arms") else [change, "arms=[chain_opd_sampled]"]
    with pytest.raises(ConfigError, match=words):
        cluster.main(settings_with(*changes))


@pytest.mark.parametrize(("arm", "module"), [("chain_opd_sampled", chains), ("dial_grpo", dial)])
def test_the_exported_tasks_are_those_of_the_native_steps(arm, module, tmp_path):
    changes = [
        f"{task}.{key}" for task in ("chain", "dial") for key in ("train_items=12", "few_items=4", "episodes_per_step=16")
    ]
    settings = settings_with(f"arms=[{arm}]", *changes, "cluster.micro_batch=1", "evaluation.curve_items=6")
    planned = cluster.plan(settings, arm, 100)
    job = replace(planned.job, folder=tmp_path, steps=3)
    cluster.export(settings, arm, planned.algo, job)
    rows = pyarrow.parquet.read_table(job.train_file).to_pylist()
    tasks = [json.loads(row["reward_model"]["ground_truth"]) for row in rows]
    task, count = settings.branches[arm].task, planned.algo.prompts_per_step
    items = stages.training_items(settings, task, 100)
    assert tasks == [t for step in range(3) for t in data.training_tasks(task, items, 100, step, count)]
    tests = pyarrow.parquet.read_table(job.test_file).to_pylist()
    assert [row["data_source"] for row in tests] == [f"7-opd-{split}" for split in ("id", "ood") for _ in range(6)]
    held = [json.loads(row["reward_model"]["ground_truth"]) for row in tests]
    assert not [t for t in held if t in tasks] and json.loads((tmp_path / "agent.yaml").read_text())[0]["max_turns"] >= 1
    assert rows[0]["extra_info"]["env"] == cluster.ENVS[task] and module.ENV_ID in rows[0]["extra_info"]["env"]
