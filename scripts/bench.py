"""Measure our GRPO step against TRL's trainer and our sampler against transformers.generate, and write results/bench/.

    python -m scripts.bench [rounds=3] [folder=results/bench]

One thread, one process, one tiny model, the same prompts and as many tokens on both sides, which take turns. Times are
CPU seconds of this process (minimum and median over the rounds), ratios are of minima. FLOPs follow the suite's cost
model (2 N per token forward, 6 N per trained token); the peak is this machine's float32 matrix product on one thread.
"""

import copy
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium
import torch

from common import policy
from common.algo import AlgoConfig
from common.compute import Budget
from common.decoding import make_decoder
from common.episodes import collate, run_episodes
from common.files import strict_json
from common.grpo import train_grpo
from common.loop import make_optimizer
from common.models import DecoderConfig, build_decoder, parameter_count
from common.provenance import machine, packages
from common.rollout import sample
from common.runlog import RunLog
from common.seeding import generator
from common.tokenizers import build_phrase_tokenizer, encode_prompt

PROMPTS, GROUP, NEW_TOKENS = 8, 8, 64
SHAPE = DecoderConfig(hidden=128, layers=4, heads=4, kv_heads=2, feedforward=256, tied=True)
ALGO = AlgoConfig(
    name="grpo",
    prompts_per_step=PROMPTS,
    group_size=GROUP,
    max_new_tokens=NEW_TOKENS,
    lr=1e-5,
    drop_zero_variance=False,
)
STEPS = 4  # per round; the first is a warm-up and does not count
STOP_SHARE = 0.03  # of the vocabulary: the ragged completions end with about this probability at each token
Times = list[float]


@dataclass
class Case:
    """The model and prompts of both sides. ``stops``: token ids that end the ragged completions."""

    model: Any
    tokenizer: Any
    texts: list[str]
    stops: list[int]

    def prompts(self, count: int) -> list[list[int]]:
        """Token ids of the first prompts, with the start token."""
        return [encode_prompt(self.tokenizer, text) for text in self.texts[:count]]


def build_case() -> Case:
    """0.62 M parameters, 256 prompts of 16 to 32 tokens; the end token is unlearned, so that nothing ends early."""
    words = [f"{chr(97 + i % 26)}{i} " for i in range(256)]
    tokenizer = build_phrase_tokenizer(words)
    model = build_decoder(SHAPE, tokenizer, seed=0)
    stream = generator("bench", "prompts")
    texts = ["".join(words[i] for i in torch.randint(256, (15 + n % 17,), generator=stream).tolist()) for n in range(256)]
    ids_BT = torch.randint(4, 260, (64, 64), generator=stream)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while (loss := model(ids_BT, use_cache=False).logits.softmax(-1)[..., :4].sum(-1).mean()) > 1e-5:
        optimizer.zero_grad()
        loss.log().backward()
        optimizer.step()
    return Case(model.eval(), tokenizer, texts, list(range(4, 4 + round(STOP_SHARE * 256))))


def reward_of(text: str) -> float:
    """Share of ones among the characters: cheap, and different for every completion."""
    return text.count("1") / max(1, len(text))


