"""The texts that the golden files are made from: prompts, conversations, tokenizer cases."""

from __future__ import annotations

Messages = list[dict[str, str]]

_LONG = (
    "Operating systems solved a similar problem decades ago. A process asks for memory without "
    "knowing how much it will need in the end, and the machine has only so many frames to give. "
    "If every process received one contiguous region for its largest possible need, most of the "
    "memory would lie idle, and the gaps between the regions would be too small to be useful. "
    "Paging cuts the address space into pages of a fixed size and maps each page to any free "
    "frame. Only the last page of a process is partly empty. Two processes that run the same "
    "program share its pages, and a page is copied only when one of them writes to it. When "
    "memory runs out, whole pages move to the disk and come back later. The key-value cache of a "
    "language model behaves in much the same way: it grows one token at a time, nobody knows "
    "where it ends, and many requests begin with the same instructions."
)

# A string is given to the model as it is, messages are rendered with the chat template.
PROMPTS: dict[str, str | Messages] = {
    "capital": [{"role": "user", "content": "What is the capital of France?"}],
    "story": [
        {"role": "system", "content": "You write short, friendly stories for children."},
        {"role": "user", "content": "Tell me a story about a fox who learns to swim."},
    ],
    "code": (
        "def binary_search(items, target):\n"
        '    """Return the index of target in the sorted list items, or -1."""\n'
        "    low, high = 0, len(items) - 1\n"
    ),
    "digits": "1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 121, 144, 169,",
    "unicode": "Tōkyō (東京) is the capital of Japan 🇯🇵. Größe, naïve, привет 😀. In Japanese,",
    "short": "Once upon",
    "long": [{"role": "user", "content": "Summarize this text in two sentences.\n\n" + _LONG}],
    "poem": "The rain in the harbour fell all night,\nand",
}

CONVERSATIONS: dict[str, Messages] = {
    "user_only": [{"role": "user", "content": "Hello!"}],
    "system": [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Which colour has the sky?"},
    ],
    "multi_turn": [
        {"role": "user", "content": "  2 + 2?\n"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Add   10 to that, 東京 😀."},
    ],
    "empty_content": [
        {"role": "system", "content": ""},
        {"role": "user", "content": ""},
    ],
}

TOKENIZER_TEXTS = (
    "",
    " ",
    "Hello world",
    "  two leading and trailing spaces  ",
    "tabs\tand\t\tnewlines\n\n\nand\r\nreturns",
    "0 12 345 6789 3.14159 1,000,000",
    "x = 10\n    20\n        300",
    "for i in range(10):\n    print(f\"{i:>3}\")  # don't, we'll, it's, I'VE",
    "Größe naïve café Ångström e\u0301",
    "東京と北京、안녕하세요",
    "привет мир שלום مرحبا",
    "😀👩‍👩‍👧🇯🇵🏳️‍🌈",
    "½ ⅷ ² ١٢٣ १२ \uff11\uff12",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start|",
    "text<|im_end|>text <repo_name>x",
    "\u00a0non-breaking\u2003em space\u3000ideographic\u200bzero\ufeff",
    # The vocabulary lacks the bytes 04 06 13 14 16 1d f1 f2: they vanish without a trace.
    "a\x00b\x04c\x1dd\x7fe \U00040000 f",
    "supercalifragilisticexpialidocious AntidisestablishmentarianismCamelCase_snake_case",
)
