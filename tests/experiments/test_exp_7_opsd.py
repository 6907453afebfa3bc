"""On-policy self-distillation: the three kinds of task, splits, corpus, measures, with values worked out by hand."""

import json
import re
from types import SimpleNamespace

import gymnasium
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from common import tuning
from common.config import ConfigError, compose
from common.distill import make_batches
from common.episodes import Episode, collate
from common.models import build_decoder
from common.pretrained import encoder_of
from common.runlog import RunLog
from common.statistics import overlaps
from common.tokenizers import PhraseEncoder
from experiments.exp_7_opsd_self_distillation import arms, audit, data, evaluate, figures, stages, tasks, tune
from experiments.exp_7_opsd_self_distillation.settings import METHODS, Settings
from experiments.exp_7_opsd_self_distillation.tasks import Task

NUMBER = "7-opsd"
STEPS = Task("steps", 3, 7, (5, -3))
TABLE = (1, 2, 3, 4, 5, -4)


@pytest.fixture
def codes(monkeypatch):
    """A world whose table is TABLE."""
    monkeypatch.setattr(tasks, "table", lambda world: TABLE)
    return Task("codes", 3, 7, (1, 5))


# Tasks ---------------------------------------------------------------------------------------------------------------


def test_questions_and_what_a_teacher_is_shown(codes):
    assert tasks.results(STEPS) == [12, 9] and tasks.solution(STEPS) == "7+5=12-3=9"
    assert tasks.prompt(STEPS) == "Compute 7+5-3\n"
    assert tasks.prompt(STEPS, "answer") == "Compute 7+5-3, known answer 9\n"
    assert tasks.prompt(STEPS, "solution") == "Compute 7+5-3, known solution 7+5=12-3=9\n"
    assert tasks.results(codes) == [9, 5] and tasks.solution(codes) == "7 b+2=9 f-4=5"
    assert tasks.prompt(codes) == "Decode 7 b f\n"
    assert tasks.prompt(codes, "table") == "Table a+1 b+2 c+3 d+4 e+5 f-4\nDecode 7 b f\n"
    search = Task("search", 3, 12, (3,))
    (number,) = tasks.results(search)
    assert tasks.prompt(search) == "Find 12 3\n" and tasks.prompt(search, "answer") == f"Find 12 3, known answer {number}\n"
    assert tasks.solution(search) == f"={number}" and number == tasks.found_number(3, 12, 3) < tasks.SIZE
    for task in (STEPS, codes, search):
        assert tasks.task_of(tasks.options_of(task)) == task


@pytest.mark.parametrize(
    ("text", "success", "kind", "waits"),
    [
        ("7+5=12-3=9", True, "right", 0),
        ("7+5=11 wait=12-3=9", True, "right", 1),
        ("7+5=12 wait=12-3=8 wait=7 wait=9", True, "right", 3),
        ("7+5=12 wait=11-3=9", False, "arithmetic", 1),
        ("7+5=11-3=9", False, "arithmetic", 0),
        ("7+5=12-3=8", False, "arithmetic", 0),
        ("7+5=12", False, "short", 0),
        ("7+5=12-3=9+1=10", False, "long", 0),
        ("7+5=12-4=8", False, "misread", 0),
        ("6+5=11-3=8", False, "misread", 0),
        ("7", False, "malformed", 0),
        ("=9", False, "malformed", 0),
        ("", False, "malformed", 0),
        ("7+5=12 wait-3=9", False, "malformed", 1),
        ("7+5=12-3=9 wait", False, "malformed", 1),
        ("7+5=12-3=9 ", False, "malformed", 0),
        ("7+5=12-3=019", False, "malformed", 0),
        ("7+5=12-3=9=9", False, "malformed", 0),
        ("7+5=12-3=９", False, "malformed", 0),
        ("7 b+5=12-3=9", False, "misread", 0),
        (" 7+5=12-3=9", False, "malformed", 0),
    ],
)
def test_answers_and_their_verdicts(text, success, kind, waits):
    found = tasks.grade(text, STEPS)
    assert (found.success, found.kind, found.waits) == (success, kind, waits) and found.reason


@pytest.mark.parametrize(
    ("text", "success"),
    [("7 b+2=9 f-4=5", True), ("7 b+2=9 f-4=6", False), ("7+2=9-4=5", False), ("7 b+2=9 f-5=4", False), ("7 b=9 f=5", False)],
)
def test_codes_are_answered_letter_by_letter(codes, text, success):
    assert tasks.grade(text, codes).success is success


