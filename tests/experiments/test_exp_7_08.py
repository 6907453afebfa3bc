"""Prompt distillation: task, splits, grading, measures and configuration, with values worked out by hand."""

import json
import re
from collections import Counter

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from common import tuning
from common.config import ConfigError, compose
from common.files import read_json_lines
from common.models import DecoderConfig
from common.runlog import RunLog
from common.seeding import python_random
from common.statistics import overlaps
from common.tokenizers import encode_prompt
from experiments.exp_7_08_prompt_distillation import audit, data, rules, source, stages, tune
from experiments.exp_7_08_prompt_distillation.ask import Mode, Reply
from experiments.exp_7_08_prompt_distillation.env import ENV_ID, PromptedLabels, grade
from experiments.exp_7_08_prompt_distillation.evaluate import Evaluator, agreement, inheritance
from experiments.exp_7_08_prompt_distillation.rules import HINT, MARK, NAME, Table, Text
from experiments.exp_7_08_prompt_distillation.settings import Settings

NUMBER = "7-8"
OF_KIND = {kind: [word for word in rules.words() if rules.kinds()[word] == kind] for kind in (MARK, HINT, NAME)}
(A, B), (C, D, E), (F,) = OF_KIND[MARK][:2], OF_KIND[HINT][:3], OF_KIND[NAME][:1]
TABLE = Table({A: "el", B: "hi", C: "fr", D: "de", E: "de", F: ""}, "en")


# The task ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "label", "kind"),
    [
        ((C, A, D), "el", "mark"),  # a mark decides, whatever the hints
        ((A, B), "ot", "mixed"),
        ((C, D, E), "de", "hints"),
        ((D, E, C), "de", "hints"),
        ((C, D, F), "fr", "tie"),  # the hint that stands first
        ((F, D, C), "de", "tie"),
        ((F,), "en", "default"),
    ],
)
def test_the_rules_in_their_order(words, label, kind):
    assert rules.decide(TABLE, Text(words)) == (label, kind)


def test_the_texts_of_prompt_thought_and_answer():
    text = Text((C, A, F))
    table = (
        f"Rules. 1. A mark decides; marks of two languages mean ot: {A} = el! {B} = hi!"
        f"\n2. Without a mark the language with the most hints, on a tie the one whose hint stands first:"
        f" {C} = fr, {D} = de, {E} = de,\n3. Names say nothing: {F} = -\n4. Otherwise en"
    )
    assert rules.prompt(text, TABLE, think=True) == f"{table}.\nText: {C} {A} {F}. Look up each word, then give the label.\n"
    assert rules.prompt(text, None, think=False) == f"Text: {C} {A} {F}. Label only.\n"
    assert "".join(rules.answer_pieces(TABLE, text, think=True)) == f"<think> {C} = fr, {A} = el! {F} = -</think>el"
    assert rules.answer_pieces(TABLE, text, think=False) == ["el"]


def test_texts_hold_six_different_words_of_the_table_and_every_rule_decides_some():
    table, texts = data.world(0), data.texts(0, "validation", 400)
    for text in texts:
        assert len(set(text.words)) == len(text.words) == 6 and set(text.words) <= set(table.rules)
    kinds = Counter(rules.decide(table, text)[1] for text in texts)
    assert min(kinds[kind] for kind in ("mark", "mixed", "hints", "tie")) > 20
    tail = sum(bool(rules.tail() & set(text.words)) for text in texts) / len(texts)
    assert 0.2 < tail < 0.6
    assert len(table.rules) == rules.VOCABULARY and len(rules.tail()) == rules.TAIL


def test_a_word_without_weight_comes_last():
    for seed in range(50):
        assert rules.weighted_sample(python_random(seed), {"a": 1.0, "b": 1.0, "c": 1e-12}, 2) in (["a", "b"], ["b", "a"])


def test_the_roles_share_no_text_whatever_the_order_of_its_words():
    for seed in (0, 100):
        roles = {role: [tuple(sorted(t.words)) for t in data.texts(seed, role, 300)] for role in rules.ROLES}
        assert set(overlaps(roles).values()) == {0}
    text = data.texts(0, "test", 1)[0]
    assert rules.role(Text(text.words[::-1])) == "test"


