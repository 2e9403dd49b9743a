"""Three parts of one loss: each with a denominator of its own."""
