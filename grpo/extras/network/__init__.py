"""Ports and addresses of servers, and programs that end with the one that started them. Door: appendices that need it."""
