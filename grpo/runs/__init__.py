"""The files of a run and everything that reads them: tables, comparisons, plots, the report, the model card."""
