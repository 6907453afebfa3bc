"""The supervisor of 7-16 against servers that hang, crash, lie and drown it (known faults M01 to M08)."""

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
from mcp.client.stdio import StdioServerParameters

from experiments.exp_7_16_aworld.desk import Patience
from experiments.exp_7_16_aworld.supervisor import LOST, ServerFault, Supervisor

SERVER = Path(__file__).with_name("hostile_server.py")
PATIENCE = Patience(start_s=60.0, call_s=1.0, ping_s=1.0, pause_s=0.0)
LONG = Patience(start_s=60.0, call_s=60.0, ping_s=60.0, pause_s=0.0)


def commands(*kinds):
    return {kind: StdioServerParameters(command=sys.executable, args=["-S", str(SERVER), kind]) for kind in kinds}


def play(coroutine_of, *kinds, patience=PATIENCE):
    """Runs coroutine_of(supervisor), stops everything, and checks that no process and no descriptor is left."""
    processes, descriptors = set(psutil.Process().children(recursive=True)), len(os.listdir("/dev/fd"))

    async def run():
        with open(os.devnull, "w", encoding="utf-8") as errors:
            supervisor = Supervisor(commands(*kinds), patience, errors)
            try:
                return await coroutine_of(supervisor)
            finally:
                await supervisor.stop()

    found = asyncio.run(run())
    assert set(psutil.Process().children(recursive=True)) <= processes
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "613"]]
    assert len(os.listdir("/dev/fd")) <= descriptors
    return found


def call(supervisor, kind, tool="act"):
    return supervisor.call(kind, tool, {}, {})


@pytest.mark.parametrize("kind", ["hang", "crash", "orphan", "malformed"])
def test_m01_m02_a_lost_call_is_a_reply_in_time_and_the_next_call_meets_a_server_that_works(kind):
    async def script(supervisor):
        await supervisor.start()
        began = time.monotonic()
        lost = await call(supervisor, kind)
        took = time.monotonic() - began
        return lost, took, await call(supervisor, kind, "quick"), supervisor.lost, supervisor.restarts

    lost, took, after, count, restarts = play(script, kind)
    assert (lost.text, lost.failed, lost.lost) == (LOST, True, True)
    assert took < 20  # a second for the call and one for a sign of life, on a machine that has other things to do
    assert (after.text, after.failed) == (f"quick from {kind}", False)
    assert count == 1 and restarts == (0 if kind == "malformed" else 1)  # a server that answers pings goes on


def test_an_answer_of_the_wrong_shape_is_a_lost_call():
    async def script(supervisor):
        return await call(supervisor, "wrong-type"), await call(supervisor, "wrong-type", "quick")

    lost, after = play(script, "wrong-type", patience=LONG)
    assert lost.lost and after.text == "quick from wrong-type"


def test_m03_banners_on_stdout_are_passed_over():
    async def script(supervisor):
        return await call(supervisor, "noisy")

    assert play(script, "noisy", patience=LONG).text == "act from noisy"


@pytest.mark.parametrize(("kind", "noted"), [("huge", "[5000000 characters]"), ("parts", "[10000 parts]")])
def test_m06_a_huge_result_is_cut_with_its_size_noted(kind, noted):
    async def script(supervisor):
        return await call(supervisor, kind)

    reply = play(script, kind, patience=LONG)
    assert noted in reply.text and len(reply.text) <= 20_000 and not reply.failed


def test_m07_equal_tool_names_of_two_servers_stay_apart_and_of_one_are_refused():
    async def script(supervisor):
        both = [(await call(supervisor, kind)).text for kind in ("one", "two")]
        await supervisor.keepers["one"].stop()
        with pytest.raises(ServerFault, match="lists the tool 'act' twice"):
            await supervisor.start(["duplicate"])
        return both, (await call(supervisor, "two")).text, await call(supervisor, "none")

    both, after, unknown = play(script, "one", "two", "duplicate", patience=LONG)
    assert (both, after) == (["act from one", "act from two"], "act from two")
    assert unknown.failed and unknown.text == "error: no such server"


def test_m08_a_late_reply_never_meets_another_call():
    async def script(supervisor):
        lost = await call(supervisor, "late")
        return lost, [await call(supervisor, "late", "quick") for _ in range(3)]

    lost, after = play(script, "late")
    assert lost.lost and {reply.text for reply in after if not reply.lost} <= {"quick from late"}
    assert not after[-1].lost


def test_servers_that_cannot_start_are_named_and_cost_their_own_calls_alone():
    async def script(supervisor):
        faults = []
        for kind in ("dead", "endless"):
            with pytest.raises(ServerFault, match=kind):
                await supervisor.start([kind])
            faults.append(await call(supervisor, kind))
        return faults, await call(supervisor, "one"), await supervisor.health()

    faults, fine, health = play(script, "dead", "endless", "one", patience=LONG)
    assert all(reply.lost for reply in faults) and fine.text == "act from one"
    assert health == {"dead": False, "endless": False, "one": True}


def test_m01_a_server_that_is_silent_at_the_handshake_is_given_up():
    async def script(supervisor):
        with pytest.raises(ServerFault, match="silent does not start"):
            await supervisor.start()

    play(script, "silent", patience=Patience(start_s=1.0, pause_s=0.0))


def test_restart_begins_a_new_process():
    async def script(supervisor):
        keeper = supervisor.keepers["one"]
        await supervisor.start()
        await keeper.restart()
        return keeper.starts, await supervisor.health()

    assert play(script, "one", patience=LONG) == (2, {"one": True})
