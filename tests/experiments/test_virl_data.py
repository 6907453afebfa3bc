"""Texts of 7-12 as tokens: the tokenizer, the withheld pairing, masks, tasks."""

import itertools

from common.seeding import python_random
from common.tokenizers import PhraseEncoder, encode_feedback, encode_prompt
from experiments.exp_7_12_virl import data, prompts, routes
from experiments.exp_7_12_virl.env import VirlNavigation, course
from experiments.exp_7_12_virl.prompts import Rule
from experiments.exp_7_12_virl.routes import RailConfig

RAIL = RailConfig(points=2)
TOKENIZER = data.build_tokenizer(("grid-0",))
ENCODE = PhraseEncoder(TOKENIZER)


def test_every_text_is_written_by_known_tokens():
    rules = [*(Rule(space) for space in prompts.SPACES), Rule("relative", ("walk", "face", "halt"))]
    for route, rule in zip(routes.items(("grid-0", "radial-0", "organic-0"), "corpus", 0, 30, RAIL), itertools.cycle(rules)):
        here = course(route, rule)
        text = here.opening + "".join(
            s + prompts.gold(route, stop, rule) for s, stop in zip(here.shown, route.stops, strict=True)
        )
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        assert TOKENIZER.unk_token_id not in ids and TOKENIZER.decode(ids) == text and ENCODE(text) == ids


def test_a_row_is_what_an_episode_writes():
    route, rule = routes.items(("grid-0",), "corpus", 0, 3, RAIL)[2], Rule("relative")
    env = VirlNavigation(rail=RAIL)
    seen, _ = env.reset(options={"route": route, "rule": "relative"})
    ids, mask = encode_prompt(TOKENIZER, seen), [0] * len(encode_prompt(TOKENIZER, seen))
    for stop in route.stops:
        own = [*ENCODE(prompts.gold(route, stop, rule)), TOKENIZER.eos_token_id]
        ids, mask = ids + own, mask + [1] * len(own)
        seen, _, ended, _, _ = env.step(prompts.gold(route, stop, rule))
        if not ended:
            reply = encode_feedback(TOKENIZER, seen, finished=True)
            ids, mask = ids + reply, mask + [0] * len(reply)
    assert data.walk_row(ENCODE, route, rule) == (ids, mask)


def test_the_tested_pairing_is_withheld():
    stream = python_random(0)
    rules = [data.random_rule(stream, 0.5) for _ in range(4000)]
    assert not any(rule.withheld for rule in rules)
    assert {rule.space for rule in rules if rule.verbs == prompts.VERBS} == {"absolute", "degrees", "clock"}
    others = [rule for rule in rules if rule.verbs[1] != prompts.VERBS[1]]
    assert {rule.space for rule in others} == set(prompts.SPACES) and 0.4 < len(others) / len(rules) < 0.6
    assert Rule("relative").withheld and not Rule("relative", ("walk", "face", "halt")).withheld
    corpus = data.Corpus(ENCODE, data.CorpusConfig(), RAIL, 0, [])
    turn, left = TOKENIZER.convert_tokens_to_ids(["turn_direction", "left"])
    for step in range(4):
        for row in corpus.batch(step, 16)[0].tolist():
            assert not any(a == turn and c == left for a, c in zip(row, row[2:], strict=False))


def test_batches_are_functions_of_their_step_and_targets_are_right_answers():
    corpus = data.Corpus(ENCODE, data.CorpusConfig(wrong=0.5), RAIL, 0, [])
    one, again, other = corpus.batch(3, 6), corpus.batch(3, 6), corpus.batch(4, 6)
    assert all((a == b).all() for a, b in zip(one, again, strict=True)) and one[0].tolist() != other[0].tolist()
    feedback = TOKENIZER.convert_tokens_to_ids(prompts.FEEDBACK["wrong_action"])
    assert (one[0] == feedback).any() and not one[2][one[0] == feedback].any()
    begin = TOKENIZER.convert_tokens_to_ids(prompts.OPEN)
    for ids, mask in zip(one[0].tolist(), one[2].tolist(), strict=True):
        for k, token in enumerate(ids):
            if token == begin:
                end = ids.index(TOKENIZER.eos_token_id, k)
                after = ids[end + 1] if end + 1 < len(ids) else None
                assert mask[k : end + 1] == [0 if after == feedback else 1] * (end + 1 - k)


def test_renamed_places_are_read_and_not_remembered():
    route = routes.items(("grid-0",), "corpus", 0, 1, RAIL)[0]
    other = data.with_names(route, python_random(1), ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K", "L"])
    names = dict(zip([s.sight.place for s in route.stops], [s.sight.place for s in other.stops], strict=True))
    assert all((b is None) if a is None else b not in (None, a) for a, b in names.items())
    told = [one.sight.place for one in route.instructions if one.sight]
    assert [names.get(place) for place in told] == [one.sight.place for one in other.instructions if one.sight]


def test_training_tasks_come_round_without_repeats():
    first = data.training_tasks(("grid-0",), 10, 3, 0, 4)
    longer = data.training_tasks(("grid-0",), 10, 3, 0, 10)
    assert longer[:4] == first and sorted(task["index"] for task in longer) == list(range(10))
    assert data.training_tasks(("grid-0",), 10, 3, 1, 10) != longer


def test_places_of_a_real_city_are_one_token_each(monkeypatch):
    monkeypatch.setattr(routes, "all_names", lambda names: ("Cafe Angeln", "Cafe Opal", "Ateneum"))
    tokenizer = data.build_tokenizer(("osm:x.osm.pbf",))
    assert len(tokenizer("Cafe Angeln is on your right", add_special_tokens=False)["input_ids"]) == 2
    assert len(tokenizer("Cafe Opal is on your right", add_special_tokens=False)["input_ids"]) == 3
