"""Where groups of finished samples come from, if the run does not play them itself."""
