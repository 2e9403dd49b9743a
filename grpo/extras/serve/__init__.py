"""Serves any engine over HTTP: `python -m grpo.serve`.

- batching: the one thread that owns the engine
- served_weights: the model and the adapter that the engine serves
- service: requests to token ids, through the engine, and back
- limits: the largest request
- gate: slow connections, strangers, large bodies, clients that left
- api: our endpoints
- clients: the endpoints of OpenAI's, Anthropic's and vLLM's APIs
- trl: the endpoints that clients of TRL expect
- refusals: errors in the client's form
- metrics: numbers for Prometheus
"""

# ports; samples of others become groups; calls and conversations in JSON are read
NEEDS = ("network", "sources", "tools")
