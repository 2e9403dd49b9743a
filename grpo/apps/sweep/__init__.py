"""A sweep: a process for each job."""