def test_a_search_is_answered_by_one_number():
    task = Task("search", 3, 12, (3,))
    number = tasks.found_number(3, 12, 3)
    assert tasks.grade(f"={number}", task).success
    for text in (f"={(number + 1) % 20}", f"{number}", f"={number} ", f"={number}={number}", f"=0{number}", "", "="):
        assert not tasks.grade(text, task).success, text


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_every_solution_scores_and_every_other_last_number_does_not(kind):
    for task in tasks.items("train", 0, kind, 0, tasks.TRAINED[kind], 60):
        assert tasks.grade(tasks.solution(task), task)[:2] == (True, "right")
        wrong = tasks.solution(task).rsplit("=", 1)[0] + f"={(tasks.results(task)[-1] + 1) % 20}"
        assert not tasks.grade(wrong, task).success
        assert all(0 <= number < tasks.SIZE for number in tasks.results(task))


def test_the_environment_keeps_to_gymnasiums_rules():
    env = gymnasium.make(tasks.ENV_ID)
    check_env(env.unwrapped, skip_render_check=True)
    assert env.reset(seed=7)[0] == env.reset(seed=7)[0]
    prompt, _ = env.reset(options=tasks.options_of(STEPS))
    assert prompt == tasks.prompt(STEPS)
    shown, reward, terminated, truncated, info = env.step("7+5=11 wait=12-3=9")
    assert (shown, reward, terminated, truncated, info["success"], info["waits"]) == ("", 1.0, True, False, True, 1)
    bare = tasks.PrivilegedTasks()
    with pytest.raises(gymnasium.error.ResetNeeded):
        bare.step("x")
    bare.reset(seed=1)
    with pytest.raises(TypeError):
        bare.step(9)


# The audit -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_audit(monkeypatch):
    monkeypatch.setattr(audit, "ENUMERATED", {"steps": 1, "codes": 1, "search": 0})
    monkeypatch.setattr(audit, "LONGER", {"steps": range(4, 5), "codes": range(4, 5), "search": range(1, 2)})
    for name, value in {"SAMPLED": 4, "EXPLOITED": 40, "SPLIT_SEEDS": (0,)}.items():
        monkeypatch.setattr(audit, name, value)


def test_the_audit_finds_no_hole(short_audit, capsys):
    assert audit.main() == 0
    shown = capsys.readouterr().out
    assert " 0 holes" in shown and all(f"{kind}, exploit" in shown for kind in tasks.KINDS)


def test_the_audit_finds_a_lenient_grader_a_question_that_tells_and_a_shared_question(short_audit, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "_PIECE", re.compile(r"(?P<move>(?: [a-f])?[+-][1-5])(?P<results>=[0-9]+[^+-]*)"))
        assert audit.main() == 1
    assert "HOLE steps, " in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "END", f"{tasks.ANSWER}3\n")
        assert any("holds a hint" in hole for hole in audit.question_holes())
    monkeypatch.setattr(tasks, "items", lambda wanted, *rest: (STEPS,))
    assert any("belongs to corpus and to test" in hole for hole in audit.split_holes())


# Splits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_no_two_roles_share_a_question(kind):
    drawn = {name: tasks.items(name, 0, kind, 0, tasks.TRAINED[kind], 60) for name in tasks.ROLES if name != "corpus"}
    assert set(overlaps({name: [task[2:] for task in some] for name, some in drawn.items()}).values()) == {0}
    assert sorted(bucket for buckets in tasks.ROLES.values() for bucket in buckets) == list(range(tasks.BUCKETS))


def test_a_question_has_its_role_in_every_world_and_seeds_share_the_test_questions():
    settings = compose(NUMBER, Settings, [])
    splits = [evaluate.Evaluator(settings, "search", None, None, seed).splits(10) for seed in (0, 100, 101)]
    questions = [[(t["start"], t["moves"]) for t in split["search"]] for split in splits]
    assert questions[1] == questions[2] != questions[0]
    assert {t["world"] for t in splits[2]["search"] + splits[2]["search-train"]} == {101}
    train = {(t["start"], *t["moves"]) for t in splits[1]["search-train"]}
    assert not train & {(start, *moves) for start, moves in questions[1]}


def test_the_corpus_holds_no_question_of_another_role_and_no_world_of_a_seed():
    settings = compose(NUMBER, Settings, [])
    tokenizer = data.build_tokenizer()
    corpus = data.Corpus(encoder_of(tokenizer), settings.corpus, 100)
    held = {
        tasks.prompt(task)
        for role in ("train", "validation", "test")
        for kind in tasks.KINDS
        for task in tasks.items(role, 0, kind, 0, tasks.TRAINED[kind], 60)
    }
    texts = {}
    for step in range(8):
        for row in tokenizer.batch_decode(corpus.batch(step, 32)[0]):
            for text in row.split("<bos>")[1:]:
                question = text.split(tasks.END)[1 if text.startswith(tasks.TABLE) else 0]
                for cut in (tasks.ANSWER, tasks.SOLUTION):
                    question = question.split(cut)[0]
                assert f"{question}{tasks.END}" not in held
                shown = next((name for name in (tasks.ANSWER, tasks.SOLUTION, tasks.TABLE) if name in text), "nothing")
                texts.setdefault((question.split()[0], shown), []).append(text)
    assert len(texts) == len(settings.corpus.shares) == 7
    waits = {key: sum(tasks.WAIT in text for text in some) / len(some) for key, some in texts.items()}
    assert waits["Compute", "nothing"] > 0.4 and waits["Compute", tasks.SOLUTION] == 0 == waits["Compute", tasks.ANSWER]


