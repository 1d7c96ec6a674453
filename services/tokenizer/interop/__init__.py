"""Other systems' gRPC services on the public port, each behind a flag: translations, no logic."""
