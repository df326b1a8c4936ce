"""Methods of a service as handlers of gRPC: bytes in, messages out, one status at the end.

A method is a coroutine `method(request, call)`; one that streams writes to the call and returns
None, and one that takes a stream is `method(requests, call)`, see `_both_streaming`. Whatever it
raises becomes a status by the table of `error_status`. gRPC's own deserialisers are not used, so
that a request that cannot be read is refused with the name of its field.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cupaged.errors import CupagedError
from cupaged.server.error_status import RpcStatus, status_of
from cupaged.server.request_parsing import parse

REQUEST_ID_KEY = "x-request-id"
Context = Any  # grpc.aio.ServicerContext, whose type parameters say nothing here
_logger = logging.getLogger(__name__)


class Call:
    """One call that is being answered.

    Attributes:
        context: gRPC's.
        num_bytes: size of the request's message.
        max_bytes: of the answer's.
        request_id: returned to the caller; "" as long as there is none.
        field_path: finds the field that an error is about.
        facts: for the details of errors about limits.
        on_failure: told of the status, when it is not OK, and of the error, which it logs.
    """

    def __init__(self, context: Context, num_bytes: int, max_bytes: int = 2**31 - 1) -> None:
        self.context = context
        self.num_bytes = num_bytes
        self.max_bytes = max_bytes
        self.request_id = ""
        self.field_path: Callable[[str], str] = lambda name: name
        self.facts: dict[str, object] = {}
        self.on_failure: Callable[[RpcStatus, Exception], None] = _log_bug

    def metadata(self, key: str) -> str:
        """A value that the caller sent, "" if it did not."""
        return next((str(v) for k, v in self.context.invocation_metadata() or () if k == key), "")

    async def write(self, message: Message) -> None:
        """Send a message of a stream."""
        await self.context.write(message.SerializeToString())

    async def check_size(self, num_bytes: int) -> None:
        """End the call if its answer is too large; as gRPC's own refusals: without an ErrorInfo."""
        if num_bytes <= self.max_bytes:
            return
        text = f"SERVER: answer larger than max ({num_bytes} vs. {self.max_bytes})"
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        self.on_failure(RpcStatus(code, text, (), ""), CupagedError(text))
        await self.context.abort(code, text)

    def failed(self, error: Exception, *, debug: bool = False) -> RpcStatus:
        """The status of an error that has ended the request."""
        status = status_of(error, field_path=self.field_path, facts=self.facts, debug=debug)
        if self.request_id:
            status = status.with_metadata((REQUEST_ID_KEY, self.request_id))
        self.on_failure(status, error)
        return status

    async def fail(self, error: Exception, *, debug: bool) -> None:
        """End the call with the status of an error; raises gRPC's AbortError."""
        await self.context.abort_with_status(self.failed(error, debug=debug))


def _log_bug(status: RpcStatus, error: Exception) -> None:
    if not isinstance(error, CupagedError):
        _logger.error("a call failed unexpectedly", exc_info=error)


def service_handler(
    service: Any, servicer: object, *, max_message_bytes: int, debug_errors: bool = False
) -> grpc.GenericRpcHandler:
    """The handler of a service.

    Args:
        service: its descriptor, such as `generation_pb2.DESCRIPTOR.services_by_name[...]`.
        servicer: has a coroutine method of the name of each RPC that it answers.
        max_message_bytes: the largest answer.
        debug_errors: INTERNAL errors carry a DebugInfo with the stack.
    """
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        kind = GetMessageClass(method.input_type)
        function = getattr(servicer, method.name, None)
        if function is None:
            continue  # of a later version of the service: UNIMPLEMENTED
        if method.client_streaming:
            both = _both_streaming(function, kind, max_message_bytes, debug_errors)
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(both)
        elif method.server_streaming:
            stream = _streaming(function, kind, debug_errors)
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(stream)
        else:
            unary = _unary(function, kind, max_message_bytes, debug_errors)
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(unary)
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


Method = Callable[[Any, Call], Awaitable[Any]]


def _unary(method: Method, kind: type[Message], max_bytes: int, debug: bool) -> Any:
    async def handle(data: bytes, context: Context) -> bytes:
        call = Call(context, len(data), max_bytes)
        try:
            response: Message = await method(parse(kind, data), call)
            answer = response.SerializeToString()
            await call.check_size(len(answer))
            return answer
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await call.fail(error, debug=debug)
            raise  # not reached: fail raises

    return handle


def _streaming(method: Method, kind: type[Message], debug: bool) -> Any:
    async def handle(data: bytes, context: Context) -> None:
        call = Call(context, len(data))
        try:
            await method(parse(kind, data), call)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await call.fail(error, debug=debug)

    return handle


def _both_streaming(method: Method, kind: type[Message], max_bytes: int, debug: bool) -> Any:
    """The method gets an iterator of (message, call), with a call for each message: its size, its
    request's id and errors. The call that ends the stream is the method's own."""

    async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
        async def read() -> AsyncIterator[tuple[Message, Call]]:
            async for data in requests:
                yield parse(kind, data), Call(context, len(data), max_bytes)

        call = Call(context, 0)
        try:
            await method(read(), call)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await call.fail(error, debug=debug)

    return handle
