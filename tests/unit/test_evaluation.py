"""KL on the policy's own samples, and episodes as rows to read."""

import math

import pytest
import torch

from common.episodes import Episode
from common.evaluation import kl_on_samples, rollout_row
from common.models import DecoderConfig, build_decoder
from common.rollout import sample
from common.seeding import generator
from common.tokenizers import build_phrase_tokenizer

TOKENIZER = build_phrase_tokenizer([str(number) for number in range(10)])
TINY = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=32)


def sampled(model, count, temperature=1.0):
    settings = {"max_new_tokens": 3, "stop_ids": [], "temperature": temperature, "generator": generator(0, "kl")}
    episodes = []
    for completion in sample(model, [[1, 5]], group_size=count, **settings):
        episode = Episode([], [], [], [], prompt_length=2, task={}, group=0)
        episode.append([1, 5], None, -1)
        episode.append(completion.ids, completion.logps, 0)
        episodes.append(episode)
    return episodes


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_kl_of_a_policy_to_itself_is_zero(temperature):
    model = build_decoder(TINY, TOKENIZER, 0)
    assert kl_on_samples(model, sampled(model, 300, temperature), 0, temperature) == pytest.approx(0, abs=1e-4)


def test_the_estimate_agrees_with_the_exact_kl():
    policy, reference = build_decoder(TINY, TOKENIZER, 0), build_decoder(TINY, TOKENIZER, 1)
    with torch.no_grad():
        p, q = (torch.log_softmax(m(torch.tensor([[1, 5]])).logits[0, -1], -1) for m in (policy, reference))
    exact = float((p.exp() * (p - q)).sum())
    episodes = sampled(policy, 4000)
    for episode in episodes:  # the first written token alone, whose distribution is known
        for name in ("ids", "mask", "logps", "turns"):
            setattr(episode, name, getattr(episode, name)[:3])
    assert exact > 0.05
    assert kl_on_samples(reference, episodes, 0) == pytest.approx(exact, rel=0.15)


def test_a_rollout_row_separates_the_policy_from_the_environment():
    five, six, seven = TOKENIZER("567")["input_ids"]
    episode = Episode([], [], [], [], prompt_length=1, task={}, group=0, reward=-1.5, success=False)
    episode.append([five], None, -1)
    episode.append([six, seven], [math.log(0.5), math.log(0.5)], 0)
    episode.append([five], None, -1)
    episode.append([six], [math.log(0.25)], 1)
    episode.infos.append({"success": False, "reason": "too small", "parts": {"size": -1.5}})
    row = rollout_row(episode, TOKENIZER)
    assert row["prompt"] == "5"
    assert row["segments"] == [{"text": "67", "mask": 1}, {"text": "5", "mask": 0}, {"text": "6", "mask": 1}]
    assert (row["reward"], row["reason"], row["parts"]) == (-1.5, "too small", {"size": -1.5})
    assert row["surprise"] == pytest.approx((2 * math.log(0.5) + math.log(0.25)) / 3)
    assert rollout_row(episode, TOKENIZER) == row
