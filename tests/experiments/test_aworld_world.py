"""The worlds, questions, tools, scorer and protocol of 7-16, and its environment over tools in this process."""

import asyncio
import json

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from common.sandbox import isolation
from common.schema import ConfigError
from experiments.exp_7_16_aworld.desk import QUOTA, UNAVAILABLE, Conditions, Desk, conditions_of, cut, uniform
from experiments.exp_7_16_aworld.env import BUDGET, EXCLUDED, NEEDS, AWorldEnv, Envs
from experiments.exp_7_16_aworld.hub import Bridge, LocalHub, RecordingHub, ReplayHub, ReplayMiss, Store
from experiments.exp_7_16_aworld.protocol import BadTurn, manual, parse, write
from experiments.exp_7_16_aworld.questions import LEVELS, Call, question
from experiments.exp_7_16_aworld.scorer import answer_in, score
from experiments.exp_7_16_aworld.servers import SERVERS, TOOLS
from experiments.exp_7_16_aworld.tool import Place, ToolError
from experiments.exp_7_16_aworld.world import make_world, world_folder, write_world

WORLD = make_world(0)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    write_world(WORLD, world_folder(folder, 0))
    return folder


@pytest.fixture
def place(root, tmp_path):
    return Place(world_folder(root, 0), tmp_path / "own")


@pytest.fixture(scope="module")
def bridge(root):
    with Bridge(LocalHub(root)) as found:
        yield found


def run(place, tool, /, **arguments):
    return TOOLS[tool].run(place, **arguments)


# Worlds and questions ---------------------------------------------------------------------------------------------------


def test_there_are_enough_servers_and_tools_and_their_constraints_name_tools():
    assert len(SERVERS) >= 12 and len(TOOLS) >= 60
    for tool in TOOLS.values():
        assert tool.text and all(name in TOOLS for name in (*tool.excludes, *([tool.needs] if tool.needs else [])))
        for other in tool.excludes:  # mutual: at least one tool of the other's server excludes this one's
            assert any(name.startswith(tool.server) for name in TOOLS[other].excludes), tool.full


def test_a_world_is_a_function_of_its_number():
    assert make_world(3) == make_world.__wrapped__(3) and make_world(3).digest != make_world(4).digest
    leaders = [company.leader for company in WORLD.companies.values()]
    assert len(set(leaders)) == len(leaders)


def test_the_shortest_plan_of_every_question_leads_to_its_answer(place):
    seen = dict.fromkeys(LEVELS, 0)
    for number in range(150):
        asked = question(WORLD, number)
        seen[asked.level] += 1
        assert len(asked.plan) in LEVELS[asked.level]
        replies = [run(place, call.tool, **call.arguments) for call in asked.plan]
        assert asked.answer in replies[-1].replace(".", "").split(), (asked, replies)
    assert set(seen.values()) == {50}


def test_what_a_later_call_needs_stands_in_the_question_or_in_an_earlier_reply(place):
    for number in range(60):
        asked = question(WORLD, number)
        known = asked.text.replace("?", "")
        for call in asked.plan:
            given = " ".join(map(str, call.arguments.values()))
            words = given.replace("+", " ").replace(".png", "").replace(".wav", "").split()
            fixed = ("staff.csv", "memo.docx", "deck.pptx", "sales.xlsx", "report.pdf", "age", "city", "population")
            assert all(word in known or word in fixed for word in words), (asked, call)
            known += " " + run(place, call.tool, **call.arguments)


# Tools ------------------------------------------------------------------------------------------------------------------


