"""The router: sends a request to a context server, then to a generation server, and streams the answer."""
