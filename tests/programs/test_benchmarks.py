"""The benchmarks run with the smallest settings and compare like with like. Their measurements are not checked."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
from conftest import ROOT
from helpers import programs

pytestmark = pytest.mark.slow


def results(script: str, *arguments: str):
    done = programs.command(f"benchmarks/{script}", *arguments, "--json", seconds=3600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_trl_and_we_do_the_same_work():
    pytest.importorskip("trl")
    found = results("vs_trl.py", "--cases", "short", "--cycles", "1")
    for case in found.values():
        assert case["trl"]["tokens"] == case["grpo"]["tokens"] and case["grpo"]["live"] > 48
        assert case["ratios"].keys() == {"total", "generation", "update", "rss"}
        for what, ratio in case["ratios"].items():
            assert ratio == pytest.approx(case["trl"][what] / case["grpo"][what])
        assert case["over_floor"] > 1
    assert 10 * 64 < found["short"]["grpo"]["tokens"] < 40 * 64


def test_two_runs_learn_from_the_same_prompts_from_the_same_policy(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from learning_vs_trl import CASES, SIDES, Rounds, ratio, summary, table

    case = replace(CASES["demo"], rollouts=1, problems=3, prompts=2, group=2, limit=16, batch=2)
    found, asked = {}, []
    for side, run in SIDES.items():
        records = []
        run(Rounds(case, 0, tmp_path / side, records.append))
        asked.append(records[1]["prompts"])
        found[side] = summary(records)
    assert asked[0] == asked[1] and len(asked[0]) == 2
    assert found["trl"]["right"][0] == found["grpo"]["right"][0] and len(found["grpo"]["right"][1]) == 3
    assert all(found[side]["cpu_s"][0] > 0 for side in SIDES)
    assert table([found]).count("\n| ") == 2  # after 0 rollouts and after 1

    made = [{"trl": {"cpu_s": [seconds, seconds]}, "grpo": {"cpu_s": [1.0, 1.0]}} for seconds in (2.0, 8.0)]
    value, low, high, seeds = ratio(
        made
    )  # 12.706 is the quantile of Student's t; the logarithms' standard error is ln 2
    assert (value, low, high, seeds) == pytest.approx((4, 4 * 2**-12.7062, 4 * 2**12.7062, 2), rel=1e-4)


def test_layouts_are_compared():
    (case,) = results(
        "update.py", "--shape", "tiny", "--prompts", "10", "--answers", "16", "--groups", "4", "--repeats", "1"
    )[:1]
    assert case["seconds"].keys() == case["ratios"].keys() == {"padded", "packed", "shared_prompt"}
    assert case["ratios"]["padded"] == 1 and case["gap"] < 1e-5


def test_samplers_are_compared():
    even, short = results("rollout.py", "--shapes", "tiny", "--prompt", "8", "--answer", "8", "--repeats", "1")
    assert not even["short"] and short["short"]
    assert {"built-in", "generate"} <= even["tokens/s"].keys() == short["tokens/s"].keys()


def test_cost_is_measured_against_what_grows():
    found = results("scaling.py", "--shape", "tiny", "--axes", "answer", "dataset")
    assert [point["tokens"] for point in found["answer"]["points"]] == [4 * 8 * (64 + n) for n in (32, 64, 128, 256)]
    assert found["answer"]["exponents"].keys() == {"rollout", "update", "rollout_bytes", "update_bytes"}
    assert found["dataset"]["exponents"].keys() == {"rollout", "rollout_bytes"}


def test_the_script_for_a_gpu_has_no_slips():
    """Every part that can run here does, on a shape for which no GPU is needed."""
    from on_gpu.table import COLUMNS

    found = results("gpu.py", "--shapes", "tiny", "--minutes", "50")
    assert found["device"]["name"] and found["device"]["torch"]
    missing = {"vllm": "vllm", "": "trl"}  # what a variant needs
    for result in found["results"]:
        values, part = result["values"], result["part"]
        assert values.keys() >= {key for key, _, _ in COLUMNS[part]}
        if result["status"] == "skipped":
            assert find_spec(missing[result["variant"]]) is None, result
            continue
        assert result["status"] == "ok", result
        assert values["preflight_s" if part == "preflight" else "tokens_per_s"] > 0
    assert [(result["part"], result["variant"]) for result in found["results"]] == [
        *[("update", variant) for variant in ("shared_prompt", "recompute", "no_liger", "packed", "padded")],
        *[("rollout", "builtin"), ("rollout", "vllm"), ("preflight", ""), ("trl", "")],
    ]


def test_a_forecast_is_compared_with_a_run():
    found = results("forecast.py", "--cases", "1m_lora")["1m_lora"]
    assert found["line"].startswith("memory: ")
    for phase in ("update", "rollout"):
        assert found[phase]["measured"] < 1.15 * found[phase]["forecast"] < 1.5 * found[phase]["measured"]
