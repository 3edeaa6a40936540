"""The local launcher: a router, context servers and generation servers on this machine."""
