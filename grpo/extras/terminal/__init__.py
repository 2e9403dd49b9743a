"""Progress, samples and the summary of a run, on the terminal. Door: a callback (`callbacks=terminal`)."""

NEEDS = ("health",)  # what it warned about, and who waited
