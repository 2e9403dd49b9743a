"""Which prompts come next, and which samples count. Doors: `sampler`, `selection`."""
