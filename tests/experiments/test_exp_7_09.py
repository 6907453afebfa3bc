"""7-9: problems, traces, verifier, selection, measures and configuration, with values worked out by hand."""

import http.server
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from common.compute import Meter
from common.config import ConfigError, compose
from common.runlog import RunLog
from common.seeding import python_random
from common.statistics import overlaps
from common.tokenizers import PhraseEncoder, number_tokens
from experiments.exp_7_09_cot_distillation import audit, collect, data, env, evaluate, problems, selection, stages, traces
from experiments.exp_7_09_cot_distillation.problems import Problem
from experiments.exp_7_09_cot_distillation.selection import Candidate, Selection
from experiments.exp_7_09_cot_distillation.settings import Settings
from experiments.exp_7_09_cot_distillation.traces import Habits

NUMBER = "7-9"
PROBLEM = Problem(37, (("+", 11), ("-", 9)))
PLAIN = "<think>37 (1)+11=48. 48 (2)-9=39. </think>Final answer: 39"
TEXT = (
    "<think>37 (1)+11=48. Let me check: 48-11=37, as it should be. 48 (2)-9=39. Let me check: 39+9=48, as it should be. "
    "</think>Final answer: 39"
)
TOOL = "<think>calc(37 (1)+11)=48; calc(48 (2)-9)=39; </think>Final answer: 39"
DETOUR = (
    "<think>37 (1)+11=47. Let me check: 47-11=36, which does not fit. Wait, again: 37 (1)+11=48. 48 (2)-9=39. </think>"
    "Final answer: 39"
)
LABELLED = Path(__file__).with_name("exp_7_09_labelled.jsonl")


# Problems and traces -------------------------------------------------------------------------------------------------


def test_a_problem_and_its_four_styles():
    assert PROBLEM.results == [48, 39]
    assert PROBLEM.prompt == "Compute 37 (1)+11 (2)-9 from left to right.\n"
    assert problems.of_task(PROBLEM.task) == PROBLEM
    written = {style: traces.write(PROBLEM, style) for style in traces.STYLES}
    assert written == {"plain": PLAIN, "text": TEXT, "tool": TOOL, "answer": "Final answer: 39"}


def test_no_problem_is_seen_by_two_roles():
    for seed in (0, 100):
        sets = {role: problems.items(role, seed, problems.ID_LENGTHS, 300) for role in ("train", "validation", "test")}
        sets["corpus"] = problems.items("corpus", seed, problems.CORPUS_LENGTHS, 3000)
        sets["longer"] = problems.items("test", seed, problems.OOD_LENGTHS, 300)
        assert set(overlaps(sets).values()) == {0}
        assert sets["train"][:50] == problems.items("train", seed, problems.ID_LENGTHS, 50)
        assert [len(problem.steps) for problem in sets["train"][:4]] == [2, 3, 4, 2]
        for problem in sets["corpus"]:
            assert all(0 <= number <= 49 for number in problem.results)
            assert all(1 <= operand <= 12 for _, operand in problem.steps)


def test_documents_slip_check_and_repair_as_their_habits_say():
    stream, tokens = python_random("documents"), PhraseEncoder(data.build_tokenizer())
    found = []
    for _ in range(1500):
        problem = problems.random_problem(stream, 3)
        text = traces.write(problem, "text", Habits(slip=0.2, check=0.8, look=0.25), stream)
        assert len(tokens(text)) > 8 and traces.stated(text) is not None
        found.append((traces.read_trace(text), traces.stated(text) == problem.results[-1]))
    read = [trace for trace, _ in found]
    steps, slips = sum(len(trace.steps) for trace in read), sum(trace.slips for trace in read)
    caught, gone = sum(trace.caught for trace in read), sum(trace.backtrackings for trace in read)
    assert slips / steps == pytest.approx(0.2, abs=0.03)
    assert caught / slips == pytest.approx(0.8, abs=0.04)  # all that are checked, but for a third attempt in a row
    assert gone == caught  # no right step is withdrawn
    assert sum(trace.verifications for trace in read) / steps == pytest.approx(0.8, abs=0.03)
    assert sum(trace.empty for trace in read) / len(read) == pytest.approx(0.25, abs=0.03)
    assert 0.7 < sum(right for _, right in found) / len(found) < 0.92


