"""Layer 0 - the one exception a user is meant to read."""


class UserError(ValueError):
    """A mistake in the set-up, told in one line: what was wrong, what is allowed, what to do."""