def test_the_corpus_holds_texts_of_its_role_under_tables_that_are_no_seeds_table():
    tokenizer = data.build_tokenizer()
    corpus, decode = data.Corpus(tokenizer, data.CorpusConfig(), 0, 100), tokenizer.decode
    fixed = {"".join(rules.table_pieces(data.world(seed))) for seed in (0, 1, 100, 101, 102)}
    for step in (0, 99):
        ids_BT, _, mask_BT = corpus.batch(step)
        for ids, mask in zip(ids_BT[:2].tolist(), mask_BT[:2].tolist(), strict=True):
            text = decode(ids)
            assert any(mask) and tokenizer.unk_token_id not in ids and not any(table in text for table in fixed)
            asked = re.findall(r"Text:((?: [a-z]{4})+)\. ", text)
            assert asked and {rules.role(Text(tuple(words.split()))) for words in asked} == {"corpus"}


def test_the_targets_of_the_corpus_are_the_answers_alone_and_right():
    tokenizer = data.build_tokenizer()
    corpus = data.Corpus(tokenizer, data.CorpusConfig(), 0, 100)
    ids, mask = corpus.row(python_random(0), 60)
    text = tokenizer.decode([token for token, target in zip(ids, mask, strict=True) if target])
    asked = [Text(tuple(words.split())) for words in re.findall(r"Text:((?: [a-z]{4})+)\. ", tokenizer.decode(ids))]
    answers = text.split("<eos>")[:-1]
    assert len(answers) == len(asked) == 5 and len({word for one in asked for word in one.words}) == 30
    table = dict(re.findall(r" ([a-z]{4}) = ([a-z]{2}|-)", tokenizer.decode(ids).split("Text:")[0]))
    default = re.search(r"Otherwise ([a-z]{2})", tokenizer.decode(ids))[1]
    read = Table({word: "" if label == "-" else label for word, label in table.items()}, default)
    for one, answer in zip(asked, answers, strict=True):
        assert answer in ("".join(rules.answer_pieces(read, one, think)) for think in (True, False))


def test_a_rules_embedding_starts_from_those_of_its_word_and_its_label():
    tokenizer = data.build_tokenizer()
    model = data.build_model(DecoderConfig(hidden=8, layers=1, heads=1, kv_heads=1, feedforward=8, tied=True), tokenizer, 0)
    weight, ids = model.get_input_embeddings().weight, tokenizer.get_vocab()
    expected = (weight[ids[f" {A}"]] + weight[ids["el"]]) / 2**0.5
    assert torch.allclose(weight[ids[f" {A} = el!"]], expected)
    rare = next(word for word in OF_KIND[MARK] if word in rules.tail())
    assert not torch.allclose(weight[ids[f" {rare} = el!"]], (weight[ids[f" {rare}"]] + weight[ids["el"]]) / 2**0.5, atol=0.1)


def test_a_longer_list_of_texts_begins_with_the_shorter_one():
    assert data.texts(3, "train", 50) == data.texts(3, "train", 80)[:50]


def test_a_change_of_rules_gives_that_share_of_the_words_another_label_of_the_same_kind():
    old, new = data.world(5), data.changed_world(5, 0.1)
    differing = [word for word in old.rules if old.rules[word] != new.rules[word]]
    labelled = [word for word, label in old.rules.items() if label]
    assert len(differing) == round(0.1 * len(labelled)) and set(differing) <= set(labelled)
    items, after = source.RuleSource(5).items("test", 50), source.RuleSource(5, 0.1).items("test", 50)
    assert [a.text for a in items] == [b.text for b in after]


@pytest.mark.parametrize("mode", [(False, False), (False, True), (True, False), (True, True)])
def test_the_sources_ids_are_the_tokenizers_own(mode):
    tokenizer, texts = data.build_tokenizer(), source.RuleSource(0)
    for item in texts.items("test", 5):
        ids = texts.encoder(tokenizer)(item, *mode)
        assert ids == encode_prompt(tokenizer, texts.prompt(item, *mode))
        assert tokenizer.unk_token_id not in ids


