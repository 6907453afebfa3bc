"""7-10: the task, its grader, texts as tokens, splits, what is measured, problems from files."""

import dataclasses
import json
import random
import re

import pytest
import torch
from gymnasium.utils.env_checker import check_env

from common import tuning
from common.config import compose
from common.files import read_json_lines
from common.modes import end_think_id
from common.schema import ConfigError
from common.tokenizers import PhraseEncoder, encode_prompt
from common.verifiers.thinking import FAULTS, THINK
from experiments.exp_7_10_adaptthink import arms, audit, chains, data, env, families, figures, problems, tune
from experiments.exp_7_10_adaptthink.env import NOT_ONE_NUMBER, RIGHT, WRONG, GradedChains, grade
from experiments.exp_7_10_adaptthink.evaluate import Evaluator
from experiments.exp_7_10_adaptthink.settings import Settings

CHAIN = chains.Chain(7, (("+", 3), ("-", 2), ("+", 4)))
TOKENIZER = data.build_tokenizer()
ENCODE = PhraseEncoder(TOKENIZER)


def settings(*changes):
    return compose("7-10", Settings, ["scale=smoke", *changes])


# --- the task -------------------------------------------------------------------------------------------------------


def test_the_texts_of_the_docstring():
    assert chains.prompt(CHAIN) == "Compute 7+3-2+4."
    assert chains.answer(CHAIN, 8, True) == "7+3=10-2=8+4=12</think>So the answer is 12."
    assert chains.answer(CHAIN, 5, False) == "</think>Answer: 12." and chains.answer(CHAIN, 3, False) == "</think>12"


def test_lengths_in_tokens_are_what_the_configuration_says():
    for level in chains.CORPUS_LEVELS:
        chain = chains.items("test", 0, level, 1)[0]
        for tokens in chains.ANSWERS:
            for think, wanted in ((False, tokens), (True, chains.worked_length(chain, tokens))):
                ids, mask = data.row(ENCODE, chain, tokens, think)
                assert sum(mask) == wanted
                assert TOKENIZER.decode(ids[len(mask) - sum(mask) :], skip_special_tokens=True) == chains.answer(
                    chain, tokens, think
                )
                assert ids[: len(mask) - sum(mask)] == encode_prompt(TOKENIZER, chains.prompt(chain))


def test_a_given_end_of_thinking_is_not_taught():
    ids, mask = data.row(ENCODE, CHAIN, 8, think=False, forced=True)
    end = ids.index(end_think_id(TOKENIZER))
    assert mask == [0] * (end + 1) + [1] * 7


def test_a_careless_hand_goes_on_from_its_slip_and_never_out_of_range():
    assert chains.careless(random.Random(0), CHAIN, 1.0) == [11, 10, 15]  # 7+3=11, 11-2=10, 10+4=15
    assert chains.careless(random.Random(0), CHAIN, 0.0) == [10, 8, 12]
    assert chains.careless(random.Random(0), chains.Chain(30, (("+", 1),)), 1.0) == [31]
    assert chains.answer(CHAIN, 3, True, [11, 9, 13]) == "7+3=11-2=9+4=13</think>13"
    corpus = data.Corpus(ENCODE, 3, 1, 1.0, [0.5] * 7, 0.25)
    wrong = total = 0
    for index in range(400):
        ids, mask = corpus.row(random.Random(index), 1, 0.5)
        text = TOKENIZER.decode(ids[len(mask) - sum(mask) :], skip_special_tokens=True)
        total += "=" in text
        wrong += "=" in text and eval_step(text) == 1
        assert "=" in text or grade(text, chain_of_prompt(TOKENIZER.decode(ids[: len(mask) - sum(mask)]))).success
    assert 0.15 < wrong / total < 0.35


def eval_step(text):
    """By how much the one step of a thought is too high."""
    start, op, operand, result = re.match(r"(\d+)([+-])(\d)=(\d+)</think>", text).groups()
    return int(result) - chains.apply(int(start), op, int(operand))


def chain_of_prompt(text):
    start, op, operand = re.search(r"Compute (\d+)([+-])(\d)\.", text).groups()
    return chains.Chain(int(start), ((op, int(operand)),))


