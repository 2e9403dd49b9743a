"""Layers that carry a state from token to token (convolutions, gated delta rules, Mamba) in packed rows and in a KV cache.
Door: `grpo.models.FOLLOWERS`, which grpo/__init__.py fills."""