class CountTask(gymnasium.Env):
    """One turn: the task's text is the observation, the reward that of the answer."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        return (options or {})["text"], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return "", reward_of(action), True, False, {"success": False, "reason": "counted"}


def grpo_ours(case: Case) -> tuple[Times, float]:
    """CPU seconds of each counted step of common.grpo, and FLOPs per step."""
    marks: Times = []

    def task_at(step: int, count: int) -> list[dict]:
        marks.append(time.process_time())
        return [{"text": text} for text in case.texts[:count]]

    labels = {"experiment": "bench", "scale": "bench", "variant": None, "arm": "grpo", "seed": 0}
    with tempfile.TemporaryDirectory() as name, RunLog(Path(name), labels, quiet=True) as log:
        meter = train_grpo(
            copy.deepcopy(case.model),
            case.tokenizer,
            CountTask,
            task_at,
            ALGO,
            seed=0,
            budget=Budget(steps=STEPS + 1),  # the last step also saves the state; it only closes the one before
            log=log,
            folder=Path(name),
            checkpoint_every=STEPS + 1,
        )
    return differences(marks), meter.flops / (STEPS + 1)


def grpo_trl(case: Case, checkpointing: bool) -> Times:
    """CPU seconds of each counted step of TRL's GRPOTrainer, with or without gradient checkpointing (its default)."""
    import datasets
    import transformers
    import trl

    marks: Times = []
    lengths: list[int] = []

    class Marks(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            marks.append(time.process_time())

    def reward(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [reward_of(text) for text in completions]

    with tempfile.TemporaryDirectory() as name:
        arguments = trl.GRPOConfig(
            output_dir=name,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=checkpointing,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=NEW_TOKENS,
            max_steps=STEPS + 1,
            learning_rate=ALGO.lr,
            lr_scheduler_type="constant",
            temperature=1.0,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        rows = [{"prompt": case.tokenizer.bos_token + text} for text in case.texts[:PROMPTS]] * (STEPS + 1)
        trainer = trl.GRPOTrainer(
            model=copy.deepcopy(case.model),
            reward_funcs=reward,
            args=arguments,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=copy.deepcopy(case.tokenizer),
            callbacks=[Marks()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    if set(lengths) != {NEW_TOKENS}:
        raise RuntimeError(f"TRL's completions have {min(lengths)} to {max(lengths)} tokens, ours {NEW_TOKENS}")
    return differences(marks)


def differences(marks: Times) -> Times:
    """Seconds between marks, the first interval (warm-up) left out."""
    return [later - earlier for earlier, later in itertools.pairwise(marks[1:])]


def sampler_ours(case: Case, rows: int, group: int, stops: list[int]) -> tuple[float, int]:
    """CPU seconds and tokens written by common.rollout.sample."""
    prompts, stream = case.prompts(rows // group), generator("bench", "sample", rows)
    start = time.process_time()
    completions = sample(case.model, prompts, group_size=group, max_new_tokens=NEW_TOKENS, stop_ids=stops, generator=stream)
    return time.process_time() - start, sum(len(completion.ids) for completion in completions)


def sampler_generate(case: Case, rows: int, group: int, stops: list[int]) -> tuple[float, int]:
    """CPU seconds and tokens written, up to each row's first stop id, by transformers.generate."""
    prompts = [prompt for prompt in case.prompts(rows // group) for _ in range(group)]
    width = max(map(len, prompts))
    ids_BT = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    attention_BT = (ids_BT != 0).long()  # id 0 is the pad token, which no prompt holds
    ending = {"eos_token_id": stops} if stops else {"min_new_tokens": NEW_TOKENS}
    torch.manual_seed(rows)
    start = time.process_time()
    out_BT = case.model.generate(
        input_ids=ids_BT,
        attention_mask=attention_BT,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        max_new_tokens=NEW_TOKENS,
        **ending,
    )
    seconds = time.process_time() - start
    ends = [[i + 1 for i, token in enumerate(row) if token in stops] for row in out_BT[:, width:].tolist()]
    return seconds, sum(end[0] if end else out_BT.shape[1] - width for end in ends)


def split_step(case: Case) -> dict[str, float]:
    """CPU seconds of the parts of one of our GRPO steps, each part run on its own on the same episodes."""
    parts: dict[str, float] = {}

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        start = time.process_time()
        yield
        parts[name] = parts.get(name, 0.0) + time.process_time() - start

    model, tasks = copy.deepcopy(case.model), [{"text": text} for text in case.texts[:PROMPTS]]
    prompts = case.prompts(PROMPTS)
    with clock("prefill"), torch.inference_mode():
        make_decoder(model, list(map(tuple, prompts)), NEW_TOKENS)
    settings: dict[str, Any] = {"group_size": GROUP, "max_new_tokens": NEW_TOKENS}
    with clock("decode"):
        completions = sample(model, prompts, stop_ids=[], generator=generator("bench", "split"), **settings)
    parts["decode"] -= parts["prefill"]
    with clock("environment"), mock.patch("common.episodes.sample", return_value=completions):
        episodes = run_episodes(model, case.tokenizer, CountTask, tasks, **settings)
        batch = collate(episodes, case.tokenizer.pad_token_id)
    optimizer = make_optimizer(list(model.parameters()), [], ALGO)
    for rows in policy.micro_batches(batch, torch.arange(len(episodes))):
        part = policy.select(batch, rows)
        with clock("forward"):
            logp_N = policy.score_tokens(model, part, 1.0).logp_N
            ratio_N = (logp_N - part.logp_BT[part.mask_BT]).exp()
        with clock("backward"):
            ratio_N.mean().backward()
    with clock("optimizer"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return parts


def matmul_peak() -> float:
    """Best float32 FLOP/s of square products that fit the cache, on this thread."""
    best = 0.0
    for size in (256, 384, 512):
        a, b = torch.randn(2, size, size, generator=generator("bench", "matmul", size))
        for _ in range(10):
            start = time.process_time()
            for _ in range(4):
                a @ b
            best = max(best, 4 * 2 * size**3 / (time.process_time() - start))
    return best


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Runs everything `rounds` times, ours and theirs by turns; {name: numbers}."""
    peak = flops = 0.0
    steps: dict[str, Times] = {"ours": [], "trl": [], "trl_no_checkpointing": []}
    sampling: dict[str, dict[str, list[tuple[float, int]]]] = {}
    splits: list[dict[str, float]] = []
    cases = [(f"fixed length, batch {rows}", rows, 1, []) for rows in (1, 8, 64, 256)]
    cases += [(f"ragged length, {rows // GROUP} groups of {GROUP}", rows, GROUP, case.stops) for rows in (8, 64, 256)]
    for turn in range(rounds):
        peak = max(peak, matmul_peak())
        ours, flops = grpo_ours(case)
        steps["ours"] += ours
        steps["trl"] += grpo_trl(case, True)
        steps["trl_no_checkpointing"] += grpo_trl(case, False)
        best = ", ".join(f"{name} {min(times):.3f}" for name, times in steps.items())
        print(f"round {turn + 1}/{rounds}: GRPO step, CPU s, best so far: {best}", flush=True)
        for name, rows, group, stops in cases:
            both = sampling.setdefault(name, {"ours": [], "generate": []})
            for _ in range(2):
                both["ours"].append(sampler_ours(case, rows, group, stops))
                both["generate"].append(sampler_generate(case, rows, group, stops))
            print(f"  {name}: {speed(both['ours']):,.0f} and {speed(both['generate']):,.0f} tokens per CPU s", flush=True)
        splits.append(split_step(case))
    return {
        "parameters": parameter_count(case.model),
        "rounds": rounds,
        "matmul_peak_gflops": round(peak / 1e9, 1),
        "grpo_step": {
            **{name: summary(times, min(steps["ours"])) for name, times in steps.items()},
            "gflops": round(flops / 1e9, 2),
            "share_of_peak": round(flops / min(steps["ours"]) / peak, 3),
            "split_cpu_s": {name: round(min(split[name] for split in splits), 4) for name in splits[0]},
        },
        "sampler": {name: compare(both) for name, both in sampling.items()},
        "machine": machine(),
        "packages": packages(),
    }


def speed(runs: list[tuple[float, int]]) -> float:
    """Tokens per CPU second of the fastest run."""
    return max(tokens / seconds for seconds, tokens in runs)


def summary(seconds: Times, ours: float) -> dict[str, float]:
    """Minimum, median and the minimum as a multiple of `ours`."""
    best, middle = min(seconds), statistics.median(seconds)
    return {"min_cpu_s": round(best, 4), "median_cpu_s": round(middle, 4), "n": len(seconds), "ratio": round(best / ours, 2)}


def compare(both: dict[str, list[tuple[float, int]]]) -> dict[str, float]:
    """Tokens per CPU second, best and median, and the ratio of the best."""
    row: dict[str, float] = {}
    for name, runs in both.items():
        row[f"{name}_tokens_per_s"] = round(speed(runs))
        row[f"{name}_median"] = round(statistics.median(tokens / seconds for seconds, tokens in runs))
    return row | {"ratio": round(speed(both["ours"]) / speed(both["generate"]), 2)}


def markdown(result: dict[str, Any]) -> str:
    """The README of results/bench/, from the numbers of bench.json."""
    step, host = result["grpo_step"], result["machine"]
    lines = [
        "# Speed",
        "",
        "Generated by `make bench` (`python -m scripts.bench`) from the numbers in bench.json; CPU seconds of one thread.",
        f"Model: {result['parameters'] / 1e6:.2f} M parameters, Qwen3-like ({SHAPE.hidden} wide, {SHAPE.layers} layers), "
        f"float32. Machine: {host['cpu']}. Each number is the best of {result['rounds']} rounds in which the two sides "
        "took turns; medians in brackets.",
        "",
        f"## One GRPO step: {PROMPTS} prompts x {GROUP} completions x {NEW_TOKENS} tokens",
        "",
        "| | CPU s per step | times ours |",
        "| --- | ---: | ---: |",
    ]
    trainer = f"TRL {result['packages']['trl']} GRPOTrainer"
    labels = {"ours": "this suite", "trl": trainer, "trl_no_checkpointing": f"{trainer}, gradient checkpointing off"}
    for name, label in labels.items():
        times = step[name]
        lines.append(f"| {label} | {times['min_cpu_s']:.3f} ({times['median_cpu_s']:.3f}) | {times['ratio']:.2f} |")
    total = sum(step["split_cpu_s"].values())
    lines += [
        "",
        f"Floor: {step['gflops']:.1f} GFLOP under the cost model; the machine's matrix product reaches "
        f"{result['matmul_peak_gflops']:.0f} GFLOP/s, of which the step gets {step['share_of_peak']:.0%}.",
        "",
        "Where the time of our step goes (parts run on their own):",
        "",
        "| part | CPU s | share |",
        "| --- | ---: | ---: |",
        *(f"| {name} | {seconds:.3f} | {seconds / total:.0%} |" for name, seconds in step["split_cpu_s"].items()),
        "",
        "## Sampling, tokens per CPU second",
        "",
        "| | this suite | transformers.generate | ratio |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, row in result["sampler"].items():
        ours = f"{row['ours_tokens_per_s']:,} ({row['ours_median']:,})"
        theirs = f"{row['generate_tokens_per_s']:,} ({row['generate_median']:,})"
        lines.append(f"| {name} | {ours} | {theirs} | {row['ratio']:.2f} |")
    lines += [
        "",
        "Fixed length: as many different prompts as rows, no row ends early. Ragged: completions end at one of a few "
        f"tokens (about {STOP_SHARE:.0%} a token), and the members of a group share their prompt; only tokens up to a "
        "row's end count.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """0 when measured and written, 2 on bad arguments."""
    options = {"rounds": "3", "folder": "results/bench"}
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    unknown = [argument for argument in arguments if argument.split("=", 1)[0] not in options or "=" not in argument]
    rounds = (options | given)["rounds"]
    if unknown or not rounds.isdigit() or int(rounds) < 1:
        print(f"error: {unknown or [f'rounds={rounds}']}: give rounds=<at least 1> and folder=<path>", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    case = build_case()
    if case.tokenizer(case.tokenizer.bos_token + case.texts[0])["input_ids"] != case.prompts(1)[0]:
        raise RuntimeError("the two sides would read different prompt tokens")
    result = measure(case, int(rounds))
    folder = Path((options | given)["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(strict_json(result, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
