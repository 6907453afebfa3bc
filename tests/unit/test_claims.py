"""claims.yaml: what is accepted, what is refused with which sentence, and the verdicts on records."""

import pytest
import yaml

from common.claims import ClaimsError, evaluate, evaluate_all, load_claims
from common.records import Point

CLAIM = {
    "id": "rl-raises",
    "sentence": "RL raises success",
    "book": "+3.5 points",
    "source": "11.5 to 15.0",
    "test": {
        "kind": "difference",
        "metric": "success",
        "split": "ood",
        "arm": "grpo",
        "versus": "start",
        "direction": "greater",
    },
}


def load(tmp_path, claim=None, test=None, **changes):
    folder = tmp_path / "exp_7_99"
    folder.mkdir(exist_ok=True)
    data = {"experiment": "7-99", "title": "T", "claims": [{**CLAIM, **(claim or {}), "test": test or CLAIM["test"]}]}
    (folder / "claims.yaml").write_text(yaml.safe_dump({**data, **changes}))
    return load_claims(folder / "claims.yaml")


def value_test(**changes):
    test = {
        "kind": "value",
        "metric": "success",
        "split": "ood",
        "arm": "grpo",
        "threshold": 0.2,
        "direction": "greater",
    }
    return {key: value for key, value in {**test, **changes}.items() if value is not None}


def records(levels, seeds=range(100, 105), spread=0.01, metric="success", **labels):
    return [
        {"arm": arm, "seed": seed, "split": "ood", "metric": metric, "value": level + spread * (seed % 5 - 2), "n": 50}
        | {"step": 9, "final": True}
        | labels
        for arm, level in levels.items()
        for seed in seeds
    ]


def test_a_good_file_is_typed(tmp_path):
    claims = load(tmp_path)
    assert claims.experiment == "7-99"
    claim = claims.claims[0]
    assert claim.test.points == [Point("grpo", "success", "ood"), Point("start", "success", "ood")]
    assert claim.test.bounds == (0.0, float("inf"))
    assert claim.study == "main"
    assert claims.metric("success").unit == "rate"


def test_versus_may_change_any_part_of_the_number(tmp_path):
    versus = {"metric": "success_first", "step": 10}
    test = {**CLAIM["test"], "versus": versus}
    assert load(tmp_path, test=test).claims[0].test.points[1] == Point("grpo", "success_first", "ood", 10)


@pytest.mark.parametrize(
    ("test", "bounds"),
    [
        ({**CLAIM["test"], "direction": "less", "margin": 0.02}, (float("-inf"), -0.02)),
        (value_test(), (0.2, float("inf"))),
        (value_test(direction="less"), (float("-inf"), 0.2)),
        (value_test(kind="within", threshold=None, direction=None, low=0.1), (0.1, float("inf"))),
        (
            value_test(kind="within", threshold=None, direction=None, low=-0.03, high=0.03, versus="start"),
            (-0.03, 0.03),
        ),
    ],
)
def test_bounds_say_what_the_claim_asks(tmp_path, test, bounds):
    assert load(tmp_path, test=test).claims[0].test.bounds == bounds


@pytest.mark.parametrize(
    ("claim", "test", "changes", "words"),
    [
        ({"id": "RL raises"}, None, {}, ["claim 'RL raises'.id", "kebab-case"]),
        ({"sentense": "x"}, None, {}, ["claim 'rl-raises'.sentense", "Did you mean", "sentence"]),
        ({"book": 3.5}, None, {}, ["claim 'rl-raises'.book=3.5", "text"]),
        (None, {**CLAIM["test"], "direction": "up"}, {}, ["claim 'rl-raises'.test.direction=up", "greater, less"]),
        (None, {**CLAIM["test"], "kind": "differs"}, {}, ["claim 'rl-raises'.test.kind=differs", "difference"]),
        (None, {**CLAIM["test"], "metric": "sucess"}, {}, ["claim 'rl-raises'.test.metric=sucess", "registry"]),
        (None, {**CLAIM["test"], "margin": "1e-3x"}, {}, ["claim 'rl-raises'.test.margin", "number"]),
        (None, {**CLAIM["test"], "margin": -1.0}, {}, ["claim 'rl-raises'.test.margin", "not negative"]),
        (
            None,
            {**CLAIM["test"], "threshold": 0.1},
            {},
            ["claim 'rl-raises'.test.threshold", "not used by kind=difference"],
        ),
        (None, {**CLAIM["test"], "versus": "grpo"}, {}, ["claim 'rl-raises'.test.versus", "very number"]),
        (None, value_test(threshold=None), {}, ["claim 'rl-raises'.test.threshold is missing"]),
        (None, value_test(arm=None), {}, ["claim 'rl-raises'.test.arm is missing"]),
        (None, value_test(kind="within", threshold=None, direction=None), {}, ["test.low=None", "at least one"]),
        (None, None, {"claims": [CLAIM, CLAIM]}, ["claim 'rl-raises'.id", "twice"]),
        (None, None, {"clams": []}, ["clams", "Did you mean `claims`"]),
        (None, None, {"metrics": {"m": {"unit": "percent", "meaning": "x"}}}, ["metrics.m.unit=percent", "rate"]),
        (
            None,
            None,
            {"table": [{"variant": "a", "metric": "success", "split": "ood", "claim": "rl-rises"}]},
            ["table row 1.claim=rl-rises", "Did you mean `rl-raises`"],
        ),
        (
            None,
            None,
            {"discrepancies": [{"id": "d", "book": "b", "source": "s", "ours": {"arm": "a", "split": "ood"}}]},
            ["discrepancy 'd'.ours[0].metric is missing"],
        ),
    ],
)
def test_mistakes_name_file_claim_and_key(tmp_path, claim, test, changes, words):
    with pytest.raises(ClaimsError) as caught:
        load(tmp_path, claim, test, **changes)
    message = str(caught.value)
    assert message.startswith("exp_7_99/claims.yaml: ")
    for word in words:
        assert word in message


