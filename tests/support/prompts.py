"""Prompts in many shapes, for comparisons with a reference."""

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first ten prime numbers.",
    "Explain photosynthesis to a child.",
    "Translate 'good morning' into Spanish, Italian and German.",
    "def fibonacci(n):\n    # complete this function",
    "Who wrote 'Pride and Prejudice'?",
    "Give me a recipe for pancakes.",
    "What is 17 + 25?",
    "Why is the sky blue?",
    "Summarise: The quick brown fox jumps over the lazy dog. The dog did not mind.",
    "你好, 世界是什么?",
    "Tell me a joke about computers 😀",
    "What are the planets of the solar system, in order?",
    "Write an email asking for a day off.",
    "Complete the sentence: Once upon a time, in a land  far  away,",
    "What does HTTP status 404 mean?",
    "Name three uses of baking soda.\n\n1.",
    "In the year 2026, 12345 people visited 678 museums. How many per museum?",
    "Describe the colour red to someone who cannot see.",
]