def test_what_a_trace_does_agrees_with_the_labels_given_by_hand():
    rows = [json.loads(line) for line in LABELLED.read_text().splitlines()]
    assert len(rows) >= 25
    for row in rows:
        trace = traces.read_trace(row["thought"])
        found = {
            "steps": len(trace.steps),
            "slips": trace.slips,
            **{name: getattr(trace, name) for name in ("verifications", "reflections", "empty", "backtrackings", "caught")},
        }
        assert found == {name: row[name] for name in found}, row["thought"]


@pytest.mark.parametrize("text", ["", "\x00", "=" * 50_000, "Let me check: " * 20_000, "1+1=2" * 20_000, "９+９=18"])
def test_reading_never_raises(text):
    traces.read_trace(text)
    assert traces.stated(text) is None


def test_cutting_checks_and_detours_leaves_the_steps_that_stayed():
    assert traces.without_checks(TEXT) == PLAIN
    assert traces.without_checks(DETOUR) == PLAIN
    wrong = "<think>37 (1)+11=47. 47 (2)-9=38. </think>Final answer: 38"
    assert traces.without_checks(wrong) == wrong


# The verifier --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [PLAIN, TEXT, TOOL, DETOUR, "Final answer: 39", "<think></think>Final answer: 39", "<think>no</think> Final answer: 39 \n",
     "<think>12+1=50. </think>Final answer: 39", "<think>a</think>So it is 39.\nFinal answer: 39",
     "Because.\n\nFinal answer: 39"],
)  # fmt: skip
def test_answers_that_must_score(text):
    assert env.grade(text, PROBLEM) == (True, "right", "right", 39)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "not_stated"),
        ("39", "not_stated"),
        ("The answer is 39.", "not_stated"),
        ("<think>37+11=48. 48-9=39. </think>", "not_stated"),
        ("<think>37+11=48. 48-9=39. </think>39", "not_stated"),
        ("<think>Final answer: 39", "not_stated"),
        ("<think>Final answer: 39</think>", "not_stated"),
        ("<think>Final answer: 39</think>Final answer: 38", "wrong"),
        ("<think>a</think>Final answer: 38\nFinal answer: 39", "not_stated"),
        ("<think>a</think>Final answer: 39\nFinal answer: 38", "not_stated"),
        ("<think>a</think>Final answer: 39 or 40", "not_stated"),
        ("<think>a</think>Final answer: 39.", "not_stated"),
        ("<think>a</think>Final answer: 039", "not_stated"),
        ("<think>a</think>Final answer: ３９", "not_stated"),
        ("<think>a</think>Final answer: 39\nExample: 1+1=2", "not_stated"),
        ("<think>a</think><think>b</think>Final answer: 39", "not_stated"),
        ("a</think>Final answer: 39", "not_stated"),
        ("x <think>a</think>Final answer: 39", "not_stated"),
        ("<think>37+11=48. 48-9=39. </think>Final answer: 38", "wrong"),
        ("Final answer: 40 39", "not_stated"),
    ],
)
def test_answers_that_must_not_score(text, kind):
    """V12 (text that runs on), V13 (answer inside thinking, or thinking never closed), V14 (several guesses), V20 (several
    blocks), V21 (one marker, its own line), and no fall-back to the last number."""
    found = env.grade(text, PROBLEM)
    assert (found.success, found.kind) == (False, kind) and found.reason


def test_the_environment_keeps_to_gymnasiums_rules():
    made = gymnasium.make(env.ENV_ID)
    check_env(made.unwrapped, skip_render_check=True)
    assert made.reset(seed=7)[0] == made.reset(seed=7)[0]
    prompt, info = made.reset(options=PROBLEM.task)
    assert prompt == PROBLEM.prompt and info["steps"] == [["+", 11], ["-", 9]]
    assert made.step(PLAIN)[1:4] == (1.0, True, False)
    with pytest.raises(gymnasium.error.ResetNeeded):
        made.unwrapped.step(PLAIN)
    made.reset(options=PROBLEM.task)
    with pytest.raises(TypeError, match="must be text"):
        made.unwrapped.step(39)


