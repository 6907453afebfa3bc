"""backend=trl against the native loop: the same rollouts, one step, then the same weights, metrics and compute.

Tolerance: weights agree to 2e-6 after a step of Adam at rate 1e-3 (TRL keeps rewards and advantages in single precision
and pads on the left); metrics to 1e-4 relative; counted tokens and samples exactly.
"""

import math
from dataclasses import replace

import gymnasium
import pytest
import torch
from gymnasium.spaces import Text

from common import grpo
from common.algo import AlgoConfig, load_algo
from common.backends import trl as backend
from common.compute import Budget
from common.files import read_json_lines
from common.lora import LoraSettings, add_adapter
from common.models import DecoderConfig, build_decoder
from common.runlog import RunLog
from common.tokenizers import build_phrase_tokenizer

WORDS = ["a", "b", "c", "d"]
TOKENIZER = build_phrase_tokenizer([*WORDS, "?", "no", " more"])
SHAPE = DecoderConfig(hidden=16, layers=2, heads=2, kv_heads=1, feedforward=32, max_length=64)
LABELS = {"experiment": "test", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}
TIMES = ("time/rollout", "time/update", "throughput/tokens_per_s", "progress/eta_s")
LR = 1e-3
WEIGHTS, METRICS = 2e-6, 1e-4


class Game(gymnasium.Env):
    """Pays for the shown letter in any of up to three answers, a little for another; `unscored` tasks cannot be judged."""

    observation_space = action_space = Text(32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = options
        return WORDS[options["word"]] + "?", {}

    def step(self, action):
        right = WORDS[self.task["word"]] in action
        reward = math.nan if self.task.get("unscored") else right + 0.1 * action.count("d")
        return "no more" + "?" * len(action), reward, right, False, {"success": right, "reason": "letter"}


def task_at(step, n):
    return [{"word": (step + i) % 4} for i in range(n)]


GRPO = AlgoConfig(name="grpo", prompts_per_step=6, group_size=4, max_new_tokens=4, lr=LR, adam_eps=1e-3)


def train(run, algo, folder, steps=1, lora=False, tasks=task_at, reference_seed=None):
    model = build_decoder(SHAPE, TOKENIZER, 0)
    model.get_input_embeddings().padding_idx = None  # an untrained policy writes the pad token too: the one known gap
    if lora:
        model = add_adapter(model, LoraSettings(enabled=True, rl_rank=4), "rl", 0)
        with torch.no_grad():  # B starts at 0, where A has no gradient
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    with RunLog(folder, LABELS, quiet=True) as log:
        budget = Budget(steps=steps)
        reference = None if reference_seed is None else build_decoder(SHAPE, TOKENIZER, reference_seed).eval()
        where = {"log": log, "folder": folder, "reference": reference}
        meter = run(model, TOKENIZER, Game, tasks, algo, seed=0, budget=budget, **where)
    rows = read_json_lines(folder / "metrics.jsonl")
    return model, meter, [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def unscored(step, n):
    return [{**task, "unscored": i == 1} for i, task in enumerate(task_at(step, n))]


SHORT = {"prompts_per_step": 6, "group_size": 4, "max_new_tokens": 4, "lr": LR, "minibatches": 1, "adam_eps": 1e-3}
CASES = {
    "grpo": (GRPO, {}),
    "several turns": (replace(GRPO, max_turns=3), {}),
    "every group": (replace(GRPO, drop_zero_variance=False), {}),
    "token mean": (replace(GRPO, loss_agg="token_mean", clip_high=0.28, max_turns=3), {}),
    "temperature": (replace(GRPO, temperature=0.7), {}),
    "kl": (replace(GRPO, kl_coef=0.5, max_turns=2), {}),
    "kl to another model": (replace(GRPO, kl_coef=0.5), {"reference_seed": 1}),
    "entropy": (replace(GRPO, loss_agg="token_mean", entropy_coef=0.1), {}),
    "overlong": (replace(GRPO, overlong_buffer=3), {}),
    "truncated": (replace(GRPO, mask_truncated=True, max_new_tokens=6, max_turns=3), {}),
    "two epochs": (replace(GRPO, epochs=2), {}),
    "unscored": (GRPO, {"tasks": unscored}),
    "lora": (GRPO, {"lora": True}),
    "lora kl": (replace(GRPO, kl_coef=0.5), {"lora": True}),
    "cispo, some left out": (load_algo("cispo", {**SHORT, "drop_zero_variance": True}), {}),
    **{name: (load_algo(name, {**SHORT, "max_turns": 2}), {}) for name in ("dr_grpo", "gspo", "cispo", "rloo")},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_native_step(case, tmp_path):
    algo, kwargs = CASES[case]
    ours, our_meter, our_rows = train(grpo.train_grpo, algo, tmp_path / "native", **kwargs)
    theirs, their_meter, their_rows = train(backend.train_grpo, algo, tmp_path / "trl", **kwargs)
    assert their_meter.state_dict() == our_meter.state_dict()
    assert (weights(ours) - weights(theirs)).abs().max() < WEIGHTS
    assert our_rows[0]["grad_norm"] > 1e-3
    same = theirs_only = set(their_rows[0])
    if algo.kl_coef or algo.entropy_coef:
        same = same - {"loss/policy"}  # TRL's is the whole loss
    else:
        same = same - {"entropy"}  # ours leaves out answers whose advantage is 0
    if algo.epochs > 1:
        same = same - {"ratio/clip_low_frac", "ratio/clip_high_frac"}  # and here too
    for name in same:
        theirs, ours = their_rows[0][name], our_rows[0][name]  # "nan" where an episode is unscored
        assert theirs == ours or theirs == pytest.approx(ours, rel=METRICS, abs=1e-5), name
    assert set(our_rows[0]) - theirs_only <= {"kl/old", "ratio/clip_low_frac", "ratio/clip_high_frac"}
