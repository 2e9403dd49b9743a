"""The update, and the callbacks around it."""
