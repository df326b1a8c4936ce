"""What the unmodified `openai` client gets: `openai_script.py URL TASK MESSAGES`.

It runs in an environment of its own, imports nothing of cupaged, and prints JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import openai  # type: ignore[import-not-found, unused-ignore]

WAIT_SECONDS = 60.0
QUEUED_SECONDS = 10.0


class Asker:
    """A client of the one model that is served."""

    def __init__(self, url: str, messages: list[Any]) -> None:
        self.messages = messages
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        self.model = self._model()

    def _model(self) -> str:
        """The gateway listens before it knows of the server, and of its tokenizer later still."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            try:
                if models := self.client.models.list().data:
                    self.model = str(models[0].id)
                    self.chat(max_tokens=1)
                    return self.model
            except openai.APIError:
                pass
            time.sleep(0.05)
        raise SystemExit("the gateway knows no model, or not its tokenizer")

    def chat(self, **options: Any) -> Any:
        options = {"temperature": 0, "max_tokens": 12, "messages": self.messages, **options}
        return self.client.chat.completions.create(model=self.model, **options)

    def streamed(self, **options: Any) -> dict[str, Any]:
        text, reason, usage, number = "", None, None, 0
        for event in self.chat(stream=True, stream_options={"include_usage": True}, **options):
            usage = event.usage or usage
            for choice in event.choices:
                number += bool(choice.delta.content)
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
        assert usage is not None
        return {"text": text, "reason": reason, "usage": _usage(usage), "deltas": number}

    def whole(self, **options: Any) -> dict[str, Any]:
        answer = self.chat(**options)
        return {
            "text": [choice.message.content for choice in answer.choices],
            "reason": answer.choices[0].finish_reason,
            "usage": _usage(answer.usage),
        }


def _usage(usage: Any) -> list[int]:
    return [usage.prompt_tokens, usage.completion_tokens]


def refused(call: Callable[[], Any]) -> dict[str, Any]:
    """Status and text of a call that has to fail."""
    try:
        call()
    except openai.APIStatusError as error:
        return {"code": error.status_code, "text": str(error)}
    return {"code": 200, "text": ""}


def ready(asker: Asker) -> dict[str, Any]:
    """Nothing but that the gateway answers."""
    return {}


def answers(asker: Asker) -> dict[str, Any]:
    """Requests that are served, and some that are not."""
    logprobs = asker.chat(logprobs=True, top_logprobs=2).choices[0].logprobs
    assert logprobs is not None
    completion = asker.client.completions.create(
        model=asker.model, prompt="A page is", max_tokens=6, temperature=0
    )
    return {
        "model": asker.model,
        "whole": asker.whole(),
        "samples": asker.whole(n=2, temperature=0.8, seed=3),
        "streamed": asker.streamed(),
        "stopped": asker.streamed(stop=[" of"]),
        "completion": completion.choices[0].text,
        "logprobs": [[p.token, p.logprob, len(p.top_logprobs)] for p in logprobs.content or []],
        "too long": refused(lambda: asker.chat(max_tokens=100_000)),
        "unknown model": refused(
            lambda: asker.client.chat.completions.create(model="other", messages=asker.messages)
        ),
    }


def overload(asker: Asker) -> dict[str, Any]:
    """One request runs, one waits, the third is refused; the first two are then dropped.

    The third is sent when a line on standard input says that the second one waits.
    """
    running = asker.chat(stream=True, max_tokens=900)
    next(running)
    waiting = threading.Thread(target=lambda: refused(lambda: asker.chat(timeout=QUEUED_SECONDS)))
    waiting.start()
    sys.stdin.readline()
    third = refused(lambda: asker.chat())
    waiting.join()
    running.close()
    return {"third": third}


def ending(asker: Asker) -> dict[str, Any]:
    """The server takes no requests any more: told by a line on standard input."""
    print("ready", flush=True)
    sys.stdin.readline()
    return refused(lambda: asker.chat())


if __name__ == "__main__":
    tasks = {"ready": ready, "answers": answers, "overload": overload, "ending": ending}
    task = tasks[sys.argv[2]]
    print(json.dumps(task(Asker(sys.argv[1], json.loads(sys.argv[3])))), flush=True)
