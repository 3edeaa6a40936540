"""What both kinds of server share: the gRPC shell around an executor."""
