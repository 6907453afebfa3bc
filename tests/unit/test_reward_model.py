"""The reward model: loss by hand, the score read by length, masks by gradient, scoring, resume, and the learned reward."""

import math

import gymnasium
import pytest
import torch
from gymnasium.spaces import Text

from common import reward_model
from common.algo import AlgoConfig
from common.compute import Budget
from common.episodes import Episode
from common.files import read_json_lines
from common.loop import sample_step
from common.models import DecoderConfig, build_decoder, parameter_count
from common.pairs import Pair
from common.reward_model import LearnedReward, bradley_terry_loss, build_reward_model, score_answers, score_rows
from common.runlog import RunLog
from common.schema import ConfigError
from common.sft import SftConfig, pad_rows
from common.tokenizers import build_phrase_tokenizer

TOKENIZER = build_phrase_tokenizer([f"w{i}" for i in range(20)])
PAD, EOS = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
SHAPE = DecoderConfig(hidden=16, layers=2, heads=2, kv_heads=1, feedforward=32, max_length=64)
LABELS = {"experiment": "unit", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}


def build_model(seed=0, head=True):
    """A reward model; with a head that is not zero, so that scores and gradients say something."""
    model = build_reward_model(build_decoder(SHAPE, TOKENIZER, seed))
    if head:
        with torch.no_grad():
            model.score.weight.copy_(torch.linspace(-1, 1, 16))
    return model


def row(ids, prompt=2):
    return list(ids), [int(t >= prompt) for t in range(len(ids))]


ROWS = [row([4, 5, 10, 11, EOS]), row([4, 5, 12, EOS]), row([6, 7, 13, 14, 15, 16, EOS]), row([6, 7, 17, 18])]
PAIRS = [Pair(ROWS[0], ROWS[1]), Pair(ROWS[2], ROWS[3]), Pair(row([4, 8, 10]), row([4, 8, 11, 12, EOS]))]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_bradley_terry_by_hand():
    """Scores 2 and 1: the better one wins with 1 / (1 + e^-1); equal scores: log 2; the wrong way round: log(1 + e)."""
    loss = bradley_terry_loss(torch.tensor([2.0, 0.5, 1.0]), torch.tensor([1.0, 0.5, 2.0]))
    expected = [math.log(1 + math.exp(-1)), math.log(2), math.log(1 + math.e)]
    assert loss.tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.allclose(bradley_terry_loss(torch.tensor([102.0]), torch.tensor([101.0])), loss[:1])


def test_starts_as_the_policys_decoder_with_every_score_zero():
    policy = build_decoder(SHAPE, TOKENIZER, 0)
    model = build_reward_model(policy)
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    assert score_answers(model, ROWS, PAD).tolist() == [0.0] * 4
    ids_BT = torch.tensor([ROWS[0][0]])
    ours, theirs = (m.base_model(input_ids=ids_BT).last_hidden_state for m in (model, policy))
    assert torch.equal(ours, theirs)
    with torch.no_grad():
        model.base_model.embed_tokens.weight.zero_()
    assert policy.base_model.embed_tokens.weight.abs().max() > 0


def test_score_is_the_head_on_each_rows_last_real_token():
    model = build_model()
    expected = []
    for ids, _ in ROWS:
        with torch.no_grad():
            hidden_1TD = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state
            expected.append(float((hidden_1TD[0, -1] * model.score.weight[0]).sum()))
    assert len({round(x, 3) for x in expected}) == 4
    assert score_answers(model, ROWS, PAD).tolist() == pytest.approx(expected, abs=1e-5)
    assert score_answers(model, ROWS[::-1], PAD).tolist() == pytest.approx(expected[::-1], abs=1e-5)


def test_scores_do_not_depend_on_the_chunk(monkeypatch):
    model = build_model()
    whole = score_answers(model, ROWS, PAD)
    monkeypatch.setattr(reward_model, "SCORE_ROWS", 1)
    assert torch.allclose(score_answers(model, ROWS, PAD), whole, atol=1e-5)


def test_L12_pad_may_equal_the_end_token():
    """Lengths say where a row ends. Transformers' own forward looks for the last other id and reads a token too early."""
    model = build_model()
    expected = score_answers(model, ROWS, PAD)
    assert torch.allclose(score_answers(model, ROWS, EOS), expected, atol=1e-5)
    ids_BT, attention_BT, _ = pad_rows(ROWS, EOS)
    model.config.pad_token_id = EOS
    with torch.no_grad():
        theirs_B = model(input_ids=ids_BT, attention_mask=attention_BT).logits[:, 0]
    assert (theirs_B - expected).abs()[:3].min() > 1e-3
    assert torch.allclose(theirs_B[3], expected[3], atol=1e-5)  # the row that was cut ends with another token


def test_gradient_enters_at_the_last_token_and_padding_gets_none():
    model, hidden = build_model(), []

    def keep(_module, _args, _kwargs, output):
        output.last_hidden_state.retain_grad()
        hidden.append(output.last_hidden_state)

    model.base_model.register_forward_hook(keep, with_kwargs=True)
    ids_BT, attention_BT, _ = pad_rows(ROWS, PAD)
    better_P, worse_P = score_rows(model, ids_BT, attention_BT).chunk(2)
    bradley_terry_loss(better_P, worse_P).mean().backward()
    ends_BT = torch.nn.functional.one_hot(attention_BT.sum(1) - 1, ids_BT.shape[1]).bool()
    gradient_BT = hidden[0].grad.abs().amax(-1)
    assert (gradient_BT[~ends_BT] == 0).all()
    assert (gradient_BT[ends_BT] > 0).all()
    embedded = model.base_model.embed_tokens.weight.grad.abs().amax(-1)
    assert embedded[PAD] == 0
    assert embedded[4] > 0  # the prompt is context: the answer's score depends on it


