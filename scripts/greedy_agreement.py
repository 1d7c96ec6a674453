"""Greedy answers through the whole engine against transformers reading the same GGUF, float32.

    python scripts/greedy_agreement.py --model .models/SmolLM2-135M-Instruct.Q4_1.gguf

Sends all prompts at once through the public gRPC port, then lets transformers continue each alone.
At the first token that differs it prints the reference's two best logits: a difference is fair only
where they are within 1e-4. Exit code 1 when another one is found.
"""

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from engine import running_engine
from prompts import PROMPTS
from triptych.v1 import inference_pb2

FAIR = 1e-4


def main() -> int:
    """Compare; print one line per prompt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    prompts = PROMPTS[: args.prompts]

    with (
        tempfile.TemporaryDirectory() as folder,
        running_engine(args.model, Path(folder) / "run", "--dtype", "float32") as engine,
    ):
        ids = [
            list(engine.stub.Tokenize(inference_pb2.TokenizeRequest(
                messages=[inference_pb2.ChatMessage(role="user", content=prompt)])).token_ids)
            for prompt in prompts
        ]  # fmt: skip
        with ThreadPoolExecutor(len(prompts)) as pool:
            ours = list(pool.map(
                lambda p: engine.generate(
                    p, max_tokens=args.tokens, temperature=0.0, timeout=600
                ).token_ids,
                ids,
            ))  # fmt: skip

    torch.set_grad_enabled(False)
    reference = AutoModelForCausalLM.from_pretrained(
        args.model.parent, gguf_file=args.model.name, dtype=torch.float32
    ).eval()
    unfair = 0
    for prompt, prompt_ids, answer in zip(prompts, ids, ours, strict=True):
        # One forward pass over our own answer gives the reference's choice at every position.
        logits = reference(torch.tensor([prompt_ids + answer])).logits[0, len(prompt_ids) - 1 : -1]
        expected = logits.argmax(-1).tolist()
        wrong = next(
            (i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b), None
        )
        if wrong is None:
            print(f"same {len(answer):3} tokens  {prompt[:60]!r}")
            continue
        best, second = logits[wrong].topk(2).values.tolist()
        unfair += best - second > FAIR
        print(
            f"differs at token {wrong}: ours {answer[wrong]}, reference {expected[wrong]}, "
            f"gap {best - second:.2e}  {prompt[:60]!r}"
        )
    print(f"{len(prompts)} prompts, {unfair} unfair differences")
    return 1 if unfair else 0


if __name__ == "__main__":
    sys.exit(main())
