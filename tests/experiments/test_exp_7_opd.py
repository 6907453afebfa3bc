"""On-policy distillation: both tasks, their splits, what arms learn from, the measures, with values worked out by hand."""

import json
import re
from types import SimpleNamespace

import gymnasium
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from common import tuning
from common.config import ConfigError, compose
from common.episodes import Episode
from common.models import build_decoder
from common.pretrained import encoder_of
from common.runlog import RunLog
from common.statistics import overlaps
from common.tokenizers import PhraseEncoder
from experiments.exp_7_opd_distillation import arms, audit, chains, data, dial, evaluate, figures, stages, tune
from experiments.exp_7_opd_distillation.chains import Chain
from experiments.exp_7_opd_distillation.dial import Tour
from experiments.exp_7_opd_distillation.settings import METHODS, Settings

NUMBER = "7-opd"
CHAIN = Chain(7, (5, -3, 4))
TOUR = Tour(17, (22, 25))


# Chains --------------------------------------------------------------------------------------------------------------


def test_a_chain_its_text_and_its_answer():
    assert CHAIN.results == [12, 9, 13]
    assert chains.prompt(CHAIN) == "Compute 7+5-3+4\n"
    assert chains.answer(CHAIN) == "7+5=12-3=9+4=13"
    assert chains.chain_of(chains.task(CHAIN)) == CHAIN


@pytest.mark.parametrize(
    ("text", "success", "kind", "right"),
    [
        ("7+5=12-3=9+4=13", True, "right", 3),
        ("7+5=11-3=8+5=13", False, "arithmetic", 0),  # right end behind wrong steps
        ("7+5=12-3=9", False, "short", 2),
        ("7+5=12-3=9+4=14", False, "arithmetic", 2),
        ("7+5=12-3=8+4=12", False, "arithmetic", 1),
        ("7+5=12+3=15+4=19", False, "misread", 1),
        ("6+5=11-3=8+4=12", False, "misread", 0),
        ("7+5=12-3=9+4=13+1=14", False, "long", 3),
        ("7", False, "malformed", 0),
        ("13", False, "malformed", 0),
        ("=13", False, "malformed", 0),
        ("", False, "malformed", 0),
        ("7+5=12-3=9+4=13 ", False, "malformed", 0),
        ("7+5=12-3=9+4=027", False, "malformed", 0),
        ("7+5=12-3=09+4=13", False, "malformed", 0),
        ("07+5=12-3=9+4=13", False, "malformed", 0),
        ("7+5=12-3=9+4=13=13", False, "malformed", 0),
        ("7+5=12;-3=9+4=13", False, "malformed", 0),
        ("7+5=12-3=9+4=２７", False, "malformed", 0),
        ("7+5=12-3=9+4=13\n", False, "malformed", 0),
    ],
)
def test_answers_and_their_verdicts(text, success, kind, right):
    found = chains.grade(text, CHAIN)
    assert (found.success, found.kind, found.right_steps) == (success, kind, right) and found.reason


def test_every_gold_answer_scores_and_every_other_last_number_does_not():
    for chain in chains.items("train", 0, (*chains.TRAINED, *chains.LONGER), 300):
        assert chains.grade(chains.answer(chain), chain) == (True, "right", "right", len(chain.moves))
        wrong = chains.answer(chain).rsplit("=", 1)[0] + f"={(chain.results[-1] + 1) % 20}"
        assert not chains.grade(wrong, chain).success
        assert all(0 <= number <= 19 for number in chain.results)


# The dial ------------------------------------------------------------------------------------------------------------


def press(place, size):
    """The button that goes on by so many places."""
    return next(button for button, own in dial.ways(place).items() if own == size)


def test_the_way_goes_on_around_the_dial():
    assert [dial.way(*pair) for pair in ((17, 22), (38, 3), (3, 38), (5, 5))] == [5, 5, 35, 0]
    assert [dial.is_past(*pair) for pair in ((17, 22), (38, 3), (3, 38), (10, 19), (10, 20))] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert dial.ways(17)[dial.best_button(17, 22)] == 5 and dial.best_button(26, 25) == "z"
    assert dial.turned(17, 3, "z") == 3 and dial.turned(38, 3, press(38, 5)) == 3
    assert dial.observation(26, 25) == "past, at 26 to 25" and dial.observation(22, 25) == "at 22 to 25"
    assert [dial.turn_limit(stops) for stops in (4, 8, 12, 16)] == [6, 12, 18, 24]


