# mypy: disable-error-code="import-not-found, import-untyped"
"""Writes `spm.json`: a tiny sentencepiece BPE vocabulary and what sentencepiece does with it.

Run from the repository root as `python -m tests.golden.make_spm`, in an environment of its own
with Python 3.11 and `sentencepiece==0.2.3`. The tests only read the file.

The options are those of Llama 2: byte fallback, no normalization, a space before the text, spaces
kept as they are, digits one by one.
"""

from __future__ import annotations

import io
import json
from importlib.metadata import version
from pathlib import Path

import sentencepiece

HERE = Path(__file__).parent

TRAINING_TEXT = """
Operating systems solved a similar problem decades ago. A process asks for memory without knowing
how much it will need in the end, and the machine has only so many frames to give. If every
process received one contiguous region for its largest possible need, most of the memory would lie
idle, and the gaps between the regions would be too small to be useful. Paging cuts the address
space into pages of a fixed size and maps each page to any free frame. Only the last page of a
process is partly empty. Two processes that run the same program share its pages, and a page is
copied only when one of them writes to it. When memory runs out, whole pages move to the disk and
come back later. The key-value cache of a language model behaves in much the same way: it grows
one token at a time, nobody knows where it ends, and many requests begin with the same words.
Größe und Länge der Straße sind schön. Le café est déjà fermé. Привет, мир! Как дела?
    def area(width, height):
        return width * height

    def sum(values):
        total = 0
        for value in values:
            total = total + value
        return total
"""

TEXTS = (
    "",
    " ",
    "  ",
    "a",
    " a",
    "   three leading spaces",
    "trailing spaces   ",
    "Hello world",
    "the page of the process",
    "aaaaaaaaa bbbb   cccc",
    "def area(width, height):\n    return width * height\n",
    "        deep\n\n\n    indentation\t\ttabs",
    "0 12 345 6789 3.14159",
    "Größe, naïve café, Ångström e\u0301",
    "Привет, мир! Как дела?",
    "東京と北京、안녕하세요",
    "😀👩\u200d👩\u200d👧🇯🇵",
    "mixed 東 text 京 with 😀 bytes",
    "\u2581 the escape itself",
    "<0x41> is no byte here",
    "\u00a0non-breaking\u3000ideographic\u200bzero\ufeff",
    "\ufffd replacement",
    "a\x00b\x7f\U00040000",
    "supercalifragilisticexpialidocious CamelCase_snake_case",
    "A process asks for memory without knowing how much it will need in the end.",
)


def main() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in TRAINING_TEXT.split("\n") if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        num_threads=1,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.vocab_size())
    golden = {
        "sentencepiece": version("sentencepiece"),
        "pieces": [processor.id_to_piece(index) for index in ids],
        "scores": [processor.get_score(index) for index in ids],
        "types": [piece_type(processor, index) for index in ids],
        "texts": [
            {"text": text, "ids": processor.encode(text), "decoded": decoded(processor, text)}
            for text in TEXTS
        ],
    }
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":"))
    (HERE / "spm.json").write_text(text.replace('{"text"', '\n{"text"') + "\n", encoding="utf-8")


def piece_type(processor: sentencepiece.SentencePieceProcessor, index: int) -> int:
    """The number GGUF has for it: 1 normal, 2 unknown, 3 control, 6 byte."""
    if processor.is_unknown(index):
        return 2
    if processor.is_control(index):
        return 3
    return 6 if processor.is_byte(index) else 1


def decoded(processor: sentencepiece.SentencePieceProcessor, text: str) -> str:
    result: str = processor.decode(processor.encode(text))
    return result


if __name__ == "__main__":
    main()
