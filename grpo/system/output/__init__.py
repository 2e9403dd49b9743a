"""What programs print: the console, and counts in sentences."""