def test_values_stay_in_range_and_every_role_is_disjoint():
    assert list(audit.split_holes()) == []
    stream = random.Random(0)
    for _ in range(300):
        chain = chains.random_chain(stream, stream.choice(chains.CORPUS_LEVELS))
        assert all(0 <= number <= chains.LARGEST for number in (chain.start, *chain.results))


def test_level_one_is_counted_and_enough():
    assert len(chains.items("test", 0, 1, 10**6)) == len(set(chains.items("test", 3, 1, 10**6)))
    sizes = {name: len(chains.single_steps(name)) for name in chains.ROLES}
    assert sum(sizes.values()) == 342  # 32 numbers, 12 steps, less those that leave the range
    assert sizes["test"] >= compose("7-10", Settings, []).evaluation.items


def test_batches_are_functions_of_seed_and_step():
    corpus = data.Corpus(ENCODE, 3, 100, 0.4, [0.5] * 7, 0.1)
    for a, b in zip(corpus.batch(50, 8), corpus.batch(50, 8)):
        assert torch.equal(a, b)
    assert not torch.equal(corpus.batch(50, 8)[0], corpus.batch(51, 8)[0])
    lengths = [corpus.batch(step, 4)[0].shape[1] for step in range(3)]
    assert max(lengths) < 22  # early batches hold chains of one step


def test_the_start_is_taught_thinking_alone():
    ids, _, mask = data.ThinkOnly(ENCODE, 0, 8, [0.5] * 7, 0.0, 0.0).batch(0, 64)
    end = end_think_id(TOKENIZER)
    direct = 0
    for row, targets in zip(ids.tolist(), mask.tolist()):
        behind = row.index(TOKENIZER.convert_tokens_to_ids(THINK)) + 1
        direct += row[behind] == end
        assert targets[behind] == (row[behind] != end)
    assert 15 < direct < 50


def test_training_tasks_hold_every_level_and_grow_at_the_end():
    pool = data.pool(0, 6)
    tasks = data.training_tasks(pool, 0, 5, 12)
    assert [task["level"] for task in tasks] == [*chains.LEVELS, *chains.LEVELS]
    assert len({task["index"] for task in tasks}) == 12
    assert data.training_tasks(pool, 0, 5, 24)[:12] == tasks
    some = data.training_tasks([task for task in pool if task["level"] == 6], 0, 5, 4)
    assert [task["level"] for task in some] == [6] * 4 and len({task["index"] for task in some}) == 4


# --- the grader -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason", "skipped"),
    [
        ("7+3=10-2=8+4=12</think>So the answer is 12.", RIGHT, False),
        ("</think>So the answer is 12.", RIGHT, True),
        ("</think>Answer: 12.", RIGHT, True),
        ("</think>12", RIGHT, True),
        ("anything at all</think>12.", RIGHT, False),
        ("7+3=10-2=8+4=12</think>So the answer is 11.", WRONG, False),
        ("</think>12.So the answer is 12.", NOT_ONE_NUMBER, True),
        ("</think>12 Done", NOT_ONE_NUMBER, True),
        ("</think>11 12", NOT_ONE_NUMBER, True),
        ("</think>012", NOT_ONE_NUMBER, True),
        ("</think> 12", NOT_ONE_NUMBER, True),
        ("</think>١٢", NOT_ONE_NUMBER, True),
    ],
)
def test_answers_by_the_written_rule(text, reason, skipped):
    found = grade(text, CHAIN)
    assert (found.success, found.reason, found.skipped) == (reason == RIGHT, reason, skipped)


@pytest.mark.parametrize("text", ["So the answer is 12.", "12</think>", "</think>12</think>", "</think><think>12</think>12"])
def test_faults_of_the_thinking_score_nothing(text):
    found = grade(text, CHAIN)
    assert not found.success and found.reason in FAULTS


def test_audit_of_one_chain_finds_no_hole():
    for case in [*audit.gold(CHAIN), *audit.mutations(CHAIN)]:
        assert audit.judge(case) is None, case
    assert audit.judge(audit.Case("x", env.task(CHAIN), "</think>12", False))  # the audit itself can fail


def test_the_environments_keep_gymnasiums_contract():
    check_env(GradedChains(), skip_render_check=True)
    check_env(problems.Problems(), skip_render_check=True)
    one, two = GradedChains(), GradedChains()
    assert one.reset(seed=4)[0] == two.reset(seed=4)[0]
    with pytest.raises(TypeError):
        one.step(12)
    one.step("</think>1")
    with pytest.raises(Exception, match="reset"):
        one.step("</think>1")


