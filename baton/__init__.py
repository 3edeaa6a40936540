"""What a user imports and types: clients, sampling parameters, errors, and the command line."""
