"""The scheduler service: all generation state, and the step loop that drives an executor."""
