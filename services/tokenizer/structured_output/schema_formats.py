"""What llguidance (1.9) lets through of some formats although they exclude it: 29 February of any
year, the year 0, leap seconds at any minute, host names that are too long or in no valid Punycode.

Where the exact rule is long, what is added here is narrower: no leap seconds, and no two hyphens in
a row.
"""

from typing import Final

from triptych.services.tokenizer.structured_output.strict_json import Json

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"  # two digits
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_MONTHS = "(?:(?:0[13-9]|1[0-2])-[0-9]{2}|02-(?:[01][0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_MONTHS}|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_MOST_HOSTNAME = 253

_NARROWER: Final = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}",
    "time": f"^{_TIME}",
    "hostname": "^[A-Za-z0-9]+(?:[-.][A-Za-z0-9]+)*$",
}
"""Expressions that hold beside the library's own."""


def settle_format(schema: dict[str, Json]) -> None:
    """Say what is missing, in place."""
    name, pattern = schema.get("format"), schema.get("pattern")
    narrower = _NARROWER.get(name) if isinstance(name, str) else None
    if narrower is None:
        return
    if pattern is None:
        schema["pattern"] = narrower
    else:
        parts = schema.get("allOf", [])
        if not isinstance(parts, list):
            raise AssertionError("its shape was checked")
        schema["allOf"] = [*parts, {"pattern": narrower}]
    if name == "hostname":
        most = schema.get("maxLength", _MOST_HOSTNAME)
        schema["maxLength"] = min(most, _MOST_HOSTNAME) if isinstance(most, int) else most
