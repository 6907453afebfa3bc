"""On-policy distillation: both tasks, their splits, what arms learn from, the measures, with values worked out by hand."""

import json
from types import SimpleNamespace

import gymnasium
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from common.config import ConfigError, compose
from common.episodes import Episode
from common.models import build_decoder
from common.runlog import RunLog
from common.statistics import overlaps
from common.tokenizers import PhraseEncoder
from experiments.exp_7_opd_distillation import arms, chains, data, dial, evaluate, figures, stages
from experiments.exp_7_opd_distillation.chains import Chain
from experiments.exp_7_opd_distillation.dial import Tour
from experiments.exp_7_opd_distillation.settings import METHODS, Settings

NUMBER = "7-opd"
CHAIN = Chain(17, (5, -3, 8))
TOUR = Tour(17, (22, 25))


# Chains --------------------------------------------------------------------------------------------------------------


def test_a_chain_its_text_and_its_answer():
    assert CHAIN.results == [22, 19, 27]
    assert chains.prompt(CHAIN) == "Compute 17+5-3+8\n"
    assert chains.answer(CHAIN) == "17+5=22-3=19+8=27"
    assert chains.chain_of(chains.task(CHAIN)) == CHAIN


@pytest.mark.parametrize(
    ("text", "success", "kind", "right"),
    [
        ("17+5=22-3=19+8=27", True, "right", 3),
        ("17+5=21-3=18+9=27", False, "arithmetic", 0),  # right end behind wrong steps
        ("17+5=22-3=19", False, "short", 2),
        ("17+5=22-3=19+8=28", False, "arithmetic", 2),
        ("17+5=22-3=18+8=26", False, "arithmetic", 1),
        ("17+5=22+3=25+8=33", False, "misread", 1),
        ("16+5=21-3=18+8=26", False, "misread", 0),
        ("17+5=22-3=19+8=27+1=28", False, "long", 3),
        ("17", False, "malformed", 0),
        ("27", False, "malformed", 0),
        ("=27", False, "malformed", 0),
        ("", False, "malformed", 0),
        ("17+5=22-3=19+8=27 ", False, "malformed", 0),
        ("17+5=22-3=19+8=027", False, "malformed", 0),
        ("17+5=22-3=19+8=27=27", False, "malformed", 0),
        ("17+5=22;-3=19+8=27", False, "malformed", 0),
        ("17+5=22-3=19+8=２７", False, "malformed", 0),
        ("17+5=22-3=19+8=27\n", False, "malformed", 0),
    ],
)
def test_answers_and_their_verdicts(text, success, kind, right):
    found = chains.grade(text, CHAIN)
    assert (found.success, found.kind, found.right_steps) == (success, kind, right) and found.reason


def test_every_gold_answer_scores_and_every_other_last_number_does_not():
    for chain in chains.items("train", 0, (*chains.TRAINED, *chains.LONGER), 300):
        assert chains.grade(chains.answer(chain), chain) == (True, "right", "right", len(chain.moves))
        wrong = chains.answer(chain).rsplit("=", 1)[0] + f"={(chain.results[-1] + 1) % 40}"
        assert not chains.grade(wrong, chain).success
        assert all(0 <= number <= 39 for number in chain.results)


# The dial ------------------------------------------------------------------------------------------------------------


def test_the_way_on_a_dial_is_the_shorter_one():
    assert [dial.offset(*pair) for pair in ((17, 22), (38, 3), (3, 38), (0, 20), (5, 5))] == [5, 5, -5, -20, 0]
    assert [dial.best_move(*pair) for pair in ((17, 22), (38, 3), (3, 38), (10, 25), (25, 10))] == [
        "+5",
        "+5",
        "-5",
        "+9",
        "-9",
    ]
    assert [dial.turn_limit(stops) for stops in (4, 8, 12, 16)] == [6, 11, 15, 20]


def played(*moves, tour=TOUR):
    env = dial.SafeDial()
    shown, _ = env.reset(options=dial.task(tour))
    found = [(shown, 0.0, False, False, {})]
    for move in moves:
        found.append(env.step(move))
    return found


def test_a_game_with_a_slip_that_is_mended():
    steps = played("+5", "+4", "-1")
    assert [step[0] for step in steps] == ["at 17 to 22", "at 22 to 25", "at 26 to 25", ""]
    assert [step[1:4] for step in steps[1:]] == [(0.0, False, False), (0.0, False, False), (1.0, True, False)]
    assert [step[4]["class"] for step in steps[1:]] == ["best", "slip", "best"]
    assert [step[4]["off"] for step in steps[1:]] == [False, False, True]
    assert [step[4]["progress"] for step in steps[1:]] == [0.5, 0.5, 1.0]
    assert [step[4]["success"] for step in steps[1:]] == [False, False, True]


