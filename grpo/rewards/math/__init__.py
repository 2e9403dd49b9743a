"""Is this the right answer? Extraction, exact numbers, algebra."""
