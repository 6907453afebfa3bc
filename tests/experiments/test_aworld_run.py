"""7-16 through its public command, its splits and rows, its plan for a cluster, and play by another model."""

import functools
import json
import re
import shutil
from pathlib import Path

import gymnasium
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import episodes as episodes_module
from common.backends import verl_worker
from common.config import compose
from common.episodes import run_episodes
from common.models import DecoderConfig, build_decoder
from common.rollout import Completion
from common.schema import ConfigError
from common.seeding import generator, python_random
from common.tokenizers import PhraseEncoder, encode_feedback, encode_prompt
from experiments.exp_7_16_aworld import audit, cluster, data, stages
from experiments.exp_7_16_aworld.env import Envs
from experiments.exp_7_16_aworld.evaluate import call_metrics, episode_metrics
from experiments.exp_7_16_aworld.hub import Bridge, LocalHub
from experiments.exp_7_16_aworld.play import play, tally
from experiments.exp_7_16_aworld.protocol import write
from experiments.exp_7_16_aworld.questions import question
from experiments.exp_7_16_aworld.scripts import PERFECT, Mix, scripted_episode
from experiments.exp_7_16_aworld.servers import SERVERS, TOOLS
from experiments.exp_7_16_aworld.settings import Settings
from experiments.exp_7_16_aworld.world import make_world, world_folder, write_world
from tests.experiments.harness import command, kill_when, records, run

