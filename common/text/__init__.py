"""Text in and out of token ids: tokenizers, chat templates, streamed detokenising, stop strings."""
