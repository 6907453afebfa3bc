"""The policy of 7-13, what it imitates, its episodes and its reinforcement learning, in numbers worked out apart."""

import copy
import json
import math

import numpy as np
import pytest
import torch

from common.compute import Budget, Meter
from common.config import compose
from common.policy import build_value_head
from common.runlog import RunLog
from common.schema import ConfigError
from common.seeding import generator
from experiments.exp_7_13_simplevla import films, tasks, train
from experiments.exp_7_13_simplevla.episodes import play
from experiments.exp_7_13_simplevla.lessons import (
    Lesson,
    demonstration_frames,
    frames_of,
    imitate,
    imitation_loss,
    play_frames,
    soft_labels,
)
from experiments.exp_7_13_simplevla.policy import VlaConfig, VlaPolicy, build_policy, choose, log_probabilities
from experiments.exp_7_13_simplevla.settings import Settings

TINY = {"hidden": 16, "layers": 1, "heads": 2, "feedforward": 16}


@pytest.fixture(scope="module")
def policy():
    return build_policy(VlaConfig(**TINY), 0)


@pytest.fixture(scope="module")
def played(policy):
    layouts = tasks.draw("train", tasks.SEEN[:6], "episodes")
    return play(policy, layouts, decisions=3, temperature=1.3, stream=generator(0, "t"), tracks=True)


def algo(**changes):
    settings = compose("7-13", Settings, ["scale=smoke"])
    settings.branches["full"].changes.update({"prompts_per_step": 3, "group_size": 4, "refill_rounds": 1, **changes})
    return settings.arm_config("full")


def test_weights_and_samples_depend_on_the_seed_alone(policy):
    again = build_policy(VlaConfig(**TINY), 0)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))
    assert not torch.equal(policy.head.weight, build_policy(VlaConfig(**TINY), 1).head.weight)


def test_log_probabilities_are_exact_and_no_forbidden_bin_is_drawn(policy, played):
    assert (played.tokens[..., 3] < 2).all() and (played.tokens[..., :3] < 13).all()
    first = played.inputs.take((torch.arange(6), torch.zeros(6, dtype=torch.long)))
    logits = policy(first)[0].detach()
    assert torch.isinf(logits[..., 3, 2:]).all()
    weights = (logits / 1.3).exp()
    expected = (weights / weights.sum(-1, keepdim=True)).gather(-1, played.tokens[:, 0, ..., None])[..., 0].log()
    assert torch.allclose(expected, played.logps[:, 0], atol=1e-5)
    greedy, logp = choose(policy, first, 0, generator(0))
    assert torch.equal(greedy, logits.argmax(-1)) and torch.allclose(logp, log_probabilities(logits, 1.0).amax(-1))


def test_a_picture_policy_sees_the_picture_and_not_the_list():
    policy = build_policy(VlaConfig(**TINY, view="image", pixels=24), 0)
    frames = play_frames(policy, 5, 0)
    assert frames.inputs.image.shape == (5, 3, 24, 24)
    logits = policy(frames.inputs)[0]
    moved = frames.inputs._replace(places=frames.inputs.places + torch.tensor([0.1, 0, 0]) * (torch.arange(7) > 0)[:, None])
    assert torch.equal(logits, policy(moved)[0])
    assert not torch.equal(logits, policy(frames.inputs._replace(image=frames.inputs.image.flip(3)))[0])


def test_soft_labels_put_a_gaussian_over_the_neighbours():
    labels = soft_labels(torch.tensor([[[6, 0, 12, 1]]]), 0.5).exp()[0, 0]
    side = math.exp(-0.5 * (1 / 0.5) ** 2)
    two = math.exp(-0.5 * (2 / 0.5) ** 2)
    assert labels[0, 6] == pytest.approx(1 / (1 + 2 * side + 2 * two), rel=1e-4)
    assert labels[0, 7] / labels[0, 6] == pytest.approx(side, rel=1e-4)
    assert labels[3, 2:].sum() == 0 and labels[3, 0] / labels[3, 1] == pytest.approx(side, rel=1e-4)
    assert soft_labels(torch.tensor([[[3, 3, 3, 0]]]), 0).exp()[0, 0, 0].tolist() == [0.0] * 3 + [1.0] + [0.0] * 9


