"""The shipped configuration files: every key is a key, and each is explained. Covers the known fault E12."""

import shutil
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from omegaconf import OmegaConf

from common import advantages, config, losses
from common.algo import _ALGO_WORDS
from common.config import ROOT, ConfigError, load_algo, scales
from common.schema import build
from scripts.experiment import folders, load

PRESETS = (
    *("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce", "reinforce_baseline"),
    *("reinforce_pp", "reinforce_pp_baseline", "ppo", "dpo", "kto", "online_dpo"),
)


def key_paths(node: Any, annotation: Any = Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of the keys of a document, without the names that a free mapping gives to its entries (arms, say)."""
    if not isinstance(node, dict):
        return []
    if get_origin(annotation) in (Union, UnionType):
        annotation = next((kind for kind in get_args(annotation) if kind is not type(None)), Any)
    hints = get_type_hints(annotation) if is_dataclass(annotation) else {}
    free = get_origin(annotation) is dict and get_args(annotation)[1] is not Any
    below = get_args(annotation)[1] if free else Any
    paths = []
    for key, value in node.items():
        paths += [] if free else [(*path, key)]
        paths += key_paths(value, hints.get(key, below), (*path, key))
    return paths


def misspell(node: Any, path: tuple[str, ...]) -> Any:
    """A copy of the document with one letter of the key at `path` doubled."""
    head, *rest = path
    return {
        (f"{key}{key[-1]}" if key == head and not rest else key): (
            misspell(value, tuple(rest)) if key == head and rest else value
        )
        for key, value in node.items()
    }


def survivors(conf: Path, number: str, schema: Any, scale: str, **groups: str) -> list[str]:
    """The keys of the merged files whose misspelling goes unnoticed.

    Merged, because a key that stands in two files and is misspelt in one of them is an unknown key all the same.
    """
    merged: Any = OmegaConf.to_container(config._from_files(conf, number, scale, scale, **groups), resolve=True)
    if scale == "gpu":
        merged |= {key: "some/name" for key in ("model_path", "small_path", "sentences") if key in merged}  # the reader's part

    def accepted(document: Any) -> bool:
        try:
            build(schema, {"experiment": number, "scale": scale, **document}).check()
        except ConfigError:
            return False
        return True

    assert accepted(merged)
    return [".".join(keys) for keys in key_paths(merged, schema) if accepted(misspell(merged, keys))]


def test_e12_every_key_of_the_groups_misspelt() -> None:
    schema = load("7-1").Settings
    assert survivors(ROOT / "conf", "7-1", schema, "smoke", tracker="wandb", debug="on") == []
    files = {scale: ROOT / "conf" / "scale" / f"{scale}.yaml" for scale in ("smoke", "laptop", "gpu")}
    keys = {scale: key_paths(yaml.safe_load(path.read_text())) for scale, path in files.items()}
    assert keys["smoke"] == keys["laptop"] == keys["gpu"] != []


@pytest.mark.parametrize("number", sorted(folders()))
def test_e12_every_key_of_an_experiment_misspelt(number: str) -> None:
    for scale in scales(number):
        assert survivors(ROOT / "conf", number, load(number).Settings, scale) == [], scale


def test_e12_every_key_of_the_presets_misspelt(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf" / "algo", tmp_path / "algo")
    for preset in PRESETS:
        document = yaml.safe_load((ROOT / "conf" / "algo" / f"{preset}.yaml").read_text())
        for number, keys in enumerate(key_paths(document)):
            (tmp_path / "algo" / f"{preset}{number}.yaml").write_text(yaml.safe_dump(misspell(document, keys)))
            with pytest.raises(ConfigError):
                load_algo(f"{preset}{number}", conf=tmp_path)


def test_each_key_has_a_comment_above() -> None:
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        lines = path.read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            name = line.strip().split(":")[0]
            if ":" in line and not line.strip().startswith(("#", "-")) and name != "defaults":
                assert before.strip().startswith("#"), f"{path.relative_to(ROOT)}: no comment above {name}"


# Algorithms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "name", "advantage", "loss_agg"),
    [
        ("grpo", "grpo", "group_norm", "seq_mean"),
        ("dapo", "grpo", "group_norm", "token_mean"),
        ("dr_grpo", "dr_grpo", "group_centre", "seq_sum_const"),
        ("gspo", "gspo", "group_norm", "seq_mean"),
        ("cispo", "cispo", "group_norm", "token_mean"),
        ("rloo", "rloo", "rloo", "seq_sum_const"),
        ("reinforce", "reinforce", "reward", "seq_sum_const"),
        ("reinforce_baseline", "reinforce_baseline", "batch_centre", "seq_sum_const"),
        ("reinforce_pp", "reinforce_pp", "reward_to_go", "token_mean"),
        ("reinforce_pp_baseline", "reinforce_pp_baseline", "group_centre", "token_mean"),
        ("ppo", "ppo", "gae", "token_mean"),
    ],
)
def test_presets(preset: str, name: str, advantage: str, loss_agg: str) -> None:
    algo = load_algo(preset)
    assert (algo.name, algo.advantage, algo.loss_agg) == (name, advantage, loss_agg)
    assert algo.prompts_per_step * algo.group_size == 512


def test_dapo_is_grpo_with_its_four_changes() -> None:
    algo = load_algo("dapo")
    assert (algo.clip_low, algo.clip_high, algo.drop_zero_variance, algo.refill_rounds) == (0.2, 0.28, True, 3)
    assert (algo.overlong_buffer, algo.overlong_penalty, algo.kl_coef) == (16, 1.0, 0.0)


def test_every_preset_is_tested() -> None:
    assert {path.stem for path in (ROOT / "conf" / "algo").glob("*.yaml")} == set(PRESETS)


def test_words_of_the_configuration_are_those_of_the_functions() -> None:
    for key, words in {
        "policy_loss": losses.SURROGATES,
        "loss_agg": losses.AGGREGATIONS,
        "kl_estimator": losses.KL_ESTIMATORS,
        "advantage": (*advantages.ESTIMATORS, "reward_to_go", "gae"),
    }.items():
        assert _ALGO_WORDS[key] == words, key


@pytest.mark.parametrize(
    ("preset", "policy_loss", "clip_low", "clip_high", "whiten", "kl"),
    [
        ("grpo", "ppo_clip", 0.2, 0.2, False, (0.0, "k3", "loss")),
        ("gspo", "gspo", 3e-4, 4e-4, False, (0.0, "k3", "loss")),
        ("cispo", "cispo", 1.0, 4.0, False, (0.0, "k3", "loss")),
        ("reinforce_pp", "ppo_clip", 0.2, 0.2, True, (0.01, "k1", "reward")),
        ("reinforce_pp_baseline", "ppo_clip", 0.2, 0.2, True, (0.01, "k2", "loss")),
        ("ppo", "ppo_clip", 0.2, 0.2, True, (0.0, "k3", "loss")),
    ],
)
def test_what_the_presets_bound(
    preset: str, policy_loss: str, clip_low: float, clip_high: float, whiten: bool, kl: tuple
) -> None:
    algo = load_algo(preset)
    assert (algo.policy_loss, algo.clip_low, algo.clip_high, algo.whiten) == (policy_loss, clip_low, clip_high, whiten)
    assert (algo.kl_coef, algo.kl_estimator, algo.kl_in) == kl


def test_k1_stays_allowed_in_the_reward_and_where_no_kl_acts() -> None:
    assert load_algo("grpo", {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}).kl_estimator == "k1"
    assert load_algo("grpo", {"kl_estimator": "k1"}).kl_coef == 0.0


def test_layers_win_from_left_to_right_and_null_keeps() -> None:
    settings = config.compose("7-1", load("7-1").Settings, ["algo.lr=1e-4", "algo.betas=[0.9,0.95]"])
    algo = load_algo("grpo", {"lr": 1e-3, "kl_coef": 0.1, "clip_high": None}, settings.algo)
    assert (algo.lr, algo.kl_coef, algo.clip_high, algo.betas) == (1e-4, 0.1, 0.2, (0.9, 0.95))


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("grop", {}, "algo preset=grop: allowed are .* Did you mean `grpo`"),
        ("grpo", {"learning_rate": 1}, "algo.learning_rate=1: unknown key"),
        ("grpo", {"lr": "1e-4"}, "algo.lr=1e-4: must be a number"),
        ("grpo", {"lr": 0.0}, "algo.lr=0.0: must be above 0"),
        ("grpo", {"clip_low": 1.5}, "algo.clip_low=1.5: must be above 0 and at most 1"),
        ("grpo", {"gamma": 1.1}, "algo.gamma=1.1: must be at least 0 and at most 1"),
        ("grpo", {"kl_estimator": "k4"}, "algo.kl_estimator=k4: allowed are k1, k2, k3"),
        ("grpo", {"group_size": 1}, "algo.group_size=1: algo.advantage=group_norm needs at least 2"),
        ("grpo", {"advantage": "gae"}, "algo.advantage=gae with algo.name=grpo"),
        ("ppo", {"advantage": "rloo"}, "algo.advantage=rloo with algo.name=ppo"),
        ("ppo", {"drop_zero_variance": True}, "algo.drop_zero_variance=true with algo.advantage=gae"),
        ("grpo", {"refill_rounds": 2}, "algo.refill_rounds=2: needs algo.drop_zero_variance=true"),
        ("grpo", {"refill_with": "answers"}, "algo.refill_with=answers with algo.refill_rounds=0: needs at least 1 round"),
        ("grpo", {"kl_coef": 0.1, "kl_estimator": "k1"}, "algo.kl_estimator=k1 with algo.kl_in=loss: the mean gradient of k1"),
        ("ppo", {"kl_coef": 0.1, "kl_estimator": "k1"}, "allowed are k2 or k3 in the loss, or algo.kl_in=reward"),
        ("gspo", {"policy_loss": "gpso"}, "algo.policy_loss=gpso: allowed are ppo_clip, gspo, cispo.*Did you mean `gspo`"),
        ("reinforce_pp", {"drop_zero_variance": True}, "algo.drop_zero_variance=true with algo.advantage=reward_to_go"),
        ("ppo", {"value_clip": -0.1}, "algo.value_clip=-0.1: must be at least 0"),
        ("grpo", {"minibatches": 3}, "algo.minibatches=3: must divide the 512 episodes of a step"),
        ("dapo", {"overlong_buffer": 65}, "algo.overlong_buffer=65: must be at most max_new_tokens=64"),
        ("grpo", {"betas": [0.9]}, "algo.betas=\\[0.9\\]: must hold 2 values"),
        ("grpo", {"betas": [0.9, 1.0]}, "algo.betas=\\[0.9, 1.0\\]: both must be at least 0 and below 1"),
        ("grpo", {"temperature": 0.0}, "algo.temperature=0.0: must be above 0"),
    ],
)
def test_algorithms_that_cannot_be(preset: str, change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_algo(preset, change)
