"""GRPO and RLOO through TRL learn: a tiny random decoder must come to name the word it is shown."""

import gymnasium
import pytest
from gymnasium.spaces import Text

from common.algo import load_algo
from common.backends.trl import train_grpo
from common.compute import Budget
from common.evaluation import evaluate_tasks
from common.models import DecoderConfig, build_decoder
from common.runlog import RunLog
from common.seeding import generator
from common.tokenizers import build_phrase_tokenizer

WORDS = ["red", "blue", "green", "up"]
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
    return [{"word": WORDS[i % 4]} for i in range(n)]


def rate(model):
    """Success of one sampled answer; always the same word makes 1/4 at most."""
    stream = generator(1, "evaluation")
    return evaluate_tasks(model, TOKENIZER, Echo, tasks(4), samples=64, max_new_tokens=3, generator=stream).mean("success")


@pytest.mark.parametrize("preset", ["grpo", "rloo"])
def test_learns_to_name_the_word(preset, tmp_path):
    model = build_decoder(SHAPE, TOKENIZER, seed=0)
    assert rate(model) < 0.15
    keys = {"prompts_per_step": 16, "group_size": 8, "max_new_tokens": 3, "lr": 1e-2, "lr_decay": "linear"}
    with RunLog(tmp_path, LABELS, quiet=True) as log:
        run = {"seed": 0, "budget": Budget(steps=40), "log": log, "folder": tmp_path}
        train_grpo(model, TOKENIZER, Echo, lambda _, n: tasks(n), load_algo(preset, keys), **run)
    assert rate(model) > 0.6
