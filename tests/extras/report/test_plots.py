"""`python -m grpo.plots` draws metrics of runs, and says what it lacks."""

import sys

import pytest

from grpo.extras.report.plots import main
from grpo.runs.run import Run
from grpo.system.errors import UserError


def test_without_its_library_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "grpo.extras.report.run_plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UserError, match=r"needs matplotlib \(.*\): pip install -e '.\[plot\]'"):
        main(["outputs"])


def test_an_interval_of_two_seeds_does_not_hide_the_curves(tmp_path):
    """Lengths of 40 and 60: their mean of 50 has the interval -77 to 177, the other one of 30 has no width."""
    plots = pytest.importorskip("grpo.extras.report.run_plots")
    runs = []
    for seed, length in enumerate((40, 60)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "config.yaml").write_text(f"task: {{}}\nseed: {seed}\n")
        (folder / "metrics.csv").write_text(f"step,rollout/length\n1,30\n2,{length}\n")
        runs.append(Run(folder))
    _, (axes,) = plots.panels(1)
    plots.draw_curves(runs, "rollout/length", axes)
    assert axes.get_ylim() == (10, 70)  # 30 - 20, 50 + 20


def test_the_metrics_of_a_run_are_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "agg")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("task: {_target_: tasks.wordmath.Wordmath}\nseed: 0\n")
    (folder / "metrics.csv").write_text("step,eval/accuracy\n0,0.25\n1,0.5\n")
    main([str(folder), "--metrics", "eval/accuracy", "--out", str(tmp_path / "curve.png")])
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG" and "curve.png" in capsys.readouterr().out
