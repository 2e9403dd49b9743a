"""More surrogates, advantages, corrections and choices of tokens. Door: an axis of conf/algo."""
