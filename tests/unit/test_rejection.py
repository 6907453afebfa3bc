"""Rejection sampling: what each step removes, what is kept for the next call, rounds, hints, going on after a kill."""

import dataclasses

import gymnasium
import pytest
import torch
from gymnasium.spaces import Text

from common.compute import Budget, Meter
from common.episodes import Episode, run_episodes
from common.files import read_json, read_json_lines
from common.models import DecoderConfig, build_decoder, parameter_count
from common.rejection import RejectionConfig, keep_candidates, round_budget, row_batches, train_rejection, verified_samples
from common.runlog import RunLog
from common.schema import ConfigError
from common.seeding import generator, python_random
from common.sft import SftConfig, pad_rows, train_sft
from common.tokenizers import build_phrase_tokenizer

WORDS = ["a", "b", "c", "d"]
TOKENIZER = build_phrase_tokenizer([*WORDS, "?", "!"])
SHAPE = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=1, feedforward=32, max_length=32)
LABELS = {"experiment": "test", "scale": "smoke", "variant": None, "arm": "arm", "seed": 0}
CONFIG = RejectionConfig(rounds=3, prompts=4, candidates=8, cap=2, max_new_tokens=3)
SFT = SftConfig(lr=1e-2, batch_size=8, warmup_steps=1)


