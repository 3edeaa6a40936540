"""KV transfer: moves KV blocks from context to generation servers, and knows who holds what."""