def test_the_plain_style_checks_beside_a_solution_too():
    settings = compose(NUMBER, Settings, [])
    stream = data.python_random(0, "style")
    for style, low, high in (("smooth", 0.0, 0.0), ("plain", 0.2, 0.32)):
        corpus = data.Corpus(None, data.CorpusConfig({}, 0.12, 0.15, style), 0)
        texts = [corpus.answer(stream, STEPS, "solution") for _ in range(1000)]
        assert low <= sum(text.count(tasks.WAIT) for text in texts) / 2000 <= high
        assert all(tasks.grade(text, STEPS).success for text in texts)
    assert settings.corpus.style == "smooth"


def test_one_token_a_piece(codes):
    tokenizer = data.build_tokenizer()
    encode = PhraseEncoder(tokenizer)
    for task, shown in ((STEPS, "solution"), (codes, "table")):
        text = tasks.prompt(task, shown) + tasks.solution(task)
        assert encode(text) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(encode(text)) == text
    assert len(encode(tasks.prompt(codes, "table"))) == 19
    assert len(encode("7+5=11 wait=12-3=9")) == 7
    longest = tasks.items("test", 0, "steps", 0, (8,), 1)[0]
    assert len(encode(tasks.solution(longest))) + 2 * 8 + 1 <= compose(NUMBER, Settings, []).max_new_tokens
    numbers = {tokenizer.decode([token]): number for token, number in data.written_numbers(tokenizer).items()}
    assert numbers["-3"] == -3 and numbers["=9"] == 9 and len(numbers) == 70


# The self-teacher ----------------------------------------------------------------------------------------------------


def answered(text, task=STEPS, success=True):
    encode = PhraseEncoder(data.build_tokenizer())
    ids, mask = encode.row(tasks.prompt(task), text)
    info = {"class": "right", "waits": text.count(tasks.WAIT), "success": success, "reason": ""}
    return Episode(ids, mask, [0.0] * len(ids), [own - 1 for own in mask], mask.index(1), tasks.options_of(task), 0,
                   reward=float(success), success=success, infos=[info], texts=[text])  # fmt: skip


def test_the_teacher_reads_the_same_answer_behind_what_it_is_shown():
    tokenizer = data.build_tokenizer()
    settings = compose(NUMBER, Settings, [])
    model = build_decoder(settings.model, tokenizer, 0)
    shown = arms.Arm.shown.__get__(SimpleNamespace(branch=settings.branches["opsd_solution"]))
    assert shown(tasks.options_of(STEPS)) == tasks.prompt(STEPS, "solution")
    episodes = [answered("7+5=11 wait=12-3=9"), answered("7+5=12", success=False)]
    own, seen = make_batches(episodes, collate(episodes, 0), tokenizer, model, model, shown, None)
    for batch, texts in ((own, ["<bos>Compute 7+5-3\n"] * 2), (seen, [f"<bos>{tasks.prompt(STEPS, 'solution')}"] * 2)):
        for row, (text, episode) in enumerate(zip(texts, episodes, strict=True)):
            ids = batch.ids_BT[row][batch.attention_BT[row]].tolist()
            assert tokenizer.decode(ids) == text + episode.texts[0] + "<eos>"
    assert own.ids_BT[own.mask_BT].tolist() == seen.ids_BT[seen.mask_BT].tolist()


# Measures ------------------------------------------------------------------------------------------------------------


def test_metrics_of_answers():
    found = evaluate.episode_metrics([answered("7+5=11 wait=12-3=9"), answered("7+5=12 wait=12-3=9"), answered("7+5=12")])
    assert found["checks"] == [1.0, 1.0, 0.0] and found["mended"] == [1.0, 0.0, 0.0] and found["length"] == [8.0, 8.0, 4.0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("7+5=12", False), ("7+5=12 wait=12", False), ("7+5=11 wait=12", True), ("7+5=12 wait=12-3=8 wait=9", True),
     ("7+5=12 wait", False), (" wait=12", False), ("7+5=2 wait=12", True), ("7+5=12 wait=12-3=9 wait=9", False)],
)  # fmt: skip
def test_a_mended_result(text, wanted):
    assert evaluate.mended(text) is wanted


