"""`LLM.beam_search` on a tiny model: outputs, texts, errors; and every bit in company on
`emulated`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cupaged import BeamSearchParams
from cupaged.errors import CapacityError, InvalidParameterError
from cupaged.llm import LLM
from cupaged.outputs import RequestOutput
from cupaged.request import CoreRequest
from cupaged.sampling_params import SamplingParams
from tests.e2e.cli import Inline
from tests.e2e.tiny_llm import OTHER, PROMPT, check_idle, complete
from tests.fast_runtime import fast_ops
from tests.forced import LoadedModel
from tests.tiny_models import TINIER, TINY, write_hf_folder

BEAMS = BeamSearchParams(beam_width=3, max_tokens=8)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_hf_folder(tmp_path_factory.mktemp("beams") / "tiny", TINY)
    return LLM(folder, num_gpu_blocks_override=64, max_num_seqs=8)


def search(
    llm: LLM, prompts: Any = PROMPT, params: BeamSearchParams = BEAMS
) -> list[RequestOutput]:
    return llm.beam_search(prompts, params, use_tqdm=False)


def test_outputs_stand_best_first_and_are_told_with_their_text(llm: LLM) -> None:
    (output,) = search(llm)
    assert output.finished and output.prompt == PROMPT
    assert [o.index for o in output.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 3
    sums = [o.cumulative_logprob for o in output.outputs]
    scores = [s / len(o.token_ids) for s, o in zip(sums, output.outputs, strict=True) if s]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    for each in output.outputs:
        assert each.text == llm.get_tokenizer().decode(each.token_ids)
        assert each.logprobs is not None
        assert [next(iter(position)) for position in each.logprobs] == each.token_ids
    check_idle(llm)


def test_log_probabilities_are_those_of_forced_decoding(llm: LLM) -> None:
    """Each output's sum is what the model gives to its tokens one by one."""
    for each in search(llm)[0].outputs:
        forced = complete(
            llm, trace_decode_token_ids=each.token_ids, max_tokens=8, logprobs=0, ignore_eos=True
        )
        assert forced.token_ids == each.token_ids
        assert each.cumulative_logprob == pytest.approx(forced.cumulative_logprob, abs=1e-3)


def test_one_beam_is_greedy_decoding(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    (only,) = search(llm, params=params)[0].outputs
    assert only.token_ids == complete(llm, max_tokens=8).token_ids


def test_several_prompts_at_once_are_what_they_are_alone(llm: LLM) -> None:
    """One of ids among them; more beams than may run at once."""
    prompts = [PROMPT, OTHER, {"prompt_token_ids": [5, 6, 7]}, PROMPT + " again"]
    together = search(llm, prompts)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = search(llm, prompt)
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in alone.outputs]
    check_idle(llm)


def test_the_text_of_the_eos_token(llm: LLM) -> None:
    """A token that the search draws is made the model's EOS."""
    eos = search(llm)[0].outputs[0].token_ids[3]
    shell = llm.engine._shell
    before, shell._eos_token_ids = shell._eos_token_ids, (eos,)
    try:
        plain, kept = (
            search(
                llm,
                params=BeamSearchParams(
                    beam_width=3, max_tokens=8, length_penalty=-1, include_stop_str_in_output=keep
                ),
            )[0].outputs
            for keep in (False, True)
        )
    finally:
        shell._eos_token_ids = before
    ended = [i for i, each in enumerate(plain) if each.finish_reason == "stop"]
    assert ended and plain[ended[0]].token_ids[-1] == eos
    decode = llm.get_tokenizer().decode
    assert plain[ended[0]].text == decode(plain[ended[0]].token_ids[:-1])
    assert kept[ended[0]].text == decode(plain[ended[0]].token_ids)


