"""vLLM servers, on this or other machines."""
