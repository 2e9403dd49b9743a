"""The update, and what happens round it."""
