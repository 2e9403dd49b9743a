"""Ports of this machine, and addresses and answers of servers elsewhere."""