# --- configuration and arms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("branches.adaptthink.changes.rati=token", "rati"),
        ("branches.adaptthink.answer_tokens=4", "answer_tokens"),
        ("branches.adaptthink.mode=both", "mode"),
        ("branches.start.changes={delta: 0.1}", "no keys"),
        ("model_path=some/model", "set both or neither"),
        ("adaptthink.group_size=5", "even"),
        ("branches.router.router_delta=2", "router_delta"),
        ("branches.floor_token.levels=[7]", "levels"),
        ("pretraining_slips=2", "pretraining_slips"),
        ("pretraining_direct=[0.5]", "one share for each"),
        ("arms=[nobody]", "arms"),
    ],
)
def test_impossible_configurations_are_refused(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings(change)


def test_arms_of_single_levels_need_the_generated_chains():
    with pytest.raises(ConfigError, match="arms=floor_t3: trains on levels"):
        settings("arms=[floor_t3]", "model_path=some/model", "problems={train: a.jsonl, test: {a: a.jsonl}}")


def test_arms_differ_in_what_they_say():
    config = compose("7-10", Settings, [])
    full = config.arm_config("adaptthink")
    assert full.ratio == "sequence" and full.forced and full.delta > 0
    for arm, change in {"token": {"ratio": "token"}, "uncorrected": {"ratio": "none"}, "delta_0": {"delta": 0.0}}.items():
        other = dataclasses.replace(config.arm_config(arm), lr=full.lr)
        assert other == dataclasses.replace(full, **change), arm
    for arm, (ratio, tokens, end) in figures.BOUNDED.items():
        own = config.arm_config(arm)
        assert (own.ratio, config.branches[arm].answer_tokens) == (ratio, tokens)
        assert own.delta == (0.1 if end == "floor" else 0.5)
        assert [f"level{level}" for level in config.branches[arm].levels] == [figures.BOUND_SPLITS[end]]
    for arm, delta in figures.DELTAS.items():
        branch = config.branches[arm]
        assert delta == (branch.router_delta if branch.method == "routed" else config.arm_config(arm).delta), arm


def test_a_router_skips_where_it_costs_the_start_less_than_its_delta(monkeypatch):
    """Costs of 4 points on single steps, 30 on two: the first is skipped; levels never scored are thought about."""
    pool = data.pool(0, 2)
    scores = {"think": 0.95, "nothink": lambda task: 0.95 - {1: 0.04, 2: 0.3}.get(task["level"], 0.5)}
    found = {"think": (lambda task: 0.95, 40), "nothink": (scores["nothink"], 2)}
    monkeypatch.setattr(arms, "rates_by_task", lambda stage: found[stage])
    config, notes = settings(), Notes()
    model = type("M", (), {"parameters": lambda self: [torch.zeros(5)]})()
    family, evaluator = families.family_of(config)._replace(pool=lambda seed: pool), type("E", (), {})()
    stages = {mode: mode for mode in found}
    arm = arms.Arm("routed", config, model, TOKENIZER, 0, None, notes, family, evaluator, stages)
    meter = arms.train(arm)
    chosen = [arm.evaluator.mode_of({"level": level}) for level in (1, 2, 6, 7)]
    assert chosen == ["nothink", "think", "think", "think"]
    assert meter.flops == 2 * 5 * 42 and notes.value("gap/2", "gap") == pytest.approx(0.3)


def test_the_parts_of_a_change_add_up_by_hand():
    """Level 1 (costs 4 points, half skipped) and level 6 (costs 60, a tenth skipped), all else thought about."""
    rows = []
    for level in chains.LEVELS:
        start = {"success_think": 0.9, "success_nothink": {1: 0.86, 6: 0.3}.get(level, 0.9)}
        own = {
            "success_think": 0.92,
            "success_nothink": start["success_nothink"] + 0.1,
            "nothink_p": {1: 0.5, 6: 0.1}.get(level, 0),
        }
        for arm, values in (("start", start), ("adaptthink", own)):
            rows += [
                {
                    "arm": arm,
                    "seed": 100,
                    "split": f"level{level}",
                    "metric": metric,
                    "value": value,
                    "final": True,
                    "step": 100,
                }
                for metric, value in values.items()
            ]
    parts = [part[100] for part in figures.change_parts(rows, "adaptthink").values()]
    assert parts == pytest.approx([-0.5 * 0.04 / 6, -0.1 * 0.6 / 6, 0.02 * (0.5 + 0.9 + 4) / 6, 0.1 * 0.6 / 6])


def test_a_right_answer_earns_less_the_longer_it_is():
    wrapped = arms.ShortAnswers(GradedChains, 0.5, 20)
    one, other = (
        type("E", (), {"mask": [0, 1, 1, 1, 1], "success": success, "reward": 1.0, "turn_rewards": [1.0]})()
        for success in (True, False)
    )
    wrapped.rescore([one, other])
    assert (one.reward, one.turn_rewards, other.reward) == (pytest.approx(0.9), [pytest.approx(0.9)], 0.0)


def test_tuning_seeds_see_validation_chains_alone():
    tuning, report = families.chain_splits(20, 5), families.chain_splits(20, 105)
    for split, wanted in ((tuning, "validation"), (report, "test")):
        assert {chains.role(env.chain_of(item)) for items in split.values() for item in items} == {wanted}
    assert report == families.chain_splits(20, 106) and set(report) == {*(f"level{n}" for n in range(1, 7)), "ood"}


class Notes:
    """Collects what an evaluator records."""

    def __init__(self):
        self.rows, self.texts = [], []

    def record(self, **row):
        assert row["value"] is not None or row["reason"]
        self.rows.append(row)

    def rollouts(self, rows):
        self.texts += rows

    def value(self, split, metric):
        (row,) = [row for row in self.rows if (row["split"], row["metric"]) == (split, metric)]
        return row["value"]


def test_what_is_measured_of_a_scripted_policy(monkeypatch):
    """A policy that answers directly and rightly on even levels, thinks and errs on odd ones."""
    from common.episodes import Episode

    end = end_think_id(TOKENIZER)

    def fake(model, tokenizer, make_env, tasks, modes, **settings):
        episodes = []
        for task in tasks:
            chain = env.chain_of(task)
            for mode in modes:
                skip = mode == "nothink" or (mode == "free" and task["level"] % 2 == 0)
                ids, mask = data.row(ENCODE, chain, 8, think=not skip)
                info = {"reason": "x", "success": skip}
                episodes.append(
                    Episode(ids, mask, [0.0] * len(ids), [0] * len(ids), mask.index(1), task, 0, success=skip, infos=[info])
                )
                assert (ids[mask.index(1)] == end) == skip
        return episodes, torch.full((len(tasks),), 0.25)

    monkeypatch.setattr("experiments.exp_7_10_adaptthink.evaluate.play_modes", fake)
    config = settings()
    notes = Notes()
    Evaluator(config, families.family_of(config), config.branches["adaptthink"], TOKENIZER, notes, 100).final(None)
    assert notes.value("level2", "success") == 1 and notes.value("level3", "success") == 0
    assert notes.value("id", "success") == 0.5 and notes.value("id", "nothink_share") == 0.5
    assert notes.value("id", "nothink_p") == 0.25
    assert notes.value("level2", "length") == 8 and notes.value("level3", "length") == 18
    assert notes.value("level3", "saving") == 0 and notes.value("level2", "saving") == pytest.approx(1 - 8 / 15)
    assert notes.value("id", "success_think") == 0 and notes.value("id", "success_nothink") == 1
    assert notes.value("level3", "success_when_skipping") is None and notes.value("level2", "success_when_skipping") == 1
    assert notes.value("ood", "length") == 30 and len(notes.texts) > 6
    routed = Notes()
    evaluator = Evaluator(config, families.family_of(config), config.branches["routed"], TOKENIZER, routed, 100)
    evaluator.mode_of = lambda task: "nothink" if task["level"] in (1, 3) else "think"
    evaluator.final(None)
    assert [routed.value(f"level{level}", "nothink_p") for level in chains.LEVELS] == [1, 0, 1, 0, 0, 0]
    assert [routed.value(f"level{level}", "length") for level in chains.LEVELS] == [8, 15, 8, 21, 24, 27]
    assert routed.value("id", "success") == pytest.approx(2 / 6)
    splits = {
        "adaptthink": {*(f"level{level}" for level in chains.LEVELS), "ood", "id"},
        "delta_0": {"id"},
        "floor_t3": {"level6", "id"},
    }
    for arm, wanted in splits.items():
        along = Notes()
        Evaluator(config, families.family_of(config), config.branches[arm], TOKENIZER, along, 100).curve(None, 30)
        assert {row["split"] for row in along.rows} == wanted and {row["step"] for row in along.rows} == {30}
        assert along.value("id", "success") == 0.5 and along.value("id", "nothink_p") == 0.25


# --- problems from files --------------------------------------------------------------------------------------------


ROWS = {
    "gsm8k": {"question": "How many?", "answer": "It is 1,000+234.\n#### 1,234"},
    "math": {"problem": "Half?", "solution": r"so $\boxed{3}$, no: $\boxed{\frac{1}{2}}$", "level": "Level 5"},
    "aime": {"Problem": "n?", "Answer": 73},
    "deepscaler": {"problem": "x?", "answer": "-7", "solution": r"\boxed{8}"},
}


def write(folder, name, rows):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [("gsm8k", "How many?", "1234"), ("math", "Half?", r"\frac{1}{2}"), ("aime", "n?", "73"), ("deepscaler", "x?", "-7")],
)
def test_columns_of_the_published_sets(tmp_path, name, question, answer):
    (task,) = problems.load(write(tmp_path, name, [ROWS[name]]), 5, name, " Box it.")
    assert task == {"question": question + " Box it.", "answer": answer, "level": name, "index": 0}
    judge = problems.Problems()
    assert judge.reset(options=task)[0] == question + " Box it."
    assert judge.step(f"hm</think>\\boxed{{{answer}}}")[1] == 1.0
    judge.reset(options=task)
    _, reward, _, _, info = judge.step(f"\\boxed{{{answer}}}")
    assert reward == 0.0 and info["reason"] == "thinking not finished"