class Letter(gymnasium.Env):
    """Scores an answer that begins with the shown letter; a task with `hint` shows it twice, one with `dead` never pays."""

    observation_space = action_space = Text(32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = options
        letter = WORDS[options["word"]]
        return f"{letter}!{letter}?" if options.get("hint") else f"{letter}?", {}

    def step(self, action):
        right = action.startswith(WORDS[self.task["word"]]) and (not self.task.get("dead") or bool(self.task.get("hint")))
        return "", float(right), True, False, {"success": right, "reason": "letter"}


def task_at(index, n):
    return [{"word": i % 4} for i in range(n)]


def text(episode):
    return episode.texts[0]


def build_model():
    return build_decoder(SHAPE, TOKENIZER, 0)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def candidate(group, answer, success):
    return Episode([1, 2], [0, 1], [0.0, -1.0], [-1, 0], 1, {}, group, success=success, texts=[answer])


def collect(folder, tasks, config=CONFIG, **kwargs):
    return verified_samples(
        build_model(), TOKENIZER, Letter, tasks, config, text, stream=generator(0, "s"), file=folder / "samples.json", **kwargs
    )


def test_each_step_removes_what_it_should_in_the_order_of_sampling():
    made = [
        candidate(0, "x", True),
        candidate(0, "y", False),
        candidate(0, "x", True),
        candidate(0, "z", True),
        candidate(0, "w", True),
        candidate(0, "z", True),
        candidate(1, "x", True),
        candidate(2, "q", False),
    ]
    kept, counts = keep_candidates(made, text, cap=2)
    assert [(e.group, e.texts[0]) for e in kept] == [(0, "x"), (0, "z"), (1, "x")]
    assert counts == {"sampled": 8, "wrong": 2, "repeated": 2, "over_cap": 1, "kept": 3, "solved": 2}
    assert counts["sampled"] == sum(counts[name] for name in ("wrong", "repeated", "over_cap", "kept"))
    other, _ = keep_candidates(made, text, cap=9, verify=lambda e: e.texts[0] in "yq")
    assert [e.texts[0] for e in other] == ["y", "q"]
    assert keep_candidates([], text, cap=1) == (
        [],
        {"sampled": 0, "wrong": 0, "repeated": 0, "over_cap": 0, "kept": 0, "solved": 0},
    )


def test_samples_are_the_episodes_of_their_stream_and_are_read_again(tmp_path):
    samples = collect(tmp_path, task_at(0, 4))
    episodes = run_episodes(
        build_model(), TOKENIZER, Letter, task_at(0, 4), group_size=8, max_new_tokens=3, generator=generator(0, "s")
    )
    kept, counts = keep_candidates(episodes, text, 2)
    assert samples.rows == [(e.ids, e.mask) for e in kept]
    assert 0 < len(samples.rows) <= 8
    assert samples.counts == counts and counts["wrong"] > 0
    assert samples.tokens_forward == sum(e.tokens_forward for e in episodes)
    assert collect(tmp_path, [{"word": 9}]) == samples  # from the file: these tasks could not be played


def test_a_hint_helps_with_unsolved_tasks_and_is_not_in_the_rows(tmp_path):
    tasks = [{"word": 0}, {"word": 1, "dead": True}, {"word": 2, "dead": True}]
    config = dataclasses.replace(CONFIG, candidates=32, cap=1)
    plain = collect(tmp_path, tasks, config)
    (tmp_path / "hinted").mkdir()
    hinted = collect(tmp_path / "hinted", tasks, config, hint=lambda task: task | {"hint": True})
    assert plain.counts["solved"] == 1
    assert hinted.counts == plain.counts | {"hinted": 2}
    assert hinted.rows[:1] == plain.rows
    for (ids, mask), word in zip(hinted.rows[1:], (1, 2)):
        prompt = TOKENIZER(f"<bos>{WORDS[word]}?")["input_ids"]
        assert ids[:3] == prompt and mask[:3] == [0, 0, 0]
        assert TOKENIZER.decode(ids[3:4]) == WORDS[word] and all(mask[3:])
    assert hinted.tokens_forward > plain.tokens_forward


def test_batches_come_from_a_named_stream():
    rows = [([1, n, 2], [0, 1, 1]) for n in range(4, 9)]
    ids, _, _ = row_batches(rows, 0, 6, 7, "rft")(3)
    assert torch.equal(ids, pad_rows(python_random(7, "rft", 3).choices(rows, k=6), 0)[0])


def train(folder, config=CONFIG, steps=30, model=None, tasks=task_at, budget=None, **kwargs):
    model = model or build_model()
    with RunLog(folder, LABELS, quiet=True) as log:
        meter = train_rejection(
            model, TOKENIZER, Letter, tasks, config, SFT, text, seed=0, budget=budget or Budget(steps=steps), log=log,
            folder=folder, **kwargs,
        )  # fmt: skip
    rows = read_json_lines(folder / "metrics.jsonl")
    return model, meter, [{k: v for k, v in row.items() if k != "progress/eta_s"} for row in rows]


@pytest.mark.parametrize("restart", [False, True])
def test_a_stopped_run_goes_on_and_ends_the_same(restart, tmp_path):
    config = dataclasses.replace(CONFIG, restart=restart)
    seen = []
    whole, meter, rows = train(tmp_path / "whole", config, evaluate=lambda done, flops: seen.append((done, flops)))
    assert [done for done, _ in seen] == [1, 2, 3]
    assert seen[-1][1] == meter.flops
    assert rows[2]["rejection/wrong"] < rows[0]["rejection/wrong"]

    class Stop(Exception):
        pass

    def stop(index, n):
        if index == 2:
            raise Stop
        return task_at(index, n)

    again = []
    with pytest.raises(Stop):
        train(tmp_path / "stopped", config, tasks=stop, evaluate=lambda done, flops: again.append((done, flops)))
    resumed, resumed_meter, resumed_rows = train(
        tmp_path / "stopped", config, evaluate=lambda done, flops: again.append((done, flops))
    )
    assert torch.equal(weights(whole), weights(resumed))
    assert resumed_meter.flops == meter.flops
    assert again == seen
    assert resumed_rows == rows


def test_a_restarted_round_trains_the_start_on_the_newest_samples(tmp_path):
    """The last round alone, from the start's weights, gives the same model."""
    model, _, _ = train(tmp_path / "whole", dataclasses.replace(CONFIG, restart=True))
    saved = read_json(tmp_path / "whole" / "round_2" / "samples.json")["rows"]
    alone = build_model()
    with RunLog(tmp_path / "alone", LABELS, quiet=True) as log:
        batch_at = row_batches([(ids, mask) for ids, mask in saved], TOKENIZER.pad_token_id, 8, 0, "rejection", 2)
        train_sft(alone, batch_at, SFT, budget=Budget(steps=10), log=log, folder=tmp_path / "alone")
    assert torch.equal(weights(model), weights(alone))
    onward, _, _ = train(tmp_path / "onward")
    assert not torch.equal(weights(model), weights(onward))


def test_rounds_end_at_equal_shares_and_sampling_is_paid_for(tmp_path):
    meter = Meter(10)
    assert round_budget(Budget(flops=3000), meter, 0, 3) == Budget(flops=1000)
    meter.add_forward(60)
    assert round_budget(Budget(flops=3000), meter, 1, 3) == Budget(flops=800)
    meter.add_forward(60)
    assert round_budget(Budget(flops=3000), meter, 1, 3) == Budget(flops=0)
    assert [round_budget(Budget(steps=10), meter, i, 3).steps for i in range(3)] == [3, 3, 4]
    model = build_model()
    whole = 3e7
    ends = []
    _, used, _ = train(
        tmp_path, model=model, budget=Budget(flops=whole), evaluate=lambda done, flops: ends.append(flops / whole)
    )
    step = 6 * 8 * 6 * parameter_count(model) / whole  # no batch is larger
    assert [end * 3 for end in ends] == pytest.approx([1, 2, 3], abs=3 * step)
    sampled = sum(read_json(tmp_path / f"round_{i}" / "samples.json")["tokens_forward"] for i in range(3))
    assert used.tokens_forward == sampled


def test_without_a_right_answer_the_model_stays_as_it_is(tmp_path):
    model, meter, rows = train(tmp_path, tasks=lambda index, n: [{"word": i % 4, "dead": True} for i in range(n)])
    assert torch.equal(weights(model), weights(build_model()))
    assert meter.tokens_trained == 0 and meter.tokens_forward > 0
    assert [row["rejection/kept"] for row in rows] == [0.0, 0.0, 0.0]


def test_impossible_settings_are_refused():
    for key, value in {"rounds": 0, "candidates": 0, "cap": 0, "temperature": 0.0}.items():
        with pytest.raises(ConfigError, match=f"rejection.{key}={value}"):
            RejectionConfig(**{key: value})