def test_at_each_place_the_buttons_do_the_same_nine_things_in_an_order_of_its_own():
    assert all(sorted(dial.ways(place).values()) == list(range(1, 10)) for place in range(dial.PLACES))
    assert len({tuple(dial.ways(place).values()) for place in range(dial.PLACES)}) > 35
    assert [*dial.ways(0), dial.BACK] == list(dial.BUTTONS)


def played(*ways, tour=TOUR):
    """A game; what is no whole number is pressed as it is."""
    env = dial.SafeDial()
    shown, _ = env.reset(options=dial.task(tour))
    found, pressed = [(shown, 0.0, False, False, {})], []
    for size in ways:
        place = int(found[-1][0].split("at ")[1].split()[0])
        pressed.append(press(place, size) if isinstance(size, int) else size)
        found.append(env.step(pressed[-1]))
    return found, pressed


def test_a_game_with_a_slip_that_is_mended():
    steps, _ = played(5, 4, "z", 3, tour=Tour(17, (22, 25, 26)))
    assert [step[0] for step in steps] == ["at 17 to 22", "at 22 to 25", "past, at 26 to 25", "at 22 to 25", "at 25 to 26"]
    assert all(step[1:4] == (0.0, False, False) for step in steps[1:4])
    assert [step[4]["class"] for step in steps[1:]] == ["best", "slip", "best", "best"]
    assert [step[4]["off"] for step in steps[1:]] == [False, False, True, False]
    assert [round(step[4]["progress"], 3) for step in steps[1:]] == [0.333, 0.333, 0.333, 0.667]
    assert played(5, 3)[0][2][1:4] == (1.0, True, False) and played(5, 3)[0][2][4]["success"]


def test_the_back_button_leads_to_the_start_as_long_as_no_stop_was_reached():
    assert played(9, "z")[0][2][0] == "at 17 to 22"
    assert played("z")[0][1][0] == "at 17 to 22" and played("z")[0][1][4]["class"] == "slip"


@pytest.mark.parametrize("bad", ["", "5", "j", "A", "a ", " a", "aa", "at 22", "ａ", "-", "a\n", "zz"])
def test_what_is_not_a_button_moves_nothing_and_costs_its_turn(bad):
    shown, reward, terminated, truncated, info = played(bad)[0][1]
    assert (shown, reward, terminated, truncated) == ("at 17 to 22", 0.0, False, False)
    assert info["class"] == "invalid" and not info["success"]
    assert played(bad, bad, bad)[0][3][1:4] == (0.0, False, True)  # two stops, three turns


def test_a_turn_counts_only_if_it_ends_on_the_stop_and_stops_come_in_order():
    over = played(8, "z", 5)[0]  # over both stops: neither counts
    assert [step[4]["progress"] for step in over[1:]] == [0.0, 0.0, 0.5] and over[3][1:4] == (0.0, False, True)


@pytest.mark.parametrize(("module", "name"), [(chains, "DistilledChains"), (dial, "SafeDial")])
def test_the_environments_keep_to_gymnasiums_rules(module, name):
    env = gymnasium.make(module.ENV_ID)
    check_env(env.unwrapped, skip_render_check=True)
    first, again = (env.reset(seed=7)[0] for _ in range(2))
    assert first == again
    bare = getattr(module, name)()
    with pytest.raises(gymnasium.error.ResetNeeded):
        bare.step("a")
    bare.reset(seed=1)
    with pytest.raises(TypeError):
        bare.step(1)


def test_the_best_player_wins_every_tour_in_as_many_turns_as_it_has_stops():
    for tour in dial.items("train", 0, (*dial.TRAINED, *dial.LONGER), 200):
        env = dial.SafeDial()
        env.reset(options=dial.task(tour))
        place, done = tour.start, []
        for stop in tour.stops:
            done.append(env.step(dial.best_button(place, stop)))
            place = stop
        assert [step[1] for step in done] == [0.0] * (len(tour.stops) - 1) + [1.0]
        assert not any(step[4]["off"] for step in done)