def test_every_format_is_written_and_read_back(place):
    person, company = next(iter(WORLD.people.values())), next(iter(WORLD.companies.values()))
    text = f"{company.name} is led by {company.leader}."
    for kind, reader in (("docx", "docx_find"), ("pptx", "pptx_find"), ("pdf", "pdf_find")):
        run(place, f"documents.{kind}_write", file=f"new.{kind}", text=f"{text}; nothing (at) all")
        assert run(place, f"documents.{reader}", file=f"new.{kind}", word=company.name) == text
    assert run(place, "documents.pdf_page", file="new.pdf", number=2) == "nothing (at) all"
    run(place, "tables.csv_write", file="new.csv", text="name points; Ada 7; Leo 8")
    assert run(place, "tables.total", file="new.csv", column="points") == "15"
    run(place, "tables.xlsx_write", file="new.xlsx", text="name points; Ada 7; Leo 8")
    assert run(place, "tables.cell", file="new.xlsx", sheet="Sheet", key="Leo") == "8"
    assert run(place, "images.read", file=f"{company.name}.png") == f"{company.name} costs {company.price}"
    assert run(place, "audio.transcribe", file=f"{company.name}.wav") == str(company.code)
    assert run(place, "tables.lookup", file="staff.csv", key=person.name, column="age") == str(person.age)


def test_memory_and_calendar_last_for_the_episode_alone(place, root, tmp_path):
    name = next(iter(WORLD.people))
    run(place, "memory.put", key="a", text="one")
    run(place, "calendar.add", name=name, day="Sunday")
    assert (run(place, "memory.get", key="a"), run(place, "calendar.when", name=name)) == ("one", "Sunday")
    other = Place(world_folder(root, 0), tmp_path / "other")
    assert run(other, "memory.keys") == "none"
    assert run(other, "calendar.when", name=name) == WORLD.people[name].day


@pytest.mark.parametrize("name", ["../w0/staff.csv", "/etc/passwd", "", "a\0b", "site/../../x", "x" * 300])
def test_no_file_name_leads_out_of_the_world(place, name):
    with pytest.raises(ToolError):
        run(place, "shell.read" if name.endswith("csv") else "documents.docx_read", file=name)
    with pytest.raises(ToolError):
        place.write(name, b"x")


def test_broken_files_are_answers_not_crashes(place):
    for ending in ("xlsx", "docx", "pptx", "pdf", "png", "wav"):
        place.write(f"bad.{ending}", b"PK\x03\x04 not really")
    for name, arguments in (
        ("tables.sheets", {"file": "bad.xlsx"}), ("documents.docx_read", {"file": "bad.docx"}),
        ("documents.pptx_slide", {"file": "bad.pptx", "number": 1}), ("documents.pdf_pages", {"file": "bad.pdf"}),
        ("images.read", {"file": "bad.png"}), ("audio.length", {"file": "bad.wav"}), ("tables.rows", {"file": "bad.xlsx"}),
    ):  # fmt: skip
        with pytest.raises(ToolError):
            run(place, name, **arguments)


def test_s09_code_runs_in_the_sandbox_on_copies_or_not_at_all(place):
    if not isolation().strong:
        with pytest.raises(ToolError, match="no sandbox"):
            run(place, "shell.python", code="print(1)")
        return
    assert run(place, "shell.python", code="print(open('staff.csv').readline().strip())") == "name,age,city"
    assert run(place, "shell.run", command="rm staff.csv; ls | grep -c csv || true") == "0"
    assert run(place, "tables.columns", file="staff.csv") == "name age city"
    with pytest.raises(ToolError, match="ZeroDivisionError"):
        run(place, "shell.python", code="1/0")


# Conditions -------------------------------------------------------------------------------------------------------------


def ask(desk, name, meta=None, **arguments):
    return asyncio.run(desk.call(name, arguments, meta or {}))


def test_quotas_and_failures_follow_from_the_call_and_its_number(root):
    desk = Desk(SERVERS["papers"], root, Conditions(quota=2))
    assert [ask(desk, "top").text == QUOTA for _ in range(3)] == [False, False, True]
    assert ask(desk, "top", {"aworld/episode": "other"}).text != QUOTA
    flaky = [Desk(SERVERS["papers"], root, Conditions(failure_rate=0.5)) for _ in range(2)]
    met = [[ask(desk, "top", {"aworld/draw": 7}).text == UNAVAILABLE for _ in range(12)] for desk in flaky]
    assert met[0] == met[1] and 0 < sum(met[0]) < 12  # a repeated call meets a new draw, a repeated episode the same ones
    share = sum(uniform("failure", number) < 0.2 for number in range(5000)) / 5000
    assert abs(share - 0.2) < 0.02


