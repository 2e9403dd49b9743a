"""`python -m grpo.plots` draws metrics of runs, and says what it lacks."""

import sys

import pytest

from grpo.extras.report.plots import main
from grpo.system.errors import UserError


def test_without_its_library_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "grpo.extras.report.run_plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UserError, match=r"needs matplotlib \(.*\): pip install -e '.\[plot\]'"):
        main(["outputs"])


def test_the_metrics_of_a_run_are_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "agg")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("task: {_target_: tasks.wordmath.Wordmath}\nseed: 0\n")
    (folder / "metrics.csv").write_text("step,eval/accuracy\n0,0.25\n1,0.5\n")
    main([str(folder), "--metrics", "eval/accuracy", "--out", str(tmp_path / "curve.png")])
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG" and "curve.png" in capsys.readouterr().out