# Splits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["chain", "dial"])
def test_no_two_roles_share_an_item(task):
    module = data.TASKS[task]
    drawn = {name: module.items(name, 0, (*module.TRAINED, *module.LONGER), 200) for name in module.ROLES if name != "corpus"}
    assert set(overlaps(drawn).values()) == {0}
    assert all(module.role(item) == name for name, some in drawn.items() for item in some)
    assert sorted(bucket for buckets in module.ROLES.values() for bucket in buckets) == list(range(module.BUCKETS))


def test_a_longer_tour_of_another_role_never_begins_with_a_shorter_one():
    tour = dial.items("test", 0, (4,), 1)[0]
    assert dial.role(Tour(tour.start, (*tour.stops, 1, 2, 3))) == "test"


def test_the_corpus_holds_no_item_of_another_role():
    settings = compose(NUMBER, Settings, [])
    encode = encoder_of(data.build_tokenizer("chain"))
    held = {chains.prompt(chain) for role in ("train", "validation", "test") for chain in chains.items(role, 0, (2, 4), 200)}
    corpus = data.Corpus("chain", encode, settings.corpus, 100)
    tokenizer = data.build_tokenizer("chain")
    for step in range(10):
        for row in tokenizer.batch_decode(corpus.batch(step, 32)[0]):
            assert not held.intersection(f"{text.split(chains.END)[0]}{chains.END}" for text in row.split("<bos>"))
    games = data.Corpus("dial", encoder_of(data.build_tokenizer("dial")), settings.corpus, 100)
    stream = data.python_random(0, "test")
    assert {dial.role(games.tour(stream)) for _ in range(100)} == {"corpus"}


# The audit -----------------------------------------------------------------------------------------------------------


def test_the_audit_finds_no_hole_and_would_find_one(monkeypatch, capsys):
    for name, value in {"ENUMERATED": 1, "LENGTHS": range(4, 6), "SAMPLED": 4, "RANDOM_GAMES": 100}.items():
        monkeypatch.setattr(audit, name, value)
    monkeypatch.setattr(audit, "SPLIT_SEEDS", range(1))
    monkeypatch.setattr(audit, "short_tours", lambda: [TOUR, Tour(3, (9,)), Tour(0, (1, 2))])
    assert audit.main() == 0 and " 0 holes" in capsys.readouterr().out
    monkeypatch.setattr(chains, "_ANSWER", re.compile(r".*", re.DOTALL))
    assert audit.main() == 1 and "HOLE chain, mutation" in capsys.readouterr().out


def test_the_referee_knows_the_dial_and_the_audit_sees_a_dial_that_pays_too_early(monkeypatch):
    moves = {place: dict(dial.ways(place)) for place in range(dial.PLACES)}
    gold = [press(17, 5), press(22, 3)]
    assert audit.referee(TOUR, gold, moves) == 1 and audit.referee(TOUR, ["x", *gold], moves) == 2
    assert audit.referee(TOUR, ["x", "x", *gold], moves) is None  # three turns are allowed
    assert audit.referee(TOUR, [gold[0], press(22, 4), "z"], moves) is None
    assert list(audit.referee_holes(200)[1]) == []
    monkeypatch.setattr(dial, "turn_limit", lambda stops: 3 * stops)
    assert any("the referee in None" in hole for hole in audit.referee_holes(200)[1])


def test_a_wrong_verdict_is_a_hole():
    assert audit.judge(audit.Case("x", chains.task(CHAIN), (chains.answer(CHAIN),), True)) is None
    assert "earns [1.0]" in audit.judge(audit.Case("x", chains.task(CHAIN), (chains.answer(CHAIN),), False))
    assert "earns [0.0]" in audit.judge(audit.Case("x", chains.task(CHAIN), ("13",), True))


# Texts ---------------------------------------------------------------------------------------------------------------


