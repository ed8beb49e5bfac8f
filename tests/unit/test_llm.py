"""LLM as a user meets it: batches, streams, limits, errors. On a fixture, with a small tokenizer for text."""

from __future__ import annotations

import dataclasses
import json
import shutil
from itertools import pairwise, zip_longest

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fp4ward import LLM, SamplingParams
from fp4ward.errors import UserError
from tests.conftest import FIXTURES

FOLDER = FIXTURES / "q35moe-w4a16-modelopt"
IDS = list(range(3, 40, 2))


def make(folder=FOLDER, **kw) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "show_progress": False, **kw})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


@pytest.fixture(scope="module")
def texted(tmp_path_factory) -> LLM:
    """The fixture with a byte-level tokenizer of 400 tokens and a chat template."""
    folder = tmp_path_factory.mktemp("model") / "m"
    shutil.copytree(FOLDER, folder)
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special
    )
    t.train_from_iterator(["the cat sat on the mat and the dog ran over the hill " * 5], trainer)
    t.save(str(folder / "tokenizer.json"))
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    template = (
        "{% for m in messages %}" + turn + "{% endfor %}<|im_start|>assistant\n\n"
    )  # Jinja drops the last newline
    (folder / "chat_template.jinja").write_text(template)
    return make(folder)


def test_a_16_bit_type_on_a_cpu_is_told_to_be_slow_at_load(llm):
    assert "slow-dtype" not in {n.code for n in llm.notices}
    assert make(dtype="bfloat16").notices[0].code == "slow-dtype"  # first, since a terminal shows eight


def test_a_single_prompt_and_a_batch_take_the_same_form(llm):
    params = SamplingParams(temperature=0, max_tokens=4)
    (one,) = llm.generate(IDS, params)
    many = llm.generate([IDS, IDS[:3]], [params, SamplingParams(temperature=0, max_tokens=2)])
    assert one.outputs[0].token_ids == many[0].outputs[0].token_ids
    assert [len(o.outputs[0].token_ids) for o in many] == [4, 2]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in many)
    assert one.prompt_token_ids == IDS and one.outputs[0].text == ""


def test_seeded_samples_repeat_whatever_else_runs(llm):
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=8, ignore_eos=True)
    alone = llm.generate([IDS], params)[0].outputs[0].token_ids
    others = SamplingParams(temperature=1.0, max_tokens=5)
    assert llm.generate([IDS[:5], IDS, IDS[:2]], [others, params, others])[1].outputs[0].token_ids == alone
    n3 = llm.generate([IDS], SamplingParams(temperature=1.5, seed=7, max_tokens=8, ignore_eos=True, n=3))[0].outputs
    assert n3[0].token_ids == alone and len({tuple(o.token_ids) for o in n3}) == 3


def test_unseeded_samples_follow_the_engine_seed():
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    runs = [make(seed=s).generate([IDS], params)[0].outputs[0].token_ids for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_logprobs_and_prompt_logprobs_are_those_of_the_logits(llm):
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    (out,) = llm.generate([IDS], params)
    tokens = out.outputs[0].token_ids
    want = llm.logits(IDS + tokens).double().log_softmax(-1)
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(IDS)
    for t in range(1, len(IDS)):
        assert abs(out.prompt_logprobs[t][IDS[t]].logprob - want[t - 1, IDS[t]].item()) < 1e-4
        assert int(want[t - 1].argmax()) in out.prompt_logprobs[t]
    for t, (token, found) in enumerate(zip(tokens, out.outputs[0].logprobs, strict=True)):
        assert found[token].rank == 1 and len(found) == 2
        assert abs(found[token].logprob - want[len(IDS) - 1 + t, token].item()) < 1e-4
    total = sum(found[token].logprob for token, found in zip(tokens, out.outputs[0].logprobs, strict=True))
    assert out.outputs[0].cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_survive_chunked_prefill(llm):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    whole = llm.generate([IDS], params)[0].prompt_logprobs
    cut = make(max_num_batched_tokens=3, max_num_seqs=2).generate([IDS, IDS], params)
    for out in cut:
        for a, b in zip(whole[1:], out.prompt_logprobs[1:], strict=True):
            assert a.keys() == b.keys() and all(abs(a[t].logprob - b[t].logprob) < 1e-4 for t in a)


def test_prompt_logprobs_survive_preemption(llm):
    params = SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=0, ignore_eos=True)
    prompts = [IDS[i:] + IDS for i in range(4)]
    want = [o.prompt_logprobs for o in llm.generate(prompts, params)]
    small = make(
        max_model_len=72, block_size=8, kv_cache_memory_bytes=11 * 4096, max_num_batched_tokens=7, max_num_seqs=4
    )
    preempt, seen = small.engine.scheduler.preempt, []
    small.engine.scheduler.preempt = lambda r: (seen.append(r.computed < len(r.prompt_token_ids)), preempt(r))
    got = [o.prompt_logprobs for o in small.generate(prompts, params)]
    assert {*seen} == {True, False}  # some while their prompt was computed, some after
    for a, b in zip(want, got, strict=True):
        assert [x and x.keys() for x in a] == [x and x.keys() for x in b]
        assert all(abs(x[t].logprob - y[t].logprob) < 1e-3 for x, y in zip(a[1:], b[1:], strict=True) for t in x)


