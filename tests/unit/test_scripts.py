"""doctor, view and export: what they print, write and return."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from common.jobs import Cell, cell_folder
from common.sandbox import Isolation
from scripts import doctor, export, view
from scripts.experiment import command, folders, settings


def test_experiments_are_found_by_number() -> None:
    assert folders()["7-11"] == "exp_7_11_general_points"
    assert command("7-11", settings("7-11", [])) == "make exp-7-11"
    changed = settings("7-11", ["scale=smoke", "study=ablation", "algo.lr=1e-4", "seeds=2"])
    assert command("7-11", changed) == "make ablate-7-11 SCALE=smoke ARGS='algo.lr=0.0001 seeds=2'"


def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    shown = capsys.readouterr().out
    assert "All set" in shown and "missing" not in shown.split("Scales")[0]
    lines = {line.split()[0]: line.split()[1] for line in shown.split("Scales\n")[1].splitlines()[:4]}
    assert lines["smoke"] == lines["laptop"] == "yes:" and set(lines) == {"smoke", "laptop", "gpu", "cluster"}


def test_doctor_names_what_is_missing_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "describe_packages", lambda names: (["  peft - missing"], ["peft"]))
    assert doctor.main() == 1
    shown = capsys.readouterr().out
    assert "laptop   no: peft missing; run `make setup`" in shown and "Not ready" in shown


def test_doctor_says_how_code_is_isolated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("common.sandbox.isolation", lambda: Isolation(False, "darwin has no namespaces"))
    doctor.main()
    weak = capsys.readouterr().out.split("Sandbox for model-written code\n")[1].split("Scales")[0].splitlines()
    assert weak[0] == "  NOT ISOLATED: darwin has no namespaces"
    assert "reach the network" in weak[1] and "allow_weak=True" in weak[2]
    monkeypatch.setattr("common.sandbox.isolation", lambda: Isolation(True))
    assert "namespaces" in doctor.sandbox_lines()[0] and "kernel" in doctor.sandbox_lines()[1]


def test_doctor_compares_with_the_lock() -> None:
    pins = doctor.locked()
    assert pins["torch"] == "2.13.0" and pins["transformers"] == "5.10.4"
    versions = {"torch": "2.13.0", "peft": "0.1", "trl": None}
    lines, missing = doctor.describe_packages(list(versions), lambda name: versions[name])
    assert missing == ["trl"]
    assert lines[0].split() == ["torch", "2.13.0", "as", "pinned"]
    assert f"the lock says {pins['peft']}" in lines[1] and f"`make setup` installs {pins['trl']}" in lines[2]


def test_every_requirement_is_in_the_lock() -> None:
    pins = doctor.locked()
    wanted = doctor.requirements() + doctor.requirements("dev") + doctor.requirements("verl")
    assert [name for name in wanted if doctor.normal(name) not in pins] == []


def test_scales_follow_from_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "with_scale", lambda scale: "" if scale == "cluster" else "7-1, 7-11")
    assert doctor.scale_lines([], "H100", []) == [
        "  smoke    yes: 7-1, 7-11",
        "  laptop   yes: 7-1, 7-11",
        "  gpu      yes: 7-1, 7-11",
        "  cluster  no: no experiment has this scale yet",
    ]
    assert "torch sees no CUDA or MPS device" in doctor.scale_lines([], None, [])[2]
    assert "'.[verl]'" in doctor.scale_lines([], None, ["verl"])[3]


def test_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["7-11", "scale=smoke", f"results_dir={tmp_path}"]
    assert view.main(words) == 1
    page = tmp_path / "7-11" / "smoke" / "report.html"
    text = f"There is no report at {page} yet; `make exp-7-11 SCALE=smoke` makes it.\n"
    assert capsys.readouterr().err == text
    page.parent.mkdir(parents=True)
    page.write_text("<html></html>")
    monkeypatch.setattr(view, "has_display", lambda: False)
    assert view.main(words) == 0 and capsys.readouterr().out == f"{page}\n"
    opened: list[str] = []
    monkeypatch.setattr(view, "has_display", lambda: True)
    monkeypatch.setattr(view.webbrowser, "open", lambda address: not opened.append(address))
    assert view.main(words) == 0 and capsys.readouterr().out == "" and opened == [page.as_uri()]


def test_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not view.has_display()
    monkeypatch.setenv("DISPLAY", ":0")
    assert view.has_display()


@pytest.mark.parametrize("script", [view, export])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: which experiment?"),
        (["7-99"], "error: experiment=7-99: allowed are"),
        (["7-11", "sclae=smoke"], "error: sclae=smoke: unknown key. Did you mean `scale`?"),
    ],
)
def test_bad_arguments(script, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(words) == 2
    assert capsys.readouterr().err.startswith(message)


def trained(runs: Path, cell: Cell, adapter: str | None = None) -> None:
    """A finished cell with a model folder, as a run leaves it."""
    folder = cell_folder(runs / "7-11" / "smoke" / "main" / "base", cell)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    if adapter:
        (folder / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": adapter}))
    rows = [
        {"split": "ood", "metric": "success", "value": 0.25, "n": 40, "final": True},
        {"split": "ood", "metric": "pass_at_8", "value": None, "n": 0, "final": True},
        {"split": "id", "metric": "success", "value": 0.75, "n": 40, "final": False},
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "cost.json").write_text(json.dumps({"wall_s": 12.5, "flops": 1.5e12}))
    (folder / "DONE").write_text("key")


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, target = tmp_path / "runs", tmp_path / "export"
    words = ["7-11", "scale=smoke", f"runs_dir={runs}"]
    assert export.main(words, target) == 1
    assert "there are: none.\n`make exp-7-11 SCALE=smoke` trains them." in capsys.readouterr().err
    trained(runs, Cell("grpo", 100))
    trained(runs, Cell("grpo", 101))
    trained(runs, Cell("ppo", 100), adapter="some/base")
    (runs / "7-11/smoke/main/base/grpo/seed100.stale").mkdir()
    assert export.main([*words, "arm=grpo", "seed=101"], target) == 0
    assert capsys.readouterr().out == f"{target}/7-11/grpo-seed101\n"
    assert (target / "7-11/grpo-seed101/model.safetensors").read_bytes() == b"weights"
    assert export.main(words, target) == 0
    assert sorted(path.name for path in (target / "7-11").iterdir()) == ["grpo-seed100", "grpo-seed101", "ppo-seed100"]
    assert export.main([*words, "arm=sft_one"], target) == 1
    assert "there are: grpo-seed100, grpo-seed101, ppo-seed100." in capsys.readouterr().err
    assert export.main([*words, "seed=last"], target) == 2
    capsys.readouterr()
    assert export.main(["7-11", f"runs_dir={runs}"], target) == 1
    assert "`make exp-7-11` trains them. Models lie ready with SCALE=smoke." in capsys.readouterr().err


def test_the_model_card_is_filled(tmp_path: Path) -> None:
    runs, target = tmp_path / "runs", tmp_path / "export"
    trained(runs, Cell("grpo", 100))
    trained(runs, Cell("ppo", 100), adapter="some/base")
    export.main(["7-11", "scale=smoke", f"runs_dir={runs}"], target)
    full = (target / "7-11/grpo-seed100/README.md").read_text()
    front = yaml.safe_load(full.split("---")[1])
    assert front["library_name"] == "transformers" and front["license"] == "apache-2.0" and "base_model" not in front
    assert "| ood | success | 0.25 | 40 |" in full and "| ood | pass_at_8 | undefined | 0 |" in full
    assert "0.75" not in full.split("## Configuration")[0]  # a point of the curve is not a result
    assert "- wall_s: 12.5" in full and "- flops: 1.5e+12" in full and str(tmp_path) not in full
    configuration = yaml.safe_load(full.split("```yaml\n")[1].split("```")[0])
    assert configuration["scale"] == "smoke" and configuration["experiment"] == "7-11"
    adapter = (target / "7-11/ppo-seed100/README.md").read_text()
    front = yaml.safe_load(adapter.split("---")[1])
    assert (front["library_name"], front["base_model"]) == ("peft", "some/base") and "license" not in front
    assert 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("some/base"), ".")' in adapter
