"""7-11-vl: pictures, environment, texts, splits and measures, without training anything."""

import itertools
import json
import time
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from common.cards import grading, hands, prompts
from common.cards.corpus import CorpusConfig, WorkedAnswers
from common.cards.env import GeneralPoints
from common.episodes import Episode
from common.models import DecoderConfig, build_decoder
from common.seeding import python_random
from common.tokenizers import PhraseEncoder
from common.vision import IMAGE, VisionConfig, add_eyes
from experiments.exp_7_11_vl_general_points import audit, data, drawing, evaluate
from experiments.exp_7_11_vl_general_points.env import ENV_ID, VisualGeneralPoints

CARDS = ["4", "3", "2", "K"]
TASK = {"cards": CARDS, "face_values": [10, 10, 10], "suits": ["S", "C", "S", "C"], "drawing": 5}
GOLD = "4*3+2+10"
EYES = VisionConfig()


def reply(formula=GOLD, cards=CARDS, number=(4, 3, 2, 10)):
    return json.dumps({"cards": list(cards), "number": list(number), "formula": formula})


@pytest.fixture(scope="module")
def tokenizer():
    return data.build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return add_eyes(build_decoder(DecoderConfig(), tokenizer, 0), EYES, tokenizer.convert_tokens_to_ids(IMAGE), 0)


@pytest.fixture(scope="module")
def pictures(tokenizer):
    encoder = PhraseEncoder(tokenizer)
    return lambda **changes: data.PretrainingCorpus(
        encoder, EYES.tokens, data.WrittenCorpus(encoder, CorpusConfig(), 3, EYES.tokens), data.PictureConfig(**changes), 3
    )


# --- pictures ---


def draw(cards=("4", "3", "2", "K"), suits=("S",) * 4, inks=("black",) * 4, seed=0):
    return drawing.draw(cards, suits, inks, seed)


def test_a_picture_is_a_function_of_what_it_shows_and_a_seed():
    first = draw()
    assert first.shape == (48, 48, 3) and first.dtype == np.uint8
    assert np.array_equal(first, draw())
    for other in (draw(seed=1), draw(cards=("4", "3", "2", "Q")), draw(suits=("S", "S", "S", "C")), draw(inks=("red",) * 4)):
        assert not np.array_equal(first, other)


def test_a_card_changes_its_own_quarter_alone():
    first = draw()
    for place in range(4):
        cards = ["4", "3", "2", "K"]
        cards[place] = "A"
        changed = (draw(cards=tuple(cards)) != first).any(-1)
        top, left = place // 2 * 24, place % 2 * 24
        inside = changed[top : top + 24, left : left + 24].sum()
        assert inside > 5 and changed.sum() == inside


def test_every_rank_and_suit_looks_its_own_way_at_every_size_and_style():
    for style, height in itertools.product(drawing.STYLES, drawing.RANK_HEIGHTS):
        masks = [drawing.rank_mask(rank, style, height) for rank in hands.RANKS]
        assert all(mask.shape[0] == height and mask.min() >= 0 and mask.max() <= 1 for mask in masks)
        for one, other in itertools.combinations(masks, 2):
            assert one.shape != other.shape or np.abs(one - other).sum() > 3
    for size in drawing.SUIT_SIZES:
        for one, other in itertools.combinations([drawing.suit_mask(suit, size) for suit in "SHDC"], 2):
            assert np.abs(one - other).sum() > 2


def test_jitter_moves_scales_and_tints():
    shown = [draw(seed=seed) for seed in range(40)]
    paper = [image.max((0, 1)).tolist() for image in shown]
    tops = {int(np.argmax((image[:, 6] > 180).all(-1))) for image in shown}
    table = {tuple(image[0, 0].tolist()) for image in shown}
    assert len({tuple(colour) for colour in paper}) > 5 and len(tops) > 2 and len(table) > 10


def test_red_is_told_from_every_look_of_training():
    for seed in range(30):
        assert audit.is_red(draw(suits=("H",) * 4, inks=("red",) * 4, seed=seed))
        for ink in ("black", *data.PictureConfig().inks):
            assert not audit.is_red(draw(inks=(ink,) * 4, seed=seed)), ink


