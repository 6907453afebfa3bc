"""Configuration: spelling, types, folders, presets. Covers the known faults E08, E09, E10, E11, E12 and E13."""

import copy
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from common import config
from common.config import (
    ROOT,
    AlgoConfig,
    Common,
    ConfigError,
    cli,
    compose,
    number_keys,
    result_folder,
    run_folder,
    seed_list,
    usage,
    visible_device,
)
from common.schema import build, suggest
from scripts.experiment import load

COMPOSED: dict[tuple, Any] = {}
SCALES = ("smoke", "laptop", "gpu")
PRESETS = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce", "reinforce_baseline", "ppo")


@dataclass(frozen=True)
class Inner:
    width: int
    rate: float = 0.5


@dataclass(kw_only=True)
class Toy(Common):
    """A schema with a field of each kind."""

    inner: Inner
    rate: float
    steps: int
    name: str
    strict: bool
    limit: int | None = None
    weights: list[float] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        super().check()
        if self.steps < self.inner.width:
            raise ConfigError(f"steps={self.steps}: must be at least inner.width={self.inner.width}.")


BASE = """# @package _global_
inner: {width: 2, rate: 0.25}
rate: 1e-5
steps: 10
name: plain
strict: true
limit: null
weights: [0.5, 2]
shares: {a: 0.5}
"""


@pytest.fixture(scope="module")
def conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped conf/ with a toy experiment 9-9 in place of the real ones."""
    target = tmp_path_factory.mktemp("config") / "conf"
    shutil.copytree(ROOT / "conf", target, ignore=shutil.ignore_patterns("7-*"))
    folder = target / "experiment" / "9-9"
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(BASE)
    for scale in ("smoke", "laptop"):
        (folder / f"{scale}.yaml").write_text("# @package _global_\ndefaults:\n  - base\n\nsteps: 20\n")
    return target


@pytest.fixture(autouse=True)
def composed_once(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra takes a tenth of a second for the files, which most cases share: compose each choice once."""
    original = config._from_files

    def remembered(folder: Path, *choice: str, **groups: str) -> Any:
        if folder != conf:
            return original(folder, *choice, **groups)
        key = (folder, *choice, *sorted(groups.items()))
        if key not in COMPOSED:
            COMPOSED[key] = original(folder, *choice, **groups)
        return copy.deepcopy(COMPOSED[key])

    monkeypatch.setattr(config, "_from_files", remembered)


def toy(conf: Path, *overrides: str) -> Toy:
    return compose("9-9", Toy, list(overrides), conf=conf)


def refusal(conf: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        toy(conf, *overrides)
    return str(caught.value)


def test_files_in_order(conf: Path) -> None:
    settings = toy(conf)
    assert (settings.experiment, settings.scale, settings.steps, settings.name) == ("9-9", "laptop", 20, "plain")
    assert settings.inner == Inner(width=2, rate=0.25)
    assert settings.weights == [0.5, 2.0] and all(type(weight) is float for weight in settings.weights)
    assert (settings.seeds, settings.device, settings.dtype, settings.tracker) == (5, "cpu", "float32", "none")
    assert seed_list(settings) == [100, 101, 102, 103, 104]
    assert set(settings.algo) == set(AlgoConfig.__dataclass_fields__) and not any(settings.algo.values())


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("rate=1e-5", "rate", 1e-5),
        ("rate=5e-5", "rate", 5e-5),
        ("rate=1e5", "rate", 100000.0),
        ("rate=3", "rate", 3.0),
        ("rate=.5", "rate", 0.5),
        ("steps=12", "steps", 12),
        ("strict=false", "strict", False),
        ("strict=True", "strict", True),
        ("name=no", "name", "no"),
        ("name=on", "name", "on"),
        ("name=12:30:45", "name", "12:30:45"),
        ("name='1e5'", "name", "1e5"),
        ("limit=null", "limit", None),
        ("limit=4", "limit", 4),
        ("weights=[1,2.5]", "weights", [1.0, 2.5]),
        ("shares.a=0.75", "shares", {"a": 0.75}),
        ("arms=[one,two]", "arms", ["one", "two"]),
    ],
)
def test_e11_spellings_on_the_command_line(conf: Path, text: str, key: str, value: Any) -> None:
    result = getattr(toy(conf, text), key)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("line", "value"),
    [("1e-5", 1e-5), ("5e-5", 5e-5), ("1e5", 1e5), ("1E5", 1e5), ("2", 2.0), (".5", 0.5), ("-1.5E-3", -0.0015)],
)
def test_e11_numbers_in_a_file(conf: Path, tmp_path: Path, line: str, value: float) -> None:
    settings = toy(with_line(conf, tmp_path, f"rate: {line}"))
    assert settings.rate == value and type(settings.rate) is float


