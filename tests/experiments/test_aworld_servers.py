"""The servers of 7-16 as processes, through the official SDK and through a client of someone else's making."""

import asyncio
import json
import os
import subprocess
import sys

import psutil
import pytest

from experiments.exp_7_16_aworld.clients import listed_and_called
from experiments.exp_7_16_aworld.desk import conditions_of
from experiments.exp_7_16_aworld.env import Envs
from experiments.exp_7_16_aworld.hub import Bridge, LocalHub, ServerHub
from experiments.exp_7_16_aworld.protocol import write
from experiments.exp_7_16_aworld.questions import question
from experiments.exp_7_16_aworld.supervisor import ROOT, own_command
from experiments.exp_7_16_aworld.world import make_world, world_folder, write_world

FLAKY = {"all": {"failure_rate": 0.2, "quota": 4}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    write_world(make_world(0), world_folder(folder, 0))
    return folder


def played(bridge, root, numbers):
    """Episodes that follow the shortest plans side by side: what each step said."""
    make = Envs(bridge, root)
    envs = [make() for _ in numbers]
    plans = [question(make_world(0), number).plan for number in numbers]
    for env, number in zip(envs, numbers, strict=True):
        env.reset(options={"world": 0, "question": number})
    found = []
    for turn in range(3):
        found.append(make.step_all(envs, [write(plan[min(turn, len(plan) - 1)]) for plan in plans]))
    for env in envs:
        env.close()
    return found


def test_servers_answer_as_the_tools_in_this_process_do_and_leave_nothing_behind(root):
    numbers = [0, 3, 6, 9]  # questions of one call: few servers start
    with Bridge(LocalHub(root, FLAKY)) as local:
        expected = played(local, root, numbers)
    children, descriptors = set(psutil.Process().children(recursive=True)), len(os.listdir("/dev/fd"))
    hub = ServerHub(root, FLAKY)
    with Bridge(hub) as bridge:
        assert played(bridge, root, numbers) == expected
        assert hub.supervisor.lost == hub.supervisor.restarts == 0
    assert set(psutil.Process().children(recursive=True)) <= children
    assert len(os.listdir("/dev/fd")) <= descriptors


def test_a_killed_server_is_one_lost_call(root):
    with Bridge(ServerHub(root)) as bridge:
        env = Envs(bridge, root)()
        env.reset(options={"world": 0, "question": 0})
        assert env.step("search.count x")[4]["outcome"] == "answered"
        (server,) = [child for child in psutil.Process().children() if "search" in child.cmdline()]
        server.kill()
        assert env.step("search.count x")[4]["outcome"] == "lost"
        assert env.step("search.count x")[4]["outcome"] == "answered"


def test_servers_end_when_their_client_is_killed(root):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from experiments.exp_7_16_aworld.hub import Bridge, ServerHub\n"
        "bridge = Bridge(ServerHub(Path(sys.argv[1])))\n"
        "bridge.wait(bridge.hub.supervisor.start(['papers', 'memory'])); print('ready', flush=True); time.sleep(600)"
    )
    client = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert client.stdout.readline() == "ready\n"
    servers = psutil.Process(client.pid).children(recursive=True)
    assert len(servers) == 2
    client.kill()
    client.wait()
    client.stdout.close()
    assert psutil.wait_procs(servers, timeout=60)[1] == []


def test_a_client_of_someone_elses_making_lists_and_calls_every_tool_of_a_server(root):
    counts = asyncio.run(listed_and_called(root, 0, ["calendar", "tables"]))
    assert counts == (14, 14)


def test_m03_m05_only_the_protocol_goes_to_stdout_and_bad_frames_are_survived(root):
    """A printing tool, ten frames that are none, then a good one."""
    line = own_command("memory", root, conditions_of({}, "memory"))
    shake = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    frames = [json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": shake})]
    frames.append(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}))
    frames += ["{not json", "[]", '"x"', "null", "", "{}", '{"id": 5}', "\x00", "[1, 2", '{"jsonrpc": "1.0"}']
    call = {"name": "keys", "arguments": {}}
    frames.append(json.dumps({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([line.command, *line.args], cwd=line.cwd, text=True, **pipes)
    process.stdin.write("\n".join(frames) + "\n")
    process.stdin.flush()
    answers = []
    while not any(answer.get("id") == 2 for answer in answers):
        answers.append(json.loads(process.stdout.readline()))
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stdout.close()
    assert answers[-1]["result"]["content"] == [{"type": "text", "text": "none"}]
