"""The bench: what it measures is the same on both sides, and its page says what its numbers say."""

import pytest
import torch

from common import decoding
from common.models import parameter_count
from common.report import performance
from common.rollout import sample
from scripts import bench, device_check
from scripts.bench_cases import SIZES, SMOLLM2, SPECIALS, Size, build_case, qwen, sampler_generate, sampler_ours

TINY = Size("tiny", qwen(32, 2, 2, 1), (2, 2, 4), 1, 1, (1, 2), (1,), new_tokens=4)


@pytest.fixture(scope="module")
def case():
    return build_case(TINY.shape)


def test_sizes_have_the_parameters_of_their_names() -> None:
    for size in SIZES[:-1]:
        millions = parameter_count(build_case(size.shape).model) / 1e6
        assert abs(millions / float(size.name.split()[0]) - 1) < 0.08, (size.name, millions)
    assert (SIZES[-1].shape, SMOLLM2.num_hidden_layers, SMOLLM2.vocab_size) == (SMOLLM2, 30, 49152)


def test_no_special_token_is_ever_written(case) -> None:
    logits_TV = case.model(torch.tensor(case.prompts(1))).logits[0, 1:]
    assert float(logits_TV.softmax(-1)[:, :SPECIALS].max()) < 1e-12


def test_both_samplers_write_all_tokens(case) -> None:
    assert sampler_ours(case, 2, 1, [], 4)[1] == sampler_generate(case, 2, 1, [], 4)[1] == 8
    assert 8 <= sampler_ours(case, 8, 8, case.stops, 4)[1] <= 32
    assert 8 <= sampler_generate(case, 8, 8, case.stops, 4)[1] <= 32


def test_sampler_rows(case) -> None:
    rows = bench.measure_sampler(case, TINY, rounds=1)
    assert [(row["rows"], row["group"], row["ragged"]) for row in rows] == [(1, 1, False), (2, 1, False), (8, 8, True)]
    for row in rows:
        assert row["ratio"] == round(row["ours_tokens_per_s"] / row["generate_tokens_per_s"], 2) > 0
        assert ("share_of_roofline" in row) != row["ragged"]


def test_peak_memory_is_what_the_work_adds() -> None:
    done, grown = bench.peak_memory(lambda: float(torch.ones(25 * 2**18).sum()))
    assert done == 25 * 2**18
    assert grown is None or 20 < grown < 60


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rounds=0"], "error: rounds=0: give rounds=<at least 1>"),
        (["sizes=2M"], "error: sizes=2M: give"),
        (["speed"], "error: speed: give"),
    ],
)
def test_bench_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(words) == 2
    assert capsys.readouterr().err.startswith(message)


def measured(name: str, parameters: int, trl: float, plain: float, share: float, ratios: tuple[float, float]) -> dict:
    side = {"min_cpu_s": 0.5, "median_cpu_s": 0.6, "n": 3, "tokens_per_s": 8192, "ratio": 1.0, "peak_mib": 12}
    sampler = {"ours_tokens_per_s": 5000.4, "ours_median": 4000, "generate_tokens_per_s": 2500, "generate_median": 2400}
    sampler |= {"ours_peak_mib": None, "generate_peak_mib": 3, "new_tokens": 64}
    split = dict(zip(performance.PARTS, (0.1, 0.3, 0.0, 0.2, 0.3, 0.1), strict=True))
    return {
        "name": name,
        "parameters": parameters,
        "rounds": 3,
        "grpo_step": {
            "prompts": 8,
            "group": 8,
            "new_tokens": 64,
            "sides": {"ours": side, "trl": side | {"ratio": trl}, "trl_no_checkpointing": side | {"ratio": plain}},
            "share_of_roofline": 0.5,
            "split_cpu_s": split | {"in attention": 0.2, "in norms and gates": 0.1},
        },
        "sampler": [
            sampler | {"rows": 256, "group": 1, "ragged": False, "ratio": ratios[0], "share_of_roofline": share},
            sampler | {"rows": 64, "group": 8, "ragged": True, "ratio": ratios[1]},
        ],
    }


