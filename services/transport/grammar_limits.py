"""How large a compiled grammar may get: the same where requests are checked and where they run."""

from llguidance import LLParserLimits


def grammar_limits() -> LLParserLimits:
    """Tighter than llguidance's defaults where a grammar could take much memory, or a mask long.

    Times and sizes were measured with 49,152 tokens; docs/structured-output.md has what they mean
    to a schema.
    """
    return LLParserLimits(
        # 0.3 to 0.9 kB each: 6 to 18 MB. All matchers of a compiled grammar have these states
        # together, so a running one that meets the bound goes on with one compiled anew.
        max_lexer_states=20_000,
        # Two enums of 10,000 values in one schema take half of it, and 40 ms.
        initial_lexer_fuel=1_000_000,
        # 14,000 a millisecond: a mask stays below 4 ms.
        step_lexer_fuel=50_000,
        # 20,000 a millisecond where a grammar is clear, some 500 where it is ambiguous.
        step_max_items=20_000,
        # An object takes 4 for each property that may be left out: at most 245 of them. Ambiguous
        # grammars, whose masks take time by the square of it, end early.
        max_items_in_row=1_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
