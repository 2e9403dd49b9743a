"""A policy that sees: pictures in messages become places in prompts, and these become features. Door: `model.vision`, by
`model.eyes`."""