def test_imitation_learns_its_frames_and_its_loss_is_zero_at_the_labels(policy):
    learner = copy.deepcopy(policy)
    frames = demonstration_frames(learner, 1, 24, 0)
    assert 120 < len(frames.tokens) < 12 * 24 and frames.tokens.shape[1:] == (4, 4)
    before = imitation_loss(learner, frames, 0.33).item()
    lesson = Lesson(steps=60, batch=64, lr=5e-3, muon_lr=0.05)
    meter = imitate(learner, frames_of(frames, 64, 0, "x"), lesson)
    assert imitation_loss(learner, frames, 0.33).item() < 0.6 * before
    assert meter.tokens_trained == 60 * 64 * learner.length
    perfect = lambda inputs: (soft_labels(frames.tokens, 0.33), None)  # noqa: E731
    assert imitation_loss(perfect, frames, 0.33).item() == pytest.approx(0, abs=1e-5)


def test_tokens_after_the_solving_step_are_off_the_mask(policy, monkeypatch):
    monkeypatch.setattr("experiments.exp_7_13_simplevla.world.RADIUS", 10.0)  # every state is solved at once
    layouts = tasks.draw("train", tasks.SEEN[:4], "mask")
    found = play(policy, layouts, decisions=2, temperature=1.0, stream=generator(0, "m"))
    assert found.solved.all() and (found.steps == 1).all()
    assert found.mask.sum().item() == 4 * 4 and found.mask[:, 0, 0].all() and not found.acted[:, 1].any()
    assert found.pushed.all() == (found.height < 0.02).all()


def test_outcome_pays_at_the_last_decision_and_process_what_progress_brought(played):
    solved = played._replace(solved=np.array([True, False, False, False, False, True]))
    outcome = train.rewards(solved, "outcome")
    assert outcome.sum(1).tolist() == [1, 0, 0, 0, 0, 1] and outcome[0].tolist() == [0, 0, 1]
    progress = np.tile([0.2, 0.1, 0.6], (6, 1))
    process = train.rewards(solved._replace(progress=progress), "process")
    assert torch.allclose(process[0], torch.tensor([0.1, -0.05, 1.25], dtype=torch.float64))
    assert process[1].sum().item() == pytest.approx(0.3)


def test_a_step_keeps_groups_that_disagree_and_samples_again_for_the_rest(policy, monkeypatch):
    wins = iter([[0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0]])

    def scripted(policy, layouts, **rest):
        found = play(policy, layouts, **rest)
        return found._replace(solved=np.array(next(wins), dtype=bool))

    monkeypatch.setattr(train, "play", scripted)
    meter = Meter(policy.num_parameters())
    batch, keep_B, metrics = train.collect(policy, algo(), "outcome", 2, 0, 0, meter)
    assert len(keep_B) == 24 and keep_B.view(6, 4).all(1).tolist() == [False, True, False, True, True, False]
    assert metrics["reward/zero_std_frac"] == pytest.approx(2 / 6) and metrics["success/mean"] == pytest.approx(11 / 24)
    assert meter.tokens_forward == int(batch.acted_BK.sum()) * policy.length
    targets = train.make_targets(policy, None, batch, algo(), meter)
    spread = math.sqrt(0.25)  # sample deviation of 1, 0, 0, 0
    assert targets.advantage_BK[4, 0].item() == pytest.approx(0.75 / (spread + 1e-4), rel=1e-4)
    assert targets.advantage_BK[:4].abs().sum() == 0


def test_the_update_raises_what_won_and_lowers_what_lost(policy):
    learner = copy.deepcopy(policy)
    meter = Meter(learner.num_parameters())
    config = algo(prompts_per_step=2, refill_rounds=0, minibatches=1, lr=1e-3, warmup_steps=0)
    batch, _, _ = train.collect(learner, config, "outcome", 2, 0, 0, meter)
    won = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0], dtype=torch.float64)
    batch = batch._replace(reward_BK=torch.stack([torch.zeros(8).double(), won], 1))
    targets = train.make_targets(learner, None, batch, config, meter)

    def chances():
        where = batch.acted_BK.nonzero()
        logp = log_probabilities(learner(train.at(batch.inputs, where))[0], config.temperature)
        logp = logp.gather(-1, batch.tokens_BKLA[where[:, 0], where[:, 1]][..., None])[..., 0].sum((1, 2))
        return torch.zeros(8).index_add(0, where[:, 0], logp.detach())

    before = chances()
    optimizer = train.make_optimizer(list(learner.parameters()), [], config)
    numbers = train.update(learner, None, optimizer, batch, torch.ones(8).bool(), targets, config, 0, 0, meter)
    change = chances() - before
    assert change[won == 1].mean() > 0 > change[won == 0].mean() and numbers["grad_norm"] > 0


