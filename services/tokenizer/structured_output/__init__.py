"""What a client wants the text to match, checked and written as one grammar.

Each form has a module of its own; `wanted_grammar` is where they meet. Nothing here compiles a
grammar: that is the checker's (services/tokenizer/grammar_checker), in a process of its own.
"""
