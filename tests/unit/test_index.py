"""The index of a checkpoint folder: which files count, and that no header, however broken, does harm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp4ward.checkpoint.index import INDEX_NAME, Index, modules, open_index, read_header
from fp4ward.errors import UserError
from fp4ward.facts import qwen3_5
from tests.build import FIXTURES, Checkpoint, Raw, header, write, write_index, write_raw

QUIET = settings(
    deadline=None, derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SMALL = {"a.weight": Raw.f32([1.0, 2.0]), "b.weight": Raw.fill("U8", (2, 3), 7), "c.scale": Raw.f32(0.5)}


def small(**documents: object) -> Checkpoint:
    return Checkpoint({"config.json": {"architectures": ["X"]}, **documents}, dict(SMALL))


def fault(folder: Path) -> str:
    """The one sentence that opening `folder` gives."""
    with pytest.raises(UserError) as e:
        open_index(folder)
    text = str(e.value)
    assert "\n" not in text and len(text) < 500, text
    return text


def codes(index: Index) -> list[tuple[str, str]]:
    return [(n.code, n.where) for n in index.notices]


# ---- which files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", sorted(p.name for p in FIXTURES.iterdir()))
def test_every_fixture_opens_and_its_test_reference_is_passed_over(fixture: str) -> None:
    index = open_index(FIXTURES / fixture)
    assert codes(index) == [("ignored-file", "reference.safetensors")]
    assert index.config["architectures"] and index.generation_config and "logits" not in index.tensors
    assert (index.hf_quant_config is None) == fixture.endswith("-ct")
    data = (FIXTURES / fixture / "model.safetensors").read_bytes()
    for t in index.tensors.values():
        assert t.end - t.begin == t.nbytes and t.end <= len(data)


@pytest.mark.parametrize(("shards", "with_index"), [(1, False), (1, True), (3, False), (3, True)])
def test_layouts_hold_the_same_tensors(tmp_path: Path, shards: int, with_index: bool) -> None:  # B28 F14
    index = open_index(small().save(tmp_path, shards=shards, index=with_index))
    assert index.tensors.keys() == SMALL.keys() and index.notices == ()
    for name, t in index.tensors.items():
        assert t.file.read_bytes()[t.begin : t.end] == SMALL[name].data
        assert (t.dtype, t.shape) == SMALL[name][:2]


@pytest.mark.parametrize("stem", ["model", "model.safetensors", "model-weights"])
def test_numbered_shards_must_be_complete(tmp_path: Path, stem: str) -> None:
    small().save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write(tmp_path / f"{stem}-00001-of-00003.safetensors", {"a": SMALL["a.weight"]})
    write(tmp_path / f"{stem}-00003-of-00003.safetensors", {"b": SMALL["b.weight"]})
    assert f"{stem}-00002-of-00003.safetensors is missing" in fault(tmp_path)
    write(tmp_path / f"{stem}-00002-of-00003.safetensors", {"c": SMALL["c.scale"]})
    assert len(open_index(tmp_path).tensors) == 3
    write(tmp_path / f"{stem}-00001-of-00002.safetensors", {"d": SMALL["c.scale"]})
    assert "two sets" in fault(tmp_path)


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("extra", ["mtp.safetensors", "extra_weights.safetensors", "mtp-00001-of-00001.safetensors"])
def test_extra_shards_are_read_and_reported(tmp_path: Path, extra: str, with_index: bool) -> None:  # B28
    small().save(tmp_path, index=with_index)
    write(tmp_path / extra, {"mtp.fc.weight": SMALL["a.weight"]})
    index = open_index(tmp_path)
    assert "mtp.fc.weight" in index.tensors and codes(index) == [("extra-shard", extra)]


def test_a_shard_that_the_index_forgot_is_read(tmp_path: Path) -> None:
    small().save(tmp_path, shards=2)
    write(tmp_path / "model_mtp.safetensors", {"mtp.fc.weight": SMALL["a.weight"]})
    assert codes(open_index(tmp_path)) == [("extra-shard", "model_mtp.safetensors")]


@pytest.mark.parametrize("name", ["consolidated.safetensors", "reference.safetensors", "models.safetensors"])
def test_other_files_are_passed_over_and_said(tmp_path: Path, name: str) -> None:
    small().save(tmp_path)
    (tmp_path / name).write_bytes(b"not even read")
    assert codes(open_index(tmp_path)) == [("ignored-file", name)]


def test_a_copy_of_indexed_tensors_is_passed_over(tmp_path: Path) -> None:
    small().save(tmp_path, shards=2)
    write(tmp_path / "model.safetensors", SMALL)
    index = open_index(tmp_path)
    assert codes(index) == [("duplicate-file", "model.safetensors")]
    assert all("-of-" in t.file.name for t in index.tensors.values())


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    small().save(tmp_path)
    write(tmp_path / "mtp.safetensors", {"mtp.x": SMALL["a.weight"], "a.weight": SMALL["a.weight"]})
    text = fault(tmp_path)
    assert "a.weight" in text and "model.safetensors" in text and "mtp.safetensors" in text


def test_tensors_that_the_index_does_not_name_are_read_and_said(tmp_path: Path) -> None:
    small().save(tmp_path)
    write_index(tmp_path, {"a.weight": "model.safetensors"})
    index = open_index(tmp_path)
    assert len(index.tensors) == 3 and codes(index) == [("unindexed-tensors", INDEX_NAME)]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a.weight": "model.safetensors", "zzz": "model.safetensors"}, "tensor 'zzz' is missing"),
        ({"a.weight": "model-x.safetensors"}, "model-x.safetensors is named by"),
        ({"a.weight": "../model.safetensors"}, "leads out of the folder"),
        ({"a.weight": "/etc/x.safetensors"}, "leads out of the folder"),
        ({"a.weight": "sub/x.safetensors"}, "leads out of the folder"),
        ({"a.weight": "sub\\x.safetensors"}, "leads out of the folder"),
        ({"a.weight": "..safetensors"}, "leads out of the folder"),
        ({"a.weight": "a\0b.safetensors"}, "leads out of the folder"),
        ({"a.weight": "x" * 5000 + ".safetensors"}, "is named by"),
        ({"a.weight": "pytorch_model.bin"}, "only safetensors"),
        ({"a.weight": 3}, "only safetensors"),
        ({}, "weight_map"),
    ],
)
def test_a_wrong_index(tmp_path: Path, weight_map: dict[str, str], words: str) -> None:
    small().save(tmp_path)
    write_index(tmp_path, weight_map)
    assert words in fault(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "not readable as JSON"),
        (b"[]", "no JSON object"),
        (b"{}", "weight_map"),
        (b'{"weight_map": [1]}', "weight_map"),
        (b'{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}', "'a' is given twice"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"\xff\xfe", "'utf-8' codec"),
        (b"9" * 5000, "not readable as JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS"),
    ],
)
def test_a_broken_index_file(tmp_path: Path, text: bytes, words: str) -> None:
    small().save(tmp_path)
    (tmp_path / INDEX_NAME).write_bytes(text)
    assert words in fault(tmp_path)


def test_an_index_against_stale_shards(tmp_path: Path) -> None:
    small().save(tmp_path, shards=2)
    names = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    write_index(tmp_path, {"a.weight": names[1], "b.weight": names[1], "c.scale": names[0]})
    assert "stale" in fault(tmp_path)


def test_folders_that_hold_no_checkpoint(tmp_path: Path) -> None:
    assert "no such folder" in fault(tmp_path / "nothing")
    assert "no model.safetensors" in fault(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "safetensors only" in fault(tmp_path)
    assert "this is a file" in fault(tmp_path / "pytorch_model.bin")
    write(tmp_path / "model.safetensors", SMALL)
    assert "config.json is missing" in fault(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "not a file" in fault(tmp_path)


def test_a_link_to_nothing_and_a_pipe(tmp_path: Path) -> None:
    small().save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert "link to nothing" in fault(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a file" in fault(tmp_path)


def test_json_documents(tmp_path: Path) -> None:
    folder = small().save(tmp_path)
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')  # F16
    assert open_index(folder).config["time_step_limit"][1] == float("inf")
    assert open_index(folder).hf_quant_config is None and open_index(folder).generation_config == {}
    for name in ("config.json", "hf_quant_config.json", "generation_config.json"):
        small().save(tmp_path)
        (folder / name).write_text("[1]")
        assert f"{name} is no JSON object" in fault(folder)
        (folder / name).write_bytes(b"\xff")
        assert name in fault(folder)
        (folder / name).write_text("{}")


# ---- one file -------------------------------------------------------------------------------------------------------


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


@pytest.mark.parametrize(
    ("head", "data", "words"),
    [
        ({"t": entry()}, b"123", "truncated: tensor t ends"),
        ({"t": entry()}, b"12345", "1 bytes follow"),
        ({"t": entry(offsets=(1, 5))}, b"12345", "leaves a gap of 1"),
        ({"t": entry(), "u": entry(offsets=(5, 9))}, b"123456789", "tensor u leaves a gap"),
        ({"t": entry(), "u": entry(offsets=(2, 6))}, b"123456", "tensor u overlaps"),
        ({"t": entry(offsets=(4, 0))}, b"1234", "data_offsets"),
        ({"t": entry(offsets=(0, 4, 4))}, b"1234", "data_offsets"),
        ({"t": entry(offsets=(0, True))}, b"1", "data_offsets"),
        ({"t": entry(offsets=None)}, b"1234", "data_offsets"),
        ({"t": entry(offsets=(0, 8))}, b"12345678", "takes 4 bytes"),
        ({"t": entry(shape=(5,))}, b"1234", "takes 5 bytes"),
        ({"t": entry(shape=(-4,))}, b"1234", "no list of"),
        ({"t": entry(shape=(2**62, 2**62))}, b"1234", "takes"),
        ({"t": entry(shape=(2**64,))}, b"1234", "no list of"),
        ({"t": entry(shape=(1,) * 9)}, b"1234", "no list of"),
        ({"t": entry(shape="4")}, b"1234", "no list of"),
        ({"t": entry(shape=(4.0,))}, b"1234", "no list of"),
        ({"t": entry(dtype="F4X")}, b"1234", "dtype 'F4X' is unknown"),
        ({"t": entry(dtype=["U8"])}, b"1234", "is unknown"),
        ({"t": entry(more=1)}, b"1234", "nothing else"),
        ({"t": {"dtype": "U8", "shape": [4]}}, b"1234", "nothing else"),
        ({"t": [1]}, b"1234", "nothing else"),
        ({"": entry()}, b"1234", "no tensor name"),
        ({"a\nb": entry()}, b"1234", "no tensor name"),
        ({"model." * 2000: entry()}, b"1234", "no tensor name"),
        ({"__metadata__": {"a": 1}, "t": entry()}, b"1234", "__metadata__"),
        ({"__metadata__": [], "t": entry()}, b"1234", "__metadata__"),
        ([], b"", "no JSON object"),
        (b"", b"", "not readable as JSON"),
        (b"{", b"", "not readable as JSON"),
        (b"\xff", b"", "'utf-8' codec"),
        (b'{"t": NaN}', b"", "NaN"),
        (b"[" * 200_000, b"", "not readable as JSON"),
        (b'{"a":' * 50_000, b"", "not readable as JSON"),
        (b'{"t":' + b"1" * 5000 + b"}", b"", "not readable as JSON"),
        (b'{"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"t":{}}', b"", "'t' is given twice"),
        (b'{"t":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"", "'dtype' is given twice"),
        ({}, b"", "hold no tensors"),
    ],
)
def test_a_broken_header(tmp_path: Path, head: object, data: bytes, words: str) -> None:
    small().save(tmp_path)
    write_raw(tmp_path / "model.safetensors", head, data)
    assert words in fault(tmp_path)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "0 bytes are too few"),
        (b"\0" * 7, "7 bytes are too few"),
        (b"\xff" * 8, "this is no safetensors file"),
        ((10**8 + 1).to_bytes(8, "little"), "this is no safetensors file"),
        ((10**8).to_bytes(8, "little") + b"{}", "truncated"),
        ((3).to_bytes(8, "little") + b"{}", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n", "Git LFS pointer"),
    ],
)
def test_a_broken_start_of_file(tmp_path: Path, raw: bytes, words: str) -> None:
    small().save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw)
    assert words in fault(tmp_path)


def test_zero_sized_tensors_and_every_dtype_are_legal(tmp_path: Path) -> None:
    head = {"e": entry(shape=[0, 5], offsets=[4, 4]), "t": entry(), "s": entry("F32", [], [4, 8])}
    found = read_header(write_raw(tmp_path / "x.safetensors", head, b"12345678"))
    assert found["s"].shape == () and found["e"].nbytes == 0


def tries_safely(folder: Path) -> None:
    try:
        assert isinstance(open_index(folder), Index)
    except UserError as e:
        assert "\n" not in str(e) and str(e).isprintable() and len(str(e)) < 600


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=5), c, max_size=3),
    max_leaves=8,
)


@QUIET
@given(raw=st.binary(max_size=200))
def test_any_bytes_give_a_sentence(tmp_path: Path, raw: bytes) -> None:
    small().save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw)
    tries_safely(tmp_path)


@QUIET
@given(at=st.integers(0, 300), byte=st.integers(0, 255), cut=st.integers(0, 400))
def test_any_damage_to_a_good_file_gives_a_sentence(tmp_path: Path, at: int, byte: int, cut: int) -> None:
    path = small().save(tmp_path) / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] = byte
    path.write_bytes(raw[: len(raw) - cut // 4])
    tries_safely(tmp_path)


@settings(QUIET, max_examples=60)
@given(head=json_values, data=st.binary(max_size=8))
def test_any_json_as_header_or_document_gives_a_sentence(tmp_path: Path, head: object, data: bytes) -> None:
    folder = small().save(tmp_path)
    write_raw(folder / "model.safetensors", head, data)
    tries_safely(folder)
    folder = small().save(tmp_path)
    (folder / "config.json").write_text(json.dumps(head))
    tries_safely(folder)
    folder = small().save(tmp_path)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": head}))
    tries_safely(folder)
    (folder / INDEX_NAME).unlink()


@QUIET
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=4),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["U8", "F32", "F8_E4M3", "Q7"]),
                "shape": st.lists(st.integers(-1, 5) | st.just(2**62), max_size=3),
                "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3),
            }
        ),
        max_size=3,
    )
)
def test_headers_that_look_right_are_read_only_if_they_are(tmp_path: Path, head: dict[str, object]) -> None:
    write_raw(tmp_path / "model.safetensors", head, b"\0" * 40)
    try:
        found = read_header(tmp_path / "model.safetensors")
    except UserError:
        return
    assert sum(t.nbytes for t in found.values()) == 40


def test_a_claimed_size_is_never_allocated(tmp_path: Path) -> None:
    small().save(tmp_path)
    huge = {"t": entry("F32", [2**30, 2**30], [0, 2**62])}
    for path, length in (("a", None), ("b", 99_999_999), ("c", 2**63)):
        write_raw(tmp_path / path, huge, b"1234", length=length)
    (tmp_path / "big").write_bytes((90_000_000).to_bytes(8, "little") + b"{")
    os.truncate(tmp_path / "big", 10**9)  # sparse: a header length that fits the file would be read
    write_raw(tmp_path / "d", {"t": entry("U8", [10**9], [0, 10**9])})
    os.truncate(tmp_path / "d", (tmp_path / "d").stat().st_size + 10**9)
    tracemalloc.start()
    for path in "abc":
        with pytest.raises(UserError):
            read_header(tmp_path / path)
    assert read_header(tmp_path / "d")["t"].nbytes == 10**9
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_74_000_tensors_take_a_second(tmp_path: Path) -> None:
    """A fifth of the largest published model (370,000), which takes 4 s. The bound leaves room for a busy machine."""
    small().save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    count, per = 37, 2_000
    one = Raw.fill("U8", (1, 1), 0)
    mapping: dict[str, str] = {}
    for i in range(count):
        file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        names = [f"model.language_model.layers.{i}.mlp.experts.{e}.gate_proj.weight_scale" for e in range(per)]
        write_raw(tmp_path / file, header(dict.fromkeys(names, one)), b"\0" * per)
        mapping |= dict.fromkeys(names, file)
    write_index(tmp_path, mapping)
    begin = time.process_time()
    index = open_index(tmp_path)
    assert len(index.tensors) == count * per
    assert len(modules(index, qwen3_5.canonical)) == count * per
    assert time.process_time() - begin < 5


# ---- names ----------------------------------------------------------------------------------------------------------


def test_modules_are_canonical_whoever_wrote_them(tmp_path: Path) -> None:  # B23 F10
    c = small()
    c.tensors = {
        "model.language_model.layers.0.linear_attn.A_log": SMALL["a.weight"],
        "language_model.model.layers.0.mlp.experts.gate_up_proj": SMALL["a.weight"],
        "model.layers.1.mlp.gate.weight": SMALL["a.weight"],
        "model.visual.pos_embed.weight": SMALL["a.weight"],
        "lm_head.weight": SMALL["a.weight"],
    }
    found = modules(open_index(c.save(tmp_path)), qwen3_5.canonical)
    assert {m: list(leaves) for m, leaves in found.items()} == {
        "layers.0.linear_attn": ["A_log"],
        "layers.0.mlp.experts": ["gate_up_proj"],
        "layers.1.mlp.gate": ["weight"],
        "visual.pos_embed": ["weight"],
        "lm_head": ["weight"],
    }


def test_two_names_for_one_weight(tmp_path: Path) -> None:  # B23
    c = small()
    c.tensors = {"model.layers.0.x.weight": SMALL["a.weight"], "layers.0.x.weight": SMALL["a.weight"]}
    index = open_index(c.save(tmp_path))
    with pytest.raises(UserError, match=r"model\.layers\.0\.x\.weight and layers\.0\.x\.weight are two names"):
        modules(index, qwen3_5.canonical)


def test_no_torch_is_needed() -> None:
    code = "import sys, fp4ward.checkpoint.index, fp4ward.checkpoint.assign; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
