"""Stream an answer from a server, and end the request after some characters.

Start a server with `cupaged serve`, then run `python -m cupaged.examples.grpc_stream [ADDRESS]`.
"""

from __future__ import annotations

import sys

from cupaged.client import Client, ClientError, Delta

MOST_CHARACTERS = 200


def main() -> int:
    """Stream, print, cancel."""
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    num_characters = num_tokens = 0
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    try:
        with (
            Client(address, timeout=60) as client,
            client.stream_chat(messages, temperature=0.0, max_tokens=200) as stream,
        ):
            for event in stream:
                if isinstance(event, Delta):
                    print(event.text, end="", flush=True)
                    num_characters += len(event.text)
                    num_tokens += len(event.token_ids)
                if num_characters >= MOST_CHARACTERS:
                    break  # leaving the context cancels the request, on the server too
    except ClientError as error:
        print(f"{address}: {error}; {error.advice}", file=sys.stderr)
        return 1
    why = "cancelled" if stream.usage is None else stream.finished[0].finish_reason
    print(f"\n({num_tokens} tokens, {why})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