def test_an_abort_gives_what_is_there(llm: LLM) -> None:
    llm.engine.add_request("x", PROMPT, BEAMS)
    for _ in range(4):
        assert llm.engine.step() == []
    output = llm.engine.abort("x")
    assert output is not None and output.finished
    assert [len(each.token_ids) for each in output.outputs] == [4, 4, 4]
    assert {each.finish_reason for each in output.outputs} == {"abort"}
    assert all(each.text for each in output.outputs)
    check_idle(llm)


def test_what_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="a BeamSearchParams"):
        llm.beam_search(PROMPT, SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="beam_width must be at most 8"):
        search(llm, params=BeamSearchParams(beam_width=9, max_tokens=8))
    with pytest.raises(CapacityError, match=r"beam_width must be at most 1 .*64 blocks of 16"):
        search(llm, params=BeamSearchParams(beam_width=3, max_tokens=800))
    with pytest.raises(InvalidParameterError, match="priority"):
        llm.beam_search(PROMPT, BEAMS, priority=[1])
    check_idle(llm)


# ---- the command line ----------------------------------------------------------------------------


def test_answers_of_a_search_stand_under_headings(cupaged: Inline, cli_model: str) -> None:
    arguments = ("generate", cli_model, "-p", "the cat", "--beam-width", "2", "--max-tokens", "6")
    done = cupaged(*arguments)
    assert done.code == 0
    headings = [line for line in done.out.splitlines() if line.startswith("--- ")]
    assert headings == ["--- 1.1 (length)", "--- 1.2 (length)"]
    told = cupaged(*arguments, "--length-penalty", "0.5", "--early-stopping", "never", "--json")
    first, second = (json.loads(line) for line in told.out.splitlines())
    assert first["cumulative_logprob"] > second["cumulative_logprob"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--beam-width", "2"), "max_tokens must be given in a beam search"),
        (("--length-penalty", "2"), "beam_width must be given in a beam search"),
        (
            ("--beam-width", "2", "--max-tokens", "4", "--top-p", "0.5"),
            "top_p must be left out in a beam search",
        ),
        (("--early-stopping", "maybe"), "must be true, false or never"),
    ],
)
def test_options_that_do_not_go_together(
    cupaged: Inline, cli_model: str, arguments: tuple[str, ...], message: str
) -> None:
    done = cupaged("generate", cli_model, "-p", "a", *arguments)
    assert done.code == 2
    assert message in done.err


# ---- bits ----------------------------------------------------------------------------------------


def found(model: LoadedModel, asked: list[CoreRequest], **limits: Any) -> dict[str, list[Any]]:
    """Tokens and log probabilities of all outputs, and how often a request was preempted."""
    core = model.core(**{"num_blocks": 64, "max_model_len": 256, **limits})
    outputs: dict[str, list[Any]] = {request.request_id: [] for request in asked}
    for request in asked:
        core.add_request(request)
    while core.has_unfinished_requests:
        for output in core.step():
            told = [position.logprobs[0] for position in output.logprobs or ()]
            outputs[output.request_id].append((output.new_token_ids, told))
        core.audit()
    outputs["preemptions"] = [core.stats().num_preemptions_total]
    return outputs


def test_every_bit_is_the_same_alone_and_in_company(tmp_path: Path) -> None:
    """In chunks, beside others, beams in several steps, and after preemption."""
    model = LoadedModel(write_hf_folder(tmp_path / "tinier", TINIER), fast_ops("bfloat16"))
    beams = BeamSearchParams(beam_width=3, max_tokens=5)
    asked = CoreRequest(
        "beams", tuple(range(3, 17)), beams.sampling_params((7,)), (7,), beams=beams
    )
    other = CoreRequest("other", tuple(range(40, 52)), SamplingParams(max_tokens=10), seed=3)
    alone = found(model, [asked])["beams"]
    assert len(alone) == 3
    for limits in (
        {"max_num_batched_tokens": 5},
        {"num_blocks": 7, "block_size": 8, "watermark": 0.0, "max_num_batched_tokens": 20},
    ):
        company = found(model, [other, asked], **limits)
        assert company["beams"] == alone
    assert company["preemptions"] != [0]
