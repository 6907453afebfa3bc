"""The paper's own run, by path: what of it is there, whether its keys are the paper's, and the line that starts it.

    python -m experiments.exp_7_13_simplevla.libero program=<SimpleVLA-RL> model=<checkpoint> libero=<LIBERO> suite=libero_10

OpenVLA-OFT with 7 B parameters on LIBERO needs eight large GPUs, the authors' program (a fork of verl), an SFT checkpoint and
LIBERO's assets; none of them is fetched here and nothing is started. Exit code 0 if everything is in place, else 1.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from common.files import read_json
from common.schema import ConfigError, one_of, suggest

SUITES = ("libero_10", "libero_90", "libero_goal", "libero_object", "libero_spatial")
DEFAULTS = {"program": "", "model": "", "libero": "", "suite": "libero_10"}
SCRIPT = "examples/run_openvla_oft_rl_libero.sh"
PAPER = {  # of the authors' launch script; a group of 8 is kept with 1 to 7 successes
    "data.num_trials_per_task": 50,
    "data.n_samples": 8,
    "data.train_batch_size": 64,
    "data.val_batch_size": 496,
    "data.accuracy_lower_bound": 0.1,
    "data.accuracy_upper_bound": 0.9,
    "actor_rollout_ref.model.action_token_len": 7,
    "actor_rollout_ref.model.action_chunks_len": 8,
    "actor_rollout_ref.actor.optim.lr": 5e-6,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "actor_rollout_ref.rollout.temperature": 1.6,
    "algorithm.kl_ctrl.kl_coef": 0.0,
}


def parse(words: Sequence[str]) -> dict[str, str]:
    """key=value words over the defaults; ConfigError names what is not understood."""
    chosen = dict(DEFAULTS)
    for word in words:
        key, equals, value = word.partition("=")
        if key not in DEFAULTS or not equals:
            raise ConfigError(f"{word}: unknown.{suggest(key, DEFAULTS)} Allowed are {', '.join(f'{k}=' for k in DEFAULTS)}.")
        chosen[key] = value
    one_of("suite", chosen["suite"], SUITES)
    return chosen


def script_keys(text: str) -> dict[str, str]:
    """The dotted keys of a launch script, as written: {"data.n_samples": "8"}."""
    return {key: value.strip("'\"") for key, value in re.findall(r"^\s*\+*(\w+(?:\.\w+)+)=(\S+)", text, re.MULTILINE)}


def disagreements(found: dict[str, str]) -> list[str]:
    """A sentence for each key of the paper that the script lacks, or has another value for."""
    sentences = []
    for key, paper in PAPER.items():
        if key not in found:
            sentences.append(f"{SCRIPT} has no key {key}; the paper's value is {paper}.")
            continue
        try:
            same = float(found[key]) == paper
        except ValueError:
            same = False
        if not same:
            sentences.append(f"{SCRIPT} has {key}={found[key]}; the paper's value is {paper}.")
    return sentences


def missing(chosen: dict[str, str]) -> list[str]:
    """A sentence for each thing that the run needs and that is not there."""
    program, model, libero, suite = Path(chosen["program"]), Path(chosen["model"]), Path(chosen["libero"]), chosen["suite"]
    sentences = [f"{key}= is not given." for key in ("program", "model", "libero") if not chosen[key]]
    wanted: list[tuple[str, Path, str]] = []
    if chosen["program"]:
        wanted += [("program", program / name, "the authors' SimpleVLA-RL") for name in (SCRIPT, "verl/trainer/main_ppo.py")]
    if chosen["model"]:
        wanted.append(("model", model / "config.json", "a checkpoint of OpenVLA-OFT after SFT on one trajectory a task"))
    if chosen["libero"]:
        parts = (f"bddl_files/{suite}", f"init_files/{suite}", "assets")
        wanted += [("libero", libero / "libero/libero" / part, "a clone of LIBERO with its assets") for part in parts]
    sentences += [
        f"{key}={chosen[key]}: {path} is not there; it takes {what}." for key, path, what in wanted if not path.exists()
    ]
    config = model / "config.json"
    if chosen["model"] and config.is_file():
        kind = (read_json(config) or {}).get("model_type")
        if kind != "openvla":
            sentences.append(f"model={model}: its config.json says model_type={kind}; it takes openvla.")
        if not any(model.glob("*.safetensors")):
            sentences.append(f"model={model}: it holds no *.safetensors.")
    return sentences


def main(words: Sequence[str]) -> int:
    """Prints what is missing and what disagrees, then the line to type; 1 unless everything is in place."""
    try:
        chosen = parse(words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sentences = missing(chosen)
    script = Path(chosen["program"]) / SCRIPT
    if chosen["program"] and script.is_file():
        sentences += disagreements(script_keys(script.read_text(encoding="utf-8")))
    for sentence in sentences:
        print(f"missing: {sentence}")
    if sentences:
        return 1
    print(
        f"in place; set SFT_MODEL_PATH={chosen['model']} and DATASET_NAME={chosen['suite']} in {script}, then in the program's"
    )
    print(f"own environment: cd {chosen['program']} && bash {SCRIPT}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