def test_corpus_games_have_the_best_buttons_as_targets_and_the_narrow_ones_never_need_the_way_back():
    settings = compose(NUMBER, Settings, [])
    tokenizer = data.build_tokenizer("dial")
    for config, back in ((settings.corpus, True), (settings.narrow_corpus, False)):
        ids_BT, _, mask_BT = data.Corpus("dial", encoder_of(tokenizer), config, 0).batch(0, 20)
        seen, turns, random_turns = set(), 0, 0
        for ids, mask in zip(ids_BT.tolist(), mask_BT.tolist(), strict=True):
            texts = [tokenizer.decode([token]) for token in ids]
            for at in [i for i, text in enumerate(texts) if text.startswith(dial.AT)]:
                place, stop = int(texts[at][len(dial.AT) :]), int(texts[at + 1][len(dial.TO) :])
                assert (texts[at - 1] == dial.PAST) is dial.is_past(place, stop)
                assert mask[at - 1 : at + 2] == [texts[at - 1] == "<eos>", 0, 0] and mask[at + 3] == 1
                turns, random_turns = turns + 1, random_turns + (mask[at + 2] == 0)
                if mask[at + 2]:
                    assert texts[at + 2] == dial.best_button(place, stop) and texts[at + 3] == "<eos>"
                    seen.add(texts[at + 2])
        assert (dial.BACK in seen) is back and set(dial.ON) <= seen and abs(random_turns / turns - config.noise) < 0.08


@pytest.mark.parametrize("task", ["chain", "dial"])
def test_one_token_a_piece(task):
    tokenizer = data.build_tokenizer(task)
    encode = PhraseEncoder(tokenizer)
    text = chains.prompt(CHAIN) + chains.answer(CHAIN) if task == "chain" else dial.observation(38, 3) + "c"
    assert encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(encode(text)) == (13 if task == "chain" else 3)
    numbers = {tokenizer.decode([token]): number for token, number in data.written_numbers(tokenizer, task).items()}
    assert len(numbers) == (50 if task == "chain" else 80) and numbers.get("-3") == (-3 if task == "chain" else None)


# What arms learn from ------------------------------------------------------------------------------------------------


def chain_episode(text, chain=CHAIN, reward=0.0, progress=0.0, success=False):
    encode = PhraseEncoder(data.build_tokenizer("chain"))
    ids, mask = encode.row(chains.prompt(chain), text)
    info = {"class": "right", "progress": progress, "success": success, "reason": ""}
    return Episode(ids, mask, [0.0] * len(ids), [own - 1 for own in mask], mask.index(1), chains.task(chain), 0,
                   reward=reward, success=success, infos=[info], texts=[text])  # fmt: skip


def learned(text):
    episode = chain_episode(text)
    mask = arms.Arm.until_fault(SimpleNamespace(tokenizer=data.build_tokenizer("chain")))(episode)
    names = data.build_tokenizer("chain")
    return "".join(names.decode([token]) for token, wanted in zip(episode.ids, mask, strict=True) if wanted)


def test_learning_stops_behind_the_first_failed_check():
    assert learned("7+5=12-3=9+4=13") == "7+5=12-3=9+4=13<eos>"
    assert learned("7+5=12-3=8+4=12") == "7+5=12-3=8"
    assert learned("6+5=11-3=8+4=12") == "6"
    assert learned("7+5=12") == "7+5=12<eos>"
    assert learned("7+5=12-3=9+4=13+1=14") == "7+5=12-3=9+4=13+1"


def test_the_control_earns_for_steps_and_learns_from_the_same_tokens():
    episodes = [
        chain_episode("7+5=12-3=8+4=12", progress=1 / 3),
        chain_episode("7+5=12-3=9+4=13", progress=1.0, success=True),
    ]
    mask = arms.Arm.until_fault(SimpleNamespace(tokenizer=data.build_tokenizer("chain")))
    control = arms.StepCredit(chains.DistilledChains, mask)
    control.rescore(episodes)
    assert [round(episode.reward, 6) for episode in episodes] == [0.166667, 1.0]
    assert [sum(episode.mask) for episode in episodes] == [5, 8]
    assert isinstance(control(), chains.DistilledChains)


# Measures ------------------------------------------------------------------------------------------------------------


def dial_episode(*ways, tour=TOUR):
    encode = PhraseEncoder(data.build_tokenizer("dial"))
    steps, pressed = played(*ways, tour=tour)
    ids, mask, turns = [encode.bos, *encode(steps[0][0])], [0, 0, 0], [-1, -1, -1]
    for turn, (button, step) in enumerate(zip(pressed, steps[1:], strict=True)):
        written = [*encode(button), encode.eos]
        ids += [*written, *encode(step[0])]
        mask += [1] * len(written) + [0] * len(encode(step[0]))
        turns += [turn] * len(written) + [-1] * len(encode(step[0]))
    last = steps[-1]
    return Episode(ids, mask, [0.0] * len(ids), turns, 3, dial.task(tour), 0, reward=last[1], success=last[4]["success"],
                   infos=[step[4] for step in steps[1:]], texts=pressed)  # fmt: skip


