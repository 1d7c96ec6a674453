"""The tokenizer service: the public gRPC edge, text to tokens and tokens to text."""