def test_goals_take_the_faster_of_their_variants_and_the_slower_of_our_cases() -> None:
    sizes = [
        measured("0.6 M", 624_512, 3.4, 2.9, 0.1, (2.0, 3.0)),
        measured("3 M", 3_000_000, 9, 9, 0.6, (0.99, 3.0)),
        measured("10 M", 10_000_000, 2.0, 2.5, 0.1, (1.0, 3.0)),
        measured("135 M", 135_000_000, 9, 9, 0.1, (1.1, 1.49)),
    ]
    assert [(goal["goal"], goal["value"], goal["reached"]) for goal in performance.goals(sizes)] == [
        (3, 2.9, False),
        (1.0, 2.0, True),
        (0.6, 0.6, True),
        (1.0, 0.99, False),
        (2, 2.0, True),
        (1.0, 1.0, True),
        (1.5, 1.49, False),
        (1.0, 1.1, True),
    ]


def test_the_page_says_what_the_numbers_say() -> None:
    sizes = [measured("0.6 M", 624_512, 3.4, 2.9, 0.1, (2.0, 3.0))]
    host = {"cpu": "Some CPU"}
    versions = {"torch": "2", "transformers": "5", "trl": "1"}
    result = {"machine": host, "packages": versions, "load_before": 0.3, "load_after": None, "sizes": sizes}
    page = performance.page(result)
    for line in (
        "| GRPO step at 0.6 M, times as fast as TRL's (the faster of its two) | 3.00 | 2.90 | 5.80 | not reached |",
        "| 0.62 M | 8 x 8 x 64 | this suite | 0.500 (0.600) | 8,192 | 1.00 | 12 | 50% |",
        "| 0.62 M | 1.000 | 10% | 30% | 0% | 20% | 30% | 10% | 20% | 10% | 70% |",
        "| 0.62 M | 256 | 64 each | 5,000 (4,000) | 2,500 (2,400) | 2.00 | – / 3 | 10% |",
        "| 0.62 M | 64 | ragged, groups of 8 | 5,000 (4,000) | 2,500 (2,400) | 3.00 | – / 3 |  |",
    ):
        assert line in page.splitlines()
    assert "before and after: 0.3 and –" in page


def test_the_graph_decoder_is_the_decoder(case, monkeypatch) -> None:
    monkeypatch.setattr(decoding, "can_fuse", device_check.bool_no)
    settings = {"group_size": 4, "max_new_tokens": 12, "stop_ids": list(range(4, 30))}
    prompts = case.prompts(5)
    plain = sample(case.model, prompts, generator=torch.Generator().manual_seed(1), **settings)
    monkeypatch.setattr(decoding, "ModelDecoder", device_check.GraphDecoder)
    fixed = sample(case.model, prompts, generator=torch.Generator().manual_seed(1), **settings)
    assert len({len(completion.ids) for completion in plain}) > 3  # rows were dropped on the way
    for ours, theirs in zip(fixed, plain, strict=True):
        assert ours.ids == theirs.ids
        assert torch.allclose(torch.tensor(ours.logps), torch.tensor(theirs.logps), atol=1e-5)


def test_the_device_script_says_what_it_skips_and_what_fails() -> None:
    rows: list[dict] = []
    device_check.guarded(rows, {"side": "a"}, deadline=0.0, device="cpu", work=dict)
    device_check.guarded(rows, {"side": "b"}, deadline=1e12, device="cpu", work=lambda: {"x": 1 // 0})
    device_check.guarded(rows, {"side": "c"}, deadline=1e12, device="cpu", work=lambda: {"x": 1})
    assert [row.get("note") for row in rows[:2]] == [
        "skipped: out of time",
        "failed: ZeroDivisionError: integer division or modulo by zero",
    ]
    assert rows[2] == {"side": "c", "x": 1}


@pytest.mark.parametrize("word", ["size=huge", "device=tpu", "limit_s=soon", "fast"])
def test_the_device_script_refuses(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main(["device=cpu", word]) == 2
    assert capsys.readouterr().err.startswith("error: ")
