"""Worker processes that may be killed, with a deadline and a memory limit: grading computes in them."""
