"""Sampler and trainer on one GPU against transformers.generate and TRL, in five minutes: device.json and device.md.

    python -m scripts.device_check [folder=runs/device] [device=cuda] [size=all] [limit_s=300]

The counterpart of scripts.bench: bf16 weights, fused attention (PyTorch's scaled dot product attention), wall seconds
around a synchronised device. Our sampler runs twice, once step by step and once with each decoding step replayed as a CUDA
graph. What does not fit in `limit_s` any more is skipped, and what fails is written down with its reason; neither stops
the rest. ``size``: all, or one of the names. TRL is left out where it is not installed.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import Cache

from common import decoding
from common.compute import FORWARD_FLOPS
from common.decoding import ModelDecoder, SlotLayer
from common.files import strict_json
from common.models import parameter_count
from common.provenance import machine, packages
from scripts import bench_cases
from scripts.bench_cases import Case, Size, qwen

Row = dict[str, Any]
SIZES = [
    Size("10M", qwen(384, 7, 6, 6), (8, 8, 64), 3, 2, (64, 256), (32,)),
    Size("135M", bench_cases.SMOLLM2, (8, 8, 64), 3, 2, (64, 256), (32,)),
]
TINY = Size("tiny", qwen(32, 2, 2, 1), (2, 2, 4), 1, 1, (2,), (1,), new_tokens=4)


class GraphLayer(SlotLayer):
    """Keys and values of one layer, all slots of which are read; `slot`, a tensor, says where the new ones go."""

    def __init__(self, layer: SlotLayer, slot: Tensor) -> None:
        super().__init__(layer.slots)
        self.keys, self.values, self.used, self.slot = layer.keys, layer.values, layer.used, slot
        self.keys[:, :, self.used :] = 0
        self.values[:, :, self.used :] = 0
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys, self.values


class GraphDecoder(ModelDecoder):
    """ModelDecoder whose step has a fixed shape, so that a GPU replays it as one graph; without a GPU it just runs."""

    def start(self, source_B: Tensor) -> None:
        super().start(source_B)
        self.used = self.prompt_slots
        unwritten_BT = nn.functional.pad(self.hidden_PT[source_B], (0, self.slots - self.prompt_slots), value=True)
        self._fix_shapes(decoding.additive(unwritten_BT, self.model.dtype))

    def _fix_shapes(self, shown_BT: Tensor) -> None:
        device, rows = self.last_B.device, len(self.last_B)
        self.slot = torch.full((1,), self.used, device=device)
        self.fixed = [GraphLayer(layer, self.slot) for layer in self.layers]
        self.fixed_cache = Cache(layers=list(self.fixed))
        self.tokens_B1, self.positions_B1 = (torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in range(2))
        self.shown_B11T = shown_BT[:, None, None].contiguous()
        self.graph = None
        if device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._forward()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._forward()

    def _forward(self) -> None:
        self.logits_BV = self.model(
            self.tokens_B1,
            attention_mask=self.shown_B11T,
            position_ids=self.positions_B1,
            past_key_values=self.fixed_cache,
            use_cache=True,
        ).logits[:, -1]

    def step(self, tokens_B: Tensor) -> Tensor:
        self.last_B = self.last_B + 1
        self.tokens_B1.copy_(tokens_B[:, None])
        self.positions_B1.copy_(self.last_B[:, None])
        self.slot.fill_(self.used)
        self.shown_B11T[..., self.used] = 0
        self.used += 1
        if self.graph is None:
            self._forward()
        else:
            self.graph.replay()
        return self.logits_BV

    def keep(self, index_B: Tensor) -> None:
        for layer in self.layers:
            layer.used = self.used
        shown_BT = self.shown_B11T[index_B, 0, 0]
        super().keep(index_B)
        self._fix_shapes(shown_BT)


class Clock:
    """Wall seconds, with the device's queue emptied first."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def guarded(rows: list[Row], label: Row, deadline: float, device: str, work: Callable[[], Row]) -> None:
    """Adds what `work` measures to the rows, with peak memory; or why there is nothing."""
    print(" ".join(str(value) for value in label.values()), flush=True)
    if time.perf_counter() > deadline:
        rows.append(label | {"note": "skipped: out of time"})
        return
    try:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        found = work()
        if device == "cuda":
            found["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
        rows.append(label | found)
    except Exception as error:  # one side that fails must not cost the rest of five minutes on a borrowed GPU
        rows.append(label | {"note": f"failed: {type(error).__name__}: {str(error)[:200]}"})


def measure_samplers(case: Case, size: Size, device: str, deadline: float, rows: list[Row]) -> None:
    """Fixed and ragged lengths on the three samplers; the best of the rounds after one that does not count."""
    clock = Clock(device)

    def graph(*arguments: Any) -> bench_cases.Run:
        with mock.patch.object(decoding, "ModelDecoder", GraphDecoder), mock.patch.object(decoding, "can_fuse", bool_no):
            return bench_cases.sampler_ours(*arguments, clock=clock)

    sides = {
        "ours": lambda *arguments: bench_cases.sampler_ours(*arguments, clock=clock),
        "ours, CUDA graph": graph,
        "generate": lambda *arguments: bench_cases.sampler_generate(*arguments, clock=clock),
    }
    shapes = [(count, 1, []) for count in size.batches] + [(8 * count, 8, case.stops) for count in size.groups]
    for count, group, stops in shapes:
        for name, side in sides.items():

            def work(side: Callable = side, arguments: tuple = (case, count, group, stops, size.new_tokens)) -> Row:
                runs = [side(*arguments) for _ in range(size.rounds + 1)][1:]
                speed = max(tokens / seconds for seconds, tokens in runs)
                tflops = speed * FORWARD_FLOPS * parameter_count(case.model) / 1e12
                return {"tokens_per_s": round(speed, 1), "tflops": round(tflops, 4)}

            label = {"model": size.name, "what": "sample", "rows": count, "ragged": bool(stops), "side": name}
            guarded(rows, label, deadline, device, work)


def bool_no(model: Any) -> bool:
    """No model is fused: the graph is that of the model's own forward."""
    return False


def measure_trainers(case: Case, size: Size, device: str, deadline: float, rows: list[Row]) -> None:
    """A GRPO step of ours and of TRL's trainer."""
    clock, (prompts, group, new_tokens) = Clock(device), size.grpo
    options = {"use_cpu": device == "cpu", "bf16": device == "cuda"}
    sides: dict[str, Callable[[], tuple[list[float], float]]] = {"ours": lambda: bench_cases.grpo_ours(case, size, clock)}
    if importlib.util.find_spec("trl") is not None:
        sides["TRL"] = lambda: bench_cases.grpo_trl(case, size, False, clock, **options)
    for name, side in sides.items():

        def work(side: Callable = side) -> Row:
            seconds = min(side()[0])
            return {"seconds": round(seconds, 4), "tokens_per_s": round(prompts * group * new_tokens / seconds, 1)}

        label = {"model": size.name, "what": "GRPO step", "rows": prompts * group, "ragged": False, "side": name}
        guarded(rows, label, deadline, device, work)


def table(result: Row) -> str:
    """device.md."""
    lines = [
        f"# {result['machine'].get('gpu', result['machine']['cpu'])}",
        "",
        f"{result['dtype']}, matrix products alone: {result['product_tflops']} TFLOP/s; {result['seconds']} s in all.",
        "",
        "| model | what | rows | length | side | tokens/s | s | TFLOP/s | MiB | |",
        "| --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in result["rows"]:
        cells = [row.get(key, "") for key in ("tokens_per_s", "seconds", "tflops", "peak_mib", "note")]
        first = [row["model"], row["what"], row["rows"], "ragged" if row["ragged"] else "fixed", row["side"]]
        lines.append("| " + " | ".join(str(cell) for cell in [*first, *cells]) + " |")
    return "\n".join([*lines, ""])


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """key=value words over the defaults; ValueError says what is not understood."""
    options = {"folder": "runs/device", "device": "cuda", "size": "all", "limit_s": "300"}
    for word in arguments:
        key, equals, value = word.partition("=")
        if key not in options or not equals:
            raise ValueError(f"{word}: allowed are {', '.join(f'{k}=' for k in options)}")
        options[key] = value
    names = ["all", "tiny", *(size.name for size in SIZES)]
    if options["size"] not in names:
        raise ValueError(f"size={options['size']}: allowed are {', '.join(names)}")
    if options["device"] not in ("cpu", "cuda") or (options["device"] == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device={options['device']}: allowed are cpu and, where torch sees a GPU, cuda")
    return options


def main(arguments: Sequence[str]) -> int:
    """0 when the table is written, whatever was skipped; 1 if something failed, 2 on bad arguments."""
    try:
        options = parse(arguments)
        limit = float(options["limit_s"])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    start, device = time.perf_counter(), options["device"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows: list[Row] = []
    rates = {}
    for size in [TINY] if options["size"] == "tiny" else [s for s in SIZES if options["size"] in ("all", s.name)]:
        case = bench_cases.build_case(size.shape, device, dtype)
        rates[size.name] = round(bench_cases.product_rate(case.model, max(size.batches), 0.2, Clock(device)) / 1e12, 3)
        measure_samplers(case, size, device, start + limit, rows)
        measure_trainers(case, size, device, start + limit, rows)
    result = {
        "machine": machine(),
        "packages": packages(),
        "dtype": str(dtype).removeprefix("torch."),
        "product_tflops": rates,
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }
    folder = Path(options["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device.json").write_text(strict_json(result, indent=2) + "\n", encoding="utf-8")
    (folder / "device.md").write_text(table(result), encoding="utf-8")
    print(table(result))
    return 1 if any("failed" in row.get("note", "") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
