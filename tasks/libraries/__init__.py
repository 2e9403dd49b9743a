"""Tasks made of other libraries."""
