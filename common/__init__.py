"""The leaf package that every side needs: text, hashing, config, security, metrics, logs."""
