"""Prompt distillation end to end at smoke scale: every arm, a SIGKILL, the same bytes, a pre-trained folder by path."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.checkpoints import save_model
from common.config import compose
from common.models import DecoderConfig, build_decoder
from experiments.exp_7_08_prompt_distillation import data, rules
from experiments.exp_7_08_prompt_distillation.settings import Settings
from tests.experiments.harness import command, kill_when, records, run

EXPERIMENT = "exp_7_08_prompt_distillation"
FEW = "arms=[distilled,on_policy]"
ALL = f"arms=[{','.join(compose('7-8', Settings, ['scale=smoke']).branches)}]"  # of both studies


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All arms, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run(command(EXPERIMENT, folder, ALL, "workers=1"))
    return folder


def test_every_arm_ends_with_its_numbers_and_times_stand_apart(whole):
    settings = compose("7-8", Settings, ["scale=smoke"])
    rows = [json.loads(line) for line in records(whole).splitlines()]
    final = {(row["arm"], row["split"], row["metric"]): row["value"] for row in rows if row["final"]}
    for arm, branch in settings.branches.items():
        wanted = {("test", metric) for metric in ("success", "fidelity", "no_label", "tokens_in", "tokens_out", "inherited")}
        wanted |= {("tail", "success"), ("teacher_wrong", "success"), ("kind/mark", "success"), ("label/ot", "success")}
        wanted |= {("trained", "fidelity"), ("test", "overlap")} if branch.method != "none" else set()
        wanted |= {("changed", "success"), ("affected", "success")} if branch.on_changed else set()
        assert {(arm, *place) for place in wanted} <= set(final), arm
        assert branch.method == "none" or final[arm, "test", "overlap"] == 0
    assert final["teacher", "test", "fidelity"] + final["teacher", "test", "no_label"] == 1
    assert 0 <= final["teacher", "test", "self_agreement"] <= final["teacher", "test", "fidelity"]
    assert not any(row["metric"].startswith("time/") for row in rows)
    (times,) = (whole / "results").rglob("times.jsonl")
    timed = {(row["arm"], row["metric"]) for row in map(json.loads, times.read_text().splitlines())}
    assert {(arm, "time/speedup_one") for arm, branch in settings.branches.items() if branch.timed} <= timed


def test_costs_count_labelling_where_the_teacher_labelled(whole):
    (provenance,) = (whole / "results").rglob("provenance.json")
    written = json.loads(provenance.read_text())
    assert written["failed"] == []
    cells = {cell["arm"]: cell for cell in written["cells"]}
    assert cells["before"]["flops"] == 0 and cells["gold"]["tokens_forward"] == 0 < cells["distilled"]["tokens_forward"]
    assert cells["gold"]["tokens_trained"] == cells["distilled"]["tokens_trained"] > 0
    assert cells["distilled"]["flops"] > cells["gold"]["flops"] > cells["small_gold"]["flops"] > 0
    assert cells["inputs_250"]["tokens_forward"] < cells["distilled"]["tokens_forward"]


def test_killed_in_the_middle_it_ends_with_the_records_of_an_undisturbed_run(whole, tmp_path):
    """The command is killed as soon as the on-policy arm has a checkpoint, and started again."""
    kill_when(command(EXPERIMENT, tmp_path, FEW, "workers=1"), f"{tmp_path}/runs/7-8/smoke/main/*/on_policy/seed100/state.pt")
    assert not list((tmp_path / "results").rglob("records.jsonl"))
    run(command(EXPERIMENT, tmp_path, FEW, "workers=1"))
    undisturbed = [line for line in records(whole).splitlines() if json.loads(line)["arm"] in ("distilled", "on_policy")]
    assert sorted(undisturbed) == sorted(records(tmp_path).splitlines())


def test_a_student_loads_with_plain_transformers(whole):
    (folder,) = (whole / "runs").glob("7-8/smoke/main/base/distilled/seed100/model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size and torch.isfinite(model(torch.tensor([[1, 5, 6]])).logits).all()


class Answers(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that knows the language of each sentence, which is its first word."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        label = asked.rsplit("Text: ", 1)[1].split()[0]
        message = {"message": {"content": label, "reasoning_content": "It says so."}, "finish_reason": "stop"}
        body = json.dumps({"choices": [message], "usage": {"prompt_tokens": 50, "completion_tokens": 5}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_teacher_on_a_server_a_readers_sentences_and_a_student_with_an_adapter(tmp_path, monkeypatch):
    """The GPU scale's path on a tiny folder."""
    tokenizer = data.build_tokenizer()
    shape = DecoderConfig(hidden=16, layers=1, heads=1, kv_heads=1, feedforward=16, max_length=4096, tied=True)
    save_model(build_decoder(shape, tokenizer, 0), tokenizer, tmp_path / "student")
    lines = [f"{label}\t{label} {word}" for label in ("en", "fr", "de") for word in rules.words()[:40]]
    (tmp_path / "sentences.tsv").write_text("\n".join(lines), encoding="utf-8")
    paths = {"model_path": "student", "small_path": "student", "sentences": "sentences.tsv"}
    changes = [f"{key}={tmp_path / name}" for key, name in paths.items()]
    changes += ["device=cpu", "dtype=float32", "sampling.max_new_tokens=4", "inputs=20", "student_tokens=300"]
    changes += ["teacher=server", "server.model=m", "server.requests_per_minute=100000", "lora.sft_rank=2"]
    changes += ["arms=[teacher,small]"]
    changes += ["evaluation.items=10", "evaluation.timed=1", "evaluation.timed_batch=2", "evaluation.repeats=1"]
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("TEACHER_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        run(command(EXPERIMENT, tmp_path, "workers=1", *changes, scale="gpu"))
        server.shutdown()
    final = {(row["arm"], row["split"], row["metric"]): row["value"] for row in map(json.loads, records(tmp_path).splitlines())}
    assert final["teacher", "test", "success"] == 1 and final["teacher", "test", "tokens_in"] == 50
    assert final["small", "train", "unlabelled"] == 0 and ("small", "test", "fidelity") in final
    (provenance,) = (tmp_path / "results").rglob("provenance.json")
    cost = {cell["arm"]: cell for cell in json.loads(provenance.read_text())["cells"]}
    assert cost["small"]["tokens_trained"] >= 300
