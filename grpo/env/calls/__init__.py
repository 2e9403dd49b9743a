"""The calls of tools in what a policy writes: the pieces of which they are made, and the forms of the models."""