def test_other_file_kinds_and_orders(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(20)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    found = problems.load(str(tmp_path / "a.json"), 5, "a")
    assert len(found) == 5 and found == problems.load(str(tmp_path / "a.json"), 9, "a")[:5]
    assert problems.training_tasks(found, 0, 1, 3) == problems.training_tasks(found, 0, 1, 7)[:3]
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert {t["answer"] for t in problems.load(str(tmp_path / "a.parquet"), 20, "a")} == {str(i) for i in range(20)}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no rows"),
        ([{"question": "q"}], "needs a column"),
        ([{"question": "q", "answer": "\frac{1}{2}"}], "control character"),
    ],
)
def test_files_that_cannot_serve_are_refused(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        problems.load(write(tmp_path, f"bad{len(rows)}{message[:4]}", rows), 5, "bad")
    with pytest.raises(ConfigError, match="no file"):
        problems.load(str(tmp_path / "none.jsonl"), 5, "bad")
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        problems.load("hub:gsm8k", 5, "bad")


def test_bad_answers_may_be_left_out_and_are_counted(tmp_path, capsys):
    rows = [{"question": "q", "answer": "\frac{1}{2}"}, {"question": "p", "answer": "2"}]
    (task,) = problems.load(write(tmp_path, "mixed", rows), 5, "mixed", "", True)
    assert (task["question"], task["index"]) == ("p", 0)
    assert "1 problems left out" in capsys.readouterr().out


def test_the_table_of_tries_is_the_record_of_tries_and_the_rates_are_those_taken():
    tries, config = read_json_lines(tune.TUNING.file), compose("7-10", Settings, [])
    assert tries and all(row["seed"] < 100 for row in tries)
    block = (tune.TUNING.folder / "README.md").read_text().split(tuning.BLOCK[0])[1].split(tuning.BLOCK[1])[0].strip()
    assert block == tuning.tuning_table(tune.TUNING, tries)
    for arm, rates in tune.RATES.items():
        own = [row for row in tries if row["arm"] == arm and not row["note"]]
        assert sorted(row["lr"] for row in own) == sorted(rates)
        assert tune.best(own)["lr"] == config.branches[arm].lr, arm
    for arm in ("delta_0", "delta_01", "delta_02", "floor_token", "floor_t3", "floor_t8"):
        assert config.branches[arm].lr == config.branches["adaptthink"].lr