def test_bad_names_are_refused():
    for change in ({"cards": ("4", "3", "2", "1")}, {"suits": ("X",) * 4}, {"inks": ("pink",) * 4}, {"cards": ("4", "3", "2")}):
        with pytest.raises(ValueError, match="four cards, suits and inks"):
            draw(**change)


def test_some_thousand_pictures_a_second():
    draw(seed=9)
    started = time.process_time()
    for seed in range(300):
        draw(seed=seed)
    assert 300 / (time.process_time() - started) > 1000  # about 3,500 on a free core


# --- environment ---


def test_env_checker_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(ENV_ID, verify_iter=2).unwrapped)


def test_the_text_names_no_card_and_the_picture_shows_them():
    env = VisualGeneralPoints()
    observation, info = env.reset(options=TASK)
    assert observation["text"] == prompts.framed(IMAGE, 24, (10, 10, 10), True)
    assert observation["text"].count(IMAGE) == 1 and info["inks"] == ["black"] * 4
    assert np.array_equal(observation["image"], draw(tuple(CARDS), ("S", "C", "S", "C"), seed=5))
    observation["image"][:] = 0  # G05: the picture is the caller's own
    assert env.step("no")[0]["image"].any()


def test_a_further_trial_does_not_name_the_cards():
    env = VisualGeneralPoints(verify_iter=2)
    env.reset(options=TASK)
    feedback, reward, terminated, _, _ = env.step(reply("4*3-2+10"))
    assert (reward, terminated) == (-1.0, False)
    assert feedback["text"] == f"{prompts.FAILED}{prompts.REASONS['no_solution']}\nTry again."
    assert env.step(reply())[1:3] == (5.0, True)


WRONG_CARD = ["4", "3", "2", "Q"]


@pytest.mark.parametrize(
    ("text", "plain", "penalised"),
    [
        (reply(), 5.0, 5.0),
        (reply(cards=WRONG_CARD), 5.0, -1.5),
        (reply("4*3-2+10", cards=WRONG_CARD), -1.0, -1.5),
        (reply("4*3", cards=WRONG_CARD), -2.0, -1.5),
        (reply("4**3", cards=WRONG_CARD), -3.0, -1.5),
        (reply("4*3"), -2.0, -2.0),
        (reply(cards=[]), 5.0, -1.5),
        ("24", -3.0, -3.0),
    ],
)
def test_the_recognition_penalty_is_a_switch_and_comes_first(text, plain, penalised):
    for switches, wanted in (((), plain), (("cards_first",), penalised)):
        env = VisualGeneralPoints(switches=switches)
        env.reset(options=TASK)
        _, reward, _, _, info = env.step(text)
        assert reward == wanted == sum(info["parts"].values())
        assert info["success"] == (wanted == 5.0)
        assert info["cards_correct"] == (text == reply() or text == reply("4*3"))


def test_without_the_switch_the_grades_are_those_of_the_text_variant():
    stream = python_random("grades")
    seeing, reading = VisualGeneralPoints(), GeneralPoints()
    for hand in stream.sample(hands.all_hands(), 40):
        cards = list(hands.cards_of(hand))
        values = hands.card_values(cards, hands.TEST_RULE)
        for formula in (GOLD, "+".join(map(str, values)), "24", *(s.formula for s in hands.solve(values)[:2])):
            text = reply(formula, cards, values)
            outcomes = []
            for env in (seeing, reading):
                env.reset(options={"cards": cards, "face_values": hands.TEST_RULE})
                outcomes.append(env.step(text)[1:])
            assert outcomes[0] == outcomes[1]


def test_g04_the_kth_episode_of_a_seed_is_the_same_picture_whatever_was_answered():
    shown = []
    for text in ("nothing", reply()):
        env = VisualGeneralPoints(look="red")
        first, info = env.reset(seed=4)
        env.step(text)
        second, _ = env.reset()
        shown.append((first["image"].tobytes(), second["image"].tobytes()))
        assert set(info["suits"]) <= {"H", "D"}
    assert shown[0] == shown[1] and shown[0][0] != shown[0][1]
    with pytest.raises(ValueError, match="look must be one of black, red"):
        VisualGeneralPoints(look="green")


