"""Answers that begin with tokens the caller wrote (run_episodes openings=)."""

import gymnasium
import pytest
import torch

from common import episodes as episodes_module
from common.episodes import run_episodes
from common.rollout import Completion
from common.tokenizers import build_phrase_tokenizer

TOKENIZER = build_phrase_tokenizer([f"w{i} " for i in range(6)])
W = {i: TOKENIZER.convert_tokens_to_ids(f"w{i} ") for i in range(6)}
EOS = TOKENIZER.eos_token_id


class Turns(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = options.get("turns", 1)
        return "w0 ", {}

    def step(self, action):
        self.left -= 1
        return "w5 ", 1.0, self.left == 0, False, {"success": True, "reason": action}


class Model:
    config = type("Config", (), {"max_position_embeddings": 40})()


@pytest.fixture
def calls(monkeypatch):
    seen = []

    def fake(model, prompts, *, max_new_tokens, stop_ids, **settings):
        seen.append(([list(prompt) for prompt in prompts], max_new_tokens))
        return [Completion([W[2], EOS], [-0.5, -0.25], True) for _ in prompts]

    monkeypatch.setattr(episodes_module, "sample", fake)
    return seen


def play(openings, turns=1, tasks=1, **settings):
    return run_episodes(
        Model(), TOKENIZER, Turns, [{"turns": turns}] * tasks, openings=openings, generator=torch.Generator(),
        max_turns=turns, max_new_tokens=5, **settings,
    )  # fmt: skip


def test_an_opening_is_the_policys_own_token_with_log_probability_zero(calls):
    one, other = play([[W[1]], [W[3]]], group_size=2)
    prompt = one.ids[: one.prompt_length]
    assert calls == [([[*prompt, W[1]], [*prompt, W[3]]], 4)]  # one token of the limit is used up
    assert one.ids == [*prompt, W[1], W[2], EOS]
    assert one.mask == [0] * len(prompt) + [1, 1, 1]
    assert one.logps == [0.0] * len(prompt) + [0.0, -0.5, -0.25]
    assert (one.texts, other.texts) == (["w1 w2 "], ["w3 w2 "])
    assert one.infos[0]["reason"] == "w1 w2 "  # the environment judges the opening too
    assert one.tokens_forward == len(prompt) + 3 and other.tokens_forward == 3


def test_an_opening_that_is_the_end_token_is_a_whole_answer(calls):
    ended, other = play([[EOS], [W[1]]], group_size=2)
    assert ended.ids[ended.prompt_length :] == [EOS] and not ended.truncated
    assert other.texts == ["w1 w2 "]


def test_only_the_first_answer_has_an_opening(calls):
    (episode,) = play([[W[1]]], turns=2)
    assert episode.texts == ["w1 w2 ", "w2 "]


def test_openings_follow_the_episodes_over_batches(calls):
    played = play([[W[1]], [W[2]], [W[3]]], tasks=3, batch_size=2)
    assert [e.texts[0] for e in played] == ["w1 w2 ", "w2 w2 ", "w3 w2 "]


@pytest.mark.parametrize("openings", [[[1]], [[1], [1, 2]]])
def test_openings_must_fit_the_episodes(calls, openings):
    with pytest.raises(ValueError, match="openings="):
        play(openings, tasks=2)