@pytest.mark.parametrize("bad", ["", "5", "+0", "+10", "+5 ", " +5", "+5+5", "at 22", "＋5", "+５", "-", "+5\n"])
def test_what_is_not_a_turn_moves_nothing_and_costs_its_turn(bad):
    shown, reward, terminated, truncated, info = played(bad)[1]
    assert (shown, reward, terminated, truncated) == ("at 17 to 22", 0.0, False, False)
    assert info["class"] == "invalid" and not info["success"]
    assert played(bad, bad, bad, bad)[4][1:4] == (0.0, False, True)  # two stops, four turns


def test_a_turn_counts_only_if_it_ends_on_the_stop_and_stops_come_in_order():
    assert played("+8", "-3", "+3")[3][1] == 1.0  # over the second stop to the first, then to the second
    assert played("+8", "+9", "-9", "+1")[4][1:4] == (0.0, False, True)


@pytest.mark.parametrize(("module", "name"), [(chains, "DistilledChains"), (dial, "SafeDial")])
def test_the_environments_keep_to_gymnasiums_rules(module, name):
    env = gymnasium.make(module.ENV_ID)
    check_env(env.unwrapped, skip_render_check=True)
    first, again = (env.reset(seed=7)[0] for _ in range(2))
    assert first == again
    bare = getattr(module, name)()
    with pytest.raises(gymnasium.error.ResetNeeded):
        bare.step("+1")
    bare.reset(seed=1)
    with pytest.raises(TypeError):
        bare.step(1)


def test_the_best_player_wins_every_tour_in_as_many_turns_as_it_has_stops():
    for tour in dial.items("train", 0, (*dial.TRAINED, *dial.LONGER), 200):
        env = dial.SafeDial()
        env.reset(options=dial.task(tour))
        place, done = tour.start, []
        for stop in tour.stops:
            done.append(env.step(dial.best_move(place, stop)))
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
    encode = PhraseEncoder(data.build_tokenizer("chain"))
    held = {chains.prompt(chain) for role in ("train", "validation", "test") for chain in chains.items(role, 0, (2, 4), 200)}
    corpus = data.Corpus("chain", encode, settings.corpus, 100)
    tokenizer = data.build_tokenizer("chain")
    for step in range(10):
        for row in tokenizer.batch_decode(corpus.batch(step, 32)[0]):
            assert not held.intersection(f"{text.split(chains.END)[0]}{chains.END}" for text in row.split("<bos>"))
    games = data.Corpus("dial", PhraseEncoder(data.build_tokenizer("dial")), settings.corpus, 100)
    stream = data.python_random(0, "test")
    assert {dial.role(games.tour(stream)) for _ in range(100)} == {"corpus"}


# Texts ---------------------------------------------------------------------------------------------------------------


def test_corpus_games_have_the_best_turns_as_targets_and_the_narrow_ones_never_turn_back():
    settings = compose(NUMBER, Settings, [])
    tokenizer = data.build_tokenizer("dial")
    for config, signs in ((settings.corpus, {"+", "-"}), (settings.narrow_corpus, {"+"})):
        ids_BT, _, mask_BT = data.Corpus("dial", PhraseEncoder(tokenizer), config, 0).batch(0, 20)
        seen, moves, random_turns = set(), 0, 0
        for ids, mask in zip(ids_BT.tolist(), mask_BT.tolist(), strict=True):
            texts = [tokenizer.decode([token]) for token in ids]
            for turn in range(1, len(ids), 4):
                place, stop = int(texts[turn][len(dial.AT) :]), int(texts[turn + 1][len(dial.TO) :])
                assert mask[turn : turn + 2] == [0, 0] and mask[turn + 3] == 1 and texts[turn + 3] == "<eos>"
                moves, random_turns = moves + 1, random_turns + (mask[turn + 2] == 0)
                if mask[turn + 2]:
                    assert texts[turn + 2] == dial.best_move(place, stop)
                    seen.add(texts[turn + 2][0])
        assert seen == signs and abs(random_turns / moves - config.noise) < 0.08


@pytest.mark.parametrize("task", ["chain", "dial"])
def test_one_token_a_piece(task):
    tokenizer = data.build_tokenizer(task)
    encode = PhraseEncoder(tokenizer)
    text = chains.prompt(CHAIN) + chains.answer(CHAIN) if task == "chain" else dial.observation(38, 3) + "+5"
    assert encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(encode(text)) == (13 if task == "chain" else 3)
    numbers = {tokenizer.decode([token]): number for token, number in data.written_numbers(tokenizer, task).items()}
    assert numbers["-3"] == -3 and len(numbers) == 98


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
    assert learned("17+5=22-3=19+8=27") == "17+5=22-3=19+8=27<eos>"
    assert learned("17+5=22-3=18+8=26") == "17+5=22-3=18"
    assert learned("16+5=21-3=18+8=26") == "16"
    assert learned("17+5=22") == "17+5=22<eos>"
    assert learned("17+5=22-3=19+8=27+1=28") == "17+5=22-3=19+8=27+1"