# Grading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["el", "<think></think>el", f"<think> {A} = el!</think>el", "\n el\n"])
def test_answers_that_must_score(text):
    assert grade(text, "el") == (True, "right", "el", "right")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "thinking"),
        ("fr", "wrong"),
        ("EL", "no_label"),
        ("el fr", "no_label"),  # several guesses are worth no more than none
        ("el.", "no_label"),
        ("xx", "no_label"),
        ("el because", "no_label"),
        ("Final Answer: el", "no_label"),
        ("ｅｌ", "no_label"),
        ("<think>el", "thinking"),
        ("<think>el</think>", "thinking"),
        ("<think>el</think>fr", "wrong"),
        ("<think></think><think></think>el", "thinking"),
        ("el</think>", "thinking"),
    ],
)
def test_answers_that_must_not_score(text, kind):
    """Known faults V13, V14, V20: a label in the thinking alone, several labels, several blocks."""
    found = grade(text, "el")
    assert (found.success, found.kind) == (False, kind)


def test_a_prompt_that_ends_inside_the_thinking_is_told_to_the_grader():
    """Known fault V13: the opening tag stands in the prompt."""
    assert grade("so it is</think>el", "el", opened=True).success
    assert not grade("so it is</think>el", "el", opened=False).success
    assert not grade("el", "el", opened=True).success


def test_without_a_gold_label_nothing_is_right_but_the_label_is_read():
    assert grade("el", None) == (False, "wrong", "el", "no gold label is known")


def test_the_environment_keeps_gymnasiums_contract():
    check_env(gymnasium.make(ENV_ID).unwrapped, skip_render_check=True)


def test_the_environment_draws_a_task_that_its_seed_names_and_grades_it():
    env = PromptedLabels()
    prompt, _ = env.reset(seed=1)
    assert prompt == env.reset(seed=1)[0] != env.reset(seed=2)[0] and "Text:" in prompt
    env.reset(options={"prompt": "x", "gold": "el"})
    _, reward, terminated, truncated, info = env.step("el")
    assert (reward, terminated, truncated, info["class"], info["label"]) == (1.0, True, False, "right", "el")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("el")
    env.reset(options={"prompt": "x", "gold": "el"})
    with pytest.raises(TypeError):
        env.step(b"el")


def test_the_audit_finds_no_hole_and_would_find_one(monkeypatch):
    cases = [
        case for table, text in audit.problems(100, 3) for case in (*audit.answers(table, text), *audit.exploits(table, text))
    ]
    tried, holes = audit.audit(iter(cases))
    assert holes == [] and tried["several labels"] == 24 and tried["bare"] == 3 and tried["bare, another label"] == 36
    loose = lambda text, gold, *_: (gold in text, "right", gold, "")  # noqa: E731
    monkeypatch.setattr("experiments.exp_7_08_prompt_distillation.env.grade", lambda *a: type(grade("el", "el"))(*loose(*a)))
    assert len(audit.audit(iter(cases))[1]) > 50


# Measures ------------------------------------------------------------------------------------------------------------


def reply(label, gold, thought=""):
    found = grade(f"{thought}{label}", gold)
    return Reply(f"{thought}{label}", found.label, found.kind, found.reason, 10, 2, True)


def test_inherited_errors_against_permutations_within_strata():
    gold = ["el"] * 8
    teacher = [reply(label, "el") for label in ("fr", "fr", "el", "el", "el", "el", "el", "el")]
    own = [reply(label, "el") for label in ("fr", "de", "de", "el", "el", "el", "el", "el")]
    found = inheritance(own, teacher, ["a"] * len(gold), 4000, 0)
    assert found["inherited"] == 2 / 3 and found["inherited_same"] == 1 / 3
    assert found["inherited_chance"] == pytest.approx(2 / 8, abs=0.02)  # the teacher is wrong on two of eight
    # both of the teacher's errors among three of eight: 3/8 * 2/7
    assert found["inherited_p"] == pytest.approx(3 / 28, abs=0.02)
    # where all errors lie in one stratum of three texts, two hits are what chance gives
    within = inheritance(own, teacher, ["hard"] * 3 + ["easy"] * 5, 500, 0)
    assert within["inherited_chance"] == 2 / 3 and within["inherited_p"] == 1.0


