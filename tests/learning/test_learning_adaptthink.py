"""AdaptThink learns which prompts need no thinking, from a start that never skips it; without forcing it does not begin."""

import gymnasium
import pytest
from gymnasium.spaces import Text

from common.adaptthink import AdaptThinkConfig, train_adaptthink
from common.compute import Budget
from common.files import read_json_lines
from common.models import DecoderConfig, build_decoder
from common.runlog import RunLog
from common.sft import SftConfig, pad_rows, train_sft
from common.tokenizers import CHAT_TEMPLATE, build_phrase_tokenizer

WORDS = ["easy", "hard", "work", "answer"]
TOKENIZER = build_phrase_tokenizer([*WORDS, "?", "<think>", "</think>"])
TOKENIZER.chat_template = CHAT_TEMPLATE + "<think>"
LABELS = {"experiment": "learning", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}


class SomeNeedWork(gymnasium.Env):
    """Easy questions are answered as well without thinking, hard ones never are."""

    observation_space = action_space = Text(64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level = options["level"]
        return f"{self.level}?", {}

    def step(self, action):
        right = action == "work</think>answer" or (self.level == "easy" and action == "</think>answer")
        return "", float(right), True, False, {"success": right, "reason": ""}


def row(level, reply, given=0):
    """`given`: tokens of the reply that are shown and not taught."""
    head, tail = TOKENIZER(f"<bos>{level}?<think>")["input_ids"], TOKENIZER(f"{reply}<eos>")["input_ids"]
    return head + tail, [0] * (len(head) + given) + [1] * (len(tail) - given)


@pytest.fixture
def thinker(tmp_path):
    """Always thinks, and knows how to answer behind a </think> that is given."""
    rows = [row(level, "work</think>answer") for level in WORDS[:2]] + [row(level, "</think>answer", 1) for level in WORDS[:2]]
    batch = pad_rows(rows, 0)
    model = build_decoder(
        DecoderConfig(hidden=32, layers=2, heads=2, kv_heads=2, feedforward=64, max_length=32), TOKENIZER, seed=1
    )
    with RunLog(tmp_path / "start", LABELS, quiet=True) as log:
        config = SftConfig(lr=5e-3)
        train_sft(model, lambda step: batch, config, budget=Budget(steps=60), log=log, folder=tmp_path / "start")
    return model


def shares(model, folder, **changes):
    """P(</think>) on easy and hard questions at the first and the last step."""
    config = AdaptThinkConfig(**{"lr": 3e-3, "delta": 0.1, "prompts_per_step": 8, "max_new_tokens": 5, **changes})
    with RunLog(folder, LABELS, quiet=True) as log:
        train_adaptthink(
            model, TOKENIZER, SomeNeedWork, lambda step, n: [{"level": WORDS[i % 2]} for i in range(n)], lambda task: 1.0,
            config, seed=0, budget=Budget(steps=60), log=log, folder=folder, stratum=lambda task: task["level"],
        )  # fmt: skip
    rows = read_json_lines(folder / "metrics.jsonl")
    return [[row[f"mode/nothink_p/{level}"] for level in WORDS[:2]] for row in (rows[0], rows[-1])]


def test_nothinking_spreads_where_it_costs_nothing(thinker, tmp_path):
    (easy, hard), (easy_end, hard_end) = shares(thinker, tmp_path / "run")
    assert max(easy, hard) < 0.01
    assert easy_end > 0.9 and hard_end < 0.3


def test_without_forcing_it_does_not_begin(thinker, tmp_path):
    _, (easy_end, hard_end) = shares(thinker, tmp_path / "run", forced=False)
    assert max(easy_end, hard_end) < 0.01