@pytest.mark.parametrize("line", ["name: no", "name: on", "name: 12:30:45", "name: 3", "name: 1e5", "name: null"])
def test_e11_text_that_yaml_reads_as_something_else_is_refused(conf: Path, tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"name=.*must be text"):
        toy(with_line(conf, tmp_path, line))


def with_line(conf: Path, tmp_path: Path, line: str) -> Path:
    """A copy of the configuration whose laptop scale of the toy experiment holds one more line."""
    shutil.copytree(conf, tmp_path / "conf")
    path = tmp_path / "conf" / "experiment" / "9-9" / "laptop.yaml"
    path.write_text(path.read_text() + line + "\n")
    return tmp_path / "conf"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds=many", "seeds=many: must be a whole number."),
        ("seeds=3.0", "seeds=3.0: must be a whole number (write 3)."),
        ("seeds=true", "seeds=true: must be a whole number."),
        ("seeds=", "seeds=: must be a whole number."),
        ("seeds=0", "seeds=0: must be at least 1."),
        ("rate=fast", "rate=fast: must be a number."),
        ("rate='1e-5'", "rate=1e-5: must be a number."),
        ("strict=1", "strict=1: must be true or false."),
        ("name=true", "name=true: must be text (put it in quotes if you mean the letters)."),
        ("arms=grpo", "arms=grpo: must be a list, written arms=[grpo]."),
        ("arms=[a,a]", "arms=['a', 'a']: must name at least one arm, each once; null takes all."),
        ("inner=3", "inner=3: must be a mapping with the keys width, rate."),
        ("algo.lr=fast", "algo.lr=fast: must be a number."),
        ("study=side", "study=side: allowed are main, ablation."),
        ("device=gpu", "device=gpu: allowed are auto, cpu, cuda, mps. Did you mean `cpu`?"),
        ("scale=gpu", "scale=gpu: allowed are laptop, smoke."),
        ("scale=latop", "scale=latop: allowed are laptop, smoke. Did you mean `laptop`?"),
        ("tracker=wandbb", "tracker=wandbb: allowed are none, tensorboard, trackio, wandb. Did you mean `wandb`?"),
    ],
)
def test_wrong_values_name_key_value_and_what_is_allowed(conf: Path, text: str, message: str) -> None:
    assert refusal(conf, text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sceds=3", "Did you mean `seeds`?"),
        ("algo.cliphigh=0.28", "Did you mean `algo.clip_high`?"),
        ("inner.widht=3", "Did you mean `inner.width`?"),
        ("clip_high=0.28", "Did you mean `algo.clip_high`?"),
        ("shares.b=1", "unknown key."),
        ("traker=wandb", "Did you mean `tracker`?"),
        ("inner..width=3", "not understood; write key=value"),
        ("inner.width", "not understood; write key=value"),
        ("--seeds=3", "not understood; write key=value"),
        ("hydra.run.dir=x", "unknown key."),
        ("experiment=7-1", "unknown key."),
        ("variant=mine", "unknown key."),
        ("overrides=[a]", "unknown key."),
        ("+extra=1", "only key=value is allowed"),
        ("~seeds", "only key=value is allowed"),
        ("seeds=1,2", "one value is allowed; a list is written seeds=[a,b]"),
    ],
)
def test_e12_misspelt_keys_on_the_command_line(conf: Path, text: str, message: str) -> None:
    assert message in refusal(conf, text) and refusal(conf, text).startswith(text.split("=")[0])


def test_impossible_combinations(conf: Path) -> None:
    assert refusal(conf, "first_seed=98") == (
        "first_seed=98 seeds=5: the range mixes tuning seeds (below 100) with report seeds (from 100); "
        "allowed is one kind only."
    )
    assert seed_list(toy(conf, "first_seed=95")) == [95, 96, 97, 98, 99]
    assert refusal(conf, "steps=1") == "steps=1: must be at least inner.width=2."


def test_suggestions() -> None:
    assert suggest("algo.lrr", ["algo.lr", "algo.lam"]) == " Did you mean `algo.lr`?"
    assert suggest("zzzzzz", ["algo.lr"]) == ""