def test_conditions_are_checked():
    assert conditions_of({"all": {"quota": 3}, "papers": {"quota": 4}}, "papers") == Conditions(quota=4)
    with pytest.raises(ValueError, match=r"conditions\.web\.speed"):
        conditions_of({"all": {"speed": 3}}, "web")
    with pytest.raises(ConfigError):
        Conditions(failure_rate=1.0)


def test_whatever_is_wrong_with_a_call_is_an_answer(root, monkeypatch):
    desk = Desk(SERVERS["papers"], root, Conditions())
    assert ask(desk, "nothing").failed
    assert ask(desk, "year").text.startswith("error: wrong arguments")
    assert ask(desk, "year", paper=3).text == "error: paper must be string"
    assert ask(desk, "top", {"aworld/episode": "../x"}).text == "error: bad episode"
    assert ask(desk, "top", {"aworld/world": 99}).text == "error: no such world"
    monkeypatch.setattr("experiments.exp_7_16_aworld.servers.library.index", lambda place: 1 / 0)
    assert ask(desk, "top").text == "error: the tool broke"


def test_m06_long_answers_keep_head_and_tail():
    assert cut("short", 100) == "short"
    found = cut("a" * 5000 + "z" * 5000, 100)
    assert len(found) <= 100 and found[0] == "a" and found[-1] == "z" and "[10000 characters]" in found


# Scorer -----------------------------------------------------------------------------------------------------------------

ACCEPT = [
    ("43", "43"), ("43.0", "43"), ("$1,234", "1234"), ("12 %", "12"), ("-5", "-5"), ("+7", "7"), (".50", "0.5"),
    (" Rome ", "rome"), ("St. Moritz", "st moritz"), ("new york", "NewYork"), ("a, 3", "a,3.0"), ("x ; y", "x;y"),
    ("1,000", "1000"),
]  # fmt: skip
REJECT = [
    ("44", "43"), ("43 apples", "43"), ("", "43"), ("4e1", "40"), ("nan", "43"), ("inf", "43"), ("٤٣", "43"),
    ("0x2b", "43"), ("4 3", "43"), ("43.0001", "43"), ("43 44", "43"), ("43 or 44", "43"), ("Rome Paris", "Rome"), ("", "Rome"),
    ("...", "Rome"), ("a", "a,b"), ("a,b,c", "a,b"), ("b,a", "a,b"), ("a.,b", "a,b"), ("9" * 3000, "9"), ("--5", "5"),
    ("five", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "true"), ACCEPT)
def test_right_answers_are_accepted(given, true):
    assert score(given, true)


@pytest.mark.parametrize(("given", "true"), REJECT)
def test_wrong_answers_are_rejected(given, true):
    assert not score(given, true)


def test_v12_v13_v20_v21_only_the_one_answer_behind_the_reasoning_counts():
    assert answer_in("<think>no</think> so <answer> 43\n</answer> done") == "43"
    assert answer_in("x</think><answer>43</answer>") == "43"
    for text in (
        "43", "<answer>43", "43</answer>", "<answer>43</answer><answer>44</answer>", "<think><answer>43</answer>",
        "<think><answer>43</answer></think>", "</answer>43<answer>", "<answer><answer>43</answer></answer>",
    ):  # fmt: skip
        assert answer_in(text) is None, text
    assert not score(None, "43")


# Protocol ---------------------------------------------------------------------------------------------------------------