def test_metrics_of_games():
    found = evaluate.episode_metrics("dial", [dial_episode(5, 4, "z"), dial_episode(5, 4, 1)])
    assert found["success"] == [0.0, 0.0] and found["progress"] == [0.5, 0.5] and found["length"] == [6.0, 6.0]
    assert found["slip"] == [0.0, 1.0, 0.0, 1.0] and found["lost"] == [0.0, 1.0]
    assert found["off"] == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]


def test_metrics_of_chains():
    found = evaluate.episode_metrics("chain", [chain_episode("7+5=12-3=9+4=13", progress=1.0, success=True)])
    assert found["success"] == [1.0] and found["length"] == [8.0] and found["fault/misread"] == [0.0]


def test_the_right_tokens_of_a_game_are_the_best_turns():
    encode = PhraseEncoder(data.build_tokenizer("dial"))
    found = evaluate.right_tokens("dial", dial_episode(5, 4, "z"), encode)
    texts = {number: text for text, number in encode.ids.items()}
    assert [(texts.get(token), place) for token, place in found] == [
        (press(17, 5), "before"), (None, "before"), (press(22, 3), "before"), (None, "before"), ("z", "after"),
        (None, "before"),
    ]  # fmt: skip


def test_what_a_student_makes_up_is_not_what_the_environment_showed():
    encode = PhraseEncoder(data.build_tokenizer("dial"))
    episode = dial_episode("at 3", 5, 3)
    assert evaluate.shown_states(episode, encode) == [(17, 22), (17, 22), (22, 25)]


def test_the_right_tokens_of_a_chain_follow_from_what_is_written():
    encode = PhraseEncoder(data.build_tokenizer("chain"))
    texts = {number: text for text, number in encode.ids.items()}
    found = evaluate.right_tokens("chain", chain_episode("7+5=12-2=10+4=13"), encode)
    assert [texts[token] for token, _ in found] == ["7", "+5", "=12", "-3", "=10", "+4", "=14", "<eos>"]
    assert [place for _, place in found] == ["before"] * 4 + ["after"] * 4


def test_trust_is_the_probability_of_the_right_token():
    tokenizer = data.build_tokenizer("dial")
    shape = compose(NUMBER, Settings, []).dial.student
    model = build_decoder(shape, tokenizer, 0, data.written_numbers(tokenizer, "dial")).eval()
    episode = dial_episode(5, 4, "z")
    found = evaluate.teacher_trust("dial", model, [episode], tokenizer)
    with torch.no_grad():
        probabilities = model(torch.tensor([episode.ids])).logits[0].softmax(-1)
    at = [place for place, own in enumerate(episode.mask) if own]
    wanted = [
        probabilities[at[i] - 1, tokenizer.get_vocab()[move]].item()
        for i, move in ((0, press(17, 5)), (2, press(22, 3)), (4, "z"))
    ]
    assert found["before"] == pytest.approx(wanted[:2], abs=1e-5) and found["after"] == pytest.approx(wanted[2:], abs=1e-5)


LABELS = {"experiment": NUMBER, "scale": "smoke", "variant": None, "arm": "chain_grpo", "seed": 100}


def test_the_curve_is_read_off_between_its_points(tmp_path):
    settings = compose(NUMBER, Settings, ["scale=smoke"])
    log = RunLog(tmp_path, LABELS, quiet=True)
    made = evaluate.Evaluator(settings, "chain_grpo", None, log, 100)
    points = {0: (0.0, 0.2), 4: (20.0, 0.4), 8: (40.0, 0.8)}
    rows = [{"metric": name, "step": step, "value": value, "final": False, "arm": "chain_grpo", "seed": 100,
             "split": "id" if name == "success" else "train"}
            for step, pair in points.items() for name, value in zip(("flops", "success"), pair)]  # fmt: skip
    made.by_compute(rows, 100.0)
    log.close()
    found = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [10, 25, 50]
    assert [row["value"] for row in found] == pytest.approx([0.3, 0.5, 0.8])


# Configuration -------------------------------------------------------------------------------------------------------


