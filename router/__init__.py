"""The router: a request goes to a context server, then to a generation server, as one stream."""
