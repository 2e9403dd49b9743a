"""More optimizers: Muon, AdamW in 8 bits; the scale of a loss in float16. Door: `optim`."""
