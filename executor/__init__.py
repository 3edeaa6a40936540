"""The executor: turns an engine in another process into a service."""
