"""A server of the protocol that misbehaves as its argument says; speaks raw lines, without the SDK.

`orphan` leaves a process behind that sleeps for 613 seconds.
"""

import json
import os
import signal
import subprocess
import sys
import time

HOW = sys.argv[1]


def send(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def tools():
    names = ["act", "act"] if HOW == "duplicate" else ["act", "quick"]
    return [{"name": name, "description": "", "inputSchema": {"type": "object"}} for name in names]


def text(words):
    return {"content": [{"type": "text", "text": words}], "isError": False}


def on_call(number, name):
    if name == "quick":
        return send({"jsonrpc": "2.0", "id": number, "result": text(f"quick from {HOW}")})
    if HOW == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    if HOW == "crash":
        os._exit(3)
    if HOW == "orphan":
        subprocess.Popen(["sleep", "613"])
        os._exit(3)
    if HOW == "malformed":
        print("{not json", flush=True)
        print("\x00\xff [1, 2", flush=True)
        return send({"jsonrpc": "2.0", "id": 10**9, "result": {}})
    if HOW == "wrong-type":
        return send({"jsonrpc": "2.0", "id": number, "result": {"content": "no list", "isError": "maybe"}})
    if HOW == "noisy":
        print("Welcome to the server!\n\nloading ...", flush=True)
    if HOW == "late":
        time.sleep(2.5)
        return send({"jsonrpc": "2.0", "id": number, "result": text("the late reply")})
    if HOW == "huge":
        return send({"jsonrpc": "2.0", "id": number, "result": text("x" * 5_000_000)})
    if HOW == "parts":
        return send({"jsonrpc": "2.0", "id": number, "result": {"content": [{"type": "text", "text": "y"}] * 10_000}})
    return send({"jsonrpc": "2.0", "id": number, "result": text(f"act from {HOW}")})


def on_list(number, params):
    if HOW == "endless":
        cursor = str(int((params or {}).get("cursor") or 0) + 1)
        tool = {"name": f"t{cursor}", "inputSchema": {"type": "object"}}
        return send({"jsonrpc": "2.0", "id": number, "result": {"tools": [tool], "nextCursor": cursor}})
    return send({"jsonrpc": "2.0", "id": number, "result": {"tools": tools()}})


def main():
    if HOW == "dead":
        sys.exit("cannot start")
    if HOW == "silent":
        time.sleep(600)
    for line in sys.stdin:
        message = json.loads(line)
        method, number = message.get("method"), message.get("id")
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": HOW, "version": "1"}}
            send({"jsonrpc": "2.0", "id": number, "result": info})
        elif method == "tools/list":
            on_list(number, message.get("params"))
        elif method == "tools/call":
            on_call(number, message["params"]["name"])
        elif method == "ping":
            send({"jsonrpc": "2.0", "id": number, "result": {}})


if __name__ == "__main__":
    main()
