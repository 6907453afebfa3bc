"""Many-turn episodes, the batches made of them, and evaluation over tasks."""

import copy
import functools

import gymnasium
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common import episodes as episodes_module
from common.episodes import Episode, collate, run_episodes, token_logprobs
from common.evaluation import evaluate_tasks
from common.models import DecoderConfig, build_decoder
from common.rollout import Completion
from common.tokenizers import build_phrase_tokenizer

WORDS = [f"w{i} " for i in range(12)]
TOKENIZER = build_phrase_tokenizer(WORDS)
EOS = TOKENIZER.eos_token_id


@functools.cache
def tiny_model(seed=0):
    model = build_decoder(
        DecoderConfig(hidden=32, layers=2, heads=4, kv_heads=2, feedforward=48, max_length=96), TOKENIZER, seed
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)
    return model.eval()


class EchoTask(gymnasium.Env):
    """Shows a word; right if the answer's first word is that word. Ends after `rounds` wrong answers or a right one."""

    def __init__(self):
        self.info = {"parts": {}, "history": []}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        options = options or {}
        self.word = options.get("word", WORDS[0])
        self.rounds = options.get("rounds", 1)
        options.clear()
        self.info["history"] = []
        return self.word, {}

    def step(self, action):
        success = action.startswith(self.word)
        self.info["history"].append(action)
        self.info |= {
            "success": success,
            "reason": "right" if success else "wrong",
            "parts": {"answer": float(success)},
        }
        terminated = success or len(self.info["history"]) >= self.rounds
        return f"{WORDS[11]}{self.word}", 1.0 if success else -0.5, terminated, False, self.info


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def scripted(monkeypatch, answer, calls=None):
    """Replaces the sampler: `answer(prompt ids, row of this call)` gives the ids a row writes."""

    def fake(model, prompts, *, group_size=1, max_new_tokens, stop_ids, **settings):
        if calls is not None:
            calls.append([list(prompt) for prompt in prompts])
        rows = [answer(prompt, row)[:max_new_tokens] for row, prompt in enumerate(prompts)]
        return [Completion(ids, [-0.25] * len(ids), ids[-1] in stop_ids) for ids in rows]

    monkeypatch.setattr(episodes_module, "sample", fake)


def test_a_two_turn_episode_token_by_token(monkeypatch):
    scripted(monkeypatch, lambda prompt, row: [*ids_of("w3 "), EOS] if len(prompt) < 4 else [*ids_of("w5 w6 "), EOS])
    task = {"word": "w5 ", "rounds": 3}
    (episode,) = run_episodes(tiny_model(), TOKENIZER, EchoTask, [task], max_turns=4)
    messages = [
        {"role": "user", "content": "w5 "},
        {"role": "assistant", "content": "w3 "},
        {"role": "user", "content": "w11 w5 "},
        {"role": "assistant", "content": "w5 w6 "},
    ]
    # T08: the pieces joined are the full rendering. T01: one start token. T09: each answer occurs once.
    assert episode.ids == ids_of(TOKENIZER.apply_chat_template(messages, tokenize=False))
    assert episode.ids.count(TOKENIZER.bos_token_id) == 1
    assert [TOKENIZER.convert_ids_to_tokens(i) for i in episode.ids] == [
        *("<bos>", "w5 "),
        *("w3 ", "<eos>"),
        *("w11 ", "w5 "),
        *("w5 ", "w6 ", "<eos>"),
    ]
    assert episode.mask == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert episode.turns == [-1, -1, 0, 0, -1, -1, 1, 1, 1]
    assert episode.logps == [0, 0, -0.25, -0.25, 0, 0, -0.25, -0.25, -0.25]
    assert episode.texts == ["w3 ", "w5 w6 "]
    assert (episode.reward, episode.turn_rewards) == (0.5, [-0.5, 1.0])
    assert (episode.success, episode.terminated, episode.truncated) == (True, True, False)
    assert [info["reason"] for info in episode.infos] == ["wrong", "right"]
    assert (episode.prompt_length, episode.group, episode.task) == (2, 0, task)
    # First turn: prompt and answer; second turn: the row so far is prefilled again, then the answer.
    assert episode.tokens_forward == (2 + 2) + (4 + 3)  # the second turn reads two tokens of answer and two of reply