def test_the_audit_finds_no_hole_and_would_find_one(monkeypatch, capsys):
    monkeypatch.setattr(audit, "LONGER", 3)
    monkeypatch.setattr(audit, "EXPLOITED", 2)
    monkeypatch.setattr(audit, "SPLIT_SEEDS", range(1))
    assert audit.main() == 0 and " 0 holes" in capsys.readouterr().out

    def last_number(text):  # the companion's fall-back
        digits = "".join(letter if letter.isascii() and letter.isdigit() else " " for letter in text).split()
        return int(digits[-1]) if digits and len(digits[-1]) < 3 else None

    monkeypatch.setattr(traces, "stated", last_number)
    assert audit.main() == 1 and "HOLE: form of the number" in capsys.readouterr().out


# Data ----------------------------------------------------------------------------------------------------------------


def test_tokens_and_targets_of_a_document():
    tokenizer = data.build_tokenizer()
    encode = PhraseEncoder(tokenizer)
    ids, mask = encode.row(PROBLEM.prompt, PLAIN)
    assert ids == tokenizer(tokenizer.bos_token + PROBLEM.prompt + PLAIN + tokenizer.eos_token)["input_ids"]
    assert sum(mask) == len(encode(PLAIN)) + 1 and mask[: len(mask) - sum(mask)] == [0] * 10
    numbers = number_tokens(tokenizer, data.PREFIXES, data.NUMBERS)
    assert len(numbers) == 100 and sorted(numbers.values())[-1] == 49


def test_wrong_results_of_checked_facts_are_no_targets():
    encode = PhraseEncoder(tokenizer := data.build_tokenizer())
    corpus = data.Corpus(encode, data.CorpusConfig(facts=1.0, checked=1.0), 0)
    ids_BT, attention_BT, mask_BT = corpus.batch(0, 8)
    seen = set()
    for ids, attention, mask in zip(ids_BT.tolist(), attention_BT.tolist(), mask_BT.tolist(), strict=True):
        texts = [tokenizer.decode([token]) for token in ids[: sum(attention)]]
        for at in range(1, len(texts), 12):
            left, mark, op, right, result, _, check, *_, back, verdict = texts[at : at + 12]
            assert mark in problems.MARKS
            holds = problems.apply(int(left), op, int(right)) == int(result[1:])
            assert (check, verdict) == (traces.CHECK, traces.HOLDS if holds else traces.FAILS)
            assert (back == f"={left}") == holds
            assert mask[at : at + 12] == [0, 0, 0, 0, int(holds), 0, 0, 0, 0, 0, 1, 1]
            seen.add(holds)
    assert seen == {True, False}


def test_tasks_of_a_step_begin_alike_whatever_their_number():
    train = problems.items("train", 0, problems.ID_LENGTHS, 10)
    more, fewer = data.training_tasks(train, 0, 3, 14), data.training_tasks(train, 0, 3, 4)
    assert more[:4] == fewer and more[10:] == more[:4] and len({str(task) for task in more}) == 10


# Selection -----------------------------------------------------------------------------------------------------------

WRONG = "<think>37 (1)+11=47. 47 (2)-9=38. </think>Final answer: 38"
TEXTS = [PLAIN, TEXT, WRONG, DETOUR, TOOL, "39", PLAIN]


def candidates(group=0):
    rows = [{"key": f"{group}/{k}", "text": text} for k, text in enumerate(TEXTS)]
    return selection.judged([PROBLEM] * (group + 1), rows)


@pytest.mark.parametrize(
    ("chosen", "kept", "counts"),
    [
        (Selection(verify=False, distinct=False, cap=None), [0, 1, 2, 3, 4, 5, 6], (0, 0, 0, 2)),
        (Selection(distinct=False, cap=None), [0, 1, 3, 4, 6], (2, 0, 0, 0)),
        (Selection(cap=None), [0, 3, 4], (2, 2, 0, 0)),  # TEXT and the second PLAIN have the steps of the first
        (Selection(cap=2), [0, 3], (2, 2, 1, 0)),
        (Selection(distinct=False, cap=1), [0], (2, 0, 4, 0)),
    ],
)
def test_each_filtering_step_is_counted(chosen, kept, counts):
    found, counted = selection.select(candidates(), chosen)
    assert [candidate.text for candidate in found] == [TEXTS[i] for i in kept]
    assert tuple(counted[name] for name in ("wrong", "repeated", "over_cap", "kept_wrong")) == counts
    assert counted["sampled"] == counted["wrong"] + counted["repeated"] + counted["over_cap"] + counted["kept"] == 7


