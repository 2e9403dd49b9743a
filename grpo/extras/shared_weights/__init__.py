"""One copy of the weights for trainer and vLLM. Door: `engine=vllm_shared`."""
