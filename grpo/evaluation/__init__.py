"""Evaluates the policy: accuracy, pass@k and other metrics, each with a confidence interval."""