def run(model, folder, config, **keys):
    with RunLog(folder, LABELS, quiet=True) as log:
        keys = {"pad_id": PAD, "seed": 0, "budget": Budget(steps=4), "log": log, "folder": folder} | keys
        meter = reward_model.train_reward_model(model, PAIRS, config, **keys)
    return meter, read_json_lines(folder / "metrics.jsonl")


CONFIG = SftConfig(lr=1e-2, batch_size=3, warmup_steps=0)


def test_training_from_zero_scores_starts_at_log_2_and_orders_the_pairs(tmp_path):
    model = build_model(head=False)
    meter, rows = run(model, tmp_path, CONFIG)
    assert rows[0]["loss/reward"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["preference/accuracy"] == 0.0  # equal scores order nothing
    assert rows[-1]["loss/reward"] < 0.5 and rows[-1]["preference/accuracy"] == 1.0
    assert reward_model.pair_accuracy(model, PAIRS, PAD) == 1.0
    assert reward_model.pair_accuracy(model, [Pair(b, a) for a, b in PAIRS], PAD) == 0.0
    assert (meter.tokens_trained, meter.tokens_forward) == (4 * (5 + 4 + 7 + 4 + 3 + 5), 0)
    assert rows[-1]["preference/margin"] > rows[1]["preference/margin"]


def test_a_run_that_was_cut_goes_on_to_the_same_end(tmp_path):
    config = SftConfig(lr=1e-2, batch_size=2, warmup_steps=2, decay_share=0.5)
    whole, resumed = build_model(), build_model()
    meter, rows = run(whole, tmp_path / "whole", config, budget=Budget(steps=5), checkpoint_every=2)

    class CutLog(RunLog):
        def metrics(self, step, values, progress=None):
            if step == 4:
                raise KeyboardInterrupt
            super().metrics(step, values, progress)

    with pytest.raises(KeyboardInterrupt), CutLog(tmp_path / "cut", LABELS, quiet=True) as log:
        keys = {"pad_id": PAD, "seed": 0, "budget": Budget(steps=5), "folder": tmp_path / "cut", "checkpoint_every": 2}
        reward_model.train_reward_model(build_model(), PAIRS, config, log=log, **keys)
    again, rows_again = run(resumed, tmp_path / "cut", config, budget=Budget(steps=5), checkpoint_every=2)
    assert torch.equal(weights(whole), weights(resumed))
    assert meter.state_dict() == again.state_dict()
    assert [r["loss/reward"] for r in rows] == [r["loss/reward"] for r in rows_again]


def test_refusals_name_key_and_value(tmp_path):
    with pytest.raises(ConfigError, match="batch_size=64: there are 3 pairs"):
        run(build_model(), tmp_path / "a", SftConfig())
    with pytest.raises(ConfigError, match="optimizer=muon"):
        run(build_model(), tmp_path / "b", SftConfig(optimizer="muon", batch_size=2))


# The learned reward ---------------------------------------------------------------------------------------------------


class Right(gymnasium.Env):
    """Every answer earns 0.25 by a part called style; the second one ends the task with success."""

    observation_space = action_space = Text(32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "w1", {}

    def step(self, action):
        self.turn += 1
        done = self.turn == 2
        return "w2", 0.25, done, False, {"success": done, "reason": "", "parts": {"style": 0.25}}


def test_episodes_earn_the_score_and_keep_the_true_reward_beside_it():
    policy = build_decoder(SHAPE, TOKENIZER, 0)
    model = build_model(seed=1)
    algo = AlgoConfig(name="grpo", prompts_per_step=2, group_size=2, max_turns=2, max_new_tokens=3)
    arguments = policy, TOKENIZER
    plain = sample_step(*arguments, Right, [{}, {}], algo, 0, 0)
    learned = LearnedReward(Right, model, PAD, policy_parameters=parameter_count(policy))
    scored = sample_step(*arguments, learned, [{}, {}], algo, 0, 0)
    price = parameter_count(model) / parameter_count(policy)
    for before, after in zip(plain, scored, strict=True):
        assert (before.ids, before.success) == (after.ids, after.success)
        score = float(score_answers(model, [(after.ids, after.mask)], PAD))
        assert before.reward == 0.5
        assert after.reward == pytest.approx(score, abs=1e-5)
        assert after.turn_rewards == [0.0, after.reward]
        assert after.infos[0]["parts"] == {"style": 0.25}
        assert after.infos[1]["parts"] == {"style": 0.25, "proxy": after.reward, "true": 0.5}
        assert after.tokens_forward - before.tokens_forward == math.ceil(len(after.ids) * price)
    assert len({round(episode.reward, 4) for episode in scored}) > 1


def test_the_score_is_read_where_the_last_answer_ends():
    """What the environment says after the last answer is not judged."""
    model = build_model()
    made = Episode([4, 5, 10, 11, 9, 9], [0, 0, 1, 1, 0, 0], [0.0] * 6, [-1, -1, 0, 0, -1, -1], 2, {}, 0)
    made.infos, made.turn_rewards = [{"success": False, "reason": ""}], [0.0]
    LearnedReward(Right, model, PAD, 1).rescore([made])
    assert made.reward == pytest.approx(float(score_answers(model, [row([4, 5, 10, 11])], PAD)), abs=1e-6)