def test_t02_an_answer_cut_by_the_limit_is_closed_before_the_reply(monkeypatch):
    scripted(monkeypatch, lambda prompt, row: ids_of("w1 w1 w1 "))
    (episode,) = run_episodes(tiny_model(), TOKENIZER, EchoTask, [{"word": "w5 ", "rounds": 2}], max_turns=2, max_new_tokens=2)
    assert [TOKENIZER.convert_ids_to_tokens(i) for i in episode.ids[2:7]] == ["w1 ", "w1 ", "<eos>", "w11 ", "w5 "]
    assert episode.mask[2:7] == [1, 1, 0, 0, 0]
    assert episode.truncated and episode.terminated and not episode.success


@pytest.mark.parametrize(
    ("rounds", "max_turns", "answer", "expected"),
    [
        (2, 2, "w5 ", {"turns": 1, "success": True, "terminated": True, "truncated": False}),
        (2, 2, "w1 ", {"turns": 2, "success": False, "terminated": True, "truncated": False}),
        (3, 2, "w1 ", {"turns": 2, "success": False, "terminated": False, "truncated": True}),
    ],
)
def test_g07_how_episodes_end(monkeypatch, rounds, max_turns, answer, expected):
    scripted(monkeypatch, lambda prompt, row: [*ids_of(answer), EOS])
    task = {"word": "w5 ", "rounds": rounds}
    (episode,) = run_episodes(tiny_model(), TOKENIZER, EchoTask, [task], max_turns=max_turns)
    got = {"turns": len(episode.texts)} | {name: getattr(episode, name) for name in ("success", "terminated", "truncated")}
    assert got == expected


def test_an_episode_that_outgrows_the_context_is_truncated(monkeypatch):
    scripted(monkeypatch, lambda prompt, row: [*ids_of("w1 " * 39), EOS])
    (episode,) = run_episodes(tiny_model(), TOKENIZER, EchoTask, [{"word": "w5 ", "rounds": 9}], max_turns=9, max_new_tokens=40)
    assert (len(episode.texts), len(episode.ids)) == (2, 2 + 42 + 42)
    assert episode.truncated and not episode.terminated
    with pytest.raises(ValueError, match="do not fit the model's context of 96"):
        run_episodes(tiny_model(), TOKENIZER, EchoTask, [{"word": "w5 " * 60}], max_new_tokens=40)


def test_g08_each_row_gets_its_own_task_and_keeps_its_place(monkeypatch):
    """An echo policy that answers with its own instruction succeeds everywhere, alone and in a batch."""
    calls = []
    scripted(monkeypatch, lambda prompt, row: [prompt[1], EOS], calls)
    tasks = [{"word": word} for word in WORDS[:5]]
    for batch_size in (1, 4, 100):
        played = run_episodes(tiny_model(), TOKENIZER, EchoTask, tasks, group_size=2, batch_size=batch_size)
        assert [e.task["word"] for e in played] == [task["word"] for task in tasks for _ in range(2)]
        assert [e.texts[0] for e in played] == [task["word"] for task in tasks for _ in range(2)]
        assert [e.group for e in played] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert all(e.success for e in played)
    assert [len(call) for call in calls] == [1] * 10 + [4, 4, 2] + [10]
    assert tasks == [{"word": word} for word in WORDS[:5]]  # the environment empties the options it is given


class Together:
    """Makes tasks and steps all that are under way at once; keeps how many."""

    def __init__(self):
        self.steps = []

    def __call__(self):
        return EchoTask()

    def step_all(self, envs, texts):
        self.steps.append(list(texts))
        return [env.step(text) for env, text in zip(envs, texts, strict=True)]