def test_a_student_without_errors_inherits_nothing_that_could_be_counted():
    right = [reply("el", "el")] * 3
    assert set(inheritance(right, right, ["a"] * 3, 10, 0).values()) == {None}


def labelled_log(tmp_path):
    return RunLog(tmp_path, {"experiment": NUMBER, "scale": "smoke", "variant": None, "arm": "a", "seed": 0}, quiet=True)


def test_accuracy_and_fidelity_are_told_apart(tmp_path):
    items = [source.Item("x", "el", "mark"), source.Item("y", "fr", "tie", True), source.Item("z", "de", "mark")]
    teacher = [reply("el", "el"), reply("de", "fr"), reply("no label", "de")]
    own = [reply("el", "el"), reply("de", "fr"), reply("de", "de")]
    settings = compose(NUMBER, Settings, ["scale=smoke"])
    with labelled_log(tmp_path) as log:
        evaluator = Evaluator(log, settings.evaluation)
        evaluator.split("test", items, own, teacher)
        evaluator.parts(items, own, teacher, 0)
    rows = {
        (row["split"], row["metric"]): row for row in map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    }
    values = {key: row["value"] for key, row in rows.items()}
    assert values["test", "success"] == pytest.approx(2 / 3) and values["test", "fidelity"] == pytest.approx(2 / 3)
    assert values["tail", "success"] == 0 and values["tail", "fidelity"] == 1 and values["kind/mark", "success"] == 1
    assert values["teacher_wrong", "success"] == 0.5 and values["teacher_wrong", "fidelity"] == 0.5
    assert values["test", "inherited"] == 1 and values["test", "inherited_same"] == 1
    assert values["kind/hints", "success"] is None and rows["kind/hints", "success"]["reason"]


def test_a_teacher_without_a_label_agrees_with_nobody():
    own, teacher = (reply(label, "el") for label in ("?", "fr", "el")), (reply(label, "el") for label in ("?", "fr", "fr"))
    assert agreement(list(own), list(teacher)) == [0.0, 1.0, 0.0]


def test_student_rows_hold_the_text_alone_and_leave_out_what_the_teacher_did_not_label():
    tokenizer, texts = data.build_tokenizer(), source.RuleSource(0)
    items = texts.items("train", 3)
    thought = "<think> x</think>"
    replies = [reply("fr", items[0].gold, thought), reply("?", items[1].gold), reply("de", items[2].gold, thought)]
    rows = stages.student_rows(texts, tokenizer, items, replies, "teacher", thought=False)
    assert len(rows) == 2
    ids, mask = rows[0]
    assert tokenizer.decode(ids[:-2]) == f"<bos>{texts.prompt(items[0], False, False)}"
    assert tokenizer.convert_ids_to_tokens(ids[-2:]) == ["fr", "<eos>"] and mask == [0] * (len(ids) - 2) + [1, 1]
    gold = stages.student_rows(texts, tokenizer, items, replies, "gold", thought=False)
    assert tokenizer.convert_ids_to_tokens(gold[0][0][-2:]) == [items[0].gold, "<eos>"] and len(gold) == 2
    kept = stages.student_rows(
        texts, tokenizer, items, [reply("fr", items[0].gold, "<think></think>")] * 3, "teacher", thought=True
    )
    assert tokenizer.convert_ids_to_tokens(kept[0][0][-4:]) == ["<think>", "</think>", "fr", "<eos>"] and sum(kept[0][1]) == 4


def test_a_text_without_a_gold_label_cannot_train_a_control():
    tokenizer, texts = data.build_tokenizer(), source.RuleSource(0)
    item = texts.items("train", 1)[0]._replace(gold=None)
    with pytest.raises(ValueError, match="no gold label"):
        stages.student_rows(texts, tokenizer, [item], [reply("fr", "fr")], "gold", thought=False)


def test_permutations_are_drawn_from_a_named_stream():
    teacher = [reply("fr" if i % 5 == 0 else "el", "el") for i in range(60)]
    own = [reply("de" if i % 7 == 0 else "el", "el") for i in range(60)]
    same = [inheritance(own, teacher, ["a"] * 60, 200, 3) for _ in range(2)]
    assert same[0] == same[1] and np.isclose(same[0]["inherited_chance"], 0.2, atol=0.05)


