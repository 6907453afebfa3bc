"""A learned judge: where it reads, what it learns, what it puts in the place of the rules."""

import pytest
import torch

from common.episodes import Episode
from common.judge import JUDGED, Judged, judge, labels_of, quality, train_judge, turn_ends, turn_logits
from common.models import DecoderConfig, build_decoder, parameter_count
from common.reward_model import build_reward_model
from common.sft import SftConfig
from common.tokenizers import build_phrase_tokenizer

TOKENIZER = build_phrase_tokenizer(["go", "good", "bad", "ok"])
GO, GOOD, BAD, OK = (TOKENIZER.get_vocab()[text] for text in ("go", "good", "bad", "ok"))
PAD, EOS = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
SHAPE = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=32, max_length=32)


def episode(words):
    """`bad` breaks a rule, but for behind another `bad`."""
    made = Episode([], [], [], [], prompt_length=1, task={}, group=0)
    made.append([GO], None, -1)
    for turn, word in enumerate(words):
        made.append([word, EOS], [-1.0, -1.0], turn)
        if turn + 1 < len(words):
            made.append([OK], None, -1)
        breaks = word == BAD and words[:turn][-1:] != [BAD]
        made.infos.append({"violations": ["rule"] if breaks else [], "parts": {"violations": int(breaks)}})
    return made


EPISODES = [episode([GOOD if i >> k & 1 else BAD for k in range(3)]) for i in range(8)]


@pytest.fixture
def policy():
    return build_decoder(SHAPE, TOKENIZER, 0)


def test_ends_and_labels():
    made = episode([GOOD, BAD, BAD])
    assert made.ids == [GO, GOOD, EOS, OK, BAD, EOS, OK, BAD, EOS]
    assert turn_ends(made) == [2, 5, 8] and labels_of(made) == [0.0, 1.0, 0.0]


def test_a_fresh_judge_sees_nothing_and_padding_changes_no_verdict(policy):
    model = build_reward_model(policy)
    assert turn_logits(model, EPISODES[:2], PAD).tolist() == [0.0] * 6
    assert quality(model, EPISODES, PAD) == (None, 0.0)
    torch.nn.init.ones_(model.score.weight)
    short = episode([BAD])
    together, alone = turn_logits(model, [EPISODES[3], short], PAD), turn_logits(model, [short], PAD)
    assert together[3:].tolist() == pytest.approx(alone.tolist(), abs=1e-5) and abs(alone.item()) > 1e-3


def test_it_learns_a_rule_that_looks_back_and_takes_the_rules_place(policy):
    model = build_reward_model(policy)
    losses = train_judge(model, EPISODES, SftConfig(lr=1e-2, batch_size=8), steps=120, pad_id=PAD, seed=0)
    assert losses[0] == pytest.approx(0.6931, abs=1e-4) and losses[-1] < 0.05
    assert quality(model, EPISODES, PAD) == (1.0, 1.0)
    assert judge(model, [episode([BAD, BAD, GOOD])], PAD) == [[True, False, False]]
    made = episode([BAD, GOOD, BAD])
    made.infos[1]["violations"] = ["another"]  # what the rules say is not asked
    Judged(None, model, PAD, parameter_count(model) // 2).rescore([made])
    assert [info["violations"] for info in made.infos] == [[JUDGED], [], [JUDGED]]
    assert made.infos[0]["parts"] == {"violations": 1}
    assert made.tokens_forward == -(-len(made.ids) * parameter_count(model) // (parameter_count(model) // 2))