def test_environments_that_step_together_give_the_episodes_of_those_that_step_alone(monkeypatch):
    scripted(monkeypatch, lambda prompt, row: [prompt[-1], EOS] if len(prompt) > 5 else [*ids_of("w1 "), EOS])
    tasks = [{"word": word, "rounds": 3} for word in ("w1 ", "w5 ", "w6 ")]
    together = Together()
    both = [run_episodes(tiny_model(), TOKENIZER, make, tasks, max_turns=3) for make in (EchoTask, together)]
    assert both[0] == both[1]
    assert together.steps == [["w1 "] * 3, ["w5 ", "w6 "]]  # the first one is solved at once and takes no further turn


def test_g05_infos_are_copies(monkeypatch):
    scripted(monkeypatch, lambda prompt, row: [*ids_of("w1 "), EOS])
    (episode,) = run_episodes(tiny_model(), TOKENIZER, EchoTask, [{"word": "w5 ", "rounds": 3}], max_turns=3)
    assert [info["history"] for info in episode.infos] == [["w1 "], ["w1 "] * 2, ["w1 "] * 3]
    assert all(info["history"] is not episode.infos[-1]["history"] for info in episode.infos[:-1])


class SeededTask(EchoTask):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.word = WORDS[int(self.np_random.integers(len(WORDS)))]
        return self.word, {}


def test_g04_the_item_follows_from_the_seed_alone(monkeypatch):
    tasks = [{"seed": seed, "rounds": 2} for seed in (7, 8, 9, 7)]
    shown = []
    for answer in ("w1 ", "w2 w2 "):
        scripted(monkeypatch, lambda prompt, row, answer=answer: [*ids_of(answer), EOS])
        played = run_episodes(tiny_model(), TOKENIZER, SeededTask, tasks, max_turns=2, batch_size=3)
        shown.append([e.ids[1] for e in played])
    assert shown[0] == shown[1]
    assert shown[0][0] == shown[0][3]
    assert len(set(shown[0])) > 1


@pytest.mark.parametrize("reward", [None, [1.0], np.array([1.0]), (r for r in [1.0]), "1.0", float("inf"), {}])
def test_l22_a_reward_that_is_not_one_number_is_an_error_that_names_the_environment(monkeypatch, reward):
    class OddReward(EchoTask):
        def step(self, action):
            return "", reward, True, False, {"success": False, "reason": ""}

    scripted(monkeypatch, lambda prompt, row: [EOS])
    with pytest.raises(ValueError, match=r"OddReward\.step\(\) must return one finite number"):
        run_episodes(tiny_model(), TOKENIZER, OddReward, [{}])


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.array(1.0), torch.tensor(1.0)])
def test_one_number_may_come_as_any_scalar(monkeypatch, reward):
    class Scalar(EchoTask):
        def step(self, action):
            return "", reward, True, False, {"success": False, "reason": ""}

    scripted(monkeypatch, lambda prompt, row: [EOS])
    assert run_episodes(tiny_model(), TOKENIZER, Scalar, [{}])[0].reward == 1.0


def test_an_info_without_a_verdict_is_an_error(monkeypatch):
    class Silent(EchoTask):
        def step(self, action):
            return "", 1.0, True, False, {"success": True}

    scripted(monkeypatch, lambda prompt, row: [EOS])
    with pytest.raises(ValueError, match=r'Silent\.step\(\) must return an info with "success" and "reason"'):
        run_episodes(tiny_model(), TOKENIZER, Silent, [{}])


def episode_of(ids, prompt_length, **changes):
    own = len(ids) - prompt_length
    logps, turns = [0.0] * prompt_length + [-1.0] * own, [-1] * prompt_length + [0] * own
    return Episode(ids, [0] * prompt_length + [1] * own, logps, turns, prompt_length, {}, 0, **changes)


