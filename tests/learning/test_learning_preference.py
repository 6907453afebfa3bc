"""Preference methods learn: a tiny random decoder must come to name the card it is shown, from comparisons alone.

DPO, step-level DPO and KTO get pairs or labels from answers of the untrained policy, sampled once; online DPO samples its
own; RLHF is GRPO with a reward model that was trained on pairs and never sees the verifier.
"""

import functools

import gymnasium
import pytest
from gymnasium.spaces import Text

from common.algo import load_algo
from common.compute import Budget
from common.episodes import run_episodes
from common.evaluation import evaluate_tasks
from common.files import read_json_lines
from common.grpo import train_grpo
from common.models import DecoderConfig, build_decoder, parameter_count
from common.pairs import answers_from_episodes, pairs_from_episodes, step_pairs
from common.preference import train_dpo, train_kto, train_online_dpo
from common.reward_model import LearnedReward, build_reward_model, pair_accuracy, train_reward_model
from common.runlog import RunLog
from common.seeding import generator
from common.sft import SftConfig
from common.tokenizers import build_phrase_tokenizer

WORDS = ["red", "blue", "green", "up", "down", "left"]
SHAPE = DecoderConfig(hidden=32, layers=2, heads=2, kv_heads=2, feedforward=64, max_length=64)
LABELS = {"experiment": "learning", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}
TOKENIZER = build_phrase_tokenizer([*WORDS, "?"])


class Echo(gymnasium.Env):
    """Shows a word; an answer earns 0.5 for beginning with that word and 0.5 more for being that very word."""

    observation_space = action_space = Text(32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = options["word"]
        return f"{self.word}?", {}

    def step(self, action):
        right = action == self.word
        reward = 0.5 * action.startswith(self.word) + 0.5 * right
        return "", reward, True, False, {"success": right, "reason": "right" if right else "wrong"}


def tasks(n):
    return [{"word": WORDS[i % 6]} for i in range(n)]


def build_policy():
    return build_decoder(SHAPE, TOKENIZER, seed=0)


def rate(model):
    """Success of sampled answers; always the same word makes 1/6 at most."""
    stream = generator(1, "evaluation")
    return evaluate_tasks(model, TOKENIZER, Echo, tasks(6), samples=64, max_new_tokens=3, generator=stream).mean("success")


def answers_of(model):
    """1024 answers to each of the six words; of an untrained policy one in forty is right."""
    stream = generator(0, "preference data")
    return run_episodes(model, TOKENIZER, Echo, tasks(6), group_size=1024, max_new_tokens=3, generator=stream)


def offline(method, model):
    """(train, data) of a method on answers of the untrained policy."""
    episodes = answers_of(model)
    if method == "dpo":
        return train_dpo, pairs_from_episodes(episodes, "right_wrong", per_prompt=64)
    if method == "step_dpo":
        words = frozenset(TOKENIZER.convert_tokens_to_ids(WORDS))  # each word of an answer is a step
        return train_dpo, step_pairs(episodes, per_prompt=64, separators=words)
    answers = answers_from_episodes(episodes)
    right = [answer for answer in answers if answer.desirable]
    wrong = [answer for answer in answers if not answer.desirable]
    # Four wrong answers to a right one, which weighs six: the balance of the paper's section 4.2, between 1 and 3 / 2.
    data = right + wrong[:: len(wrong) // (4 * len(right))]
    return functools.partial(train_kto, desirable_weight=6.0), data


@pytest.mark.parametrize("method", ["dpo", "step_dpo", "kto"])
def test_learns_to_name_the_word_from_fixed_preferences(method, tmp_path):
    model = build_policy()
    assert rate(model) < 0.1
    train, data = offline(method, model)
    algo = load_algo("kto" if method == "kto" else "dpo", {"prompts_per_step": 32, "lr": 3e-3, "lr_decay": "linear"})
    with RunLog(tmp_path, LABELS, quiet=True) as log:
        train(model, TOKENIZER, data, algo, seed=0, budget=Budget(steps=60), log=log, folder=tmp_path)
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert rows[-1]["preference/margin"] > 1
    assert rate(model) > 0.4


def test_online_dpo_learns_to_name_the_word(tmp_path):
    model = build_policy()
    keys = {"prompts_per_step": 36, "group_size": 8, "max_new_tokens": 3, "lr": 3e-3, "lr_decay": "linear"}
    run = {"seed": 0, "budget": Budget(steps=40), "folder": tmp_path}
    with RunLog(tmp_path, LABELS, quiet=True) as log:
        train_online_dpo(model, TOKENIZER, Echo, lambda _, n: tasks(n), load_algo("online_dpo", keys), log=log, **run)
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert rows[0]["score/mean"] < 0.2
    assert rows[-1]["preference/pairs"] < rows[10]["preference/pairs"]  # fewer and fewer answers differ
    assert sum(row["score/mean"] for row in rows[-5:]) / 5 > 0.7
    assert rate(model) > 0.5


def test_rlhf_raises_the_true_reward_through_a_learned_one(tmp_path):
    """The reward model orders pairs of held-out answers; GRPO on its score alone then raises the verifier's reward too."""
    model = build_policy()
    episodes = answers_of(model)
    held_out = pairs_from_episodes(episodes[::4], "all", per_prompt=100)
    trained = pairs_from_episodes([e for i, e in enumerate(episodes) if i % 4], "all", per_prompt=400)
    judge, pad_id = build_reward_model(model), TOKENIZER.pad_token_id
    with RunLog(tmp_path / "judge", LABELS, quiet=True) as log:
        run = {"seed": 0, "budget": Budget(steps=120), "folder": tmp_path / "judge"}
        train_reward_model(judge, trained, SftConfig(lr=3e-3, batch_size=48), pad_id=pad_id, log=log, **run)
    assert pair_accuracy(judge, held_out, pad_id) > 0.9
    rlhf = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    algo = load_algo("grpo", rlhf | {"lr": 5e-3, "max_new_tokens": 3, "prompts_per_step": 18, "lr_decay": "linear"})
    learned = LearnedReward(Echo, judge, pad_id, parameter_count(model))
    with RunLog(tmp_path / "rlhf", LABELS, quiet=True) as log:
        run = {"seed": 0, "budget": Budget(steps=40), "folder": tmp_path / "rlhf"}
        train_grpo(model, TOKENIZER, learned, lambda _, n: tasks(n), algo, log=log, **run)
    rows = read_json_lines(tmp_path / "rlhf" / "metrics.jsonl")
    proxy, true = ([row[f"reward/{name}"] for row in rows] for name in ("proxy", "true"))
    assert rows[0]["score/mean"] == pytest.approx(proxy[0])
    assert sum(proxy[-5:]) / 5 > proxy[0] + 3
    # The word alone, whatever the judge makes of the rest, is worth 0.5; always the same word makes 1/6 at most.
    assert true[0] < 0.15
    assert sum(true[-5:]) / 5 > 0.4
