"""What happens round the update. RolloutCallback is a half of the algorithm; the others can be switched off."""
