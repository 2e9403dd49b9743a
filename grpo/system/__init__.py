"""What every room stands on. Knows nothing of learning."""