def test_problems_are_filtered_apart_and_solved_ones_counted():
    both = candidates(0) + candidates(1) + [Candidate(2, WRONG, False)]
    found, counts = selection.select(both, Selection(cap=1))
    assert [c.group for c in found] == [0, 1] and counts["solved"] == 2


def test_what_is_learnt_from_a_kept_completion():
    assert selection.learnt(DETOUR, PROBLEM, "trace") == DETOUR
    assert selection.learnt(DETOUR, PROBLEM, "plain") == PLAIN
    assert selection.learnt(DETOUR, PROBLEM, "answer") == "Final answer: 39"
    encode = PhraseEncoder(data.build_tokenizer())
    (row,) = selection.rows_of([Candidate(0, DETOUR, True)], [PROBLEM], "plain", encode)
    assert row == encode.row(PROBLEM.prompt, PLAIN)


def test_a_teachers_sampling_is_paid_at_its_own_size(tmp_path):
    rows = [{"key": f"{i}/{k}", "tokens_in": 8, "tokens_out": 10 + k} for i in range(2) for k in range(3)]
    lines = [{"teacher": {}}, *rows]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "teacher.json").write_text('{"parameters": 1000}')
    meter = Meter(100)
    stages.sampled({"text": tmp_path}, Selection(candidates=2), meter)
    tokens = 2 * (8 + 10 + 11)  # a prompt once for all its candidates, the third answer not at all
    assert (meter.tokens_forward, meter.flops) == (tokens, 2 * 1000 * tokens)


# Measures ------------------------------------------------------------------------------------------------------------


def test_the_recovered_share():
    assert evaluate.recovered(0.7, 0.4, 0.8)["value"] == pytest.approx(0.75)
    assert evaluate.recovered(0.3, 0.4, 0.8)["value"] == pytest.approx(-0.25)
    assert evaluate.recovered(0.9, 0.8, 0.81)["value"] is None and evaluate.recovered(0.9, 0.8, 0.81)["reason"]


def records_of(folder):
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return {(row["split"], row["metric"]): (row["value"], row["n"]) for row in rows}


def log_in(folder):
    return RunLog(folder, {"experiment": NUMBER, "scale": "smoke", "variant": None, "arm": "a", "seed": 0}, quiet=True)


def test_behaviours_and_what_becomes_of_steps(tmp_path):
    needless = "<think>37+11=48. Wait, again: 37+11=48. 48-9=39. </think>Final answer: 39"
    texts = [PLAIN, TEXT, DETOUR, WRONG, needless]
    found = evaluate.behaviours(texts, [evaluate.read(text) for text in texts])
    assert found["verification"] == [0, 1, 1, 0, 0] and found["backtracking"] == [0, 0, 1, 0, 1]
    assert found["reflection"] == [0, 1, 1, 0, 1] and found["empty_reflection"] == [0, 0, 0, 0, 0]
    with log_in(tmp_path) as log:
        evaluate.record_ratios(log, "id", texts)
    found = records_of(tmp_path)
    assert found["id", "slip"] == (pytest.approx(2 / 12), 12)  # 37+11=47 twice, of 2+2+3+2+3 steps
    assert found["id", "caught"] == (0.5, 2)
    assert found["id", "false_alarm"] == (pytest.approx(1 / 10), 10)
    assert found["id", "checked"] == (pytest.approx(3 / 12), 12)


