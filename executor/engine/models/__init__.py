"""Models: configuration, layers and decoders."""
