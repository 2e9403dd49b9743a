"""Sources of samples that need an application: a server in this process."""
