"""Puts conf/, tasks/, train.py and eval.py, which lie beside the package, into a wheel as grpo/project."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithProject(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        project, skipped = Path(self.build_lib, "grpo", "project"), shutil.ignore_patterns("__pycache__")
        for name in ("conf", "tasks"):
            shutil.copytree(name, project / name, dirs_exist_ok=True, ignore=skipped)
        for name in ("train.py", "eval.py"):
            shutil.copy(name, project)


setup(cmdclass={"build_py": WithProject})