def test_every_method_has_an_arm_and_every_arm_a_label_and_a_row():
    settings = compose(NUMBER, Settings, [])
    assert {branch.method for branch in settings.branches.values()} == set(METHODS) == set(arms.METHODS)
    assert set(settings.branches) <= set(figures.LABELS)
    rows = {row.variant for row in figures.CLAIMS.table if row.metric == "success" and row.split == "id"}
    assert set(settings.branches) <= rows


def test_arms_of_a_task_sample_the_same_number_per_step_and_have_the_same_compute():
    settings = compose(NUMBER, Settings, [])
    for name, branch in settings.branches.items():
        config, task = settings.arm_config(name), settings.task_config(name)
        if branch.method in ("policy_gradient", "distill"):
            assert config.prompts_per_step * config.group_size == task.episodes_per_step, name
            assert config.max_turns == (1 if branch.task == "chain" else 12) and config.max_new_tokens == task.max_new_tokens
    longest = chains.items("train", 0, (max(chains.LONGER),), 5)
    encode = PhraseEncoder(data.build_tokenizer("chain"))
    assert max(len(encode(chains.answer(chain))) + 1 for chain in longest) <= settings.chain.max_new_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("branches.dial_opd.method=rl", "branches.dial_opd.method=rl: allowed are none, sft"),
        ("branches.dial_opd.credit=until_fault", "branches.dial_opd.credit=until_fault: only task=chain"),
        ("branches.chain_opd.teacher=narrow", "branches.chain_opd.teacher=narrow: needs chain.narrow_steps"),
        ("branches.chain_opd.changes={objective: jds}", "distill.objective=jds"),
        ("branches.chain_grpo.task=chian", "branches.chain_grpo.task=chian: allowed are chain, dial"),
        ("chain.few_items=9000", "chain.few_items=9000: must be at least 1 and at most"),
        ("dial.student.hidden=49", "dial.student.hidden=49"),
        ("arms=[grop]", "arms=grop: allowed are"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(change, message):
    with pytest.raises(ConfigError) as error:
        compose(NUMBER, Settings, [change])
    assert message in str(error.value)


def test_training_tasks_use_every_item_before_one_comes_again():
    some = chains.items("train", 0, (2,), 5)
    seven = data.training_tasks("chain", some, 3, 0, 7)
    assert seven[:4] == data.training_tasks("chain", some, 3, 0, 4)
    assert {json.dumps(task) for task in seven[:5]} == {json.dumps(chains.task(chain)) for chain in some}


def test_report_seeds_share_test_items_and_have_training_items_of_their_own():
    settings = compose(NUMBER, Settings, [])
    assert stages.training_items(settings, "dial", 100) != stages.training_items(settings, "dial", 101)
    splits = [evaluate.Evaluator(settings, "dial_sft", None, None, seed).items((4,), 20) for seed in (0, 100, 101)]
    assert splits[1] == splits[2] != splits[0]


# Tuning --------------------------------------------------------------------------------------------------------------


def test_the_readmes_table_of_tries_is_the_record_of_tries_and_all_arms_had_the_same_number():
    tries = [json.loads(line) for line in tune.TUNING.file.read_text().splitlines()] if tune.TUNING.file.exists() else []
    block = (tune.TUNING.folder / "README.md").read_text().split(tuning.BLOCK[0])[1].split(tuning.BLOCK[1])[0].strip()
    assert block == (tuning.table(tries) if tries else "")
    counts = {arm: sum(row["arm"] == arm for row in tries) for arm in {row["arm"] for row in tries} & set(tune.RATES)}
    assert all(count == (4 if arm.startswith("chain") else 3) for arm, count in counts.items())
    assert all(row["seed"] < 100 for row in tries)


def test_the_rates_of_the_arms_are_the_ones_that_were_taken():
    settings = compose(NUMBER, Settings, [])
    tries = [json.loads(line) for line in tune.TUNING.file.read_text().splitlines()] if tune.TUNING.file.exists() else []
    for arm in {row["arm"] for row in tries} & set(tune.RATES):
        assert settings.branches[arm].lr == tuning.best([row for row in tries if row["arm"] == arm])["lr"], arm
    for arm, other in tune.SAME_AS.items():
        assert settings.branches[arm].lr == settings.branches[other].lr, arm
