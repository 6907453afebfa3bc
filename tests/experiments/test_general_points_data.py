"""7-11's texts: the tokenizer covers them, the corpus withholds what it says, demonstrations are right."""

import pytest

from common.cards import hands, prompts
from common.cards.corpus import Corpus, CorpusConfig
from common.cards.env import GeneralPoints
from common.seeding import python_random
from common.sft import pad_rows
from common.tokenizers import PhraseEncoder
from experiments.exp_7_11_general_points import data


@pytest.fixture(scope="module")
def tokenizer():
    return data.build_tokenizer()


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return PhraseEncoder(tokenizer)


@pytest.fixture(scope="module")
def corpus(encoder):
    return Corpus(encoder, CorpusConfig(), seed=7)


@pytest.fixture(scope="module")
def demonstrations(tokenizer):
    train = hands.splits(0).train
    encode = data.demonstration_encoder(tokenizer)
    return {kind: data.Demonstrations(train, encode, kind, True, tokenizer.eos_token) for kind in ("one", "diverse")}


def test_the_fast_encoder_is_the_tokenizer(tokenizer, encoder, corpus):
    stream = python_random("texts")
    for kind in corpus.kinds:
        for _ in range(20):
            text = tokenizer.decode(kind(stream)[0])
            assert encoder(text) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("rule", [hands.TRAINING_RULE, hands.TEST_RULE])
def test_every_prompt_and_feedback_is_in_the_vocabulary(tokenizer, rule):
    env = GeneralPoints(verify_iter=2, switches=["leaking_feedback"])
    for hand in hands.all_hands()[::40]:
        observation, _ = env.reset(options={"cards": hands.cards_of(hand), "face_values": rule})
        feedback, *_ = env.step("no answer")
        for text in (observation, feedback):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == text
            assert len(ids) <= 20


def test_the_corpus_holds_no_target_24_and_no_full_document_with_the_test_rule(tokenizer, corpus):
    stream = python_random("withheld")
    stated = prompts.prompt(["A"] * 4, 5, hands.TEST_RULE, True)
    test_rule = stated[stated.index(prompts.FACES) : stated.index('"A"')]
    seen = 0
    for kind in corpus.kinds:
        for _ in range(400):
            text = tokenizer.decode(kind(stream)[0])
            assert f"{prompts.TASK}{hands.TARGET}" not in text
            if kind == corpus.full:
                assert test_rule not in text
            seen += prompts.TASK in text
    assert seen > 1000


def test_full_documents_are_answers_that_the_verifier_accepts(tokenizer, corpus):
    stream = python_random("full")
    env = GeneralPoints()
    for _ in range(200):
        ids, mask = corpus.full(stream)
        prompt = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m], skip_special_tokens=True)
        answer = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=True)
        target = int(prompt.removeprefix(prompts.TASK).split(prompts.FACES)[0])
        cards = [card.strip('"') for card in answer.split("]")[0].removeprefix(prompts.OPEN).split(", ")]
        rule = prompt.split(prompts.FACES)[1].split("[Input]")[0]
        numbers = [int(word) for word in "".join(c if c.isdigit() else " " for c in rule).split()]
        env.reset(options={"cards": cards, "face_values": (numbers * 3)[:3], "target": target})
        *_, info = env.step(answer)
        assert info["success"] and info["trace"] == "valid" and info["recognised"], (prompt, answer, info)


def test_batches_depend_on_seed_and_step_alone(encoder):
    first, again, other = (Corpus(encoder, CorpusConfig(), seed).batch(3, 16)[0] for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_corpus_rows_follow_the_shares(encoder):
    only = CorpusConfig(full=1.0, make4=0.0, reading=0.0, make3=0.0, facts=0.0)
    ids, _, _ = Corpus(encoder, only, 0).batch(0, 8)
    assert (ids == encoder.ids[prompts.OPEN]).any(1).all()
    with pytest.raises(ValueError, match="sum to 1"):
        Corpus(encoder, CorpusConfig(full=0.9), 0)


@pytest.mark.parametrize("kind", ["one", "diverse"])
def test_demonstrations_are_right_end_with_the_end_token_and_use_training_hands(tokenizer, demonstrations, kind):
    env, train = GeneralPoints(), set(hands.splits(0).train)
    for ids, mask in demonstrations[kind].rows(5, 0, 100):
        assert ids[-1] == tokenizer.eos_token_id and mask[-1] == 1
        answer = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=True)
        cards = [card.strip('"') for card in answer.split("]")[0].removeprefix(prompts.OPEN).split(", ")]
        assert tuple(sorted(hands.RANKS.index(card) + 1 for card in cards)) in train
        env.reset(options={"cards": cards})
        *_, info = env.step(answer)
        assert info["success"] and info["recognised"]


def test_one_solution_is_one_and_diverse_are_several(demonstrations):
    assert max(map(len, demonstrations["diverse"].answers.solutions.values())) > 3

    def formulas(kind):
        seen = {}
        for step in range(40):
            for ids, mask in demonstrations[kind].rows(1, step, 128):
                answer = tuple(i for i, m in zip(ids, mask, strict=True) if m)
                seen.setdefault(tuple(sorted(answer[1:5])), set()).add(answer)
        return sum(map(len, seen.values())) / len(seen)

    assert formulas("diverse") > formulas("one")


def test_E05_training_tasks_hold_no_evaluation_hand():
    for split_seed in (0, 100, 101):
        splits = hands.splits(split_seed)
        held_out = {hands.value_key(h, rule) for rule in (hands.TRAINING_RULE, hands.TEST_RULE)
                    for h in (*splits.test_id, *splits.test_ood, *splits.validation_id, *splits.validation_ood)}  # fmt: skip
        tasks = data.training_tasks(splits.train, 0, 0, 400)
        for task in tasks:
            hand = [hands.RANKS.index(card) + 1 for card in task["cards"]]
            for rule in (hands.TRAINING_RULE, hands.TEST_RULE):
                assert hands.value_key(hand, rule) not in held_out


def test_longer_task_lists_begin_with_the_shorter():
    train = hands.splits(0).train
    assert data.training_tasks(train, 3, 5, 64)[:16] == data.training_tasks(train, 3, 5, 16)
    assert len({tuple(sorted(t["cards"])) for t in data.training_tasks(train, 3, 5, 64)}) == 64


def test_pad_rows_fits_the_corpus(corpus):
    ids, attention, mask = pad_rows([corpus.full(python_random(0))], 0)
    assert attention.all() and mask.sum() > 30 and ids.shape == mask.shape
