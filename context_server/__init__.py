"""The context server: prefills a prompt and hands its KV cache over."""