def test_broken_yaml_is_named(tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text("claims: [")
    with pytest.raises(ClaimsError, match="not valid YAML"):
        load_claims(path)


@pytest.mark.parametrize(("grpo", "verdict"), [(0.30, "supported"), (0.10, "contradicted"), (0.201, "undecided")])
def test_a_difference_has_three_verdicts(tmp_path, grpo, verdict):
    claim = load(tmp_path).claims[0]
    rows = records({"start": 0.2}) + records({"grpo": grpo}, spread=-0.01)
    finding = evaluate(claim, rows, rate=True)
    assert (finding.verdict, finding.interval.seeds, finding.interval.paired) == (verdict, 5, True)
    assert finding.interval.mean == pytest.approx(grpo - 0.2)


@pytest.mark.parametrize(("level", "verdict"), [(0.30, "supported"), (0.10, "contradicted"), (0.205, "undecided")])
def test_a_value_has_three_verdicts(tmp_path, level, verdict):
    claim = load(tmp_path, test=value_test()).claims[0]
    assert evaluate(claim, records({"grpo": level}), rate=True).verdict == verdict


@pytest.mark.parametrize(("level", "verdict"), [(0.20, "supported"), (0.50, "contradicted"), (0.25, "undecided")])
def test_a_range_has_three_verdicts(tmp_path, level, verdict):
    test = value_test(kind="within", threshold=None, direction=None, low=0.15, high=0.25)
    assert evaluate(load(tmp_path, test=test).claims[0], records({"grpo": level}), rate=True).verdict == verdict


def test_a_margin_raises_the_bar(tmp_path):
    rows = records({"start": 0.20, "grpo": 0.25})
    assert evaluate(load(tmp_path).claims[0], rows, rate=True).verdict == "supported"
    strict = load(tmp_path, test={**CLAIM["test"], "margin": 0.1}).claims[0]
    assert evaluate(strict, rows, rate=True).verdict == "contradicted"


def test_e17_two_seeds_or_tuning_seeds_give_no_verdict(tmp_path):
    claim = load(tmp_path).claims[0]
    two = evaluate(claim, records({"start": 0.2, "grpo": 0.9}, seeds=range(100, 102)), rate=True)
    assert (two.verdict, two.reason) == ("no verdict", "2 of at least 3 seeds")
    tuning = evaluate(claim, records({"start": 0.2, "grpo": 0.9}, seeds=range(98, 103)), rate=True)
    assert (tuning.verdict, tuning.reason) == ("no verdict", "seeds below 100 are for tuning")


def test_missing_records_are_named_and_only_final_ones_count(tmp_path):
    claim = load(tmp_path).claims[0]
    rows = records({"start": 0.2}) + records({"grpo": 0.9}, final=False)
    finding = evaluate(claim, rows, rate=True)
    assert (finding.verdict, finding.interval) == ("no verdict", None)
    assert finding.reason == "no record of success of grpo on ood"
    early = load(tmp_path, test={**CLAIM["test"], "step": 9}).claims[0]
    assert evaluate(early, rows, rate=True).verdict == "supported"


def test_e06_undefined_values_leave_the_pairs_that_are_defined(tmp_path):
    rows = records({"start": 0.2, "grpo": 0.9})
    rows[-1]["value"] = None
    finding = evaluate(load(tmp_path).claims[0], rows, rate=True)
    assert (finding.verdict, finding.interval.seeds) == ("supported", 4)


def test_each_study_judges_its_own_claims(tmp_path):
    claims = load(tmp_path, {"study": "ablation"})
    rows = records({"start": 0.2, "grpo": 0.9})
    assert evaluate_all(claims, rows) == []
    assert [finding.verdict for finding in evaluate_all(claims, rows, "ablation")] == ["supported"]