def test_the_audit_finds_nothing():
    tried, holes = audit.audit(every=90)
    assert holes == [] and tried["gold: solution with trace"] > 50 and tried["misread: one card"] > 100
    assert audit.audit_looks(range(2))[1] == []


# --- texts and splits ---


def test_uses_and_looks_are_disjoint(model, tokenizer):
    """E05: no test or validation problem is trained on or demonstrated, and nothing red is seen before the test."""
    split = hands.splits(1)
    held_out = {
        hands.value_key(hand, rule)
        for rule in (hands.TRAINING_RULE, hands.TEST_RULE)
        for hand in (*split.validation_id, *split.validation_ood, *split.test_id, *split.test_ood)
    }
    tasks = data.training_tasks(split.train, 1, 0, 300)
    assert tasks[:16] == data.training_tasks(split.train, 1, 0, 16)
    for task in tasks:
        assert task["face_values"] == [10, 10, 10] and set(task["suits"]) <= {"S", "C"}
        for rule in (hands.TRAINING_RULE, hands.TEST_RULE):
            assert tuple(sorted(hands.card_values(task["cards"], rule))) not in held_out
    answers = WorkedAnswers(split.train[:200], "diverse")
    ids, _, mask, images = data.demonstration_batches(model, tokenizer, answers, True, 1, 32)(0)
    assert not any(audit.is_red(image.permute(1, 2, 0).numpy()) for image in images.pixels_ICHW)
    env = VisualGeneralPoints()
    for row in range(32):
        text = tokenizer.decode(ids[row][mask[row].bool()], skip_special_tokens=True)
        cards = json.loads(text)["cards"]
        assert tuple(sorted(hands.RANKS.index(card) + 1 for card in cards)) in set(split.train[:200])
        env.reset(options={"cards": cards})
        assert env.step(text)[1] == 5.0


def test_both_looks_of_a_task_differ_in_suit_and_ink_alone():
    chosen = hands.splits(0).test_id[:5]
    black, red = (data.evaluation_tasks(chosen, hands.TRAINING_RULE, look, 7, 2) for look in ("black", "red"))
    assert len(black) == 10
    for one, other in zip(black, red, strict=True):
        assert (one["cards"], one["drawing"]) == (other["cards"], other["drawing"])
        assert set(one["suits"]) <= {"S", "C"} and set(other["suits"]) <= {"H", "D"}


def test_the_picture_corpus_shows_what_it_states_and_withholds_red_and_24(pictures, tokenizer):
    for share in (0.0, 1.0):
        corpus = pictures(reading=1 - share, full=share, reading_rows=16)
        ids, _, mask, images = corpus.batch(2, 16)
        again = corpus.batch(2, 16)
        assert ids.tolist() == again[0].tolist() and bool((images.pixels_ICHW == again[3].pixels_ICHW).all())
        assert not any(audit.is_red(image.permute(1, 2, 0).numpy()) for image in images.pixels_ICHW)
        for row in range(16):
            context = tokenizer.decode(ids[row][~mask[row].bool()])
            target = tokenizer.decode(ids[row][mask[row].bool()], skip_special_tokens=True)
            assert context.count(IMAGE) == 16 and target.startswith(prompts.OPEN)
            if share:
                assert f"{prompts.TASK}24" not in context and "'11', '12', and '13'" not in context
                task = json.loads(target)
                rule = [context.split("'K' count as '")[1].split("'")[0]]
                assert len(task["cards"]) == 4 and rule
            else:
                assert target.count('"') == 8 + 2


def test_the_picture_of_a_document_is_that_of_its_cards(pictures, monkeypatch):
    seen, blank = [], draw()
    monkeypatch.setattr(drawing, "draw", lambda cards, suits, inks, seed: seen.append((cards, inks)) or blank)
    corpus = pictures(reading=0.5, full=0.5, reading_rows=8, full_rows=8, black=0.0, inks=("teal",))
    for step in range(3):
        ids, _, mask, _ = corpus.batch(step, 8)
        for row, (cards, inks) in enumerate(seen):
            text = corpus.encode.ids
            wanted = [text[f'"{cards[0]}"'], *(text[f', "{card}"'] for card in cards[1:])]
            own = ids[row][mask[row].bool()].tolist()
            assert own[1:5] == wanted and inks == ("teal",) * 4
        seen.clear()


