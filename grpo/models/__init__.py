"""The policy, the reference, log-probabilities."""