def test_entropy_is_that_of_the_next_token_at_each_written_token():
    tokenizer = data.build_tokenizer()
    model = build_decoder(compose(NUMBER, Settings, []).model, tokenizer, 0).eval()
    episode = answered("7+5=12")
    found = evaluate.token_entropies(model, [episode], tokenizer)
    with torch.no_grad():
        p = model(torch.tensor([episode.ids])).logits[0].softmax(-1)
    at = [place - 1 for place, own in enumerate(episode.mask) if own]
    assert found == pytest.approx([float(-(p[i] * p[i].log()).sum()) for i in at], abs=1e-4) and len(found) == 4


def test_a_point_of_the_curve_knows_the_tokens_sampled_so_far(tmp_path, monkeypatch):
    settings = compose(NUMBER, Settings, ["scale=smoke"])
    labels = {"experiment": NUMBER, "scale": "smoke", "variant": None, "arm": "rlvr", "seed": 100}
    log = RunLog(tmp_path, labels, quiet=True)
    log.metrics(1, {"len/completion_mean": 5.0})
    log.metrics(2, {"len/completion_mean": 7.0})
    episodes = [answered("7+5=12 wait=12-3=9"), answered("7+5=12", success=False)]
    monkeypatch.setattr(stages, "play", lambda *words: episodes)
    made = evaluate.Evaluator(settings, "steps", None, log, 100)
    made.on_the_way(None, 1, 10)
    made.on_the_way(None, 2, 10)
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    values = {(row["split"], row["metric"], row["step"]): row["value"] for row in rows}
    assert values == {("steps", "success", 1): 0.5, ("steps", "checks", 1): 0.5, ("train", "flops", 1): 10.0,
                      ("train", "sampled", 1): 80.0}  # fmt: skip


# Configuration -------------------------------------------------------------------------------------------------------


def test_every_method_has_an_arm_and_every_arm_a_label_and_a_row():
    settings = compose(NUMBER, Settings, [])
    assert {branch.method for branch in settings.branches.values()} == set(METHODS) == set(arms.METHODS)
    assert set(settings.branches) <= set(figures.LABELS)
    assert set(settings.branches) <= {row.variant for row in figures.CLAIMS.table if row.metric == "success"}


def test_arms_that_sample_sample_the_same_number_per_step():
    settings = compose(NUMBER, Settings, [])
    for name, branch in settings.branches.items():
        config = settings.arm_config(name)
        if branch.method in ("policy_gradient", "self_distill"):
            assert config.prompts_per_step * config.group_size == settings.episodes_per_step, name
            assert config.max_new_tokens == settings.max_new_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("branches.rlvr.method=rl", "branches.rlvr.method=rl: allowed are none, sft"),
        ("branches.opsd_answer.shown=nothing", "branches.opsd_answer.shown=nothing: a self-teacher must see more"),
        ("branches.opsd_answer.shown=table", "branches.opsd_answer.shown=table: the corpus holds no such text"),
        ("branches.opsd_answer.changes={objective: jds}", "distill.objective=jds"),
        ("branches.opsd_moving.changes.self_teacher=slow", "distill.self_teacher=slow: allowed are fixed, moving"),
        ("corpus.style=rough", "corpus.style=rough: allowed are smooth, plain"),
        ("model.hidden=65", "model.hidden=65"),
        ("arms=[grop]", "arms=grop: allowed are"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(change, message):
    with pytest.raises(ConfigError) as error:
        compose(NUMBER, Settings, [change])
    assert message in str(error.value)


# Tuning --------------------------------------------------------------------------------------------------------------


def test_the_readmes_table_of_tries_is_the_record_of_tries_and_all_arms_had_the_same_number():
    tries = [json.loads(line) for line in tune.TUNING.file.read_text().splitlines()] if tune.TUNING.file.exists() else []
    block = (tune.TUNING.folder / "README.md").read_text().split(tuning.BLOCK[0])[1].split(tuning.BLOCK[1])[0].strip()
    assert block == (tuning.table(tries) if tries else "")
    counts = {arm: sum(row["arm"] == arm for row in tries) for arm in {row["arm"] for row in tries} & set(tune.RATES)}
    assert set(counts.values()) <= {3} and all(row["seed"] < 100 for row in tries)


def test_the_rates_of_the_arms_are_the_ones_that_were_taken():
    settings = compose(NUMBER, Settings, [])
    tries = [json.loads(line) for line in tune.TUNING.file.read_text().splitlines()] if tune.TUNING.file.exists() else []
    for arm in {row["arm"] for row in tries} & set(tune.RATES):
        assert settings.branches[arm].lr == tuning.best([row for row in tries if row["arm"] == arm])["lr"], arm
    for arm, other in tune.SAME_AS.items():
        assert settings.branches[arm].lr == settings.branches[other].lr, arm
