"""Layer 3 - what happens round the update. RolloutCallback is the algorithm's other half; the rest can be switched off."""
