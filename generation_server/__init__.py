"""The generation server: pulls a prompt's KV cache and streams the rest."""
