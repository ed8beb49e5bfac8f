"""SamplingParams: what is refused, what is normalised; when a request is done. Rules are vLLM's."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4ward.errors import UserError
from fp4ward.runtime.request import Request, SamplingParams, generator


def test_defaults_are_vllms():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens) == (1, 1.0, 1.0, 0, 0.0, 16, 0)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (p.seed, p.stop, p.stop_token_ids, p.logprobs, p.prompt_logprobs) == (None, (), (), None, None)
    assert p.skip_special_tokens and not p.ignore_eos and not p.include_stop_str_in_output
    assert not p.greedy and not p.penalised


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("temperature", 10**400),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", False),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("n", 0),
        ("n", None),
        ("n", 2**31 - 1),  # would be so many sequences
        ("seed", 1.5),
        ("seed", 2**63),
        pytest.param("seed", 10**5000, id="seed-long"),
        pytest.param("stop_token_ids", [10**5000], id="stop-long"),
        ("stop", [1]),
        ("stop", b"x"),
        ("stop", {"a": 1}),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("max_tokens", 0),
        ("max_tokens", 16.0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 21),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_a_bad_value_is_refused_with_one_sentence_that_names_it(name, value):
    with pytest.raises(UserError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.text() | st.integers())
    | st.binary(),
)
def test_any_value_is_taken_or_refused_and_never_a_stack_trace(name, value):
    try:
        params = SamplingParams(**{name: value})
    except UserError:
        return
    assert hash(params) == hash(SamplingParams(**{name: value}))  # normalised: lists became tuples


def test_values_are_normalised():
    p = SamplingParams(
        top_k=-1, seed=-1, stop="x", stop_token_ids=[np.int64(3)], temperature=np.float32(0.5), n=np.int32(2)
    )
    assert (p.top_k, p.seed, p.stop, p.stop_token_ids, p.temperature, p.n) == (0, None, ("x",), (3,), 0.5, 2)
    assert type(p.n) is int and type(p.temperature) is float
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(temperature=1).temperature == 1.0
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=1e-6).greedy
    assert SamplingParams(max_tokens=None, min_tokens=99).max_tokens is None
    assert SamplingParams(frequency_penalty=0.1).penalised


def test_generation_config_gives_defaults_before_those_of_the_caller():
    file = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 77, "eos_token_id": 1}
    p = SamplingParams.from_generation_config(file)
    assert (p.temperature, p.top_p, p.top_k, p.max_tokens) == (0.6, 0.95, 20, 77)
    p = SamplingParams.from_generation_config({"top_p": 0.95}, top_p=0.5, max_tokens=None)
    assert (p.temperature, p.top_p, p.max_tokens) == (1.0, 0.95, None)
    # null is absent; without do_sample the temperature of the file still counts, as in vLLM
    p = SamplingParams.from_generation_config({"temperature": 0.7, "top_k": None, "min_p": 0.1, "num_beams": 4})
    assert (p.temperature, p.top_k, p.min_p) == (0.7, 0, 0.1)
    assert SamplingParams.from_generation_config({}) == SamplingParams()


def test_explicit_do_sample_false_is_greedy():
    p = SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6})
    assert p.greedy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("top_p", 2),
        ("max_new_tokens", 0),
        ("top_k", 1.5),
        ("do_sample", "yes"),
        ("min_p", math.nan),
    ],
)
def test_a_bad_value_in_generation_config_names_the_file_and_the_key(key, value):
    with pytest.raises(UserError, match=f"generation_config.json, key {key}"):
        SamplingParams.from_generation_config({key: value})


def test_the_same_seed_gives_the_same_stream_and_outputs_differ():
    seeded = SamplingParams(seed=7)
    first = generator(seeded, 0, 0).random()
    assert first == generator(seeded, 5, 9).random()  # the engine's seed and the counter do not matter
    assert first != generator(seeded, 0, 0, index=1).random()
    assert first != generator(SamplingParams(seed=-7), 0, 0).random()
    free = SamplingParams()
    draws = {generator(free, seed, count, i).random() for seed in range(3) for count in range(3) for i in range(3)}
    assert len(draws) == 27
    assert generator(free, 1, 2).random() == generator(free, 1, 2).random()


def request(**params) -> Request:
    return Request("r", [5, 6], SamplingParams(**params), eos_token_ids=(1, 2))


def run(r: Request, tokens, max_model_len: int = 100):
    for token in tokens:
        r.append(token)
        r.finish_if_done(max_model_len)
        if r.finished:
            break
    return r.finish_reason, r.stop_reason, r.output_token_ids


def test_every_end_token_ends_with_stop():
    assert run(request(), [3, 1, 4]) == ("stop", None, [3, 1])
    assert run(request(), [3, 2, 4]) == ("stop", None, [3, 2])


def test_ignore_eos_goes_on_but_stop_token_ids_still_end():
    assert run(request(ignore_eos=True, max_tokens=3), [1, 2, 1, 4]) == ("length", None, [1, 2, 1])
    assert run(request(ignore_eos=True, stop_token_ids=[2]), [1, 2]) == ("stop", 2, [1, 2])


def test_stop_token_id_is_the_stop_reason():
    assert run(request(stop_token_ids=[9]), [3, 9]) == ("stop", 9, [3, 9])


def test_max_tokens_and_context_end_with_length():
    assert run(request(max_tokens=2), [3, 3, 3]) == ("length", None, [3, 3])
    assert run(request(max_tokens=None), [3] * 9, max_model_len=6) == ("length", None, [3] * 4)
    assert run(request(max_tokens=2), [3, 1]) == ("stop", None, [3, 1])  # an end token as the last one is a stop


def test_min_tokens_keeps_end_and_stop_tokens_from_ending():
    r = request(min_tokens=3, max_tokens=5, stop_token_ids=[9])
    assert r.banned_until_min_tokens == (1, 2, 9)
    assert run(r, [1, 9, 3, 9]) == ("stop", 9, [1, 9, 3, 9])
    assert run(request(min_tokens=4, max_tokens=4), [1, 1, 1, 3]) == ("length", None, [1, 1, 1, 3])


def test_request_counts_its_tokens_and_can_fail_alone():
    r = request()
    r.append(8)
    assert r.num_tokens == 3 and r.tokens(1, 3) == [6, 8] and not r.finished
    r.fail("broken")
    assert r.finished and (r.finish_reason, r.error) == ("error", "broken")
    other = request()
    other.stop("###")
    assert (other.finish_reason, other.stop_reason) == ("stop", "###")
    assert r != other and len({r, other}) == 2  # requests are told apart by identity


def test_request_module_does_not_load_torch():
    code = "import sys; import fp4ward.runtime.request; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