def test_the_critic_learns_returns_and_moves_alone_while_it_warms_up(policy):
    learner = copy.deepcopy(policy)
    settings = compose("7-13", Settings, ["scale=smoke"])
    config = settings.arm_config("ppo")
    head, meter = build_value_head(learner, 0), Meter(learner.num_parameters())
    optimizer = train.make_optimizer(list(learner.parameters()), list(head.parameters()), config)
    batch, keep_B, _ = train.collect(learner, config, "outcome", 2, 0, 0, meter)
    reward_BK = torch.zeros(4, 2, dtype=torch.float64)
    reward_BK[:, 1] = 1
    batch = batch._replace(reward_BK=reward_BK)
    targets = train.make_targets(learner, head, batch, config, meter)
    assert torch.allclose(targets.return_BK[:, 1], torch.ones(4)) and targets.value_BK.abs().sum() == 0
    assert targets.return_BK[0, 0].item() == pytest.approx(config.gamma * config.lam, rel=1e-5)
    train.update(learner, head, optimizer, batch, keep_B, targets, config, 0, 0, meter)
    assert torch.equal(learner.head.weight, policy.head.weight) and head[2].weight.abs().sum() > 0
    train.update(learner, head, optimizer, batch, keep_B, targets, config, 0, config.value_warmup_steps, meter)
    assert not torch.equal(learner.head.weight, policy.head.weight)


def test_training_goes_on_from_its_checkpoint_to_the_same_weights(policy, tmp_path):
    labels = {"experiment": "7-13", "scale": "smoke", "variant": None, "arm": "full", "seed": 0}
    ends = []
    for name, budgets in (("whole", [4]), ("parts", [2, 4])):
        for steps in budgets:
            learner = copy.deepcopy(policy)
            with RunLog(tmp_path / name, labels, quiet=True) as log:
                train.train_rl(
                    learner, algo(drop_zero_variance=False, refill_rounds=0), "process", decisions=2, seed=0,
                    budget=Budget(steps=steps), log=log, folder=tmp_path / name,
                )  # fmt: skip
        ends.append(learner.head.weight.detach())
    assert torch.equal(*ends) and not torch.equal(ends[0], policy.head.weight)


def test_a_policy_is_saved_and_loaded_with_plain_transformers(policy, tmp_path):
    from transformers import AutoModel

    policy.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert isinstance(loaded, VlaPolicy)
    frames = play_frames(policy, 3, 0)
    assert torch.equal(loaded(frames.inputs)[0], policy(frames.inputs)[0])


def test_films_and_texts_tell_what_happened(played, tmp_path):
    layouts = tasks.draw("train", tasks.SEEN[:6], "episodes")
    labels = {"experiment": "7-13", "scale": "smoke", "variant": None, "arm": "sft", "seed": 0}
    with RunLog(tmp_path, labels, quiet=True) as log:
        films.record(log, "film", layouts, played.tracks, played.steps, 2)
    row = json.loads((tmp_path / "records.jsonl").read_text())
    assert len(row["items"]) == films.HEAD + 13 * films.FRAME and row["items"][3] == layouts.task[2]
    films.write_gif(row["items"], tmp_path / "film.gif")
    assert (tmp_path / "film.gif").read_bytes()[:3] == b"GIF"
    found = films.rollouts("seen", layouts, played, 3)
    assert len(found) == 3 and found[0]["prompt"] == tasks.instruction(tasks.SEEN[0]) and len(found[0]["segments"]) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("branches.full.control_steps=10", "multiple of the chunk"),
        ("branches.full.reward=success", "reward"),
        ("algo.kl_coef=0.1", "not part of this experiment"),
        ("policy.hidden=30", "even multiple"),
        ("starts.one.view=sound", "view"),
        ("arms=[fulll]", "full"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(change, words):
    with pytest.raises(ConfigError, match=words):
        compose("7-13", Settings, ["scale=smoke", change])
