"""Engines sample from the policy: token ids in, token ids and their log-probabilities out."""