@pytest.mark.parametrize("pad", [0, EOS])
@pytest.mark.parametrize("ending", [[5, 6, 7], [EOS], [5, EOS, EOS], [5, 6, EOS]])
def test_l12_t03_masks_come_from_lengths(pad, ending):
    """No end token, end first, two end tokens, and a pad id that is the end id."""
    batch = collate([episode_of([8, 9, *ending], 2), episode_of([8] * 6 + [9], 6)], pad)
    real = 2 + len(ending)
    assert batch.ids_BT[0].tolist() == [8, 9, *ending] + [pad] * (7 - real)
    assert batch.attention_BT[0].tolist() == [True] * real + [False] * (7 - real)
    assert batch.mask_BT[0].tolist() == [False] * 2 + [True] * len(ending) + [False] * (7 - real)
    assert batch.logp_BT[0].tolist() == [0.0] * 2 + [-1.0] * len(ending) + [0.0] * (7 - real)
    assert batch.turn_BT[0].tolist() == [-1] * 2 + [0] * len(ending) + [-1] * (7 - real)
    losses_BT = torch.tensor([[9.0, 9.0, 0.2, 0.4, 0.6, 9.0, 9.0]])
    if len(ending) == 3:
        assert losses_BT[batch.mask_BT[:1]].mean().item() == pytest.approx(0.4)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_l15_the_trainer_reads_the_rollout_as_it_was_sampled(temperature):
    """Real sampling over two turns: ratio 1 on every policy token, nothing elsewhere."""
    tasks = [{"word": word * (1 + i), "rounds": 2} for i, word in enumerate(WORDS[:6])]
    played = run_episodes(
        tiny_model(),
        TOKENIZER,
        EchoTask,
        tasks,
        group_size=3,
        max_turns=2,
        max_new_tokens=9,
        temperature=temperature,
        generator=torch.Generator().manual_seed(1),
    )
    assert {len(e.texts) for e in played} == {2}
    batch = collate(played, TOKENIZER.pad_token_id)
    with torch.no_grad():
        logp_BT, _ = token_logprobs(tiny_model(), batch.ids_BT, batch.attention_BT, temperature, mask_BT=batch.mask_BT)
    assert (logp_BT - batch.logp_BT).abs().max() < 1e-4
    assert (logp_BT[~batch.mask_BT] == 0).all()
    assert (batch.logp_BT[batch.mask_BT] < 0).all()
    # T05: something is learned from, and not everything.
    assert 0 < batch.mask_BT.sum() < batch.attention_BT.sum()


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=64, n_embd=16, n_layer=2, n_head=2)).eval()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", [tiny_model, gpt2])
def test_t10_padding_on_either_side_changes_no_logprob(model, side):
    row = [1, 5, 6, 7, 8, 9, 10]
    with torch.no_grad():
        alone = torch.log_softmax(model()(torch.tensor([row])).logits[0], -1)
    expected = [0.0] + [alone[t - 1, row[t]].item() for t in range(1, len(row))]
    for pads in range(0, 17, 2):
        other = [3] * (len(row) + pads)
        padded = [0] * pads + row if side == "left" else row + [0] * pads
        attention = [0] * pads + [1] * len(row) if side == "left" else [1] * len(row) + [0] * pads
        with torch.no_grad():
            logp_BT, entropy_BT = token_logprobs(
                model(), torch.tensor([padded, other]), torch.tensor([attention, [1] * len(other)]), with_entropy=True
            )
        start = pads if side == "left" else 0
        assert logp_BT[0, start : start + len(row)].tolist() == pytest.approx(expected, abs=1e-4)
        kept = torch.tensor(attention) == 1
        assert (logp_BT[0][~kept] == 0).all() and (entropy_BT[0][~kept] == 0).all()