def test_text_names_each_card_where_its_quarter_of_a_picture_would_stand(tokenizer):
    encoder = PhraseEncoder(tokenizer)
    config = CorpusConfig(full=1.0, make4=0, reading=0, make3=0, facts=0, row_tokens=80)
    corpus = data.WrittenCorpus(encoder, config, 0, EYES.tokens)
    assert corpus.places == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    ids, _, mask = corpus.batch(0, 4)
    for row in range(4):
        cards = json.loads(tokenizer.decode(ids[row][mask[row].bool()], skip_special_tokens=True))["cards"]
        context = tokenizer.decode(ids[row][~mask[row].bool()])
        shown = context.split("Cards: [")[1].split("]")[0]
        assert shown == "".join(f'"{cards[place]}"' for place in corpus.places)
        assert encoder.ids["<unk>"] not in ids[row] and mask[row].sum() > 30


def test_pretraining_takes_text_and_pictures_in_turn(pictures):
    corpus = pictures(reading=0.3, full=0.2)
    kinds = []
    for step in range(60):
        ids, _, _, images = corpus.batch(step, 5)
        kinds.append("text" if images is None else len(ids))
    assert set(kinds) == {"text", 48, 16} and 22 <= kinds.count("text") <= 38 and kinds.count(48) > kinds.count(16)


# --- measures ---


def episode(text, cards=CARDS, suits="SCSC", success=False):
    made = Episode([], [], [], [], 0, {"cards": cards, "suits": list(suits)}, 0, success=success)
    info = {"success": success, "recognised": False, "rule10": False, "class": "correct" if success else "number"}
    made.texts, made.infos = [text], [info]
    return made


def test_reading_is_counted_place_by_place():
    assert evaluate.cards_read(episode(reply())) == [1, 1, 1, 1]
    assert evaluate.cards_read(episode(reply(cards=["4", "2", "2", "J"]))) == [1, 0, 1, 0]
    assert evaluate.cards_read(episode(reply(cards=["4"]))) == [1, 0, 0, 0]
    assert evaluate.cards_read(episode(reply(cards=["9", *CARDS]))) == [0, 0, 0, 0]
    assert evaluate.cards_read(episode("no JSON")) == [0, 0, 0, 0]
    metrics = evaluate.episode_metrics([episode(reply(), success=True), episode(reply(cards=["4", "2", "2", "J"]))])
    assert metrics["recognition"] == [1.0, 0.5] and metrics["cards"] == [1.0, 0.0] and metrics["success"] == [1.0, 0.0]


def test_reading_is_recorded_per_rank_and_suit():
    rows = {}

    class Log:
        def record(self, **row):
            rows[row["split"], row["metric"]] = (row["value"], row["n"])

    judge = evaluate.Evaluator.__new__(evaluate.Evaluator)
    judge.log = Log()
    for split in ("id", "rule"):
        judge._read_apart(split, [episode(reply()), episode(reply(cards=["4", "2", "2", "J"]), suits="SSCC")], 0)
    assert rows["id", "recognition/4"] == (1.0, 2) and rows["id", "recognition/K"] == (0.5, 2)
    assert rows["id", "recognition/suit S"] == (0.75, 4) and rows["id", "recognition/suit C"] == (0.75, 4)
    assert not any(split == "rule" for split, _ in rows)


def test_correlation_by_hand():
    assert evaluate.correlation([0, 1, 0, 1], [0, 1, 0, 1]) == pytest.approx(1.0)
    assert evaluate.correlation([0, 1, 0, 1], [1, 0, 1, 0]) == pytest.approx(-1.0)
    assert evaluate.correlation([0, 0.5, 1.0], [0, 0, 1]) == pytest.approx(0.8660254)
    assert evaluate.correlation([1, 1, 1], [0, 1, 0]) is None


def test_the_new_switch_leaves_the_other_grades_alone():
    deal = grading.deal(CARDS, (10, 10, 10))
    for text in (reply(), reply("4*3"), "nothing"):
        assert grading.grade(text, deal, ("cards_first",)) == grading.grade(text, deal)
