"""The plain meaning of every op: what tests, benchmarks and the eager plan share."""