def test_chosen_positions_give_the_values_and_gradients_of_the_full_forward():
    model = copy.deepcopy(tiny_model())
    ids_BT = torch.tensor([[1, 4, 5, 6, 7], [1, 8, 9, 0, 0]])
    attention_BT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    mask_BT = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 1, 0, 0]])
    logp_BT, entropy_BT = token_logprobs(model, ids_BT, attention_BT, 0.7, with_entropy=True, mask_BT=mask_BT)
    (logp_BT.sum() + 0.3 * entropy_BT.sum()).backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logp_BTV = torch.log_softmax(model(ids_BT, attention_mask=attention_BT).logits[:, :-1] / 0.7, -1)
    chosen_BT = mask_BT[:, 1:].bool()
    picked_BT = logp_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
    entropies_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
    assert logp_BT[:, 1:][chosen_BT].tolist() == pytest.approx(picked_BT[chosen_BT].tolist(), abs=1e-5)
    assert entropy_BT[:, 1:][chosen_BT].tolist() == pytest.approx(entropies_BT[chosen_BT].tolist(), abs=1e-5)
    (picked_BT[chosen_BT].sum() + 0.3 * entropies_BT[chosen_BT].sum()).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, ours[name], atol=1e-5), name


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10])
def test_d05_every_item_counts_once(monkeypatch, batch_size):
    """10 items of which only the last two are answered rightly: 0.2 of 10, whatever the batch size."""
    scripted(monkeypatch, lambda prompt, row: [prompt[1] if prompt[1] in ids_of("w8 w9 ") else 4, EOS])
    tasks = [{"word": WORDS[i + (i == 0) * 10]} for i in range(10)]
    result = evaluate_tasks(tiny_model(), TOKENIZER, EchoTask, tasks, samples=2, batch_size=batch_size, temperature=0)
    assert result.items["success"] == [0.0] * 8 + [1.0] * 2
    assert result.items["reward"] == [-0.5] * 8 + [1.0] * 2
    assert result.mean("success") == pytest.approx(0.2)
    assert [e.task["word"] for e in result.episodes] == [task["word"] for task in tasks for _ in range(2)]


def test_evaluation_averages_samples_of_an_item(monkeypatch):
    scripted(monkeypatch, lambda prompt, row: [*ids_of("w1 " if row % 4 or len(prompt) > 4 else "w2 "), EOS])
    tasks = [{"word": "w1 ", "rounds": 2}, {"word": "w2 ", "rounds": 2}]
    result = evaluate_tasks(tiny_model(), TOKENIZER, EchoTask, tasks, samples=4, max_turns=2)
    # Item 0: three right at once, one in the second turn. Item 1: one right, three wrong twice.
    assert result.items["first_success"] == [0.75, 0.25]
    assert result.items["success"] == [1.0, 0.25]
    assert result.items["reward"] == [(3 * 1.0 + 0.5) / 4, (1.0 - 3 * 1.0) / 4]
    assert result.items["truncated"] == [0.0, 0.0]
    assert result.samples == 4


def test_evaluation_refuses_nothing_to_do_and_unscored_episodes(monkeypatch):
    class Unscored(EchoTask):
        def step(self, action):
            return "", float("nan"), True, False, {"success": False, "reason": "no verdict"}

    scripted(monkeypatch, lambda prompt, row: [EOS])
    with pytest.raises(ValueError, match="no tasks"):
        evaluate_tasks(tiny_model(), TOKENIZER, EchoTask, [])
    with pytest.raises(ValueError, match="1 of 1 episodes have no reward"):
        evaluate_tasks(tiny_model(), TOKENIZER, Unscored, [{}])


def test_d08_episodes_of_a_group_differ_and_repeat_with_the_seed():
    def play(seed):
        generator = torch.Generator().manual_seed(seed)
        return run_episodes(
            tiny_model(), TOKENIZER, EchoTask, [{"word": "w5 "}], group_size=8, max_new_tokens=12, generator=generator
        )

    first, again, other = play(1), play(1), play(2)
    assert [e.ids for e in first] == [e.ids for e in again]
    assert [e.ids for e in first] != [e.ids for e in other]
    assert len({tuple(e.ids) for e in first}) > 4
