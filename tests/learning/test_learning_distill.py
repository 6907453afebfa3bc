"""Distillation and rejection sampling learn: a student reaches its teacher on a task of naming words.

The teacher was taught the task by supervised training. For self-distillation the model was taught to read a hint that its
prompt may hold; without the hint it guesses, and what it must come to know is one fixed answer per question.
"""

import gymnasium
import pytest
from gymnasium.spaces import Text

from common.compute import Budget
from common.distill import DistillConfig, train_distill
from common.files import read_json_lines
from common.models import DecoderConfig, build_decoder
from common.rejection import RejectionConfig, train_rejection
from common.runlog import RunLog
from common.seeding import python_random
from common.sft import SftConfig, pad_rows, train_sft
from common.tokenizers import build_phrase_tokenizer

WORDS = ["red", "blue", "green", "up", "down", "left"]
TOKENIZER = build_phrase_tokenizer([*WORDS, "?", "="])
SHAPE = DecoderConfig(hidden=32, layers=2, heads=2, kv_heads=2, feedforward=64, max_length=32)
LABELS = {"experiment": "learning", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}


def answer(word):
    """The right answer to a word is the word that stands two places further on."""
    return WORDS[(word + 2) % 6]


class Successor(gymnasium.Env):
    """Shows a word; the answer scores if it is the right one."""

    observation_space = action_space = Text(32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = options["word"]
        return f"{WORDS[self.word]}?", {}

    def step(self, action):
        right = action == answer(self.word)
        return "", float(right), True, False, {"success": right, "reason": "right" if right else "wrong word"}


def task_at(step, n):
    return [{"word": (step + i) % 6} for i in range(n)]


def row(prompt, reply):
    ids = TOKENIZER(f"<bos>{prompt}")["input_ids"], TOKENIZER(f"{reply}<eos>")["input_ids"]
    return ids[0] + ids[1], [0] * len(ids[0]) + [1] * len(ids[1])


def taught(folder, batch_at, steps):
    model = build_decoder(SHAPE, TOKENIZER, seed=1)
    with RunLog(folder, LABELS, quiet=True) as log:
        train_sft(model, batch_at, SftConfig(lr=5e-3), budget=Budget(steps=steps), log=log, folder=folder)
    return model


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    rows = pad_rows([row(f"{WORDS[word]}?", answer(word)) for word in range(6)], 0)
    return taught(tmp_path_factory.mktemp("teacher"), lambda step: rows, 60)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Weights of a model that obeys a hint `=word` and without one answers any word."""

    def batch_at(step):
        draw = python_random("reader", step)
        rows = []
        for _ in range(48):
            shown, said = draw.choice(WORDS), draw.choice(WORDS)
            rows.append(row(f"{shown}?={said}" if draw.random() < 0.7 else f"{shown}?", said))
        return pad_rows(rows, 0)

    return taught(tmp_path_factory.mktemp("reader"), batch_at, 250).state_dict()


def scores(folder):
    return [line["score/mean"] for line in read_json_lines(folder / "metrics.jsonl")]


# The sampled token's log-ratio is one noisy number where the others compare whole distributions: it gets more steps.
CASES = {"sampled": 60, "reverse_kl": 30, "forward_kl": 30, "jsd": 30}


@pytest.mark.parametrize("objective", CASES)
def test_the_student_reaches_the_teacher(objective, teacher, tmp_path):
    student = build_decoder(SHAPE, TOKENIZER, seed=0)
    config = DistillConfig(
        objective=objective, prompts_per_step=18, group_size=4, lr=5e-3, max_new_tokens=3, warmup_steps=2, lr_decay="linear"
    )
    with RunLog(tmp_path, LABELS, quiet=True) as log:
        train_distill(
            student, teacher, TOKENIZER, Successor, task_at, config,
            seed=0, budget=Budget(steps=CASES[objective]), log=log, folder=tmp_path,
        )  # fmt: skip
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert scores(tmp_path)[0] < 0.2
    assert sum(scores(tmp_path)[-5:]) / 5 > 0.9, scores(tmp_path)
    assert lines[-1]["kl/teacher"] < 0.3 < 1.0 < lines[0]["kl/teacher"]


# A teacher that moves with its student unlearns to read the hint: scores rise to about 0.8 in 30 steps, then fall again.
@pytest.mark.parametrize(("self_teacher", "steps", "threshold"), [("fixed", 40, 0.9), ("moving", 30, 0.7)])
def test_a_model_learns_from_itself_with_the_answer_in_view(self_teacher, steps, threshold, reader, tmp_path):
    student = build_decoder(SHAPE, TOKENIZER, seed=0)
    student.load_state_dict(reader)
    config = DistillConfig(
        objective="jsd", self_teacher=self_teacher, prompts_per_step=18, group_size=4, lr=2e-3, max_new_tokens=3
    )
    with RunLog(tmp_path, LABELS, quiet=True) as log:
        train_distill(
            student, None, TOKENIZER, Successor, task_at, config,
            seed=0, budget=Budget(steps=steps), log=log, folder=tmp_path,
            privileged=lambda task: f"{WORDS[task['word']]}?={answer(task['word'])}",
        )  # fmt: skip
    assert scores(tmp_path)[0] < 0.35  # a guess among six words
    assert sum(scores(tmp_path)[-5:]) / 5 > threshold, scores(tmp_path)


def test_rounds_of_rejection_sampling_raise_the_score(reader, tmp_path):
    student = build_decoder(SHAPE, TOKENIZER, seed=0)
    student.load_state_dict(reader)
    # Few candidates leave a word without a right answer, and such a word is never learnt: 8 end at 0.67, 24 at 0.98.
    config = RejectionConfig(rounds=3, prompts=12, candidates=24, cap=1, max_new_tokens=3)
    with RunLog(tmp_path, LABELS, quiet=True) as log:
        train_rejection(
            student, TOKENIZER, Successor, task_at, config, SftConfig(lr=3e-3, batch_size=24), lambda e: e.texts[0],
            seed=0, budget=Budget(steps=60), log=log, folder=tmp_path,
        )  # fmt: skip
    right = [1 - line["rejection/wrong"] / line["rejection/sampled"] for line in read_json_lines(tmp_path / "metrics.jsonl")]
    assert right[0] < 0.35
    assert right[-1] > 0.85 and right[1] > right[0], right