@pytest.mark.parametrize("name", ["config.yaml", "scale/laptop.yaml", "experiment/9-9/base.yaml"])
def test_e12_a_misspelt_key_in_a_file_is_named(conf: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(conf, tmp_path / "conf")
    path = tmp_path / "conf" / name
    text = path.read_text()
    key = {"config.yaml": "seeds", "scale/laptop.yaml": "dtype", "experiment/9-9/base.yaml": "rate"}[name]
    path.write_text(text.replace(f"\n{key}:", f"\n{key}x:"))
    message = refusal(tmp_path / "conf")
    assert message.startswith(f"{key}x=") and f"Did you mean `{key}`?" in message


# Variants and folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "variant"),
    [
        ([], None),
        (["algo.lr=1e-4"], "algo.lr=0.0001"),
        (["algo.lr=0.0001", "steps=30"], "algo.lr=0.0001,steps=30"),
        (["steps=30", "algo.lr=1e-4"], "algo.lr=0.0001,steps=30"),
        (["steps=20"], None),
        (["workers=1", "tracker=wandb", "runs_dir=a", "results_dir=b", "study=ablation"], None),
        (["seeds=1", "arms=[a]"], None),
        (["weights=[1,2]"], "weights=1.0+2.0"),
    ],
)
def test_variant_names(conf: Path, overrides: list[str], variant: str | None) -> None:
    assert toy(conf, *overrides).variant == variant


def test_variant_names_are_safe_and_distinct(conf: Path) -> None:
    names = [toy(conf, f"name='{text}'").variant for text in ("a/b", "a:b", "../x", "ä", "a b", "y" * 400, "z" * 400)]
    assert len(set(names)) == 7
    for name in names:
        assert name is not None and len(name) < 140 and Path(name).name == name and name.isascii() and " " not in name


def test_e08_a_changed_configuration_never_writes_over_another(conf: Path, tmp_path: Path) -> None:
    base = toy(conf, f"results_dir={tmp_path}")
    changed = [["algo.lr=1e-4"], ["algo.lr=1e-3"], ["seeds=1"], ["arms=[a]"], ["study=ablation"], ["scale=smoke"]]
    others = [result_folder(toy(conf, f"results_dir={tmp_path}", *change)) for change in changed]
    assert result_folder(base) == tmp_path / "9-9" / "laptop"
    assert len({result_folder(base), *others}) == 1 + len(changed)
    result_folder(base).mkdir(parents=True)
    (result_folder(base) / "records.jsonl").write_text("first\n")
    for folder in others:
        folder.mkdir(parents=True)
        (folder / "records.jsonl").write_text("second\n")
    assert (result_folder(base) / "records.jsonl").read_text() == "first\n"


def test_e08_tuning_seeds_never_reach_the_results(conf: Path) -> None:
    tuning = toy(conf, "first_seed=0")
    assert result_folder(tuning) == run_folder(tuning) / "tuning-results"
    assert result_folder(toy(conf, "debug=on")).is_relative_to(ROOT / "runs")


def test_numbers_depend_on_the_method_and_not_on_which_cells_run_where(conf: Path) -> None:
    base = number_keys(toy(conf), "overrides", "variant")
    same = toy(conf, "seeds=9", "workers=1", "launcher=ray", "tracker=tensorboard", "study=ablation")
    assert number_keys(same, "overrides", "variant") == base and base["steps"] == toy(conf).steps
    assert number_keys(toy(conf, "rate=0.25"), "overrides", "variant") != base
    assert "inner" not in number_keys(toy(conf), "inner")


def test_folders(conf: Path) -> None:
    base, variant = toy(conf), toy(conf, "study=ablation", "algo.clip_high=0.28")
    assert result_folder(base) == ROOT / "results/9-9/laptop"
    assert run_folder(base) == ROOT / "runs/9-9/laptop/main/base"
    assert result_folder(variant) == ROOT / "results/9-9/laptop/ablation/variants/algo.clip_high=0.28"
    assert run_folder(variant) == ROOT / "runs/9-9/laptop/ablation/algo.clip_high=0.28"
    assert run_folder(toy(conf, "seeds=9")) == run_folder(base)  # more seeds go on where the others lie


def test_e09_eight_launches_in_the_same_second(conf: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from common.config import compose, run_folder; import time;"
        "time.time = lambda: 0.0; from tests_config import Toy;"
        "print(run_folder(compose('9-9', Toy, [f'algo.lr={sys.argv[1]}'], conf=Path(sys.argv[2]))))"
    )
    helper = conf.parent / "tests_config.py"
    helper.write_text("from dataclasses import dataclass\nfrom common.config import Common\n"
                      "@dataclass(kw_only=True)\nclass Toy(Common):\n    inner: dict[str, float]\n    rate: float\n"
                      "    steps: int\n    name: str\n    strict: bool\n    limit: int | None\n"
                      "    weights: list[float]\n    shares: dict[str, float]\n")  # fmt: skip
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{conf.parent}"}
    started = [
        subprocess.Popen([sys.executable, "-c", program, f"{n}e-4", str(conf)], stdout=subprocess.PIPE, env=environment)
        for n in range(1, 9)
    ]
    assert len({process.communicate()[0] for process in started}) == 8
    assert [process.returncode for process in started] == [0] * 8


