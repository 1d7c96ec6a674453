"""How long the executor takes for a step, as a straight line: the modelled half of a simulation."""

from typing import Literal, NamedTuple

ProfileName = Literal["smollm2-135m-cpu", "llama-8b-h100"]


class StepCost(NamedTuple):
    """Seconds of a step: `step` + `token` for each token computed + `kv_token` for each token whose
    keys and values are read (the context of each row, once)."""

    step: float
    token: float
    kv_token: float

    def seconds(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Of one step."""
        return self.step + self.token * num_tokens + self.kv_token * num_kv_tokens


PROFILES: dict[ProfileName, StepCost] = {
    # Through decode_1, prefill_512 and decode_32 of docs/performance.md; decode_8 comes out a
    # fifth too slow.
    "smollm2-135m-cpu": StepCost(2.9e-3, 0.56e-3, 1.2e-6),
    # Reckoned, not measured. 8e9 weights of 2 bytes at 3.35 TB/s; 2 * 8e9 operations a token at
    # half of 990 T/s; 128 KiB of keys and values a token (32 layers, 8 heads, 128, 2 bytes).
    "llama-8b-h100": StepCost(5.0e-3, 32e-6, 39e-9),
}
"""By name: coefficients of machines and models."""
