"""AdaptThink: ratio forms and clips by hand, gradients against a slow reference, what an update leaves alone, resuming.

`VALUES` are also computed with mutated copies of the module, each of which must miss one of them.
"""

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from gymnasium.spaces import Text

from common import adaptthink
from common.adaptthink import AdaptThinkConfig, bounds, train_adaptthink
from common.compute import Budget, Meter
from common.episodes import Episode, collate
from common.files import read_json_lines
from common.models import DecoderConfig, build_decoder
from common.modes import end_think_id
from common.runlog import RunLog
from common.schema import ConfigError
from common.tokenizers import CHAT_TEMPLATE, build_phrase_tokenizer

WORDS = [f"w{i}" for i in range(6)]
TOKENIZER = build_phrase_tokenizer([*WORDS, "?", "<think>", "</think>"])
TOKENIZER.chat_template = CHAT_TEMPLATE + "<think>"
END = end_think_id(TOKENIZER)
LABELS = {"experiment": "test", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}
TIMES = ("time/rollout", "time/update", "throughput/tokens_per_s", "progress/eta_s")
CONFIG = AdaptThinkConfig(prompts_per_step=3, group_size=4, max_new_tokens=4, lr=3e-3)
HALF = math.log(0.5)


class Words(gymnasium.Env):
    """Scores an answer that holds the word shown."""

    observation_space = action_space = Text(64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = WORDS[options["word"]]
        return f"{self.word}?", {}

    def step(self, action):
        return "", 1.0, True, False, {"success": self.word in action, "reason": "word"}


def task_at(step, n):
    return [{"word": (step + i) % 6} for i in range(n)]


def build_model():
    return build_decoder(DecoderConfig(hidden=16, layers=2, heads=2, kv_heads=2, feedforward=24, max_length=32), TOKENIZER, 0)


def surrogate(m, ratio, advantage, first, others=(0.5,), old=HALF):
    """Losses, ratios and gradients of one answer whose tokens have these probabilities."""
    logp = torch.tensor([first, *others]).log().requires_grad_()
    sampler = torch.tensor([old] + [-9.0] * len(others))  # only the first may be read
    config = m.AdaptThinkConfig(ratio=ratio)
    loss, seen = m.mode_surrogate(logp, sampler, torch.full_like(logp, advantage), torch.tensor([len(logp)]), config)
    loss.sum().backward()
    return [*loss.tolist(), *seen.tolist(), *logp.grad.tolist()]


def episode(ids, prompt_length, success, first_logp=HALF, word=0):
    answer = len(ids) - prompt_length
    return Episode(
        ids=ids, mask=[0] * prompt_length + [1] * answer, logps=[0.0] * prompt_length + [first_logp] + [-1.0] * (answer - 1),
        turns=[-1] * prompt_length + [0] * answer, prompt_length=prompt_length, task={"word": word}, group=word,
        success=success, reward=1.0, turn_rewards=[1.0], infos=[{"success": success, "reason": ""}], texts=[""],
    )  # fmt: skip


def values(m):
    """name -> numbers computed with the module `m`, then what they must be (worked out by hand)."""
    root = math.sqrt(0.2)  # (0.1 / 0.5) ** (1 / 2)
    some = [episode([1, END, 5], 1, True), episode([1, END, 5], 1, False), episode([1, 6, END], 1, True)]
    gained = m.advantages(some, END, lambda task: 0.75, 0.05).tolist()
    return {
        "token, up": [*surrogate(m, "token", 1.0, 0.1), -0.2, -1, 0.2, 1, -0.2, -1],
        "token, down, below the floor": [*surrogate(m, "token", -1.0, 0.1), 0.8, 1, 0.2, 1, 0, 1],
        "token, down, above the floor": [*surrogate(m, "token", -1.0, 0.45), 0.9, 1, 0.9, 1, 0.9, 1],
        "token, up, above the ceiling": [*surrogate(m, "token", 1.0, 0.7), -1.2, -1, 1.4, 1, 0, -1],
        "unclipped, down": [*surrogate(m, "unclipped", -1.0, 0.1), 0.2, 1, 0.2, 1, 0.2, 1],
        "unclipped, up": [*surrogate(m, "unclipped", 1.0, 0.7), -1.4, -1, 1.4, 1, -1.4, -1],
        "none, down": [*surrogate(m, "none", -1.0, 0.1), 1, 1, 1, 1, 1, 1],
        "sequence, up": [*surrogate(m, "sequence", 1.0, 0.1), -root, -root, root, root, -root, -root],
        "sequence, down, below the floor": [*surrogate(m, "sequence", -1.0, 0.1), 0.8, 0.8, root, root, 0, 0],
        "sequence, down, above the floor": [
            *surrogate(m, "sequence", -1.0, 0.405), *[0.9] * 2, *[0.9] * 2, *[0.9] * 2
        ],
        "sequence, up, above the ceiling": [*surrogate(m, "sequence", 1.0, 0.845), -1.2, -1.2, 1.3, 1.3, 0, 0],
        "advantages": [*gained, 0.3, -0.7, 0.25],
        "bounds": [
            *m.bounds(m.AdaptThinkConfig(ratio="token"), 8), *m.bounds(m.AdaptThinkConfig(ratio="sequence"), 3),
            *m.bounds(m.AdaptThinkConfig(ratio="none"), 3), 0.4, 0.6, 0.256, 0.864, 0, 1,
        ],
    }  # fmt: skip


def check(m):
    """The names of the values that `m` gets wrong."""
    wrong = []
    for name, numbers in values(m).items():
        half = len(numbers) // 2
        if not all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) for a, b in zip(numbers[:half], numbers[half:])):
            wrong.append(name)
    return wrong