EXPERIMENT = "exp_7_16_aworld"
SMOKE = compose("7-16", Settings, ["scale=smoke"])
TIMED = ("speed_up", "rollout_share", "rollout_share_many")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All arms of the main study, undisturbed, over servers."""
    folder = tmp_path_factory.mktemp("whole")
    run(command(EXPERIMENT, folder, "workers=1"))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    for world in (0, 1000):
        write_world(make_world(world), world_folder(folder, world))
    return folder


def test_every_arm_ends_with_its_numbers(whole):
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]): row["value"] for row in rows if row["final"]}
    for arm in ("start", "grpo", "sft"):
        wanted = {"success", "reward", "tool_success", "calls_per_solved", "obeyed", "wasted", "level_3", "kl_start"}
        assert {(arm, "questions", metric) for metric in wanted} <= final.keys(), arm
        held = [final[arm, "train", name] for name in ("lost_calls", "restarts", "leaked_processes", "leaked_descriptors")]
        assert held == [0, 0, 0, 0], arm
    assert final["start", "train", "episodes"] == 6 and final["grpo", "train", "episodes"] >= 6 + 8
    assert all(final["pace", "train", metric] > 0 for metric in TIMED)
    assert final["clients", "train", "other_tools"] == 1.0
    (report,) = (whole / "results").rglob("report.md")
    for heading in ("Answers", "Calls", "What the servers bore"):
        assert heading in report.read_text()


def test_killed_in_the_middle_of_an_arm_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    shutil.copytree(whole / "runs/stages", tmp_path / "runs/stages")
    line = command(EXPERIMENT, tmp_path, "workers=1", "arms=[grpo]")
    kill_when(line, f"{tmp_path}/runs/7-16/smoke/main/base/grpo/seed100/state.pt")
    run(line)
    undisturbed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] == "grpo"]
    assert undisturbed == records(tmp_path).splitlines()


def test_a_trained_model_loads_with_plain_transformers(whole):
    folder = whole / "runs/7-16/smoke/main/base/grpo/seed100/model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = "tables.lookup staff.csv Ada age"
    assert model.num_parameters() > 10_000 and tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_audit_finds_no_hole(capsys):
    assert audit.main() == 0, capsys.readouterr().out


def test_the_splits_share_no_world():
    numbers = [number for split in data.SPLITS.values() for number in split]
    assert len(numbers) == len(set(numbers))
    drawn = {task["world"] for step in range(50) for task in data.training_tasks(6, 100, step, 16)}
    assert drawn <= set(data.SPLITS["train"])
    assert {task["world"] for task in data.tasks("test", 60, 2)} == {600, 601}
    assert data.training_tasks(6, 100, 0, 16)[:4] == data.training_tasks(6, 100, 0, 4)


def test_perfect_scripts_are_right_and_mixed_ones_err(root):
    tokenizer, flaky = data.build_tokenizer(), {"all": {"failure_rate": 0.05}}
    encode = PhraseEncoder(tokenizer)
    start, reply = (functools.partial(f, tokenizer) for f in (encode_prompt, encode_feedback))
    with Bridge(LocalHub(root, flaky)) as bridge:
        env = Envs(bridge, root)()
        for mix, low, high in ((PERFECT, 0.97, 1.0), (Mix(), 0.3, 0.9)):
            tasks = [{"world": 1000, "question": number} for number in range(90)]
            episodes = [scripted_episode(env, task, mix, encode, start, reply, 0) for task in tasks]
            share = sum(episode.success for episode in episodes) / len(episodes)
            assert low <= share <= high, share
            outcomes = {info["outcome"] for episode in episodes for info in episode.infos}
            assert ("needs" in outcomes) == (mix is not PERFECT) and "passing" in outcomes and "malformed" not in outcomes
            assert data.unread(tokenizer, [(episode.ids, episode.mask) for episode in episodes]) < 0.005


def test_rows_of_scripts_are_those_of_the_rollout(root, monkeypatch):
    """A policy that writes the script's own tokens gets the script's row, token for token."""
    tokenizer = data.build_tokenizer()
    (row,) = data.scripted_rows(tokenizer, root, "start", 1, PERFECT, 1, 0, {}, {})
    shape = DecoderConfig(hidden=16, layers=1, heads=2, kv_heads=2, feedforward=24, max_length=512)
    model, ids, mask = build_decoder(shape, tokenizer, 0), *row

    def fake(model, prompts, *, max_new_tokens, stop_ids, **_):
        found = []
        for prompt in prompts:
            end = next(i for i in range(len(prompt), len(ids)) if ids[i] in stop_ids) + 1
            found.append(Completion(ids[len(prompt) : end], [0.0] * (end - len(prompt)), True))
        return found

    monkeypatch.setattr(episodes_module, "sample", fake)
    drawn = python_random(0, "scripts", "start")
    task = {"world": drawn.choice([1000]), "question": drawn.randrange(data.QUESTIONS // 3) * 3}
    assert tokenizer.decode(ids[1 : mask.index(1)]).startswith(question(make_world(1000), task["question"]).text)
    with Bridge(LocalHub(root)) as bridge:
        (episode,) = run_episodes(model, tokenizer, Envs(bridge, root), [task], max_turns=14, generator=generator(0))
    assert (episode.ids, episode.mask, episode.success) == (ids, mask, True)


def test_metrics_of_calls_by_hand(root):
    with Bridge(LocalHub(root)) as bridge:
        make = Envs(bridge, root)
        number = next(n for n in range(300) if "seat of" in question(make_world(0), n).text and n % 3 == 0)
        asked = question(make_world(0), number)
        turns = iter(["nonsense", "browser.open p1", "calendar.free", write(asked.plan[0]), f"<answer>{asked.answer}</answer>"])
        episode = play(lambda key, transcript: next(turns), make, {"world": 0, "question": number})
        given_up = play(lambda key, transcript: "<answer>none</answer>", make, {"world": 0, "question": number})
    both = [episode, given_up]
    found = call_metrics(both)
    assert found["tool_success"] == (2 / 4, 4) and found["obeyed"] == (2 / 3, 3)
    assert found["wasted"] == (2 / 3, 3) and found["within_budget"] == (1.0, 3)
    assert found["calls_per_solved"] == (4.0, 1) and found["extra_calls"] == (3.0, 1) and found["recovered"] == (None, 0)
    values = episode_metrics(both)
    assert values["success"] == [1, 0] and values["malformed"] == [1, 0] and values["refused"] == [1, 0]
    assert values["cost"] == [2, 0] and values["calls"] == [4, 0]
    assert tally(both)["success"] == 0.5


def test_another_model_plays_by_transcript(root):
    asked, seen = question(make_world(0), 1), []

    def answer(key, transcript):
        seen.append((key, transcript))
        turn = len(seen) - 1
        end = f"<think>so</think><answer>{asked.answer}</answer>"
        return write(asked.plan[turn], "json") if turn < len(asked.plan) else end

    with Bridge(LocalHub(root)) as bridge:
        episode = play(answer, Envs(bridge, root, syntax="json"), {"world": 0, "question": 1})
    assert episode.success and [key for key, _ in seen] == [f"0-1-{turn}" for turn in range(len(asked.plan) + 1)]
    assert asked.text in seen[-1][1] and seen[-1][1].count("You wrote:") == len(asked.plan)


def test_a_run_is_recorded_over_servers_and_replayed_without_them(tmp_path, monkeypatch):
    own = [f"runs_dir={tmp_path / 'runs'}", f"store={tmp_path / 'calls.jsonl'}"]
    found = {}
    for tools in ("record", "replay"):
        settings = compose("7-16", Settings, ["scale=smoke", "arms=[start]", f"tools={tools}", *own])
        with Bridge(stages.hub_of(settings, stages.worlds_of(settings), tmp_path, settings.conditions)) as bridge:
            make = Envs(bridge, stages.worlds_of(settings))
            turns = ["memory.put a b", "memory.get a", "calculator.larger 3 4", "<answer>4</answer>"]
            env = make()
            env.reset(options={"world": 600, "question": 0})
            found[tools] = [env.step(turn) for turn in turns]
        monkeypatch.setattr(stages, "ServerHub", None)
    assert found["record"] == found["replay"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tools=replay", "record and replay need a file"),
        ("conditions.web.quota=3", "conditions"),
        ("conditions.all.speed=3", "speed"),
        ("branches.grpo.method=ppo", "method"),
        ("served=[none]", "served"),
        ("worlds.test=0", "worlds.test"),
        ("syntax=xml", "syntax"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(change, said):
    with pytest.raises(ConfigError, match=said):
        compose("7-16", Settings, ["scale=smoke", change])


def test_the_plan_for_a_cluster_and_its_tasks(tmp_path):
    own = [f"runs_dir={tmp_path}", "worlds={start: 1, train: 1, validation: 1, test: 1}", "flops=1.3e18"]
    settings = compose("7-16", Settings, ["scale=cluster", *own])
    planned = cluster.plan(settings, "grpo", 100)
    assert planned.estimate.steps >= 1 and planned.algo.max_turns == 16 and planned.algo.clip_high == 0.28
    with pytest.raises(ConfigError, match="method=sft"):
        cluster.plan(compose("7-16", Settings, ["scale=cluster", "arms=[grpo]"]), "sft", 100)
    worlds = stages.worlds_of(settings)
    arguments = {"worlds": str(worlds), "syntax": "json"}
    row = verl_worker.task_row("7-16", "train", 0, {"world": 0, "question": 3}, cluster.ENV, arguments)
    assert "What is" in row["prompt"][0]["content"] and json.loads(row["reward_model"]["ground_truth"])["question"] == 3
    env = gymnasium.make(cluster.ENV_ID, worlds=str(worlds), disable_env_checker=True)
    env.reset(options={"world": 0, "question": 3})
    answer = question(make_world(0), 3).answer
    assert env.step(f"<answer>{answer}</answer>")[1] == 1.0
    env.close()


def test_the_readme_counts_its_tools():
    text = (Path(__file__).parents[2] / "experiments" / EXPERIMENT / "README.md").read_text()
    assert set(re.findall(r"(\d+) tools", text)) == {str(len(TOOLS)), "126"} and len(SERVERS) == 13
