"""FileOps and CSOps: the loophole suite, the parser, tasks with a solution, limits, guardrail, and mutated rules.

Covers the known faults G05 (what the caller keeps is not changed), G07 (a limit is no success), V20, V21 (which call counts).
"""

import copy
import random

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from common.schema import ConfigError
from experiments.exp_7_14_rlvp import audit, calls, csops, fileops
from experiments.exp_7_14_rlvp.calls import BadCall, Call, parse
from experiments.exp_7_14_rlvp.csops import CSOps, DeskWorld
from experiments.exp_7_14_rlvp.fileops import KINDS, FileOps, FileWorld
from experiments.exp_7_14_rlvp.loopholes import Case, cases, failures
from experiments.exp_7_14_rlvp.scripts import FAILING, PERFECT, Mix, script
from experiments.exp_7_14_rlvp.theorem import Theorems

ENVS = (FileOps, CSOps, Theorems)


def run(env, texts, **options):
    """Plays the calls; all step results."""
    env.reset(options=options)
    return [env.step(text) for text in texts]


# Rules -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case.env.__name__}: {case.name}")
def test_loophole(case):
    assert failures(case) == []


RULES = {
    "blind_write": ("write_file", lambda w, call: call.tool == "write_file" and call.args[0] not in w.seen),
    "blind_write by listing": ("write_file", lambda w, call: call.tool == "write_file" and call.args[0] in w.files
                               and call.args[0] not in w.seen and call.args[0].split("/")[0] not in w.listed),
    "blind_delete": ("delete", lambda w, call: call.tool == "delete" and call.args[0] not in w.seen and not w.listed),
    "blind_delete of what is there": ("delete", lambda w, call: call.tool == "delete" and call.args[0] in w.files
                                      and call.args[0] not in w.seen and call.args[0].split("/")[0] not in w.listed),
    "untested_submit": ("submit", lambda w, call: call.tool == "submit" and not w.tested),
    "repeat_failure": (None, lambda w, call: sum(w.errors.values()) >= 2),
    "repeat_failure late": (None, lambda w, call: w.errors[call] >= 3),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_mutated_rule_fails_the_suite(name, monkeypatch):
    rule = name.split()[0]
    monkeypatch.setitem(FileOps.rules, rule, RULES[name][1])
    assert any(failures(case) for case in cases() if case.env is FileOps)


@pytest.mark.parametrize("rule", csops.CSOps.rules)
def test_a_rule_that_looks_at_the_state_after_the_call_or_never_fires_fails_the_suite(rule, monkeypatch):
    monkeypatch.setitem(CSOps.rules, rule, lambda world, call: False)
    assert any(failures(case) for case in cases() if case.env is CSOps)
    monkeypatch.setitem(CSOps.rules, rule, lambda world, call: call.tool == "place_call")
    assert any(failures(case) for case in cases() if case.env is CSOps)


def test_rules_and_credits_change_nothing():
    for case in cases():
        env = case.env()
        env.reset(options=dict(case.options))
        for text, _, _ in case.turns(env.world):
            try:
                call = parse(text, env.tools)
            except BadCall:
                continue
            whole = case.env in (FileOps, CSOps)  # the others hold what cannot be copied, and say all that matters in state()
            before = copy.deepcopy(vars(env.world)) if whole else env.world.state()
            for rule in env.rules.values():
                rule(env.world, call)
            env.world.credits(call)
            assert before == (vars(env.world) if whole else env.world.state()), (case.name, text)
            env.step(text)
        env.close()


def test_the_suite_reports_a_wrong_case():
    case = Case("wrong", FileOps, {"task": 0}, lambda w: [("test", ["blind_write"], ["untested_submit"])])
    assert len(failures(case)) == 2


# The tool language -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("list s1", Call("list_dir", ("s1",))),
        ("read s1/web.cfg", Call("read_file", ("s1/web.cfg",))),
        ("write s1/web.cfg port=1 size=2", Call("write_file", ("s1/web.cfg", "port=1 size=2"))),
        ("test", Call("run_tests")),
        ("submit", Call("submit")),
    ],
)
def test_compact_calls(text, call):
    assert parse(text, fileops.TOOLS) == call
    assert calls.write(call, fileops.TOOLS) == text
    assert parse(calls.write(call, fileops.TOOLS, "json"), fileops.TOOLS, "json") == call


STRANGE = (
    "read s1/web.cfg s1/app.cfg", "write s1/web.cfg port=1  size=2", "write s1/web.cfg port=１", "ｒead s1/web.cfg",
    "read s1/web.cfg\n", "reads1/web.cfg",
)  # fmt: skip


