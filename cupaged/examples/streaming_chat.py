"""Answer one message, printing the text as it comes, and stop after some characters.

Run it with `python -m cupaged.examples.streaming_chat [MODEL]`.
"""

from __future__ import annotations

import sys

from cupaged import LLM, SamplingParams

MOST_CHARACTERS = 200


def main() -> None:
    """Load, stream, abort."""
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, max_model_len=512)
    prompt = llm.render_chat([{"role": "user", "content": "Tell me about the sea."}])
    for output in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=200)):
        answer = output.outputs[0]
        print(answer.delta, end="", flush=True)
        if len(answer.text) >= MOST_CHARACTERS:
            llm.abort(output.request_id)  # one more output comes, with finish_reason "abort"
    print(f"\n({len(answer.token_ids)} tokens, {answer.finish_reason})")


if __name__ == "__main__":
    main()
