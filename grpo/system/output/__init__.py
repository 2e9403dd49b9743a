"""The console of the programs, counts in sentences, and secrets, which are masked in all that is printed or saved."""
