"""The files of a run and everything that reads them: tables, comparisons, plots, the report, the model card."""

from grpo.moved import door

__getattr__ = door(__name__)
