"""Command line that counts the legal moves in games that a model generates.

    python -m tests.chess_moves RUN [--games N] [--temperature T] [--seed S]

Games in standard algebraic notation are generated from a run's newest checkpoint with the prompt
"1. " and played on a board up to the first illegal move, which counts; the rest of the game does
not.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import chess
import torch

from lm.checkpoint.locate import find_checkpoint
from lm.hf.base import load_model
from lm.sampling import Sampling, generate

RESULTS = {"1-0", "0-1", "1/2-1/2", "*"}


def play(game: str) -> tuple[int, bool]:
    """Return the number of legal moves of `game`, and whether an illegal move follows them."""
    board = chess.Board()
    for word in re.sub(r"\d+\.+", " ", game).split():
        if word in RESULTS:
            break
        try:
            board.push_san(word)
        except ValueError:
            return board.ply(), True
    return board.ply(), False


def count(games: Iterable[str]) -> tuple[int, int, int]:
    """Count legal moves, illegal moves and complete games, whose last word may be cut off."""
    legal = illegal = complete = 0
    for game in games:
        words = game.split()
        ended = bool(words) and words[-1] in RESULTS
        if not ended:
            game = game.rpartition(" ")[0]
        moves, is_illegal = play(game)
        legal += moves
        illegal += is_illegal
        complete += ended and not is_illegal
    return legal, illegal, complete


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the legal moves in generated games.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--games", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cpu")
    model, tokenizer = load_model(find_checkpoint(args.run), device)
    prompt = tokenizer.encode("1. ")
    max_new_tokens = model.config.max_seq_len - len(prompt)
    options: dict[str, Any] = {
        "device": device,
        "settings": Sampling(temperature=args.temperature),
        "stop_ids": tokenizer.stop_ids,
    }
    games = []
    for seed in range(args.seed, args.seed + args.games):
        tokens = generate(model, prompt, max_new_tokens, seed=seed, **options)
        games.append("1. " + tokenizer.decode(tokens, after=prompt))
    legal, illegal, complete = count(games)
    share = legal / (legal + illegal)
    print(
        f"{args.games} games, {complete} complete: "
        f"{legal} of {legal + illegal} moves are legal, {share:.1%}"
    )
    print(
        f"moves up to the first illegal one: {legal / max(1, illegal):.1f} on average\n{games[0]}"
    )


if __name__ == "__main__":
    main()