def test_calls_are_read_as_they_are_written():
    for number in range(60):
        for call in question(WORLD, number).plan:
            for syntax in ("compact", "json"):
                assert parse(write(call, syntax), TOOLS, syntax) == call
    assert parse("shell.python print(1, 2)", TOOLS) == Call("shell.python", {"code": "print(1, 2)"})
    assert parse("<answer>43</answer>", TOOLS) == "43"
    body = json.dumps({"name": "papers.top", "arguments": {}})
    assert parse(f"<think>hm</think>\n<tool_call>\n{body}\n</tool_call>", TOOLS, "json") == Call("papers.top", {})
    assert len(manual(TOOLS).splitlines()) == len(TOOLS) + 1


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "papers", "papers.none", "papers.top x", "papers.top ", " papers.top", "papers.year", "papers.year ",
        "tables.lookup staff.csv Ada", "archive.open Acme x", "archive.open Acme 2019x", "archive.open Acme ٢٠١٩",
        "calculator.larger 3", "papers.top\npapers.top", "<answer>43</answer> papers.top", "x <answer>43</answer>",
        "<answer>43", "x" * 30_000,
    ],
)  # fmt: skip
def test_what_is_no_turn_is_refused_in_the_compact_spelling(text):
    with pytest.raises(BadTurn):
        parse(text, TOOLS)