# A reader's own sentences ----------------------------------------------------------------------------------------------


def test_a_file_of_sentences_is_read_split_and_prompted(tmp_path):
    lines = [f"en\tSentence number {i}." for i in range(60)] + ["fr\tBonjour.", "fr\tBonjour.", "", "no label here"]
    (tmp_path / "s.tsv").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "p.txt").write_text("Rules.\n", encoding="utf-8")
    found = source.FileSource(tmp_path / "s.tsv", tmp_path / "p.txt")
    roles = {role: [item.text for item in found.items(role, 100)] for role in ("train", "validation", "test")}
    assert sum(map(len, roles.values())) == 62 and set(overlaps(roles).values()) == {0}
    item = next(item for role in roles for item in found.items(role, 100) if item.text == "Bonjour.")
    assert item.gold == "fr" and found.prompt(item, False, False) == "Bonjour."
    assert found.prompt(item, True, True) == "Rules.\n\nText: Bonjour."
    bare = next(item for role in roles for item in found.items(role, 100) if item.text == "no label here")
    assert bare.gold is None


@pytest.mark.parametrize(
    ("line", "words"), [("xx\tHello", "label 'xx'"), ("en\t" + "a" * 3000, "1 to 2000"), ("en\t", "1 to 2000")]
)
def test_a_bad_line_is_named(tmp_path, line, words):
    (tmp_path / "s.tsv").write_text(f"en\tFine.\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"line 2.*{words}|{words}.*line 2"):
        source.FileSource(tmp_path / "s.tsv")


def test_the_packaged_prompt_names_every_label():
    text = source.PROMPT_FILE.read_text(encoding="utf-8")
    assert all(f"{label}:" in text or f" {label} " in text for label in source.FILE_LABELS)


# Configuration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["smoke", "laptop"])
def test_every_scale_composes_and_its_arms_are_those_of_the_claims(scale):
    settings = compose(NUMBER, Settings, [f"scale={scale}"])
    assert {"teacher", "distilled", "gold", "small"} <= set(settings.chosen())


def test_the_gpu_scale_composes_with_paths_and_says_what_it_needs():
    typed = ["scale=gpu", "sentences=/tmp/x.tsv"]
    settings = compose(NUMBER, Settings, typed)
    assert settings.real and settings.model_path and settings.lora.enabled and settings.sampling.temperature == 0.15
    with pytest.raises(ConfigError, match="sentences"):
        compose(NUMBER, Settings, ["scale=gpu"])
    with pytest.raises(ConfigError, match="rule tables"):
        compose(NUMBER, Settings, [*typed, "arms=[on_policy]"])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("branches.distilled.method=dream", "method"),
        ("branches.distilled.labels=none", "labels"),
        ("branches.update.after=gone", "after"),
        ("branches.update.on_changed=false", "on_changed"),
        ("branches.distilled.inputs=10000000", "inputs"),
        ("student_tokens=0", "student_tokens"),
        ("sentences=x.tsv", "model_path"),
        ("model.hidden=65", "hidden"),
        ("arms=[nobody]", "arms"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(typed, words):
    with pytest.raises(ConfigError, match=words):
        compose(NUMBER, Settings, ["scale=smoke", typed])


def test_the_table_of_tries_is_their_record_and_the_rates_are_the_best_of_as_many_tries_for_every_arm():
    rows, settings = read_json_lines(tune.TUNING.file), compose(NUMBER, Settings, [])
    assert tuning.tuning_table(tune.TUNING, rows) in (tune.TUNING.folder / "README.md").read_text(encoding="utf-8")
    assert all(row["seed"] < 100 for row in rows)
    trained = [arm for arm, branch in settings.branches.items() if branch.method != "none"]
    assert sorted(tune.RATES) == sorted(trained)
    for arm in trained:
        own = [row for row in rows if row["arm"] == arm and "note" not in row]
        assert [row["lr"] for row in own] == [1e-3, 3e-3, 1e-2], arm
        assert settings.branches[arm].lr == tune.best(own)["lr"], arm


def test_modes_are_pairs_that_a_source_takes():
    assert tuple(Mode(True, False)) == (True, False)