def test_e10_folders_do_not_depend_on_the_working_folder(conf: Path, tmp_path: Path, monkeypatch: Any) -> None:
    at_home = (run_folder(toy(conf)), result_folder(toy(conf)))
    monkeypatch.chdir(tmp_path)
    elsewhere = toy(conf, "runs_dir=mine")
    assert (run_folder(toy(conf)), result_folder(toy(conf))) == at_home
    assert run_folder(elsewhere) == tmp_path / "mine/9-9/laptop/main/base"  # a typed path means the launch folder
    monkeypatch.chdir("/")
    assert run_folder(elsewhere) == tmp_path / "mine/9-9/laptop/main/base"
    assert Path.cwd() == Path("/")
    assert list(tmp_path.iterdir()) == []


def test_e13_composing_with_the_tracker_off_imports_no_client(conf: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from common.config import Common, compose;"
        "compose('9-9', Common, [], conf=Path(sys.argv[1]));"
        "print([name for name in ('wandb', 'trackio', 'tensorboard', 'torch') if name in sys.modules])"
    )
    plain = conf.parent / "plain" / "conf"
    shutil.copytree(conf, plain)
    (plain / "experiment/9-9/laptop.yaml").write_text("# @package _global_\n{}\n")
    call = [sys.executable, "-c", program, str(plain)]
    assert subprocess.run(call, capture_output=True, text=True, cwd=ROOT, check=True).stdout == "[]\n"


def run_cli(conf: Path, monkeypatch: Any, main: Any, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run", *words])
    with pytest.raises(SystemExit) as ended:
        cli("9-9", Toy, main, conf=conf)
    return ended.value.code


def test_cli_exit_codes(conf: Path, monkeypatch: Any, capsys: Any) -> None:
    def stopped(settings: Toy) -> int:
        raise KeyboardInterrupt

    assert run_cli(conf, monkeypatch, lambda settings: settings.steps, "steps=7") == 7
    assert run_cli(conf, monkeypatch, lambda settings: 0, "stepps=7") == 2
    error = capsys.readouterr().err
    assert error == "error: stepps=7: unknown key. Did you mean `steps`? --help lists all keys.\n"
    assert run_cli(conf, monkeypatch, stopped) == 130
    assert capsys.readouterr().err == "stopped: the same command goes on from here\n"
    assert run_cli(conf, monkeypatch, lambda settings: 9, "--help") == 0
    assert "  steps=20" in capsys.readouterr().out


def test_usage_lists_groups_and_keys(conf: Path) -> None:
    text = usage("9-9", Toy, conf)
    assert "scale=  one of laptop, smoke" in text and "  algo.lr=null" in text and "  variant=" not in text


def test_a_device_that_is_not_there(monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert visible_device("cpu") == "cpu"
    for device in ("auto", "cuda", "cuda:1", "mps"):
        with pytest.raises(ConfigError, match=f"device={device}: this machine shows cpu; device=cpu runs anywhere"):
            visible_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (visible_device("auto"), visible_device("cuda:1")) == ("cuda", "cuda:1")


def test_a_missing_header_and_broken_yaml_are_named(conf: Path, tmp_path: Path) -> None:
    broken = with_line(conf, tmp_path, "name: [unclosed")
    assert "laptop" in refusal(broken)
    (broken / "experiment/9-9/laptop.yaml").write_text("steps: 3\n")
    assert refusal(broken) == "each file in conf/experiment/9-9/ must begin with the line `# @package _global_`."


def test_build_names_missing_and_unknown_keys() -> None:
    with pytest.raises(ConfigError, match="width is missing"):
        build(Inner, {})
    with pytest.raises(ConfigError, match=r"heigth=1: unknown key\. Allowed are width, rate\."):
        build(Inner, {"width": 1, "heigth": 1})


def test_a_study_may_have_a_file_of_its_own() -> None:
    """conf/experiment/7-11/laptop-ablation.yaml sets fewer seeds; it makes no variant and is no scale of its own."""
    main, ablation = (compose("7-11", load("7-11").Settings, [f"study={study}"]) for study in ("main", "ablation"))
    assert (main.seeds, ablation.seeds) == (5, 3)
    assert (ablation.variant, ablation.selection, ablation.scale) == (None, [], "laptop")
    assert "laptop-ablation" not in config.scales("7-11")