def test_values_by_hand():
    assert check(adaptthink) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("delta * skips(e, end)", "delta * (not skips(e, end))"),
        ("+ float(e.success) - reference", "+ float(e.success) + reference"),
        ("+ float(e.success) -", "+ float(e.reward) -"),
        ("first_N[length_B.cumsum(0) - length_B]", "first_N[length_B.cumsum(0) - 1]"),
        ("torch.where(first_N, sampler_N, old_N)", "sampler_N"),
        ("torch.where(first_N, sampler_N, old_N)", "old_N"),
        ('if config.ratio == "sequence":', 'if config.ratio == "token":'),
        ('(1.0, math.inf) if config.ratio == "unclipped"', '(1.0, math.inf) if config.ratio != "unclipped"'),
        ("config.clip_low, config.clip_high)\n    low", "config.clip_high / 2, config.clip_high)\n    low"),
        ('if config.ratio != "none"', 'if config.ratio != "unclipped"'),
        ("(1 - config.clip_low) ** power", "(1 - config.clip_low) * power"),
        ("(1 + config.clip_high) ** power", "(1 - config.clip_high) ** power"),
    ],
)
def test_mutations_are_noticed(tmp_path, old, new):
    source = Path(adaptthink.__file__).read_text(encoding="utf-8")
    assert old in source, f"nothing to mutate: {old!r} is not in common/adaptthink.py; update this list"
    path = tmp_path / "mutated.py"
    path.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"mutated_{abs(hash((old, new)))}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        assert check(module)
    finally:
        del sys.modules[spec.name]


# --- the whole update -----------------------------------------------------------------------------------------------


class Still:
    """An optimizer that changes nothing and leaves the gradients to look at."""

    def __init__(self, model):
        self.param_groups = [{"params": list(model.parameters())}]

    def zero_grad(self, set_to_none):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def step(self):
        pass


EPISODES = [
    episode([1, 4, 10, END, 5, 2], 3, True), episode([1, 4, 10, 6, 7, END, 5, 2], 3, False, first_logp=-0.9),
    episode([1, 5, 10, END, 6, 6, 2], 3, False), episode([1, 5, 10, 7, END, 5, 2], 3, True, first_logp=-0.7),
]  # fmt: skip
ADVANTAGES = torch.tensor([0.3, -0.6, -0.4, 0.0])


def gradients(config, episodes=EPISODES, advantages=ADVANTAGES):
    model = build_model().train()
    meter = Meter(1)
    adaptthink.update(model, Still(model), collate(episodes, 0), advantages, config, meter)
    return {name: p.grad for name, p in model.named_parameters()}, meter


