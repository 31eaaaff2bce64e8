"""How many of the moves that a model writes are legal.

    python -m tests.chess_moves RUN [--games N] [--temperature T] [--seed S]

Games in standard algebraic notation are drawn from a run's newest checkpoint, each from "1. " on, and played on a
board up to the first move that is illegal or no move at all; that one counts, what follows does not.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

import chess
import torch

from lm.checkpoint.resume import find_checkpoint
from lm.generate import load_model
from lm.sampling import generate

RESULTS = {"1-0", "0-1", "1/2-1/2", "*"}


def play(game: str) -> tuple[int, bool]:
    """Legal moves of `game`, and whether it ends with something else."""
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
    """Legal moves, moves that were not, and whole games, of `games` that may be cut within their last word."""
    legal = illegal = whole = 0
    for game in games:
        ended = game.split()[-1:] and game.split()[-1] in RESULTS
        moves, broke = play(game if ended else game.rpartition(" ")[0])
        legal, illegal, whole = legal + moves, illegal + broke, whole + bool(ended and not broke)
    return legal, illegal, whole


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the legal moves that a model writes.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--games", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cpu")
    model, tokenizer = load_model(find_checkpoint(args.run), device)
    prompt = tokenizer.encode("1. ")
    room = model.config.max_seq_len - len(prompt)
    games = []
    for seed in range(args.seed, args.seed + args.games):
        drawn = list(generate(model, prompt, room, device=device, seed=seed, temperature=args.temperature))
        end = drawn.index(tokenizer.eos_id) if tokenizer.eos_id in drawn else len(drawn)
        games.append("1. " + tokenizer.decode(drawn[:end], after=prompt))
    legal, illegal, whole = count(games)
    share = legal / (legal + illegal)
    print(f"{args.games} games, {whole} of them whole: {legal} of {legal + illegal} moves are legal, {share:.1%}")
    print(f"moves up to the first illegal one: {legal / max(1, illegal):.1f} on average\n{games[0]}")


if __name__ == "__main__":
    main()
