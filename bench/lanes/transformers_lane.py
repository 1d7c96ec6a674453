"""Hugging Face transformers in a process of its own: float32, the same GGUF dequantised."""

import argparse
import time

import torch
from protocol import answer_requests
from transformers import AutoModelForCausalLM


class TransformersLane:
    """The operations `decode` and `prefill` of LlamaLane."""

    def __init__(self, path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        folder, _, name = path.rpartition("/")
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.float32
        ).eval()
        self.prefill([300] * 32)  # warm up

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: list[list[int]]) -> float:
        """Seconds that all `steps` take together; each holds the next token of every sequence."""
        cache = self._model(torch.tensor(prompts), use_cache=True).past_key_values
        start = time.perf_counter()
        for tokens in steps:
            self._model(torch.tensor(tokens)[:, None], past_key_values=cache, use_cache=True)
        return time.perf_counter() - start

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the prompt's next-token logits are there."""
        start = time.perf_counter()
        self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    lane = TransformersLane(args.model, args.threads)
    answer_requests({"decode": lane.decode, "prefill": lane.prefill})


if __name__ == "__main__":
    main()
