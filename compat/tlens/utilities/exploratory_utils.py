"""A first look at what a model predicts."""

from __future__ import annotations

from typing import Any

import torch
from rich import print as rprint
from rich.markup import escape


def test_prompt(
    prompt: str,
    answer: str | list[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Print how a model ranks `answer` after `prompt`: rank, logit and probability of each answer token.

    An answer may have several tokens. Of a list of answers only the first tokens are compared. `print_details` adds
    the tokens of both and, for each position, the `top_k` predictions. `prepend_bos` None is the model's own default.
    """
    answers = [answer] if isinstance(answer, str) else answer
    several = len(answers) > 1
    if prepend_space_to_answer:
        answers = [text if text.startswith(" ") else " " + text for text in answers]
    answer_tokens = model.to_tokens(answers, prepend_bos=False)
    if several:
        answer_tokens = answer_tokens[:, :1]
    prompt_tokens = model.to_tokens(prompt, prepend_bos=prepend_bos).repeat(len(answer_tokens), 1)
    prompt_words = model.to_str_tokens(prompt, prepend_bos=prepend_bos)
    answer_words = [model.to_str_tokens(text, prepend_bos=False) for text in answers]
    if print_details:
        print("Tokenized prompt:", prompt_words)
        print(*("Tokenized answers:", answer_words) if several else ("Tokenized answer:", answer_words[0]))

    logits = model(torch.cat((prompt_tokens, answer_tokens), dim=1))
    ranks_by_step = []
    for step in range(1 if several else len(answer_words[0])):
        words = [row[step] for row in answer_words]
        before = logits[:, len(prompt_words) + step - 1]
        ranks = _rank(model, before, answer_tokens[:, step], words, top_k if print_details else None)
        ranks_by_step.append(list(zip(words, ranks)))
    summary = ranks_by_step if several else [step[0] for step in ranks_by_step]
    rprint(f"[b]Ranks of the answer tokens:[/b] {escape(str(summary))}")


test_prompt.__test__ = False  # its name looks like a test's to pytest


def _rank(model: Any, logits: torch.Tensor, tokens: torch.Tensor, words: list[str], top_k: int | None) -> list[int]:
    """Ranks of one token a row in logits `[row, d_vocab]`, printed with row 0's best `top_k` unless that is None."""
    probs = logits.softmax(dim=-1)
    sorted_probs, order = probs.sort(descending=True)
    rows = torch.arange(len(words), device=logits.device)
    tokens = tokens.to(logits.device)
    ranks = order.argsort(-1)[rows, tokens].tolist()
    if top_k is None:
        return ranks
    lines = [
        f"[b]Rank: {rank: <8} Logit: {logit:5.2f} Prob: {prob:6.2%} Token: |{escape(word)}|[/b]"
        for rank, logit, prob, word in zip(ranks, logits[rows, tokens].tolist(), probs[rows, tokens].tolist(), words)
    ]
    rprint(f"Performance on answer token{'s' if len(words) > 1 else ''}:\n" + "\n".join(lines))
    for i in range(top_k):
        logit, prob, word = logits[0, order[0, i]].item(), sorted_probs[0, i].item(), model.to_string(order[0, i])
        print(f"Top {i}th token. Logit: {logit:5.2f} Prob: {prob:6.2%} Token: |{word}|")
    return ranks