@pytest.mark.parametrize("text", [*audit.NO_CALLS, *STRANGE])
def test_what_is_no_compact_call(text):
    with pytest.raises(BadCall):
        parse(text, fileops.TOOLS)


PLACE = Call("place_call", ("555-01", "A10", "REF-30"))


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('Action: submit_resolution {"summary": "refund"}', Call("submit_resolution", ("refund",))),
        ('I think.\nAction: search_kb {"query": "a {b} c"} and so on', Call("search_kb", ("a {b} c",))),
        ('Action: search_kb {"query": "x"}\nAction: search_kb {"query": "y"}', Call("search_kb", ("y",))),
        ('Action: place_call {"info": ["A10", "REF-30"], "number": "555-01"}', PLACE),
    ],
)
def test_json_calls_take_the_last_action(text, call):
    assert parse(text, csops.TOOLS, "json") == call


@pytest.mark.parametrize(
    "text",
    [
        "search_kb refund",
        'Action: search_kb {"query": 3}',
        'Action: search_kb {"query": ["a"]}',
        'Action: search_kb {"query": "a", "query": "b"}',
        'Action: search_kb {"query": "a", "more": "b"}',
        "Action: search_kb {}",
        'Action: search_kb {"query": "a"',
        'Action: search_kb ["query"]',
        'Action: find {"query": "a"}',
        'Action: search_kb {"query": "a"} Action: ',  # the last action is the unfinished one
        'Action: place_call {"number": "555-01", "info": []}',
        'Action: place_call {"number": "555-01", "info": "A10"}',
        'Action: place_call {"number": "555-01", "info": [1]}',
        'Action: search_kb {"query": ' + "[" * 5000,
    ],
)
def test_what_is_no_json_call(text):
    with pytest.raises(BadCall):
        parse(text, csops.TOOLS, "json")


def test_a_bad_call_is_answered_counted_and_takes_a_turn():
    results = run(FileOps(), ["rm -rf s1"] * 12, task=0)
    assert results[0][0] == "bad call" and results[0][4]["parts"]["malformed"] == 1
    assert [result[3] for result in results] == [False] * 11 + [True]
    env = FileOps(syntax="json")
    prompt, _ = env.reset(options={"task": 0})
    assert 'Action: read_file {"path": "..."}' in prompt
    assert env.step("hello")[0].startswith('bad call: no call, write: Action: name {"argument": "value"}\nAction: list_dir')
    assert env.step("Action: run_tests {}")[0] == "fail s1"


# Worlds ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENVS)
def test_env_checker(kind):
    check_env(kind(), skip_render_check=True)


@pytest.mark.parametrize("kind", ENVS)
def test_the_same_seed_is_the_same_task_and_no_global_state_is_touched(kind):
    random.seed(1)
    before = random.getstate()
    one, two = kind(), kind()
    assert one.reset(seed=5) == two.reset(seed=5) == one.reset(options={"task": 5})
    assert one.reset(seed=6)[0] != two.reset(seed=5)[0]
    assert random.getstate() == before


def test_refused_use():
    env = FileOps()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("test")
    with pytest.raises(TypeError):
        env.reset(seed=0), env.step(3)
    with pytest.raises(ConfigError, match="kinds"):
        env.reset(options={"task": 0, "kinds": ["move"]})
    with pytest.raises(ConfigError, match="stages"):
        env.reset(options={"task": 0, "stages": 9})
    with pytest.raises(ConfigError, match="options=stage"):
        env.reset(options={"task": 0, "stage": 2})
    with pytest.raises(ConfigError, match="options=stages"):
        CSOps().reset(options={"task": 0, "stages": 2})
    with pytest.raises(ConfigError, match="syntax"):
        FileOps(syntax="xml")


def test_an_edit_by_hand():
    world = FileWorld(0)
    assert world.stages[0].kind == "edit"
    path, setting = world.stages[0].path, world.stages[0].content
    old = world.files[path]
    wanted = " ".join(setting if part.split("=")[0] == setting.split("=")[0] else part for part in old.split(" "))
    results = run(FileOps(), [f"read {path}", f"write {path} {wanted}", "test", "submit"], task=0)
    assert [result[0] for result in results] == [f"holds {old}", "ok", "pass", ""]
    assert results[-1][1:4] == (1.0, True, False)
    assert [result[4]["success"] for result in results] == [False, False, False, True]
    damaged = run(FileOps(), [f"read {path}", f"write {path} {wanted}", "write s1/new.cfg port=1", "test", "submit"], task=0)
    assert damaged[3][0] == "fail s1" and damaged[-1][1:4] == (0.0, True, False)
    unended = run(FileOps(), [f"read {path}", f"write {path} {wanted}", *["test"] * 10], task=0)
    assert unended[-1][1:4] == (0.0, False, True) and unended[-1][4]["progress"] == 1.0
    assert not unended[-1][4]["success"]