@pytest.mark.parametrize(
    "body",
    [
        "", "{", '{"name": "papers.top"}', '{"name": "none", "arguments": {}}', '{"name": "papers.top", "arguments": {"x": 1}}',
        '{"name": "papers.top", "name": "papers.top", "arguments": {}}', '{"name": "papers.year", "arguments": {"paper": 3}}',
        '{"name": "calculator.larger", "arguments": {"a": true, "b": 2}}', "[" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_call_is_refused_in_json(body):
    with pytest.raises(BadTurn):
        parse(f"<tool_call>{body}</tool_call>", TOOLS, "json")
    good = '<tool_call>{"name": "papers.top", "arguments": {}}</tool_call>'
    for text in (good * 2, f"<think>{good}", good.removesuffix("</tool_call>")):
        with pytest.raises(BadTurn):
            parse(text, TOOLS, "json")


# Environment ------------------------------------------------------------------------------------------------------------


def at(bridge, root, number, **options):
    env = AWorldEnv(bridge, root, **options)
    prompt, _ = env.reset(options={"world": 0, "question": number})
    return env, prompt, question(WORLD, number)


def test_gymnasium_finds_no_fault(bridge, root):
    check_env(AWorldEnv(bridge, root), skip_render_check=True)


def test_the_plan_and_the_answer_score_at_every_level(bridge, root):
    for number in range(9):
        env, prompt, asked = at(bridge, root, number)
        assert prompt == f"{asked.text} Budget {asked.cost + 3}."
        for call in asked.plan:
            _, reward, terminated, truncated, info = env.step(write(call))
            assert (reward, terminated, truncated, info["outcome"], info["tool"]) == (0, False, False, "answered", call.tool)
        text, reward, terminated, truncated, info = env.step(f"<answer>{asked.answer}</answer>")
        assert (text, reward, terminated, truncated, info["success"]) == ("right", 1.0, True, False, True)
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step("papers.top")


def test_constraints_refuse_a_call_and_cost_its_turn_alone(bridge, root):
    env, _, asked = at(bridge, root, 2)
    name = next(iter(WORLD.companies))
    first = env.step("browser.open p1")
    assert (first[0], first[4]["outcome"], first[4]["parts"]) == (
        NEEDS, "needs", {"malformed": 0, "refused": 1, "failed": 0, "cost": 0},
    )  # fmt: skip
    assert env.left == asked.cost + 3
    env.step(f"archive.list {name}")
    assert env.step(f"archive.open {name} 2019")[4]["outcome"] == "answered"
    env.step(f"search.find {name}")
    assert env.step("browser.open p1")[0] == EXCLUDED
    env.left = 2
    assert env.step("documents.docx_read memo.docx")[0] == BUDGET
    assert env.left == 2


def test_a_wrong_answer_and_an_endless_episode_do_not_score(bridge, root):
    env, *_ = at(bridge, root, 0)
    assert env.step("<answer>none</answer>")[1:4] == (0.0, True, False)
    env, *_ = at(bridge, root, 0, limit=3)
    steps = [env.step("nonsense") for _ in range(3)]
    assert [step[3] for step in steps] == [False, False, True]
    assert steps[-1][4]["reason"] == "no answer in 3 turns" and steps[0][4]["parts"]["malformed"] == 1


def test_a_price_is_paid_per_unit_of_cost(bridge, root):
    env, _, _ = at(bridge, root, 0, price=0.1)
    assert env.step("search.find Ada")[1] == pytest.approx(-0.1)
    assert env.step("browser.links p1")[1] == pytest.approx(-0.1)
    assert env.step("nonsense")[1] == 0


def test_an_episodes_files_are_gone_when_it_ends(bridge, root):
    env, *_ = at(bridge, root, 0)
    env.step("memory.put a one")
    assert list((root / "episodes").iterdir())
    env.step("<answer>none</answer>")
    assert not list((root / "episodes").iterdir())


def test_many_environments_step_at_once_as_they_would_alone(bridge, root):
    make = Envs(bridge, root)
    envs = [make() for _ in range(6)]
    for number, env in enumerate(envs):
        env.reset(options={"world": 0, "question": number})
    plans = [question(WORLD, number).plan for number in range(6)]
    steps = make.step_all(envs, [write(plan[0]) for plan in plans])
    for number, step in enumerate(steps):
        env, *_ = at(bridge, root, number)
        assert env.step(write(plans[number][0])) == step


def test_pre_trained_models_read_the_tools_and_the_reasons(bridge, root):
    env, prompt, _ = at(bridge, root, 0, syntax="json")
    assert prompt.startswith("Make one call per turn") and "Needs search.find first." in prompt
    call = '<tool_call>{"name": "browser.open", "arguments": {"page": "p1"}}</tool_call>'
    assert "Needs search.find first." in env.step(call)[0]
    assert env.step("hm")[0] == "bad turn: not one call"


# Record and replay ------------------------------------------------------------------------------------------------------


def play(bridge, root, number):
    env = Envs(bridge, root)()
    env.reset(options={"world": 0, "question": number})
    asked = question(WORLD, number)
    return [env.step(text) for text in [*map(write, asked.plan), *map(write, asked.plan), f"<answer>{asked.answer}</answer>"]]


def test_a_recorded_run_is_replayed_exactly_without_any_server(root, tmp_path):
    file = tmp_path / "store.jsonl"
    flaky = {"all": {"failure_rate": 0.3, "quota": 2}}
    with Bridge(RecordingHub(LocalHub(root, flaky), Store(file))) as live:
        recorded = [play(live, root, number) for number in range(12)]
    assert any(step[4]["outcome"] == "passing" for steps in recorded for step in steps)
    with Bridge(ReplayHub(Store(file))) as again:
        assert [play(again, root, number) for number in range(12)] == recorded
        with pytest.raises(ReplayMiss, match="record this run first"):
            play(again, root, 12)
    line, *rest = file.read_text().splitlines()
    row = json.loads(line)
    row["reply"]["text"] = "forged"
    file.write_text("\n".join([json.dumps(row), *rest]) + "\n")
    with pytest.raises(ValueError, match="not the one that was recorded"):
        Store(file)


def test_equal_calls_after_different_pasts_are_kept_apart(root, tmp_path):
    store = Store(tmp_path / "store.jsonl")
    with Bridge(RecordingHub(LocalHub(root), store)) as bridge:
        for text in ("one", "two"):
            env, *_ = at(bridge, root, 0)
            env.step(f"memory.put a {text}")
            assert env.step("memory.get a")[0] == text
    assert len(store.replies) == 4
