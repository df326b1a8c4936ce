"""The engine as a process: what it loads, serves, says when it dies, and that it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cupaged import LLM
from cupaged._version import __version__
from cupaged.config import EngineConfig
from cupaged.engine.core import EngineCore
from cupaged.errors import CapacityError, ConfigError, EngineDeadError, ModelNotFoundError
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from cupaged.server.engine_client import EngineClient
from cupaged.server.null_runner import PacedRunner
from cupaged.server.wire import error_from_wire
from cupaged.server.wire_forms import EngineInfo
from tests.server.engine_child import SECONDS, EngineChild
from tests.server.serving_loop import read_all, stats_of
from tests.tiny_models import EOS_ID, PAD_ID, TINIER, write_hf_folder
from tests.unit.small_core import tokens_of

OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 8, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tinier", TINIER)


def test_a_real_model(model: Path, tmp_path: Path) -> None:
    prompts = [tuple(range(3, 3 + n)) for n in (1, 17, 40)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    offline = LLM(model, **OPTIONS)
    expected = [
        offline.generate([{"prompt_token_ids": list(p)}], params, use_tqdm=False)[0]
        for p in prompts
    ]

    async def body() -> None:
        client = EngineClient(str(engine.socket))
        await client.connect()
        assert client.info is not None
        assert client.info.to_wire() == info
        streams = [client.submit(CoreRequest(str(i), p, params)) for i, p in enumerate(prompts)]
        for i, outputs in enumerate(await asyncio.gather(*map(read_all, streams))):
            assert tokens_of(outputs, str(i)) == expected[i].outputs[0].token_ids
        assert (await stats_of(client)).num_used_blocks == 0
        await client.call("audit")
        engine.send("stop")
        while client.state.phase != "dead":
            await asyncio.sleep(0.001)
        with pytest.raises(EngineDeadError):
            client.submit(CoreRequest("late", (1,), params))
        await client.close()

    with EngineChild(tmp_path, model, engine=OPTIONS, log_level="debug") as engine:
        _, info, seconds = engine.hear("loaded")
        told = EngineInfo.from_wire(info)
        assert told.model_path == told.model == str(model)
        assert (told.version, told.architecture) == (__version__, "LlamaForCausalLM")
        assert (told.device, told.dtype, told.pid) == ("cpu", "float32", engine.process.pid)
        assert told.eos_token_ids == (PAD_ID, EOS_ID)
        assert told.config.max_model_len == 128
        assert told.num_parameters > 10_000
        assert 0 < seconds == told.load_seconds
        engine.send("log_level", "warning")
        asyncio.run(asyncio.wait_for(body(), SECONDS))
        assert engine.process.wait(SECONDS) == 0
        assert "INFO engine - device cpu: " in engine.log()


def test_the_null_runner(model: Path, tmp_path: Path) -> None:
    """No weights are read, and the token that is drawn is text and no end."""

    async def body() -> None:
        client = EngineClient(str(engine.socket))
        await client.connect()
        assert client.info is not None
        assert (client.info.runner, client.info.device) == ("null", "none")
        params = SamplingParams(max_tokens=100)
        eos = client.info.eos_token_ids
        outputs = await read_all(client.submit(CoreRequest("a", (5, 6), params, eos)))
        tokens = tokens_of(outputs, "a")
        assert len(tokens) == 100
        assert len(set(tokens)) == 1
        assert not set(tokens) & {PAD_ID, EOS_ID}
        await client.close()

    settings = {"runner": "null", "null_steps_per_s": 2000.0, "engine": {"max_num_seqs": 300}}
    with EngineChild(tmp_path, model, **settings) as engine:
        info = EngineInfo.from_wire(engine.hear("loaded")[1])
        assert info.config.num_blocks == 300 * 1024 // 16
        asyncio.run(asyncio.wait_for(body(), SECONDS))
        engine.control.close()
        assert engine.process.wait(SECONDS) == 3  # the supervisor is gone


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("missing", {}, ModelNotFoundError, "missing"),
        ("tinier", {"max_model_len": 1}, ConfigError, "max_model_len must be an integer >= 2"),
        ("tinier", {"num_gpu_blocks_override": 2**40}, CapacityError, "num_gpu_blocks_override"),
    ],
)
def test_what_it_dies_of_while_loading(
    name: str,
    options: dict[str, int],
    error: type[Exception],
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with EngineChild(tmp_path, model.parent / name, engine={**OPTIONS, **options}) as engine:
        _, reason, form = engine.hear("dying")
        assert message in reason
        back = error_from_wire(form)
        assert type(back) is error
        assert str(back) == reason
        assert engine.process.wait(SECONDS) == 1
        assert "Traceback" not in engine.log()


def test_it_ends_when_the_supervisor_goes_while_it_loads(model: Path, tmp_path: Path) -> None:
    with EngineChild(tmp_path, model, engine=OPTIONS) as engine:
        engine.control.close()
        assert engine.process.wait(SECONDS) == 3


def test_a_paced_runner_keeps_its_pace() -> None:
    """On a clock of our own: what the loop needs between steps counts, a pause does not."""
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        now[0] += seconds

    config = EngineConfig(vocab_size=10, num_blocks=8, max_model_len=64)
    runner = PacedRunner(7, 10.0, clock=lambda: now[0], sleep=sleep)
    core = EngineCore(config, runner, clock=lambda: now[0])
    core.add_request(CoreRequest("a", (1, 2), SamplingParams(max_tokens=5)))
    ends = []
    for pause in (0.0, 0.03, 0.15, 0.02, 5.0):
        now[0] += pause
        (output,) = core.step()
        assert output.new_token_ids == [7]
        ends.append(round(now[0], 6))
    assert ends == [0.1, 0.2, 0.45, 0.55, 5.65]
    assert slept == [0.1, 0.07, 0.1, 0.08, 0.1]