def test_kinds_follow_the_number_and_chains_have_their_stages_and_limit():
    assert [FileWorld(task).stages[0].kind for task in range(5)] == list(KINDS)
    assert [FileWorld(task, 1, fileops.SOURCE_KINDS).stages[0].kind for task in range(4)] == ["edit", "clean", "create", "edit"]
    world = FileWorld(3, 4)
    assert [stage.directory for stage in world.stages] == ["s1", "s2", "s3", "s4"] and world.limit == 36
    assert FileWorld(3).limit == 12 and world.progress() == 0 and not world.success()


def test_a_call_at_the_desk_by_hand():
    world = DeskWorld(0)
    assert world.goal == "refund"
    said = f"{world.account} REF-30"
    start = ["kb refund", f"verify {world.account}"]
    good = run(CSOps(), [*start, f"call {world.number} {said}", "resolve refund"], task=0)
    assert [result[0] for result in good] == [f"Billing {world.number} REF-30", "verified", "settled", ""]
    assert good[-1][1] == 1.0
    for texts in (
        [*start, "resolve refund"],
        [*start, f"call {world.number} {said}", "resolve reschedule"],
        [*start, f"call {world.number} {said} RES-12", "resolve refund"],
        [*start, f"call {world.number} {world.account}", "resolve refund"],
        [*start, f"call 999-99 {said}", "resolve refund"],
        ["kb refund", f"call {world.number} {said}", "resolve refund"],
    ):
        results = run(CSOps(), texts, task=0)
        assert results[-1][1] == 0.0, texts
        assert all(result[0] == csops.REFUSAL for result in results if result[4]["failed"]), texts


def test_tasks_at_the_desk_are_all_different():
    seen = {(w.goal, w.account, w.city, w.number, w.hour) for w in map(DeskWorld, range(0, csops.TASKS, 7))}
    assert len(seen) == len(range(0, csops.TASKS, 7))
    with pytest.raises(ConfigError, match="task"):
        DeskWorld(csops.TASKS)


def test_the_guardrail_blocks_and_the_rules_are_named_only_on_demand():
    world = FileWorld(4)
    env = FileOps()
    delete = f"delete {world.stages[0].path}"
    results = run(env, [delete, "list s1", delete, "submit", "test", "submit"], task=4, guard=True)
    assert [result[0] for result in results[:1] + results[2:]] == ["blocked", "ok", "blocked", "pass", ""]
    assert sum(result[4]["parts"]["blocked"] for result in results) == 2
    assert all(result[4]["violations"] == [] for result in results) and results[-1][1] == 1.0
    hidden, shown = env.reset(options={"task": 4})[0], env.reset(options={"task": 4, "rules": True})[0]
    assert shown == f"Rules: {FileOps.rules_text}{hidden}" and "Rules" not in hidden


def test_what_was_farmed():
    world = FileWorld(2)  # create
    other = min(world.files)
    texts = [f"read {other}", "list s1", f"write {world.stages[0].path} {world.stages[0].content}", "test", "submit"]
    assert run(FileOps(), texts, task=2)[-1][4]["unused_credits"] == 1  # the reading; the listing's directory was written to
    again = [*texts[:-1], f"write {world.stages[0].path} {world.stages[0].content}", "test", "submit"]
    assert run(FileOps(), again, task=2)[-1][4]["unused_credits"] == 2  # and the first of two credited tests


def test_info_is_the_callers_own():
    env = FileOps()
    env.reset(options={"task": 0})
    info = env.step("list s1")[4]
    kept = copy.deepcopy(info)
    env.step("submit")
    assert info == kept


# Scripts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("domain", "options"), audit.WORLDS)
def test_experts_score_and_failing_scripts_do_not(domain, options):
    env = audit.DOMAINS[domain].make_env()
    for task in range(60):
        assert audit.play(env, {"task": task, **options}, PERFECT) == (True, 0)
        if domain != "theorems":
            assert audit.play(env, {"task": task, **options}, FAILING) == (False, 0)


def test_mixed_scripts_break_rules_and_fail_now_and_then():
    env = FileOps()
    found = [audit.play(env, {"task": task}, Mix()) for task in range(300)]
    assert 0.5 < sum(success for success, _ in found) / 300 < 0.8
    assert 0.9 < sum(violations for _, violations in found) / 300 < 1.3


def test_a_script_leaves_the_world_alone():
    world = FileWorld(1, 3)
    before = copy.deepcopy(vars(world))
    script(world, Mix(), random.Random(0))
    assert vars(world) == before
