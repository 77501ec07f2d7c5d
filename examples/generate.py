"""Two prompts continued by the shipped checkpoint, token by token as they come.

python examples/generate.py [CHECKPOINT]
"""

import sys
from pathlib import Path

import dsv4
from dsv4.loader.tokenizer import load_tokenizer

SHIPPED = Path(__file__).resolve().parents[1] / "checkpoints" / "tiny"
PROMPTS = ("And God said, ", "The king went up to ")


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else str(SHIPPED)
    model = dsv4.load(folder)
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    result = model.generate(prompts, max_new_tokens=32, num_draft_tokens=1)
    for text, tokens in zip(PROMPTS, result.tokens, strict=True):
        print(repr(text + tokenizer.decode(tokens)))


if __name__ == "__main__":
    main()
