"""Greedy answers through the whole engine against transformers reading the same GGUF, float32.

    python scripts/greedy_agreement.py --model .models/SmolLM2-135M-Instruct.Q4_1.gguf

Sends all prompts at once through the public gRPC port, then lets transformers continue each alone.
For every token that differs it prints the gap between the reference's two best logits: a difference
is fair only where they are within 1e-4. Exit code 1 when another one is found. The plan is eager,
which computes in float32 throughout; `--executor-plan native` shows what 16-bit activations and the
bfloat16 KV cache change.
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
    """Compare; print one line per prompt, and one per difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--executor-plan", choices=("eager", "native"), default="eager")
    args = parser.parse_args()
    prompts = PROMPTS[: args.prompts]
    pairs = answered(args.model, prompts, args.tokens, args.executor_plan)
    torch.set_grad_enabled(False)
    reference = AutoModelForCausalLM.from_pretrained(
        args.model.parent, gguf_file=args.model.name, dtype=torch.float32
    ).eval()
    unfair = sum(
        unfair_differences(reference, prompt, ids, answer)
        for prompt, (ids, answer) in zip(prompts, pairs, strict=True)
    )
    print(f"{len(prompts)} prompts, {unfair} unfair differences")
    return 1 if unfair else 0


def answered(
    model: Path, prompts: list[str], tokens: int, plan: str
) -> list[tuple[list[int], list[int]]]:
    """Prompt ids and output ids of each prompt, all sent to our engine at once."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_engine(
            model, Path(folder) / "run", "--dtype", "float32", "--executor-plan", plan
        ) as engine,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):

        def answer(prompt: str) -> tuple[list[int], list[int]]:
            message = inference_pb2.ChatMessage(role="user", content=prompt)
            request = inference_pb2.TokenizeRequest(messages=[message])
            ids = list(engine.stub.Tokenize(request).token_ids)
            output = engine.generate(ids, max_tokens=tokens, temperature=0.0, timeout=600)
            assert output.token_ids, f"no answer to {prompt!r}"
            return ids, output.token_ids

        return list(pool.map(answer, prompts))


def unfair_differences(
    reference: torch.nn.Module, prompt: str, ids: list[int], answer: list[int]
) -> int:
    """Print how the answer compares; how many of its differences are no near ties."""
    # One forward pass over our own answer gives the reference's choice at every position.
    logits = reference(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
    expected = logits.argmax(-1).tolist()
    wrong = [i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b]
    print(f"{len(answer) - len(wrong)} of {len(answer)} tokens the same  {prompt[:60]!r}")
    unfair = 0
    for at in wrong:
        best, second = logits[at].topk(2).values.tolist()
        unfair += best - second > FAIR
        print(
            f"    token {at}: ours {answer[at]}, reference {expected[at]}, gap {best - second:.2e}"
        )
    return unfair


if __name__ == "__main__":
    sys.exit(main())