def test_end_tokens_end_and_can_be_ignored(llm):
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tokens = llm.generate([IDS], greedy)[0].outputs[0].token_ids
    stop = SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[tokens[2]])
    out = llm.generate([IDS], stop)[0].outputs[0]
    first = tokens.index(tokens[2])
    assert out.token_ids == tokens[: first + 1] and out.finish_reason == "stop" and out.stop_reason == tokens[2]
    assert llm.engine.eos_token_ids == (1,)


def test_streaming_gives_growing_snapshots_and_abandoning_it_frees_everything(llm):
    scheduler = llm.engine.scheduler
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    seen = [list(o.outputs[0].token_ids) for o in llm.stream(IDS, params)]
    assert [len(s) for s in seen] == [1, 2, 3, 4, 5] and all(a == b[:-1] for a, b in pairwise(seen))
    stream = llm.stream(IDS, params)
    next(stream)
    assert scheduler.running
    stream.close()
    assert not scheduler.running and scheduler.pages.free == scheduler.pages.size
    never_started = llm.stream(IDS, params)
    assert llm.engine.busy
    del never_started
    assert not llm.engine.busy and not llm._choices
    assert llm.generate([IDS], params)[0].outputs[0].token_ids == seen[-1]


def test_text_streams_equal_the_whole_and_stop_strings_end_it(texted):  # F35
    params = SamplingParams(temperature=1.2, seed=3, max_tokens=40, ignore_eos=True)
    full = texted.generate(["the cat"], params)[0].outputs[0]
    pieces = [o.outputs[0].text for o in texted.stream("the cat", params)]
    assert pieces[-1] == full.text and all(full.text.startswith(p) for p in pieces)
    stop = full.text[5:8]
    cut = texted.generate(["the cat"], SamplingParams(**{**vars(params), "stop": [stop]}))[0].outputs[0]
    assert cut.text == full.text[: full.text.index(stop)] and cut.finish_reason == "stop" and cut.stop_reason == stop
    assert texted.engine.scheduler.pages.free == texted.engine.scheduler.pages.size


def test_streams_read_in_turns_lose_nothing(texted):
    params = SamplingParams(temperature=1.2, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    jobs = [("the cat", dataclasses.replace(params, seed=1)), ("the dog ran", dataclasses.replace(params, seed=2))]
    want = [texted.generate([prompt], one)[0] for prompt, one in jobs]
    streams = [texted.stream(prompt, one) for prompt, one in jobs]
    seen = [[], []]
    for pair in zip_longest(*streams):
        for got, output in zip(seen, pair, strict=True):
            got += [output] if output else []
    for got, whole in zip(seen, want, strict=True):
        (a,), (b,) = got[-1].outputs, whole.outputs
        assert (a.text, a.token_ids, a.finish_reason) == (b.text, b.token_ids, b.finish_reason)
        assert [d.keys() for d in a.logprobs] == [d.keys() for d in b.logprobs]
        assert [d and d.keys() for d in got[-1].prompt_logprobs] == [d and d.keys() for d in whole.prompt_logprobs]
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob)
    assert not texted._choices


def test_chat_renders_the_template(texted):
    (out,) = texted.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert out.prompt_token_ids == texted.tokenizer.encode(text, add_special_tokens=False)


def test_several_conversations_are_one_batch_and_progress_counts_what_is_done(texted):
    turns = [[{"role": "user", "content": text}] for text in ("hi", "the cat", "a")]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 2, 9)]
    done = []
    together = texted.chat(turns, params, progress=done.append)
    assert done == [1, 2, 3]
    alone = [texted.chat(turn, one)[0] for turn, one in zip(turns, params, strict=True)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert [len(o.outputs[0].token_ids) for o in together] == [5, 2, 9]


def test_a_folder_without_tokenizer_says_what_is_missing(llm):
    for call in (
        lambda: llm.generate("hello"),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.generate([IDS], SamplingParams(stop=["x"])),
    ):
        with pytest.raises(UserError, match=r"no tokenizer\.json"):
            call()


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "empty"),
        ([[]], "empty"),
        ([[1, 512]], "token 1 is 512"),
        ([[-1]], "token 0 is -1"),
        ([[1, "a"]], "token 1 is 'a'"),
        ([[True]], "token 0 is True"),
        ([[1] * 5000], "5000 tokens"),
        ([3.5], "prompt is float"),
        (None, "prompt is NoneType"),
        (5, "prompt is int"),
        (b"ab", "prompt is bytes"),
        ([b"ab"], "prompt is bytes"),
    ],
)
def test_bad_prompts_are_refused_in_one_sentence(llm, prompt, says):
    with pytest.raises(UserError, match=says):
        llm.generate(prompt)
    assert not llm.engine.busy