def test_the_control_earns_for_steps_and_learns_from_the_same_tokens():
    episodes = [
        chain_episode("17+5=22-3=18+8=26", progress=1 / 3),
        chain_episode("17+5=22-3=19+8=27", progress=1.0, success=True),
    ]
    mask = arms.Arm.until_fault(SimpleNamespace(tokenizer=data.build_tokenizer("chain")))
    control = arms.StepCredit(chains.DistilledChains, mask)
    control.rescore(episodes)
    assert [round(episode.reward, 6) for episode in episodes] == [0.166667, 1.0]
    assert [sum(episode.mask) for episode in episodes] == [5, 8]
    assert isinstance(control(), chains.DistilledChains)


# Measures ------------------------------------------------------------------------------------------------------------


def dial_episode(*moves, tour=TOUR):
    encode = PhraseEncoder(data.build_tokenizer("dial"))
    steps = played(*moves, tour=tour)
    ids, mask, turns = [encode.bos, *encode(steps[0][0])], [0, 0, 0], [-1, -1, -1]
    for turn, (move, step) in enumerate(zip(moves, steps[1:], strict=True)):
        ids += [*encode(move), encode.eos, *encode(step[0])]
        mask += [1, 1] + [0] * len(encode(step[0]))
        turns += [turn, turn] + [-1] * len(encode(step[0]))
    last = steps[-1]
    return Episode(ids, mask, [0.0] * len(ids), turns, 3, dial.task(tour), 0, reward=last[1], success=last[4]["success"],
                   infos=[step[4] for step in steps[1:]], texts=list(moves))  # fmt: skip


def test_metrics_of_games():
    found = evaluate.episode_metrics("dial", [dial_episode("+5", "+4", "-1"), dial_episode("+5", "+4", "+1", "+1")])
    assert found["success"] == [1.0, 0.0] and found["progress"] == [1.0, 0.5] and found["length"] == [6.0, 8.0]
    assert found["slip"] == [0.0, 1.0, 0.0, 1.0] and found["lost"] == [0.0, 1.0, 1.0]
    assert found["off"] == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]


def test_metrics_of_chains():
    found = evaluate.episode_metrics("chain", [chain_episode("17+5=22-3=19+8=27", progress=1.0, success=True)])
    assert found["success"] == [1.0] and found["length"] == [8.0] and found["fault/misread"] == [0.0]


def test_the_right_tokens_of_a_game_are_the_best_turns():
    encode = PhraseEncoder(data.build_tokenizer("dial"))
    found = evaluate.right_tokens("dial", dial_episode("+5", "+4", "-1"), encode)
    texts = {number: text for text, number in encode.ids.items()}
    assert [(texts.get(token), place) for token, place in found] == [
        ("+5", "before"), (None, "before"), ("+3", "before"), (None, "before"), ("-1", "after"), (None, "before"),
    ]  # fmt: skip


def test_what_a_student_makes_up_is_not_what_the_environment_showed():
    encode = PhraseEncoder(data.build_tokenizer("dial"))
    episode = dial_episode("at 3", "+5", "+3")
    assert evaluate.shown_states(episode, encode) == [(17, 22), (17, 22), (22, 25)]


def test_the_right_tokens_of_a_chain_follow_from_what_is_written():
    encode = PhraseEncoder(data.build_tokenizer("chain"))
    texts = {number: text for text, number in encode.ids.items()}
    found = evaluate.right_tokens("chain", chain_episode("17+5=22-2=20+8=27"), encode)
    assert [texts[token] for token, _ in found] == ["17", "+5", "=22", "-3", "=20", "+8", "=28", "<eos>"]
    assert [place for _, place in found] == ["before"] * 4 + ["after"] * 4


def test_trust_is_the_probability_of_the_right_token():
    tokenizer = data.build_tokenizer("dial")
    shape = compose(NUMBER, Settings, []).dial.student
    model = build_decoder(shape, tokenizer, 0, data.written_numbers(tokenizer, "dial")).eval()
    episode = dial_episode("+5", "+4", "-1")
    found = evaluate.teacher_trust("dial", model, [episode], tokenizer)
    with torch.no_grad():
        probabilities = model(torch.tensor([episode.ids])).logits[0].softmax(-1)
    at = [place for place, own in enumerate(episode.mask) if own]
    wanted = [probabilities[at[i] - 1, tokenizer.get_vocab()[move]].item() for i, move in ((0, "+5"), (2, "+3"), (4, "-1"))]
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
            assert config.max_turns == (1 if branch.task == "chain" else 11) and config.max_new_tokens == task.max_new_tokens
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
