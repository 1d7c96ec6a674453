"""The executor service: a model's weights and KV cache, and the forward pass of one step."""
