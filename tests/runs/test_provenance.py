"""A run keeps the files of the user that it used, without secrets."""

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import torch
from conftest import ROOT

from grpo.runs import provenance
from grpo.runs.manifest import revision
from grpo.runs.provenance import keep_code
from grpo.system.output.users_code import is_users_file


def test_the_user_s_files_are_kept(tmp_path, monkeypatch):
    mine, other = tmp_path / "kept_mine.py", tmp_path / "a b" / "other.py"
    other.parent.mkdir()
    mine.write_text("import kept_used\nTOKEN = 'hf_abcdefghijklmnopqrstuv'\n")
    (tmp_path / "kept_used.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    __import__("kept_mine")
    other.write_text("y = 2\n")
    (tmp_path / "kept_named.py").write_text("z = 3\n")  # which nothing has imported
    monkeypatch.chdir(tmp_path)
    hashes = keep_code(
        tmp_path / "run", ["seed=1", "task.rewards=[a b/no.py:f]", "+x={y: './a b/other.py:f', z: kept_named.py:g}"]
    )
    ours = {Path(name).name: digest for name, digest in hashes.items() if Path(name).is_relative_to(tmp_path)}
    assert ours == {
        name: sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in ("kept_mine.py", "kept_used.py", "kept_named.py")
    }
    assert (tmp_path / "run" / "code" / f"kept_used.{ours['kept_used.py'][:8]}.py").read_text() == "x = 1\n"
    assert (
        tmp_path / "run" / "code" / f"kept_mine.{ours['kept_mine.py'][:8]}.py"
    ).read_text() == "import kept_used\nTOKEN = '***'\n"
    ours = [str(ROOT / name) for name in ("grpo/", "tasks/", "hydra_plugins/", "train.py", "eval.py")]
    others = [name for name in hashes if "site-packages" in name or name.startswith(tuple(ours))]
    assert not others and subprocess.__file__ not in hashes
    packages = (tmp_path / "run" / "packages.txt").read_text().splitlines()
    assert any(line.startswith("torch==") for line in packages) and packages == sorted(packages, key=str.lower)


def test_packages_python_and_this_project_are_not_the_user_s():
    others = [subprocess.__file__, torch.__file__, provenance.__file__, "<string>", None]
    assert not any(map(is_users_file, others)) and is_users_file(__file__)


def test_changes_of_the_code_are_a_patch(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "code")
    (tmp_path / "code").mkdir()
    assert provenance.patch() == "" and revision(tmp_path / "code") is None  # no checkout
    (tmp_path / "code" / "loss.py").write_text("clip = 0.2\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], cwd=tmp_path / "code", check=True)
    keep_code(tmp_path / "clean", [])
    assert not (tmp_path / "clean" / "uncommitted.patch").exists()
    (tmp_path / "code" / "loss.py").write_text("clip = 0.3\n")
    for staged in (False, True):
        keep_code(tmp_path / f"changed{staged}", [])
        assert "-clip = 0.2\n+clip = 0.3\n" in (tmp_path / f"changed{staged}" / "uncommitted.patch").read_text()
        subprocess.run([*git, "add", "."], cwd=tmp_path / "code", check=True)


def test_a_git_that_hangs_is_named_and_left_out(tmp_path, monkeypatch, caplog):
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(provenance, "GIT", 0.05)
    assert revision(tmp_path) is None
    assert f"git status did not end within 0.05 s in {tmp_path}" in caplog.text