def slow_gradients(config):
    """Equation by equation: one full forward per answer, no packing, no shared prompt."""
    model = build_model().train()
    total = 0.0
    for e, advantage in zip(EPISODES, ADVANTAGES.tolist()):
        logits = model(torch.tensor([e.ids])).logits[0].log_softmax(-1)
        logp = torch.stack([logits[t - 1, e.ids[t]] for t in range(e.prompt_length, len(e.ids))])
        old = logp.detach().clone()
        if config.ratio != "none":
            old[0] = e.logps[e.prompt_length]
        ratio = (logp - old).exp()
        if config.ratio == "sequence":
            ratio = (logp - old).mean().exp() * torch.ones_like(logp)
        low, high = (0.0, math.inf) if config.ratio == "unclipped" else (0.8, 1.2)
        total = total - torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).sum()
    (total / sum(sum(e.mask) for e in EPISODES)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    assert norm > 0
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("ratio", adaptthink.RATIOS)
def test_gradients_equal_the_slow_reference(ratio):
    config = AdaptThinkConfig(ratio=ratio, grad_clip=1e9)
    fast, meter = gradients(config)
    for name, gradient in slow_gradients(config).items():
        torch.testing.assert_close(fast[name], gradient, rtol=1e-3, atol=1e-6, msg=name)
    assert meter.tokens_trained == 5 + 7 + 6  # the answer with advantage 0 is not forwarded


def test_only_the_first_behaviour_probability_is_read():
    changed = [dataclasses.replace(e, logps=[7.0] * 3 + [e.logps[3]] + [7.0] * (len(e.ids) - 4)) for e in EPISODES]
    for name, gradient in gradients(CONFIG, changed)[0].items():
        torch.testing.assert_close(gradient, gradients(CONFIG)[0][name], rtol=0, atol=0)
    moved = [dataclasses.replace(e, logps=[0.0] * 3 + [-3.0, *e.logps[4:]]) for e in EPISODES]
    assert any((g - gradients(CONFIG)[0][name]).abs().max() > 1e-6 for name, g in gradients(CONFIG, moved)[0].items())


def test_advantage_zero_everywhere_changes_nothing():
    model = build_model()
    assert adaptthink.update(model, Still(model), collate(EPISODES, 0), torch.zeros(4), CONFIG, Meter(1)) == {}


def test_the_floor_is_where_the_gradient_begins():
    """Below the floor a NoThinking answer with A < 0 does not push; above it does. The ceiling likewise for A > 0."""
    for ratio in ("token", "sequence"):
        for tokens in (1, 3, 8):
            floor, ceiling = bounds(AdaptThinkConfig(ratio=ratio), tokens)
            for edge, sign in ((floor, -1.0), (ceiling, 1.0)):
                if edge < 1:
                    pushes = [
                        surrogate(adaptthink, ratio, sign, p, (0.5,) * (tokens - 1))[2 * tokens] != 0
                        for p in (edge * 0.99, edge * 1.01)
                    ]
                    assert pushes == ([False, True] if sign < 0 else [True, False]), (ratio, tokens, edge)


# --- the loop -------------------------------------------------------------------------------------------------------


def train(folder, steps, config=CONFIG, model=None):
    model = model or build_model()
    with RunLog(folder, LABELS, quiet=True) as log:
        meter = train_adaptthink(
            model, TOKENIZER, Words, task_at, lambda task: 0.5, config, seed=1, budget=Budget(steps=steps), log=log,
            folder=folder, stratum=lambda task: str(task["word"] % 2), checkpoint_every=2,
        )  # fmt: skip
    return model, meter


def metrics_of(folder):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_json_lines(folder / "metrics.jsonl")]


def test_resumed_equals_uninterrupted(tmp_path):
    whole, meter = train(tmp_path / "whole", 4)
    train(tmp_path / "cut", 2)
    again, meter_again = train(tmp_path / "cut", 4)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters()))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "cut")
    assert meter.state_dict() == meter_again.state_dict()


def test_metrics_tell_the_modes_apart(tmp_path):
    train(tmp_path, 1)
    (row,) = metrics_of(tmp_path)
    assert row["len/nothink_mean"] >= 1 and 0 <= row["success/think"] <= 1
    assert math.isclose(row["mode/nothink_p"], (2 * row["mode/nothink_p/0"] + row["mode/nothink_p/1"]) / 3, rel_tol=1e-5)


def test_without_forcing_all_answers_are_the_policys(tmp_path):
    config = dataclasses.replace(CONFIG, forced=False, ratio="sequence")
    _, meter = train(tmp_path, 2, config)
    assert meter.tokens_trained > 0
    assert bounds(config, 8) == (0.0, 1.0)


@pytest.mark.parametrize(
    "changes", [{"group_size": 5}, {"ratio": "mean"}, {"delta": -0.1}, {"clip_low": 0}, {"max_new_tokens": 1}, {"lr": 0}]
)
def test_impossible_configurations_are_refused(changes):
    with pytest.raises(ConfigError, match=f"adaptthink.{next(iter(changes))}"):
        AdaptThinkConfig(**changes)
