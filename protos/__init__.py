"""The wire: protos with their generated stubs, and the plain types they become inside."""
