"""Callbacks around the update. RolloutCallback is part of the algorithm; the others can be switched off."""
