"""The engine: which requests run this step, where their KV lies, what the model says."""