def test_imitation_counts_the_teachers_very_number(tmp_path, monkeypatch):
    """Two wrong numbers for the first problem, one for the second; four answers to each."""
    said = {0: [38, 38, 39, 40], 1: [12, None, 7, 7]}

    def play(settings, model, tokenizer, tasks, samples, seed, stream):
        assert [task["start"] for task in tasks] == [37, 5] and samples == 4
        return [
            SimpleNamespace(infos=[{"answer": number}], success=number in (39, 12)) for some in said.values() for number in some
        ]

    monkeypatch.setattr(evaluate, "play", play)
    settings = SimpleNamespace(evaluation=SimpleNamespace(imitation_samples=4))
    wrong = [(0, WRONG), (0, WRONG), (0, "Final answer: 40"), (1, "Final answer: 7"), (1, "no number")]
    with log_in(tmp_path) as log:
        train = (PROBLEM, Problem(5, (("+", 7),)))
        evaluate.record_imitation(settings, None, None, log, 0, train, [Candidate(i, text, False) for i, text in wrong])
    found = records_of(tmp_path)
    assert found["train", "imitated"] == (pytest.approx((2 + 1 + 2) / 12), 3)
    assert found["train", "imitated_right"] == (pytest.approx(2 / 8), 8)


# Configuration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("branches.verified.method=distil", "distill"),
        ("branches.verified.model=text", "student, large"),
        ("branches.mixed.select.teachers=[text,tol]", "tool"),
        ("branches.k16.select.candidates=17", "at most 16"),
        ("branches.mixed.select.candidates=7", "must divide among its teachers"),
        ("branches.verified.select.learn=all", "trace, plain, answer"),
        ("branches.capped.select.cap=0", "at least 1"),
        ("students.student.model.hidden=65", "even multiple"),
        ("teachers.text.corpus.style=txt", "plain, text, tool, answer"),
        ("teachers.text.corpus.habits.slip=1.5", "at most 1"),
        ("teachers.tool.base=texts", "allowed are null, text"),
        ("students.student.base=text", "of its own shape"),
        ("branches.star.changes.round=2", "rounds"),
        ("branches.capped.changes={cap: 2}", "has no keys to change"),
        ("arms=[gropo]", "grpo"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(change, words):
    with pytest.raises(ConfigError, match=words):
        compose(NUMBER, Settings, ["scale=smoke", change])


def test_an_arms_rate_can_be_typed():
    settings = compose(NUMBER, Settings, ["algo.lr=7e-4"])
    assert settings.sft_config("verified").lr == settings.grpo_config("grpo").lr == 7e-4
    assert settings.grpo_config("grpo").prompts_per_step * settings.grpo_config("grpo").group_size == 128


# Collecting from a server --------------------------------------------------------------------------------------------


def test_the_collection_command_asks_filters_writes_and_goes_on(tmp_path, monkeypatch, capsys):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            question = body["messages"][-1]["content"]
            (problem,) = [p for p in problems.items("train", 0, problems.ID_LENGTHS, 3) if p.prompt == question]
            answer = problem.results[-1] + (len(asked) % 2)  # every other answer is wrong
            message = {"content": f"So:\nFinal answer: {answer}", "reasoning_content": f"{len(asked)}"}
            reply = {"choices": [{"message": message, "finish_reason": "stop"}]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(reply | {"usage": {"prompt_tokens": 20, "completion_tokens": 5}}).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("TEACHER_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.delenv("TEACHER_MODEL", raising=False)
    words = [f"folder={tmp_path}", "problems=3", "samples=2", "server.workers=1", "server.requests_per_minute=60000"]
    assert collect.main(words) == 0
    assert len(asked) == 6 and {body["model"] for body in asked} == {"Qwen/Qwen3-8B"}
    assert asked[0]["messages"][0]["content"] == collect.SYSTEM
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and rows[0]["messages"][0]["content"].startswith("Compute ")
    assert rows[0]["messages"][1]["content"].startswith("<think>2</think>So:\nFinal answer: ")
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert (counts["wrong"], counts["kept"], counts["tokens_in"], counts["failed"]) == (3, 3, 120, 0)
    assert collect.main(words) == 0 and len(asked) == 6
    assert collect.main([*words, "server.temperature=0.1"]) == 2 and "another file" in capsys.readouterr().err
    assert collect.main(["problems=0", "folder=x"]) == 2 and "problems=0" in capsys.readouterr().err
    assert collect.main(["problem=3", "folder=x"]) == 2 and "problems" in capsys.readouterr().err
    server.shutdown()
    server.server_close()
