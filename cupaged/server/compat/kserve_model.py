"""A model as `inference.GRPCInferenceService` describes it: its tensors and its state.

The tensors are those of Triton's vLLM backend; for some of them, and for more parameters, the names
of the TensorRT-LLM backend are understood, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cupaged.server.compat.interface import Interface
from cupaged.server.request_intake import RequestIntake
from cupaged.server.service_errors import UnknownModelError

VERSION = "1"  # of every model
NAME = "cupaged"  # of platform and backend


class Tensor(NamedTuple):
    """Data type on the wire, and one element (1) or any number (-1)."""

    datatype: str
    size: int = 1


INPUTS = {
    "text_input": Tensor("BYTES"),
    "stream": Tensor("BOOL"),
    "sampling_parameters": Tensor("BYTES"),
    "exclude_input_in_output": Tensor("BOOL"),
    "return_finish_reason": Tensor("BOOL"),
    "return_cumulative_logprob": Tensor("BOOL"),
    "return_logprobs": Tensor("BOOL"),
    "return_num_input_tokens": Tensor("BOOL"),
    "return_num_output_tokens": Tensor("BOOL"),
    "max_tokens": Tensor("INT32"),
    "min_tokens": Tensor("INT32"),
    "num_return_sequences": Tensor("INT32"),
    "temperature": Tensor("FP32"),
    "top_k": Tensor("INT32"),
    "top_p": Tensor("FP32"),
    "repetition_penalty": Tensor("FP32"),
    "presence_penalty": Tensor("FP32"),
    "frequency_penalty": Tensor("FP32"),
    "seed": Tensor("UINT64"),
    "stop_words": Tensor("BYTES", -1),
    "bad_words": Tensor("BYTES", -1),
}
OUTPUTS = {
    "text_output": Tensor("BYTES", -1),
    "finish_reason": Tensor("BYTES", -1),
    "cumulative_logprob": Tensor("FP32", -1),
    "logprobs": Tensor("BYTES", -1),
    "num_input_tokens": Tensor("UINT32"),
    "num_output_tokens": Tensor("UINT32", -1),
}
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}  # others are TYPE_ and the name on the wire


class ModelDescription:
    """Answers what is asked about the model.

    Args:
        interface: makes the messages.
        intake: of this front end.
    """

    def __init__(self, interface: Interface, intake: RequestIntake) -> None:
        self._message = interface.message
        self._model = intake.model
        self._intake = intake

    def check(self, name: str, version: str) -> str:
        """The name as answers carry it.

        Raises:
            UnknownModelError: there is no such model, or version of it.
        """
        self._model.check_name(name)
        if version not in ("", VERSION):
            raise UnknownModelError("model_version", version, f"{VERSION!r}, or empty")
        return name or self._model.name

    def has(self, name: str, version: str) -> bool:
        """Whether there is such a model."""
        return name in self._model.names and version in ("", VERSION)

    def metadata(self, name: str, version: str) -> Any:
        """Its tensors, as ModelMetadataResponse."""
        kind = self._message("ModelMetadataResponse.TensorMetadata")
        tensors = (
            [kind(name=n, datatype=t.datatype, shape=[t.size]) for n, t in table.items()]
            for table in (INPUTS, OUTPUTS)
        )
        inputs, outputs = tensors
        return self._message("ModelMetadataResponse")(
            name=self.check(name, version),
            versions=[VERSION],
            platform=NAME,
            inputs=inputs,
            outputs=outputs,
        )

    def config(self, name: str, version: str) -> Any:
        """The same as ModelConfigResponse; it tells that a request may have many answers."""
        make_input, make_output = self._message("ModelInput"), self._message("ModelOutput")
        config = self._message("ModelConfig")(
            name=self.check(name, version),
            platform=NAME,
            backend=NAME,
            model_transaction_policy={"decoupled": True},
            input=[
                make_input(
                    name=n, data_type=_config_type(t), dims=[t.size], optional=n != "text_input"
                )
                for n, t in INPUTS.items()
            ],
            output=[
                make_output(name=n, data_type=_config_type(t), dims=[t.size])
                for n, t in OUTPUTS.items()
            ],
        )
        return self._message("ModelConfigResponse")(config=config)

    def index(self, *, only_ready: bool) -> Any:
        """Every name it is served under, as RepositoryIndexResponse."""
        is_ready = self._intake.is_ready
        kind = self._message("RepositoryIndexResponse.ModelIndex")
        state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", self._reason())
        names = () if only_ready and not is_ready else self._model.names
        models = [kind(name=n, version=VERSION, state=state, reason=reason) for n in names]
        return self._message("RepositoryIndexResponse")(models=models)

    def _reason(self) -> str:
        return str(self._intake.client.state.error() or "the server is not ready")


def _config_type(tensor: Tensor) -> str:
    return _CONFIG_TYPES.get(tensor.datatype, f"TYPE_{tensor.datatype}")
