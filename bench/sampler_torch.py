"""Sampling as torch programs write it: the peer of bench/sampler.py. The noise is torch's own.

The method of vLLM's `forward_native`: a k-th value for top_k, a sort for top_p, softmax and an
exponential race. It is not vLLM itself, whose CPU build has a fused kernel of its own.
"""

from collections.abc import Sequence

import torch

from triptych.kernels.sampler_params import NO_LOGPROBS, SamplerParams


def torch_sample(
    raw: torch.Tensor, params: SamplerParams, prompt: Sequence[int], output: Sequence[int]
) -> tuple[torch.Tensor, object]:
    """`raw` [rows, vocabulary] -> a token for each row, and their logprobs if they are wanted."""
    logits = _penalized(raw, params, prompt, output)
    if params.temperature == 0.0:
        tokens = logits.argmax(dim=-1)
    else:
        probabilities = _filtered(logits / params.temperature, params).softmax(dim=-1)
        race = torch.empty_like(probabilities).exponential_()
        tokens = (probabilities / race).argmax(dim=-1)
    if params.logprobs == NO_LOGPROBS:
        return tokens, None
    logprobs = raw.log_softmax(dim=-1)
    drawn = logprobs.gather(-1, tokens[:, None])
    return tokens, (logprobs.topk(params.logprobs, dim=-1), drawn, (logprobs > drawn).sum(dim=-1))


def _penalized(
    logits: torch.Tensor, params: SamplerParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    penalty = params.repetition_penalty
    if penalty == 1.0 and params.frequency_penalty == params.presence_penalty == 0.0:
        return logits
    seen = torch.tensor([*prompt, *output]).unique()
    values = logits[:, seen]
    values = torch.where(values < 0, values * penalty, values / penalty)
    logits = logits.clone()
    logits[:, seen] = values
    ids, counts = torch.tensor(output).unique(return_counts=True)
    logits[:, ids] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def _filtered(logits: torch.Tensor, params: SamplerParams) -> torch.Tensor:
    if params.top_n_sigma > 0.0:
        border = logits.amax(-1, True) - params.top_n_sigma * logits.std(-1, keepdim=True)
        logits = logits.masked_fill(logits < border, -torch.inf)
    if params.top_k > 0 and params.top_p == 1.0:
        border = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < border, -torch.inf)
    if params.typical_p < 1.0:
        logits = _typical(logits, params.typical_p)
    if params.top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        if params.top_k > 0:
            ascending[:, : -params.top_k] = -torch.inf
        drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        drop[:, -1] = False
        logits = logits.scatter(-1, order, ascending.masked_fill(drop, -torch.inf))
    if params.min_p > 0.0:
        probabilities = logits.softmax(dim=-1)
        border = params.min_p * probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < border, -torch.inf)
    return logits


def _typical(logits: torch.Tensor, typical_p: float) -> torch.Tensor:
    logprobs = logits.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(-1, keepdim=True)
    ascending, order = (-logprobs - entropy).abs().sort(dim=-1)
    reached = probabilities.gather(-1, order).cumsum(dim=-1) < typical_p
    last = reached.sum(dim=-1, keepdim=True).clamp_(max=logits.shape[-1] - 1)
    drop = ascending > ascending.gather(-1, last)
    return logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
