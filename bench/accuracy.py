"""How close our default plan is to float32, next to llama.cpp on the same file.

    make bench-accuracy [QUICK=1]

The reference is our eager plan: float32 throughout, on the weights that the file's quantised blocks
stand for. Everyone gets the same token ids.

    kl_mean         mean KL(reference || engine), in nats, of the distribution of the next token
                    behind each of 50 chat prompts; ours over llama.cpp's, lower is better
    answers_equal   how many of the 50 greedy answers of 16 tokens are the reference's
    perplexity      of a fixed text (bench/data/text.txt), ours over the reference's: how far from
                    1 it may be is the target

Noted besides: the mean over all 16 positions of the reference's own answers, and the peer's
perplexity. Time is not measured, so that a busy machine changes nothing.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triptych.services.runtime.model_files import resolve_model
from triptych.services.tokenizer.chat_messages import ChatMessage
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer

sys.path[:0] = [str(Path(__file__).parent)]
from divergence import Logits, divergence, equal_answers, perplexity, windows_of
from lane import Lane
from questions import QUESTIONS
from results import Results

THREADS = 2
ANSWER = 16
WINDOW = 256
WINDOWS = 16
KL_TARGET = 0.5
PERPLEXITY_TARGET = 1.005
TEXT = Path(__file__).parent / "data" / "text.txt"


@dataclass(frozen=True, slots=True)
class Questions:
    """Token ids: the prompts as the chat template renders them, and the text in windows."""

    prompts: list[list[int]]
    windows: list[list[int]]

    @property
    def scored(self) -> int:
        """Tokens of the text that have a probability: all but each window's first."""
        return sum(len(window) - 1 for window in self.windows)


@dataclass(frozen=True, slots=True)
class Answers:
    """What one engine says: logits [prompts, 16, vocabulary] along the reference's answers."""

    greedy: list[list[int]]
    logits: Logits
    perplexity: float


def read_questions(tokenizer: Tokenizer, quick: bool) -> Questions:
    """All 50 prompts; `quick` takes a quarter of the text."""
    prompts = [
        tokenizer.encode_chat([ChatMessage(role="user", content=text)]) for text in QUESTIONS
    ]
    text = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    return Questions(prompts, windows_of(text, WINDOW, WINDOWS // 4 if quick else WINDOWS))


def ask(
    lane: Lane, questions: Questions, along: Sequence[Sequence[int]] | None, folder: Path
) -> Answers:
    """Everything from one engine; `along` None: it is the reference, its own answers count."""
    path = folder / "logits.npy"
    asked = {"prompts": questions.prompts, "new_tokens": ANSWER}
    if along is None:
        greedy = lane.ask("greedy", **asked, path=str(path))
    else:
        greedy = lane.ask("greedy", **asked)
        lane.ask("next_logits", prompts=questions.prompts, answers=along, path=str(path))
    likelihood = lane.ask("log_likelihood", windows=questions.windows)
    return Answers(greedy, np.load(path), perplexity(likelihood, questions.scored))


def report(results: Results, reference: Answers, ours: Answers, peer: Answers) -> None:
    """The three figures, and what else is worth knowing."""
    mine = divergence(reference.logits, ours.logits)
    theirs = divergence(reference.logits, peer.logits)
    our_kl, peer_kl = float(mine[:, 0].mean()), float(theirs[:, 0].mean())
    ratio = our_kl / peer_kl
    results.figure("kl_mean", our_kl, peer_kl, ratio, KL_TARGET, ratio <= KL_TARGET)
    our_equal = equal_answers(reference.greedy, ours.greedy)
    peer_equal = equal_answers(reference.greedy, peer.greedy)
    best = our_equal > peer_equal or our_equal == len(reference.greedy)
    results.figure(
        "answers_equal", our_equal, peer_equal, our_equal / max(peer_equal, 1), 1.0, best
    )
    ratio = ours.perplexity / reference.perplexity
    within = abs(ratio - 1.0) <= PERPLEXITY_TARGET - 1.0
    results.figure(
        "perplexity", ours.perplexity, reference.perplexity, ratio, PERPLEXITY_TARGET, within
    )
    print(f"    kl over {ANSWER} positions: ours {mine.mean():.3g}, peer {theirs.mean():.3g}")
    print(f"    largest kl: ours {mine.max():.3g}, peer {theirs.max():.3g}")
    print(f"    perplexity of the peer: {peer.perplexity:.5g}", flush=True)


def main() -> int:
    """Run the benchmark; exit code 0 when it ran, whether or not a target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--peer-python", required=True, type=Path, help="has llama-cpp-python")
    parser.add_argument("--quick", action="store_true", help="a quarter of the text")
    args = parser.parse_args()
    questions = read_questions(load_tokenizer(resolve_model(str(args.model))), args.quick)
    shared = [str(args.model), "--threads", str(THREADS)]
    python = Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="triptych-accuracy-") as name:
        folder = Path(name)
        with Lane(python, "triptych_lane.py", [*shared, "--plan", "eager"]) as lane:
            print(f"    reference: {lane.ask('info')}", flush=True)
            reference = ask(lane, questions, None, folder)
        with Lane(python, "triptych_lane.py", shared) as lane:
            print(f"    ours: {lane.ask('info')}", flush=True)
            ours = ask(lane, questions, reference.greedy, folder)
        # One thread: its numbers do not depend on it, and waits of two suffer on a busy machine.
        with Lane(args.peer_python, "llama_lane.py", [str(args.model), "--threads", "1"]) as lane:
            print(f"    peer: {lane.ask('info')}", flush=True)
            peer = ask(lane, questions, reference.greedy, folder)
    results = Results("bench-accuracy")
    report(results, reference, ours, peer)
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