def test_arguments_of_a_wrong_type_are_one_sentence(llm, texted):
    for call, says in (
        (lambda: llm.generate([IDS], [1]), "sampling_params is"),
        (lambda: llm.generate([IDS], {"temperature": 0}), "sampling_params is"),
        (lambda: llm.generate([IDS], 5), "sampling_params is"),
        (lambda: llm.stream([IDS, IDS]), "2 prompts for one stream"),
        (lambda: llm.logits(None), "prompt is NoneType"),
        (lambda: llm.logits("ab"), "takes token ids"),
        (lambda: texted.chat(None), "messages must be a list"),
        (lambda: texted.chat("hi"), "messages must be a list"),
    ):
        with pytest.raises(UserError, match=says):
            call()
    assert not llm.engine.busy and not texted.engine.busy


def test_an_interrupted_step_leaves_other_streams_right(llm):
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=8, ignore_eos=True)
    whole = llm.generate([IDS], params)[0].outputs[0].token_ids
    stream = llm.stream(IDS, params)
    next(stream)
    layers = llm.engine.runner.model.layers
    last = layers[-1]

    def interrupted(*args):
        raise KeyboardInterrupt  # when the states of the layers before are written

    layers[-1] = dataclasses.replace(last, mlp=interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([IDS[:5]], params)
    finally:
        layers[-1] = last
    assert [list(o.outputs[0].token_ids) for o in stream][-1] == whole
    assert not llm.engine.busy and llm.engine.scheduler.pages.free == llm.engine.scheduler.pages.size


def test_one_bad_prompt_leaves_nothing_behind(llm):
    with pytest.raises(UserError):
        llm.generate([IDS, [9999]])
    assert not llm.engine.busy


def test_a_row_of_nan_fails_alone(llm):  # F34
    run = llm.engine.runner.run

    def poisoned(work, every):
        logits = run(work, every).clone()
        for row, w in enumerate(work):
            if len(w.request.prompt_token_ids) == 3:
                logits[row] = float("nan")
        return logits

    llm.engine.runner.run = poisoned
    try:
        params = SamplingParams(temperature=0, max_tokens=3)
        good, bad = llm.generate([IDS, IDS[:3]], params)
    finally:
        llm.engine.runner.run = run
    assert bad.outputs[0].finish_reason == "error" and "not finite" in bad.outputs[0].error
    assert good.outputs[0].token_ids == llm.generate([IDS], params)[0].outputs[0].token_ids
    assert llm.engine.scheduler.pages.free == llm.engine.scheduler.pages.size


def test_unknown_settings_and_too_small_caches_are_refused():
    with pytest.raises(UserError, match="no setting 'quantization'"):
        make(quantization="awq")
    with pytest.raises(UserError, match="one page of 16 tokens"):
        make(kv_cache_memory_bytes=10)


def test_the_context_shrinks_to_the_cache_and_says_so_when_exceeded():
    model = make(kv_cache_memory_bytes=4 * 16 * 2 * 2 * 32 * 4)  # four pages
    assert model.engine.limits.max_model_len == 64
    with pytest.raises(UserError, match="context of 64"):
        model.generate([[1] * 64])
    assert (
        len(model.generate([[1] * 60], SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0].token_ids) == 4
    )


def test_generation_config_gives_defaults_and_all_end_tokens(tmp_path):
    folder = tmp_path / "m"
    shutil.copytree(FOLDER, folder)
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5, 9], "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(given))
    model = make(folder)
    d = model.default_sampling_params()
    assert (d.temperature, d.top_k, d.top_p, d.max_tokens) == (0.6, 20, 0.95, 3)
    assert model.engine.eos_token_ids == (5, 9)
    assert len(model.generate([IDS])[0].outputs[0].token_ids) <= 3


def test_float16_and_bfloat16_run(llm):
    want = llm.logits(IDS)
    for dtype in ("float16", "bfloat16"):
        got = make(dtype=dtype).logits(IDS)
        assert got.dtype == torch.float32 and torch.isfinite(got).all()
        assert (got - want).norm() / want.norm() < 0.3
