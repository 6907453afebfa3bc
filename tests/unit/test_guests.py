"""Guests in the groups of samples: their place, their log-probabilities, what they move and what they leave alone."""

import gymnasium
import pytest
import torch
from gymnasium import spaces

from common.compute import Meter
from common.config import load_algo
from common.episodes import Episode, token_logprobs
from common.grpo import collect
from common.guests import invite
from common.models import DecoderConfig, build_decoder, parameter_count
from common.tokenizers import build_phrase_tokenizer

TOKENIZER = build_phrase_tokenizer(["go", "a", "b"])
GO, A, B = (TOKENIZER.get_vocab()[text] for text in ("go", "a", "b"))
BOS, EOS = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id


class Never(gymnasium.Env):
    """One turn, never solved."""

    observation_space = action_space = spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        return "go", {}

    def step(self, action):
        return "", 0.0, True, False, {"success": False, "reason": "no"}


def guest(task):
    """The prompt, `a`, the end; solved."""
    made = Episode([], [], [], [], prompt_length=2, task=task, group=0, reward=1.0, success=True, terminated=True)
    made.append([BOS, GO], None, -1)
    made.append([A, EOS], [0.0, 0.0], 0)
    made.turn_rewards, made.texts, made.infos = [1.0], ["a"], [{"success": True, "reason": "yes"}]
    return made


def guests(tasks):
    return [guest(task) for task in tasks]


@pytest.fixture
def model():
    return build_decoder(DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=16, max_length=32), TOKENIZER, 0)


def test_a_guest_has_its_group_and_the_policys_own_log_probabilities(model):
    meter = Meter(parameter_count(model))
    one, two = invite(guests, model, TOKENIZER, [{}, {}], [4, 7], 0.5, meter)
    ids_BT = torch.tensor([[BOS, GO, A, EOS]])
    with torch.no_grad():
        logp_BT, _ = token_logprobs(model, ids_BT, torch.ones_like(ids_BT).bool(), 0.5)
    assert (one.group, two.group) == (4, 7) and meter.tokens_forward == 8
    assert one.logps == two.logps == pytest.approx([0.0, 0.0, *logp_BT[0, 2:].tolist()])


def test_a_guest_moves_the_advantages_of_its_group_and_no_metric_of_the_samples(model):
    algo = load_algo("dr_grpo", {"group_size": 2, "prompts_per_step": 2, "max_new_tokens": 3})
    given = (model, None, TOKENIZER, Never, lambda step, count: [{}] * count, algo, 0, 0)
    _, _, _, plain = collect(*given, Meter(parameter_count(model)))
    batch, advantages_BT, keep_B, metrics = collect(*given, Meter(parameter_count(model)), guests=guests)
    assert keep_B.all() and len(keep_B) == 6  # two groups of two samples, then their guests
    mean_B = (advantages_BT * batch.mask_BT).sum(1) / batch.mask_BT.sum(1)
    assert mean_B.tolist() == pytest.approx([-1 / 3] * 4 + [2 / 3] * 2)
    assert batch.ids_BT[4, :4].tolist() == [BOS, GO, A, EOS]
    for name in ("success/mean", "score/mean", "reward/mean", "len/completion_mean"):
        assert metrics[name] == plain[name], name
    assert (plain["reward/zero_std_frac"], metrics["reward/zero_std_frac"]) == (1.0, 0.0)
