"""PPO's values: a critic beside the policy (arXiv 1707.06347). Door: `critic`."""
