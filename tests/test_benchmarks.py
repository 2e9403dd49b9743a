"""The benchmarks run, with the smallest settings, and compare like with like. What they measure is not looked at."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow


def results(script: str, *arguments: str):
    command = [sys.executable, f"benchmarks/{script}", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_trl_and_we_do_the_same_work():
    pytest.importorskip("trl")
    found = results("vs_trl.py", "--cases", "10", "short", "--cycles", "1")
    for case in found.values():
        assert case["trl"]["tokens"] == case["grpo"]["tokens"] and case["grpo"]["live"] > 48
        assert case["ratios"].keys() == {"total", "generation", "update", "rss"}
        for what, ratio in case["ratios"].items():
            assert ratio == pytest.approx(case["trl"][what] / case["grpo"][what])
        assert case["over_floor"] > 1
    assert found["10"]["grpo"]["tokens"] == 64 * 64
    assert 10 * 64 < found["short"]["grpo"]["tokens"] < 40 * 64
