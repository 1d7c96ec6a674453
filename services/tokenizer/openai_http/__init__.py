"""OpenAI-style HTTP on the tokenizer process: JSON to the messages of gRPC and back, no more.

Nothing outside imports this package but `http_port`, which loads the rest once the engine is up.
"""
