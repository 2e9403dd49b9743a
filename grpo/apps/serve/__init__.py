"""Any engine as a server: `python -m grpo.serve`.

batching: the one thread that owns the engine. served_weights: what the engine is given. service: token ids in and out of it.
api: our endpoints. openai: those that OpenAI's clients know.
"""
